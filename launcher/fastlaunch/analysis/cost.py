"""Hours and dollars of a training, part by part, from the request to the last step.

Every part says whether its seconds were measured, predicted or assumed. Dollars without time are listed or
assumed. Waiting for capacity takes time but is not billed.

Intervals: the inputs with an interval are samples and samples per second, and on spot also losses and
availability. An input moves all parts that depend on it together; inputs are independent of each other. So
the deviation of a total is the root of the sum of squares over the inputs, above and below separately.
One-off parts have no interval. A total has no interval if samples per second has none. On spot, the interval
is of the mean, not of one training's luck.
"""

import datetime
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fastlaunch.analysis.account import ONCE, Account, account_of_row
from fastlaunch.analysis.pooling import BARE_STEP, STEP, samples_per_step
from fastlaunch.analysis.pricing import SECONDS_PER_HOUR
from fastlaunch.analysis.rate import Evidence, Rate, rate_of_row
from fastlaunch.analysis.verdicts import TRAINING
from fastlaunch.catalog.hardware import TRAINING_PLAN
from fastlaunch.catalog.prices import Price, VolumePrice
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.units import parse_duration_s
from fastlaunch.measure.summary import Interval
from fastlaunch_train.recipes.recipe import Recipe

if TYPE_CHECKING:
    from fastlaunch.analysis.compare import Row
    from fastlaunch.analysis.spot import SpotJob, SpotMarket

#: The evidence of a part: a rate's, a price list, or none.
PartEvidence = Evidence | Literal["listed", "assumed"]
#: Refuse a training that losses on spot make longer than this.
_MOST_TIMES_ITS_WORK = 50.0
CAPACITY_BLOCK, SPOT = "capacity-block", "spot"

#: EC2 ends the instances of a capacity block half an hour before the block ends.
#: docs.aws.amazon.com/AWSEC2, "Capacity Blocks for ML", as are the lengths below, read 2026-11.
BLOCK_END_HOURS = 0.5
_BLOCK_DAYS: tuple[int, ...] = (*range(1, 15), *range(21, 183, 7))

_NEVER_MEASURED = "a guess, not measured"
_SHIPPED = "90% of the shipped runs took less (H100 and H200, 2026-11)"


def _assumed(default: float | None, what: str, source: str, *, once_a_machine: bool = False) -> Any:
    """Return a field of Assumptions. source: where its default is from.

    once_a_machine: it does not recur for the next job on the same machine.
    """
    return field(default=default, metadata={"what": what, "source": source, "once_a_machine": once_a_machine})


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Values to assume where nothing was measured; a field named in `given` overrides measurements.

    Names end with the unit. Raises UserError for a negative or infinite number.
    """

    waiting_s: float = _assumed(0.0, "waiting for capacity, not billed", "AWS has it at once")
    boot_s: float = _assumed(
        180.0, "from the start of a machine to its first script", _NEVER_MEASURED, once_a_machine=True
    )
    pull_s: float = _assumed(300.0, "fetching code, image and inputs", _NEVER_MEASURED, once_a_machine=True)
    build_s: float = _assumed(23.0, "building model and data", _SHIPPED)
    compile_s: float = _assumed(20.0, "compiling, by a recipe that compiles", _SHIPPED)
    warmup_s: float = _assumed(1.6, "by how much the first steps are slower, together", _SHIPPED)
    evaluation_s: float = _assumed(0.0, "one evaluation on held-out data", _NEVER_MEASURED)
    evaluations: float = _assumed(0.0, "how many of them", "none is asked for")
    checkpoint_s: float = _assumed(5.0, "for which the steps stop for one checkpoint", _NEVER_MEASURED)
    checkpoint_every_s: float = _assumed(0.0, "from one to the next; 0 for none", "none is asked for")
    scaling: float = _assumed(
        1.0,
        "of a GPU's throughput, what is kept on other numbers of GPUs than measured",
        "linear, and 0.95 for each doubling of the nodes",
    )
    volume_gib: float = _assumed(200.0, "root volume of a node", "what submit asks for")
    volume_mibps: float = _assumed(500.0, "its throughput in MiB/s", "what submit asks for")
    storage_gib: float = _assumed(0.0, "data and checkpoints kept in S3", "nothing is kept")
    storage_months: float = _assumed(1.0, "for how long", "a month")
    storage_usd_per_gib_month: float = _assumed(
        0.023, "price of that", "S3 Standard, us-east-1, first 50 TB: aws.amazon.com/s3/pricing"
    )
    transfer_gb: float = _assumed(0.0, "data out of AWS", "nothing is brought home")
    transfer_usd_per_gb: float = _assumed(
        0.09, "price of that", "to the internet, us-east-1, first 10 TB: aws.amazon.com/ec2/pricing/on-demand"
    )
    spot_losses_per_hour: float | None = _assumed(
        None, "of an instance on spot", "your own runs, or --spot-trace"
    )
    spot_available: float = _assumed(1.0, "share of time in which spot can be had", "given with the losses")
    restart_s: float = _assumed(0.0, "start of the next machine on spot; 0: as the first", "as measured")
    deadline_s: float = _assumed(0.0, "on spot: on demand in time to end by then; 0 for never", "none")
    block_hours: float = _assumed(
        0.0, "length of the capacity block; 0 for the shortest that fits", "AWS sells whole days"
    )
    given: frozenset[str] = frozenset()  # the fields that the user has set

    def __post_init__(self) -> None:
        for name in ASSUMED:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise UserError(f"{name.removesuffix('_s')} is assumed to be {value:g}", "give 0 or more")
        if not self.scaling:
            raise UserError("no throughput is kept with a scaling of 0", "give more, such as 0.95")

    @property
    def timeless(self) -> Mapping[str, tuple[float, str]]:
        """Return the dollars of each part that takes no time and does not depend on it, and their source."""
        storage_usd = self.storage_gib * self.storage_months * self.storage_usd_per_gib_month
        transfer_usd = self.transfer_gb * self.transfer_usd_per_gb
        return {
            "storage": (storage_usd, self.source("storage_gib")),
            "transfer": (transfer_usd, self.source("transfer_gb")),
        }

    def for_next_job(self) -> "Assumptions":
        """Return them for another job on the same machine, which has started by then."""
        names = [field.name for field in fields(self) if field.metadata.get("once_a_machine")]
        return replace(self, **dict.fromkeys(names, 0.0), given=self.given.union(names))

    def source(self, *names: str) -> str:
        """Return the source of the fields' values: `as given`, or the last field's default source."""
        return "as given" if self.given.intersection(names) else ASSUMED[names[-1]][1]


#: Field of Assumptions -> (meaning, source of the default).
ASSUMED: Mapping[str, tuple[str, str]] = {
    assumption.name: (assumption.metadata["what"], assumption.metadata["source"])
    for assumption in fields(Assumptions)
    if assumption.metadata
}


def parse_assumptions(texts: Iterable[str]) -> Assumptions:
    """Read texts such as `boot=300s`, `waiting=2h` or `storage_gib=500`; a time without a unit is in seconds.

    Raises UserError for other text, UnknownName for an unknown name.
    """
    by_name = {name.removesuffix("_s"): name for name in ASSUMED}
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"{text!r} is not NAME=VALUE", "give one such as boot=300s")
        if name not in by_name:
            raise UnknownName("assumption", name, by_name)
        values[by_name[name]] = _number(value, is_time=by_name[name].endswith("_s"))
    return Assumptions(**values, given=frozenset(values))


def _number(text: str, *, is_time: bool) -> float:
    try:
        return float(text)
    except ValueError:
        if is_time:
            return parse_duration_s(text)
        raise UserError(f"{text!r} is not a number", "give one such as 12 or 0.5") from None


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training on one candidate, and its speed."""

    samples: Interval  # exact without low and high
    rate: Rate
    num_nodes: int = 1
    #: The seconds before and between the steps of similar runs; None if only the speed is known.
    account: Account | None = None
    samples_per_step: float = 1.0  # over all nodes, as in the account
    compiles: bool = True  # whether to assume compile time if it was not measured
    checkpoint_every: int | None = None  # steps, 0 for none; None: as in similar runs

    @property
    def saving(self) -> tuple[float, float] | None:
        """The seconds for which a checkpoint stops the steps, and is written beside them, as measured."""
        measured = self.account.between["checkpoints"] if self.account else None
        if measured is None or measured.every is None:
            return None
        return measured.s_per_step * measured.every, measured.beside_s


def training_of(
    rate: Rate,
    recipe: Recipe | str,
    samples: Interval,
    *,
    num_nodes: int,
    global_batch: float,
    checkpoint_every: int | None = None,
) -> Training:
    """Return the training of `samples` at the rate. global_batch: used if the runs do not record one."""
    return Training(
        samples=samples,
        rate=rate,
        num_nodes=num_nodes,
        account=account_of_row(rate.row) if rate.row else None,
        samples_per_step=samples_per_step(rate.row.group) if rate.row else global_batch,
        compiles=isinstance(recipe, str) or recipe.compiles,  # a script may
        checkpoint_every=checkpoint_every,
    )


@dataclass(frozen=True, kw_only=True)
class Purchase:
    """How the machines are bought."""

    price: Price  # of one node
    #: This account's cost of a node hour if it differs from the price; 0 for a sunk cost.
    usd_per_hour: float | None = None
    volume: VolumePrice | None = None  # None if unknown; volumes then do not count
    market: "SpotMarket | None" = None  # losses and availability of spot
    on_demand_usd_per_hour: float | None = None  # of a node, after a deadline ends the search for spot

    @property
    def paid_usd_per_hour(self) -> float:
        return self.price.usd_per_hour if self.usd_per_hour is None else self.usd_per_hour

    def usd_per_s(self, num_nodes: int) -> float:
        """Return the cost of a second of all nodes, without volumes."""
        return self.paid_usd_per_hour * num_nodes / SECONDS_PER_HOUR


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a training: wall-clock seconds, dollars, and their evidence."""

    name: str
    seconds: Interval | None  # None for dollars without time
    usd: Interval
    evidence: PartEvidence
    source: str


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Hours from the request to the end, and dollars. A capacity block is paid for as a whole."""

    hours: Interval
    usd: Interval
    block_hours: float | None = None  # length of the capacity block to buy
    fee_usd: float | None = None  # of the whole block; sunk once bought
    effective_usd: Interval  # without the unused part of the block
    spot_job: "SpotJob | None" = None  # the training as `spot.forecast_spot` takes it
    #: They add up to `hours` and `usd`; empty if only the sums were requested.
    parts: tuple[Part, ...] = ()

    @property
    def assumed_s(self) -> Mapping[str, float]:
        """The seconds of the parts that take time and that nobody measured or predicted."""
        return {
            part.name: part.seconds.value
            for part in self.parts
            if part.evidence == "assumed" and part.seconds and part.seconds.value
        }

    @property
    def checkpoint_every_s(self) -> float | None:
        """The work between two checkpoints on spot, as given or by Young; None without checkpoints."""
        return self.spot_job.every_s if self.spot_job else None


@dataclass(frozen=True, kw_only=True)
class Finish:
    """A job on one row of a comparison, with as many samples as the baseline's steps have."""

    row: "Row"
    steps: float
    rate: Rate | None  # None if its runs give no speed
    cost: Cost | None  # its dollars are meaningless if the row has no price


@dataclass(frozen=True, kw_only=True)
class ExpectedJob:
    """A job and its speed; jobs that differ only in their seed are one."""

    name: str
    num_runs: int
    step_time_s: float
    rate: Rate


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Time and cost of jobs, one after another, on one machine or its nodes, with 90% ranges."""

    hours: Interval  # from the request to the last step; no range if it is narrower than what is assumed
    usd: Interval
    assumed_s: Mapping[str, float]  # as of `Cost`
    jobs: tuple[ExpectedJob, ...]
    bytes_per_token: Interval | None = None  # of text, by which epochs were counted; None for steps


def together(parts: Sequence[Interval]) -> Interval:
    """Return the sum of quantities that vary together."""
    lows, highs = [part.low for part in parts], [part.high for part in parts]
    return Interval(
        value=sum(part.value for part in parts),
        low=None if None in lows else sum(filter(None, lows)),
        high=None if None in highs else sum(filter(None, highs)),
    )


#: The fields of Assumptions for the parts between the steps.
_FIELDS = {
    "evaluations": ("evaluation_s", "evaluations"),
    "checkpoints": ("checkpoint_s", "checkpoint_every_s"),
}


class _Line(NamedTuple):
    """A part in numbers: fixed + samples x (per_sample + per_step_time / samples per second), in seconds."""

    name: str
    fixed_s: float
    per_sample_s: float
    per_step_time: float
    evidence: PartEvidence
    source: str


class _Charged(NamedTuple):
    """A part that takes time, and the cost of its seconds on all nodes."""

    name: str
    evidence: PartEvidence
    source: str
    usd_per_s: float  # of the machines
    has_machine: bool = True  # whose volumes are paid, too
    takes_time: bool = True  # False for seconds that another part has


@dataclass(frozen=True, kw_only=True)
class _Times:
    """Mean seconds of the parts, and how far each uncertain input moves them."""

    parts: Sequence[_Charged]
    mean: Sequence[float]
    least: Sequence[float]  # that no input undercuts
    #: By input, the seconds at both ends of its interval; None if the speed has no interval.
    ends: Sequence[tuple[Sequence[float], Sequence[float]]] | None
    job: "SpotJob | None" = None

    def total(self, weight: Callable[[_Charged], float]) -> Interval:
        """Return the sum of weight x seconds over the parts."""
        weights = [weight(part) for part in self.parts]

        def weighted(seconds: Sequence[float]) -> float:
            return sum(factor * time_s for factor, time_s in zip(weights, seconds, strict=True) if factor)

        value, least = weighted(self.mean), weighted(self.least)
        if self.ends is None:
            return _exactly(value) if value == least else Interval(value=value)
        moves = [(weighted(low) - value, weighted(high) - value) for low, high in self.ends]
        below = math.hypot(*(min(0.0, *move) for move in moves))
        above = math.hypot(*(max(0.0, *move) for move in moves))
        return Interval(value=value, low=max(least, value - below), high=value + above)

    def of(self, part: _Charged, factor: float) -> Interval:
        """Return factor x seconds of one part."""
        return self.total(lambda other: factor if other is part else 0.0)


def _ends(
    seconds: Callable[..., Sequence[float]],
    at: Sequence[float],
    ranges: Sequence[tuple[float | None, float | None]],
) -> list[tuple[Sequence[float], Sequence[float]]]:
    """Return `seconds` at both ends of each input that has an interval, with the other inputs as in `at`."""
    return [
        (seconds(*at[:number], low, *at[number + 1 :]), seconds(*at[:number], high, *at[number + 1 :]))
        for number, (low, high) in enumerate(ranges)
        if low is not None and high is not None and low != high
    ]


def _ranges(training: Training) -> list[tuple[float, float]] | None:
    """Return the limits of samples and of seconds per sample; None if one of them has no interval."""
    samples, rate = training.samples, training.rate.samples_per_s
    few, many = samples.low, samples.high
    if few is None and many is None:
        few = many = samples.value
    if few is None or many is None or rate.low is None or rate.high is None:
        return None
    return [(few, many), (1 / rate.high, 1 / rate.low)]


#: A placeholder price, to compute the hours of a row without a price.
_UNPRICED = Price(
    instance="none", service="ec2", region="none", usd_per_hour=1.0, as_of=datetime.date.min, source="none"
)


def to_finish(
    rows: Sequence["Row"], steps: float, volume_of: Callable[[str], VolumePrice | None]
) -> list[Finish]:
    """Return the cost on each row of a workload of a job that is `steps` of the baseline's steps long.

    volume_of: as `cost_of_row` takes it. Raises UserError for a number of steps that is not above 0.
    """
    if not (math.isfinite(steps) and steps > 0):
        raise UserError(f"{steps:g} steps are no job", "give a number of steps above 0")
    # If all rows are barred, none has the verdict `baseline`, but the others are still compared with one.
    base = max(rows, key=lambda row: (row.is_baseline, row.verdict.comparable_as == TRAINING))
    samples = steps * _samples_of_step(base)
    finishes = []
    for row in rows:
        rate, cost = cost_of_row(row, Interval(value=samples), volume_of) or (None, None)
        finishes.append(Finish(row=row, steps=samples / _samples_of_step(row), rate=rate, cost=cost))
    return finishes


def cost_of_row(
    row: "Row", samples: Interval, volume_of: Callable[[str], VolumePrice | None]
) -> tuple[Rate, Cost] | None:
    """Return the cost of training `samples` samples where a row is charged; None without a speed.

    Machines are charged by the hour, and spot without losses. volume_of: returns a region's volume price.
    The dollars are meaningless if the row has no price.
    """
    rate = rate_of_row(row)
    if rate is None:
        return None
    training = training_of(
        rate,
        row.setup.known_recipe or row.setup.recipe,
        samples,
        num_nodes=row.setup.num_nodes,
        global_batch=_samples_of_step(row),
    )
    price = replace(row.price or _UNPRICED, purchase="on-demand")
    bought = Purchase(price=price, volume=volume_of_row(row, volume_of))
    return rate, cost_of(training, bought, assumptions=assumptions_of_row(row))


def is_on_cloud(row: "Row") -> bool:
    """Return whether a job of the row boots a machine of AWS: where it ran, or as which it is charged."""
    return row.setup.instance is not None or (row.price is not None and row.price.basis == "named")


def assumptions_of_row(row: "Row") -> Assumptions:
    """Return what to assume about a job of the row: your own machine neither boots nor pulls an image."""
    return Assumptions() if is_on_cloud(row) else replace(Assumptions(), boot_s=0.0, pull_s=0.0)


def volume_of_row(row: "Row", volume_of: Callable[[str], VolumePrice | None]) -> VolumePrice | None:
    """Return the price of the volumes that a job of the row pays for; None if it pays for none."""
    return volume_of(row.price.region) if row.price and is_on_cloud(row) else None


def usd_per_s_of_row(row: "Row", volume_of: Callable[[str], VolumePrice | None]) -> float | None:
    """Return what a second of all nodes of the row costs, with their volumes; None without a price."""
    if row.price is None:
        return None
    volume = volume_of_row(row, volume_of)
    volume_usd_per_s = _volume_usd_per_s(volume, assumptions_of_row(row), row.setup.num_nodes)
    return row.price.usd_per_hour * row.setup.num_nodes / SECONDS_PER_HOUR + volume_usd_per_s


def _volume_usd_per_s(volume: VolumePrice | None, assumptions: Assumptions, num_nodes: int) -> float:
    """Return what a second of the volumes of all nodes costs; 0 without a price."""
    if volume is None:
        return 0.0
    per_hour = volume.usd_per_hour(gib=assumptions.volume_gib, mib_per_s=assumptions.volume_mibps)
    return per_hour * num_nodes / SECONDS_PER_HOUR


def _samples_of_step(row: "Row") -> float:
    """Return samples per step, as counted or published; 1 if unknown."""
    if row.group.measure in (STEP, BARE_STEP):
        return samples_per_step(row.group)
    return float(row.setup.global_batch or 1)


def cost_of(
    training: Training,
    purchase: Purchase,
    *,
    assumptions: Assumptions,
    steps_only: bool = False,
    with_parts: bool = True,
    with_interval: bool = True,
) -> Cost:
    """Return hours and dollars of a training, part by part.

    steps_only: count only the steps, as for published figures, and charge a capacity block by the hour.
    with_parts: False takes a fifth of the time, which matters for thousands of candidates. with_interval: on
    spot an interval takes five times as long as the mean, and a simulated deadline milliseconds.

    Raises UserError if no capacity block is long enough, and on spot if losses are unknown or too frequent
    for a training without checkpoints.
    """
    lines = _lines(training, assumptions, steps_only)
    if purchase.price.purchase == SPOT and not steps_only:
        times = _on_spot(lines, training, purchase, assumptions, with_interval)
    else:
        times = _undisturbed(lines, training, purchase)
    volume_usd_per_s = kept_usd = 0.0
    if not steps_only:
        kept_usd = sum(usd for usd, _ in assumptions.timeless.values())
    if not steps_only:
        volume_usd_per_s = _volume_usd_per_s(purchase.volume, assumptions, training.num_nodes)
    hours = times.total(lambda part: part.takes_time / SECONDS_PER_HOUR)
    usd = _plus(times.total(lambda part: part.usd_per_s + part.has_machine * volume_usd_per_s), kept_usd)
    volumes_usd = times.total(lambda part: part.has_machine * volume_usd_per_s)
    cost = Cost(hours=hours, usd=usd, effective_usd=usd, spot_job=times.job)
    if purchase.price.purchase in (CAPACITY_BLOCK, TRAINING_PLAN) and not steps_only:
        block_hours = _block_hours(times.total(lambda part: part.has_machine / SECONDS_PER_HOUR), assumptions)
        fee_usd = block_hours * purchase.paid_usd_per_hour * training.num_nodes
        usd = _plus(volumes_usd, kept_usd + fee_usd)
        cost = replace(cost, usd=usd, block_hours=block_hours, fee_usd=fee_usd)
    if not with_parts:
        return cost
    parts = [
        Part(
            name=part.name,
            seconds=times.of(part, 1.0) if part.takes_time else None,
            usd=times.of(part, part.usd_per_s),
            evidence=part.evidence,
            source=part.source,
        )
        for part in times.parts
    ]
    if not steps_only:
        parts += _other_parts(volumes_usd, purchase, assumptions)
    if cost.fee_usd is not None:
        used = times.total(lambda part: part.usd_per_s)
        unused = Part(
            name="unused block",
            seconds=None,
            usd=Interval(
                value=cost.fee_usd - used.value,
                low=None if used.high is None else cost.fee_usd - used.high,
                high=None if used.low is None else cost.fee_usd - used.low,
            ),
            evidence="assumed" if "block_hours" in assumptions.given else "listed",
            source=f"block of {cost.block_hours:g} h, paid as a whole",
        )
        parts.append(unused)
    return replace(cost, parts=tuple(parts))


def _lines(training: Training, assumptions: Assumptions, steps_only: bool) -> list[_Line]:
    """Return the parts that take time, in order."""
    known = training.rate.evidence, training.rate.source
    steps = _Line("steps", 0.0, 0.0, 1.0, *known)
    if steps_only:
        return [steps]
    account, given = training.account, assumptions.given
    lines = [_Line("waiting", assumptions.waiting_s, 0.0, 0.0, "assumed", assumptions.source("waiting_s"))]
    for name in ONCE:
        key = f"{name}_s"
        measured_s = account.once_s[name] if account else None
        if measured_s is not None and key not in given:
            lines.append(_Line(name, measured_s, 0.0, 0.0, *known))
        elif name == "compile" and not training.compiles and key not in given:
            lines.append(_Line(name, 0.0, 0.0, 0.0, "assumed", "the recipe does not compile"))
        else:
            seconds = getattr(assumptions, key)
            lines.append(_Line(name, seconds, 0.0, 0.0, "assumed", assumptions.source(key)))
    lines.append(steps)
    every_s = assumptions.checkpoint_every_s
    assumed = {
        "evaluations": (assumptions.evaluation_s * assumptions.evaluations, 0.0),
        "checkpoints": (0.0, every_s and assumptions.checkpoint_s / every_s),
    }
    for name, (fixed_s, per_step_time) in assumed.items():
        keys = _FIELDS[name]
        measured = account.between[name] if account else None
        every = training.checkpoint_every if name == "checkpoints" else None
        if every is not None and not given.intersection(keys):
            saving, num_samples = training.saving, every * training.samples_per_step
            seconds = saving[0] if saving else assumptions.checkpoint_s
            assumed_by: tuple[PartEvidence, str] = ("assumed", assumptions.source("checkpoint_s"))
            how = known if saving else assumed_by
            lines.append(_Line(name, 0.0, seconds / num_samples if every else 0.0, 0.0, *how))
        elif measured is not None and not given.intersection(keys):
            per_sample_s = measured.s_per_step / training.samples_per_step
            lines.append(_Line(name, measured.once_s, per_sample_s, 0.0, *known))
        else:
            lines.append(_Line(name, fixed_s, 0.0, per_step_time, "assumed", assumptions.source(*keys)))
    return lines


def _undisturbed(lines: Sequence[_Line], training: Training, purchase: Purchase) -> _Times:
    """Return the times of a training that loses no machine."""

    def seconds(samples: float, s_per_sample: float) -> list[float]:
        return [
            line.fixed_s + samples * (line.per_sample_s + line.per_step_time * s_per_sample) for line in lines
        ]

    usd_per_s = purchase.usd_per_s(training.num_nodes)
    parts = [
        _Charged(
            *(line.name, line.evidence, line.source),
            usd_per_s=0.0 if line.name == "waiting" else usd_per_s,
            has_machine=line.name != "waiting",
        )
        for line in lines
    ]
    at, ranges = (training.samples.value, 1 / training.rate.samples_per_s.value), _ranges(training)
    return _Times(
        parts=parts,
        mean=seconds(*at),
        least=[line.fixed_s for line in lines],
        ends=None if ranges is None else _ends(seconds, at, ranges),
    )


def _plus(quantity: Interval, usd: float) -> Interval:
    return Interval(
        value=quantity.value + usd,
        low=None if quantity.low is None else quantity.low + usd,
        high=None if quantity.high is None else quantity.high + usd,
    )


def _block_hours(billed_hours: Interval, assumptions: Assumptions) -> float:
    """Return the length of a block that holds the training at the upper end of its interval.

    Raises UserError if no block is long enough, or if the given one is too short.
    """
    needed = (billed_hours.value if billed_hours.high is None else billed_hours.high) + BLOCK_END_HOURS
    if assumptions.block_hours:
        if assumptions.block_hours < needed:
            raise UserError(
                f"the training may take {needed:.3g} h of a block of {assumptions.block_hours:g} h, with the"
                " half hour at its end in which EC2 ends its machines",
                "give a longer block: --assume block_hours=N",
            )
        return assumptions.block_hours
    return 24.0 * block_days(needed)


def block_days(hours: float) -> int:
    """Return the days of the shortest block of so many hours. Raises UserError if none is long enough."""
    for days in _BLOCK_DAYS:
        if days * 24 >= hours:
            return days
    raise UserError(
        f"the training may take {hours / 24:,.0f} days, and the longest block has {_BLOCK_DAYS[-1]}",
        "use more nodes, or buy it on demand",
    )


def _other_parts(volumes: Interval, purchase: Purchase, assumptions: Assumptions) -> list[Part]:
    """Return the parts that cost money but no time: volumes, storage, transfer."""
    volume = purchase.volume
    return [
        Part(
            name="volumes",
            seconds=None,
            usd=volumes,
            evidence="listed" if volume else "assumed",
            source=f"{volume.source}, {volume.as_of}" if volume else "not counted: no price is known",
        ),
        *(
            Part(name=name, seconds=None, usd=_exactly(usd), evidence="assumed", source=source)
            for name, (usd, source) in assumptions.timeless.items()
        ),
    ]


def _on_spot(
    lines: Sequence[_Line],
    training: Training,
    purchase: Purchase,
    assumptions: Assumptions,
    with_interval: bool,
) -> _Times:
    """Return the mean times on spot.

    Raises UserError if losses are unknown, or too frequent for a training without checkpoints.
    """
    from fastlaunch.analysis.spot import (
        Fallback,
        SpotJob,
        check_checkpoints,
        expected_spot,
        forecast_spot,
        mean_wait_s,
    )

    market, deadline_s = purchase.market, assumptions.deadline_s
    if market is None:
        raise UserError(
            "how often spot is lost is not known",
            "give --spot-trace CSV, or --assume spot_losses_per_hour=0.1 --assume spot_available=0.8",
        )
    if deadline_s and purchase.on_demand_usd_per_hour is None:
        raise UserError("no on-demand price is known for the rest", "leave out --assume deadline")
    by_name = {line.name: line for line in lines}
    waiting, steps, evaluations = (by_name.pop(name) for name in ("waiting", "steps", "evaluations"))
    # How often checkpoints are written is another question on spot: see `_checkpoints`.
    del by_name["checkpoints"]
    before = [waiting, *by_name.values()]
    assert not any(line.per_sample_s or line.per_step_time for line in before), "losses repeat what recurs"
    start_s = sum(line.fixed_s for line in before) - waiting.fixed_s
    checkpoint_s, write_s, every_s, how_often = _checkpoints(
        training, assumptions, market.losses_per_hour.value
    )
    # SageMaker promises no notice and bills every second.
    terms = {"notice_s": 0.0, "free_within_s": 0.0} if purchase.price.service == "sagemaker" else {}

    def job_of(samples: float, s_per_sample: float) -> SpotJob:
        return SpotJob(
            **terms,
            work_s=samples * (s_per_sample + evaluations.per_sample_s) + evaluations.fixed_s,
            restart_s=assumptions.restart_s or start_s,
            checkpoint_s=checkpoint_s,
            write_s=write_s,
            every_s=every_s,
            num_nodes=training.num_nodes,
        )

    def seconds(samples: float, s_per_sample: float, losses_per_hour: float, wait_s: float) -> list[float]:
        job = job_of(samples, s_per_sample)
        available = 1 / (1 + losses_per_hour * wait_s / SECONDS_PER_HOUR)
        then = replace(
            market, losses_per_hour=Interval(value=losses_per_hour), available=Interval(value=available)
        )
        fixed_s = [line.fixed_s for line in before]
        if deadline_s:
            fallback = Fallback(deadline_s=deadline_s - waiting.fixed_s, start_s=start_s)
            forecast = forecast_spot(job, then, fallback=fallback)
            if not math.isfinite(forecast.time_s().value):
                return [*fixed_s, *(math.inf,) * 7, 0.0]
            time = forecast.mean
        else:
            time = expected_spot(job, then)
        evaluations_s = samples * evaluations.per_sample_s + evaluations.fixed_s
        share = evaluations_s / job.work_s
        return [
            *(*fixed_s, (1 - share) * time.work_s, share * time.work_s, time.checkpoints_s, time.rework_s),
            *(time.restarts_s, time.waiting_s, time.on_demand_s, time.free_s),
        ]

    at = training.samples.value, 1 / training.rate.samples_per_s.value
    losses, available = market.losses_per_hour, market.available
    job = job_of(*at)
    check_checkpoints(job, market, training.samples_per_step * at[1])
    mean = seconds(*at, losses.value, market.wait_s)
    *on_spot_s, waiting_s, _, _ = mean[len(before) :]
    if sum(on_spot_s) > _MOST_TIMES_ITS_WORK * (start_s + job.run_s) or not math.isfinite(waiting_s):
        raise UserError(
            "on spot that is lost so often the training would hardly ever end: it takes more than"
            f" {_MOST_TIMES_ITS_WORK:g} times its work",
            "take --purchase on-demand",
        )
    ends, ranges = None, _ranges(training) if with_interval else None
    if ranges is not None:
        waits_s = [
            None if share is None else mean_wait_s(losses.value, share)
            for share in (available.high, available.low)
        ]
        every_range = (*ranges, (losses.low, losses.high), (waits_s[0], waits_s[1]))
        ends = _ends(seconds, (*at, losses.value, market.wait_s), every_range)
    # The first start is charged at the spot price, even if the training never gets spot.
    usd_per_s = purchase.usd_per_s(training.num_nodes)
    on_demand_usd_per_s = (purchase.on_demand_usd_per_hour or 0.0) * training.num_nodes / SECONDS_PER_HOUR
    by_market: tuple[PartEvidence, str] = (
        "assumed" if market.evidence == "given" else Evidence.MEASURED,
        f"spot by {market.source}",
    )
    free = "EC2 bills no machine that it takes in its first hour"
    parts = [
        _Charged(waiting.name, waiting.evidence, waiting.source, 0.0, has_machine=False),
        *(
            _Charged(line.name, line.evidence, line.source, usd_per_s)
            for line in (*before[1:], steps, evaluations)
        ),
        _Charged("checkpoints", "assumed", how_often, usd_per_s),
        _Charged("rework", *by_market, usd_per_s),
        _Charged("restarts", *by_market, usd_per_s),
        _Charged("no capacity", *by_market, 0.0, has_machine=False),
        _Charged("on demand", *by_market, on_demand_usd_per_s),
        _Charged("not billed", by_market[0], free, -usd_per_s, has_machine=False, takes_time=False),
    ]
    least = [*mean[: len(before)], *(-math.inf,) * 7, math.inf]
    return _Times(parts=parts, mean=mean, least=least, ends=ends, job=job)


def _checkpoints(
    training: Training, assumptions: Assumptions, losses_per_hour: float
) -> tuple[float, float, float | None, str]:
    """Return, on spot, how long a checkpoint stops the steps, and is written beside them, and the source.

    The third value is the work between two; None without checkpoints.
    """
    from fastlaunch.analysis.spot import young_interval_s

    seconds, write_s = assumptions.checkpoint_s, 0.0
    if (measured := training.saving) and "checkpoint_s" not in assumptions.given:
        seconds, write_s = measured
    if "checkpoint_every_s" in assumptions.given:
        return seconds, write_s, assumptions.checkpoint_every_s or None, "as given"
    every_s = young_interval_s(seconds, losses_per_hour, training.num_nodes)
    if math.isinf(every_s):
        return seconds, write_s, None, "none: nothing is lost"
    # The next one waits until this one is written.
    every_s = max(every_s, write_s)
    return seconds, write_s, every_s, f"every {every_s / 60:.3g} min of work: Young's interval"


def _exactly(value: float) -> Interval:
    return Interval(value=value, low=value, high=value)

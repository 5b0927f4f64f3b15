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
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fastlaunch.analysis.account import ONCE, Account, account_of_row
from fastlaunch.analysis.pooling import BARE_STEP, STEP, samples_per_step
from fastlaunch.analysis.pricing import SECONDS_PER_HOUR
from fastlaunch.analysis.rate import Evidence, Rate, rate_of_row
from fastlaunch.analysis.verdicts import TRAINING
from fastlaunch.catalog.prices import Price, VolumePrice
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.units import parse_duration_s
from fastlaunch.measure.summary import Interval
from fastlaunch_train.recipes.recipe import Recipe

if TYPE_CHECKING:
    from fastlaunch.analysis.compare import Row
    from fastlaunch.analysis.spot import SpotJob, SpotMarket

HOW_TO_GIVE_LOSSES = "give --spot-trace CSV, or --assume spot_losses_per_hour=0.1 --assume spot_available=0.8"

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
    compile_s: float = _assumed(16.0, "compiling, by a recipe that compiles", _SHIPPED)
    warmup_s: float = _assumed(2.5, "by how much the first steps are slower, together", _SHIPPED)
    evaluation_s: float = _assumed(0.0, "one evaluation on held-out data", _NEVER_MEASURED)
    evaluations: float = _assumed(0.0, "how many of them", "none is asked for")
    checkpoint_s: float = _assumed(30.0, "writing one checkpoint", _NEVER_MEASURED)
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

    @property
    def timeless_usd(self) -> float:
        return sum(usd for usd, _ in self.timeless.values())

    def for_next_job(self) -> "Assumptions":
        """Return them for another job on the same machine, which has started by then."""
        names = [of.name for of in fields(self) if of.metadata.get("once_a_machine")]
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


def training_of(
    rate: Rate, recipe: Recipe | str, samples: Interval, *, num_nodes: int, global_batch: float
) -> Training:
    """Return the training of `samples` at the rate. global_batch: used if the runs do not record one."""
    return Training(
        samples=samples,
        rate=rate,
        num_nodes=num_nodes,
        account=account_of_row(rate.row) if rate.row else None,
        samples_per_step=samples_per_step(rate.row.group) if rate.row else global_batch,
        compiles=isinstance(recipe, str) or recipe.compiles,  # a script may
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

    def volume_usd_per_s(self, num_nodes: int, assumptions: Assumptions) -> float:
        """Return the cost of a second of all nodes' volumes; 0 if no price is known."""
        if self.volume is None:
            return 0.0
        per_hour = self.volume.usd_per_hour(gib=assumptions.volume_gib, mib_per_s=assumptions.volume_mibps)
        return per_hour * num_nodes / SECONDS_PER_HOUR


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
    checkpoint_every_s: float | None = None  # on spot, work between two: measured, given, Young's or None
    #: They add up to `hours` and `usd`; empty if only the sums were requested.
    parts: tuple[Part, ...] = ()


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

    hours: Interval  # from the request to the last step
    usd: Interval
    jobs: tuple[ExpectedJob, ...]


def together(parts: Sequence[Interval]) -> Interval:
    """Return the sum of quantities that vary together."""
    lows, highs = [part.low for part in parts], [part.high for part in parts]
    return Interval(
        value=sum(part.value for part in parts),
        low=None if None in lows else sum(filter(None, lows)),
        high=None if None in highs else sum(filter(None, highs)),
    )


class _Line(NamedTuple):
    """A part in numbers: fixed + samples x (per_sample + per_step_time / samples per second), in seconds."""

    name: str
    fixed_s: float
    per_sample_s: float
    per_step_time: float
    evidence: PartEvidence
    source: str


#: The line that nobody is billed for.
_UNBILLED = "waiting"


class _Inputs(NamedTuple):
    """The inputs with intervals, as numbers; NaN for no limit."""

    samples: float
    fewest: float
    most: float
    s_per_sample: float
    shortest: float
    longest: float

    def spread(self, fixed: float, per_sample: float, per_step_time: float, factor: float = 1.0) -> Interval:
        """Return factor x (fixed + samples x (per_sample + per_step_time x s_per_sample))."""
        slope = per_sample + per_step_time * self.s_per_sample
        value = fixed + self.samples * slope
        if not per_sample and not per_step_time:
            return Interval(value=factor * value, low=factor * value, high=factor * value)
        by_speed = self.samples * per_step_time
        below = math.hypot(
            (self.samples - self.fewest) * slope, by_speed * (self.s_per_sample - self.shortest)
        )
        above = math.hypot((self.most - self.samples) * slope, by_speed * (self.longest - self.s_per_sample))
        if math.isnan(below) or math.isnan(above):
            return Interval(value=factor * value)
        return Interval(
            value=factor * value, low=factor * max(fixed, value - below), high=factor * (value + above)
        )


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
    """Return the cost of training `samples` samples where a row ran; None if its runs give no speed.

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
    bought = Purchase(price=price, volume=volume_of(price.region) if row.price else None)
    return rate, cost_of(training, bought, assumptions=Assumptions())


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
        return _OnSpot(lines, training, purchase, assumptions, with_interval).cost(with_parts)
    inputs = _inputs(training)
    usd_per_s = purchase.usd_per_s(training.num_nodes)
    volume_usd_per_s = 0.0 if steps_only else purchase.volume_usd_per_s(training.num_nodes, assumptions)
    kept_usd = 0.0 if steps_only else assumptions.timeless_usd
    billed = _sums([line for line in lines if line.name != _UNBILLED])
    hours = inputs.spread(*_sums(lines), factor=1 / SECONDS_PER_HOUR)
    effective_usd = _plus(inputs.spread(*billed, factor=usd_per_s + volume_usd_per_s), kept_usd)
    volumes = inputs.spread(*billed, factor=volume_usd_per_s)
    cost = Cost(hours=hours, usd=effective_usd, effective_usd=effective_usd)
    if purchase.price.purchase == CAPACITY_BLOCK and not steps_only:
        block_hours = _block_hours(inputs.spread(*billed, factor=1 / SECONDS_PER_HOUR), assumptions)
        fee_usd = block_hours * SECONDS_PER_HOUR * usd_per_s
        usd = _plus(volumes, kept_usd + fee_usd)
        cost = replace(cost, usd=usd, block_hours=block_hours, fee_usd=fee_usd)
    if not with_parts:
        return cost
    parts = [
        Part(
            name=line.name,
            seconds=inputs.spread(*line[1:4]),
            usd=inputs.spread(*line[1:4], factor=0.0 if line.name == _UNBILLED else usd_per_s),
            evidence=line.evidence,
            source=line.source,
        )
        for line in lines
    ]
    if not steps_only:
        parts += _other_parts(volumes, purchase, assumptions)
    if cost.fee_usd is not None:
        used = inputs.spread(*billed, factor=usd_per_s)
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
    steps = _Line("steps", 0.0, 0.0, 1.0, training.rate.evidence, training.rate.source)
    if steps_only:
        return [steps]
    account, given = training.account, assumptions.given
    waiting = _Line(_UNBILLED, assumptions.waiting_s, 0.0, 0.0, "assumed", assumptions.source("waiting_s"))
    lines = [waiting]
    for name in ONCE:
        key = f"{name}_s"
        measured = account.once_s[name] if account else None
        if measured is not None and key not in given:
            lines.append(_Line(name, measured, 0.0, 0.0, training.rate.evidence, training.rate.source))
        elif name == "compile" and not training.compiles and key not in given:
            lines.append(_Line(name, 0.0, 0.0, 0.0, "assumed", "the recipe does not compile"))
        else:
            seconds = getattr(assumptions, key)
            lines.append(_Line(name, seconds, 0.0, 0.0, "assumed", assumptions.source(key)))
    every_s = assumptions.checkpoint_every_s
    return [
        *lines,
        steps,
        _between(
            "evaluations",
            ("evaluation_s", "evaluations"),
            fixed_s=assumptions.evaluation_s * assumptions.evaluations,
            training=training,
            assumptions=assumptions,
        ),
        _between(
            "checkpoints",
            ("checkpoint_s", "checkpoint_every_s"),
            per_step_time=every_s and assumptions.checkpoint_s / every_s,
            training=training,
            assumptions=assumptions,
        ),
    ]


def _between(
    name: str,
    keys: tuple[str, str],
    *,
    fixed_s: float = 0.0,
    per_step_time: float = 0.0,
    training: Training,
    assumptions: Assumptions,
) -> _Line:
    """Return a recurring part as measured, unless the user has set one of `keys`."""
    measured = training.account.between[name] if training.account else None
    if measured is not None and not assumptions.given.intersection(keys):
        per_sample_s = measured.s_per_step / training.samples_per_step
        return _Line(name, measured.once_s, per_sample_s, 0.0, training.rate.evidence, training.rate.source)
    return _Line(name, fixed_s, 0.0, per_step_time, "assumed", assumptions.source(*keys))


def _inputs(training: Training) -> _Inputs:
    samples, rate = training.samples, training.rate.samples_per_s
    exact = samples.low is None and samples.high is None
    return _Inputs(
        samples.value,
        samples.value if exact else _or_nan(samples.low),
        samples.value if exact else _or_nan(samples.high),
        1 / rate.value,
        1 / _or_nan(rate.high),
        1 / _or_nan(rate.low),
    )


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _sums(lines: list[_Line]) -> tuple[float, float, float]:
    """Return fixed seconds, seconds per sample and multiples of the step time, summed over all lines."""
    fixed_s = per_sample_s = per_step_time = 0.0
    for line in lines:
        fixed_s += line.fixed_s
        per_sample_s += line.per_sample_s
        per_step_time += line.per_step_time
    return fixed_s, per_sample_s, per_step_time


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
    for days in _BLOCK_DAYS:
        if days * 24 >= needed:
            return 24.0 * days
    raise UserError(
        f"the training may take {needed / 24:,.0f} days, and the longest block has {_BLOCK_DAYS[-1]}",
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


def spot_job(training: Training, purchase: Purchase, assumptions: Assumptions) -> "SpotJob":
    """Return the training as a job for `spot.forecast_spot`."""
    return _OnSpot(_lines(training, assumptions, False), training, purchase, assumptions).job


class _OnSpot:
    """A training on spot: mean seconds by part, and how far each input moves them.

    Raises UserError if losses are unknown, or too frequent for a training without checkpoints.
    """

    #: The parts that losses change, in seconds. EC2 does not bill the last.
    parts = ("steps", "evaluations", "checkpoints", "rework", "restarts", "no capacity", "on demand", "free")

    def __init__(
        self,
        lines: list[_Line],
        training: Training,
        purchase: Purchase,
        assumptions: Assumptions,
        with_interval: bool = True,
    ) -> None:
        from fastlaunch.analysis.spot import check_checkpoints

        if purchase.market is None:
            raise UserError(
                "how often spot is lost is not known: no run of yours had spot of this type",
                HOW_TO_GIVE_LOSSES,
            )
        self.market = purchase.market
        self.training, self.purchase, self.assumptions = training, purchase, assumptions
        by_name = {line.name: line for line in lines}
        self.waiting, self.steps = by_name.pop(_UNBILLED), by_name.pop("steps")
        # How often checkpoints are written is another question on spot: see `_checkpoints`.
        self.evaluations, _ = by_name.pop("evaluations"), by_name.pop("checkpoints")
        self.start = list(by_name.values())
        recurring = [line.name for line in self.start if line.per_sample_s or line.per_step_time]
        assert not recurring, f"losses repeat {recurring}: make them a part of `parts`, as evaluations are"
        self.start_s = sum(line.fixed_s for line in self.start)
        self.checkpoint_s, self.every_s, self.how_often = self._checkpoints()
        inputs = _inputs(training)
        losses, available = self.market.losses_per_hour, self.market.available
        at = (inputs.samples, inputs.s_per_sample, losses.value, self.market.wait_s)
        self.job = self._job(inputs.samples, inputs.s_per_sample)
        check_checkpoints(self.job, self.market, training.samples_per_step * inputs.s_per_sample)
        self.mean = self._seconds(*at)
        *on_spot_s, waiting_s, _, _ = self.mean
        endless_s = _MOST_TIMES_ITS_WORK * (self.start_s + self.job.run_s)
        if sum(on_spot_s) > endless_s or not math.isfinite(waiting_s):
            raise UserError(
                "on spot that is lost so often the training would hardly ever end: it takes more than"
                f" {_MOST_TIMES_ITS_WORK:g} times its work",
                "take --purchase on-demand",
            )
        #: Seconds at both ends of each input's interval; None if speed has no interval.
        self.moved: list[tuple[tuple[float, ...], tuple[float, ...]]] | None = []
        ranges = (
            (inputs.fewest, inputs.most),
            (inputs.shortest, inputs.longest),
            (losses.low, losses.high),
            (_wait_s(losses.value, available.high), _wait_s(losses.value, available.low)),
        )
        if not with_interval or any(map(math.isnan, (*ranges[0], *ranges[1]))):
            self.moved = None
            return
        for number, (low, high) in enumerate(ranges):
            if low is not None and high is not None and low != high:
                ends = [[*at[:number], end, *at[number + 1 :]] for end in (low, high)]
                self.moved.append((self._seconds(*ends[0]), self._seconds(*ends[1])))

    def _checkpoints(self) -> tuple[float, float | None, str]:
        """Return seconds per checkpoint, work between two (None without checkpoints), and the source."""
        from fastlaunch.analysis.spot import young_interval_s

        assumptions, account = self.assumptions, self.training.account
        measured = account.between["checkpoints"] if account else None
        seconds = assumptions.checkpoint_s
        if measured and measured.every and "checkpoint_s" not in assumptions.given:
            seconds = measured.s_per_step * measured.every
        if "checkpoint_every_s" in assumptions.given:
            return seconds, assumptions.checkpoint_every_s or None, "as given"
        losses = self.market.losses_per_hour.value
        every_s = young_interval_s(seconds, losses, self.training.num_nodes)
        if math.isinf(every_s):
            return seconds, None, "none: nothing is lost"
        return seconds, every_s, f"every {every_s / 60:.3g} min of work: Young's interval"

    def _job(self, samples: float, s_per_sample: float) -> "SpotJob":
        from fastlaunch.analysis.spot import SpotJob

        evaluations_s = self.evaluations.fixed_s + samples * self.evaluations.per_sample_s
        # SageMaker promises no notice and bills every second.
        is_sagemaker = self.purchase.price.service == "sagemaker"
        terms = {"notice_s": 0.0, "free_within_s": 0.0} if is_sagemaker else {}
        return SpotJob(
            **terms,
            work_s=samples * s_per_sample + evaluations_s,
            restart_s=self.assumptions.restart_s or self.start_s,
            checkpoint_s=self.checkpoint_s,
            every_s=self.every_s,
            num_nodes=self.training.num_nodes,
        )

    def _seconds(
        self, samples: float, s_per_sample: float, losses_per_hour: float, wait_s: float
    ) -> tuple[float, ...]:
        """Return mean seconds of `parts`. wait_s: mean time until capacity returns."""
        from fastlaunch.analysis.spot import Fallback, expected_spot, forecast_spot

        job, deadline_s = self._job(samples, s_per_sample), self.assumptions.deadline_s
        market = replace(
            self.market,
            losses_per_hour=Interval(value=losses_per_hour),
            available=Interval(value=1 / (1 + losses_per_hour * wait_s / SECONDS_PER_HOUR)),
        )
        if deadline_s:
            fallback = Fallback(deadline_s=deadline_s - self.waiting.fixed_s, start_s=self.start_s)
            forecast = forecast_spot(job, market, fallback=fallback)
            if not math.isfinite(forecast.time_s().value):
                return (math.inf,) * len(self.parts)
            time = forecast.mean
        else:
            time = expected_spot(job, market)
        steps_s = samples * s_per_sample * time.work_s / job.work_s
        return (
            steps_s,
            time.work_s - steps_s,
            *(time.checkpoints_s, time.rework_s, time.restarts_s, time.waiting_s, time.on_demand_s),
            time.free_s,
        )

    def _sum(self, *weights: float, fixed: float = 0.0) -> Interval:
        """Return fixed + the sum of weights x seconds of `parts`, with its interval."""

        def weighted(seconds: tuple[float, ...]) -> float:
            return fixed + sum(
                weight * time_s for weight, time_s in zip(weights, seconds, strict=True) if weight
            )

        value = weighted(self.mean)
        if self.moved is None:
            return Interval(value=value)
        off = [(weighted(low) - value, weighted(high) - value) for low, high in self.moved]
        below = math.hypot(*(min(0.0, *move) for move in off))
        above = math.hypot(*(max(0.0, *move) for move in off))
        return Interval(value=value, low=value - below, high=value + above)

    def _usd_per_s(self) -> tuple[float, ...]:
        """Return the cost of a second of each of `parts` on all nodes, without volumes."""
        spot = self.purchase.usd_per_s(self.training.num_nodes)
        fallback = self.purchase.on_demand_usd_per_hour
        if self.assumptions.deadline_s and fallback is None:
            raise UserError("no on-demand price is known for the rest", "leave out --assume deadline")
        on_demand = (fallback or 0.0) * self.training.num_nodes / SECONDS_PER_HOUR
        # The first start is charged at the spot price, even if the training never gets spot.
        return (spot,) * 5 + (0.0, on_demand, -spot)

    def cost(self, with_parts: bool) -> Cost:
        hour, usd_per_s = 1 / SECONDS_PER_HOUR, self._usd_per_s()
        per_s = self.purchase.volume_usd_per_s(self.training.num_nodes, self.assumptions)
        volumes_usd_per_s = (per_s,) * 5 + (0.0, per_s, 0.0)
        kept_usd = self.assumptions.timeless_usd
        both = (*map(operator.add, usd_per_s, volumes_usd_per_s),)
        usd = self._sum(*both, fixed=kept_usd + both[0] * self.start_s)
        cost = Cost(
            hours=self._sum(*(hour,) * 7, 0.0, fixed=hour * (self.waiting.fixed_s + self.start_s)),
            usd=usd,
            effective_usd=usd,
            checkpoint_every_s=self.every_s,
        )
        if not with_parts:
            return cost
        volumes_usd = self._sum(*volumes_usd_per_s, fixed=per_s * self.start_s)
        others = _other_parts(volumes_usd, self.purchase, self.assumptions)
        return replace(cost, parts=(*self._parts(usd_per_s), *others))

    def _parts(self, usd_per_s: Sequence[float]) -> list[Part]:
        market: tuple[PartEvidence, str] = (
            "assumed" if self.market.evidence == "given" else Evidence.MEASURED,
            f"spot by {self.market.source}",
        )
        known: list[tuple[PartEvidence, str]] = [
            (self.steps.evidence, self.steps.source),
            (self.evaluations.evidence, self.evaluations.source),
            ("assumed", self.how_often),
            *(market,) * 5,
        ]
        parts = [
            Part(
                name=line.name,
                seconds=_exactly(line.fixed_s),
                usd=_exactly(0.0 if line is self.waiting else line.fixed_s * usd_per_s[0]),
                evidence=line.evidence,
                source=line.source,
            )
            for line in (self.waiting, *self.start)
        ]
        for number, (name, (evidence, source)) in enumerate(zip(self.parts, known, strict=True)):
            alone = [float(place == number) for place in range(len(self.parts))]
            parts.append(
                Part(
                    name="not billed" if name == "free" else name,
                    seconds=None if name == "free" else self._sum(*alone),
                    usd=self._sum(*map(operator.mul, alone, usd_per_s)),
                    evidence=evidence,
                    source="EC2 bills no machine that it takes in its first hour"
                    if name == "free"
                    else source,
                )
            )
        return parts


def _wait_s(losses_per_hour: float, available: float | None) -> float | None:
    """Return the mean length of a spell without capacity, given one spell per loss and this availability."""
    if available is None:
        return None
    return (1 / available - 1) / losses_per_hour * SECONDS_PER_HOUR if losses_per_hour else 0.0


def _exactly(value: float) -> Interval:
    return Interval(value=value, low=value, high=value)

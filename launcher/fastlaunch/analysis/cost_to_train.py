"""What a training takes and costs from the request to the last step: hours and dollars, part by part.

Every part says whether its seconds were measured, predicted or assumed; dollars that buy no time are listed
or assumed. Waiting for capacity takes time and is not billed.

Intervals: samples and samples per second are the inputs that have one. An input moves all parts that depend
on it together, and the inputs are independent of each other. So the deviation of a total is the root of the
sum of squares, over the inputs, of what each moves it, above and below separately. One-off parts have no
interval, measured or assumed. Without an interval of samples per second a total has none.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from fastlaunch.analysis.cost import SECONDS_PER_HOUR
from fastlaunch.analysis.finish import ONCE, Account
from fastlaunch.catalog.prices import Price, VolumePrice
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.units import parse_duration_s
from fastlaunch.measure.summary import Interval

Evidence = Literal["measured", "predicted", "listed", "assumed"]
CAPACITY_BLOCK = "capacity-block"

#: EC2 ends the instances of a capacity block half an hour before the block ends.
#: docs.aws.amazon.com/AWSEC2, "Capacity Blocks for ML", as are the lengths below, read 2026-11.
BLOCK_END_HOURS = 0.5
_BLOCK_DAYS: tuple[int, ...] = (*range(1, 15), *range(21, 183, 7))

_NEVER_MEASURED = "a guess, not measured"
_SHIPPED = "90% of the shipped runs took less (one H200, 2026-11)"


def _assumed(default: float, what: str, source: str) -> Any:
    """Return a field of Assumptions. source: where its default is from."""
    return field(default=default, metadata={"what": what, "source": source})


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What is taken for granted where nothing was measured; a field named in `given` counts before that.

    Units are the names' endings. Raises UserError for a negative or infinite number.
    """

    waiting_s: float = _assumed(0.0, "waiting for capacity, not billed", "AWS has it at once")
    boot_s: float = _assumed(180.0, "from the start of a machine to its first script", _NEVER_MEASURED)
    pull_s: float = _assumed(300.0, "fetching code, image and inputs", _NEVER_MEASURED)
    build_s: float = _assumed(23.0, "building model and data", _SHIPPED)
    compile_s: float = _assumed(20.0, "compiling, by a recipe that compiles", _SHIPPED)
    warmup_s: float = _assumed(3.0, "by how much the first steps are slower, together", _SHIPPED)
    evaluation_s: float = _assumed(0.0, "one evaluation on held-out data", _NEVER_MEASURED)
    evaluations: float = _assumed(0.0, "how many of them", "none is asked for")
    checkpoint_s: float = _assumed(30.0, "writing one checkpoint", _NEVER_MEASURED)
    checkpoint_every_s: float = _assumed(0.0, "from one to the next; 0 for none", "none is asked for")
    scaling: float = _assumed(
        1.0, "of a GPU's throughput, what is kept on other numbers of GPUs than measured", "linear"
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
    block_hours: float = _assumed(
        0.0, "length of the capacity block; 0 for the shortest that fits", "AWS sells whole days"
    )
    given: frozenset[str] = frozenset()  # the fields that the user has set

    def __post_init__(self) -> None:
        for name in ASSUMED:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"{name.removesuffix('_s')} is assumed to be {value:g}", "give 0 or more")
        if not self.scaling:
            raise UserError("no throughput is kept with a scaling of 0", "give more, such as 0.95")


#: What can be assumed: field -> (what it is, where the default is from).
ASSUMED: Mapping[str, tuple[str, str]] = {
    each.name: (each.metadata["what"], each.metadata["source"])
    for each in fields(Assumptions)
    if each.metadata
}


def parse_assumptions(texts: Iterable[str]) -> Assumptions:
    """Return what `boot=300s`, `waiting=2h` or `storage_gib=500` says; times are seconds without a unit.

    Raises UserError for other text, UnknownName for a name that nothing has.
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
    """What is to be trained on one candidate, and how fast that goes."""

    samples: Interval  # without low and high: exactly so many
    samples_per_s: Interval  # of all nodes
    evidence: Evidence = "measured"  # of samples_per_s
    source: str = ""
    num_nodes: int = 1
    #: Of runs like it: the seconds before, and between, the steps. None if only the speed is known.
    account: Account | None = None
    account_source: str = ""
    samples_per_step: float = 1.0  # of all nodes, as in the account
    compiles: bool = True  # whether compiling is assumed where it was not measured


@dataclass(frozen=True, kw_only=True)
class Purchase:
    """How the machines are bought."""

    price: Price  # of one node
    #: What an hour of a node costs this account if that is not the price; 0 where it is sunk.
    usd_per_hour: float | None = None
    volume: VolumePrice | None = None  # None if not known: volumes are not counted then

    @property
    def paid_usd_per_hour(self) -> float:
        return self.price.usd_per_hour if self.usd_per_hour is None else self.usd_per_hour


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a training: wall-clock seconds, dollars, and how these are known."""

    name: str
    seconds: Interval | None  # None where dollars buy no time of the training
    usd: Interval
    evidence: Evidence
    source: str


@dataclass(frozen=True, kw_only=True)
class Total:
    """Hours from the request to the end, and dollars. A capacity block is paid as a whole."""

    hours: Interval
    usd: Interval
    block_hours: float | None = None  # of the capacity block that is bought
    fee_usd: float | None = None  # of the whole block: sunk, once it is bought
    effective_usd: Interval  # without the part of the block that is not used


@dataclass(frozen=True, kw_only=True)
class CostToTrain(Total):
    """The same part by part: `hours` is the sum of the parts' seconds, `usd` of their dollars."""

    parts: tuple[Part, ...]


class _Line(NamedTuple):
    """A part in numbers: fixed + samples x (per_sample + per_step_time / samples per second), in seconds."""

    name: str
    fixed_s: float
    per_sample_s: float
    per_step_time: float
    evidence: Evidence
    source: str


class _Inputs(NamedTuple):
    """What has an interval, as numbers: NaN where there is none."""

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


def total(
    training: Training, purchase: Purchase, *, assumptions: Assumptions, steps_only: bool = False
) -> Total:
    """Return what `cost_to_train` does without its parts, by the same lines: for thousands of candidates.

    It adds up the lines' numbers and makes no object of a part, which costs a sixth of the time.
    """
    return _total(_lines(training, assumptions, steps_only), training, purchase, assumptions, steps_only)


def cost_to_train(
    training: Training, purchase: Purchase, *, assumptions: Assumptions, steps_only: bool = False
) -> CostToTrain:
    """Return hours and dollars of a training, part by part.

    steps_only: without waiting, boot and all else that is not a step, as published figures are compared; a
    capacity block is then charged by the hour.
    Raises UserError for a training that no capacity block is long enough for.
    """
    lines = _lines(training, assumptions, steps_only)
    whole = _total(lines, training, purchase, assumptions, steps_only)
    inputs = _inputs(training)
    usd_per_s = _usd_per_s(training, purchase)
    parts = [
        Part(
            name=line.name,
            seconds=inputs.spread(*line[1:4]),
            usd=inputs.spread(*line[1:4], factor=0.0 if line.name == "waiting" else usd_per_s),
            evidence=line.evidence,
            source=line.source,
        )
        for line in lines
    ]
    if not steps_only:
        parts += _other_parts(lines, training, purchase, assumptions)
    if whole.fee_usd is not None:
        used = inputs.spread(*_sums(_billed(lines)), factor=usd_per_s)
        unused = Part(
            name="unused block",
            seconds=None,
            usd=Interval(
                value=whole.fee_usd - used.value,
                low=None if used.high is None else whole.fee_usd - used.high,
                high=None if used.low is None else whole.fee_usd - used.low,
            ),
            evidence=_block_evidence(assumptions),
            source=f"block of {whole.block_hours:g} h, paid as a whole",
        )
        parts.append(unused)
    return CostToTrain(**vars(whole), parts=tuple(parts))


def _lines(training: Training, assumptions: Assumptions, steps_only: bool) -> list[_Line]:
    """Return the parts that take time, in their order."""
    steps = _Line("steps", 0.0, 0.0, 1.0, training.evidence, training.source)
    if steps_only:
        return [steps]
    account, given = training.account, assumptions.given
    lines = [_assumed_line("waiting", "waiting_s", assumptions.waiting_s, given)]
    for name in ONCE:
        key = f"{name}_s"
        measured = account.once_s[name] if account else None
        if measured is not None and key not in given:
            lines.append(_Line(name, measured, 0.0, 0.0, "measured", training.account_source))
        elif name == "compile" and not training.compiles and key not in given:
            lines.append(_Line(name, 0.0, 0.0, 0.0, "assumed", "the recipe does not compile"))
        else:
            lines.append(_assumed_line(name, key, getattr(assumptions, key), given))
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
            per_step_time=_ratio(assumptions.checkpoint_s, assumptions.checkpoint_every_s),
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
    """Return what recurs between the steps: as measured, unless the user has set one of `keys`."""
    given = assumptions.given.intersection(keys)
    measured = training.account.between[name] if training.account else None
    if measured is not None and not given:
        per_sample_s = measured.s_per_step / training.samples_per_step
        return _Line(name, measured.once_s, per_sample_s, 0.0, "measured", training.account_source)
    source = "as given" if given else ASSUMED[keys[1]][1]
    return _Line(name, fixed_s, 0.0, per_step_time, "assumed", source)


def _assumed_line(name: str, key: str, seconds: float, given: frozenset[str]) -> _Line:
    return _Line(name, seconds, 0.0, 0.0, "assumed", "as given" if key in given else ASSUMED[key][1])


def _ratio(seconds: float, every_s: float) -> float:
    return seconds / every_s if every_s else 0.0


def _inputs(training: Training) -> _Inputs:
    samples, rate = training.samples, training.samples_per_s
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


def _billed(lines: list[_Line]) -> list[_Line]:
    return [line for line in lines if line.name != "waiting"]


def _sums(lines: list[_Line]) -> tuple[float, float, float]:
    """Return fixed seconds, seconds per sample and multiples of the step time, of all lines together."""
    fixed_s = per_sample_s = per_step_time = 0.0
    for line in lines:
        fixed_s += line.fixed_s
        per_sample_s += line.per_sample_s
        per_step_time += line.per_step_time
    return fixed_s, per_sample_s, per_step_time


def _usd_per_s(training: Training, purchase: Purchase) -> float:
    """Return what a second of all nodes costs."""
    return purchase.paid_usd_per_hour * training.num_nodes / SECONDS_PER_HOUR


def _volume_usd_per_s(training: Training, purchase: Purchase, assumptions: Assumptions) -> float:
    """Return what a second of all nodes' volumes costs; 0 where no price is known."""
    if purchase.volume is None:
        return 0.0
    per_hour = purchase.volume.usd_per_hour(gib=assumptions.volume_gib, mib_per_s=assumptions.volume_mibps)
    return per_hour * training.num_nodes / SECONDS_PER_HOUR


def _total(
    lines: list[_Line],
    training: Training,
    purchase: Purchase,
    assumptions: Assumptions,
    steps_only: bool,
) -> Total:
    inputs = _inputs(training)
    fixed_s, per_sample_s, per_step_time = _sums(lines)
    hours = inputs.spread(fixed_s, per_sample_s, per_step_time, 1 / SECONDS_PER_HOUR)
    usd_per_s = _usd_per_s(training, purchase)
    if steps_only:
        usd = inputs.spread(fixed_s, per_sample_s, per_step_time, usd_per_s)
        return Total(hours=hours, usd=usd, effective_usd=usd)
    billed_s = fixed_s - lines[0].fixed_s
    volume_usd_per_s = _volume_usd_per_s(training, purchase, assumptions)
    kept_usd = _storage_usd(assumptions) + _transfer_usd(assumptions)
    used = inputs.spread(billed_s, per_sample_s, per_step_time, usd_per_s + volume_usd_per_s)
    effective_usd = _plus(used, kept_usd)
    if purchase.price.purchase != CAPACITY_BLOCK:
        return Total(hours=hours, usd=effective_usd, effective_usd=effective_usd)
    billed = inputs.spread(billed_s, per_sample_s, per_step_time, 1 / SECONDS_PER_HOUR)
    block_hours = _block_hours(billed, assumptions)
    fee_usd = block_hours * SECONDS_PER_HOUR * usd_per_s
    volumes = inputs.spread(billed_s, per_sample_s, per_step_time, volume_usd_per_s)
    return Total(
        hours=hours,
        usd=_plus(volumes, kept_usd + fee_usd),
        block_hours=block_hours,
        fee_usd=fee_usd,
        effective_usd=effective_usd,
    )


def _plus(quantity: Interval, usd: float) -> Interval:
    return Interval(
        value=quantity.value + usd,
        low=None if quantity.low is None else quantity.low + usd,
        high=None if quantity.high is None else quantity.high + usd,
    )


def _block_hours(billed_hours: Interval, assumptions: Assumptions) -> float:
    """Return the length of the block that holds the training, even at the upper end of its interval.

    Raises UserError where there is none, or where the one that was given is too short.
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


def _storage_usd(assumptions: Assumptions) -> float:
    return assumptions.storage_gib * assumptions.storage_months * assumptions.storage_usd_per_gib_month


def _transfer_usd(assumptions: Assumptions) -> float:
    return assumptions.transfer_gb * assumptions.transfer_usd_per_gb


def _other_parts(
    lines: list[_Line], training: Training, purchase: Purchase, assumptions: Assumptions
) -> list[Part]:
    """Return what costs money and takes no time: volumes, storage, transfer."""
    volume = purchase.volume
    volumes_usd = _inputs(training).spread(
        *_sums(_billed(lines)), factor=_volume_usd_per_s(training, purchase, assumptions)
    )
    storage, transfer = _storage_usd(assumptions), _transfer_usd(assumptions)
    return [
        Part(
            name="volumes",
            seconds=None,
            usd=volumes_usd,
            evidence="listed" if volume else "assumed",
            source=f"{volume.source}, {volume.as_of}" if volume else "not counted: no price is known",
        ),
        Part(
            name="storage",
            seconds=None,
            usd=Interval(value=storage, low=storage, high=storage),
            evidence="assumed",
            source=_source(assumptions, "storage_gib"),
        ),
        Part(
            name="transfer",
            seconds=None,
            usd=Interval(value=transfer, low=transfer, high=transfer),
            evidence="assumed",
            source=_source(assumptions, "transfer_gb"),
        ),
    ]


def _source(assumptions: Assumptions, key: str) -> str:
    return "as given" if key in assumptions.given else ASSUMED[key][1]


def _block_evidence(assumptions: Assumptions) -> Evidence:
    return "assumed" if "block_hours" in assumptions.given else "listed"

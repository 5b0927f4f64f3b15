"""How the rows of one workload compare with its baseline: ratios, a verdict each, and the reasons for it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastlaunch.analysis.notes import difference_notes, run_notes
from fastlaunch.analysis.pooling import (
    Group,
    log_speed_ratio,
    sample_of,
)
from fastlaunch.analysis.statistics import (
    ASSUMED,
    LEVEL,
    MACHINE,
    MOST_RUNS_PROPOSED,
    UNRESOLVED,
    RunVariance,
    Sample,
    Uncertainty,
    classify,
    holm_levels,
    more_runs,
    p_value,
    uncertainty,
)
from fastlaunch.analysis.validity import Validity
from fastlaunch.catalog.prices import Price
from fastlaunch.measure.summary import Interval

BASELINE, NO_INTERVAL, NOT_STEADY = "baseline", "no interval", "not steady"
NOT_RANKED = "not ranked"
TRAINING, THROUGHPUT = "training", "throughput"


@dataclass(frozen=True, kw_only=True)
class PricedGroup:
    """The runs of a row with their price."""

    group: Group
    price: Price | None  # of one node; None if unknown
    validity: Validity  # what is known of the row besides its speed
    unverified: bool = False  # what the validity holds against it does not bar it

    @property
    def is_barred(self) -> bool:
        return bool(self.validity.failures) and not self.unverified


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a row compares with its baseline; the ratios' intervals are at Holm's level."""

    ratio: Interval | None  # of samples per dollar
    speed_ratio: Interval | None  # of samples/s
    kind: str  # better, worse, tie, unresolved, baseline, no interval, not steady, not ranked
    reasons: tuple[str, ...]
    comparable_as: str
    more_runs: int | None = None  # about as many, of the row and the baseline each, would settle it


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A row beside its baseline. log_ratio: of what the verdict is on, dollars where both have a price."""

    row: PricedGroup
    base: PricedGroup
    log_speed_ratio: float | None
    log_ratio: float | None
    samples: tuple[Sample, Sample] | None
    other_machines: bool
    error: Uncertainty | None

    @property
    def is_priced(self) -> bool:
        return self.row.price is not None and self.base.price is not None


def judge(items: Sequence[PricedGroup], base: PricedGroup, spread: RunVariance) -> list[Verdict]:
    """Return a verdict for each of `items`, of which `base` is one, Holm-corrected together.

    Rows that are barred get no verdict and are none of those; their intervals are at 95%.
    """
    pairs = [None if item is base else _pair(item, base, spread) for item in items]
    tested = [pair for pair in pairs if pair and pair.error and not pair.row.is_barred]
    levels = holm_levels(
        [p_value(pair.log_ratio, pair.error) for pair in tested if pair.log_ratio is not None and pair.error]
    )
    level_of = dict(zip(map(id, tested), levels, strict=True))
    return [
        _of_baseline(base) if pair is None else _judge(pair, spread, level_of.get(id(pair), LEVEL))
        for pair in pairs
    ]


def _pair(row: PricedGroup, base: PricedGroup, spread: RunVariance) -> _Pair:
    speed = log_speed_ratio(row.group, base.group)
    ratio = speed
    if speed is not None and row.price is not None and base.price is not None:
        ratio = speed + math.log(_usd_per_hour(base, base.price) / _usd_per_hour(row, row.price))
    ours, theirs = sample_of(row.group), sample_of(base.group)
    samples = (ours, theirs) if ours and theirs and ratio is not None else None
    other_machines = _type_of(row.group) != _type_of(base.group)
    return _Pair(
        row=row,
        base=base,
        log_speed_ratio=speed,
        log_ratio=ratio,
        samples=samples,
        other_machines=other_machines,
        error=uncertainty(samples, spread, other_machines=other_machines) if samples else None,
    )


def _usd_per_hour(item: PricedGroup, price: Price) -> float:
    return price.usd_per_hour * item.group.setup.num_nodes


def _type_of(group: Group) -> str | None:
    return group.setup.instance or group.setup.device_name


def _judge(pair: _Pair, spread: RunVariance, level: float) -> Verdict:
    half_width = pair.error.half_width(level) if pair.error else None
    row, base = pair.row.group.setup, pair.base.group.setup
    trains = (row.global_batch, row.sequence_length) == (base.global_batch, base.sequence_length)
    by_speed = pair.log_ratio is not None and not pair.is_priced
    differences = difference_notes(pair.row.group, pair.base.group, by_speed=by_speed)
    name, why, more = _classify(pair, half_width, spread, level)
    return Verdict(
        ratio=_ratio(pair.log_ratio, half_width) if pair.is_priced else None,
        speed_ratio=_ratio(pair.log_speed_ratio, half_width),
        kind=name,
        reasons=(*why, *differences, *run_notes(pair.row.group), *_of_validity(pair.row)),
        comparable_as=TRAINING if trains else THROUGHPUT,
        more_runs=more,
    )


def _of_baseline(base: PricedGroup) -> Verdict:
    """Return the baseline's verdict beside itself: the ratios are exactly 1."""
    one = Interval(value=1.0, low=1.0, high=1.0)
    timed = log_speed_ratio(base.group, base.group) is not None
    # That it did not settle is said of its runs below.
    why = [_why_no_interval(base.group)] if base.group.is_steady and not sample_of(base.group) else []
    barred = base.validity.failures if base.is_barred else ()
    return Verdict(
        ratio=one if timed and base.price is not None else None,
        speed_ratio=one if timed else None,
        kind=NOT_RANKED if barred else BASELINE,
        reasons=(*barred, *why, *run_notes(base.group), *_of_validity(base)),
        comparable_as=TRAINING,
    )


def _ratio(log_ratio: float | None, half_width: float | None) -> Interval | None:
    if log_ratio is None:
        return None
    if half_width is None:
        return Interval(value=exp(log_ratio))
    return Interval(value=exp(log_ratio), low=exp(log_ratio - half_width), high=exp(log_ratio + half_width))


def exp(logarithm: float) -> float:
    """Return e to the power, at most e^700: absurd numbers in a foreign file are no bug of ours."""
    return math.exp(min(logarithm, 700.0))


def _classify(
    pair: _Pair, half_width: float | None, spread: RunVariance, level: float
) -> tuple[str, list[str], int | None]:
    """Return the verdict, why it is no better one, and how many more runs would settle it."""
    if pair.row.is_barred:
        unsure = pair.row.group.is_steady and sample_of(pair.row.group) is None
        return (
            NOT_RANKED,
            [*pair.row.validity.failures, *([_why_no_interval(pair.row.group)] if unsure else [])],
            None,
        )
    if not pair.row.group.is_steady:
        return NOT_STEADY, [], None
    if pair.log_ratio is None:
        return NO_INTERVAL, ["no speed that compares with the baseline's is known"], None
    if half_width is None or pair.samples is None:
        if sample_of(pair.row.group) is None:
            return NO_INTERVAL, [_why_no_interval(pair.row.group)], None
        return NO_INTERVAL, [f"the baseline has no interval: {_why_no_interval(pair.base.group)}"], None
    name = classify(pair.log_ratio, half_width)
    why, more = [], None
    if name == UNRESOLVED:
        more = more_runs(
            pair.log_ratio, pair.samples, spread, level=level, other_machines=pair.other_machines
        )
        settle = min(_share_that_settles(pair.row.group), _share_that_settles(pair.base.group))
        more = math.ceil(more / settle) if more is not None else None
        more = more if more is not None and more <= MOST_RUNS_PROPOSED else None
        if more is not None:
            unsettled = " (some may not settle unless they are longer)" if settle < 1 else ""
            why.append(f"needs about {_num_more(more)}, and as many of the baseline{unsettled}")
        elif pair.other_machines and any(sample.num_machines < 2 for sample in pair.samples):
            why.append("needs runs on a second machine of each type")
        else:
            why.append(f"needs more than {MOST_RUNS_PROPOSED} more runs, and as many of the baseline")
    if any(sample.num_runs == 1 for sample in pair.samples):
        assumed = 100 * max(ASSUMED, spread.deviation)
        why.append(f"a single run is assumed to vary by {assumed:.2g}%")
    if pair.other_machines and any(sample.num_machines < 2 for sample in pair.samples):
        why.append(f"{MACHINE:.0%} is allowed for each type with a single machine")
    return name, why, more


def _share_that_settles(group: Group) -> float:
    return len(group.steady) / len(group.all_runs)


def _why_no_interval(group: Group) -> str:
    first = group.first
    if not group.is_steady:
        return "its step time did not settle"
    if not group.log_times:
        return "no time or speed is known"
    if first.setup.kind == "published":
        return "published, without repeats"
    return f"one run of {first.timing.num_retained_steps} measured steps, too few for an interval"


def _of_validity(item: PricedGroup) -> Iterator[str]:
    """Yield what is unknown of the row's numerics and convergence, and what is disregarded."""
    if item.unverified:
        for failure in item.validity.failures:
            yield f"ranked all the same (--allow-unverified): {failure}"
    yield from item.validity.notes


def _num_more(number: int) -> str:
    return f"{number} more run{'' if number == 1 else 's'}"

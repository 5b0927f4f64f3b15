"""How the rows of one workload compare with its baseline: ratios, a verdict each, and the reasons for it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fastlaunch.analysis.compiling import only_from_cache
from fastlaunch.analysis.idling import idle_note
from fastlaunch.analysis.loss_pairs import listed
from fastlaunch.analysis.notes import commit_notes, other_commits
from fastlaunch.analysis.pooling import Pool, arm_of, data_of, global_batch, log_speed_ratio
from fastlaunch.analysis.pricing import RowPrice
from fastlaunch.analysis.statistics import (
    ASSUMED,
    LEVEL,
    MACHINE,
    MOST_RUNS_PROPOSED,
    UNRESOLVED,
    Arm,
    Spread,
    Uncertainty,
    holm_levels,
    more_runs,
    p_value,
    uncertainty,
    verdict,
)
from fastlaunch.analysis.validity import Guard
from fastlaunch.measure.summarize import Interval
from fastlaunch_train.records.records import FAILED_CHECK

BASELINE, NO_INTERVAL, NOT_STEADY = "baseline", "no interval", "not steady"
NOT_RANKED = "not ranked"
TRAINING, THROUGHPUT = "training", "throughput"
_KINDS = {"records": "measured", "published": "published"}
#: Parts of a fingerprint that follow from the machine, which the row names anyway.
_OF_THE_MACHINE = ("device_name", "num_gpus_per_node")
#: What is told of it in words of its own.
_TOLD_APART = (*_OF_THE_MACHINE, "data")


@dataclass(frozen=True, kw_only=True)
class PricedPool:
    """The runs of a row with the price of one of their nodes, None if it is not known.

    guard: what is known of it besides its speed. unverified: what the guard holds against it does not bar it.
    """

    pool: Pool
    price: RowPrice | None
    guard: Guard
    unverified: bool = False

    @property
    def is_barred(self) -> bool:
        return bool(self.guard.failures) and not self.unverified


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """ratio: of samples per dollar, speed_ratio: of samples/s, to the baseline's, at Holm's level.

    more_runs: of the row and of the baseline each, about as many as would settle an unresolved verdict.
    """

    ratio: Interval | None
    speed_ratio: Interval | None
    verdict: str
    reasons: tuple[str, ...]
    comparable_as: str
    more_runs: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A row beside its baseline. log_ratio: of what the verdict is on, dollars where both have a price."""

    row: PricedPool
    base: PricedPool
    log_speed_ratio: float | None
    log_ratio: float | None
    arms: tuple[Arm, Arm] | None
    other_machines: bool
    error: Uncertainty | None
    level: float = LEVEL

    @property
    def is_priced(self) -> bool:
        return self.row.price is not None and self.base.price is not None


def judge(items: Sequence[PricedPool], base: PricedPool, spread: Spread) -> list[Judgement]:
    """A judgement for each of `items`, of which `base` is one; the verdicts are Holm-corrected together.

    Rows that are barred get no verdict and are none of those; their intervals are at 95%.
    """
    pairs = [_pair(item, base, spread) for item in items if item is not base]
    tested = [pair for pair in pairs if pair.error is not None and not pair.row.is_barred]
    levels = holm_levels(
        [p_value(pair.log_ratio, pair.error) for pair in tested if pair.log_ratio is not None and pair.error]
    )
    leveled = iter([replace(pair, level=level) for pair, level in zip(tested, levels, strict=True)])
    judged = iter(
        [
            _judgement(next(leveled) if pair.error and not pair.row.is_barred else pair, spread)
            for pair in pairs
        ]
    )
    return [next(judged) if item is not base else _of_baseline(base) for item in items]


def _pair(row: PricedPool, base: PricedPool, spread: Spread) -> _Pair:
    speed = log_speed_ratio(row.pool, base.pool)
    ratio = speed
    if speed is not None and row.price is not None and base.price is not None:
        ratio = speed + math.log(_usd_per_hour(base, base.price) / _usd_per_hour(row, row.price))
    ours, theirs = arm_of(row.pool), arm_of(base.pool)
    arms = (ours, theirs) if ours and theirs and ratio is not None else None
    other_machines = _type_of(row.pool) != _type_of(base.pool)
    return _Pair(
        row=row,
        base=base,
        log_speed_ratio=speed,
        log_ratio=ratio,
        arms=arms,
        other_machines=other_machines,
        error=uncertainty(arms, spread, other_machines=other_machines) if arms else None,
    )


def _usd_per_hour(item: PricedPool, price: RowPrice) -> float:
    return price.usd_per_hour * item.pool.first.num_nodes


def _type_of(pool: Pool) -> str | None:
    return pool.first.instance or pool.first.device_name


def _judgement(pair: _Pair, spread: Spread) -> Judgement:
    half_width = pair.error.half_width(pair.level) if pair.error else None
    row, base = pair.row.pool.first, pair.base.pool.first
    trains = (global_batch(row), row.sequence_length) == (global_batch(base), base.sequence_length)
    said, why, more = _verdict(pair, half_width, spread)
    return Judgement(
        ratio=_ratio(pair.log_ratio, half_width) if pair.is_priced else None,
        speed_ratio=_ratio(pair.log_speed_ratio, half_width),
        verdict=said,
        reasons=(*why, *_qualifications(pair), *_of_runs(pair.row.pool), *_of_guard(pair.row)),
        comparable_as=TRAINING if trains else THROUGHPUT,
        more_runs=more,
    )


def _of_baseline(base: PricedPool) -> Judgement:
    """The baseline beside itself: the ratios are 1 exactly."""
    one = Interval(value=1.0, low=1.0, high=1.0)
    timed = log_speed_ratio(base.pool, base.pool) is not None
    # That it did not settle is said of its runs below.
    why = [_why_no_interval(base.pool)] if base.pool.is_steady and not arm_of(base.pool) else []
    barred = base.guard.failures if base.is_barred else ()
    return Judgement(
        ratio=one if timed and base.price is not None else None,
        speed_ratio=one if timed else None,
        verdict=NOT_RANKED if barred else BASELINE,
        reasons=(*barred, *why, *_of_runs(base.pool), *_of_guard(base)),
        comparable_as=TRAINING,
    )


def _ratio(log_ratio: float | None, half_width: float | None) -> Interval | None:
    if log_ratio is None:
        return None
    if half_width is None:
        return Interval(value=exp(log_ratio))
    return Interval(value=exp(log_ratio), low=exp(log_ratio - half_width), high=exp(log_ratio + half_width))


def exp(logarithm: float) -> float:
    """e to the power, held back from overflowing: absurd numbers in a foreign file are no bug of ours."""
    return math.exp(min(logarithm, 700.0))


def _verdict(pair: _Pair, half_width: float | None, spread: Spread) -> tuple[str, list[str], int | None]:
    """The verdict, why it is no better one, and how many more runs would tell."""
    if pair.row.is_barred:
        unsure = pair.row.pool.is_steady and arm_of(pair.row.pool) is None
        return (
            NOT_RANKED,
            [*pair.row.guard.failures, *([_why_no_interval(pair.row.pool)] if unsure else [])],
            None,
        )
    if not pair.row.pool.is_steady:
        return NOT_STEADY, [], None
    if pair.log_ratio is None:
        return NO_INTERVAL, ["no speed that compares with the baseline's is known"], None
    if half_width is None or pair.arms is None:
        if arm_of(pair.row.pool) is None:
            return NO_INTERVAL, [_why_no_interval(pair.row.pool)], None
        return NO_INTERVAL, [f"the baseline has no interval: {_why_no_interval(pair.base.pool)}"], None
    said = verdict(pair.log_ratio, half_width)
    why, more = [], None
    if said == UNRESOLVED:
        more = more_runs(
            pair.log_ratio, pair.arms, spread, level=pair.level, other_machines=pair.other_machines
        )
        settle = min(_share_that_settles(pair.row.pool), _share_that_settles(pair.base.pool))
        more = math.ceil(more / settle) if more is not None else None
        more = more if more is not None and more <= MOST_RUNS_PROPOSED else None
        if more is not None:
            unsettled = ", of which not all settle (longer ones may)" if settle < 1 else ""
            why.append(f"about {more} more run{'' if more == 1 else 's'} of each{unsettled}")
        elif pair.other_machines and any(arm.num_machines < 2 for arm in pair.arms):
            why.append("runs on a second machine of each type are needed")
        else:
            why.append(f"more than {MOST_RUNS_PROPOSED} more runs of each")
    if any(arm.num_runs == 1 for arm in pair.arms):
        assumed = 100 * max(ASSUMED, spread.deviation)
        why.append(f"{assumed:.2g}% between runs is assumed where there is one run")
    if pair.other_machines and any(arm.num_machines < 2 for arm in pair.arms):
        why.append(f"{MACHINE:.0%} is allowed for each machine that stands alone for its type")
    return said, why, more


def _share_that_settles(pool: Pool) -> float:
    return len(pool.candidates) / len(pool.whole_runs)


def _why_no_interval(pool: Pool) -> str:
    first = pool.first
    if not pool.is_steady:
        return "its step time did not settle"
    if not pool.log_times:
        return "no time or speed is known"
    if first.kind == "published":
        return "published, without repeats"
    return f"one run of {first.num_retained_steps} steps that count, too few for an interval"


def _qualifications(pair: _Pair) -> Iterator[str]:
    """In what the row differs from its baseline besides what its columns say."""
    row, base = pair.row.pool.first, pair.base.pool.first
    ours, theirs = global_batch(row), global_batch(base)
    if ours != theirs:
        yield f"throughput, not training progress: global batch {ours} against {theirs}"
    if row.sequence_length != base.sequence_length:
        yield f"sequence length {row.sequence_length} against {base.sequence_length}: other samples"
    if pair.log_ratio is not None and not pair.is_priced:
        yield "by speed: no price is known"
    if row.data != base.data:
        yield f"data {row.data} against {base.data}"
    elif data_of(row) != data_of(base):
        yield f"trained on other data: {data_of(row)} against {data_of(base)}"
    if row.fingerprint and base.fingerprint:
        differing = [
            f"{name} ({row.fingerprint.get(name, 'none')} against {base.fingerprint.get(name, 'none')})"
            for name in dict.fromkeys((*base.fingerprint, *row.fingerprint))
            if name not in _TOLD_APART and row.fingerprint.get(name) != base.fingerprint.get(name)
        ]
        if differing:
            yield f"differs from the baseline in {', '.join(differing)}"
    elif row.kind != base.kind:
        yield f"{_KINDS[row.kind]} against {_KINDS[base.kind]}: versions may differ"
    yield from other_commits(pair.row.pool, pair.base.pool)
    limits, others = _power_limits(pair.row.pool), _power_limits(pair.base.pool)
    if limits and others and not set(limits) & set(others):
        yield f"GPUs at a power limit of {listed(limits)} against {listed(others)}"


def _power_limits(pool: Pool) -> list[str]:
    """`400 W`, `700 W`: of the GPUs of its runs, as far as they are known."""
    return [
        f"{watts:g} W" for watts in sorted({run.summary.power_limit_w or 0 for run in pool.all_runs} - {0})
    ]


def _of_runs(pool: Pool) -> Iterator[str]:
    """What to know of the row's own runs."""
    num_unsteady = len(pool.unsteady)
    if not pool.is_steady:
        yield f"the step time of {_num_runs(num_unsteady)} did not settle"
    elif num_unsteady:
        yield f"{_num_runs(num_unsteady)} left out: the step time did not settle"
    if pool.first.derived:
        yield "derived from published percentages"
    yield from commit_notes(pool)
    if len(limits := _power_limits(pool)) > 1:
        yield f"runs on GPUs at power limits of {listed(limits)} make one row"
    if note := idle_note([candidate.summary for candidate in pool.all_runs]):
        yield note
    if only_from_cache([candidate.summary for candidate in pool.whole_runs]):
        yield "compiled from a cache: a first run takes longer to compile"
    told = [candidate.summary.warnings for candidate in pool.candidates or pool.unsteady]
    for warning in told[0] if told else ():
        # What is of one run alone is told with that run; checks are judged in words of their own.
        if all(warning in other for other in told) and not warning.startswith(FAILED_CHECK):
            yield warning


def _of_guard(item: PricedPool) -> Iterator[str]:
    """What is not known of the row's numerics and convergence, and what is disregarded."""
    if item.unverified:
        yield from (f"ranked all the same (--allow-unverified): {failure}" for failure in item.guard.failures)
    yield from item.guard.notes


def _num_runs(number: int) -> str:
    return f"{number} run{'' if number == 1 else 's'}"

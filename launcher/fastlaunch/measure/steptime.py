"""The step time of one attempt from its ranks' records, after warm-up; and the steps of a run for charts.

docs/method.md describes the rule:

1.  A block's synchronised wall time is shared out over its steps in proportion to their device time, so a
    cut may fall inside a block and blocks still add up to what the clock said. Steps after the last block
    (a killed process) have no synchronised time and are left out.
2.  Warm-up: everything through the last compile, graph capture or allocator growth before 10 steps in a row
    have none, at least 10 steps and otherwise at most a quarter; then the first tenth of the rest. Nothing
    else is left out, whatever the outcome: what is compiled later is billed, and counts.
3.  The headline is the mean wall time of the retained steps on the slowest rank, untrimmed: the bill is
    linear in it.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastlaunch.measure.outcome import read_records
from fastlaunch.measure.record_files import RankRecord
from fastlaunch.measure.summary import Interval, Timing
from fastlaunch_train.records.records import Block, Eval, Phase

Array: TypeAlias = NDArray[np.float64]

MIN_WARMUP_STEPS = 10
#: The least steps after the first cut, so that a tenth of them is a step.
MIN_TIMED_STEPS = 10
#: A limit, since a compilation in the last step would otherwise make the whole run its warm-up.
MAX_WARMUP_SHARE = 0.25


class NoTiming(ValueError):
    """The reason why the records of an attempt yield no step time."""


@np.errstate(all="ignore")  # absurd numbers in a foreign file show in the result
def time_attempt(ranks: Sequence[RankRecord]) -> Timing:
    """Return the timing of one attempt by its ranks' records. Raises NoTiming if it has too few steps."""
    num_steps = min(sum(block.last_step - block.first_step + 1 for block in rank.blocks) for rank in ranks)
    first_cut = max(MIN_WARMUP_STEPS, _steps_until_warm(ranks, int(num_steps * MAX_WARMUP_SHARE)))
    if num_steps - first_cut < MIN_TIMED_STEPS:
        raise NoTiming(
            f"too few steps: {num_steps} were timed, the first {min(first_cut, num_steps)} are warm-up, "
            f"and {MIN_TIMED_STEPS} more are needed"
        )
    walls = np.stack([wall_times_s(rank)[:num_steps] for rank in ranks])
    walls -= _waits_for_paused_s(ranks, walls)
    cut = first_cut + (num_steps - first_cut) // 10
    retained = walls[:, cut:]
    slowest = int(np.argmax(retained.sum(axis=1)))
    totals_s = retained.sum(axis=1)
    if not (np.isfinite(totals_s) & (totals_s > 0)).all():
        raise NoTiming("the recorded wall times are zero or absurd")
    num_retained = num_steps - cut
    counted = slice(cut, num_steps)
    device_s = _of_steps(ranks, "step_time_s", counted).max(axis=0)
    samples = _of_steps(ranks, "num_samples", counted)
    # An epoch's last batch may have fewer samples; their number may be unknown.
    samples_growth = 0.0 if (samples <= 0).any() else _growth(samples.sum(axis=0, dtype=float))
    waits_s = _of_steps(ranks, "data_wait_s", counted).sum(axis=1)
    num_tokens = np.maximum(_of_steps(ranks, "num_tokens", counted), 0).sum(dtype=float)
    num_tokens -= _of_steps(ranks, "num_padding", counted).sum(dtype=float)
    return Timing(
        num_retained_steps=num_retained,
        step_time_s=Interval(value=float(retained[slowest].mean())),
        samples_per_step=None if (samples < 0).any() else float(samples.sum(dtype=float)) / num_retained,
        tokens_per_step=float(num_tokens) / num_retained or None,
        median_step_time_s=_finite(np.median(device_s)),
        p95_step_time_s=_finite(np.percentile(device_s, 95)),
        p5_step_time_s=_finite(np.percentile(device_s, 5)),
        data_wait_fraction=_finite((waits_s / totals_s).max()),
        utilization=_utilization(ranks, cut),
        late=_finite(_growth(retained[slowest]) - samples_growth),
        warmup_s=_finite(walls[slowest, :cut].sum()),
        num_warmup_steps=cut,
        compiled_late=_compiled_late(ranks, cut),
    )


def _of_steps(ranks: Sequence[RankRecord], name: str, steps: slice) -> NDArray[Any]:
    """Return a field of the ranks' `steps`, with `Columns`' value for None. Shape: (ranks, steps)."""
    return np.stack([np.asarray(rank.steps.column(name))[steps] for rank in ranks])


def _growth(values: Array) -> np.floating:
    """Return the log of the ratio of the last half's mean to the mean of all values. Shape: (steps,)."""
    growth: np.floating = np.log(values[values.size // 2 :].mean() / values.mean())
    return growth


def _finite(value: np.floating) -> float | None:
    return float(value) if np.isfinite(value) else None


def _utilization(ranks: Sequence[RankRecord], cut: int) -> float | None:
    """Return the mean utilization after `cut` steps of the least busy GPU; None without samples.

    A block counts by its steps after the cut, if these are most of its steps.
    """
    busy = []
    for rank in ranks:
        begin = rank.header["first_step"] + cut
        sampled = [
            (block.last_step + 1 - max(block.first_step, begin), block.utilization)
            for block in rank.blocks
            if block.utilization is not None and block.first_step + block.last_step >= 2 * begin - 1
        ]
        if sampled:
            steps, shares = zip(*sampled, strict=True)
            busy.append(float(np.average(shares, weights=steps)))
    return min(busy, default=None)


def _waits_for_paused_s(ranks: Sequence[RankRecord], walls: Array) -> Array:
    """Return how long each step of a script's rank waited for a rank that paused before it, as to evaluate.

    A pause is not part of a step on its own rank. A rank that meets it in a collective takes longer for the
    step, at most by the pause. Shapes: (ranks, steps).
    """
    pauses = np.zeros_like(walls)
    for row, rank in zip(pauses, ranks, strict=True):
        lines: list[Phase | Eval] = [*rank.phases, *rank.evals] if "script" in rank.header else []
        for line in lines:
            before = line.step - rank.header["first_step"] + 1
            if 0 < before < row.size:
                row[before] += line.seconds
    paused = np.take_along_axis(walls, pauses.argmax(axis=0)[np.newaxis], axis=0)
    waits: Array = np.clip(np.minimum(pauses.max(axis=0) - pauses, walls - paused), 0.0, None)
    return waits


def wall_times_s(rank: RankRecord) -> Array:
    """Return the wall time of each synchronised step of one rank. Shape: (steps in blocks,)."""
    times_s = np.asarray(rank.steps.column("step_time_s"))
    shares = []
    first = 0
    for block in rank.blocks:
        num_steps = block.last_step - block.first_step + 1
        of_block = times_s[first : first + num_steps]
        first += num_steps
        total_s = of_block.sum()
        shares.append(
            block.wall_s * (of_block / total_s if total_s > 0 else np.full(num_steps, 1 / num_steps))
        )
    return np.concatenate(shares) if shares else np.zeros(0)


def _compiled_late(ranks: Sequence[RankRecord], num_warmup_steps: int) -> bool:
    """Return whether a rank compiled among the steps after the first `num_warmup_steps` of the attempt."""
    return any(
        block.last_step - rank.header["first_step"] >= num_warmup_steps
        for rank in ranks
        for block in _compiling_blocks(rank)
    )


def _steps_until_warm(ranks: Sequence[RankRecord], most: int) -> int:
    """Return the number of steps through the last compile, graph capture or allocator growth before
    MIN_WARMUP_STEPS consecutive steps without any on all ranks; `most` if it may have been later.
    """
    warm = 0
    for first, last in sorted(span for rank in ranks for span in _warmup_spans(rank)):
        if first - warm > MIN_WARMUP_STEPS:
            break
        warm = max(warm, last)
    return min(warm, most)


def _warmup_spans(rank: RankRecord) -> Iterator[tuple[int, int]]:
    """Yield first and last step, from 1 in each attempt, of spans in which the rank compiled or allocated.

    Growth of the allocator counts from its size after the first block.
    """
    before_first: int = rank.header["first_step"] - 1
    compiled = [(phase.step, phase.step) for phase in rank.phases if phase.name == "compile"]
    blocks = _compiling_blocks(rank)
    reserved_gib = float("inf")
    for block in rank.blocks:
        now_reserved_gib = reserved_gib if block.reserved_gib is None else block.reserved_gib
        if now_reserved_gib > reserved_gib:
            blocks.append(block)
        reserved_gib = now_reserved_gib
    for first, last in compiled + [(block.first_step, block.last_step) for block in blocks]:
        yield first - before_first, last - before_first


def _compiling_blocks(rank: RankRecord) -> list[Block]:
    """Return the blocks in which the count of compiled graphs, at first 0, rose."""
    counts = [0, *(block.num_compiles for block in rank.blocks)]
    return [
        block
        for block, (before, after) in zip(rank.blocks, itertools.pairwise(counts), strict=True)
        if after > before
    ]


#: The points of a series in a chart.
NUM_POINTS = 200


@dataclass(frozen=True, kw_only=True)
class RankSeries:
    """One rank's steps: two series, thinned separately since each has its own extremes."""

    rank: int
    steps: Sequence[int]
    step_times_s: Sequence[float]  # synchronised wall time, as in the step time
    loss_steps: Sequence[int]
    losses: Sequence[float]  # of training, without steps whose loss is not a number


def read_series(files: Iterable[Path], num_points: int = NUM_POINTS) -> tuple[RankSeries, ...]:
    """Return each rank's series from the record files of its attempts, in order of rank.

    If attempts repeat a step, the last one counts. Unreadable files are left out, since the run's summary
    exists without them.
    """
    records, _ = read_records(files)
    by_rank: dict[int, list[RankRecord]] = {}
    # The first of equal steps counts, so the last attempt comes first.
    for record in sorted(records, key=lambda record: record.header["attempt"], reverse=True):
        by_rank.setdefault(record.header["rank"], []).append(record)
    return tuple(_series(rank, attempts, num_points) for rank, attempts in sorted(by_rank.items()))


@np.errstate(all="ignore")  # absurd numbers in a foreign file are left out
def _series(rank: int, attempts: Sequence[RankRecord], num_points: int) -> RankSeries:
    times_s = [wall_times_s(record) for record in attempts]
    numbers, values = (
        [np.asarray(of.steps.column(name))[: len(timed)] for of, timed in zip(attempts, times_s, strict=True)]
        for name in ("step", "loss")
    )
    steps, first = np.unique(np.concatenate(numbers), return_index=True)
    step_times_s, losses = np.concatenate(times_s)[first], np.concatenate(values)[first]
    timed, scored = np.isfinite(step_times_s), np.isfinite(losses)
    slow, high = thin(step_times_s[timed], num_points), thin(losses[scored], num_points)
    return RankSeries(
        rank=rank,
        steps=steps[timed][slow].tolist(),
        step_times_s=step_times_s[timed][slow].tolist(),
        loss_steps=steps[scored][high].tolist(),
        losses=losses[scored][high].tolist(),
    )


def thin(values: Array, num_points: int) -> NDArray[np.intp]:
    """Return the positions of at most `num_points` (4 or more) values: ends, and extremes of equal parts."""
    number = len(values)
    if number <= num_points:
        return np.arange(number)
    # Use rows of equal length, and pad the last row with the last value.
    num_parts = (num_points - 2) // 2
    length = -(-number // num_parts)
    parts = np.pad(values, (0, num_parts * length - number), mode="edge").reshape(num_parts, length)
    starts = np.arange(num_parts) * length
    extremes = [starts + parts.argmin(axis=1), starts + parts.argmax(axis=1)]
    return np.unique(np.minimum(np.concatenate([[0], *extremes, [number - 1]]), number - 1))

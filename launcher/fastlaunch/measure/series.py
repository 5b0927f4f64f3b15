"""The steps of a run for charts: thinned with their extremes, by rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastlaunch.measure.outcome import read_records
from fastlaunch.measure.steptime import wall_times_s
from fastlaunch_train.records.records import RankRecord

Array: TypeAlias = NDArray[np.float64]

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

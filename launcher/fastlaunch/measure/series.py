"""The steps of a run as a chart draws them: thinned, with their extremes, each rank by itself.

Read from record files that were checked when the run was collected, so without checking every line again: a
page of 300 runs reads hundreds of thousands of them.
"""

import codecs
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastlaunch_train.records.records import MAX_LINE_BYTES, header_problem, open_unpacked

Array: TypeAlias = NDArray[np.float64]

#: The points of a series in a chart.
NUM_POINTS = 200
#: So much is parsed at once.
_PART_BYTES = MAX_LINE_BYTES


@dataclass(frozen=True, kw_only=True)
class RankSeries:
    """One rank's steps in one attempt: two series, thinned apart, as each has its own extremes."""

    rank: int
    steps: Sequence[int]
    step_times_s: Sequence[float]  # synchronised wall time, as in the step time
    loss_steps: Sequence[int]
    losses: Sequence[float]  # of training; steps whose loss is no number are left out


def read_series(files: Iterable[Path], num_points: int = NUM_POINTS) -> tuple[RankSeries, ...]:
    """Return the series of each rank by the record files of its attempts, in order of the ranks.

    A step that a later attempt did again is the later one's. Files that cannot be read are left out, since
    the run's summary is there without them.
    """
    attempts: dict[int, dict[int, _Columns]] = {}
    for path in files:
        try:
            columns = _read(path)
        except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
            continue
        attempts.setdefault(columns.rank, {})[columns.attempt] = columns
    return tuple(
        _series(rank, [by_attempt[number] for number in sorted(by_attempt)], num_points)
        for rank, by_attempt in sorted(attempts.items())
    )


@dataclass(frozen=True, kw_only=True)
class _Columns:
    rank: int
    attempt: int
    steps: NDArray[np.int64]  # in blocks
    step_times_s: Array
    losses: Array  # nan where there is none


def _read(path: Path) -> _Columns:
    header: Mapping[str, Any] = {}
    steps, times_s, losses = array("q"), array("d"), array("d")
    blocks = []
    for line in _lines(path):
        kind = line["kind"]
        if kind == "step":
            steps.append(line["step"])
            times_s.append(line["step_time_s"])
            losses.append(math.nan if line["loss"] is None else line["loss"])
        elif kind == "block":
            blocks.append((line["last_step"] - line["first_step"] + 1, line["wall_s"]))
            if not 0 < blocks[-1][0] <= len(steps):
                raise ValueError("a block of more steps than there are")
        elif kind == "header":
            header = line
    if problem := header_problem(header):
        raise ValueError(problem)
    num_steps = sum(number for number, _ in blocks)
    return _Columns(
        rank=header["rank"],
        attempt=header["attempt"],
        steps=np.array(steps[:num_steps], dtype=np.int64),
        step_times_s=_shared_out(np.array(times_s[:num_steps], dtype=float), blocks),
        losses=np.array(losses[:num_steps], dtype=float),
    )


def _lines(path: Path) -> Iterator[Any]:
    """Yield the lines, a part of the file at once: three times as fast as line by line.

    A last line that was cut short is left out. Raises ValueError for one that is too long, and OSError.
    """
    rest = b""
    with open_unpacked(path) as file:
        while part := file.read(_PART_BYTES):
            whole, end, rest = (rest + part).rpartition(b"\n")
            if end:
                whole = whole.removeprefix(codecs.BOM_UTF8).replace(b"\n", b",")
                yield from json.loads(b"[%b]" % whole)
            if len(rest) > MAX_LINE_BYTES:
                raise ValueError("a line is too long")


def _shared_out(times_s: Array, blocks: Sequence[tuple[int, float]]) -> Array:
    """Return the walls of blocks shared out over their steps by device time, as `steptime` does."""
    if not blocks:
        return times_s
    number = np.repeat(np.arange(len(blocks)), [length for length, _ in blocks])[: len(times_s)]
    totals_s = np.bincount(number, weights=times_s, minlength=len(blocks))
    walls_s, lengths = np.array([wall_s for _, wall_s in blocks]), np.array([length for length, _ in blocks])
    with np.errstate(all="ignore"):
        shares = np.where(totals_s[number] > 0, times_s / totals_s[number], 1 / lengths[number])
    return walls_s[number] * shares


def _series(rank: int, attempts: Sequence[_Columns], num_points: int) -> RankSeries:
    # The first of equal steps counts, so the last attempt comes first.
    all_steps = np.concatenate([of.steps for of in reversed(attempts)])
    steps, first = np.unique(all_steps, return_index=True)
    columns = [np.stack([of.step_times_s, of.losses], axis=1) for of in reversed(attempts)]
    values = np.concatenate(columns)[first]
    timed, scored = np.isfinite(values[:, 0]), np.isfinite(values[:, 1])
    times, losses = thin(values[timed, 0], num_points), thin(values[scored, 1], num_points)
    return RankSeries(
        rank=rank,
        steps=steps[timed][times].tolist(),
        step_times_s=values[timed, 0][times].tolist(),
        loss_steps=steps[scored][losses].tolist(),
        losses=values[scored, 1][losses].tolist(),
    )


def thin(values: Array, num_points: int) -> NDArray[np.intp]:
    """Return the places of at most `num_points` values, 4 or more: the ends, and extremes of equal parts."""
    number = len(values)
    if number <= num_points:
        return np.arange(number)
    # In rows of equal length; the last value fills up the last of them.
    num_parts = (num_points - 2) // 2
    length = -(-number // num_parts)
    parts = np.pad(values, (0, num_parts * length - number), mode="edge").reshape(num_parts, length)
    starts = np.arange(num_parts) * length
    extremes = [starts + parts.argmin(axis=1), starts + parts.argmax(axis=1)]
    return np.unique(np.minimum(np.concatenate([[0], *extremes, [number - 1]]), number - 1))

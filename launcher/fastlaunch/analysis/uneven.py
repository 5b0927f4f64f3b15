"""Rows whose runs spread very unequally, although the intervals of all are made with one deviation."""

import statistics
from collections.abc import Iterator, Sequence

from fastlaunch.analysis.pooling import Pool
from fastlaunch.analysis.statistics import FLOOR, LEVEL, f_survival

#: Of rows of so many runs or more the deviations are held against each other.
_LEAST_RUNS = 3


def uneven_spread(rows: Sequence[Pool]) -> Iterator[str]:
    """What is to be said of the runs of these rows of a workload, if anything is.

    The largest and the smallest deviation are compared by their F ratio, at a level that is shared out over
    all pairs of rows (Bonferroni).
    """
    found = [
        (max(FLOOR, statistics.stdev(row.log_times)), len(row.log_times) - 1) for row in rows if _counts(row)
    ]
    if len(found) < 2:
        return
    (small, few), (large, many) = min(found), max(found)
    if f_survival((large / small) ** 2, many, few) * len(found) * (len(found) - 1) <= LEVEL:
        told = [statistics.stdev(row.log_times) for row in rows if _counts(row)]
        yield (
            f"{rows[0].first.workload}: the runs of its rows deviate by {min(told):.1%} to {max(told):.1%}"
            " from their means, and intervals are made with one deviation for all of them"
        )


def _counts(row: Pool) -> bool:
    return len(row.log_times) >= _LEAST_RUNS

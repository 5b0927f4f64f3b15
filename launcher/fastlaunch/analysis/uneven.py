"""Rows whose runs spread very unequally: one deviation for all of them would be wrong for most."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fastlaunch.analysis.statistics import FLOOR, LEAST_OWN_DOF, LEVEL, Spread, f_survival

#: Of rows of so many runs or more the deviations are held against each other, and used where they differ.
_LEAST_RUNS = LEAST_OWN_DOF + 1


def told_apart(spread: Spread, rows: Sequence[Sequence[float]]) -> Spread:
    """`spread`, and whether the rows of a workload deviate too unequally for it. rows: log times by row.

    The largest and the smallest deviation are compared by their F ratio, at a level that is shared out over
    all pairs of rows (Bonferroni). Those below FLOOR count as that.
    """
    found = [(max(FLOOR, deviation), dof) for deviation, dof in _deviations(rows)]
    if len(found) < 2:
        return spread
    (small, few), (large, many) = min(found), max(found)
    p = f_survival((large / small) ** 2, many, few) * len(found) * (len(found) - 1)
    return replace(spread, is_uneven=p <= LEVEL)


def uneven_notes(workload: str, spread: Spread, rows: Sequence[Sequence[float]]) -> Iterator[str]:
    """What is to be said of the runs of these rows of a workload, of such a spread, if anything is."""
    if spread.is_uneven:
        seen = [deviation for deviation, _ in _deviations(rows)]
        yield (
            f"{workload}: the runs of its rows deviate by {min(seen):.1%} to {max(seen):.1%} from their"
            f" means; rows of {_LEAST_RUNS} runs or more are judged by their own deviations"
        )


def _deviations(rows: Sequence[Sequence[float]]) -> list[tuple[float, int]]:
    """Deviation and degrees of freedom of the rows of enough runs to tell."""
    return [(statistics.stdev(times), len(times) - 1) for times in rows if len(times) >= _LEAST_RUNS]

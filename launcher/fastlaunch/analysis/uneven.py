"""Rows whose runs spread very unequally, although the intervals of all are made with one deviation."""

import statistics
from collections.abc import Iterator, Sequence

from fastlaunch.analysis.pooling import Pool
from fastlaunch.analysis.statistics import FLOOR

#: Of rows of so many runs or more the deviations are held against each other.
_LEAST_RUNS = 3
#: The deviations of two rows of three runs, whose runs spread alike, are further apart in one case of twenty.
_WORTH_TELLING = 6.0


def uneven_spread(rows: Sequence[Pool]) -> Iterator[str]:
    """What is to be said of the runs of these rows of a workload, if anything is."""
    deviations = {
        row.first.recipe: statistics.stdev(row.log_times) for row in rows if len(row.log_times) >= _LEAST_RUNS
    }
    if len(deviations) < 2:
        return
    close = min(deviations, key=deviations.__getitem__)
    wide = max(deviations, key=deviations.__getitem__)
    if deviations[wide] > _WORTH_TELLING * max(FLOOR, deviations[close]):
        yield (
            f"the runs of {wide} deviate by {deviations[wide]:.1%} from their mean and those of {close} by"
            f" {deviations[close]:.1%}: intervals are made with one deviation for all rows, too small for the"
            " first and too large for the second"
        )

"""Whether the GPUs of a row wait for their host, so that a faster one would gain little."""

import math
from collections.abc import Sequence

from fastlaunch.analysis.statistics import mean_of
from fastlaunch.measure.summarize import RunSummary

#: A GPU that runs kernels for less of the time than this is said to wait.
BUSY = 0.9


def idle_note(runs: Sequence[RunSummary]) -> str | None:
    """What is to be said of GPUs that wait in these runs of a row; None if they do not, or nobody looked."""
    sampled = [run for run in runs if run.utilization is not None]
    busy = mean_of([run.utilization for run in sampled])
    if busy is None or busy >= BUSY:
        return None
    fetching = mean_of([run.data_wait_fraction for run in sampled]) or 0.0
    waits = f"a GPU computes {math.floor(100 * busy + 1e-9)}% of the time and waits for"
    if fetching < (1 - busy) / 2:
        more = "a larger batch, or CUDA graphs where there are none,"
        return f"{waits} its host: {more} may gain more than a faster GPU"
    if runs[0].data == "synthetic":
        return f"{waits} made-up data, which its host takes {fetching:.0%} of the time to write"
    return (
        f"{waits} data, which its host takes {fetching:.0%} of the time to fetch:"
        " more --num-workers or a faster disk may gain more than a faster GPU"
    )

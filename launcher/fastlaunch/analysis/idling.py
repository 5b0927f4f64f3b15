"""Whether the GPUs of a row wait for their host, so that a faster one would gain little."""

from collections.abc import Sequence

from fastlaunch.analysis.statistics import mean_of
from fastlaunch.metrics import RunSummary

#: A GPU that runs kernels for less of the time than this is said to wait.
BUSY = 0.9


def idle_note(runs: Sequence[RunSummary]) -> str | None:
    """What is to be said of GPUs that wait in these runs; None if they do not, or none was looked at."""
    busy = mean_of([run.utilization for run in runs])
    if busy is None or busy >= BUSY:
        return None
    fetching = mean_of([run.data_wait_fraction for run in runs]) or 0.0
    if fetching >= (1 - busy) / 2:
        cause = f"for data, which its host takes {fetching:.0%} of the time to fetch"
        more = "more --num-workers or a faster disk"
    else:
        cause = "for its host"
        more = "a larger batch or CUDA graphs (compile-reduce-overhead)"
    return f"a GPU computes {busy:.0%} of the time and waits {cause}: {more} may gain more than a faster GPU"

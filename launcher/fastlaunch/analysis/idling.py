"""Whether the GPUs of a row wait for their host, so that a faster one would gain little."""

from collections.abc import Sequence

from fastlaunch.analysis.statistics import mean_of
from fastlaunch.metrics import RunSummary

#: A GPU that runs kernels for less of the time than this is said to wait.
BUSY = 0.9
#: Modes of torch.compile, in recipes' names and overrides, that start a step's kernels all at once.
_GRAPHS = ("reduce-overhead", "max-autotune")


def idle_note(runs: Sequence[RunSummary]) -> str | None:
    """What is to be said of GPUs that wait in these runs of a row; None if they do not, or nobody looked."""
    busy = mean_of([run.utilization for run in runs])
    if busy is None or busy >= BUSY:
        return None
    fetching = mean_of([run.data_wait_fraction for run in runs]) or 0.0
    waits = f"a GPU computes {busy:.0%} of the time and waits for"
    if fetching < (1 - busy) / 2:
        graphs = any(mode in runs[0].recipe for mode in _GRAPHS)
        faster = "a larger batch" if graphs else "a larger batch or CUDA graphs (compile-reduce-overhead)"
        return f"{waits} its host: {faster} may gain more than a faster GPU"
    if runs[0].data == "synthetic":
        return f"{waits} made-up data, which its host takes {fetching:.0%} of the time to write"
    return (
        f"{waits} data, which its host takes {fetching:.0%} of the time to fetch:"
        " more --num-workers or a faster disk may gain more than a faster GPU"
    )

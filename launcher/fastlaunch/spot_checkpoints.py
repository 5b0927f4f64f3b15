"""Whether checkpoints are quick enough for spot, by what earlier runs measured."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fastlaunch.job import JobSpec

if TYPE_CHECKING:
    from fastlaunch.runs import Ledger

#: Of the two minutes between EC2's notice and its end: the rest is for the step under way and the upload.
LONGEST_S = 60.0


def slow_checkpoint(ledger: "Ledger", jobs: Iterable[JobSpec]) -> str | None:
    """A warning for spot, if a run of the same workload and recipe took long to write a checkpoint."""
    asked = {(job.workload, job.recipe.label) for job in jobs if job.purchase == "spot"}
    if not asked:
        return None
    measured = [
        (run.summary.checkpoint_s, run)
        for run in ledger.fetch_comparable(all_runs=True)
        if (run.workload, run.recipe) in asked and run.summary and run.summary.checkpoint_s is not None
    ]
    longest_s, run = max(measured, key=lambda item: item[0], default=(0.0, None))
    if run is None or longest_s <= LONGEST_S:
        return None
    return (
        f"a checkpoint of {run.recipe} on {run.workload} took {longest_s:.0f} s to write (run {run.id}): EC2 "
        f"gives a spot instance two minutes, upload included; the one it is taken in may be lost"
    )

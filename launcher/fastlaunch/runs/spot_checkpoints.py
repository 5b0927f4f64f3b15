"""Whether checkpoints are quick enough for spot, by what earlier runs measured."""

from collections.abc import Iterable

from fastlaunch.jobs.spec import JobSpec
from fastlaunch.ledger.ledger import Ledger

#: Of the two minutes between EC2's notice and its end: the rest is for the step under way and the upload.
LONGEST_S = 60.0
#: What becomes of a slower checkpoint. SageMaker documents 120 s between SIGTERM and the end for jobs that
#: are stopped (API_StoppingCondition), but for jobs that lose their spot machine only that they start again
#: from what had been copied to S3 (model-checkpoints).
_CONSEQUENCES = {
    "ec2": "EC2 gives a spot instance two minutes, upload included; a checkpoint under way may be lost",
    "sagemaker": (
        "SageMaker promises no time for a checkpoint before it takes a spot instance; the job goes on from"
        " the last that reached S3"
    ),
}


def slow_checkpoint(ledger: Ledger, jobs: Iterable[JobSpec], *, backend: str) -> str | None:
    """Return a warning if a run of the same workload and recipe took long to write a checkpoint."""
    on_spot = {(job.workload, job.recipe.label) for job in jobs if job.purchase == "spot"}
    if not on_spot:
        return None
    measured = [
        (run.summary.checkpoints.longest_s, run)
        for run in ledger.fetch_comparable(all_runs=True)
        if (run.workload, run.recipe) in on_spot
        and run.summary
        and run.summary.checkpoints.longest_s is not None
    ]
    longest_s, run = max(measured, key=lambda item: item[0], default=(0.0, None))
    if run is None or longest_s <= LONGEST_S:
        return None
    return (
        f"a checkpoint of {run.recipe} on {run.workload} took {longest_s:.0f} s to write (run {run.id}): "
        f"{_CONSEQUENCES[backend]}"
    )

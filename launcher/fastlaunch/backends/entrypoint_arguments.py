"""A job as arguments of the training entrypoint, the same wherever it runs. `--output` is the backend's."""

from fastlaunch.job import JobSpec


def entrypoint_arguments(job: JobSpec) -> tuple[str, ...]:
    """What follows `python -m fastlaunch_train`, less `--output DIR` and, on later attempts, `--resume`."""
    arguments = ["--workload", job.workload, "--recipe", job.recipe.name]
    for field, value in job.recipe.overrides:
        arguments += ["--set", f"{field}={value}"]
    arguments += ["--batch-size", "auto" if job.batch_size is None else str(job.batch_size)]
    arguments += ["--steps", str(job.steps), "--seed", str(job.seed), "--data", job.data]
    if job.data != "synthetic":
        arguments += ["--num-workers", str(job.num_workers)]
    if job.checkpoint_every:
        arguments += ["--checkpoint-every", str(job.checkpoint_every)]
    return tuple(arguments)

"""A job as arguments of the training entrypoint, the same wherever it runs. `--output` is the backend's."""

from fastlaunch.jobs.spec import JobSpec


def entrypoint_arguments(job: JobSpec) -> tuple[str, ...]:
    """What follows `python -m fastlaunch_train`, less `--output DIR` and, on later attempts, `--resume`."""
    arguments = ["--workload", job.workload, "--recipe", job.recipe.name]
    for field, value in job.recipe.overrides:
        arguments += ["--set", f"{field}={value}"]
    arguments += ["--batch-size", "auto" if job.batch_size is None else str(job.batch_size)]
    length = ["--steps", str(job.steps)] if job.epochs is None else ["--epochs", str(job.epochs)]
    arguments += [*length, "--seed", str(job.seed), "--data", job.data]
    if job.data != "synthetic" and job.num_workers is not None:
        arguments += ["--num-workers", str(job.num_workers)]
    if job.checkpoint_every:
        arguments += ["--checkpoint-every", str(job.checkpoint_every)]
    if job.eval_every:
        arguments += ["--eval-every", str(job.eval_every)]
    for option in ("model", "tokenizer", "sequence_length"):
        value = getattr(job, option)
        if value is not None:
            arguments += [f"--{option.replace('_', '-')}", str(value)]
    return tuple(arguments)

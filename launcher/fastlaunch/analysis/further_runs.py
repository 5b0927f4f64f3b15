"""The command that makes further runs beside those that there are, each of a seed that no pair has yet."""

import shlex
from collections.abc import Iterable, Sequence

from fastlaunch.analysis.held_out import curve
from fastlaunch.metrics import RunSummary
from fastlaunch_train.workloads import WorkloadError, workload_info


def next_seed(runs: Iterable[RunSummary]) -> int:
    """The first seed after all those of `runs`: repeats count on from it, each with a seed of its own."""
    return max((run.seed for run in runs if run.seed is not None), default=-1) + 1


def seeds(first: int, number: int) -> str:
    """The options of `submit` for `number` runs of the seeds from `first` on."""
    return f"--seed {first} --repeats {number}"


def submit_command(
    runs: Sequence[RunSummary], recipes: Sequence[str], *, service: str, first_seed: int, repeats: int
) -> str:
    """The command that makes `repeats` further runs, asked for as `runs` were, of each of `recipes`.

    recipes: labels that share their overrides. service: which the runs' instance was rented of, `ec2` or
    `sagemaker`. Where data lie stands in no record: PATH is left to fill in.
    """
    like = runs[0]
    names = [label.split()[0] for label in recipes]
    # The prefix says on which of the two, and a record has the type as EC2 calls it.
    prefix = "ml." if service == "sagemaker" else ""
    words = ["--local"] if like.instance is None else ["--instance", f"{prefix}{like.instance}"]
    # Of several nodes here nothing can be submitted: as many processes on one train alike.
    if like.num_nodes > 1 and like.instance is not None:
        words += ["--num-nodes", str(like.num_nodes)]
    words += ["--workload", like.workload, "--recipe", ",".join(names)]
    for override in recipes[0].split()[1:]:
        words += ["--set", override]
    words += ["--batch-size", str(like.batch_size_per_gpu)]
    if like.instance is None and (like.num_gpus > 1 or _is_of_gpu(like)):
        words += ["--nproc", str(like.num_gpus)]
    if like.data not in ("synthetic", "published"):
        words += ["--data", f"{like.data}:PATH" if like.data in ("folder", "file") else like.data]
    if (model := like.fingerprint.get("model")) is not None:
        words += ["--model", model]
    if like.sequence_length is not None and _takes_a_length(like.workload):
        words += ["--sequence-length", str(like.sequence_length)]
    words += (
        ["--steps", str(max(1, *(run.num_steps for run in runs)))] if any(r.num_steps for r in runs) else []
    )
    if period := _evaluates_every(runs):
        words += ["--eval-every", str(period)]
    return f"fastlaunch submit {shlex.join(words)} {seeds(first_seed, repeats)}"


def _is_of_gpu(run: RunSummary) -> bool:
    return run.device_name is not None and "NVIDIA" in run.device_name


def _takes_a_length(workload: str) -> bool:
    try:
        return "sequence_length" in workload_info(workload).takes
    except WorkloadError:
        return False


def _evaluates_every(runs: Iterable[RunSummary]) -> int | None:
    """Steps between evaluations, as the first of a run says; None where there are none."""
    return next((min(steps) for run in runs if (steps := [step for step in curve(run) if step > 0])), None)

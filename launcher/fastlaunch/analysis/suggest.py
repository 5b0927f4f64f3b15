"""The command that makes further runs beside those that there are, each of a seed that no pair has yet."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fastlaunch.analysis.held_out import curve
from fastlaunch.analysis.pooling import Candidate
from fastlaunch.measure.summarize import RunSummary
from fastlaunch_train.workloads import WorkloadError, workload_info

#: Steps between checkpoints of spot, which `submit` wants to know, where the runs made none: a quarter of the
#: steps, and at most so many, as it proposes itself.
_MOST_BETWEEN_CHECKPOINTS = 500


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an instance was rented, of `ec2` or `sagemaker`. region: None for the user's own."""

    service: str
    region: str | None
    purchase: str


def place_of(run: Candidate, *, own_region: str) -> Place:
    """Where `run` was asked to be. own_region: where `submit` asks when it is not told."""
    service, region, purchase = run.asked
    return Place(service=service, region=None if region == own_region else region, purchase=purchase)


def next_seed(runs: Iterable[RunSummary]) -> int:
    """The first seed after all those of `runs`: repeats count on from it, each with a seed of its own."""
    return max((run.seed for run in runs if run.seed is not None), default=-1) + 1


def seeds(first: int, number: int) -> str:
    """The options of `submit` for `number` runs of the seeds from `first` on."""
    return f"--seed {first} --repeats {number}"


def submit_command(
    runs: Sequence[RunSummary], recipes: Sequence[str], *, place: Place, first_seed: int, repeats: int
) -> str:
    """The command that makes `repeats` further runs, asked for as `runs` were, of each of `recipes`.

    recipes: labels that share their overrides. place: of the runs' instance, if they had one. Where data lie
    stands in no record, nor which capacity block it was: PATH and cr-... are left to fill in.
    """
    like = runs[0]
    names = [label.split()[0] for label in recipes]
    words = ["--local"] if like.instance is None else list(_rented(runs, like.instance, place))
    words += ["--workload", like.workload, "--recipe", ",".join(names)]
    for override in recipes[0].split()[1:]:
        words += ["--set", override]
    words += ["--batch-size", str(like.batch_size_per_gpu)]
    if like.instance is None and (like.num_gpus > 1 or _is_of_gpu(like)):
        words += ["--nproc", str(like.num_gpus)]
    if like.data not in ("synthetic", "published"):
        words += ["--data", f"{like.data}:PATH" if like.data in ("folder", "file") else like.data]
    if (num_workers := like.fingerprint.get("num_data_workers")) is not None:
        words += ["--num-workers", num_workers]
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


def _rented(runs: Sequence[RunSummary], instance: str, place: Place) -> Iterator[str]:
    """The options that rent the runs' machines once more."""
    # The prefix says on which of the two, and a record has the type as EC2 calls it.
    yield from ("--instance", f"ml.{instance}" if place.service == "sagemaker" else instance)
    if place.region is not None:
        yield from ("--region", place.region)
    if place.purchase != "on-demand":
        yield from ("--purchase", place.purchase)
    if place.purchase == "capacity-block":
        yield from ("--reservation", "cr-...")
    if place.purchase == "spot":
        yield from ("--checkpoint-every", str(_saves_every(runs)))
    # Of several nodes here nothing can be submitted: as many processes on one train alike.
    if runs[0].num_nodes > 1:
        yield from ("--num-nodes", str(runs[0].num_nodes))


def _saves_every(runs: Sequence[RunSummary]) -> int:
    """Steps between checkpoints, as the first run that made some did."""
    for run in runs:
        if run.num_checkpoints and run.last_checkpoint_step:
            return max(1, run.last_checkpoint_step // run.num_checkpoints)
    return max(1, min(_MOST_BETWEEN_CHECKPOINTS, max(run.num_steps for run in runs) // 4))


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

"""The command for more runs like given ones, with unused seeds."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fastlaunch.analysis.convergence import curve
from fastlaunch.analysis.pooling import MeasuredRun
from fastlaunch.catalog.hardware import TRAINING_PLAN
from fastlaunch.measure.summary import RunSummary
from fastlaunch_train.recipes.recipe import Recipe
from fastlaunch_train.workloads.registry import WorkloadError, WorkloadInfo, workload_info

#: On spot, `submit` requires checkpoints. For runs without them, propose a quarter of their steps, at most
#: this, as `submit` does.
_MOST_BETWEEN_CHECKPOINTS = 500
#: The sources of data that have a path.
ON_DISK = ("folder", "file")


@dataclass(frozen=True, kw_only=True)
class Place:
    """How an instance was rented."""

    service: str  # `ec2` or `sagemaker`
    region: str | None  # None for the user's own
    purchase: str


def place_of(run: MeasuredRun, *, own_region: str) -> Place:
    """Return the place that was requested for `run`. own_region: the user's, the default of `submit`."""
    service, region, purchase = run.requested_offer
    return Place(service=service, region=None if region == own_region else region, purchase=purchase)


def next_seed(runs: Iterable[RunSummary]) -> int:
    """Return the seed after the largest of `runs`."""
    return max((run.seed for run in runs if run.seed is not None), default=-1) + 1


def seeds(first: int, number: int) -> str:
    """Return the options of `submit` for `number` runs with seeds from `first` on."""
    return f"--seed {first} --repeats {number}"


def known_workload(name: str) -> WorkloadInfo | None:
    """Return the workload that `submit` takes by this name, if there is one."""
    try:
        return workload_info(name)
    except WorkloadError:
        return None


def data_options(workload: WorkloadInfo) -> tuple[str, ...]:
    """Return options with a place for the data that `workload` trains on; empty if it makes its own.

    A file travels to AWS, a folder is fetched from S3.
    """
    if workload.is_own or workload.sample_unit == "tensors":
        return ()
    if workload.sample_unit == "sequences":
        return "--data", "file:PATH"
    return "--input", "train=s3://BUCKET/PREFIX", "--data", "folder:/opt/ml/input/data/train"


def submit_command(
    runs: Sequence[RunSummary],
    recipes: Sequence[Recipe | str],
    *,
    place: Place,
    first_seed: int,
    repeats: int,
    times_longer: int = 1,
    add_to: str | None = None,
    data: Sequence[str] = (),
) -> str:
    """Return the command for `repeats` more runs like `runs`, with each of `recipes`.

    recipes: with the same overrides. place: how the runs' instance was rented, if they had one. Records name
    neither the path of data nor the capacity block: the user fills in PATH and cr-.... add_to: the submission
    to which the runs are added. data: options in place of the runs' data.
    """
    like = runs[0]
    names = [recipe if isinstance(recipe, str) else recipe.name for recipe in recipes]
    words = [] if add_to is None else ["--add-to", add_to]
    words += ["--local"] if like.setup.instance is None else rented(runs, like.setup.instance, place)
    words += ["--workload", like.setup.workload, "--recipe", ",".join(names)]
    for argument in shlex.split(like.setup.fingerprint.get("arguments", "")):
        words += ["--set-workload", argument]
    for field, text in () if isinstance(recipes[0], str) else recipes[0].overrides:
        words += ["--set", f"{field}={text}"]
    words += ["--batch-size", str(like.setup.batch_size_per_gpu)]
    is_on_gpu = "NVIDIA" in (like.setup.device_name or "")
    if like.setup.instance is None and (like.setup.num_gpus > 1 or is_on_gpu):
        words += ["--nproc", str(like.setup.num_gpus)]
    if data or like.setup.data not in ("synthetic", "published"):
        is_path = like.setup.data in ON_DISK
        words += data or ["--data", f"{like.setup.data}:PATH" if is_path else like.setup.data]
    if (num_workers := like.setup.fingerprint.get("num_data_workers")) is not None:
        words += ["--num-workers", num_workers]
    if (model := like.setup.fingerprint.get("model")) is not None:
        words += ["--model", model]
    if like.setup.sequence_length is not None and _takes_a_length(like.setup.workload):
        words += ["--sequence-length", str(like.setup.sequence_length)]
    if num_steps := max(run.num_steps for run in runs):
        words += ["--steps", str(num_steps * times_longer)]
    evaluated = ([step for step in curve(run) if step > 0] for run in runs)
    if steps := next(filter(None, evaluated), None):
        words += ["--eval-every", str(min(steps))]
    return f"fastlaunch submit {shlex.join(words)} {seeds(first_seed, repeats)}"


def rented(runs: Sequence[RunSummary], instance: str, place: Place) -> Iterator[str]:
    """Yield the options that rent the same machines."""
    # Records leave out the prefix by which `submit` knows the service.
    yield from ("--instance", f"ml.{instance}" if place.service == "sagemaker" else instance)
    if place.region is not None:
        yield from ("--region", place.region)
    if place.purchase == TRAINING_PLAN:
        yield from ("--training-plan", "arn:...")
    elif place.purchase != "on-demand":
        yield from ("--purchase", place.purchase)
    if place.purchase == "capacity-block":
        yield from ("--reservation", "cr-...")
    if place.purchase == "spot":
        yield from ("--checkpoint-every", str(_saves_every(runs)))
    # Only with an instance: --local has no nodes, and as many processes on one machine train alike.
    if runs[0].setup.num_nodes > 1:
        yield from ("--num-nodes", str(runs[0].setup.num_nodes))


def _saves_every(runs: Sequence[RunSummary]) -> int:
    """Return the steps between checkpoints of the first run with checkpoints, else `submit`'s proposal."""
    for run in runs:
        if run.checkpoints.number and run.checkpoints.last_step:
            return max(1, run.checkpoints.last_step // run.checkpoints.number)
    return max(1, min(_MOST_BETWEEN_CHECKPOINTS, max(run.num_steps for run in runs) // 4))


def _takes_a_length(workload: str) -> bool:
    known = known_workload(workload)
    return known is not None and "sequence_length" in known.takes

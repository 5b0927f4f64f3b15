"""What a user asked `submit` for -> the jobs to run here, in order, and what a rehearsal leaves out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastlaunch.errors import UserError
from fastlaunch.hardware import Accelerator, InstanceType
from fastlaunch.job import DEFAULT_REGION, JobSpec
from fastlaunch.machine import Machine
from fastlaunch.prices import Catalogue
from fastlaunch_train.recipes import Recipe, RecipeError, resolve_recipe
from fastlaunch_train.workloads import WorkloadError, WorkloadInfo, workload_info

DATA_ARMS = ("synthetic", "loader", "folder:PATH")
#: Every repeat is planned and stored before the first one starts.
MAX_REPEATS = 1000
_GPU_WORKLOAD, _CPU_WORKLOAD = "vit-huge", "vit-tiny"
_CPU_BATCH_SIZE = 8


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of `submit`; None is `not given`.

    batch_size: a number of samples, `auto`, or None.
    instance: the instance type to rehearse, None to run for its own sake.
    """

    recipes: tuple[str, ...] = ("bf16",)
    overrides: tuple[str, ...] = ()
    workload: str | None = None
    batch_size: int | str | None = None
    steps: int = 200
    repeats: int = 1
    seed: int = 0
    nproc: int | None = None
    data: str = "synthetic"
    num_workers: int = 12
    checkpoint_every: int = 0
    instance: str | None = None
    region: str = DEFAULT_REGION


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """specs: in the order they run. left_out: what a rehearsal does not cover, as (what, how it is here)."""

    specs: tuple[JobSpec, ...]
    left_out: tuple[tuple[str, str], ...] = ()


def build_jobs(request: Request, *, machine: Machine, catalogue: Catalogue | None) -> Jobs:
    """The jobs of `request` on `machine`, repeats interleaved: A B, then B A, and so on.

    catalogue: needed to rehearse an instance. Raises UserError for what does not exist or is not allowed.
    """
    recipes = resolve_recipes(request.recipes, request.overrides)
    if not 1 <= request.repeats <= MAX_REPEATS:
        raise UserError(f"repeats is {request.repeats}", f"give 1 to {MAX_REPEATS}")
    _check_data(request.data)
    instance = _instance(request, catalogue)
    workload = known_workload(
        request.workload or (_GPU_WORKLOAD if instance or machine.devices else _CPU_WORKLOAD)
    )
    stand_in = workload
    if instance and not machine.devices:
        stand_in = workload_info(workload.small)
    run_as = [nearest_that_runs(recipe, machine, catalogue) if instance else recipe for recipe in recipes]
    num_ranks = _num_ranks(request.nproc, machine)
    batch_size = _batch_size(request.batch_size, stand_in, machine, smaller=stand_in is not workload)
    specs = [
        JobSpec(
            workload=stand_in.name,
            recipe=recipe,
            batch_size=batch_size,
            steps=request.steps,
            num_gpus=num_ranks,
            seed=request.seed,
            data=request.data,
            num_workers=request.num_workers,
            checkpoint_every=request.checkpoint_every,
            region=request.region,
        )
        # Two recipes may have the same stand-in; it is rehearsed once.
        for recipe in dict.fromkeys(run_as)
    ]
    ordered = interleaved(specs, request.repeats)
    if not instance:
        return Jobs(specs=ordered)
    assert catalogue is not None
    asked_batch = request.batch_size or workload.batch_size
    left_out = _left_out(
        instance,
        catalogue.accelerators[instance.accelerator],
        machine,
        num_ranks=num_ranks,
        workload=f"{workload.name} at batch {asked_batch}" if stand_in is not workload else None,
        instead=f"{stand_in.name} at batch {'auto' if batch_size is None else batch_size}",
        recipes=[
            (asked.label, found.label, why_not(asked, machine, catalogue))
            for asked, found in zip(recipes, run_as, strict=True)
        ],
    )
    return Jobs(specs=ordered, left_out=left_out)


def interleaved(specs: Sequence[JobSpec], repeats: int) -> tuple[JobSpec, ...]:
    """The jobs as often as asked: A B, then B A, and so on, so that what drifts with time meets all alike."""
    rounds = (specs if number % 2 == 0 else specs[::-1] for number in range(repeats))
    return tuple(spec for round_ in rounds for spec in round_)


def resolve_recipes(names: Sequence[str], overrides: Sequence[str]) -> list[Recipe]:
    """The recipes called `names`, each with every override. Raises UserError."""
    doubled = {name for name in names if names.count(name) > 1}
    if doubled:
        raise UserError(f"recipe {min(doubled)} is given twice", "to run it twice, add --repeats 2")
    try:
        return [resolve_recipe(name, overrides) for name in names]
    except RecipeError as error:
        raise UserError(error.message, error.hint) from None


def nearest_that_runs(recipe: Recipe, machine: Machine, catalogue: Catalogue | None) -> Recipe:
    """`recipe` if `machine` can run it, else bf16 (fp32 for tf32) with its other fields."""
    if why_not(recipe, machine, catalogue) is None:
        return recipe
    dropped = ("precision", "blocks", "fp8_scaling", "name", "description", "overrides")
    base = resolve_recipe("fp32" if recipe.precision == "tf32" else "bf16")
    kept = {field: value for field, value in vars(recipe).items() if field not in dropped}
    return resolve_recipe(
        base.name, [f"{field}={'none' if value is None else value}" for field, value in kept.items()]
    )


def why_not(recipe: Recipe, machine: Machine, catalogue: Catalogue | None) -> str | None:
    """Why `machine` cannot run `recipe`, or None. A GPU not in the catalogue is believed."""
    if not machine.devices:
        if recipe.blocks == "te":
            return "Transformer Engine needs an NVIDIA GPU"
        return "TF32 needs an NVIDIA GPU" if recipe.precision == "tf32" else None
    if recipe.blocks == "te" and "transformer_engine" not in machine.modules:
        return "Transformer Engine is not installed"
    known = [catalogue.accelerator_of_device(name) for name in machine.devices] if catalogue else []
    for accelerator in known:
        if (
            accelerator
            and recipe.precision in ("fp8", "tf32")
            and recipe.precision not in accelerator.formats
        ):
            return f"{accelerator.name} has no {recipe.precision.upper()}"
    return None


def _instance(request: Request, catalogue: Catalogue | None) -> InstanceType | None:
    if request.instance is None:
        return None
    assert catalogue is not None
    return catalogue.instance(request.instance)


def known_workload(name: str) -> WorkloadInfo:
    """What is known of the workload. Raises UserError where there is none such, or no such file."""
    try:
        info = workload_info(name)
    except WorkloadError as error:
        raise UserError(error.message, error.hint) from None
    path, separator, _ = name.rpartition(".py:")
    if separator and not Path(f"{path}.py").is_file():
        raise UserError(
            f"workload {name!r}: there is no file {path}.py here", "give its path, as in ./my.py:build"
        )
    return info


def _check_data(data: str) -> None:
    kind, _, path = data.partition(":")
    if data in ("synthetic", "loader"):
        return
    if kind != "folder" or not path:
        raise UserError(f"unknown data arm {data!r}", f"known: {', '.join(DATA_ARMS)}")
    if not Path(path).is_dir():
        raise UserError(f"there is no folder {path}", "give a folder with one folder of images per class")


def _num_ranks(nproc: int | None, machine: Machine) -> int:
    if nproc is None:
        return len(machine.devices) or 1
    if machine.devices and nproc > len(machine.devices):
        raise UserError(
            f"{nproc} processes on {machine.description}",
            f"give --nproc {len(machine.devices)} or less: one process per GPU",
        )
    return nproc


def _batch_size(
    given: int | str | None, workload: WorkloadInfo, machine: Machine, *, smaller: bool
) -> int | None:
    if isinstance(given, str):
        return None
    usual = workload.batch_size if machine.devices else min(workload.batch_size, _CPU_BATCH_SIZE)
    if given is None:
        return usual
    # A batch meant for the real workload would only slow its stand-in down.
    return min(given, usual) if smaller else given


def _left_out(
    instance: InstanceType,
    accelerator: Accelerator,
    machine: Machine,
    *,
    num_ranks: int,
    workload: str | None,
    instead: str,
    recipes: Sequence[tuple[str, str, str | None]],
) -> tuple[tuple[str, str], ...]:
    rows = []
    if workload:
        rows.append(("workload", f"{workload}: rehearsed with {instead}"))
    for asked, found, why in recipes:
        if why:
            rows.append(("recipe", f"{asked}: {why}, rehearsed as {found}"))
    rows.append(("GPU", f"{instance.num_accelerators} x {accelerator.name}; here: {machine.description}"))
    if num_ranks != instance.num_accelerators:
        rows.append(("ranks", f"{instance.num_accelerators}; here: {num_ranks}"))
    efa = f", {instance.num_efa_interfaces} EFA interfaces" if instance.num_efa_interfaces else ""
    rows.append(("network", f"{instance.network_gbps:g} Gbps{efa}"))
    rows.append(("image", "the container image, its driver and its libraries"))
    rows.append(("price", f"nothing here tells what a step costs on {instance.name}"))
    return tuple(rows)

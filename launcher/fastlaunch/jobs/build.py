"""What a user asked `submit` for -> the jobs to run here, in order, and what a rehearsal leaves out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fastlaunch.ability import command_words, nearest_that_runs, why_not
from fastlaunch.catalog.experiments import EXPERIMENTS
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.errors import UserError
from fastlaunch.emulation import emulated_here
from fastlaunch.jobs.data_sources import check_data_in_image
from fastlaunch.jobs.machine import Machine
from fastlaunch.jobs.spec import DEFAULT_REGION, JobSpec
from fastlaunch.jobs.variants import Arm, arms_of, check_data, check_models, without_model, workload_optimizer
from fastlaunch_train.workloads import WorkloadInfo

#: Every repeat is planned and stored before the first one starts.
MAX_REPEATS = 1000
_GPU_WORKLOAD, _CPU_WORKLOAD = "vit-huge", "vit-tiny"
_CPU_BATCH_SIZE = 8
#: Processes that stand in for several GPUs where there is none.
_CPU_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of `submit`; None, and no recipes, is `not given`.

    batch_size: a number of samples, `auto`, or None.
    instance: the instance type to rehearse, None to run for its own sake.
    experiment: of `fastlaunch.catalog.experiments`, which says recipes, overrides, workloads and batch sizes
      itself.
    """

    recipes: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    workload: str | None = None
    batch_size: int | str | None = None
    steps: int | None = None
    epochs: int | None = None
    repeats: int = 1
    seed: int = 0
    nproc: int | None = None
    data: str | None = None
    num_workers: int | None = None
    checkpoint_every: int = 0
    eval_every: int | None = None
    model: str | None = None
    tokenizer: str | None = None
    sequence_length: int | None = None
    experiment: str | None = None
    instance: str | None = None
    region: str = DEFAULT_REGION


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """specs: in the order they run. left_out: what a rehearsal does not cover, as (what, how it is here).

    workloads: of the specs, each once. caveats: what to know of their figures before they are made.
    """

    specs: tuple[JobSpec, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    workloads: tuple[WorkloadInfo, ...] = ()
    caveats: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Here:
    """An arm as it is on this machine. changed: what it is not, as rows of `left_out`."""

    arm: Arm
    num_ranks: int
    batch_size: int | None
    changed: tuple[tuple[str, str], ...] = ()


def build_jobs(
    request: Request, *, machine: Machine, catalogue: Catalogue | None, image: str | None = None
) -> Jobs:
    """The jobs of `request` on `machine`, repeats interleaved: A B, then B A, and so on.

    catalogue: needed to rehearse an instance, and to tell what a GPU takes. image: the user's own, if jobs
    run in it: data are there, and not here. Raises UserError for what does not exist, is not allowed or
    cannot run here; an arm of an experiment that cannot is left out.
    """
    if not 1 <= request.repeats <= MAX_REPEATS:
        raise UserError(f"repeats is {request.repeats}", f"give 1 to {MAX_REPEATS}")
    instance = _instance(request, catalogue)
    arms = arms_of(request, _GPU_WORKLOAD if instance or machine.devices else _CPU_WORKLOAD)
    for data in dict.fromkeys(arm.data for arm in arms):
        (check_data_in_image if image else check_data)(data, [arm.workload for arm in arms])
    here: list[_Here] = []
    left_out: list[tuple[str, str]] = []
    for arm in arms:
        found = _here(arm, request, machine, catalogue, is_rehearsed=instance is not None)
        if isinstance(found, _Here):
            if not image:
                check_models(found.arm)
            here.append(found)
            left_out += found.changed
        else:
            left_out.append(("arm", f"{arm.name}: {found}, left out"))
    if not here:
        raise UserError(
            f"no run of experiment {request.experiment} can be made here: {left_out[0][1]}",
            f"add --instance p5.48xlarge; `fastlaunch experiments {request.experiment}` shows what it needs",
        )
    if instance:
        assert catalogue is not None
        left_out += _not_here(instance, catalogue, machine, num_ranks=max(one.num_ranks for one in here))
    left_out = [*_not_as_long(request, arms), *left_out]
    # Two arms may have the same stand-in; it is run once.
    specs = list(dict.fromkeys(_spec(one, request) for one in here))
    return Jobs(
        specs=interleaved(specs, request.repeats),
        left_out=tuple(dict.fromkeys(left_out)),
        workloads=tuple(dict.fromkeys(one.arm.workload for one in here)),
        caveats=tuple(
            filter(None, dict.fromkeys(emulated_here(spec.recipe, machine, catalogue) for spec in specs))
        ),
    )


def interleaved(specs: Sequence[JobSpec], repeats: int) -> tuple[JobSpec, ...]:
    """The jobs as often as asked: A B, then B A, and so on, so that what drifts with time meets all alike.

    Each round has the next seed: the runs of a round start from the same weights and see the same data, and
    make a pair for the convergence guard.
    """
    rounds = (specs if number % 2 == 0 else specs[::-1] for number in range(repeats))
    return tuple(
        replace(spec, seed=spec.seed + number) for number, round_ in enumerate(rounds) for spec in round_
    )


def _instance(request: Request, catalogue: Catalogue | None) -> InstanceType | None:
    if request.instance is None:
        return None
    assert catalogue is not None
    return catalogue.instance(request.instance)


def _not_as_long(request: Request, arms: Sequence[Arm]) -> Iterator[tuple[str, str]]:
    """That the runs of an experiment have no epochs, as a row of `left_out`: their data are made up."""
    published = EXPERIMENTS[request.experiment].epochs if request.experiment else None
    if published is not None and request.steps is None and arms[0].steps is not None:
        yield "length", f"{published} epochs; of made-up data, which have no end: {arms[0].steps} steps"


def _here(
    arm: Arm, request: Request, machine: Machine, catalogue: Catalogue | None, *, is_rehearsed: bool
) -> _Here | str:
    """The arm as it is on `machine`, or why it cannot be there. Raises UserError unless it is published."""
    why = why_not(arm.recipe, machine, catalogue)
    recipe = arm.recipe
    if why is not None and arm.is_published:
        return why
    if why is not None:
        recipe = nearest_that_runs(arm.recipe, machine, catalogue, optimizer=workload_optimizer(arm.workload))
        if not is_rehearsed:
            raise UserError(
                f"recipe {arm.recipe.label} cannot run here: {why}",
                f"the nearest that can: {command_words(recipe)}",
            )
    if machine.devices and arm.num_gpus is not None and arm.num_gpus > len(machine.devices):
        return f"it is for {arm.num_gpus} GPUs, and here is {machine.description}"
    is_small = not machine.devices and (is_rehearsed or arm.is_published)
    small = without_model(arm) if is_small else arm
    batch_size = _batch_size(arm.batch_size, small.workload, machine, smaller=small is not arm)
    changed = []
    if small is not arm:
        asked = arm.batch_size or arm.workload.batch_size
        told = "auto" if batch_size is None else batch_size
        changed.append(
            (
                "workload",
                f"{arm.workload.name} at batch {asked}: rehearsed with {small.workload.name} at batch {told}",
            )
        )
    num_ranks = _num_ranks(request.nproc, machine)
    if arm.num_gpus is not None:
        num_ranks = arm.num_gpus if machine.devices else min(arm.num_gpus, _CPU_RANKS)
        if num_ranks < arm.num_gpus:
            changed.append(("ranks", f"{arm.num_gpus}; here: {num_ranks}"))
    if why is not None:
        changed.append(("recipe", f"{arm.recipe.label}: {why}, rehearsed as {recipe.label}"))
    return _Here(
        arm=replace(small, recipe=recipe), num_ranks=num_ranks, batch_size=batch_size, changed=tuple(changed)
    )


def _spec(here: _Here, request: Request) -> JobSpec:
    arm = here.arm
    return JobSpec(
        workload=arm.workload.name,
        recipe=arm.recipe,
        batch_size=here.batch_size,
        steps=arm.steps,
        epochs=arm.epochs,
        num_gpus=here.num_ranks,
        seed=request.seed,
        data=arm.data,
        num_workers=request.num_workers,
        checkpoint_every=request.checkpoint_every,
        eval_every=arm.eval_every,
        model=arm.model,
        tokenizer=arm.tokenizer,
        sequence_length=arm.sequence_length,
        region=request.region,
    )


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


def _not_here(
    instance: InstanceType, catalogue: Catalogue, machine: Machine, *, num_ranks: int
) -> Iterator[tuple[str, str]]:
    """What is the same of every rehearsal: rows of `left_out`."""
    accelerator = catalogue.accelerators[instance.accelerator]
    yield "GPU", f"{instance.num_accelerators} x {accelerator.name}; here: {machine.description}"
    if num_ranks != instance.num_accelerators:
        yield "ranks", f"{instance.num_accelerators}; here: {num_ranks}"
    efa = f", {instance.num_efa_interfaces} EFA interfaces" if instance.num_efa_interfaces else ""
    yield "network", f"{instance.network_gbps:g} Gbps{efa}"
    yield "image", "the container image, its driver and its libraries"
    yield "price", f"nothing here tells what a step costs on {instance.name}"

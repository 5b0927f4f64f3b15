"""Build and check, in order, all that a session's options ask for, and train it."""

import dataclasses
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from fastlaunch_train.checks.clocks import check_clocks_under_load
from fastlaunch_train.checks.compiled_model import CompiledModelCheck
from fastlaunch_train.checks.equivalence import compute_reference, run_checks
from fastlaunch_train.checks.runs_here import check_runs_here
from fastlaunch_train.data.batches import split_batch, take
from fastlaunch_train.data.cpu_torchvision import prepare_torchvision
from fastlaunch_train.data.hub import weight_downloads
from fastlaunch_train.distributed import fsdp
from fastlaunch_train.distributed.all_reduce import all_reduce_between_nodes
from fastlaunch_train.distributed.parallel import Process, broadcast_object
from fastlaunch_train.loop.batch_size import auto_batch_size, computed_in, probe_request
from fastlaunch_train.loop.checkpoint import (
    Checkpointing,
    Identity,
    check_model_space,
    check_writers_space,
    checkpoint_bytes,
    newest_checkpoint,
)
from fastlaunch_train.loop.evaluation import plan_evaluations
from fastlaunch_train.loop.graphed import is_captured
from fastlaunch_train.loop.train import TrainingLoop, train
from fastlaunch_train.loop.trainers.adapter import check_trainer
from fastlaunch_train.loop.trainers.lightning import train_with_lightning
from fastlaunch_train.loop.trainers.transformers import train_with_transformers
from fastlaunch_train.loop.training import PhaseClock, Training
from fastlaunch_train.models import precision
from fastlaunch_train.models.attention import attention_backend, guard_cudnn_attention
from fastlaunch_train.models.conversion import check_conversion, convert_model
from fastlaunch_train.models.flops import step_flops
from fastlaunch_train.models.frozen import frozen_linears, hold_frozen, round_to_nf4
from fastlaunch_train.models.precision import Precision, set_deterministic
from fastlaunch_train.process.interrupts import Interrupts
from fastlaunch_train.process.machine import default_num_workers
from fastlaunch_train.recipes.recipe import ZERO_STAGES, Recipe, refuse
from fastlaunch_train.recipes.rules import batch_multiple, batch_problem, width_problem
from fastlaunch_train.records.records import (
    BATCH_SIZE_PHASE,
    BUILD_CHECKS,
    BUILD_MODEL,
    BUILD_STEPS,
    FETCH_PHASE,
)
from fastlaunch_train.run.options import Options
from fastlaunch_train.run.session import Session
from fastlaunch_train.steppers.forward_only import check_forward_only
from fastlaunch_train.steppers.optimizers import check_optimizer
from fastlaunch_train.steppers.stepping import build_native, build_stepper
from fastlaunch_train.workloads.contract import (
    Batch,
    DataRequest,
    ModelOptions,
    Workload,
    load_workload,
    next_batch,
    prepend,
)
from fastlaunch_train.workloads.registry import WorkloadError, sized, workload_info

log = logging.getLogger("fastlaunch_train")

#: Number of samples in the forward passes before training, which check the recipe and find the attention
#: kernel: at most a step's, unless those are too few to tell samples apart.
PROBE_BATCH, MIN_PROBE_BATCH = 16, 4


def train_session(session: Session, interrupts: Interrupts) -> int:
    """Build what the session's options ask for, and train it; return the last step done."""
    options, process, recipe = session.options, session.process, session.options.recipe
    phase = PhaseClock(session.writer, process.device)

    # Refuse what cannot work before building anything.
    check_runs_here(recipe, process.device)
    info = sized(workload_info(options.workload), options.arguments)
    refuse(width_problem(recipe, info.width), f"recipe {recipe.label}")
    trainer = _import_early(recipe.loop, info.packages)
    session.cudnn, warning = guard_cudnn_attention()
    session.warnings += [warning] if warning else []
    workload = session.workload = load_workload(
        options.workload,
        ModelOptions(
            model=options.model, tokenizer=options.tokenizer, sequence_length=options.sequence_length
        ),
        options.arguments,
    )
    session.flops_per_sample = workload.flops_per_sample
    for fetch in weight_downloads(workload.weights, workload.name) if workload.weights else ():
        phase(FETCH_PHASE, fetch)
    if trainer is not None:
        check_trainer(workload, recipe, process.device)
    check_forward_only(workload, recipe)
    check_optimizer(workload, recipe)
    is_captured(workload, recipe, process)

    # Do this before any product: cuBLAS reads its settings when its first handle is made.
    set_deterministic(recipe)
    arithmetic = precision.setup_precision(recipe, process.device)
    if process.device.type == "cuda" and session.launch.is_on_aws:
        phase("gpu-clocks", lambda: check_clocks_under_load(process))
    if process.num_nodes > 1:
        warn = session.warnings.append
        phase(
            "all-reduce", lambda: all_reduce_between_nodes(process, options.output, session.launch, warn=warn)
        )

    session.batch_size = options.batch_size
    if options.batch_size is None:
        phase(BATCH_SIZE_PHASE, lambda: _find_batch_size(session, workload))
        # The trials may have been with another.
        precision.setup_precision(recipe, process.device)
    batch_size = session.batch_size
    assert batch_size is not None
    refuse(batch_problem(recipe, batch_size, workload.sequence_length), f"recipe {recipe.name}")
    session.steps = _num_steps(session, workload, batch_size * process.world_size)
    request = _data_request(session, batch_size)
    evaluations = plan_evaluations(
        workload, request, process, every=options.eval_every, last_step=session.steps
    )

    with phase.during("build", BUILD_MODEL):
        model = build_native(workload, options.seed, process)
        # The passes that check the recipe take minutes.
        check_conversion(model, workload, recipe)
    with phase.during("build", BUILD_CHECKS):
        rounding = _convert_and_check(session, workload, arithmetic, model, batch_size)
        batches, model_check, trained = None, None, workload
        if not (options.resume and newest_checkpoint(process, options.output / "checkpoints")):
            batches, model_check = _first_batches(workload, request, session, arithmetic, model, rounding)
            trained = model_check.workload
    if process.device.type == "cuda":
        # The recorded peak of memory is the training's.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(process.device)
    with phase.during("build", BUILD_STEPS):
        # Lightning and Transformers join the ranks themselves.
        joined = process if trainer is None else dataclasses.replace(process, world_size=1)
        stepper = build_stepper(trained, recipe, arithmetic, joined, model)
    session.identify()

    checkpoints = Checkpointing(
        directory=options.output / "checkpoints",
        identity=_identity(session, workload, batch_size),
        process=process,
        stepper=stepper,
        evaluations=evaluations,
        phase=phase,
        attempt=session.attempt,
    )
    if options.checkpoint_every:
        best = evaluations is not None and evaluations.keep_best
        size = checkpoint_bytes(stepper.model, trained, recipe, world_size=process.world_size, best=best)
        is_sharded = recipe.parallelism == "fsdp2"
        check_writers_space(process, checkpoints.directory, size, sharded=is_sharded)
    is_saved = _is_saved(workload, recipe, options)
    if is_saved and not options.checkpoint_every:
        # Later, the model takes the room of a checkpoint.
        check_model_space(process, options.output, stepper.model)
    if options.resume:
        phase("resume", lambda: _resume(session, checkpoints))
    request = dataclasses.replace(request, first_step=session.first_step)
    if batches is None or session.first_step > 1:
        model_check, batches = None, workload.batches(request)
        if session.first_step <= session.steps:
            # This starts the processes that load data, which the header counts.
            batches = prepend(next_batch(workload, batches), batches)

    for text in session.warnings:
        log.warning("warning: %s", text)
    session.writer.write_header(session.header())
    training = Training(
        workload=trained,
        recipe=recipe,
        process=process,
        precision=arithmetic,
        stepper=stepper,
        request=request,
        batches=batches,
        last_step=session.steps,
        checkpoint_every=options.checkpoint_every,
        checkpoints=checkpoints,
        phase=phase,
        writer=session.writer,
        interrupts=interrupts,
        print_metrics=session.launch.print_metrics,
        model_check=model_check,
        step_profile=options.step_profile,
    )
    try:
        done = train(training, evaluations, trainer)
    finally:
        checkpoints.close()
    if done == session.steps and is_saved:
        phase("save", lambda: _save(session, workload, model))
    return done


def _is_saved(workload: Workload, recipe: Recipe, options: Options) -> bool:
    """Return whether the model is written at the end: all but a whole one that only measures the speed."""
    sharded = recipe.parallelism in ZERO_STAGES
    is_wanted = workload.rounds_frozen or options.checkpoint_every or options.data != "synthetic"
    return workload.save is not None and not sharded and bool(is_wanted)


def _save(session: Session, workload: Workload, model: nn.Module) -> str:
    folder, is_first = session.options.output / "model", session.process.rank == 0
    state = fsdp.whole(model.state_dict(), keep=is_first)
    if is_first and workload.save is not None:
        workload.save(model, state, folder)
    return folder.name


def _import_early(loop: str, packages: Iterable[str]) -> Callable[[TrainingLoop], None] | None:
    """Return the function that trains in place of our loop, with its library imported; None for our loop.

    packages: of the workload; those that are installed are imported, too. Call it before torch computes and
    before its cuDNN is inspected: transformers imports peft if that is installed, and peft imports
    Transformer Engine, whose cuDNN may not match the parts of torch's own that would be loaded by then.
    """
    for package in packages:
        if importlib.util.find_spec(package) is not None:
            prepare_torchvision()
            importlib.import_module(package)
    if loop == "ours":
        return None
    prepare_torchvision()
    importlib.import_module("lightning.pytorch" if loop == "lightning" else "transformers.trainer")
    return train_with_lightning if loop == "lightning" else train_with_transformers


def _find_batch_size(session: Session, workload: Workload) -> str:
    options, process = session.options, session.process
    session.batch_size = auto_batch_size(
        workload,
        options.fit or (options.recipe,),
        process,
        seed=options.seed,
        default=workload_info(options.workload).batch_size,
    )
    if process.device.type != "cuda":
        return f"there is no GPU to fill: the batch size is the workload's own, {session.batch_size}"
    all_of = f" all of {', '.join(recipe.label for recipe in options.fit)}" if len(options.fit) > 1 else ""
    return f"the largest batch that fits{all_of} is {session.batch_size}"


def _num_steps(session: Session, workload: Workload, global_batch: int) -> int:
    """Return the given steps, or those of the given epochs, whose last step is filled up."""
    options = session.options
    if options.epochs is None:
        assert options.steps is not None
        return options.steps
    num_samples = workload.samples_per_epoch(options.data) if workload.samples_per_epoch else None
    if num_samples is None:
        raise WorkloadError(
            f"workload {workload.name!r}: its data are endless, so there are no epochs", "give --steps"
        )
    return -(-num_samples // global_batch) * options.epochs


def _data_request(session: Session, batch_size: int) -> DataRequest:
    options, process = session.options, session.process
    return DataRequest(
        source=options.data,
        batch_size=batch_size,
        seed=options.seed,
        rank=process.rank,
        world_size=process.world_size,
        device=process.device,
        num_workers=default_num_workers() if options.num_workers is None else options.num_workers,
        first_step=session.first_step,
        dtype=computed_in(options.recipe),
    )


def _convert_and_check(
    session: Session, workload: Workload, arithmetic: Precision, model: nn.Module, batch_size: int
) -> float:
    """Convert `model` as the recipe says; record its description and whether it still computes the same.

    Where the workload has a sample of itself, that is checked in its place: the whole takes too much memory
    in fp32. Return the relative error of the native model in the recipe's precision.
    """
    session.num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if workload.sample is None:
        return _convert(session, workload, arithmetic, model, batch_size)
    convert_model(model, workload, session.options.recipe)
    sample = workload.sample()
    part = build_native(sample, session.options.seed, session.process)
    return _convert(session, sample, arithmetic, part, batch_size)


def _convert(
    session: Session, workload: Workload, arithmetic: Precision, model: nn.Module, batch_size: int
) -> float:
    process, recipe = session.process, session.options.recipe
    request = probe_request(
        process,
        seed=session.options.seed,
        batch_size=_probe_size(workload, recipe, batch_size),
        dtype=computed_in(recipe),
    )
    probe = next_batch(workload, workload.batches(request))
    if session.flops_per_sample is None and workload is session.workload and workload.trains:
        session.flops_per_sample = _count_flops(workload, arithmetic, process, model, probe)
    hold_frozen(model, workload, torch.float32)
    if recipe.frozen_weights == "nf4":
        round_to_nf4(frozen_linears(model, workload))
    reference = compute_reference(workload, recipe, model, probe)
    convert_model(model, workload, recipe)
    session.attention_backend = attention_backend(model, probe, arithmetic, workload.loss)
    if process.device.type == "cuda" and session.attention_backend in ("math", "te:unfused"):
        session.warnings.append(f"attention runs unfused ({session.attention_backend}): slower, more memory")
    for check in run_checks(workload, recipe, arithmetic, model, probe, reference):
        session.writer.add(check)
        session.warnings += [] if check.passed else [check.warning]
    if session.flops_per_sample is not None:
        # Fused blocks report what they leave out.
        session.flops_per_sample -= sum(getattr(part, "flops_left_out", 0) for part in model.modules())
    return reference.rounding


def _count_flops(
    workload: Workload, arithmetic: Precision, process: Process, model: nn.Module, probe: Batch
) -> int | None:
    """Return the operations per sample of a training step, counted on two samples; None if unknown.

    On rank 0, as samples of another rank may be longer.
    """

    def loss(model: nn.Module) -> torch.Tensor:
        with arithmetic.autocast():
            return workload.loss(model, take(probe, range(2)))

    flops = step_flops(model, loss) if process.rank == 0 else None
    flops = broadcast_object(process, flops)
    return flops // 2 if flops else None


def _probe_size(workload: Workload, recipe: Recipe, batch_size: int) -> int:
    """Return the number of samples to probe: each may be large, such as a long sequence."""
    if not workload.trains:
        return min(PROBE_BATCH, batch_size)
    if recipe.precision == "fp8" and batch_multiple(recipe, workload.sequence_length) > 1:
        return max(PROBE_BATCH, batch_multiple(recipe))
    return min(PROBE_BATCH, max(MIN_PROBE_BATCH, batch_size // recipe.grad_accumulation))


def _first_batches(
    workload: Workload,
    request: DataRequest,
    session: Session,
    arithmetic: Precision,
    model: nn.Module,
    rounding: float,
) -> tuple[Iterator[Batch], CompiledModelCheck]:
    """Return the batches from the first step on, and the check of the model by the first batch."""
    recipe = session.options.recipe
    batches = workload.batches(request)
    first = next_batch(workload, batches)
    batches = prepend(first, batches)
    part = split_batch(first, recipe.grad_accumulation)[0]
    return batches, CompiledModelCheck(workload, recipe, arithmetic, model, part, rounding=rounding)


def _identity(session: Session, workload: Workload, batch_size: int) -> Identity:
    options = session.options
    return Identity(
        workload=options.workload,
        recipe=options.recipe.label,
        data=options.data.partition(":")[0],
        seed=options.seed,
        batch_size=batch_size,
        world_size=session.process.world_size,
        sequence_length=workload.sequence_length,
        data_digest=session.data_identity.digest if session.data_identity else None,
        arguments=dict(options.arguments),
        schedule_steps=None if workload.lr_schedule == "constant" else session.steps,
    )


def _resume(session: Session, checkpoints: Checkpointing) -> str:
    step = checkpoints.resume(last_step=session.steps)
    if step == 0:
        return "no checkpoint yet: from the start"
    session.first_step = step + 1
    session.last_done = step
    return f"after step {step}"

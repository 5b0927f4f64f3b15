"""From a session's options to a training that runs: everything built, checked and joined, in order."""

import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fastlaunch_train.build import build_native, computed_in, largest_batch_that_fits, probe_request
from fastlaunch_train.checkpointing import Checkpointing
from fastlaunch_train.checks import equivalence as checks
from fastlaunch_train.checks.compiled_model import AsTrained
from fastlaunch_train.checks.runs_here import check_runs_here
from fastlaunch_train.cudnn import guard_cudnn_attention
from fastlaunch_train.data.batches import split_batch
from fastlaunch_train.deterministic import set_deterministic
from fastlaunch_train.disk_space import check_writers_space, checkpoint_bytes
from fastlaunch_train.distributed.all_reduce import all_reduce_between_nodes
from fastlaunch_train.distributed.parallel import broadcast
from fastlaunch_train.loop.checkpoint import Identity, latest_checkpoint
from fastlaunch_train.loop.evaluation import plan_evaluations
from fastlaunch_train.loop.train import train
from fastlaunch_train.loop.trainers.adapter import check_trainer, import_trainer
from fastlaunch_train.loop.training import Training
from fastlaunch_train.models import attention, compile, precision
from fastlaunch_train.models.conversion import convert_model
from fastlaunch_train.models.precision import Precision
from fastlaunch_train.phases import PhaseClock
from fastlaunch_train.process.host_threads import usual_num_workers
from fastlaunch_train.process.interrupts import Interrupts
from fastlaunch_train.recipes.recipes import RecipeError
from fastlaunch_train.run.session import Session
from fastlaunch_train.steppers.forward_only import check_forward_only
from fastlaunch_train.steppers.optimizers import check_optimizer
from fastlaunch_train.steppers.stepping import Stepper, build_stepper
from fastlaunch_train.workloads import WorkloadError
from fastlaunch_train.workloads.contract import (
    Asked,
    Batch,
    DataRequest,
    Workload,
    load_workload,
    next_batch,
    put_back,
)

log = logging.getLogger("fastlaunch_train")

#: Samples in the forward passes before training that find out which attention kernel runs, and whether the
#: recipe computes what the model does: no more than a step has, where that is enough to tell samples apart.
PROBE_BATCH, LEAST_PROBE_BATCH = 16, 4


def train_session(session: Session, interrupts: Interrupts) -> int:
    """Build what the session's options ask for, and train it; returns the last step done."""
    options, process, recipe = session.options, session.process, session.options.recipe
    phase = PhaseClock(session.writer, process.device)
    check_runs_here(recipe, process.device)
    if recipe.loop != "ours":
        import_trainer(recipe.loop)
    session.cudnn, warning = guard_cudnn_attention()
    session.warnings += [warning] if warning else []
    asked = Asked(model=options.model, tokenizer=options.tokenizer, sequence_length=options.sequence_length)
    workload = session.workload = load_workload(options.workload, asked)
    if recipe.loop != "ours":
        check_trainer(workload, recipe, process.device)
    check_forward_only(workload, recipe)
    check_optimizer(workload, recipe)
    # Now: cuBLAS reads how it is to compute when its first handle is made.
    set_deterministic(recipe)
    arithmetic = precision.setup_precision(recipe, process.device)
    if process.num_nodes > 1:
        phase("all-reduce", lambda: all_reduce_between_nodes(process, options.output, session.launched))

    if options.batch_size is None:
        phase("batch-size", lambda: _find_batch_size(session, workload, arithmetic))
    else:
        session.batch_size = options.batch_size
    _check_batch_size(session)
    session.steps = _num_steps(session, workload)
    request = _data_request(session)
    evaluations = plan_evaluations(
        workload, request, process, every=options.eval_every, last_step=session.steps
    )
    parts = _build(session, workload, arithmetic, request, phase)
    session.identify()
    checkpointing = Checkpointing(
        directory=options.output / "checkpoints",
        identity=_identity(session),
        process=process,
        stepper=parts.stepper,
        evaluations=evaluations,
        sharded=recipe.parallelism in ("fsdp2", "zero3"),
        phase=phase,
    )
    if options.checkpoint_every:
        best = evaluations is not None and evaluations.keep_best
        size = checkpoint_bytes(
            parts.stepper.model, workload, recipe, world_size=process.world_size, best=best
        )
        check_writers_space(process, checkpointing.directory, size)
    if options.resume:
        phase("resume", lambda: _resume(session, checkpointing))
    request = dataclasses.replace(request, first_step=session.first_step)
    as_trained, batches = parts.as_trained, parts.batches
    if batches is None or session.first_step > 1:
        as_trained, batches = None, workload.batches(request)
        if session.first_step <= session.steps:
            # What loads data has started when the header counts it.
            batches = put_back(next_batch(workload, batches), batches)
    for text in session.warnings:
        log.warning("warning: %s", text)
    session.writer.write_header(session.header())
    return train(
        Training(
            workload=parts.workload,
            recipe=recipe,
            process=process,
            precision=arithmetic,
            stepper=parts.stepper,
            batches=batches,
            request=request,
            first_step=session.first_step,
            last_step=session.steps,
            checkpoint_every=options.checkpoint_every,
            save_checkpoint=checkpointing.save,
            evaluations=evaluations,
            phase=phase,
            writer=session.writer,
            interrupts=interrupts,
            num_compiles=compile.num_compiles,
            print_metrics=session.launched.print_metrics,
            as_trained=as_trained,
        )
    )


@dataclass(frozen=True, kw_only=True)
class _Built:
    """What there is before a checkpoint is loaded; batches, from the first step on, only if there is none."""

    workload: Workload
    stepper: Stepper
    as_trained: AsTrained | None = None
    batches: Iterator[Batch] | None = None


def _build(
    session: Session, workload: Workload, arithmetic: Precision, request: DataRequest, phase: PhaseClock
) -> _Built:
    options, process, recipe = session.options, session.process, session.options.recipe
    with phase.during("build", "the model"):
        model = build_native(workload, options.seed, process)
    batches, as_trained = None, None
    with phase.during("build", "its conversion and checks"):
        reference = _check_converted(session, workload, arithmetic, model)
        resumes = options.resume and latest_checkpoint(options.output / "checkpoints") is not None
        # As rank 0 sees it, which says where to resume from: ranks elsewhere may see more, and all meet after
        # the check.
        if not broadcast(process, [float(resumes)])[0]:
            batches = workload.batches(request)
            first = next_batch(workload, batches)
            batches = put_back(first, batches)
            part = split_batch(first, recipe.grad_accumulation)[0]
            as_trained = AsTrained(workload, recipe, arithmetic, model, part, rounding=reference.rounding)
            workload = as_trained.workload
    if process.device.type == "cuda":
        # The most memory that is recorded is the training's.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(process.device)
    # Lightning and Transformers join the ranks themselves.
    joined = process if recipe.loop == "ours" else dataclasses.replace(process, world_size=1)
    with phase.during("build", "what makes its steps"):
        stepper = build_stepper(workload, recipe, arithmetic, joined, model)
    return _Built(workload=workload, stepper=stepper, as_trained=as_trained, batches=batches)


def _check_converted(
    session: Session, workload: Workload, arithmetic: Precision, model: nn.Module
) -> checks.Reference:
    """Convert `model` as the recipe says, and record what it is and whether it computes what it did."""
    process, recipe = session.process, session.options.recipe
    probe_of = probe_request(process, seed=session.options.seed, batch_size=_probe_size(session, workload))
    probe_of = dataclasses.replace(probe_of, dtype=computed_in(recipe))
    probe = next_batch(workload, workload.batches(probe_of))
    reference = checks.reference(workload, recipe, model, probe)
    convert_model(model, workload, recipe)
    session.num_parameters = sum(parameter.numel() for parameter in model.parameters())
    session.attention_backend = attention.attention_backend(model, probe, arithmetic, workload.loss)
    if process.device.type == "cuda" and session.attention_backend in ("math", "te:unfused"):
        session.warnings.append(f"attention runs unfused ({session.attention_backend}): slower, more memory")
    for check in checks.run_checks(workload, recipe, arithmetic, model, probe, reference):
        session.writer.add(check)
        session.warnings += [] if check.passed else [checks.told(check)]
    return reference


def _probe_size(session: Session, workload: Workload) -> int:
    """Samples to probe: they may be large, logits of long sequences or tensors of `gelu`."""
    recipe, batch_size = session.options.recipe, session.batch_size
    assert batch_size is not None
    if not workload.trains:
        return min(PROBE_BATCH, batch_size)
    if recipe.precision == "fp8":
        return max(PROBE_BATCH, precision.batch_multiple(recipe))
    return min(PROBE_BATCH, max(LEAST_PROBE_BATCH, batch_size // recipe.grad_accumulation))


def _check_batch_size(session: Session) -> None:
    recipe, batch_size = session.options.recipe, session.batch_size
    assert batch_size is not None
    parts = recipe.grad_accumulation
    multiple = parts * (precision.batch_multiple(recipe) if recipe.precision == "fp8" else 1)
    if batch_size % multiple:
        reason = "which FP8 needs" if parts == 1 else f"which {parts} micro-batches need"
        raise RecipeError(
            f"recipe {recipe.name}: batch size {batch_size} is not a multiple of {multiple}, {reason}",
            f"give --batch-size {-(-batch_size // multiple) * multiple}",
        )


def _num_steps(session: Session, workload: Workload) -> int:
    """The steps asked for, or those of the epochs asked for, of which the last step is filled up."""
    options = session.options
    if options.epochs is None:
        assert options.steps is not None
        return options.steps
    num_samples = workload.samples_per_epoch(options.data) if workload.samples_per_epoch else None
    if num_samples is None:
        raise WorkloadError(
            f"workload {workload.name!r}: its data have no end, and so no epochs", "give --steps"
        )
    assert session.batch_size is not None
    global_batch = session.batch_size * session.process.world_size
    return -(-num_samples // global_batch) * options.epochs


def _data_request(session: Session) -> DataRequest:
    options, process = session.options, session.process
    assert session.batch_size is not None
    return DataRequest(
        arm=options.data,
        batch_size=session.batch_size,
        seed=options.seed,
        rank=process.rank,
        world_size=process.world_size,
        device=process.device,
        num_workers=usual_num_workers() if options.num_workers is None else options.num_workers,
        first_step=session.first_step,
        dtype=computed_in(options.recipe),
    )


def _identity(session: Session) -> Identity:
    options = session.options
    assert session.batch_size is not None and session.workload is not None
    return Identity(
        workload=options.workload,
        recipe=options.recipe.label,
        data=options.data.partition(":")[0],
        seed=options.seed,
        batch_size=session.batch_size,
        world_size=session.process.world_size,
        sequence_length=session.workload.sequence_length,
        data_digest=session.data_identity.digest if session.data_identity else None,
    )


def _find_batch_size(session: Session, workload: Workload, arithmetic: Precision) -> str:
    session.batch_size = largest_batch_that_fits(
        workload,
        session.options.recipe,
        arithmetic,
        session.process,
        seed=session.options.seed,
        budget_bytes=session.options.memory_budget,
    )
    return f"the largest batch that fits is {session.batch_size}"


def _resume(session: Session, checkpointing: Checkpointing) -> str:
    step = checkpointing.resume(last_step=session.steps)
    if step == 0:
        return "no checkpoint yet: from the start"
    session.first_step = step + 1
    session.last_done = step
    return f"after step {step}"

"""One training run from start to end: build, probe, train, and a record that says how it ended."""

import dataclasses
import datetime
import errno
import itertools
import logging
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastlaunch_train import attention, compile, environment, fabric, precision
from fastlaunch_train.all_reduce import all_reduce_between_nodes
from fastlaunch_train.build import build_model, build_optimizer, largest_batch_that_fits, probe_request
from fastlaunch_train.checkpoint import (
    Identity,
    check_space,
    checkpoint_path,
    latest_checkpoint,
    load_checkpoint,
    random_state,
    save_checkpoint,
    step_of,
)
from fastlaunch_train.exit_codes import EXIT_BAD_REQUEST, EXIT_CODES, EXIT_DISK_FULL
from fastlaunch_train.failures import FabricError, Failure, classify
from fastlaunch_train.interrupts import Interrupts
from fastlaunch_train.launched import Launched
from fastlaunch_train.loop import PhaseClock, Training, compile_ahead, train
from fastlaunch_train.options import Options
from fastlaunch_train.parallel import Process, agree, broadcast, start_process, stop_process, wrap_ddp
from fastlaunch_train.precision import Precision
from fastlaunch_train.recipes import RecipeError
from fastlaunch_train.records import End, RecordWriter, last_attempt, record_path
from fastlaunch_train.tracebacks import TracebackFile, leave_traceback, traceback_path
from fastlaunch_train.workload import DataRequest, Workload, load_workload, next_batch
from fastlaunch_train.workloads import WorkloadError

log = logging.getLogger("fastlaunch_train")

#: Free space without which a run does not start: records of a long run, and some to spare.
MIN_FREE_BYTES = 64 * 2**20
#: Samples in the forward pass that finds out which attention kernel runs: as few as every recipe takes.
PROBE_BATCH = 16
#: A checkpoint that takes longer is in danger where EC2 gives two minutes to end.
LONG_CHECKPOINT_S = 60.0


@dataclass
class Session:
    """What is known so far of the run; the header is made of it, early if the run fails early."""

    options: Options
    process: Process
    writer: RecordWriter
    traceback: TracebackFile
    launched: Launched
    attempt: int
    started_at: str
    workload: Workload | None = None
    num_parameters: int | None = None
    batch_size: int | None = None
    steps: int = 1
    first_step: int = 1
    last_done: int = 0
    attention_backend: str | None = None
    cudnn: tuple[int, ...] | None = None
    warnings: list[str] = field(default_factory=list)

    def header(self) -> dict[str, Any]:
        """The record's header, from what is known now."""
        options, process, workload = self.options, self.process, self.workload
        return {
            "run_id": os.environ.get("FASTLAUNCH_RUN_ID") or options.output.resolve().name,
            "attempt": self.attempt,
            "rank": process.rank,
            "world_size": process.world_size,
            "num_nodes": process.num_nodes,
            "started_at": self.started_at,
            "workload": {
                "name": options.workload,
                "sample_unit": workload.sample_unit if workload else "samples",
                "flops_per_sample": workload.flops_per_sample if workload else None,
                "tokens_per_sample": workload.tokens_per_sample if workload else 0,
                "num_parameters": self.num_parameters,
            },
            "recipe": options.recipe.to_record(),
            "batch_size_per_gpu": self.batch_size or options.batch_size or 1,
            "steps": self.steps,
            "first_step": self.first_step,
            "seed": options.seed,
            "data": options.data.partition(":")[0],
            "machine": environment.machine(process.device),
            "versions": environment.versions(self.cudnn),
            "attention_backend": self.attention_backend,
            "instance": os.environ.get("FASTLAUNCH_INSTANCE") or None,
            "image_digest": os.environ.get("FASTLAUNCH_IMAGE_DIGEST") or None,
            "commit": os.environ.get("FASTLAUNCH_COMMIT") or None,
            "warnings": self.warnings,
        }

    def end(self, status: str, message: str | None) -> bool:
        """Write what is pending and the end line; False, once said, if the disk refuses."""
        peak_gib = environment.memory_gib(self.process.device)[1]
        try:
            if not self.writer.header_written:
                self.writer.write_header(self.header())
            num_steps = max(self.last_done, self.writer.last_step)
            self.writer.add(
                End(status=status, message=message, num_steps=num_steps, peak_memory_gib=peak_gib)
            )
            self.writer.flush()
        except OSError as error:
            log.error("the record could not be finished: %s", error)
            return False
        return True

    def end_stuck(self, message: str) -> None:
        """End the record of a rank that was asked to stop and cannot, from another thread."""
        self.end("interrupted", message)
        self.traceback.close()


def run(options: Options, interrupts: Interrupts, launched: Launched) -> int:
    """Train as `options` say; returns the exit code. Everything that went wrong is told on stderr."""
    try:
        fabric.watch(options.output)
        process = start_process()
        session = _open_session(options, process, launched)
    except (RecipeError, OSError) as error:
        _tell(error)
        return EXIT_BAD_REQUEST if isinstance(error, RecipeError) else EXIT_DISK_FULL
    except Exception as error:
        leave_traceback(options.output, launched.attempt, error)
        raise
    interrupts.on_stuck = session.end_stuck
    try:
        session.last_done = _train(session, interrupts)
        failure = Failure(status="completed", message="", exit_code=EXIT_CODES["completed"])
    except (RecipeError, WorkloadError) as error:
        _tell(error)
        session.traceback.write(error)
        failure = Failure(status="failed", message=error.message, exit_code=EXIT_BAD_REQUEST)
    except BaseException as error:
        failure = classify(error)
        if failure.status != "interrupted":
            session.traceback.write(error)
        if isinstance(error, FabricError):
            if process.local_rank == 0:
                _tell(error)
        elif failure.exit_code == EXIT_CODES["failed"]:
            log.exception("rank %d failed", process.rank)
        else:
            log.error("%s: %s", failure.status, failure.message)
    interrupts.done()
    exit_code = failure.exit_code
    if not session.end(failure.status, failure.message or None) and exit_code == 0:
        exit_code = EXIT_DISK_FULL
    session.writer.close()
    session.traceback.close()
    if exit_code == 0:
        stop_process()
    elif process.world_size > 1:
        # Tearing down a process group whose peers are gone can hang: leave without it.
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code


def _open_session(options: Options, process: Process, launched: Launched) -> Session:
    """Check the output folder and open this rank's record there. RecipeError if it holds one already."""
    # Not datetime.UTC: AWS's image of PyTorch 2.1 has Python 3.10.
    utc = datetime.timezone.utc  # noqa: UP017
    started_at = datetime.datetime.now(utc).isoformat(timespec="seconds")
    options.output.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(options.output).free
    if free < MIN_FREE_BYTES:
        raise OSError(errno.ENOSPC, f"only {free / 2**20:.0f} MiB are free", str(options.output))
    left = latest_checkpoint(options.output / "checkpoints")
    newest, any_left, least = agree(
        process, [float(last_attempt(options.output)), float(left is not None), float(launched.attempt)]
    )
    # Checkpoints alone are refused too: the newest are kept, which would be those of the other run.
    if (newest or any_left) and not options.resume:
        raise RecipeError(
            f"{options.output} already holds the {'record' if newest else 'checkpoints'} of a run",
            "give another --output, or --resume to go on",
        )
    attempt = max(round(least), 1 + round(newest))
    return Session(
        options=options,
        process=process,
        writer=RecordWriter(record_path(options.output, rank=process.rank, attempt=attempt)),
        traceback=TracebackFile(traceback_path(options.output, rank=process.rank, attempt=attempt)),
        launched=launched,
        attempt=attempt,
        started_at=started_at,
        steps=options.steps or 1,
    )


def _train(session: Session, interrupts: Interrupts) -> int:
    options, process, recipe = session.options, session.process, session.options.recipe
    phase = PhaseClock(session.writer, process.device)
    precision.check_runs_here(recipe, process.device)
    session.cudnn, warning = precision.guard_cudnn_attention()
    session.warnings += [warning] if warning else []
    workload = session.workload = load_workload(options.workload)
    arithmetic = precision.setup_precision(recipe, process.device)
    if process.num_nodes > 1:
        phase("all-reduce", lambda: all_reduce_between_nodes(process, options.output, session.launched))

    if options.batch_size is None:
        phase("batch-size", lambda: _find_batch_size(session, workload, arithmetic))
    else:
        session.batch_size = options.batch_size
    assert session.batch_size is not None
    multiple = precision.batch_multiple(recipe)
    if recipe.precision == "fp8" and session.batch_size % multiple:
        raise RecipeError(
            f"recipe {recipe.name}: batch size {session.batch_size} is not a multiple of {multiple}, "
            "which FP8 needs",
            f"give --batch-size {-(-session.batch_size // multiple) * multiple}",
        )
    built: list[nn.Module] = []
    phase("build", lambda: built.append(build_model(workload, recipe, options.seed, process)))
    model = built.pop()
    session.num_parameters = sum(parameter.numel() for parameter in model.parameters())

    probe = next_batch(
        workload, workload.batches(probe_request(process, seed=options.seed, batch_size=PROBE_BATCH))
    )
    session.attention_backend = attention.attention_backend(model, probe, arithmetic, workload.loss)
    if process.device.type == "cuda" and session.attention_backend in ("math", "te:unfused"):
        session.warnings.append(f"attention runs unfused ({session.attention_backend}): slower, more memory")

    optimizer = build_optimizer(workload, recipe, model)
    if recipe.compile_mode != "none":
        compile.compile_model(model, workload.blocks(model) if workload.blocks else None, recipe)
    training_model = wrap_ddp(model, recipe, process)
    identity = Identity(
        workload=options.workload,
        recipe=recipe.label,
        data=options.data.partition(":")[0],
        seed=options.seed,
        batch_size=session.batch_size,
        world_size=process.world_size,
    )
    checkpoints = options.output / "checkpoints"
    if options.checkpoint_every:
        check_space(checkpoints, model)
    if options.resume:
        phase("resume", lambda: _resume(session, checkpoints, identity, model, optimizer, arithmetic.scaler))
    batches = workload.batches(_data_request(session))
    for text in session.warnings:
        log.warning("warning: %s", text)
    session.writer.write_header(session.header())

    def save(step: int) -> None:
        seconds = phase(
            "checkpoint",
            lambda: _save(checkpoints, step, identity, process, model, optimizer, arithmetic.scaler),
            step=step,
        )
        if seconds > LONG_CHECKPOINT_S:
            log.warning(
                "warning: the checkpoint took %.0f s: a spot instance is gone two minutes after its notice, "
                "and the checkpoint has to be uploaded in them too",
                seconds,
            )

    training = Training(
        workload=workload,
        recipe=recipe,
        process=process,
        precision=arithmetic,
        model=training_model,
        optimizer=optimizer,
        batches=batches,
        batch_size=session.batch_size,
        first_step=session.first_step,
        last_step=session.steps,
        checkpoint_every=options.checkpoint_every,
        save_checkpoint=save,
        writer=session.writer,
        interrupts=interrupts,
        num_compiles=compile.num_compiles,
        print_metrics=session.launched.print_metrics,
    )
    if recipe.compile_mode != "none" and session.first_step <= session.steps:
        first = next_batch(workload, batches)
        training = dataclasses.replace(training, batches=itertools.chain([first], batches))
        phase("compile", lambda: compile_ahead(training, first))
    return train(training)


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
        num_workers=options.num_workers,
        first_step=session.first_step,
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


def _resume(
    session: Session,
    checkpoints: Path,
    identity: Identity,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
) -> str:
    """Go on after the newest checkpoint that rank 0 sees; from the start if there is none."""
    newest = latest_checkpoint(checkpoints)
    seen = step_of(newest) if newest else 0
    step = round(broadcast(session.process, [float(seen)])[0])
    if step == 0:
        return "no checkpoint yet: from the start"
    path = checkpoint_path(checkpoints, step)
    recipe = session.options.recipe
    load_checkpoint(
        path,
        identity=identity,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        rank=session.process.rank,
        device=session.process.device,
        fp8_recipe=precision.fp8_recipe(recipe) if recipe.precision == "fp8" else None,
    )
    # One killed after its last checkpoint has nothing left to do, and completes.
    if step > session.steps:
        raise RecipeError(f"{path} is after step {step}, and --steps is {session.steps}", "give more --steps")
    session.first_step = step + 1
    session.last_done = step
    return f"after step {step}"


def _save(
    checkpoints: Path,
    step: int,
    identity: Identity,
    process: Process,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
) -> str | None:
    states: list[Any] = [random_state(process.device)]
    if process.world_size > 1:
        gathered: list[Any] | None = [None] * process.world_size if process.rank == 0 else None
        torch.distributed.gather_object(states[0], gathered)
        states = gathered or states
    if process.rank != 0:
        return None
    path = save_checkpoint(
        checkpoints,
        step=step,
        identity=identity,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        random_states=states,
    )
    return path.name


def _tell(error: BaseException) -> None:
    if isinstance(error, RecipeError | WorkloadError | FabricError):
        log.error("error: %s%s", error.message, f"\n  {error.hint}" if error.hint else "")
    else:
        log.error("error: %s", error)

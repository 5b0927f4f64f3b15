"""One training run from start to end, and how it ended."""

import datetime
import errno
import gc
import logging
import os
import shutil
import sys
from dataclasses import replace

import torch.distributed as dist

from fastlaunch_train.checks.runs_here import this_machine
from fastlaunch_train.distributed import fabric
from fastlaunch_train.distributed.parallel import Process, agree, start_process, stop_process
from fastlaunch_train.loop.checkpoint import latest_checkpoint
from fastlaunch_train.process.failures import (
    EXIT_BAD_REQUEST,
    EXIT_CODES,
    EXIT_DISK_FULL,
    FabricError,
    Failure,
    TracebackFile,
    classify,
    is_first_to_fail,
    leave_traceback,
    traceback_path,
)
from fastlaunch_train.process.interrupts import Interrupts
from fastlaunch_train.process.launch import LaunchSettings
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.recipes.requirements import caveats
from fastlaunch_train.records.records import RecordWriter, last_attempt, record_path
from fastlaunch_train.run.assembly import train_session
from fastlaunch_train.run.options import Options
from fastlaunch_train.run.session import Session
from fastlaunch_train.workloads.contract import own_hook
from fastlaunch_train.workloads.registry import WorkloadError

log = logging.getLogger("fastlaunch_train")

#: Bytes that have to be free at the start: enough for the records of a long run, and some to spare.
MIN_FREE_BYTES = 64 * 2**20


def run(options: Options, interrupts: Interrupts, launch: LaunchSettings) -> int:
    """Train as `options` say; return the exit code. Errors are logged."""
    try:
        fabric.log_nccl(options.output)
        process = start_process()
        session = _open_session(options, process, launch)
    except (RecipeError, OSError) as error:
        # All ranks were asked for the same.
        if isinstance(error, OSError) or int(os.environ.get("LOCAL_RANK") or "0") == 0:
            _log_error(error)
        return EXIT_BAD_REQUEST if isinstance(error, RecipeError) else EXIT_DISK_FULL
    except Exception as error:
        leave_traceback(options.output, launch.attempt, error)
        raise
    interrupts.on_stuck = session.end_stuck
    try:
        session.last_done = train_session(session, interrupts)
        failure = Failure(status="completed", message="", exit_code=EXIT_CODES["completed"])
    except (RecipeError, WorkloadError) as error:
        if is_first_to_fail(options.output, session.attempt):
            _log_error(error)
        session.traceback.write(error)
        failure = Failure(status="failed", message=error.message, exit_code=EXIT_BAD_REQUEST)
    except BaseException as error:
        failure = classify(error)
        if failure.status != "interrupted":
            session.traceback.write(error)
        if isinstance(error, FabricError):
            if process.local_rank == 0:
                _log_error(error)
        elif failure.exit_code == EXIT_CODES["failed"]:
            if hook := own_hook(error, options.workload, session.workload):
                failure = replace(failure, message=f"{hook}: {failure.message}")
            if is_first_to_fail(options.output, session.attempt):
                log.exception("rank %d failed", process.rank)
                # Log the error last, since users read the end.
                if hook:
                    log.error("error: %s", failure.message)
        else:
            log.error("%s: %s", failure.status, failure.message)
    interrupts.done()
    exit_code = failure.exit_code
    if not session.end(failure.status, failure.message or None) and exit_code == 0:
        exit_code = EXIT_DISK_FULL
    session.writer.close()
    session.traceback.close()
    if exit_code == 0 and dist.is_initialized():
        # First free the holders of the process group: a Trainer keeps its DDP model in a cycle.
        gc.unfreeze()
        gc.collect()
        stop_process()
    elif process.world_size > 1:
        # Leaving a process group whose peers are gone can hang.
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code


def _open_session(options: Options, process: Process, launch: LaunchSettings) -> Session:
    """Check the output folder and open this rank's record there.

    Raises RecipeError if the folder already holds a run, OSError if the disk is full.
    """
    # Not datetime.UTC: AWS's image of PyTorch 2.1 has Python 3.10.
    utc = datetime.timezone.utc  # noqa: UP017
    started_at = datetime.datetime.now(utc).isoformat(timespec="seconds")
    options.output.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(options.output).free
    if free < MIN_FREE_BYTES:
        raise OSError(errno.ENOSPC, f"only {free / 2**20:.0f} MiB are free", str(options.output))
    has_checkpoints = latest_checkpoint(options.output / "checkpoints") is not None
    newest, any_checkpoints, least = agree(
        process, [float(last_attempt(options.output)), float(has_checkpoints), float(launch.attempt)]
    )
    # Refuse checkpoints alone, too: only the newest of two runs' checkpoints would be kept.
    if (newest or any_checkpoints) and not options.resume:
        raise RecipeError(
            f"{options.output} already holds the {'record' if newest else 'checkpoints'} of a run",
            "give another --output, or --resume to continue",
        )
    attempt = max(round(least), 1 + round(newest))
    machine = this_machine(process.device)
    return Session(
        options=options,
        process=process,
        writer=RecordWriter(record_path(options.output, rank=process.rank, attempt=attempt)),
        traceback=TracebackFile(traceback_path(options.output, rank=process.rank, attempt=attempt)),
        launch=launch,
        attempt=attempt,
        started_at=started_at,
        steps=options.steps or 1,
        warnings=list(caveats(options.recipe, machine, world_size=process.world_size)),
    )


def _log_error(error: BaseException) -> None:
    if isinstance(error, RecipeError | WorkloadError | FabricError):
        log.error("error: %s%s", error.message, f"\n  {error.hint}" if error.hint else "")
    else:
        log.error("error: %s", error)

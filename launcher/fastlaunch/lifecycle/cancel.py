"""Cancel a run: here at once, on AWS by stopping its attempt's machines."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from fastlaunch.backends.protocol import CLOUD_BACKENDS, AttemptStatus, Backend, CloudBackend
from fastlaunch.core.activity import note_wait
from fastlaunch.core.errors import Throttled, Unreachable, UserError
from fastlaunch.core.plan import Ending, RunState
from fastlaunch.core.terminal import report_line
from fastlaunch.ledger.ledger import Ledger, Run
from fastlaunch.ledger.rows import Attempt
from fastlaunch.lifecycle.describe import how_to_stop, machine_of
from fastlaunch.lifecycle.finish import finish_attempt, settle_run
from fastlaunch.lifecycle.local import LOOK_INTERVAL_S, finish_run
from fastlaunch.lifecycle.monitor import SHUTDOWN_WAIT
from fastlaunch.lifecycle.reconcile import adopt, handle_of
from fastlaunch.lifecycle.schedules import disarm, unmake_start, waits
from fastlaunch.lifecycle.sight import check_account, look

#: The reason of a stopped attempt, and of a run that was cancelled before it started.
BY_CANCEL, BEFORE_START = "fastlaunch cancel", "cancelled before it started"
#: How long a live launcher may take to note what it started, here and on AWS.
_GRACE_S = 10.0
_CLOUD_GRACE_S = 60.0


def cancel(
    run: Run,
    *,
    backend: Backend | CloudBackend,
    ledger: Ledger,
    sleep: Callable[[float], None] = time.sleep,
    report: Callable[[str], None] = report_line,
) -> RunState:
    """Stop `run`, or keep it from starting, and return its final state.

    On AWS all other runs of its attempt stop too. Raises subclasses of CloudRefused if AWS refuses, and
    UserError while it is unknown whether there is a machine.
    """
    if run.backend in CLOUD_BACKENDS:
        cloud = cast(CloudBackend, backend)
        # Its launcher may have begun another attempt before it saw the request to stop.
        while to_stop := _attempt_to_stop(run, cloud, ledger):
            _stop(to_stop, backend=cloud, ledger=ledger, report=report)
            if ledger.get(run.id).state.is_final:
                break
        return ledger.get(run.id).state
    backend = cast(Backend, backend)
    if ledger.get(run.id).state is RunState.PLANNED:
        ledger.set_state(run.id, RunState.CANCELLED, BEFORE_START, ending=Ending.CANCELLED)
    if ledger.get(run.id).state.is_final:
        return ledger.get(run.id).state
    handle = handle_of(run, ledger=ledger, backend=backend)
    waited_s = 0.0
    while handle is None and ledger.launcher_lives(run) and waited_s < _GRACE_S:
        sleep(LOOK_INTERVAL_S)
        waited_s += LOOK_INTERVAL_S
        handle = handle_of(run, ledger=ledger, backend=backend)
    if handle is None:
        ledger.set_state(run.id, RunState.LOST, "its launcher ended before it started")
        return ledger.get(run.id).state
    for attempt in ledger.attempts_of(run.id):
        # Tell its launcher, which may be the first to see the job end.
        ledger.end_attempt(attempt.id, RunState.CANCELLED, ending=Ending.CANCELLED)
    backend.stop(handle)
    return finish_run(run, handle, backend=backend, ledger=ledger)


def _stop(attempt: Attempt, *, backend: CloudBackend, ledger: Ledger, report: Callable[[str], None]) -> None:
    """Stop the attempt's machines, wait a while for their end, and note it."""
    assert attempt.handle is not None
    check_account(attempt, backend.aws.identity())
    # Tell its launcher, which may be the first to see the machine end. A full disk must not keep the
    # machine alive.
    with suppress(UserError):
        ledger.note_stop(attempt.id, BY_CANCEL, ending=Ending.CANCELLED)
    try:
        backend.stop(attempt.handle)
    except KeyboardInterrupt:
        report(f"{machine_of(attempt, backend)} was not seen to end; {how_to_stop(attempt, backend)}")
        raise
    aws_status = _wait_for_end(attempt, backend, ledger)
    finish_attempt(attempt, aws_status, backend=backend, ledger=ledger)
    if ledger.attempt(attempt.id).ended_at is not None:
        disarm(ledger, backend.aws, attempt)


def _wait_for_end(attempt: Attempt, backend: CloudBackend, ledger: Ledger) -> AttemptStatus:
    """Return the machines' status at AWS once they have ended, or after a while."""
    assert attempt.handle is not None
    deadline = backend.now() + SHUTDOWN_WAIT
    while True:
        try:
            (aws_status,) = look(ledger, backend, [attempt])
            if aws_status.has_ended or backend.now() >= deadline:
                return aws_status
            if aws_status.num_unseen or aws_status.is_live:
                # AWS does not end what it does not show, and may show it by now.
                backend.kill(attempt.handle)
        except (Throttled, Unreachable):
            if backend.now() >= deadline:
                raise
        backend.pause(attempt.handle, 5.0, until=deadline)


def _attempt_to_stop(run: Run, backend: CloudBackend, ledger: Ledger) -> Attempt | None:
    """Return the run's attempt that has a machine; wait for one that is being started.

    None if there is none: the run has then ended, and its launcher starts nothing more for it.
    """
    waited_s = 0.0
    while True:
        # In one transaction: a launcher about to ask for a machine sees the run ended, or is seen here.
        with ledger.transaction():
            attempts = ledger.attempts_of(run.id)
            unfinished = [attempt for attempt in attempts if attempt.ended_at is None]
            if not unfinished:
                had_machine = any(attempt.handle for attempt in attempts)
                why = f"stopped by {BY_CANCEL}" if had_machine else BEFORE_START
                settle_run(ledger, run.id, why, Ending.CANCELLED)
                return None
        if unfinished[-1].handle is not None:
            return unfinished[-1]
        is_starting = ledger.launcher_lives(run) and not ledger.get(run.id).state.is_final
        if not is_starting or waited_s >= _CLOUD_GRACE_S:
            if waits(unfinished[-1]) and _gives_up(unfinished[-1], backend, ledger):
                continue
            adopt(ledger, backend, unfinished)
            attempt = ledger.attempt(unfinished[-1].id)
            if attempt.ended_at is not None:
                continue
            if attempt.handle is not None:
                return attempt
            raise UserError(
                f"run {run.id}: whether a machine was started is not known yet: {attempt.reason}",
                f"type the same again in a few minutes; or fastlaunch reap --region {attempt.region}",
            )
        note_wait(f"waiting {_CLOUD_GRACE_S:.0f} s at most for its launcher, which is starting a machine")
        backend.sleep(LOOK_INTERVAL_S)
        waited_s += LOOK_INTERVAL_S


def _gives_up(attempt: Attempt, backend: CloudBackend, ledger: Ledger) -> bool:
    """Delete the schedules that would start an attempt; return whether it has ended, as none has run."""
    check_account(attempt, backend.aws.identity())
    if not unmake_start(ledger, backend.aws, attempt, now=backend.now()):
        return False
    return ledger.end_attempt(attempt.id, RunState.CANCELLED, ending=Ending.CANCELLED, reason=BEFORE_START)


def siblings(ledger: Ledger, run: Run) -> list[str]:
    """Return the ids of the unfinished runs on the same machines, which `cancel` stops too."""
    machines = [attempt for attempt in ledger.attempts_of(run.id) if attempt.ended_at is None]
    ids = dict.fromkeys(run_id for attempt in machines for run_id in attempt.run_ids)
    known = ledger.existing(list(ids))
    return [id for id in ids if id in known and id != run.id and not ledger.get(id).state.is_final]

"""Brings the ledger up to what is true on AWS: for attempts whose launcher is gone, or only started them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from fastlaunch.backends import RunState
from fastlaunch.backends.protocol import CloudBackend, Sight
from fastlaunch.cloud_words import how_to_stop, machine_of
from fastlaunch.core.errors import BadConfiguration, Throttled, Unreachable, UserError
from fastlaunch.core.settings import Settings
from fastlaunch.runs.attempt_price import note_machines, respec_in
from fastlaunch.runs.deadline_schedule import disarm
from fastlaunch.runs.finish import STOPPED_BY, finish_attempt, settle_run
from fastlaunch.runs.monitor import SHUTDOWN_WAIT
from fastlaunch.submission import LOOK_INTERVAL_S, launcher_lives

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Ledger, Run
    from fastlaunch.run_attempts import Attempt

_CANCELLED = f"{STOPPED_BY}fastlaunch cancel"
NEVER_STARTED = "its launcher ended before a machine was started"
#: How long `cancel` leaves it to a launcher that lives to be told what it started.
_LAUNCHER_GRACE_S = 60.0
#: How long AWS may take to show what it started. After that what it does not know is no more.
_SHOWN_AFTER = timedelta(minutes=15)


def reconcile_cloud(
    ledger: "Ledger",
    backends: Mapping[str, CloudBackend],
    *,
    settings: Settings,
    warn: Callable[[str], None],
) -> None:
    """End what ended, adopt what was started though nobody noted it, and settle what never was.

    In few requests per backend and region, however many attempts there are. What AWS does not answer stays as
    it is, with a warning. Attempts whose launcher lives are left to it.
    """
    for name, backend in backends.items():
        attempts = [one for one in ledger.unfinished_attempts(name) if not _is_followed(ledger, one)]
        for region in sorted({one.region or "" for one in attempts}):
            here = [one for one in attempts if one.region == region]
            try:
                _adopt(ledger, backend, [one for one in here if one.handle is None])
                _update(ledger, backend, settings, [ledger.attempt(one.id) for one in here], warn)
            except UserError as error:
                warn(f"{len(here)} attempts in {region} are shown as they were: {error.message}")
    _settle_unheld(ledger, backends)
    _disarm_ended(ledger, backends)


def _disarm_ended(ledger: "Ledger", backends: Mapping[str, CloudBackend]) -> None:
    """Delete the schedules that are left of attempts that have ended, however they did."""
    for attempt in ledger.scheduled_attempts():
        if attempt.ended_at is not None and attempt.backend in backends:
            disarm(ledger, backends[attempt.backend].aws, attempt)


def cancel_cloud(
    run: "Run",
    *,
    backend: CloudBackend,
    ledger: "Ledger",
    settings: Settings,
    tell: Callable[[str], None],
) -> RunState:
    """The final state of `run` after its attempt's machine was stopped, with all other runs of the attempt.

    Raises CloudRefused's kinds where AWS does not let it be stopped, or where it is not known yet whether
    there is a machine.
    """
    attempt = _attempt_to_stop(run, backend, ledger)
    if attempt is None:
        return ledger.get(run.id).state
    assert attempt.handle is not None
    others = [one for one in attempt.run_ids if one != run.id and not _has_ended(ledger, one)]
    if others:
        tell(f"its machine does other runs too, which are stopped as well: {', '.join(others)}")
    # A note for its launcher, if that lives: it may be the first to see the machine end. A disk that is full
    # does not keep the machine alive.
    with suppress(UserError):
        ledger.explain_attempt(attempt.id, _CANCELLED)
    try:
        backend.stop(attempt.handle)
    except KeyboardInterrupt:
        tell(f"{machine_of(attempt, backend)} was not seen to end; {how_to_stop(attempt, backend)}")
        raise
    sight = _wait_for_end(backend, attempt.handle)
    _note(ledger, backend, settings, [(ledger.attempt(attempt.id), sight)])
    finish_attempt(attempt, sight, backend=backend, ledger=ledger)
    if ledger.attempt(attempt.id).ended_at is not None:
        disarm(ledger, backend.aws, attempt)
    return ledger.get(run.id).state


def _wait_for_end(backend: CloudBackend, handle: Mapping[str, Any]) -> Sight:
    """The machine, which shuts down, when it has ended, or after a while."""
    deadline = backend.now() + SHUTDOWN_WAIT
    while True:
        try:
            (sight,) = backend.see([handle])
            if sight.has_ended or backend.now() >= deadline:
                return sight
        except (Throttled, Unreachable):
            if backend.now() >= deadline:
                raise
        backend.sleep(5.0)


def _adopt(ledger: "Ledger", backend: CloudBackend, attempts: "Sequence[Attempt]") -> None:
    """Note the machines of attempts whose launcher died before it was told, and end those that have none."""
    plans = {one.id: plan for one in attempts if (plan := ledger.plan_of(one.id)) is not None}
    found = backend.find_all(list(plans.values()))
    for attempt in attempts:
        plan = plans.get(attempt.id)
        handle, is_old = found.get(attempt.token), _is_old(attempt, backend.now())
        if handle is None and is_old and plan is not None:
            handle = _forgotten(backend, attempt)
        if handle is not None:
            _start(ledger, attempt, handle)
        elif plan is None or is_old:
            with ledger.transaction():
                ledger.end_attempt(attempt.id, RunState.LOST, reason=NEVER_STARTED)
        elif ledger.attempt(attempt.id).handle is None:
            minutes = _SHOWN_AFTER.total_seconds() / 60
            ledger.explain_attempt(
                attempt.id,
                f"its launcher ended while a machine was being started; {backend.service} shows none (yet): "
                f"this is settled {minutes:.0f} minutes after the request",
            )


def _forgotten(backend: CloudBackend, attempt: "Attempt") -> Mapping[str, Any] | None:
    """The handle of machines that ended so long ago that EC2 forgot them, by what their node uploaded.

    None if it uploaded nothing, or names no instance. launched_at: when they were asked for.
    """
    handle = {
        "region": attempt.region,
        "token": attempt.token,
        "output": attempt.output,
        "launched_at": attempt.started_at,
        "num_nodes": attempt.num_nodes,
    }
    try:
        synced = backend.sync(handle)
    except BadConfiguration:
        # Its bucket is there no more.
        return None
    instance_id = {**(synced.boot or {}), **(synced.status or {})}.get("instance_id")
    if not isinstance(instance_id, str):
        return None
    return {**handle, "instance_id": instance_id, "instance_ids": [instance_id]}


def _start(ledger: "Ledger", attempt: "Attempt", handle: Any) -> None:
    with ledger.transaction():
        ledger.set_handle(attempt.id, handle)
        ledger.explain_attempt(attempt.id, None)
        for run_id in attempt.run_ids:
            ledger.set_state(run_id, RunState.RUNNING)
            ledger.explain(run_id, None)


def _update(
    ledger: "Ledger",
    backend: CloudBackend,
    settings: Settings,
    attempts: "Sequence[Attempt]",
    warn: Callable[[str], None],
) -> None:
    """Note the machines that are seen, and end the attempts whose machine has ended."""
    known = [(one, one.handle) for one in attempts if one.handle is not None and one.ended_at is None]
    sights = backend.see([handle for _, handle in known])
    _note(ledger, backend, settings, [(one, sight) for (one, _), sight in zip(known, sights, strict=True)])
    for (attempt, _), sight in zip(known, sights, strict=True):
        if not sight.has_ended:
            continue
        try:
            finish_attempt(attempt, sight, backend=backend, ledger=ledger)
        except UserError as error:
            warn(f"what {attempt.token} uploaded cannot be brought here: {error.message}")


def _note(
    ledger: "Ledger", backend: CloudBackend, settings: Settings, seen: "Sequence[tuple[Attempt, Sight]]"
) -> None:
    today = backend.now().date()
    note_machines(ledger, backend.aws, seen, today, respec_in(ledger, settings, today))


def _settle_unheld(ledger: "Ledger", backends: Collection[str]) -> None:
    """End the runs that no attempt holds and no launcher is about to start."""
    runs = ledger.fetch_comparable(["state=planned", "state=running"])
    alone = [run for run in runs if run.backend in backends and not launcher_lives(ledger, run)]
    # Looked up after the launchers: one that has ended since may have left an attempt behind.
    unfinished = [one for name in backends for one in ledger.unfinished_attempts(name)]
    held = {run_id for one in unfinished for run_id in one.run_ids}
    for run in alone:
        if run.id not in held:
            attempts = ledger.attempts_of(run.id)
            settle_run(ledger, run.id, (attempts[-1].reason if attempts else None) or NEVER_STARTED)


def _attempt_to_stop(run: "Run", backend: CloudBackend, ledger: "Ledger") -> "Attempt | None":
    """The run's attempt that has a machine. Waits for one that is being started.

    None if there is none: the run has then ended, and its launcher starts nothing more for it.
    """
    waited_s = 0.0
    while True:
        # In one transaction: a launcher that is about to ask for a machine finds the run ended, or is seen.
        with ledger.transaction():
            open_ones = _open_attempts(run, ledger)
            if not open_ones:
                _end_unstarted(run, ledger)
                return None
        if open_ones[-1].handle is not None:
            return open_ones[-1]
        if not _is_starting(run, ledger) or waited_s >= _LAUNCHER_GRACE_S:
            _adopt(ledger, backend, open_ones)
            attempt = ledger.attempt(open_ones[-1].id)
            if attempt.ended_at is not None:
                continue
            if attempt.handle is not None:
                return attempt
            raise UserError(
                f"run {run.id}: whether a machine was started is not known yet: {attempt.reason}",
                f"type the same again in a few minutes; or fastlaunch reap --region {attempt.region}",
            )
        backend.sleep(LOOK_INTERVAL_S)
        waited_s += LOOK_INTERVAL_S


def _open_attempts(run: "Run", ledger: "Ledger") -> "list[Attempt]":
    return [one for one in ledger.attempts_of(run.id) if one.ended_at is None]


def _end_unstarted(run: "Run", ledger: "Ledger") -> None:
    had_machine = any(one.handle for one in ledger.attempts_of(run.id))
    why = _CANCELLED if had_machine else "cancelled before it started"
    settle_run(ledger, run.id, why, stopped=True)


def _is_starting(run: "Run", ledger: "Ledger") -> bool:
    return launcher_lives(ledger, run) and not ledger.get(run.id).state.is_final


def _is_followed(ledger: "Ledger", attempt: "Attempt") -> bool:
    known = ledger.existing(attempt.run_ids)
    return any(
        launcher_lives(ledger, ledger.get(run_id)) for run_id in attempt.run_ids[:1] if run_id in known
    )


def _has_ended(ledger: "Ledger", run_id: str) -> bool:
    return not ledger.existing([run_id]) or ledger.get(run_id).state.is_final


def _is_old(attempt: "Attempt", now: datetime) -> bool:
    return now - datetime.fromisoformat(attempt.started_at) > _SHOWN_AFTER

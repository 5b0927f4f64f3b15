"""Bring the ledger up to date for runs whose launcher is gone, or only started them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

from fastlaunch.backends.protocol import CLOUD_BACKENDS, FORGOTTEN_AFTER, Backend, CloudBackend
from fastlaunch.core.data import read
from fastlaunch.core.errors import BadConfiguration, CloudRefused, UserError
from fastlaunch.core.ownership import MARGIN_MINUTES
from fastlaunch.core.plan import Ending, Plan, RunState
from fastlaunch.core.settings import Settings
from fastlaunch.core.terminal import as_warning, report_line
from fastlaunch.core.units import counted
from fastlaunch.ledger.ledger import Ledger, Run
from fastlaunch.ledger.rows import Attempt
from fastlaunch.lifecycle.finish import finish_attempt, held_runs, settle_run
from fastlaunch.lifecycle.local import finish_run
from fastlaunch.lifecycle.schedules import (
    arm,
    check_waiting,
    disarm,
    explain_wait,
    is_to_be_made,
    make_start,
    needs_timer,
    requested_by,
    starts_at,
    unmake_start,
    waits,
    was_given_up,
)
from fastlaunch.lifecycle.sight import counts_absence, is_of, look

NEVER_STARTED = "its launcher ended before a machine was started"
NOT_IN_BLOCK = (
    "EC2 shows no machine though its capacity block has begun: CloudTrail says why, under RunInstances by "
    "the role of the schedule"
)


def reconcile(
    ledger: Ledger,
    backends: Mapping[str, Backend],
    settings: Settings,
    *,
    warn: Callable[[str], None] = lambda line: report_line(as_warning(line)),
) -> None:
    """End the runs that ended while their launcher was gone.

    A run whose launcher is alive is left to it. If AWS does not answer, the runs stay as they are, with a
    warning.
    """
    runs = ledger.select(["state=planned", "state=running"])
    if any(run.backend in CLOUD_BACKENDS for run in runs) or concerns_cloud(ledger):
        cloud = {name: cast(CloudBackend, backends[name]) for name in CLOUD_BACKENDS if name in backends}
        reconcile_cloud(ledger, cloud, settings, warn=warn)
    for run in runs:
        backend = backends.get(run.backend)
        is_cloud = run.backend in CLOUD_BACKENDS
        if is_cloud or backend is None or run.plan is None or ledger.launcher_lives(run):
            continue
        handle = handle_of(run, ledger=ledger, backend=backend)
        if handle is None:
            # Refused if its launcher, alive a moment ago, has ended the run since.
            ledger.set_state(run.id, RunState.LOST, "its launcher ended before it started")
        elif backend.state(handle) is RunState.RUNNING:
            ledger.set_state(run.id, RunState.RUNNING)
        else:
            finish_run(run, handle, backend=backend, ledger=ledger)


def concerns_cloud(ledger: Ledger) -> bool:
    """Return whether the ledger knows of anything on AWS that may be under way or left behind."""
    open_or_lost = (
        *map(ledger.unfinished_attempts, CLOUD_BACKENDS),
        *map(ledger.lost_attempts, CLOUD_BACKENDS),
    )
    return any(open_or_lost) or bool(ledger.scheduled_attempts())


def handle_of(run: Run, *, ledger: Ledger, backend: Backend) -> Mapping[str, Any] | None:
    """Return the handle of the run's job: noted at its start, else looked up by its plan."""
    for attempt in ledger.attempts_of(run.id)[-1:]:
        if attempt.handle is not None:
            return attempt.handle
    return backend.find(read(Plan, run.plan, "plan")) if run.plan else None


def reconcile_cloud(
    ledger: Ledger, backends: Mapping[str, CloudBackend], settings: Settings, *, warn: Callable[[str], None]
) -> None:
    """End attempts that ended on AWS, adopt those started without a note, and settle those never started.

    Live EC2 machines without a timer in the account get one. Attempts whose launcher is alive are left to it.
    The number of requests per backend and region does not grow with the number of attempts.
    """
    for name, backend in backends.items():
        lost = ledger.lost_attempts(name)
        open_ones = [
            attempt for attempt in ledger.unfinished_attempts(name) if not _is_followed(ledger, attempt)
        ]
        attempts = _of_this_account(backend, [*open_ones, *lost], warn)
        for region in sorted({attempt.region or "" for attempt in attempts}):
            here = [attempt for attempt in attempts if attempt.region == region]
            try:
                take_back(ledger, backend, [attempt for attempt in here if attempt.ended_at is not None])
                here = [ledger.attempt(attempt.id) for attempt in here]
                unknown = [attempt for attempt in here if attempt.handle is None and attempt.ended_at is None]
                adopt(ledger, backend, unknown)
                _update(ledger, backend, [ledger.attempt(attempt.id) for attempt in here], warn)
                _protect(ledger, backend, [ledger.attempt(attempt.id) for attempt in here], settings, warn)
                here = [ledger.attempt(attempt.id) for attempt in here]
                check_waiting(ledger, backend.aws, region, here, now=backend.now(), warn=warn)
            except UserError as error:
                shown = f"{counted(len(here), 'attempt')} in {region} {'is' if len(here) == 1 else 'are'}"
                warn(f"{shown} shown as before: {error.message}")
    _settle_unheld(ledger, backends)
    # Delete the remaining schedules of attempts that have ended.
    for attempt in ledger.scheduled_attempts():
        ended_on = backends.get(attempt.backend) if attempt.ended_at is not None else None
        # A look into another account would find no such schedule, which proves nothing.
        if ended_on and _of_this_account(ended_on, [attempt], lambda _: None):
            disarm(ledger, ended_on.aws, attempt)


def _of_this_account(
    backend: CloudBackend, attempts: Sequence[Attempt], warn: Callable[[str], None]
) -> list[Attempt]:
    """Return the attempts that may be in the logged-in account; warn of the others."""
    if all(attempt.account is None for attempt in attempts):
        return list(attempts)
    try:
        identity = backend.aws.identity()
    except UserError as error:
        hint = f"; {error.hint}" if error.hint else ""
        warn(
            f"{counted(len(attempts), 'attempt')} on {backend.service} "
            f"{'is' if len(attempts) == 1 else 'are'} shown as before: {error.message}{hint}"
        )
        return []
    others = [attempt for attempt in attempts if not is_of(attempt, identity)]
    for account in sorted({str(attempt.account) for attempt in others}):
        num = sum(attempt.account == account for attempt in others)
        warn(
            f"{counted(num, 'attempt')} in account {account} {'is' if num == 1 else 'are'} shown as before: "
            f"you are logged in to {identity.account} (--profile NAME chooses another login)"
        )
    return [attempt for attempt in attempts if attempt not in others]


def take_back(ledger: Ledger, backend: CloudBackend, attempts: Sequence[Attempt]) -> None:
    """Set lost attempts to `running` again if AWS shows their machines alive."""
    plans = {
        attempt.token: plan
        for attempt in attempts
        if not attempt.handle and (plan := ledger.plan_of(attempt.id))
    }
    handles_by_token = backend.find_all(list(plans.values())) if plans else {}
    handles = {attempt.id: attempt.handle or handles_by_token.get(attempt.token) for attempt in attempts}
    known = [attempt for attempt in attempts if handles[attempt.id]]
    statuses = backend.describe([handle for handle in handles.values() if handle]) if known else []
    for attempt, aws_status in zip(known, statuses, strict=True):
        handle = handles[attempt.id]
        if aws_status.is_live and handle is not None:
            with ledger.transaction():
                if ledger.take_back(attempt.id, f"it counted as lost; {backend.service} shows that it lives"):
                    ledger.set_handle(attempt.id, handle)


def adopt(ledger: Ledger, backend: CloudBackend, attempts: Sequence[Attempt]) -> None:
    """Note the machines of attempts whose launcher died before AWS answered; end attempts without any."""
    plans = {attempt.id: plan for attempt in attempts if (plan := ledger.plan_of(attempt.id)) is not None}
    handles = backend.find_all(list(plans.values()))
    for attempt in attempts:
        plan = plans.get(attempt.id)
        handle = handles.get(attempt.token)
        is_old = backend.now() - requested_by(attempt) > FORGOTTEN_AFTER
        if handle is None and is_old and plan is not None:
            handle = _forgotten(backend, attempt)
        if handle is None and waits(attempt) and not _has_missed(ledger, backend, attempt, is_old=is_old):
            continue
        with ledger.transaction():
            # Another process may have ended it meanwhile, with a reason.
            if ledger.attempt(attempt.id).handle is not None:
                continue
            if handle is not None:
                ledger.set_handle(attempt.id, handle)
                for run_id in attempt.run_ids:
                    ledger.set_state(run_id, RunState.RUNNING)
                    ledger.explain(run_id, None)
            elif plan is None or is_old:
                is_missed = waits(attempt) and not was_given_up(attempt)
                reason = NOT_IN_BLOCK if is_missed else NEVER_STARTED
                ledger.end_attempt(attempt.id, RunState.LOST, ending=Ending.NEVER_STARTED, reason=reason)
            else:
                minutes = FORGOTTEN_AFTER.total_seconds() / 60
                ledger.explain_attempt(
                    attempt.id,
                    f"its launcher ended while a machine was being started; {backend.service} shows none "
                    f"(yet): this is settled {minutes:.0f} minutes after the request",
                )


def _has_missed(ledger: Ledger, backend: CloudBackend, attempt: Attempt, *, is_old: bool) -> bool:
    """Return whether nothing has started an attempt that waits, and nothing can. Else note what is known.

    is_old: whether EC2 should have shown by now what was started.
    """
    if not is_old:
        if attempt.reason is None and not (is_to_be_made(attempt) or was_given_up(attempt)):
            explain_wait(ledger, attempt)
        return False
    # Seen is seen: one empty answer proves nothing, and no launcher tells that AWS has refused.
    limit = timedelta(minutes=(attempt.max_minutes or 0) + MARGIN_MINUTES)
    if not counts_absence(ledger, attempt, requested_by(attempt) + limit, backend.now()):
        ledger.explain_with_runs(attempt.id, NOT_IN_BLOCK)
        return False
    # No schedule may start it later.
    with suppress(CloudRefused):
        unmake_start(ledger, backend.aws, attempt, now=backend.now())
    return was_given_up(ledger.attempt(attempt.id))


def _forgotten(backend: CloudBackend, attempt: Attempt) -> Mapping[str, Any] | None:
    """Return a handle for ended machines that EC2 has forgotten; None if they uploaded nothing.

    It names no machine, since the bucket shows that machines existed, but not which ones. `launched_at` is
    the time of the request.
    """
    handle: dict[str, Any] = {
        "region": attempt.region,
        "token": attempt.token,
        "output": attempt.output,
        "launched_at": starts_at(attempt).isoformat() if waits(attempt) else attempt.started_at,
        "num_nodes": attempt.num_nodes,
        "instance_ids": [],
        "run_ids": list(attempt.run_ids),
    }
    try:
        synced = backend.sync(handle)
    except BadConfiguration:
        # Its bucket is gone.
        return None
    return handle if synced.boot or synced.status else None


def _update(
    ledger: Ledger, backend: CloudBackend, attempts: Sequence[Attempt], warn: Callable[[str], None]
) -> None:
    """Note the machines that AWS shows, and end the attempts whose machines have ended."""
    started = [attempt for attempt in attempts if attempt.handle is not None and attempt.ended_at is None]
    for attempt, aws_status in zip(started, look(ledger, backend, started), strict=True):
        if not aws_status.has_ended:
            continue
        try:
            finish_attempt(attempt, aws_status, backend=backend, ledger=ledger)
        except UserError as error:
            warn(f"what {attempt.token} uploaded cannot be brought here: {error.message}")


def _protect(
    ledger: Ledger,
    backend: CloudBackend,
    attempts: Sequence[Attempt],
    settings: Settings,
    warn: Callable[[str], None],
) -> None:
    """Make the missing schedules: those that start what waits for its block, and timers."""
    for attempt in attempts:
        role = settings.region_settings(attempt.region or "").scheduler_role
        if role and is_to_be_made(attempt) and (plan := ledger.plan_of(attempt.id)):
            make_start(ledger, backend.aws, attempt, plan, role=role, now=backend.now())
            explain_wait(ledger, ledger.attempt(attempt.id))
        if role is None or not needs_timer(attempt):
            continue
        result = arm(ledger, backend.aws, attempt, role=role, now=backend.now())
        if needs_timer(ledger.attempt(attempt.id)):
            warn(f"{attempt.token}: {result}")


def _settle_unheld(ledger: Ledger, backends: Collection[str]) -> None:
    """End the runs without an attempt and without a launcher about to start them."""
    if not _unheld(ledger, backends):
        return
    # Check again in a transaction, since another command may be about to resume them.
    with ledger.transaction():
        for run in _unheld(ledger, backends):
            attempts = ledger.attempts_of(run.id)
            last = attempts[-1] if attempts else None
            why = (last and last.reason) or NEVER_STARTED
            settle_run(ledger, run.id, why, last.ending if last else Ending.NEVER_STARTED)


def _unheld(ledger: Ledger, backends: Collection[str]) -> list[Run]:
    runs = ledger.fetch_comparable(["state=planned", "state=running"])
    alone = [run for run in runs if run.backend in backends and not ledger.launcher_lives(run)]
    # Read after the launchers, since one that has ended meanwhile may have left an attempt.
    held = held_runs(ledger, backends)
    return [run for run in alone if run.id not in held]


def _is_followed(ledger: Ledger, attempt: Attempt) -> bool:
    known = ledger.existing(attempt.run_ids)
    return any(ledger.launcher_lives(ledger.get(run_id)) for run_id in attempt.run_ids[:1] if run_id in known)

"""One-time schedules in the account, which act while nothing of ours runs, and are gone afterwards.

A timer for each attempt on EC2 ends the machines after the deadline in any case: EventBridge Scheduler calls
ec2:TerminateInstances once, 15 minutes after the machines' own limit. Each machine has a separate schedule:
EC2 terminates all machines of a list or none, and forgets a machine an hour after its end, so in a shared
list one ended machine would keep the others alive.

An attempt in a capacity block that is to come, which nobody follows, is started by schedules too. They send
the request of its plan, byte for byte. Its timers can be made only once its machines have ids: by the next
command that looks.
"""

import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from fastlaunch.aws.client import Aws
from fastlaunch.backends.node_agent import store_objects
from fastlaunch.backends.site import CapacityBlock, Site
from fastlaunch.core.errors import BadConfiguration, CloudRefused, Throttled, Unreachable, UserError
from fastlaunch.core.ownership import RUN_ID, SCHEDULE_PREFIX
from fastlaunch.core.plan import Plan
from fastlaunch.core.settings import Settings
from fastlaunch.core.units import utc_minute
from fastlaunch.ledger.ledger import Ledger
from fastlaunch.ledger.rows import Attempt
from fastlaunch.placement.capacity_block import is_over
from fastlaunch.placement.lookup import setup_command

#: Added to the time limit: machines that end themselves are gone by then.
GRACE = timedelta(minutes=15)
#: A schedule in the past may never run, so a late one is set this far ahead.
_SOONEST = timedelta(minutes=5)
#: When the request of an attempt that waits is sent, from the block's start on. The block may be active a
#: little late. By its token the second request starts nothing where the first one did.
_STARTS = (timedelta(), timedelta(minutes=10))
#: How long the scheduler repeats each of them.
_START_AGE = timedelta(minutes=15)
#: Bytes. docs.aws.amazon.com/scheduler/latest/APIReference/API_Target.html
_MAX_INPUT = 256 * 1024
_NAME = re.compile(rf"{SCHEDULE_PREFIX}(?P<token>{RUN_ID}-a[0-9]+)(?P<start>-start)?(-[0-9]+)?", re.ASCII)
_ONLY_NODE = "only the node's own timer protects"
#: docs.aws.amazon.com/scheduler/latest/UserGuide/managing-targets-universal.html
_END_AGE, _MAX_RETRIES = timedelta(hours=1), 10
#: In what the ledger notes: when a schedule starts the attempt; without it, schedules end it.
_STARTS_AT = "starts_at"
#: And the id of its capacity block.
_RESERVATION = "reservation"
#: How far this machine's clock may be behind AWS's.
_CLOCKS = timedelta(minutes=2)


@dataclass(frozen=True, kw_only=True)
class LaterStart:
    """The start of an attempt by a schedule."""

    at: datetime
    block: CapacityBlock
    #: ARN of the role by which the scheduler sends the request.
    role: str
    #: Whether its machines get timers.
    account_timer: bool = True


def later_start(
    settings: Settings, placements: Sequence[Site], *, account_timer: bool, now: datetime
) -> LaterStart | None:
    """Return how what nobody follows starts in a capacity block that is to come; None for all else.

    Raises UserError if no role for it is named.
    """
    site = placements[0] if placements else None
    at = site.block.begins_after(now) if site and site.block else None
    if site is None or site.block is None or at is None:
        return None
    role = settings.region_settings(site.region).scheduler_role
    if role is None:
        raise UserError(
            f"no `scheduler_role` is in the config file for {site.region}: nothing in the account would "
            "start machines when the block begins",
            f"this makes one: {setup_command(site.region)}; or leave out --detach, and wait here",
        )
    return LaterStart(at=at, block=site.block, role=role, account_timer=account_timer)


def check_timers(settings: Settings, placements: Sequence[Site], *, account_timer: bool) -> None:
    """Raise UserError if machines at a site cannot get a timer that the user has not declined."""
    for site in placements:
        region = site.region
        is_named = settings.region_settings(region).scheduler_role is not None
        if account_timer and site.backend == "ec2" and not is_named:
            raise UserError(
                f"no `scheduler_role` is in the config file for {region}: nothing in the account would end a "
                "machine that is forgotten",
                f"this makes one: {setup_command(region)}; or rely on the machine's own timer: "
                "--no-account-timer",
            )


def decline(ledger: Ledger, attempt: Attempt) -> None:
    """Note that the user declined the timer for the attempt."""
    ledger.set_schedule(attempt.id, {"state": "declined", "region": attempt.region, "names": []})


def note_lacking_timer(ledger: Ledger, attempt: Attempt) -> None:
    """Note that the attempt's machines, if it has any, have no timer yet, should its launcher die now."""
    if attempt.schedule is None and needs_timer(attempt):
        ledger.set_schedule(attempt.id, {"state": "none", "region": attempt.region, "names": []})


def needs_timer(attempt: Attempt) -> bool:
    """Return whether the attempt's machines may be alive without a known timer in the account."""
    schedule = attempt.schedule or {}
    has_machines = bool((attempt.handle or {}).get("instance_ids"))
    # A schedule that starts machines ends none.
    is_settled = schedule.get("state") in ("created", "declined")
    has_timer = not schedule["account_timer"] if _STARTS_AT in schedule else is_settled
    return attempt.ended_at is None and has_machines and not has_timer


# Starting


def waits(attempt: Attempt) -> bool:
    """Return whether an attempt is to be started by a schedule, and no machine of it is known yet."""
    return attempt.ended_at is None and attempt.handle is None and _STARTS_AT in (attempt.schedule or {})


def is_to_be_made(attempt: Attempt) -> bool:
    """Return whether the schedules of an attempt that waits may not be there, for want of an answer."""
    return waits(attempt) and (attempt.schedule or {}).get("state") == "unknown"


def was_given_up(attempt: Attempt) -> bool:
    """Return whether the schedules of an attempt that waits were deleted."""
    return waits(attempt) and (attempt.schedule or {}).get("state") == "deleted"


def starts_at(attempt: Attempt) -> datetime:
    """Return when an attempt that waits is started."""
    return datetime.fromisoformat((attempt.schedule or {})[_STARTS_AT])


def explain_wait(ledger: Ledger, attempt: Attempt) -> None:
    """Note what an attempt waits for, and its runs."""
    why = f"waits for its capacity block: a schedule starts it at {utc_minute(starts_at(attempt))}"
    ledger.explain_with_runs(attempt.id, why)


def requested_by(attempt: Attempt) -> datetime:
    """Return when the last request of an attempt that has no machines yet has gone out."""
    if waits(attempt):
        return datetime.fromisoformat((attempt.schedule or {})["until"])
    return datetime.fromisoformat(attempt.started_at)


def note_start(ledger: Ledger, attempt_id: int, start: LaterStart) -> None:
    """Note the schedules that will start the attempt. Before the first call, for a launcher that dies.

    Raises UserError if what waits already takes the block's instances.
    """
    attempt = ledger.attempt(attempt_id)
    _check_room(ledger, attempt, start.block)
    first = f"{SCHEDULE_PREFIX}{attempt.token}-start"
    ledger.set_schedule(
        attempt_id,
        {
            "name": first,
            "region": attempt.region,
            "names": [first, *(f"{first}-{k}" for k in range(1, len(_STARTS)))],
            _STARTS_AT: start.at.isoformat(),
            "until": _last_request(start.at),
            _RESERVATION: start.block.reservation,
            "account_timer": start.account_timer,
            "state": "unknown",
        },
    )


def _check_room(ledger: Ledger, attempt: Attempt, block: CapacityBlock) -> None:
    others = [
        other
        for other in ledger.unfinished_attempts("ec2")
        if other.id != attempt.id
        and waits(other)
        and (other.schedule or {}).get(_RESERVATION) == block.reservation
    ]
    num_free = block.num_instances - sum(other.num_nodes for other in others)
    # The check of the reservation refuses what its whole block does not hold.
    if others and attempt.num_nodes > num_free:
        raise UserError(
            f"{block.reservation} has {block.num_instances} instances, and what waits for it takes "
            f"{block.num_instances - num_free} of them from its first minute on",
            f"submit this once that has ended, or give that up: fastlaunch cancel {others[0].run_ids[0]}",
        )


def check_waiting(
    ledger: Ledger,
    aws: Aws,
    region: str,
    attempts: Iterable[Attempt],
    *,
    now: datetime,
    warn: Callable[[str], None],
) -> None:
    """Note of attempts that wait whether their schedules and their block are still there; warn if not.

    Raises CloudRefused's kinds if AWS does not say.
    """
    waiting = [
        attempt
        for attempt in attempts
        if waits(attempt)
        and (attempt.schedule or {}).get("state") == "created"
        and now < starts_at(attempt) - _CLOCKS
    ]
    if not waiting:
        return
    names = {schedule.name for schedule in aws.list_schedules(region)}
    for attempt in waiting:
        reservation = (attempt.schedule or {}).get(_RESERVATION)
        block = aws.reservation(region, reservation) if reservation else None
        if reservation and is_over(block):
            why = f"{reservation} is {block.state if block else 'gone'}"
        elif not names.intersection(_left_names(attempt)):
            why = "its schedule is gone from the account"
        else:
            explain_wait(ledger, attempt)
            continue
        mend = f"give it up, and submit it again: fastlaunch cancel {attempt.run_ids[0]}"
        ledger.explain_with_runs(attempt.id, f"nothing starts it: {why}; {mend}")
        warn(f"nothing starts {attempt.token}: {why}; {mend}")


def make_start(ledger: Ledger, aws: Aws, attempt: Attempt, plan: Plan, *, role: str, now: datetime) -> None:
    """Store what the machines fetch, and make the schedules that start them. A second call makes none twice.

    Raises CloudRefused's kinds; the schedules may then be there.
    """
    noted, region = dict(attempt.schedule or {}), attempt.region
    assert region is not None
    # What is late is made for soon: a schedule in the past never runs.
    at = max(datetime.fromisoformat(noted[_STARTS_AT]), now + _SOONEST).replace(second=0, microsecond=0)
    noted["until"] = _last_request(at)
    ledger.set_schedule(attempt.id, noted)
    store_objects(aws, plan)
    for name, delay in zip(noted["names"], _STARTS, strict=True):
        aws.create_schedule(region, start_request(name, plan, role=role, at=at + delay))
    ledger.set_schedule(attempt.id, {**noted, "state": "created"})
    if ledger.attempt(attempt.id).ended_at is not None:
        # Another command gave it up meanwhile.
        disarm(ledger, aws, attempt)


def _last_request(at: datetime) -> str:
    return (at + _STARTS[-1] + _START_AGE).isoformat()


def unmake_start(ledger: Ledger, aws: Aws, attempt: Attempt, *, now: datetime) -> bool:
    """Delete the schedules of an attempt that waits; return whether it is certain that none has run.

    Raises CloudRefused's kinds if AWS does not delete them.
    """
    schedule = attempt.schedule or {}
    for name in schedule["names"]:
        aws.delete_schedule(schedule["region"], name)
    ledger.set_schedule(attempt.id, {**schedule, "state": "deleted"})
    return now < starts_at(attempt) - _CLOCKS


def start_request(name: str, plan: Plan, *, role: str, at: datetime) -> dict[str, Any]:
    """Return the parameters of the CreateSchedule that sends the plan's request once, at `at`. Pure."""
    # As boto3 sends it.
    user_data = b64encode(plan.request["UserData"].encode()).decode()
    text = json.dumps({**plan.request, "UserData": user_data})
    if len(text.encode()) > _MAX_INPUT:
        raise BadConfiguration(
            f"the request has {len(text.encode()):,} bytes, and a schedule takes {_MAX_INPUT:,}",
            "leave out --detach, and wait here",
        )
    what = f"Starts {plan.request['ClientToken']} when its capacity block begins"
    return _once(name, "runInstances", text, what, role=role, at=at, age=_START_AGE)


# Ending


def arm(ledger: Ledger, aws: Aws, attempt: Attempt, *, role: str, now: datetime) -> str:
    """Make schedules that end the attempt's machines; return what to tell the user.

    The schedules are noted in the ledger before any is made, and a second call makes none twice. A refusal
    by AWS is returned, not raised. role: ARN of the role by which the scheduler ends machines.
    """
    assert attempt.region is not None and attempt.max_minutes is not None and attempt.handle is not None
    ids, at = attempt.handle["instance_ids"], deadline(attempt, now)
    requests = [
        schedule_request(name, instance_id, role=role, at=at)
        for name, instance_id in zip(names(attempt.token, len(ids)), ids, strict=True)
    ]
    noted = {
        "name": requests[0]["Name"],
        "region": attempt.region,
        "names": [*(request["Name"] for request in requests), *_left_names(attempt)],
        "at": at.isoformat(),
    }
    # Before the first call: if this launcher dies, the ledger knows what may be left in the account.
    ledger.set_schedule(attempt.id, {**noted, "state": "unknown"})
    for request in requests:
        try:
            aws.create_schedule(attempt.region, request)
        except (Unreachable, Throttled) as error:
            return f"whether a timer in the account was made is not known ({error.message}): {_ONLY_NODE}"
        except CloudRefused as error:
            ledger.set_schedule(attempt.id, {**noted, "state": "refused", "why": error.message})
            hint = f"; {error.hint}" if error.hint else ""
            return f"a timer in the account was refused ({error.message}){hint}: {_ONLY_NODE}"
    ledger.set_schedule(attempt.id, {**noted, "state": "created"})
    return f"a timer in the account ends what is left at {at:%Y-%m-%d %H:%M} UTC ({noted['name']})"


def disarm(ledger: Ledger, aws: Aws, attempt: Attempt) -> None:
    """Delete the schedules of an attempt that has ended, and note it.

    A schedule that AWS does not delete now stays noted for the next time, and deletes itself after it ran.
    """
    schedule = ledger.attempt(attempt.id).schedule
    if schedule is None:
        return
    try:
        # After a refusal too, since the first of several may have been made.
        for name in schedule["names"]:
            aws.delete_schedule(schedule["region"], name)
    except CloudRefused:
        return
    ledger.set_schedule(attempt.id, None)


def deadline(attempt: Attempt, now: datetime) -> datetime:
    """Return when the attempt's machines must be gone: start, limit and GRACE; soon, if that has passed."""
    assert attempt.max_minutes is not None
    launched_at = attempt.launched_at or (attempt.handle or {}).get("launched_at") or attempt.started_at
    started = datetime.fromisoformat(launched_at).astimezone(UTC)
    due = started + timedelta(minutes=attempt.max_minutes) + GRACE
    return max(due, now.astimezone(UTC) + _SOONEST).replace(microsecond=0)


def schedule_request(name: str, instance_id: str, *, role: str, at: datetime) -> dict[str, Any]:
    """Return the parameters of the CreateSchedule that terminates the instance once, at `at`. Pure."""
    text, what = (
        json.dumps({"InstanceIds": [instance_id]}),
        f"Ends {instance_id}, in case that nothing else did",
    )
    return _once(name, "terminateInstances", text, what, role=role, at=at, age=_END_AGE)


def _once(
    name: str, operation: str, text: str, what: str, *, role: str, at: datetime, age: timedelta
) -> dict[str, Any]:
    """Return the CreateSchedule of a call to EC2. text: its parameters. age: for how long it is repeated."""
    partition = role.split(":")[1]
    target: Mapping[str, Any] = {
        "Arn": f"arn:{partition}:scheduler:::aws-sdk:ec2:{operation}",
        "RoleArn": role,
        "Input": text,
        "RetryPolicy": {
            "MaximumEventAgeInSeconds": int(age.total_seconds()),
            "MaximumRetryAttempts": _MAX_RETRIES,
        },
    }
    return {
        "Name": name,
        "ClientToken": name,
        "Description": what,
        "ScheduleExpression": f"at({at.astimezone(UTC):%Y-%m-%dT%H:%M:%S})",
        "ScheduleExpressionTimezone": "UTC",
        "FlexibleTimeWindow": {"Mode": "OFF"},
        "ActionAfterCompletion": "DELETE",
        "Target": target,
    }


def names(token: str, num_machines: int) -> list[str]:
    """Return the names of an attempt's schedules: `fastlaunch-<token>`, with `-<k>` for further machines."""
    first = f"{SCHEDULE_PREFIX}{token}"
    return [first, *(f"{first}-{k}" for k in range(1, num_machines))]


def _left_names(attempt: Attempt) -> list[str]:
    """Return the names of the schedules that started it, of which one may not have run yet."""
    schedule = attempt.schedule or {}
    return [name for name in schedule.get("names", ()) if starts_machines(name)]


def schedule_token(name: str) -> str | None:
    """Return the token of the attempt that the schedule belongs to; None if its name is not in our form."""
    match = _NAME.fullmatch(name)
    return match["token"] if match else None


def starts_machines(name: str) -> bool:
    """Return whether the schedule starts machines, by its name, and does not end one."""
    match = _NAME.fullmatch(name)
    return bool(match and match["start"])

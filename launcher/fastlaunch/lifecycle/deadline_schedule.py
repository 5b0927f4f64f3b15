"""A timer in the account for each attempt on EC2, which ends the machines after the deadline in any case.

EventBridge Scheduler calls ec2:TerminateInstances once, 15 minutes after the machines' own limit, and deletes
the schedule. Each machine has a separate schedule: EC2 terminates all machines of a list or none, and forgets
a machine an hour after its end, so in a shared list one ended machine would keep the others alive.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from fastlaunch.aws.client import Aws
from fastlaunch.backends.site import Site
from fastlaunch.core.errors import CloudRefused, Throttled, Unreachable, UserError
from fastlaunch.core.ownership import RUN_ID, SCHEDULE_PREFIX
from fastlaunch.core.settings import Settings
from fastlaunch.ledger.ledger import Ledger
from fastlaunch.ledger.rows import Attempt
from fastlaunch.placement.lookup import setup_command

#: Added to the time limit: machines that end themselves are gone by then.
GRACE = timedelta(minutes=15)
#: A schedule in the past may never run, so a late one is set this far ahead.
_SOONEST = timedelta(minutes=5)
_NAME = re.compile(rf"{SCHEDULE_PREFIX}(?P<token>{RUN_ID}-a[0-9]+)(-[0-9]+)?", re.ASCII)
_ONLY_NODE = "only the node's own timer protects"
#: docs.aws.amazon.com/scheduler/latest/UserGuide/managing-targets-universal.html
_RETRY = {"MaximumEventAgeInSeconds": 3600, "MaximumRetryAttempts": 10}


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


def needs_timer(attempt: Attempt) -> bool:
    """Return whether the attempt's machines may be alive without a known timer in the account."""
    state = (attempt.schedule or {}).get("state")
    has_machines = bool((attempt.handle or {}).get("instance_ids"))
    return attempt.ended_at is None and has_machines and state not in ("created", "declined")


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
        "names": [request["Name"] for request in requests],
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
    partition = role.split(":")[1]
    target: Mapping[str, Any] = {
        "Arn": f"arn:{partition}:scheduler:::aws-sdk:ec2:terminateInstances",
        "RoleArn": role,
        "Input": json.dumps({"InstanceIds": [instance_id]}),
        "RetryPolicy": dict(_RETRY),
    }
    return {
        "Name": name,
        "ClientToken": name,
        "Description": f"Ends {instance_id}, in case that nothing else did",
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


def schedule_token(name: str) -> str | None:
    """Return the token of the attempt that the schedule belongs to; None if its name is not in our form."""
    match = _NAME.fullmatch(name)
    return match["token"] if match else None

"""The status of an attempt's machines on EC2, and what they are billed. Pure.

EC2 bills a machine by the second from running to terminated, and for at least a minute. For about an hour EC2
shows when a machine ended; after that only the node's last object does.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fastlaunch.aws.errors import ending_of, state_reason_problem
from fastlaunch.aws.types import Instance
from fastlaunch.backends.node_report import time_of, uptime_of
from fastlaunch.backends.protocol import AttemptStatus, Billed
from fastlaunch.core.ownership import MARGIN_MINUTES
from fastlaunch.core.plan import Ending

_FIRST_HOUR_S = 3600.0
_LEAST_BILLED_S = 60.0
_TIME = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")


def attempt_status(instances: Sequence[Instance], *, num_unseen: int) -> AttemptStatus:
    """Return the status of an attempt's machines together.

    instances: all that EC2 shows. num_unseen: how many more were started. `billable_s` is the mean of all
    machines, where EC2 says when each of them ended.
    """
    if not instances:
        return AttemptStatus(has_ended=False, is_seen=False, num_unseen=num_unseen)
    endings = set(map(ending_of, instances))
    are_over = all(instance.has_ended for instance in instances)
    has_ended = are_over and not num_unseen
    first = instances[0]
    ends = [_transition_time(instance) for instance in instances]
    billed_s = [_billed_s(instance) for instance in instances]
    known_s = [seconds for seconds in billed_s if seconds is not None]
    is_known = has_ended and len(known_s) == len(billed_s)
    return AttemptStatus(
        has_ended=has_ended,
        num_unseen=num_unseen,
        is_live=any(instance.is_live for instance in instances),
        is_up=not num_unseen and all(instance.state == "running" for instance in instances),
        num_ended=sum(not instance.is_live for instance in instances),
        is_spot=first.is_spot,
        # One machine that was taken ends the others of its attempt.
        ending=min(
            filter(None, endings), key=lambda ending: (ending is not Ending.RECLAIMED, ending), default=None
        ),
        instance_type=first.instance_type,
        zone=first.zone,
        launched_at=min(instance.launch_time for instance in instances),
        ended_at=max(end for end in ends if end) if are_over and all(ends) else None,
        billable_s=sum(known_s) / len(known_s) if is_known else None,
        problem=next(filter(None, map(state_reason_problem, instances)), None),
        detail=_detail(instances),
    )


def billed_on_ec2(
    *, launched_at: datetime, max_minutes: int, aws_status: AttemptStatus, status: Mapping[str, Any] | None
) -> Billed:
    """Return what one machine of an ended attempt is billed, on average. status: the node's last object.

    A machine that EC2 took back within its first hour is free. With several machines, count that only
    while EC2 still shows them, since the machines that stopped because of it are billed.
    """
    if (
        aws_status.billable_s is not None
        and aws_status.ended_at is not None
        and aws_status.ended_at >= launched_at
    ):
        lived_s = (aws_status.ended_at - launched_at).total_seconds()
        is_free = aws_status.ending is Ending.RECLAIMED and aws_status.billable_s == 0
        return Billed(lived_s=lived_s, billed_s=aws_status.billable_s, billing="free" if is_free else "times")
    ended_at = aws_status.ended_at or time_of(status, "billed_until")
    if ended_at is not None and ended_at >= launched_at:
        lived_s = (ended_at - launched_at).total_seconds()
    elif (uptime_s := uptime_of(status)) is not None:
        lived_s = uptime_s
    else:
        limit_s = (max_minutes + MARGIN_MINUTES) * 60.0
        return Billed(lived_s=limit_s, billed_s=limit_s, billing="limit")
    # EC2 says so, or the node once EC2 has forgotten it.
    is_taken = aws_status.ending is Ending.RECLAIMED
    if not aws_status.is_seen:
        is_taken = (status or {}).get("reason") == "spot"
    # If no node reports their number, a machine that EC2 has forgotten may have lived on.
    is_alone = status is not None and status.get("num_nodes", 1) == 1
    if is_taken and is_alone and lived_s < _FIRST_HOUR_S:
        return Billed(lived_s=lived_s, billed_s=0.0, billing="free")
    billing = "times" if aws_status.ended_at else "node"
    return Billed(lived_s=lived_s, billed_s=max(lived_s, _LEAST_BILLED_S), billing=billing)


def _billed_s(instance: Instance) -> float | None:
    """Return what a machine that has ended is billed by EC2's own times; None where it gives none."""
    ended_at = _transition_time(instance)
    if ended_at is None or ended_at < instance.launch_time:
        return None
    lived_s = (ended_at - instance.launch_time).total_seconds()
    if ending_of(instance) is Ending.RECLAIMED and lived_s < _FIRST_HOUR_S:
        return 0.0
    return max(lived_s, _LEAST_BILLED_S)


def _detail(instances: Sequence[Instance]) -> str | None:
    """Return `running` or `1 pending, 1 running`; if all have ended, EC2's reason for the first."""
    if all(instance.has_ended for instance in instances):
        reasons = [instance.state_reason or instance.transition_reason for instance in instances]
        return next(filter(None, reasons), None)
    states = Counter(instance.state for instance in instances)
    if len(states) == 1:
        return next(iter(states))
    return ", ".join(f"{num} {state}" for state, num in sorted(states.items()))


def _transition_time(instance: Instance) -> datetime | None:
    """Return when EC2 ended the machine, by `User initiated (2026-11-21 12:00:00 GMT)`."""
    match = _TIME.search(instance.transition_reason or "")
    return datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC) if match else None

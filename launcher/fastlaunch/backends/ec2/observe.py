"""What EC2's words about the machines of one attempt come to: how they stand, and what they are billed. Pure.

EC2 bills a machine by the second from when it runs to when it is terminated, for a minute at least. When it
ended is told by EC2 for about an hour, and by the node's own last object after that.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fastlaunch.aws.ec2 import Instance
from fastlaunch.aws.errors import is_spot_interruption, state_reason_problem
from fastlaunch.backends.protocol import Billed, Sight
from fastlaunch.placement.cost_ceiling import MARGIN_MINUTES

_FIRST_HOUR_S = 3600.0
_LEAST_BILLED_S = 60.0
_TIME = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")


def sight_of(instances: Sequence[Instance], *, num_unseen: int, is_old: bool) -> Sight:
    """What the machines of an attempt come to together.

    instances: all that EC2 shows, under every name. num_unseen: how many more were started. is_old: so long
    ago that one which EC2 does not show is no more. `billable_s` is the mean of all machines, where EC2 tells
    when each of them ended.
    """
    has_ended = (not num_unseen or is_old) and all(one.state == "terminated" for one in instances)
    if not instances:
        return Sight(has_ended=has_ended, is_seen=False)
    first = instances[0]
    ends = [_transition_time(one) for one in instances]
    billed_s = [_billed_s(one) for one in instances]
    known_s = [seconds for seconds in billed_s if seconds is not None]
    is_known = has_ended and not num_unseen and len(known_s) == len(billed_s)
    return Sight(
        has_ended=has_ended,
        is_live=any(one.is_live for one in instances),
        is_up=not num_unseen and all(one.state == "running" for one in instances),
        num_ended=sum(not one.is_live for one in instances),
        is_spot=first.is_spot,
        is_taken=any(is_spot_interruption(one) for one in instances),
        instance_type=first.instance_type,
        zone=first.zone,
        launched_at=min(one.launch_time for one in instances),
        ended_at=max(end for end in ends if end) if has_ended and all(ends) else None,
        billable_s=sum(known_s) / len(known_s) if is_known else None,
        problem=next(filter(None, map(state_reason_problem, instances)), None),
        told=_told(instances),
    )


def billed_on_ec2(
    *, launched_at: datetime, max_minutes: int, sight: Sight, status: Mapping[str, Any] | None
) -> Billed:
    """What one machine of an attempt that has ended is billed, in the mean. status: the node's last object.

    Free is what EC2 took back within its first hour. Of several machines that is only counted where EC2
    still shows them: those that stopped because of the one are billed.
    """
    if sight.billable_s is not None and sight.ended_at is not None and sight.ended_at >= launched_at:
        lived_s = (sight.ended_at - launched_at).total_seconds()
        is_free = sight.is_taken and sight.billable_s == 0
        return Billed(lived_s=lived_s, billed_s=sight.billable_s, billing="free" if is_free else "times")
    ended_at = sight.ended_at or _time(status, "billed_until")
    if ended_at is not None and ended_at >= launched_at:
        lived_s = (ended_at - launched_at).total_seconds()
    elif status is not None and _is_number(status.get("uptime_s")):
        lived_s = float(status["uptime_s"])
    else:
        limit_s = (max_minutes + MARGIN_MINUTES) * 60.0
        return Billed(lived_s=limit_s, billed_s=limit_s, billing="limit")
    # By EC2's own word, or by the node's once EC2 has forgotten it.
    is_taken = sight.is_taken if sight.is_seen else (status or {}).get("reason") == "spot"
    # Where no node says how many they were, one that EC2 has forgotten may have lived on.
    is_alone = status is not None and status.get("num_nodes", 1) == 1
    if is_taken and is_alone and lived_s < _FIRST_HOUR_S:
        return Billed(lived_s=lived_s, billed_s=0.0, billing="free")
    how = "times" if sight.ended_at else "node"
    return Billed(lived_s=lived_s, billed_s=max(lived_s, _LEAST_BILLED_S), billing=how)


def _billed_s(instance: Instance) -> float | None:
    """What one machine that has ended is billed by EC2's own times; None where it does not tell them."""
    ended_at = _transition_time(instance)
    if ended_at is None or ended_at < instance.launch_time:
        return None
    lived_s = (ended_at - instance.launch_time).total_seconds()
    if is_spot_interruption(instance) and lived_s < _FIRST_HOUR_S:
        return 0.0
    return max(lived_s, _LEAST_BILLED_S)


def _told(instances: Sequence[Instance]) -> str | None:
    """`running`, `1 pending, 1 running`; of those that have ended, why EC2 says that the first one did."""
    if all(one.state == "terminated" for one in instances):
        reasons = [one.state_reason or one.transition_reason for one in instances]
        return next(filter(None, reasons), None)
    states = Counter(one.state for one in instances)
    if len(states) == 1:
        return next(iter(states))
    return ", ".join(f"{num} {state}" for state, num in sorted(states.items()))


def _transition_time(instance: Instance) -> datetime | None:
    """When EC2 ended the machine, by its transition reason: `User initiated (2026-11-21 12:00:00 GMT)`."""
    found = _TIME.search(instance.transition_reason or "")
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC) if found else None


def _time(status: Mapping[str, Any] | None, name: str) -> datetime | None:
    value = status.get(name) if status else None
    if isinstance(value, int | float) and value > 1e9:
        return datetime.fromtimestamp(value, tz=UTC)
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return found if found is None or found.tzinfo else found.replace(tzinfo=UTC)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

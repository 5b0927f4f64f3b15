"""What an attempt cost, or has cost so far. Pure.

EC2 bills a machine by the second from when it runs to when it is terminated, for a minute at least. When it
ended is told by EC2 for about an hour, and by the node's own last object after that.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from fastlaunch.aws import Instance
from fastlaunch.aws_errors import is_spot_interruption
from fastlaunch.cost_ceiling import MARGIN_MINUTES
from fastlaunch.run_attempts import Attempt

#: How billed seconds are known: from EC2's own times; from the node's last object; not at all, so that they
#: are the limit; or free, because EC2 took a spot instance back within its first hour.
BILLINGS = ("times", "node", "limit", "free")
_FIRST_HOUR_S = 3600.0
_LEAST_BILLED_S = 60.0
_TIME = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")


@dataclass(frozen=True, kw_only=True)
class Billed:
    """How long a machine lived and how much of it is billed, in seconds; how that is known, of BILLINGS."""

    lived_s: float
    billed_s: float
    billing: str


@dataclass(frozen=True, kw_only=True)
class Cost:
    """USD with the discount, None if the price is not known; whether it can still change; in words."""

    usd: float | None
    is_final: bool
    told: str


def billed(
    *, launched_at: datetime, max_minutes: int, instance: Instance | None, status: Mapping[str, Any] | None
) -> Billed:
    """What a machine that has ended is billed.

    instance: as EC2 describes it, None if it does no more. status: the node's last object, None without.
    """
    limit_s = (max_minutes + MARGIN_MINUTES) * 60.0
    ended_at = _transition_time(instance) or _time(status, "billed_until")
    lived_s, billing = limit_s, "limit"
    if ended_at is not None and ended_at >= launched_at:
        lived_s = (ended_at - launched_at).total_seconds()
        billing = "times" if _transition_time(instance) else "node"
    elif status is not None and isinstance(status.get("uptime_s"), int | float):
        lived_s, billing = float(status["uptime_s"]), "node"
    if _is_taken(instance, status) and lived_s < _FIRST_HOUR_S and billing != "limit":
        return Billed(lived_s=lived_s, billed_s=0.0, billing="free")
    return Billed(lived_s=lived_s, billed_s=max(lived_s, _LEAST_BILLED_S), billing=billing)


def attempt_cost(attempt: Attempt, now: datetime) -> Cost:
    """What the attempt has cost until `now`, or in all if it has ended."""
    if attempt.ended_at is not None:
        return _final(attempt)
    launched_at = _launched_at(attempt)
    if launched_at is None:
        return Cost(usd=0.0, is_final=False, told="nothing yet")
    seconds = max(0.0, (now - launched_at).total_seconds())
    return _cost(attempt, seconds, is_final=False, suffix=" so far")


def total_cost(attempts: Iterable[Attempt], now: datetime) -> Cost:
    """What several attempts cost together."""
    costs = [attempt_cost(attempt, now) for attempt in attempts]
    is_final = all(cost.is_final for cost in costs)
    known = [cost.usd for cost in costs if cost.usd is not None]
    if len(known) < len(costs):
        return Cost(usd=None, is_final=is_final, told="n/a: the price is not known")
    at_most = "at most " if any(cost.told.startswith("at most") for cost in costs) else ""
    told = f"{at_most}${sum(known):,.2f}{'' if is_final else ' so far'}"
    return Cost(usd=sum(known), is_final=is_final, told=told)


def minutes_used(attempts: Iterable[Attempt], now: datetime) -> float:
    """Minutes of machine time that the attempts took, whether they were billed or not."""
    minutes = 0.0
    for attempt in attempts:
        if attempt.lived_s is not None:
            minutes += attempt.lived_s / 60
        elif attempt.ended_at is None and (launched_at := _launched_at(attempt)):
            minutes += max(timedelta(), now - launched_at).total_seconds() / 60
    return minutes


def _launched_at(attempt: Attempt) -> datetime | None:
    """When the machine was started, by EC2's answer as long as it was not seen; None without a machine."""
    told = attempt.launched_at or (attempt.handle or {}).get("launched_at")
    return datetime.fromisoformat(told) if told else None


def _final(attempt: Attempt) -> Cost:
    if attempt.billed_seconds is None:
        return Cost(usd=0.0, is_final=True, told="nothing: no machine was started")
    if attempt.billing == "free":
        return Cost(usd=0.0, is_final=True, told="$0.00: EC2 took it back within its first hour")
    cost = _cost(attempt, attempt.billed_seconds, is_final=True, suffix="")
    if attempt.billing == "limit" and cost.usd is not None:
        return Cost(usd=cost.usd, is_final=True, told=f"at most {cost.told}")
    return cost


def _cost(attempt: Attempt, seconds: float, *, is_final: bool, suffix: str) -> Cost:
    if attempt.usd_per_hour is None:
        minutes = f"{seconds / 60:.0f} min of a machine whose price is not known"
        return Cost(usd=None, is_final=is_final, told=f"n/a: {minutes}")
    usd = seconds / 3600 * attempt.usd_per_hour
    return Cost(usd=usd, is_final=is_final, told=f"${usd:,.2f}{suffix}")


def _is_taken(instance: Instance | None, status: Mapping[str, Any] | None) -> bool:
    """Whether EC2 took a spot instance back: by its own word, or by the node's once EC2 has forgotten it."""
    if instance is not None:
        return is_spot_interruption(instance)
    return status is not None and status.get("reason") == "spot"


def _transition_time(instance: Instance | None) -> datetime | None:
    """When EC2 ended the machine, by its transition reason: `User initiated (2026-11-21 12:00:00 GMT)`."""
    found = _TIME.search((instance.transition_reason or "") if instance else "")
    if found is None:
        return None
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)


def _time(status: Mapping[str, Any] | None, name: str) -> datetime | None:
    value = status.get(name) if status else None
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 1e9:
        return datetime.fromtimestamp(value, tz=UTC)
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return found if found is None or found.tzinfo else found.replace(tzinfo=UTC)

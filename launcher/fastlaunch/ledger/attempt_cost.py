"""What an attempt cost, or has cost so far: billed seconds times machines times the price of an hour. Pure.

The backend says how many seconds are billed once the attempt has ended (`CloudBackend.billed`). A capacity
block was paid for as a whole; an attempt's part of it is what its time costs effectively, beside the fee that
is sunk.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fastlaunch.core.ownership import MARGIN_MINUTES
from fastlaunch.ledger.rows import Attempt


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one attempt or several cost."""

    #: With the discount; None if the price is not known. In a capacity block, the part that the time took.
    usd: float | None
    #: Whether it can no longer change.
    is_final: bool
    #: In words, such as `$3.10 so far`.
    text: str
    #: Whether it is the most that it may be.
    is_limit: bool = False
    #: Paid before for the capacity block, whatever is done in it; None without one.
    sunk_usd: float | None = None


def attempt_cost(attempt: Attempt, now: datetime) -> Cost:
    """Return what the attempt has cost until `now`, or in all if it has ended."""
    billing = attempt.billing
    if attempt.ended_at is not None:
        if billing.billed_s is None:
            return Cost(
                usd=0.0, is_final=True, text="nothing: no machine was started", sunk_usd=billing.sunk_usd
            )
        if billing.source == "free":
            return Cost(usd=0.0, is_final=True, text="$0.00: EC2 took it back within its first hour")
        return _cost(attempt, billing.billed_s, is_final=True)
    launched_at = _launched_at(attempt)
    if launched_at is None:
        return Cost(usd=0.0, is_final=False, text="nothing yet", sunk_usd=billing.sunk_usd)
    is_bound = _may_have_ended(attempt, now)
    seconds = _limit_s(attempt) if is_bound else _lasted_s(attempt, launched_at, now)
    return _cost(attempt, seconds, is_final=False, is_bound=is_bound)


def total_cost(attempts: Iterable[Attempt], now: datetime) -> Cost:
    """Return what several attempts cost together."""
    attempts = list(attempts)
    costs = [attempt_cost(attempt, now) for attempt in attempts]
    is_final = all(cost.is_final for cost in costs)
    # Attempts in one block share one fee.
    fees = {cost.sunk_usd for cost in costs if cost.sunk_usd is not None}
    sunk_usd = sum(fees) if fees else None
    known = [cost.usd for cost in costs if cost.usd is not None]
    if len(known) < len(costs):
        return Cost(usd=None, is_final=is_final, text="n/a: the price is not known", sunk_usd=sunk_usd)
    text = _text(
        sum(known),
        is_limit=any(cost.is_limit for cost in costs),
        is_over=all(attempt.ended_at is not None for attempt in attempts),
        is_bound=any(_may_have_ended(attempt, now) for attempt in attempts),
        sunk_usd=sunk_usd,
    )
    return Cost(usd=sum(known), is_final=is_final, text=text, sunk_usd=sunk_usd)


def usd_since(attempt: Attempt, since: datetime, now: datetime) -> float:
    """Return what the attempt takes of a budget from `since` on: its bill or, while it is open, its ceiling.

    What was billed before `since` does not count. Without a known price, an attempt takes its ceiling.
    """
    if attempt.ended_at is not None and datetime.fromisoformat(attempt.ended_at) < since:
        return 0.0
    ceiling_usd, cost = attempt.max_cost_usd or 0.0, attempt_cost(attempt, now)
    launched_at, lived_s = _launched_at(attempt), attempt.billing.lived_s
    before_s = max(0.0, (since - launched_at).total_seconds()) if launched_at else 0.0
    if attempt.ended_at is not None and cost.usd is not None:
        return cost.usd * max(0.0, 1 - before_s / lived_s) if lived_s else cost.usd
    if attempt.ended_at is not None or cost.usd is None:
        return ceiling_usd
    # It is not known when a queue had it on machines before it started it again.
    before_usd = 0.0 if "restarted_at" in (attempt.handle or {}) else attempt_cost(attempt, since).usd or 0.0
    return max(ceiling_usd, cost.usd) - min(before_usd, cost.usd)


def cost_text(cost: Cost, spec: Mapping[str, Any] | None) -> str:
    """Return the cost of runs with this spec in words; in a training plan, what the time costs on demand."""
    if not (spec or {}).get("training_plan"):
        return cost.text
    return f"{cost.text} at the on-demand price; its training plan was paid for before"


def minutes_used(attempts: Iterable[Attempt], now: datetime) -> float:
    """Return the minutes that the attempts' machines took, side by side, whether billed or not."""
    minutes = 0.0
    for attempt in attempts:
        if attempt.billing.lived_s is not None:
            minutes += attempt.billing.lived_s / 60
        elif attempt.ended_at is None and (launched_at := _launched_at(attempt)):
            minutes += _lasted_s(attempt, launched_at, now) / 60
    return minutes


def _launched_at(attempt: Attempt) -> datetime | None:
    """Return when the machines were started; None before.

    Until they are seen, EC2's answer says it. SageMaker's says when they were asked for, and waiting for them
    costs nothing.
    """
    by_answer = (attempt.handle or {}).get("launched_at") if attempt.backend == "ec2" else None
    launched_at = attempt.launched_at or by_answer
    return datetime.fromisoformat(launched_at) if launched_at else None


def _lasted_s(attempt: Attempt, launched_at: datetime, now: datetime) -> float:
    """Return for how long an open attempt has had machines: not while it waits in a queue to be retried."""
    handle = attempt.handle or {}
    if "restarted_at" in handle:
        since, earlier_s = handle["restarted_at"], float(handle["earlier_s"])
        if since is None:
            return earlier_s
        return earlier_s + max(0.0, (now - datetime.fromisoformat(since)).total_seconds())
    return max(0.0, (now - launched_at).total_seconds())


def _limit_s(attempt: Attempt) -> float:
    # A queue may start a job several times, each time for its whole time limit.
    num_starts: int = (attempt.handle or {}).get("num_starts", 1)
    return ((attempt.max_minutes or 0) + MARGIN_MINUTES) * 60.0 * num_starts


def _may_have_ended(attempt: Attempt, now: datetime) -> bool:
    """Whether an open attempt is past its limit and AWS does not show it: it costs more only if it lives."""
    launched_at = _launched_at(attempt)
    if attempt.ended_at is not None or not attempt.absences or attempt.max_minutes is None:
        return False
    return launched_at is not None and (now - launched_at).total_seconds() > _limit_s(attempt)


def _cost(attempt: Attempt, seconds: float, *, is_final: bool, is_bound: bool = False) -> Cost:
    billing = attempt.billing
    if billing.usd_per_hour is None:
        machines = "a machine" if attempt.num_nodes == 1 else f"{attempt.num_nodes} machines"
        text = f"n/a: {seconds / 60:.0f} min of {machines} whose price is not known"
        return Cost(usd=None, is_final=is_final, text=text, sunk_usd=billing.sunk_usd)
    usd = seconds / 3600 * billing.usd_per_hour * attempt.num_nodes
    is_limit = is_bound or (is_final and billing.source == "limit")
    text = _text(usd, is_limit=is_limit, is_over=is_final, is_bound=is_bound, sunk_usd=billing.sunk_usd)
    return Cost(usd=usd, is_final=is_final, text=text, is_limit=is_limit, sunk_usd=billing.sunk_usd)


def _text(usd: float, *, is_limit: bool, is_over: bool, is_bound: bool, sunk_usd: float | None) -> str:
    when = "" if is_over else " if it ended in time" if is_bound else " so far"
    block = "" if sunk_usd is None else f" of the ${sunk_usd:,.2f} paid before for the capacity block"
    return f"{'at most ' if is_limit else ''}${usd:,.2f}{when}{block}"

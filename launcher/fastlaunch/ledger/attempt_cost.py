"""What an attempt cost, or has cost so far. Pure.

Seconds that are billed, times the machines, times the price of an hour: how many they are tells the backend
(`CloudBackend.billed`) once the attempt has ended. What a capacity block's machines cost was paid before, for
the whole block; an attempt's part of it is told as what it costs effectively, beside the fee that is sunk.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from fastlaunch.run_attempts import Attempt


@dataclass(frozen=True, kw_only=True)
class Cost:
    """USD with the discount, None if the price is not known; whether it can still change; in words.

    sunk_usd: what was paid before for the capacity block, whatever is done in it; None without one. `usd` is
    then the part of it that the machine time took.
    """

    usd: float | None
    is_final: bool
    told: str
    sunk_usd: float | None = None


def attempt_cost(attempt: Attempt, now: datetime) -> Cost:
    """What the attempt has cost until `now`, or in all if it has ended."""
    if attempt.ended_at is not None:
        return _final(attempt)
    launched_at = _launched_at(attempt)
    if launched_at is None:
        return Cost(usd=0.0, is_final=False, told="nothing yet", sunk_usd=attempt.sunk_usd)
    seconds = max(0.0, (now - launched_at).total_seconds())
    return _cost(attempt, seconds, is_final=False)


def total_cost(attempts: Iterable[Attempt], now: datetime) -> Cost:
    """What several attempts cost together."""
    attempts = list(attempts)
    costs = [attempt_cost(attempt, now) for attempt in attempts]
    is_final = all(cost.is_final for cost in costs)
    # Attempts in one block have one fee: it was paid once.
    fees = {cost.sunk_usd for cost in costs if cost.sunk_usd is not None}
    sunk_usd = sum(fees) if fees else None
    known = [cost.usd for cost in costs if cost.usd is not None]
    if len(known) < len(costs):
        told = "n/a: the price is not known"
        return Cost(usd=None, is_final=is_final, told=told, sunk_usd=sunk_usd)
    at_most = "at most " if any(cost.told.startswith("at most") for cost in costs) else ""
    has_ended = all(attempt.ended_at is not None for attempt in attempts)
    told = f"{at_most}${sum(known):,.2f}{'' if has_ended else ' so far'}{_of_block(sunk_usd)}"
    pools = [pool for attempt in attempts if (pool := _pool_usd(attempt))]
    told += _with_pool(sum(pools) if pools else None)
    return Cost(usd=sum(known), is_final=is_final, told=told, sunk_usd=sunk_usd)


def told_of(cost: Cost, spec: Mapping[str, Any] | None) -> str:
    """The cost of runs with this spec, in words: in a training plan it is what the time costs on demand."""
    if not (spec or {}).get("training_plan"):
        return cost.told
    return f"{cost.told} at the on-demand price; its training plan was paid for before"


def minutes_used(attempts: Iterable[Attempt], now: datetime) -> float:
    """Minutes that the attempts' machines took, side by side, whether they were billed or not."""
    minutes = 0.0
    for attempt in attempts:
        if attempt.lived_s is not None:
            minutes += attempt.lived_s / 60
        elif attempt.ended_at is None and (launched_at := _launched_at(attempt)):
            minutes += max(timedelta(), now - launched_at).total_seconds() / 60
    return minutes


def _launched_at(attempt: Attempt) -> datetime | None:
    """When the machines were started; None before.

    By EC2's answer as long as they were not seen. SageMaker's answer says when they were asked for, and
    waiting for them costs nothing.
    """
    answered = (attempt.handle or {}).get("launched_at") if attempt.backend == "ec2" else None
    told = attempt.launched_at or answered
    return datetime.fromisoformat(told) if told else None


def _final(attempt: Attempt) -> Cost:
    if attempt.billed_seconds is None:
        told = "nothing: no machine was started"
        return Cost(usd=0.0, is_final=True, told=told, sunk_usd=attempt.sunk_usd)
    if attempt.billing == "free":
        return Cost(usd=0.0, is_final=True, told="$0.00: EC2 took it back within its first hour")
    return _cost(attempt, attempt.billed_seconds, is_final=True)


def _cost(attempt: Attempt, seconds: float, *, is_final: bool) -> Cost:
    if attempt.usd_per_hour is None:
        machines = "a machine" if attempt.num_nodes == 1 else f"{attempt.num_nodes} machines"
        told = f"n/a: {seconds / 60:.0f} min of {machines} whose price is not known"
        return Cost(usd=None, is_final=is_final, told=told, sunk_usd=attempt.sunk_usd)
    usd = seconds / 3600 * attempt.usd_per_hour * attempt.num_nodes
    at_most = "at most " if is_final and attempt.billing == "limit" else ""
    told = f"{at_most}${usd:,.2f}{'' if is_final else ' so far'}{_of_block(attempt.sunk_usd)}"
    pool = _pool_usd(attempt)
    return Cost(
        usd=usd, is_final=is_final and pool is None, told=told + _with_pool(pool), sunk_usd=attempt.sunk_usd
    )


def _of_block(sunk_usd: float | None) -> str:
    return "" if sunk_usd is None else f" of the ${sunk_usd:,.2f} paid before for the capacity block"


def _pool_usd(attempt: Attempt) -> float | None:
    """The most that its warm pool can cost after the job: AWS tells how long it was kept when it is gone."""
    # Machines that it never had are not kept either.
    if not attempt.idle_minutes or attempt.usd_per_hour is None or not attempt.billed_seconds:
        return None
    return attempt.idle_minutes / 60 * attempt.usd_per_hour * attempt.num_nodes


def _with_pool(usd: float | None) -> str:
    return "" if usd is None else f", and up to ${usd:,.2f} while its warm pool is kept"

"""What a cloud run is doing and what it has cost so far, from what is here of it."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fastlaunch import s3_sync
from fastlaunch.attempt_cost import total_cost
from fastlaunch.collected import attempt_as_json
from fastlaunch.cost_ceiling import max_cost_usd
from fastlaunch.follow import RecordTail, describe
from fastlaunch.run_attempts import Attempt
from fastlaunch.runs import Run


def cloud_note(run: Run, attempts: Sequence[Attempt], *, home: Path, now: datetime) -> str | None:
    """`step 40/200, 652 images/s, loss 2.31; attempt 2 in us-east-1a; $3.10 so far, at most $55.04`.

    For a run that has ended: what its machines cost, after its reason. None before anything was asked for.
    """
    if not attempts:
        return run.reason
    cost = total_cost(attempts, now).told
    if run.state.is_final:
        return f"{run.reason}; {cost}" if run.reason else cost
    last = attempts[-1]
    place = f"attempt {last.n} in {last.zone or last.region}"
    ceiling = ceiling_usd(attempts)
    bound = f", at most ${ceiling:,.2f}" if ceiling is not None else ""
    machine = f" for {len(last.run_ids)} runs" if len(last.run_ids) > 1 else ""
    return f"{doing(run, attempts, home)}; {place}; {cost}{bound}{machine}"


def doing(run: Run, attempts: Sequence[Attempt], home: Path) -> str:
    """What a run that has not ended is doing: waiting, booting, pulling its image, or at which step it is."""
    if not attempts:
        return "waiting for a machine to be asked for"
    last = attempts[-1]
    if last.handle is None:
        return last.reason or "asking EC2 for a machine"
    kept = s3_sync.kept(home, last.token)
    if kept.boot is None:
        return "waiting for the machine to boot"
    folder = s3_sync.run_folder(home, run.id)
    if any(folder.glob(f"rank-00000-attempt-{last.n}.jsonl")):
        progress = RecordTail(folder).read()
        return describe(progress) if progress else "starting"
    if kept.status is not None:
        return "the machine is shutting down"
    if any(list(s3_sync.run_folder(home, before).glob("rank-*.jsonl")) for before in _others(run, last)):
        return "waiting for its turn on the machine"
    return "pulling the image and starting"


def ceiling_usd(attempts: Sequence[Attempt]) -> float | None:
    """The most that the attempts can cost together, USD; None where a price or a limit is not known."""
    total = 0.0
    for attempt in attempts:
        if attempt.ended_at is not None:
            if attempt.billed_seconds is None:
                continue
            if attempt.usd_per_hour is None:
                return None
            total += attempt.billed_seconds / 3600 * attempt.usd_per_hour
        elif attempt.usd_per_hour is None or attempt.max_minutes is None:
            return None
        else:
            total += max_cost_usd(
                num_nodes=1, max_minutes=attempt.max_minutes, usd_per_hour=attempt.usd_per_hour
            )
    return total


def cloud_as_json(run: Run, attempts: Sequence[Attempt], *, home: Path, now: datetime) -> dict[str, Any]:
    """What `status` adds for a cloud run: its attempts, what it does, its cost and ceiling in USD."""
    cost = total_cost(attempts, now)
    ceiling = ceiling_usd(attempts)
    return {
        "instance": run.instance,
        "doing": None if run.state.is_final else doing(run, attempts, home),
        "attempts": [attempt_as_json(run, attempt, home=home, now=now) for attempt in attempts],
        "cost_usd": cost.usd,
        "cost_is_final": cost.is_final,
        "max_cost_usd": ceiling,
    }


def _others(run: Run, attempt: Attempt) -> list[str]:
    return [run_id for run_id in attempt.run_ids if run_id != run.id]

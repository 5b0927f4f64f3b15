"""What a run on AWS is doing and what it has cost so far, from what is here of it."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fastlaunch.backends import s3_sync
from fastlaunch.backends.protocol import SERVICES
from fastlaunch.ledger.attempt_cost import told_of, total_cost
from fastlaunch.ledger.ledger import Run
from fastlaunch.placement.cost_ceiling import max_cost_usd
from fastlaunch.run_attempts import Attempt
from fastlaunch.runs.collect import attempt_as_json
from fastlaunch.runs.display import RecordTail, describe


def cloud_note(run: Run, attempts: Sequence[Attempt], *, home: Path, now: datetime) -> str | None:
    """`step 40/200, 652 images/s, loss 2.31; attempt 2 in us-east-1a; $3.10 so far, at most $55.04`.

    For a run that has ended: what its machines cost, after its reason. None before anything was asked for.
    """
    if not attempts:
        return run.reason
    cost = told_of(total_cost(attempts, now), run.spec)
    if run.state.is_final:
        return f"{run.reason}; {cost}" if run.reason else cost
    last = attempts[-1]
    nodes = f" on {last.num_nodes} nodes" if last.num_nodes > 1 else ""
    place = f"attempt {last.n} in {last.zone or last.region}{nodes}"
    ceiling = ceiling_usd(attempts)
    # SageMaker tells how much less it bills for spot when the job has ended.
    is_discounted = last.backend == "sagemaker" and (run.spec or {}).get("purchase") == "spot"
    spot = " before spot's discount" if is_discounted and last.ended_at is None else ""
    bound = f", at most ${ceiling:,.2f}" if ceiling is not None else ""
    machine = f" for {len(last.run_ids)} runs" if len(last.run_ids) > 1 else ""
    return f"{doing(run, attempts, home)}; {place}; {cost}{spot}{bound}{machine}"


def doing(run: Run, attempts: Sequence[Attempt], home: Path) -> str:
    """What a run that has not ended is doing: waiting, booting, pulling its image, or at which step it is."""
    if not attempts:
        return "waiting for a machine to be asked for"
    last = attempts[-1]
    machines = "a machine" if last.num_nodes == 1 else f"{last.num_nodes} machines"
    if last.handle is None:
        return last.reason or f"asking {SERVICES.get(last.backend, last.backend)} for {machines}"
    if run.reason:
        return run.reason
    kept = s3_sync.kept(home, last.token, last.num_nodes)
    if kept.num_booted < last.num_nodes:
        return _booting(last, kept.num_booted)
    if _records_of(run.id, last, home):
        progress = RecordTail(s3_sync.run_folder(home, run.id)).read()
        return describe(progress) if progress else "starting"
    if kept.status is not None:
        return f"the machine{'s are' if last.num_nodes > 1 else ' is'} shutting down"
    if any(list(s3_sync.run_folder(home, before).glob("rank-*.jsonl")) for before in _others(run, last)):
        return "waiting for its turn on the machine" + ("s" if last.num_nodes > 1 else "")
    return "pulling the image and starting"


def _booting(attempt: Attempt, num_booted: int) -> str:
    if attempt.backend == "sagemaker":
        return "waiting for the job's container" + ("s" if attempt.num_nodes > 1 else "")
    if attempt.num_nodes == 1:
        return "waiting for the machine to boot"
    return f"waiting for the machines to boot, {num_booted} of {attempt.num_nodes} have"


def _records_of(run_id: str, attempt: Attempt, home: Path) -> list[Path]:
    """The first rank's records of the attempt, or of a later start of the same job, which is numbered on."""
    found = s3_sync.run_folder(home, run_id).glob("rank-00000-attempt-*.jsonl")
    return [path for path in found if int(path.stem.rpartition("-")[2]) >= attempt.n]


def ceiling_usd(attempts: Sequence[Attempt]) -> float | None:
    """The most that the attempts can cost together, USD; None where a price or a limit is not known."""
    total = 0.0
    for attempt in attempts:
        if attempt.ended_at is not None:
            if not attempt.billed_seconds:
                continue
            if attempt.usd_per_hour is None:
                return None
            # Its warm pool, of which AWS tells no end before it has ended, may go on costing.
            minutes = attempt.billed_seconds / 60 + attempt.idle_minutes
            total += attempt.num_nodes * minutes / 60 * attempt.usd_per_hour
        elif attempt.usd_per_hour is None or attempt.max_minutes is None:
            return None
        else:
            total += max_cost_usd(
                num_nodes=attempt.num_nodes,
                max_minutes=attempt.max_minutes,
                usd_per_hour=attempt.usd_per_hour,
                idle_minutes=attempt.idle_minutes,
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
        "sunk_usd": cost.sunk_usd,
        "cost_is_final": cost.is_final,
        "max_cost_usd": ceiling,
    }


def _others(run: Run, attempt: Attempt) -> list[str]:
    return [run_id for run_id in attempt.run_ids if run_id != run.id]

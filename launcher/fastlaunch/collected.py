"""What is here of a cloud run, what it cost, and what is missing and why."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fastlaunch import s3_sync
from fastlaunch.attempt_cost import attempt_cost
from fastlaunch.aws import StoredObject
from fastlaunch.errors import UserError
from fastlaunch.job import JobSpec
from fastlaunch.log_file import LOG
from fastlaunch.outcome import contradictions, read_records
from fastlaunch.run_attempts import Attempt
from fastlaunch.runs import Run

if TYPE_CHECKING:
    from fastlaunch.metrics import RunSummary

_RECORD = re.compile(r"rank-(\d{5})-attempt-(\d+)\.jsonl")
_CHECKPOINT = re.compile(r"step-(\d{8})\.pt")


class Store(Protocol):
    """The call that finding checkpoints takes; see `fastlaunch.aws.Aws`."""

    def list_objects(self, region: str, bucket: str, prefix: str) -> list[StoredObject]: ...


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Where the checkpoints of a run lie. newest: URI of the one to resume from; step 0 and None without."""

    uri: str
    newest: str | None = None
    step: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Seconds of an attempt's machine: what the run itself took, and boot, pull and waits that all its runs
    share. None where the node did not say.
    """

    own_s: float | None = None
    shared_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What is here of a run. records: of every rank and attempt. missing: in words, empty if all is here."""

    run: Run
    attempts: tuple[Attempt, ...]
    records: tuple[Path, ...]
    log: Path | None
    node_logs: tuple[Path, ...]
    missing: tuple[str, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks of which the newest attempt that recorded anything left a record."""
        return len(_ranks_of_last(self.records))


def collected(run: Run, attempts: Sequence[Attempt], home: Path) -> Collected:
    """What is here of the run, without asking for more."""
    records = s3_sync.record_paths(home, run.id)
    log = s3_sync.run_folder(home, run.id) / LOG
    node_logs = [s3_sync.node_log_path(home, attempt.token) for attempt in attempts]
    return Collected(
        run=run,
        attempts=tuple(attempts),
        records=records,
        log=log if log.is_file() else None,
        node_logs=tuple(path for path in node_logs if path.is_file()),
        missing=tuple(_missing(run, attempts, records, log, home)),
    )


def summary_of(run: Run, home: Path) -> "RunSummary | None":
    """What the run measured, by the records that are here; None if there are none."""
    # Imported late: it brings numpy.
    from fastlaunch.metrics import summarize

    records, _ = read_records(s3_sync.record_paths(home, run.id))
    if not records:
        return None
    summary = summarize(records)
    problems = contradictions(JobSpec.from_json(run.spec), records) if run.spec else ()
    return replace(summary, problems=(*summary.problems, *problems)) if problems else summary


def occupancy(run: Run, attempt: Attempt, home: Path) -> Occupancy:
    """How the machine's time was shared, by the node's last word."""
    status = s3_sync.kept(home, attempt.token).status
    took = {
        entry["run_id"]: max(0.0, entry["ended_s"] - entry["started_s"])
        for entry in _runs_of(status)
        if _is_number(entry.get("started_s")) and _is_number(entry.get("ended_s"))
    }
    if not took:
        return Occupancy()
    uptime_s = (status or {}).get("uptime_s")
    total_s = attempt.billed_seconds or (uptime_s if _is_number(uptime_s) else None)
    shared_s = max(0.0, total_s - sum(took.values())) if total_s is not None else None
    return Occupancy(own_s=took.get(run.id, 0.0), shared_s=shared_s)


def checkpoints(store: Store, run: Run, attempts: Sequence[Attempt]) -> Checkpoints | None:
    """Where the run's checkpoints lie and which is the newest; None if no attempt says where it writes.

    Raises CloudRefused's kinds.
    """
    placed = [attempt for attempt in attempts if attempt.output and attempt.region]
    if not placed:
        return None
    # Attempts in several regions write to several buckets; the newest one knows of those before.
    newest: Checkpoints | None = None
    for attempt in reversed(placed):
        assert attempt.output is not None and attempt.region is not None
        runs_uri = attempt.output.rsplit("/", 2)[0]
        uri = f"{runs_uri}/{run.id}/checkpoints/"
        bucket, prefix = s3_sync.split_uri(uri)
        found = Checkpoints(uri=uri)
        for stored in store.list_objects(attempt.region, bucket, f"{prefix}/"):
            name = _CHECKPOINT.fullmatch(stored.key.rpartition("/")[2])
            if name and int(name[1]) >= found.step:
                found = Checkpoints(
                    uri=uri,
                    newest=f"s3://{bucket}/{stored.key}",
                    step=int(name[1]),
                    num_bytes=stored.size,
                )
        if newest is None or found.step > newest.step:
            newest = found
        if newest.newest:
            break
    return newest


def as_json(
    found: Collected,
    *,
    home: Path,
    now: datetime,
    discount: float,
    stored: Checkpoints | None,
    refused: Mapping[str, UserError],
) -> dict[str, Any]:
    """Everything about the run as plain data. refused: why an attempt's output could not be had, by token."""
    run = found.run
    own = [attempt_as_json(run, attempt, home=home, now=now) for attempt in found.attempts]
    costs = [attempt["cost_usd"] for attempt in own]
    return {
        "id": run.id,
        "submission": run.submission_id,
        "backend": run.backend,
        "workload": run.workload,
        "recipe": run.recipe,
        "state": str(run.state),
        "reason": run.reason,
        "directory": str(run.directory) if run.directory else None,
        "records": [str(path) for path in found.records],
        "num_ranks": found.num_ranks,
        "log": str(found.log) if found.log else None,
        "node_logs": [str(path) for path in found.node_logs],
        "checkpoints": vars(stored) if stored else None,
        "instance": run.instance,
        "image": (run.spec or {}).get("image"),
        "list_price": run.price.to_json() if run.price else None,
        "discount": discount,
        "attempts": own,
        "cost_usd": None if None in costs else round(sum(costs), 4),
        "missing": [*found.missing, *(error.message for error in refused.values())],
    }


def attempt_as_json(run: Run, attempt: Attempt, *, home: Path, now: datetime) -> dict[str, Any]:
    """An attempt, with what its node said of itself. cost_usd: of the machine, all its runs together."""
    kept = s3_sync.kept(home, attempt.token)
    said = {**(kept.boot or {}), **(kept.status or {})}
    shared = occupancy(run, attempt, home)
    cost = attempt_cost(attempt, now)
    return {
        "token": attempt.token,
        "n": attempt.n,
        "state": str(attempt.state),
        "reason": attempt.reason,
        "region": attempt.region,
        "zone": attempt.zone,
        "instance": attempt.instance,
        "instance_id": (attempt.handle or {}).get("instance_id"),
        "output": attempt.output,
        **{name: said.get(name) for name in ("lifecycle", "booted_at", "outcome", "boot_s", "pull_s")},
        "started_at": attempt.started_at,
        "launched_at": attempt.launched_at,
        "ended_at": attempt.ended_at,
        "max_minutes": attempt.max_minutes,
        "billed_seconds": attempt.billed_seconds,
        "billing": attempt.billing,
        "usd_per_hour": attempt.usd_per_hour,
        "cost_usd": cost.usd,
        "cost": cost.told,
        "run_ids": list(attempt.run_ids),
        "own_seconds": shared.own_s,
        "shared_seconds": shared.shared_s,
    }


def _missing(
    run: Run, attempts: Sequence[Attempt], records: Sequence[Path], log: Path, home: Path
) -> list[str]:
    """What is not here, and why, of the newest attempt; empty once all is."""
    if not attempts:
        return ["no machine was asked for yet" if not run.state.is_final else "no machine was ever asked for"]
    attempt = attempts[-1]
    kept = s3_sync.kept(home, attempt.token)
    if attempt.handle is None:
        if attempt.ended_at:
            return [f"no machine was started: {attempt.reason or attempt.state}"]
        return [attempt.reason or "EC2 has not answered yet"]
    if kept.boot is None:
        if not attempt.ended_at:
            return ["the machine has not booted yet"]
        console = s3_sync.console_path(home, attempt.token)
        return [f"the node never said that it booted{f'; see {console}' if console.is_file() else ''}"]
    entry = next((entry for entry in _runs_of(kept.status) if entry["run_id"] == run.id), None)
    if entry and entry.get("state") == "not-started":
        why = (kept.status or {}).get("reason") or (kept.status or {}).get("outcome")
        return [f"the node ended before the run's turn: {why}"]
    missing = []
    if not run.state.is_final:
        missing.append("under way: the rest comes when it is uploaded")
    elif kept.status is None:
        missing.append("the node ended without a last word: the end of log and records may be lost")
    wanted = set(range((run.spec or {}).get("num_gpus", 0)))
    if run.state.is_final and (absent := sorted(wanted - _ranks_of_last(records))):
        missing.append(f"no record of rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}")
    if run.state.is_final and not log.is_file():
        missing.append("no log")
    return missing


def _ranks_of_last(records: Sequence[Path]) -> set[int]:
    names = [name for path in records if (name := _RECORD.fullmatch(path.name))]
    last = max((int(name[2]) for name in names), default=0)
    return {int(name[1]) for name in names if int(name[2]) == last}


def _runs_of(status: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The runs that the node's last word tells of; what is not of their form is left out."""
    given = status.get("runs") if status else None
    entries = given if isinstance(given, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("run_id"), str)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

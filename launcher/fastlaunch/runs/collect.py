"""What is here of a run on AWS, what it cost, and what is missing and why."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fastlaunch.aws.ec2 import StoredObject
from fastlaunch.backends import s3_sync
from fastlaunch.backends.node_report import merged
from fastlaunch.backends.protocol import SERVICES
from fastlaunch.core.errors import UserError
from fastlaunch.core.log_file import LOG
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.ledger.attempt_cost import attempt_cost, told_of
from fastlaunch.ledger.ledger import Run
from fastlaunch.machine_start import with_start
from fastlaunch.measure.outcome import contradictions, read_records
from fastlaunch.run_attempts import Attempt

if TYPE_CHECKING:
    from fastlaunch.measure.summarize import RunSummary

_RECORD = re.compile(r"rank-(\d{5})-attempt-(\d+)\.jsonl")
_CHECKPOINT = re.compile(r"step-(\d{8})\.pt")


class Store(Protocol):
    """The call that finding checkpoints takes; see `fastlaunch.aws.ec2.Aws`."""

    def list_objects(self, region: str, bucket: str, prefix: str) -> list[StoredObject]: ...


class Layout(Protocol):
    """Where a backend's runs save their checkpoints; see `CloudBackend`."""

    def checkpoint_folder(self, output: str, run_id: str) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Where the checkpoints of a run lie. newest: URI of the one to resume from; step 0 and None without."""

    uri: str
    newest: str | None = None
    step: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Billed seconds of each of an attempt's machines: what the run itself took; boot, pull and waits that
    all its runs share. None where the nodes did not say.
    """

    own_s: float | None = None
    shared_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What is here of a run. records, tracebacks: of every rank and attempt. missing: in words, empty if all
    is here.
    """

    run: Run
    attempts: tuple[Attempt, ...]
    records: tuple[Path, ...]
    log: Path | None
    node_logs: tuple[Path, ...]
    missing: tuple[str, ...]
    tracebacks: tuple[Path, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Ranks of which the newest attempt that recorded anything left a record."""
        return len(_ranks_of_last(self.records))


def collected(run: Run, attempts: Sequence[Attempt], home: Path) -> Collected:
    """What is here of the run, without asking for more."""
    records = s3_sync.record_paths(home, run.id)
    folder = s3_sync.run_folder(home, run.id)
    log = folder / LOG
    node_logs = [
        s3_sync.node_log_path(home, attempt.token, node)
        for attempt in attempts
        for node in range(attempt.num_nodes)
    ]
    return Collected(
        run=run,
        attempts=tuple(attempts),
        records=records,
        log=log if log.is_file() else None,
        node_logs=tuple(path for path in node_logs if path.is_file()),
        missing=tuple(_missing(run, attempts, records, log, home)),
        tracebacks=tuple(sorted(folder.glob("traceback-rank-*.txt"))),
    )


def summary_of(run: Run, attempts: Sequence[Attempt], home: Path) -> "RunSummary | None":
    """What the run measured, by the records that are here; None if there are none."""
    # Imported late: it brings numpy.
    from fastlaunch.measure.summarize import summarize

    records, _ = read_records(s3_sync.record_paths(home, run.id))
    if not records:
        return None
    summary = with_start(summarize(records), attempts, home)
    problems = contradictions(JobSpec.from_json(run.spec), records) if run.spec else ()
    return replace(summary, problems=(*summary.problems, *problems)) if problems else summary


def occupancy(run: Run, attempt: Attempt, home: Path) -> Occupancy:
    """How the billed seconds of the machines were shared, by the nodes' last word.

    Where fewer are billed than passed, as SageMaker's spot, every part is billed as much less.
    """
    status = last_word(attempt, home)
    took = {
        entry["run_id"]: max(0.0, entry["ended_s"] - entry["started_s"])
        for entry in _runs_of(status)
        if _is_number(entry.get("started_s")) and _is_number(entry.get("ended_s"))
    }
    if not took:
        return Occupancy()
    uptime_s = (status or {}).get("uptime_s")
    billed_s = attempt.billed_seconds or (uptime_s if _is_number(uptime_s) else None)
    share = 1.0
    if attempt.billed_seconds and attempt.lived_s and attempt.billed_seconds < attempt.lived_s:
        share = attempt.billed_seconds / attempt.lived_s
    own_s = {run_id: seconds * share for run_id, seconds in took.items()}
    shared_s = max(0.0, billed_s - sum(own_s.values())) if billed_s is not None else None
    return Occupancy(own_s=own_s.get(run.id, 0.0), shared_s=shared_s)


def last_word(attempt: Attempt, home: Path) -> Mapping[str, Any] | None:
    """What the attempt's nodes said last, as one; once it has ended, also if not all of them have spoken."""
    kept = s3_sync.kept(home, attempt.token, attempt.num_nodes)
    if kept.status is None and attempt.ended_at is not None:
        return merged(kept.statuses, attempt.num_nodes, partial=True)
    return kept.status


def checkpoints(
    store: Store, run: Run, attempts: Sequence[Attempt], layouts: Mapping[str, Layout]
) -> Checkpoints | None:
    """Where the run's checkpoints lie and which is the newest; None if no attempt says where it writes.

    layouts: backends by name. Raises CloudRefused's kinds.
    """
    placed = [one for one in attempts if one.output and one.region and one.backend in layouts]
    if not placed:
        return None
    # Attempts in several regions write to several buckets; the newest one knows of those before.
    newest: Checkpoints | None = None
    for attempt in reversed(placed):
        assert attempt.output is not None and attempt.region is not None
        uri = layouts[attempt.backend].checkpoint_folder(attempt.output, run.id)
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
        "tracebacks": [str(path) for path in found.tracebacks],
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
    """An attempt, with what its nodes said of themselves.

    cost_usd: of all machines, all its runs together; sunk_usd: what was paid before for their block.
    billed_seconds, own_seconds and shared_seconds are of one of num_nodes machines.
    """
    kept = s3_sync.kept(home, attempt.token, attempt.num_nodes)
    said = {**(kept.boot or {}), **(last_word(attempt, home) or {})}
    shared = occupancy(run, attempt, home)
    cost = attempt_cost(attempt, now)
    handle = attempt.handle or {}
    ids = handle.get("instance_ids") or [one for one in [handle.get("instance_id")] if one]
    return {
        "token": attempt.token,
        "n": attempt.n,
        "backend": attempt.backend,
        "state": str(attempt.state),
        "reason": attempt.reason,
        "region": attempt.region,
        "zone": attempt.zone,
        "instance": attempt.instance,
        "num_nodes": attempt.num_nodes,
        "instance_id": handle.get("instance_id"),
        "instance_ids": ids,
        "job_name": handle.get("job_name"),
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
        "sunk_usd": cost.sunk_usd,
        "cost": told_of(cost, run.spec),
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
    service = SERVICES.get(attempt.backend, attempt.backend)
    kept, status = s3_sync.kept(home, attempt.token, attempt.num_nodes), last_word(attempt, home)
    if attempt.handle is None:
        if attempt.ended_at:
            return [f"no machine was started: {attempt.reason or attempt.state}"]
        return [attempt.reason or f"{service} has not answered yet"]
    if not kept.num_booted and status is None:
        return [_why_silent(attempt, home)]
    entry = next((entry for entry in _runs_of(status) if entry["run_id"] == run.id), None)
    if entry and entry.get("state") == "not-started":
        why = (status or {}).get("reason") or (status or {}).get("outcome")
        return [f"the node ended before the run's turn: {why}"]
    missing = []
    if not run.state.is_final:
        missing.append("under way: the rest comes when it is uploaded")
    elif kept.status is None:
        silent = _silent(attempt, kept)
        missing.append(f"{silent} ended without a last word: the end of log and records may be lost")
    wanted = set(range((run.spec or {}).get("num_gpus", 0)))
    if run.state.is_final and (absent := sorted(wanted - _ranks_of_last(records))):
        missing.append(f"no record of rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}")
    if run.state.is_final and not log.is_file():
        missing.append("no log")
    return missing


def _why_silent(attempt: Attempt, home: Path) -> str:
    """Why nothing is here of an attempt whose machines were asked for."""
    several = attempt.num_nodes > 1
    if attempt.backend == "sagemaker":
        what, verb = ("the job's containers" if several else "the job's container"), "started"
    else:
        what, verb = ("the nodes" if several else "the node"), "booted"
    if not attempt.ended_at:
        return f"{what} {'have' if several else 'has'} not {verb} yet"
    diary = s3_sync.console_path(home, attempt.token)
    see = f"; see {diary}" if diary.is_file() else ""
    return f"{what} never said that {'they' if several else 'it'} {verb}{see}"


def _silent(attempt: Attempt, kept: s3_sync.Synced) -> str:
    """The nodes that did not say their last."""
    silent = [str(node) for node in range(attempt.num_nodes) if node not in kept.statuses]
    if attempt.num_nodes == 1:
        return "the node"
    return f"node{'s' if len(silent) > 1 else ''} {', '.join(silent)}"


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

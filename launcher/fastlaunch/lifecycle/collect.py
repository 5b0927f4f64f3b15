"""The local files of a run on AWS, its cost, and what is missing and why."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlaunch.backends import s3_sync
from fastlaunch.backends.node_report import merged
from fastlaunch.backends.protocol import CloudBackend
from fastlaunch.core.log_file import LOG, tail
from fastlaunch.core.terminal import printable
from fastlaunch.jobs.job import Job
from fastlaunch.jobs.options import SERVICES
from fastlaunch.ledger.ledger import Run
from fastlaunch.ledger.rows import Attempt
from fastlaunch.lifecycle.display import Progress, RecordTail, describe
from fastlaunch.measure.outcome import contradictions, read_records
from fastlaunch.measure.record_files import RankRecord
from fastlaunch_train.node.protocol import checkpoint_key, newest_checkpoint

if TYPE_CHECKING:
    from fastlaunch.measure.summary import RunSummary

_RECORD = re.compile(r"rank-(\d{5})-attempt-(\d+)\.jsonl")


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The location of a run's checkpoints."""

    #: The URI of their folder.
    uri: str
    #: URI of the checkpoint to resume from, with its step and size; None without one.
    newest: str | None = None
    step: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Billed seconds of each of an attempt's machines; None where the nodes did not report them."""

    #: Used by the run alone.
    own_s: float | None = None
    #: Boot, image pull and waits, shared by all runs of the attempt.
    shared_s: float | None = None


def summary_of(run: Run, attempts: Sequence[Attempt], home: Path) -> "RunSummary | None":
    """Return the run's summary from the local records; None without records."""
    records, _ = read_records(s3_sync.record_paths(home, run.id))
    summary, _ = summarize_run(run.spec, records)
    return summary and with_start(summary, attempts, home)


def summarize_run(
    spec: Mapping[str, Any] | None, records: Sequence[RankRecord]
) -> "tuple[RunSummary | None, str | None]":
    """Return the records' summary, and the first contradiction between them and the job of `spec`.

    Contradictions are among the summary's problems too. Without records both are None.
    """
    # Imported late: it brings numpy.
    from fastlaunch.measure.summarize import summarize

    if not records:
        return None, None
    summary = summarize(records)
    problems = contradictions(Job.from_json(spec), records) if spec else ()
    return replace(summary, problems=(*summary.problems, *problems)), next(iter(problems), None)


def occupancy(run: Run, attempt: Attempt, home: Path) -> Occupancy:
    """Return how the runs shared the machines' billed seconds, by the nodes' final report.

    If fewer seconds are billed than passed, as on SageMaker's spot, all parts shrink in proportion.
    """
    status = last_word(attempt, home)
    took = {
        entry["run_id"]: entry["ended_s"] - entry["started_s"]
        for entry in run_entries(status)
        if entry.get("started_s") is not None and entry.get("ended_s") is not None
    }
    if not took:
        return Occupancy()
    billing = attempt.billing
    billed_s = billing.billed_s or (status or {}).get("uptime_s")
    share = 1.0
    if billing.billed_s and billing.lived_s:
        share = min(1.0, billing.billed_s / billing.lived_s)
    own_s = {run_id: seconds * share for run_id, seconds in took.items()}
    shared_s = max(0.0, billed_s - sum(own_s.values())) if billed_s is not None else None
    return Occupancy(own_s=own_s.get(run.id, 0.0), shared_s=shared_s)


def last_word(attempt: Attempt, home: Path) -> Mapping[str, Any] | None:
    """Return the nodes' merged final report; None before all have sent one, unless the attempt has ended."""
    kept = s3_sync.kept(home, attempt.token, attempt.num_nodes)
    if kept.status is None and attempt.ended_at is not None:
        return merged(kept.statuses, attempt.num_nodes, partial=True)
    return kept.status


def checkpoints(
    run: Run, attempts: Sequence[Attempt], backends: Mapping[str, CloudBackend]
) -> Checkpoints | None:
    """Return the location of the run's checkpoints and the newest one; None if no attempt has a location.

    Raises CloudRefused's kinds.
    """
    newest: Checkpoints | None = None
    # Attempts in several regions write to several buckets; the newest attempt knows the earlier ones.
    for attempt in reversed(attempts):
        backend = backends.get(attempt.backend)
        if backend is None or not attempt.output or not attempt.region:
            continue
        uri = backend.checkpoint_folder(attempt.output, run.id)
        bucket, prefix = s3_sync.split_uri(uri)
        here = Checkpoints(uri=uri)
        sizes = {
            stored.key.rpartition("/")[2]: stored.size
            for stored in backend.aws.list_objects(attempt.region, bucket, f"{prefix}/")
        }
        if files := newest_checkpoint(sizes):
            step, _ = checkpoint_key(files[0]) or (0, 0)
            num_bytes = sum(sizes[name] for name in files)
            here = Checkpoints(uri=uri, newest=f"{uri}{files[0]}", step=step, num_bytes=num_bytes)
        if newest is None or here.step > newest.step:
            newest = here
        if newest.newest:
            break
    return newest


def missing_of(run: Run, attempts: Sequence[Attempt], home: Path) -> list[str]:
    """Return which files of the run's newest attempt are missing here, and why."""
    if not run.state.is_final:
        progress = RecordTail(s3_sync.run_folder(home, run.id)).read()
        return [f"under way: {doing(run, attempts, home, progress)}"]
    if not attempts:
        return ["no machine was ever requested"]
    attempt = attempts[-1]
    if attempt.handle is None:
        return [f"no machine was started: {attempt.reason or attempt.state}"]
    kept, status = s3_sync.kept(home, attempt.token, attempt.num_nodes), last_word(attempt, home)
    if not kept.num_booted and status is None:
        console_log = s3_sync.console_path(home, attempt.token)
        see = f"; see {console_log}" if console_log.is_file() else ""
        return [f"{_nodes(range(attempt.num_nodes), attempt)} never started{see}"]
    entry = next((entry for entry in run_entries(status) if entry["run_id"] == run.id), None)
    if entry and entry.get("state") == "not-started":
        why = (status or {}).get("reason") or (status or {}).get("outcome")
        return [f"the node ended before the run's turn: {why}"]
    missing = []
    if silent := [node for node in range(attempt.num_nodes) if node not in kept.statuses]:
        silent_nodes = _nodes(silent, attempt)
        missing.append(f"{silent_nodes} ended without a last word: the end of log and records may be lost")
    ranks = set(range((run.spec or {}).get("num_gpus", 0)))
    if absent := sorted(ranks - ranks_of_last(s3_sync.record_paths(home, run.id))):
        missing.append(f"no record of rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}")
    if not (s3_sync.run_folder(home, run.id) / LOG).is_file():
        missing.append("no log")
    return missing


def doing(run: Run, attempts: Sequence[Attempt], home: Path, progress: Progress | None) -> str:
    """Return what a run that has not ended is doing: waiting, booting, pulling its image, or its step.

    progress: from the newest record in its folder, which may belong to an earlier attempt.
    """
    if not attempts:
        return run.reason or "waiting for a machine to be requested"
    last = attempts[-1]
    if last.handle is None:
        machines = "a machine" if last.num_nodes == 1 else f"{last.num_nodes} machines"
        return last.reason or f"asking {SERVICES.get(last.backend, last.backend)} for {machines}"
    if run.reason:
        return run.reason
    kept = s3_sync.kept(home, last.token, last.num_nodes)
    if kept.num_booted < last.num_nodes:
        if last.backend == "sagemaker":
            return "waiting for the job's container" + ("s" if last.num_nodes > 1 else "")
        if last.num_nodes == 1:
            return "waiting for the machine to boot"
        return f"waiting for the machines to boot, {kept.num_booted} of {last.num_nodes} have"
    if has_record(run.id, last, home):
        return describe(progress) if progress else "starting"
    if kept.status is not None:
        return "its machine is shutting down"
    if any(has_record(other, last, home) for other in last.run_ids if other != run.id):
        return "waiting for its turn on the machine"
    lines = (line.strip() for line in reversed(tail(s3_sync.node_log_path(home, last.token))))
    return next((printable(line[:100]) for line in lines if line), "pulling the image and starting")


def has_record(run_id: str, attempt: Attempt, home: Path) -> bool:
    """Return whether rank 0 has a record of this attempt, or of a later start of the same job."""
    names = [_RECORD.fullmatch(path.name) for path in s3_sync.record_paths(home, run_id)]
    return any(name and int(name[1]) == 0 and int(name[2]) >= attempt.n for name in names)


def _nodes(nodes: Sequence[int], attempt: Attempt) -> str:
    """`the node`, `node 1`, `nodes 0, 1`."""
    if attempt.num_nodes == 1:
        return "the node"
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"


def ranks_of_last(records: Sequence[Path]) -> set[int]:
    """Return the ranks with a record of the newest attempt that recorded anything."""
    names = [name for path in records if (name := _RECORD.fullmatch(path.name))]
    last = max((int(name[2]) for name in names), default=0)
    return {int(name[1]) for name in names if int(name[2]) == last}


def run_entries(status: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the entries for each run in the nodes' final report; empty without one."""
    return (status or {}).get("runs") or []


def with_start(summary: "RunSummary", attempts: Sequence[Attempt], home: Path) -> "RunSummary":
    """Return `summary` with the start-up times of the newest attempt whose nodes reported them.

    The times count in full even if runs share the machine, since a job alone would wait as long.
    """
    for attempt in reversed(attempts):
        kept = s3_sync.kept(home, attempt.token, attempt.num_nodes)
        status = kept.status or merged(kept.statuses, attempt.num_nodes, partial=True) or {}
        boot_s, pulled_s = status.get("boot_s"), status.get("pull_s")
        phases = status.get("phases") or []
        if boot_s is None and not phases:
            continue
        # Both count from the machine's start; the script that fetches begins at boot_s.
        took_s = None
        if boot_s is not None and pulled_s is not None and pulled_s >= boot_s:
            took_s = pulled_s - boot_s
        startup = replace(
            summary.startup,
            boot_s=boot_s,
            pull_s=took_s,
            install_s=_of_phases(phases, "requirements", "seconds"),
            inputs_s=_of_phases(phases, "input ", "seconds"),
            input_bytes=_of_phases(phases, "input ", "bytes"),
        )
        return replace(summary, startup=startup)
    return summary


def _of_phases(phases: Sequence[Mapping[str, Any]], name: str, key: str) -> Any:
    """Return the sum over the phases whose names begin so; None without any."""
    values = [phase[key] for phase in phases if phase["name"].startswith(name)]
    return None if None in values or not values else sum(values)

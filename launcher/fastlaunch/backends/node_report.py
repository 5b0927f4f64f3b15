"""Merge the reports that an attempt's nodes leave when they end. Pure.

All nodes do the same runs together, so the end of one ends the others: they are asked to stop, or their
training fails because a peer is gone. The node with a reason of its own decides how the attempt ended.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fastlaunch_train.node.protocol import CONFIGURATION, HARDWARE, PEER, STOP
from fastlaunch_train.records.records import MAX_INTEGER

_AGAIN = "submit it again for another machine"
_LOG = "what it printed: fastlaunch logs RUN"
_WORDS = {
    "fabric": "the nodes did not use EFA, and over TCP they would wait for each other: check that the "
    "security group lets all traffic from and to itself through, and that the image holds EFA's software; "
    "or give --allow-tcp",
    "peers": "not all of its nodes came up and reached the bucket: check that their subnet has a way "
    f"to S3, or {_AGAIN}",
    "rank 0": f"its first node did not say where it is: check that its subnet has a way to S3, or {_AGAIN}",
    "block": "less than 45 minutes are left of the capacity block, too few to begin a run",
    "driver": f"no driver of its GPUs answers: check that the AMI has one; {_LOG}",
    "fabric manager": "the fabric manager, which joins its GPUs, did not come up",
    "slowdown": "a GPU slowed itself down under load",
    "docker": f"docker does not run on its machine; {_LOG}",
    "image pull": f"its image could not be pulled: check that the machine's role may; {_LOG}",
    "secret": "a secret could not be read: the role of its machine, or of its training job, may read those "
    f"that `fastlaunch iam print --secret ARN` names; {_LOG}",
    "code": f"the code could not be fetched from the bucket: check that the machine's role may; {_LOG}",
    "disk full": "the disk of its machine was full: save fewer or smaller checkpoints, or take a type with "
    "local NVMe",
}
_CONTAINER = re.compile(r"container: exit code (\d+)")
_REQUIREMENTS = re.compile(r"requirements(?:: (.*))?")
_INPUT = re.compile(r"input (.*(?:listed|read))")
_CHECKPOINT = re.compile(r"checkpoint of (\S+)")

#: The fields to read from a report and from each of its runs, by type; any may be missing.
_TEXTS = ("outcome", "reason", "booted_at", "billed_until", "instance_id", "zone", "lifecycle", "state")
_SECONDS = ("boot_s", "pull_s", "uptime_s", "started_s", "ended_s")

#: Exit codes of training that was asked to stop, on this node or another: 128 plus the signal.
_STOPPED_CODES = (130, 143)


def merged(
    statuses: Mapping[int, Mapping[str, Any]], num_nodes: int, *, partial: bool = False
) -> Mapping[str, Any] | None:
    """Return the nodes' reports as one; None until all have reported, or with `partial` until one has.

    statuses: by node rank. One node, which `node` names, decides outcome and reason: a node with faulty
    hardware, else a node whose configuration does not work, else a node that was interrupted for a reason of
    its own (EC2 took it, its time was up), else a failed node, else a node that was asked to stop; with
    `partial`, a silent node if the others only stopped with it. A run is completed only if every node reports
    so. Instance, zone and times (`boot_s`, `uptime_s`, ...) are those of the first node that reported.
    `missing` has the ranks of silent nodes. A single node's report stays as it is.
    """
    known = {node: statuses[node] for node in range(num_nodes) if node in statuses}
    missing = [node for node in range(num_nodes) if node not in known]
    if not known or (missing and not partial):
        return None
    first = known[min(known)]
    if num_nodes == 1:
        return first
    decisive = min(known, key=lambda node: _weight(known[node]))
    report = known[decisive]
    outcome, reason = report.get("outcome"), report.get("reason")
    begun = [entry["run_id"] for entry in _entries(report) if entry.get("state") != "not-started"]
    cut = begun[-1] if begun and _weight(report) in (_HARDWARE, _INTERRUPTED) else None
    if missing and _weight(report) >= _STOPPED:
        cut = begun[-1] if begun else None
        decisive, outcome = missing[0], "failed"
        reason = f"node {decisive} ended without a last word"
    return {
        **first,
        "outcome": outcome,
        "reason": reason,
        "node": decisive,
        "num_nodes": num_nodes,
        "missing": missing,
        "runs": _runs(known, missing, cut=cut),
    }


#: How much a node's end says about the attempt; the first says most.
_HARDWARE, _CONFIGURATION, _INTERRUPTED, _FAILED, _ASKED, _STOPPED, _FOLLOWED, _COMPLETED = range(8)


def _weight(status: Mapping[str, Any]) -> int:
    outcome, reason = status.get("outcome"), status.get("reason")
    if outcome == "completed":
        return _COMPLETED
    if outcome in (HARDWARE, CONFIGURATION):
        return _HARDWARE if outcome == HARDWARE else _CONFIGURATION
    if outcome == "interrupted":
        return {STOP: _ASKED, PEER: _FOLLOWED}.get(str(reason), _INTERRUPTED)
    failures = [entry for entry in _entries(status) if entry.get("state") == "failed"]
    if all(entry.get("exit_code") in _STOPPED_CODES for entry in failures):
        # Its training stopped because a peer's did; it has no reason of its own.
        return _STOPPED
    return _FAILED


def _runs(
    known: Mapping[int, Mapping[str, Any]], missing: Sequence[int], *, cut: str | None
) -> list[dict[str, Any]]:
    """Return every run that a node reports, once, in the order of the first node's list.

    cut: the run that was under way when the attempt was interrupted.
    """
    by_run: dict[str, dict[int, Mapping[str, Any]]] = {}
    for node, status in known.items():
        for entry in _entries(status):
            by_run.setdefault(entry["run_id"], {})[node] = entry
    return [
        _run(entries, has_all=not missing and len(entries) == len(known), is_cut=run_id == cut)
        for run_id, entries in by_run.items()
    ]


def _run(entries: Mapping[int, Mapping[str, Any]], *, has_all: bool, is_cut: bool) -> dict[str, Any]:
    """Return what became of one run; times are node 0's, exit code and `node` the decisive node's."""
    by_state: dict[str, list[int]] = {}
    for node, entry in entries.items():
        by_state.setdefault(_state(entry), []).append(node)
    if "failed" in by_state and not (is_cut and ("interrupted" in by_state or not has_all)):
        state, decisive = "failed", by_state["failed"][0]
    elif "failed" in by_state or "interrupted" in by_state:
        # Training that fails while AWS takes another node fails because of that.
        state, decisive = "interrupted", (by_state.get("interrupted") or by_state["failed"])[0]
    elif set(by_state) == {"completed"}:
        state, decisive = "completed" if has_all else "lost", min(entries)
    elif set(by_state) == {"not-started"}:
        state, decisive = "not-started", min(entries)
    else:
        # Done on one node and never begun on another, or in an unknown state.
        state, decisive = "lost", min(entries)
    times = entries[min(entries)]
    return {**times, "state": state, "exit_code": entries[decisive].get("exit_code"), "node": decisive}


def _state(entry: Mapping[str, Any]) -> str:
    state = str(entry.get("state"))
    return "interrupted" if state == "failed" and entry.get("exit_code") in _STOPPED_CODES else state


def _entries(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the runs that a node reports."""
    return status.get("runs") or []


def is_sound(report: Mapping[str, Any]) -> bool:
    """Return whether the fields to read have the types that nodes write; a job may write others."""
    runs, phases = report.get("runs") or [], report.get("phases") or []
    if not (isinstance(runs, list) and isinstance(phases, list) and all(map(_is_phase, phases))):
        return False
    return all(
        isinstance(entry, dict)
        and all(isinstance(entry.get(name), str | None) for name in _TEXTS)
        and all(_is_amount(entry.get(name)) for name in _SECONDS)
        and isinstance(entry.get("exit_code"), int | None)
        and (entry is report or isinstance(entry.get("run_id"), str))
        for entry in (report, *runs)
    )


def _is_phase(phase: Any) -> bool:
    return (
        isinstance(phase, dict)
        and {*phase} == {"name", "seconds", "bytes"}
        and isinstance(phase["name"], str)
        and _is_amount(phase["seconds"])
        and _is_amount(phase["bytes"])
    )


def _is_amount(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) <= MAX_INTEGER)


def time_of(status: Mapping[str, Any] | None, name: str) -> datetime | None:
    """Return a time of the report, such as `2026-11-21T15:30:04Z`; None if it has none, or no such text."""
    try:
        time = datetime.fromisoformat(status[name]) if status else None
        return time and (time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def uptime_of(status: Mapping[str, Any] | None) -> float | None:
    """Return the uptime that the node reports, in seconds."""
    value = status.get("uptime_s") if status else None
    return None if value is None or value < 0 else float(value)


def in_words(reason: str) -> str:
    """Return the node's reason as the user reads it; an unknown reason as it is."""
    if container := _CONTAINER.fullmatch(reason):
        return f"its container could not run its program (exit code {container[1]}); {_LOG}"
    if checkpoint := _CHECKPOINT.fullmatch(reason):
        return f"the checkpoint of run {checkpoint[1]} could not be brought from the bucket; {_LOG}"
    if match := _REQUIREMENTS.fullmatch(reason):
        return f"its --requirements could not be installed: {match[1] or 'they did not arrive'}; {_LOG}"
    if match := _INPUT.fullmatch(reason):
        return f"input {match[1]}: may its role? See `fastlaunch iam print --input URI`; {_LOG}"
    return _WORDS.get(reason, reason)

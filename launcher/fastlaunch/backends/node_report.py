"""One last word of an attempt, made of those that its nodes left. Pure.

All nodes do the same runs together, so that when one of them ends the others end in its wake: they are asked
to stop, or their training fails because a peer is gone. What the attempt came to is told by the node that had
a reason of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

#: The reason of a node that stopped because another one had asked all to.
PEER = "peer"
#: The reason of a node that was asked to stop by the launcher, or by someone through the bucket.
STOP = "stop"
#: What training exits with when it was asked to stop, on this node or another: 128 and a signal, or its own.
_STOPPED_CODES = (130, 143)


def merged(
    statuses: Mapping[int, Mapping[str, Any]], num_nodes: int, *, partial: bool = False
) -> Mapping[str, Any] | None:
    """The nodes' last words as one; None until all have spoken, or with `partial` until one has.

    statuses: by node rank. outcome and reason are of one node, and `node` says which: the one with a
    configuration that does not work, else that was interrupted for a reason of its own (EC2 took it, its
    time was up), else that failed, else that was asked to stop; with `partial` a silent one, if the others
    only stopped with it. A run is completed only if every node says so. Instance, zone and times (`boot_s`,
    `uptime_s`, ...) are those of the first node that spoke. `missing`: the ranks of nodes that said nothing.
    A single node's last word stays as it is.
    """
    known = {node: statuses[node] for node in range(num_nodes) if node in statuses}
    missing = [node for node in range(num_nodes) if node not in known]
    if not known or (missing and not partial):
        return None
    first = known[min(known)]
    if num_nodes == 1:
        return first
    teller = min(known, key=lambda node: _weight(known[node]))
    told = known[teller]
    outcome, reason = told.get("outcome"), told.get("reason")
    if missing and _weight(told) >= _STOPPED:
        teller, outcome = missing[0], "failed"
        reason = f"node {teller} ended without a last word"
    return {
        **first,
        "outcome": outcome,
        "reason": reason,
        "node": teller,
        "num_nodes": num_nodes,
        "missing": missing,
        "runs": _runs(known, missing, cut=_last_begun(told) if _weight(told) == _INTERRUPTED else None),
    }


#: What tells most of an attempt comes first.
_CONFIGURATION, _INTERRUPTED, _FAILED, _ASKED, _STOPPED, _FOLLOWED, _COMPLETED = range(7)


def _weight(status: Mapping[str, Any]) -> int:
    outcome, reason = status.get("outcome"), status.get("reason")
    if outcome == "completed":
        return _COMPLETED
    if outcome == "configuration":
        return _CONFIGURATION
    if outcome == "interrupted":
        return {STOP: _ASKED, PEER: _FOLLOWED}.get(str(reason), _INTERRUPTED)
    failures = [entry for entry in _entries(status) if entry.get("state") == "failed"]
    if all(entry.get("exit_code") in _STOPPED_CODES for entry in failures):
        # Its training was ended, or ended in good order, because a peer's was; itself it knows no reason.
        return _STOPPED
    return _FAILED


def _runs(
    known: Mapping[int, Mapping[str, Any]], missing: Sequence[int], *, cut: str | None
) -> list[dict[str, Any]]:
    """Every run that a node tells of, once, in the order of the first node's list.

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
    """What became of one run by all nodes' words; times are node 0's, exit code and `node` the teller's."""
    by_state: dict[str, list[int]] = {}
    for node, entry in entries.items():
        by_state.setdefault(_state(entry), []).append(node)
    if "failed" in by_state and not (is_cut and "interrupted" in by_state):
        state, teller = "failed", by_state["failed"][0]
    elif "failed" in by_state or "interrupted" in by_state:
        # A training that fails while another node is taken fails because of that.
        state, teller = "interrupted", (by_state.get("interrupted") or by_state["failed"])[0]
    elif set(by_state) == {"completed"}:
        state, teller = "completed" if has_all else "lost", min(entries)
    elif set(by_state) == {"not-started"}:
        state, teller = "not-started", min(entries)
    else:
        # Done on one node and never begun on another, or in no state that is known here.
        state, teller = "lost", min(entries)
    times = entries[min(entries)]
    return {**times, "state": state, "exit_code": entries[teller].get("exit_code"), "node": teller}


def _last_begun(status: Mapping[str, Any]) -> str | None:
    begun = [entry["run_id"] for entry in _entries(status) if entry.get("state") != "not-started"]
    return begun[-1] if begun else None


def _state(entry: Mapping[str, Any]) -> str:
    state = str(entry.get("state"))
    return "interrupted" if state == "failed" and entry.get("exit_code") in _STOPPED_CODES else state


def _entries(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The runs that a node tells of; what is not of their form is left out."""
    given = status.get("runs")
    entries = given if isinstance(given, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("run_id"), str)]

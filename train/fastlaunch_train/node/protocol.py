"""What a host says of itself and its runs: boot.json, ended.json, status.json, SageMaker's failure file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fastlaunch_train.node.request import Request

# Not datetime.UTC: AWS's image of PyTorch 2.1 has Python 3.10.
_UTC = timezone.utc  # noqa: UP017
#: As much as SageMaker keeps of it.
FAILURE_CHARS = 1024


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """What became of a run on this host, as in status.json; times in seconds since the first boot."""

    run_id: str
    state: str = "not-started"
    exit_code: int | None = None
    started_s: float | None = None
    ended_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of all: completed, interrupted, failed or configuration. reason: None if completed."""

    name: str
    reason: str | None = None


def now() -> str:
    """The time, as the objects of a node have it: `2026-11-21T15:30:04Z`."""
    return datetime.now(_UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def boot_name(request: Request) -> str:
    """Where the host's boot.json is on the shelf."""
    folder = request.token if request.rank == 0 else node_folder(request)
    return f"{folder}/boot.json"


def node_folder(request: Request, rank: int | None = None) -> str:
    """The folder of a host's own on the shelf, this one's if not told otherwise."""
    return f"{request.token}/node-{request.rank if rank is None else rank}"


def boot(request: Request, began_at: str) -> dict[str, Any]:
    """boot.json. There is no instance that anybody could ask for; `host` is SageMaker's name.

    Each container of a job says it anew, so that the last word of one before it is known to be old. began_at:
    when the first one booted.
    """
    return {**_who(request), "lifecycle": None, "booted_at": now(), "began_at": began_at}


def status(request: Request, outcome: Outcome, runs: Sequence[RunEnd], uptime_s: float) -> dict[str, Any]:
    """status.json, the last word."""
    return {
        **_who(request),
        "outcome": outcome.name,
        "reason": outcome.reason,
        "boot_s": None,
        "pull_s": None,
        "uptime_s": uptime_s,
        "billed_until": now(),
        "runs": [vars(run) for run in runs],
    }


def uptime_s(began_at: str) -> float:
    """Seconds since the first container of this job booted here, those between two of them included."""
    started = datetime.strptime(began_at, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=_UTC)
    return round((datetime.now(_UTC) - started).total_seconds(), 2)


def read(path: Path) -> Mapping[str, Any] | None:
    """A JSON object of a container before this one; None if there is none, or it is damaged."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def ended_before(root: Path, request: Request, run_id: str) -> RunEnd | None:
    """How a run ended in a container of this job before this one; None if it is to be done (again).

    All hosts have to say that it has: what they find is the same, so that they decide the same.
    """
    said = [
        read(root / node_folder(request, rank) / run_id / "ended.json") for rank in range(request.num_nodes)
    ]
    own = said[request.rank]
    return RunEnd(**own) if own is not None and None not in said else None


def write_failure(path: Path, text: str) -> None:
    """Write what SageMaker shows as the job's FailureReason, cause first, cut to what it keeps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text[:FAILURE_CHARS])


def _who(request: Request) -> dict[str, Any]:
    return {
        "schema": 1,
        "token": request.token,
        "node": request.rank,
        "instance_id": None,
        "host": request.hosts[request.rank],
        "instance_type": request.instance or None,
        "zone": None,
    }

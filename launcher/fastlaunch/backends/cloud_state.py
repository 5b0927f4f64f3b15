"""How an attempt on AWS stands, in the words of `Backend`: by what its nodes said last, else by AWS."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastlaunch.backends import RunState, s3_sync
from fastlaunch.backends.node_report import merged
from fastlaunch.backends.protocol import CloudBackend, Sight

_STATE_OF_OUTCOME = {
    "completed": RunState.COMPLETED,
    "failed": RunState.FAILED,
    "configuration": RunState.FAILED,
    "interrupted": RunState.INTERRUPTED,
}


def states_of(backend: CloudBackend, handles: Sequence[Mapping[str, Any]]) -> list[RunState]:
    """Running until all machines have ended; then what the nodes said last, or else what AWS says."""
    return [
        _ended_as(backend, handle, sight) if sight.has_ended else RunState.RUNNING
        for handle, sight in zip(handles, backend.see(handles), strict=True)
    ]


def sync_of(backend: CloudBackend, handle: Mapping[str, Any]) -> s3_sync.Synced:
    """What is here of the attempt's output, with what is new brought here first."""
    return s3_sync.sync(
        backend.aws,
        backend.home,
        region=handle["region"],
        output=handle["output"],
        token=handle["token"],
        num_nodes=handle.get("num_nodes", 1),
    )


def records_of(backend: CloudBackend, handle: Mapping[str, Any]) -> tuple[Path, ...]:
    """Record files of all runs of the attempt, with what is new brought here first."""
    files = backend.sync(handle).files
    return tuple(path for path in files if path.name.startswith("rank-") and path.is_file())


def _ended_as(backend: CloudBackend, handle: Mapping[str, Any], sight: Sight) -> RunState:
    synced = backend.sync(handle)
    status = synced.status or merged(synced.statuses, handle.get("num_nodes", 1), partial=True)
    if status is not None:
        return _STATE_OF_OUTCOME.get(str(status.get("outcome")), RunState.LOST)
    if sight.is_taken or (sight.told or "").startswith("Stopped"):
        return RunState.INTERRUPTED
    return RunState.FAILED if sight.problem else RunState.LOST

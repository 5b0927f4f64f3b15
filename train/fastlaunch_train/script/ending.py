"""Complete a script's records after its end with what only the process that started it knows."""

import json
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastlaunch_train.process.torchrun import FIRST_FAILED
from fastlaunch_train.records.records import (
    SCRIPT_PHASE,
    SILENT,
    UNRECORDED_PHASE,
    Device,
    End,
    Line,
    Phase,
    RecordWriter,
    complete_record,
    record_path,
)

#: Processes that find another's record in their place leave their script's name in this file, a line each.
_UNRECORDED = "unrecorded-scripts"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a script ended, seen from outside."""

    status: str  # one of the records' STATUSES
    message: str | None
    wall_s: float
    is_hang: bool = False  # whether it was ended, and what its ranks say of that is not why
    devices: Sequence[Device] = ()


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    """A rank's record so far."""

    path: Path
    header: dict[str, Any]
    end: End | None
    num_steps: int  # the last step


def complete_records(
    directory: Path,
    *,
    attempt: int,
    node: int,
    ranks: Sequence[int],
    header: Mapping[str, Any],
    ending: Ending,
    restored: Phase | None = None,
) -> None:
    """Complete the records of an attempt's ranks in `directory`; write those of ranks that left none.

    A rank without an end gets one, and an end `completed` is corrected if the script failed and no other rank
    gives a reason. `interrupted` gives no reason for a failure: the program that started the ranks asks the
    remaining ranks to stop. The first record gets the wall time and the device samples.
    ranks: number that the command started on this node. header: for a rank without a record; its rank and, if
    another rank recorded it, the world size are filled in. restored: phase before the script began.
    """
    records = _read(directory, attempt)
    script = Phase(name=SCRIPT_PHASE, seconds=ending.wall_s, step=0)
    lines: list[Line] = [*filter(None, [restored, _unrecorded(directory)]), script, *ending.devices]
    if records:
        world = {name: records[0].header[name] for name in ("world_size", "num_nodes")}
        num_local = world["world_size"] // world["num_nodes"]
        header, ranks = {**header, **world}, range(node * num_local, (node + 1) * num_local)
    first = _first_failed(directory)
    statuses = [record.end.status if record.end else None for record in records]
    no_reasons = {None, "completed", *(["interrupted"] if ending.status == "failed" else [])}
    is_told = not no_reasons.issuperset(statuses)
    # Blame a rank that was asked to stop only if there is no other.
    blamed = {"completed"} if len(records) < len(ranks) or {*statuses} != {"interrupted"} else {"interrupted"}
    for record in records:
        recorded_end, rank = record.end, record.header["rank"]
        is_blamed = recorded_end is not None and (rank in first if first else recorded_end.status in blamed)
        is_wrong = recorded_end is None or ending.is_hang or (is_blamed and not is_told)
        end = recorded_end
        if recorded_end is None or (is_wrong and ending.status != "completed"):
            end = _end(ending, rank, first)
        assert end is not None
        complete_record(
            record.path,
            lines if record is records[0] else [],
            End(
                status=end.status,
                message=end.message,
                num_steps=record.num_steps,
                peak_memory_gib=recorded_end.peak_memory_gib if recorded_end else None,
            ),
        )
    for rank in ranks:
        path = record_path(directory, rank=rank, attempt=attempt)
        if rank < header["world_size"] and not path.exists():
            writer = RecordWriter(path)
            writer.write_header({**header, "rank": rank, "script": {**header["script"], SILENT: True}})
            for line in (*([] if records or rank != ranks[0] else lines), _end(ending, rank, first)):
                writer.add(line)
            writer.flush()
            writer.close()


def how_failed(returncode: int) -> str:
    """Describe a failure by the process's exit code, not 0; a negative code is a signal."""
    if returncode > 0:
        return f"exit code {returncode}"
    name = signal.Signals(-returncode).name
    return f"killed by {name}" + (", as the kernel does when memory runs out" if name == "SIGKILL" else "")


def note_unrecorded(directory: Path, script: str) -> None:
    """Note that a process of `script` is not recorded, as another of its command is. Raises OSError."""
    with (directory / _UNRECORDED).open("a") as file:
        file.write(f"{script}\n")


def _end(ending: Ending, rank: int, first: Mapping[int, int]) -> End:
    """Return the end of a rank that recorded none. first: as `_first_failed` returns it."""
    status, message = ending.status, ending.message
    if rank in first:
        message = how_failed(first[rank])
    elif first:
        status, message = "interrupted", "stopped by a peer"
    return End(status=status, message=message, num_steps=0, peak_memory_gib=None)


def _first_failed(directory: Path) -> dict[int, int]:
    """Return the exit codes of the ranks that failed first, and forget them; empty if torchrun wrote none."""
    path = directory / FIRST_FAILED
    with suppress(OSError, ValueError):
        codes = {int(rank): int(code) for rank, code in json.loads(path.read_text()).items()}
        path.unlink()
        return codes
    return {}


def _unrecorded(directory: Path) -> Phase | None:
    """Return a phase of what `note_unrecorded` noted, and forget it."""
    path = directory / _UNRECORDED
    try:
        numbers = Counter(path.read_text(errors="replace").splitlines())
        path.unlink()
    except OSError:  # none, as a rule
        return None
    detail = ", ".join(
        f"{number} process{'es' if number > 1 else ''} of {script}" for script, number in numbers.items()
    )
    return Phase(name=UNRECORDED_PHASE, seconds=0.0, step=0, detail=detail)


def _read(directory: Path, attempt: int) -> list[_Recorded]:
    """Return the records of this machine's ranks; a rank that ended before its header left none."""
    records = []
    for path in sorted(directory.glob(f"rank-*-attempt-{attempt}.jsonl")):
        header, end, num_steps = None, None, 0
        with path.open("rb") as file, suppress(ValueError):  # half a line, left by a killed rank
            for text in file:
                line = json.loads(text)
                kind = line.pop("kind")
                if kind == "header":
                    header = line
                elif kind == "step":
                    num_steps = line["step"]
                elif kind == "end":
                    end = End(**line)
        if header is not None:
            records.append(_Recorded(path=path, header=header, end=end, num_steps=num_steps))
        elif path.stat().st_size == 0:
            path.unlink()
    return records

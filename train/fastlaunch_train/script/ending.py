"""What is added to a script's records once it has ended: what only the process that started it knows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastlaunch_train.records.records import (
    SCRIPT_PHASE,
    UNRECORDED_PHASE,
    Device,
    End,
    Line,
    Phase,
    RankRecord,
    RecordError,
    RecordWriter,
    complete_record,
    read_record,
    record_path,
)

#: Where scripts that find the record of another in their place leave their names, a line each.
_UNRECORDED = "unrecorded-scripts"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a script ended, seen from outside."""

    status: str  # one of the records' STATUSES
    message: str | None
    wall_s: float
    is_hang: bool = False  # whether it was ended, and what its ranks say of that is not why
    devices: Sequence[Device] = ()


def complete_records(
    directory: Path,
    *,
    attempt: int,
    rank: int,
    header: Mapping[str, Any],
    ending: Ending,
    restored: Phase | None = None,
) -> None:
    """Complete the records of an attempt's ranks in `directory`; write one, of `rank`, if there is none.

    A rank without an end gets one, and one that says `completed` is corrected if the script failed and no
    other rank says why. The first record gets the wall time and the device samples. restored: what was done
    before the script began.
    """
    records = _read(directory, attempt)
    script = Phase(name=SCRIPT_PHASE, seconds=ending.wall_s, step=0)
    lines: list[Line] = [*filter(None, [restored, _unrecorded(directory)]), script, *ending.devices]
    end = End(status=ending.status, message=ending.message, num_steps=0, peak_memory_gib=None)
    if not records:
        writer = RecordWriter(record_path(directory, rank=rank, attempt=attempt))
        writer.write_header(header)
        for line in (*lines, end):
            writer.add(line)
        writer.flush()
        writer.close()
        return
    is_told = any(record.end and record.end.status != "completed" for record in records)
    for record in records:
        said = record.end
        is_wrong = said is None or ending.is_hang or (said.status == "completed" and not is_told)
        own = end if said is None or (is_wrong and ending.status != "completed") else said
        complete_record(
            record.path,
            lines if record is records[0] else [],
            End(
                status=own.status,
                message=own.message,
                num_steps=record.steps[-1].step if record.steps else 0,
                peak_memory_gib=said.peak_memory_gib if said else None,
            ),
        )


def note_unrecorded(directory: Path, script: str) -> None:
    """Note that a script is not recorded, as another one of the command is. Raises OSError."""
    with (directory / _UNRECORDED).open("a") as file:
        file.write(f"{script}\n")


def _unrecorded(directory: Path) -> Phase | None:
    """Return what `note_unrecorded` noted, and forget it."""
    path = directory / _UNRECORDED
    try:
        names = dict.fromkeys(path.read_text(errors="replace").splitlines())
        path.unlink()
    except OSError:  # none, as a rule
        return None
    return Phase(name=UNRECORDED_PHASE, seconds=0.0, step=0, detail=", ".join(names))


def _read(directory: Path, attempt: int) -> list[RankRecord]:
    """Return the records of this machine's ranks; one that ended before its header leaves none."""
    records = []
    for path in sorted(directory.glob(f"rank-*-attempt-{attempt}.jsonl")):
        try:
            records.append(read_record(path))
        except RecordError:
            if path.stat().st_size == 0:
                path.unlink()
    return records

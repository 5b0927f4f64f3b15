"""Pack what a script saves in its `output` as a checkpoint, so that another machine can go on from it.

The ranks note when they save, so no half-written state is packed. If a script notes nothing, we pack its
files once it was interrupted or has failed.
"""

import json
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from fastlaunch_train.records.records import Phase

#: Subfolders of the records' folder: the script's $FASTLAUNCH_OUTPUT, and the checkpoints.
OUTPUT, CHECKPOINTS = "output", "checkpoints"
_NOTES = "checkpoint-rank-*.json"
_TARS, _NAME = "step-*.tar", "step-{:08d}.tar"
#: Bytes to leave free on the disk for the script itself.
_MIN_FREE_BYTES = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Note:
    """What a rank has saved. step: the last step whose complete state is in `output`, 0 for none."""

    step: int
    is_saving: bool = False


def write_note(records: Path, rank: int, note: Note) -> None:
    """Write a rank's note atomically. Raises OSError."""
    path = records / _NOTES.replace("*", f"{rank:05d}")
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(note)))
    partial.replace(path)


def notes(records: Path) -> tuple[Note, ...]:
    """Return all ranks' notes. Raises OSError, ValueError or TypeError for a damaged note."""
    return tuple(Note(**json.loads(path.read_bytes())) for path in sorted(records.glob(_NOTES)))


def steps_done(records: Path) -> int:
    """Return the step after which a script that starts from `output` goes on; 0 if unknown.

    records: a folder in which an earlier attempt may have run.
    """
    try:
        return min((note.step for note in notes(records)), default=0)
    except (OSError, ValueError, TypeError):
        return 0


def restore(records: Path, clock: Callable[[], float] = time.monotonic) -> Phase | None:
    """Unpack the newest checkpoint; return the phase, or None without a checkpoint.

    Raises OSError and tarfile.TarError.
    """
    newest = max((records / CHECKPOINTS).glob(_TARS), default=None)
    if newest is None:
        return None
    started = clock()
    with tarfile.open(newest) as archive:
        # The archive holds the user's own files, including links. Pythons without filters ignore this.
        archive.extraction_filter = lambda member, _: member
        archive.extractall(records)
    return Phase(name="restore", seconds=clock() - started, step=0, detail=newest.name)


class Packer:
    """Packs `output` into `checkpoints/step-<n>.tar`, beside it in `records`; the node sends that.

    n: the step of the state, or one more than the last checkpoint's. say: writes a line to the log.
    """

    def __init__(self, records: Path, say: Callable[[str], None]) -> None:
        self._records = records
        self._folder = records / CHECKPOINTS
        self._say = say
        packed = (int(path.stem.partition("-")[2]) for path in self._folder.glob(_TARS))
        self._newest = max(packed, default=-1)
        self._noted = self._read()
        self._packed = list(self._files())

    def look(self) -> None:
        """Pack what the ranks have saved since the last look."""
        notes = self._read()
        if notes != self._noted:
            self._noted = notes
            self.pack()

    def pack(self) -> None:
        """Pack `output`, unless a rank is saving or nothing has changed since the last time."""
        notes, files = self._read(), list(self._files())
        # Ranks that have not noted the same step are about to save.
        is_whole = notes is not None and len(set(notes)) <= 1 and not any(note.is_saving for note in notes)
        if notes is None or not is_whole or not files or files == self._packed:
            return
        partial = self._folder / ".partial"
        try:
            self._folder.mkdir(exist_ok=True)
            if shutil.disk_usage(self._folder).free < sum(size for _, size, _ in files) + _MIN_FREE_BYTES:
                self._say("warning: no checkpoint: the disk has no room for another copy of the saved files")
                return
            self._write(partial)
            if self._read() != notes:
                # A rank has saved again meanwhile; the next look packs that state.
                return
            number = max([self._newest + 1, *(note.step for note in notes)])
            partial.replace(self._folder / _NAME.format(number))
        except (OSError, tarfile.TarError) as error:
            self._say(f"warning: no checkpoint: {error}")
            return
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        # The node may be sending it, of which it has a link.
        (self._folder / _NAME.format(self._newest)).unlink(missing_ok=True)
        self._newest, self._packed = number, files

    def _write(self, path: Path) -> None:
        with tarfile.open(path, "w") as archive:
            for source in (*sorted(self._records.glob(_NOTES)), *self._paths()):
                with suppress(FileNotFoundError):  # the script may remove and rename its files meanwhile
                    archive.add(source, source.relative_to(self._records), recursive=False)

    def _paths(self) -> list[Path]:
        return sorted((self._records / OUTPUT).rglob("*"))

    def _files(self) -> Iterator[tuple[str, int, int]]:
        """Yield path, size and time of change of every file that the script has left."""
        for path in self._paths():
            with suppress(FileNotFoundError):
                seen = os.lstat(path)
                yield str(path), seen.st_size, seen.st_mtime_ns

    def _read(self) -> tuple[Note, ...] | None:
        try:
            return notes(self._records)
        except (OSError, ValueError, TypeError):
            return None

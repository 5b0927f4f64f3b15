"""The full traceback of a failed rank, in a file of its own beside its record.

A log mixes the last lines of all ranks, and may be cut. A crash in native code raises no exception: Python's
fault handler writes where every thread was.
"""

import faulthandler
import os
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TextIO


def traceback_path(directory: Path, *, rank: int, attempt: int) -> Path:
    """Return where a rank that fails writes its traceback; attempts count from 1."""
    return directory / f"traceback-rank-{rank:05d}-attempt-{attempt}.txt"


def leave_traceback(directory: Path, attempt: int, error: BaseException) -> None:
    """Write the traceback of a rank, torchrun's RANK, that failed before it had a record."""
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        file = TracebackFile(
            traceback_path(directory, rank=int(os.environ.get("RANK") or "0"), attempt=attempt)
        )
        file.write(error)
        file.close()


def is_first_to_fail(directory: Path, attempt: int) -> bool:
    """Return whether no other rank of this machine has called this, so that one of them prints an error."""
    try:
        os.close(os.open(directory / f".failed-attempt-{attempt}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


class TracebackFile:
    """Write what ends a rank; a rank that ends well leaves no file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None
        # A disk that takes no file takes no record either, and that is reported.
        with suppress(OSError):
            self._file = path.open("w", encoding="utf-8", errors="replace")
            faulthandler.enable(file=self._file, all_threads=True)

    def write(self, error: BaseException) -> None:
        """Write the error's traceback and its causes'."""
        if self._file is not None:
            with suppress(OSError):
                self._file.writelines(traceback.format_exception(type(error), error, error.__traceback__))
                self._file.flush()
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, remove it if it is empty, and have the fault handler write to stderr."""
        if self._file is None:
            return
        faulthandler.enable(all_threads=True)
        self._file.close()
        self._file = None
        with suppress(OSError):
            if self.path.stat().st_size == 0:
                self.path.unlink()

"""How a run ended: the status in its record, the exit code of the process, the traceback of a failed rank.

A traceback gets its own file beside the record, since a log mixes the last lines of all ranks, and may be
cut. A crash in native code raises no exception: Python's fault handler writes every thread's position.
"""

import errno
import faulthandler
import os
import sys
import textwrap
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

#: Exit codes by the record's status.
EXIT_CODES = {"completed": 0, "interrupted": 130, "out_of_memory": 12, "nan_loss": 33, "failed": 1}
EXIT_BAD_REQUEST = 2
EXIT_DISK_FULL = 28
#: The machines cannot run this, and a second attempt would change nothing; EX_CONFIG of sysexits.h.
EXIT_CONFIGURATION = 78
#: A GPU of this machine is faulty; another machine can run this.
EXIT_HARDWARE = 79
#: A script made no step for too long; the code of timeout(1).
EXIT_HANG = 124

_OUT_OF_MEMORY = (
    *("DefaultCPUAllocator", "CUDA out of memory", "CUDA error: out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)
#: torch.save's own messages for a failed write.
_UNWRITTEN = ("PytorchStreamWriter failed writing", "enforce fail at inline_container")
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


class NanLossError(RuntimeError):
    """The loss, or the weights or optimizer state after a step, were not finite."""


class UnsavedError(OSError):
    """A checkpoint could not be written; earlier ones are intact."""


class InterruptedRun(Exception):
    """The run was asked to stop, and stopped between two steps."""


class FabricError(RuntimeError):
    """The ranks do not use the required network; `hint` says what to check."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class HardwareError(RuntimeError):
    """A GPU of this machine is faulty."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What an error means for the record and the process."""

    status: str  #: status in the record
    message: str  #: one line
    exit_code: int


def classify(error: BaseException) -> Failure:
    """Return what `error` means; an unknown one is `failed`."""
    message = f"{type(error).__name__}: {_first_line(error)}"
    status = "failed"
    code = EXIT_CODES["failed"]
    if isinstance(error, InterruptedRun):
        status, message = "interrupted", _first_line(error)
    elif isinstance(error, NanLossError):
        status, message = "nan_loss", _first_line(error)
    elif isinstance(error, FabricError):
        message, code = error.message, EXIT_CONFIGURATION
    elif isinstance(error, HardwareError):
        message, code = str(error), EXIT_HARDWARE
    elif is_out_of_memory(error):
        status = "out_of_memory"
    elif is_disk_full(error):
        code = EXIT_DISK_FULL
    return Failure(
        status=status, message=message, exit_code=code if status == "failed" else EXIT_CODES[status]
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that the device or the host is out of memory."""
    # Do not import torch: torchrun reads the exit codes before it does, and a script may run without torch.
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.cuda.OutOfMemoryError)):
        return True
    # The CPU allocator, and libraries with their own allocator, raise a plain RuntimeError.
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def unsaved(error: OSError | RuntimeError, path: Path) -> UnsavedError | None:
    """Return `error`, which ended the writing of `path`, as an UnsavedError; None if it is not the disk's.

    torch.save raises its own error, about the length of the file, after the system's error.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return UnsavedError(cause.errno, cause.strerror or str(cause), str(path))
        cause = cause.__cause__ or cause.__context__
    return UnsavedError(errno.EIO, _first_line(error), str(path)) if is_disk_full(error) else None


def is_disk_full(error: BaseException) -> bool:
    """Return whether `error` says that the disk is full or read-only."""
    if isinstance(error, OSError):
        return isinstance(error, UnsavedError) or error.errno in _DISK_FULL
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _UNWRITTEN)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return textwrap.shorten(lines[0], 240, placeholder=" ...") if lines else type(error).__name__


def traceback_path(directory: Path, *, rank: int, attempt: int) -> Path:
    """Return the path of a failed rank's traceback; attempts count from 1."""
    return directory / f"traceback-rank-{rank:05d}-attempt-{attempt}.txt"


def leave_traceback(directory: Path, attempt: int, error: BaseException) -> None:
    """Write the traceback of this rank, torchrun's RANK, which failed before it had a record."""
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
    """Write the error that ends a rank; a rank that ends well leaves no file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None
        # A disk that refuses this file refuses the record, too, and that is reported.
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

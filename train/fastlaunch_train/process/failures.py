"""What ended a run, as the status in its record and the exit code of the process."""

import errno
import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch

from fastlaunch_train.exit_codes import EXIT_CODES, EXIT_CONFIGURATION, EXIT_DISK_FULL

_OUT_OF_MEMORY = (
    *("DefaultCPUAllocator", "CUDA out of memory", "CUDA error: out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)

_UNWRITTEN = ("PytorchStreamWriter failed writing", "enforce fail at inline_container")

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


class NanLossError(RuntimeError):
    """The loss, or what a step left of weights and optimizer, was not finite."""


class UnsavedError(OSError):
    """A checkpoint could not be written; what was there before still is."""


class InterruptedRun(Exception):
    """The run was asked to stop, and has stopped between two steps."""


class FabricError(RuntimeError):
    """The ranks do not talk to each other over the network that they have to use. hint: what to check."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True, kw_only=True)
class Failure:
    """status: one of the record's. message: one line. exit_code: of the process."""

    status: str
    message: str
    exit_code: int


def classify(error: BaseException) -> Failure:
    """The Failure that `error` stands for; anything not known is `failed`."""
    message = f"{type(error).__name__}: {_first_line(error)}"
    status = "failed"
    code = EXIT_CODES["failed"]
    if isinstance(error, InterruptedRun):
        status, message = "interrupted", _first_line(error)
    elif isinstance(error, NanLossError):
        status, message = "nan_loss", _first_line(error)
    elif isinstance(error, FabricError):
        message, code = error.message, EXIT_CONFIGURATION
    elif is_out_of_memory(error):
        status = "out_of_memory"
    elif is_disk_full(error):
        code = EXIT_DISK_FULL
    return Failure(
        status=status, message=message, exit_code=code if status == "failed" else EXIT_CODES[status]
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that the device or the host has no memory left."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    # The CPU allocator, and libraries that allocate by themselves, raise a plain RuntimeError.
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def unsaved(error: OSError | RuntimeError, path: Path) -> UnsavedError | None:
    """What `error`, which ended the writing of `path`, is as an UnsavedError; None if the disk is not it.

    torch.save ends with an error of its own, that its file has another length than it should, where the
    system's was raised before.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return UnsavedError(cause.errno, cause.strerror or str(cause), str(path))
        cause = cause.__cause__ or cause.__context__
    return UnsavedError(errno.EIO, _first_line(error), str(path)) if is_disk_full(error) else None


def is_disk_full(error: BaseException) -> bool:
    """Whether `error` says that the disk is full or may not be written."""
    if isinstance(error, OSError):
        return isinstance(error, UnsavedError) or error.errno in _DISK_FULL
    # torch.save reports a failed write by its own writer's words.
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _UNWRITTEN)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return textwrap.shorten(lines[0], 240, placeholder=" ...") if lines else type(error).__name__

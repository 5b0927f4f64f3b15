"""What ended a run, told apart."""

import errno
from pathlib import Path

import pytest
import torch

from fastlaunch_train.process.failures import (
    FabricError,
    HardwareError,
    InterruptedRun,
    NanLossError,
    UnsavedError,
    classify,
    unsaved,
)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InterruptedRun("stopped by SIGTERM"), "interrupted", 130),
        (NanLossError("the loss was not finite"), "nan_loss", 33),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "out_of_memory", 12),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out_of_memory", 12),
        (OSError(errno.ENOSPC, "No space left on device"), "failed", 28),
        (RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed"), "failed", 28),
        (UnsavedError(errno.EACCES, "Permission denied"), "failed", 28),
        (ValueError("anything else"), "failed", 1),
        (FabricError("NCCL on node 1 selected NET/Socket", "check the security group"), "failed", 78),
        (HardwareError("GPUs slow themselves down under load: hw_slowdown=3"), "failed", 79),
    ],
)
def test_an_error_has_its_status_and_exit_code(error: BaseException, status: str, code: int) -> None:
    failure = classify(error)
    assert (failure.status, failure.exit_code) == (status, code)
    assert failure.message
    assert "\n" not in failure.message


def test_a_real_allocation_failure_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**58)
    assert classify(raised.value).status == "out_of_memory"


def test_an_error_of_the_device_while_saving_is_none_of_the_disks() -> None:
    assert unsaved(RuntimeError("CUDA error: device-side assert triggered"), Path("a.pt")) is None
    error = unsaved(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos"), Path("a.pt"))
    assert error is not None and error.filename == "a.pt"

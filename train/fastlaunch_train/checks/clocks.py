"""Check that a machine's GPUs keep their clocks under a few seconds of matrix products before the steps.

nvidia-smi's XML says why a clock is lowered: `clocks_event_reason_...`, or `clocks_throttle_reason_...`
before driver 535, is `Active` or `Not Active`.
"""

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from fastlaunch_train.distributed.parallel import Process
from fastlaunch_train.process.device import nvidia_smi
from fastlaunch_train.process.failures import HardwareError

#: Seconds of load: enough to warm up, and for nvidia-smi to answer three times for eight GPUs.
LOAD_S = 6.0
WARM_UP_S = 2.0
NUM_LOOKS = 3
PAUSE_S = 0.5
#: Rows of the square matrices, by device; only tests use a CPU.
SIZE = {"cuda": 8192, "cpu": 64}
#: Reasons that mean a fault in the GPU, its power supply or its cooling.
_FAULTS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
#: Reasons that are only reported: large products normally reach the power cap.
_NOTES = ("sw_power_cap", "sw_thermal_slowdown", "gpu_idle")
_ACTIVE = re.compile(r"<clocks_(?:event|throttle)_reason_(\w+)>\s*Active\s*<")


def check_clocks_under_load(
    process: Process, *, load_s: float = LOAD_S, look: Callable[[], str] | None = None
) -> str:
    """Load this rank's GPU; return the detail of the phase `gpu-clocks`: which GPUs run slower, and why.

    The first rank of a machine checks all of its GPUs. Raises HardwareError there if every report shows a
    hardware slowdown; a sudden load may cause a short one.
    look: returns the output of `nvidia-smi -q -x`, or nothing if that fails; the machine's agent judges such
    a failure.
    """
    with ThreadPoolExecutor(1) as pool:
        ask = look or partial(nvidia_smi, "-q", "-x")
        looks = pool.submit(_looks, ask, load_s) if process.local_rank == 0 else None
        _load(process.device, load_s)
        reports = looks.result() if looks else []
    lasting = lasting_reasons(reports)
    faults = {reason: gpus for reason, gpus in lasting.items() if reason in _FAULTS}
    if faults:
        raise HardwareError(f"GPUs slow themselves down under load: {_in_words(faults)}")
    return _in_words({reason: gpus for reason, gpus in lasting.items() if reason in _NOTES}) or "clocks=free"


def lasting_reasons(reports: Sequence[str]) -> dict[str, list[int]]:
    """Return the reasons that all reports give for a GPU, with the indices of those GPUs."""
    reasons_by_report = [
        {
            (reason, gpu)
            for gpu, part in enumerate(report.split("<gpu ")[1:])
            for reason in _ACTIVE.findall(part)
        }
        for report in reports
    ]
    lasting: dict[str, list[int]] = {}
    for reason, gpu in sorted(set.intersection(*reasons_by_report)) if reasons_by_report else ():
        lasting.setdefault(reason, []).append(gpu)
    return lasting


def _in_words(reasons: dict[str, list[int]]) -> str:
    """Return `hw_slowdown=0,3 sw_power_cap=1`."""
    return " ".join(f"{reason}={','.join(map(str, gpus))}" for reason, gpus in reasons.items())


def _looks(look: Callable[[], str], load_s: float) -> list[str]:
    scale = load_s / LOAD_S
    time.sleep(WARM_UP_S * scale)
    reports = []
    for _ in range(NUM_LOOKS):
        reports.append(look())
        time.sleep(PAUSE_S * scale)
    return reports


def _load(device: torch.device, seconds: float) -> None:
    size = SIZE[device.type]
    # Do not use the global generator, from which the model's weights are drawn.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator, device=device).half() for _ in range(2))
    product = torch.empty_like(left)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(16):
            torch.mm(left, right, out=product)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    del left, right, product
    if device.type == "cuda":
        # Leave no trace in the memory statistics of the training.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)

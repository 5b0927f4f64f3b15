"""Read a GPU's state through NVML while it trains and nvidia-smi otherwise, and a device's memory.

torch is imported only for a GPU.
"""

import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Seconds. NVML's utilization covers the last 1/6 to 1 s, depending on the GPU (nvmlUtilization_t).
SAMPLED_S = 1.0


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """A device's state; None: unknown."""

    clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    utilization: float | None = None  #: share of a sample, at most SAMPLED_S, in which a kernel ran


class DeviceMonitor:
    """Samples a GPU's state through NVML every SAMPLED_S in a thread, so that no step waits for the driver.

    Without NVML's Python binding, or on a CPU, nothing is known. nvml: replaces pynvml, without the thread.
    """

    def __init__(
        self, device: "torch.device | None", *, nvml: Any = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml, self._handle = nvml, None
        self._clock = clock
        self._lock = threading.Lock()
        self._samples: list[DeviceState] = []  # since the last read
        self._last = DeviceState()
        self._resumed_at = -math.inf
        if nvml is not None or device is None or device.type != "cuda":
            return
        try:
            import pynvml
            import torch

            pynvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml = pynvml
        except Exception:  # Training goes on without NVML, whatever is wrong with it.
            return
        threading.Thread(target=self._keep_sampling, name="fastlaunch-nvml", daemon=True).start()

    def resume(self) -> None:
        """Note that steps go on after a pause: what was sampled so far, or reaches back, is not theirs."""
        with self._lock:
            self._samples, self._resumed_at = [], self._clock()

    def read(self) -> DeviceState:
        """Return the means since the last call; without a sample the last state, its utilization unknown."""
        with self._lock:
            samples, self._samples = self._samples, []
        if not samples:
            return replace(self._last, utilization=None)
        return DeviceState(**{field.name: _mean(samples, field.name) for field in fields(DeviceState)})

    def sample(self) -> None:
        """Ask the driver now; a state that it does not tell is unknown."""
        state = DeviceState(
            clock_mhz=self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            power_w=self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
            temperature_c=self._ask(
                lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
            ),
            # Not known for a part of a GPU (MIG).
            utilization=self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100),
        )
        with self._lock:
            if self._clock() - self._resumed_at < SAMPLED_S:
                state = replace(state, utilization=None)
            self._last = state
            self._samples.append(state)

    def _ask(self, question: Callable[[Any, Any], float]) -> float | None:
        try:
            return question(self._nvml, self._handle)
        except Exception:
            return None

    def _keep_sampling(self) -> None:
        while True:
            self.sample()
            time.sleep(SAMPLED_S)


def _mean(samples: Sequence[DeviceState], name: str) -> float | None:
    values = [value for sample in samples if (value := getattr(sample, name)) is not None]
    return round(fmean(values), 3) if values else None


def memory_gib(device: "torch.device | None") -> tuple[float | None, float | None]:
    """Return (held by the allocator now, peak use) of the device, None for a CPU; the first is None there."""
    if device is not None and device.type == "cuda":
        import torch

        return (
            round(torch.cuda.memory_reserved(device) / 2**30, 3),
            round(torch.cuda.max_memory_allocated(device) / 2**30, 3),
        )
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None, None
    peak_kib = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), None)
    return None, round(peak_kib / 2**20, 3) if peak_kib else None


def nvidia_smi(*arguments: str) -> str:
    """Return the output of nvidia-smi; nothing without an NVIDIA driver, or if it fails."""
    try:
        return subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def visible_gpus() -> list[str]:
    """Return nvidia-smi's option to select the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [f"--id={visible}"] if visible else []


def gpu_facts(*options: str) -> dict[str, Any]:
    """Return the GPU fields of a header's `machine`, from the first GPU; empty without a GPU.

    options: options of nvidia-smi, such as those from `visible_gpus`.
    """
    fields = ("name", "memory.total", "driver_version", "power.limit", "clocks.max.sm")
    query = (f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", *options)
    gpus = [[cell.strip() for cell in line.split(",")] for line in nvidia_smi(*query).splitlines()]
    if not gpus or len(gpus[0]) != len(fields):
        return {}
    name, memory_mib, driver, power_limit_w, max_clock_mhz = gpus[0]
    mib = number_or_none(memory_mib)
    return {
        "device_type": "cuda",
        "device_name": name,
        "num_devices": len(gpus),
        "memory_gib": None if mib is None else round(mib / 1024, 2),
        "driver": driver,
        "power_limit_w": number_or_none(power_limit_w),
        "max_clock_mhz": number_or_none(max_clock_mhz),
    }


def number_or_none(text: str) -> float | None:
    """Return the number; None for another text, such as [N/A] or [Not Supported]."""
    try:
        return float(text)
    except ValueError:
        return None

"""Read a GPU's state through NVML while it trains and nvidia-smi otherwise, and a device's memory.

torch is imported only for a GPU.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
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
    utilization: float | None = None  #: share of NVML's last sample, at most SAMPLED_S, in which a kernel ran


class DeviceMonitor:
    """Read a device's state through NVML, if its Python binding is installed."""

    def __init__(self, device: "torch.device | None") -> None:
        self._nvml: Any = None
        self._handle: Any = None
        if device is None or device.type != "cuda":
            return
        try:
            import pynvml
            import torch

            pynvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml = pynvml
        except Exception:  # Training goes on without NVML, whatever is wrong with it.
            self._nvml = None

    def read(self) -> DeviceState:
        """Return the device's state now; all None without NVML."""
        if self._nvml is None:
            return DeviceState()
        try:
            return DeviceState(
                clock_mhz=self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM),
                power_w=self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000,
                temperature_c=self._nvml.nvmlDeviceGetTemperature(
                    self._handle, self._nvml.NVML_TEMPERATURE_GPU
                ),
                utilization=self._utilization(),
            )
        except Exception:
            return DeviceState()

    def _utilization(self) -> float | None:
        try:
            percent: int = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
        except Exception:  # Not known of a part of a GPU (MIG); the rest is.
            return None
        return percent / 100


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

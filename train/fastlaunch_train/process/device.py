"""What a run ran on and with, for its header: machine, device, driver, versions, as they really are."""

import hashlib
import importlib.metadata
import os
import platform
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fastlaunch_train

#: Packages whose version can change a step time or a loss.
_PACKAGES = (
    *("timm", "torchvision", "transformer_engine", "torchao", "triton", "transformers", "deepspeed"),
    *("accelerate", "lightning", "onnxruntime-training", "onnxruntime-training-cpu", "torch-ort"),
)


def machine(device: torch.device) -> dict[str, Any]:
    """The header's `machine`. Memory in GiB, power in W; None for what cannot be learnt."""
    facts: dict[str, Any] = {
        "host_id": host_id(),
        "device_type": device.type,
        "device_name": _cpu_name(),
        "num_devices": 1,
        "memory_gib": _host_memory_gib(),
        "num_cpus": os.cpu_count(),
        "driver": None,
        # What run_train.sh decided: `driver`, or `compat 580.65.06` for the image's newer libcuda.
        "cuda_compat": os.environ.get("FASTLAUNCH_CUDA_COMPAT") or None,
        # Of whom it was rented, where that is not EC2: `sagemaker` has prices of its own.
        "service": os.environ.get("FASTLAUNCH_SERVICE") or None,
        "power_limit_w": None,
        "max_clock_mhz": None,
        "compute_capability": None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["device_name"] = properties.name
        facts["num_devices"] = torch.cuda.device_count()
        facts["memory_gib"] = round(properties.total_memory / 2**30, 2)
        facts["compute_capability"] = f"{properties.major}.{properties.minor}"
        facts |= _nvidia_smi()
    return facts


def host_id() -> str:
    """Twelve hex digits that name this machine until it reboots; the same in all its containers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    return hashlib.sha256(boot.encode()).hexdigest()[:12]


def versions(cudnn: tuple[int, ...] | None) -> dict[str, str | None]:
    """The header's `versions`; `cudnn` is the one really loaded, where that is known."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "fastlaunch_train": fastlaunch_train.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": ".".join(map(str, cudnn)) if cudnn else None,
        "nccl": _nccl_version(),
    }
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


#: NVML's utilization is of the last sixth of a second to a second, by kind of GPU (nvmlUtilization_t).
SAMPLED_S = 1.0


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """Clock in MHz, power in W, temperature in degrees Celsius; None where not known.

    utilization: the share of NVML's last sample, SAMPLED_S at most, in which a kernel ran.
    """

    clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    utilization: float | None = None


class DeviceMonitor:
    """Reads the device's state once a block, through NVML where its Python binding is installed."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        if device.type != "cuda":
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml = pynvml
        except Exception:  # NVML is a courtesy: whatever is wrong with it, training goes on without.
            self._nvml = None

    def read(self) -> DeviceState:
        """The device's state now; all None without NVML."""
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
        except Exception:  # Not of a part of a GPU (MIG), of which the rest is known.
            return None
        return percent / 100


def memory_gib(device: torch.device) -> tuple[float | None, float | None]:
    """(held by the allocator now, most ever used) on the device, in GiB; None on a CPU for the first."""
    if device.type == "cuda":
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


def _nccl_version() -> str | None:
    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _nvidia_smi() -> dict[str, Any]:
    query = "driver_version,power.limit,clocks.max.sm"
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    cells = [cell.strip() for cell in answer[0].split(",")] if answer else []
    if len(cells) != 3:
        return {}
    return {"driver": cells[0], "power_limit_w": _number(cells[1]), "max_clock_mhz": _number(cells[2])}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _host_memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 2)
    except (ValueError, OSError):
        return None

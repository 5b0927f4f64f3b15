"""The machine and the software on it, as a record's header says them. torch is used where it is loaded."""

import hashlib
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Packages whose version can change a step time or a loss.
_PACKAGES = (
    *("timm", "torchvision", "transformer_engine", "torchao", "triton", "transformers", "deepspeed"),
    *("accelerate", "lightning", "onnxruntime-training", "onnxruntime-training-cpu", "torch-ort"),
)


def machine(device: "torch.device | None") -> dict[str, Any]:
    """Return the header's `machine`, with None for what cannot be learnt.

    device: None for a CPU, without torch.
    """
    facts: dict[str, Any] = {
        "host_id": host_id(),
        "device_type": device.type if device is not None else "cpu",
        "device_name": _cpu_name(),
        "num_devices": 1,
        "memory_gib": _host_memory_gib(),
        "num_cpus": os.cpu_count(),
        "driver": None,
        # As run_train.sh decided: `driver`, or `compat 580.65.06` for the image's newer libcuda.
        "cuda_compat": os.environ.get("FASTLAUNCH_CUDA_COMPAT") or None,
        # That rents it out, if not EC2: `sagemaker` has prices of its own.
        "service": os.environ.get("FASTLAUNCH_SERVICE") or None,
        "power_limit_w": None,
        "max_clock_mhz": None,
        "compute_capability": None,
    }
    if device is not None and device.type == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(device)
        facts["device_name"] = properties.name
        facts["num_devices"] = torch.cuda.device_count()
        facts["memory_gib"] = round(properties.total_memory / 2**30, 2)
        facts["compute_capability"] = f"{properties.major}.{properties.minor}"
        facts |= _nvidia_smi()
    return facts


def host_id() -> str:
    """Return twelve hex digits that name this machine until it reboots, the same in all its containers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    return hashlib.sha256(boot.encode()).hexdigest()[:12]


def versions(cudnn: tuple[int, ...] | None) -> dict[str, str | None]:
    """Return the header's `versions`; `cudnn`: the release that is loaded, if known.

    For a torch that is not loaded it is the release installed, and nothing is said of its libraries.
    """
    torch = sys.modules.get("torch")
    releases: dict[str, str | None] = {
        "python": platform.python_version(),
        # Not imported: the package itself exports what imports this.
        "fastlaunch_train": sys.modules["fastlaunch_train"].__version__,
        "torch": torch.__version__ if torch else _installed("torch"),
        "cuda": torch.version.cuda if torch else None,
        "cudnn": ".".join(map(str, cudnn)) if cudnn else None,
        "nccl": _nccl_version() if torch else None,
    }
    return releases | {package: _installed(package) for package in _PACKAGES}


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nccl_version() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _nvidia_smi() -> dict[str, Any]:
    gpus = ask_nvidia_smi("driver_version", "power.limit", "clocks.max.sm")
    if not gpus:
        return {}
    driver, power_limit_w, max_clock_mhz = gpus[0]
    return {
        "driver": driver,
        "power_limit_w": number_or_none(power_limit_w),
        "max_clock_mhz": number_or_none(max_clock_mhz),
    }


def ask_nvidia_smi(*fields: str, options: Sequence[str] = ()) -> list[list[str]]:
    """Return what nvidia-smi says of these fields, a list for each GPU; empty without an NVIDIA driver."""
    try:
        lines = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", *options],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = [[cell.strip() for cell in line.split(",")] for line in lines]
    return gpus if gpus and len(gpus[0]) == len(fields) else []


def number_or_none(text: str) -> float | None:
    """Return the number; None for another text, such as [N/A] or [Not Supported]."""
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

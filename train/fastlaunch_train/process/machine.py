"""Describe the machine and its software for a record's header, and share out its cores.

torch is used only if it is loaded.
"""

import hashlib
import importlib.metadata
import multiprocessing
import os
import platform
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlaunch_train.process.device import gpu_facts

if TYPE_CHECKING:
    import torch

#: Packages whose version can change a step time or a loss.
_PACKAGES = (
    *("timm", "torchvision", "transformer_engine", "torchao", "triton", "transformers", "deepspeed"),
    *("accelerate", "lightning", "onnxruntime-training", "onnxruntime-training-cpu", "torch-ort"),
)


def machine(device: "torch.device | None") -> dict[str, Any]:
    """Return the header's `machine`, with None for unknown values.

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
        # run_train.sh decides this: `driver`, or `compat 580.65.06` for the image's newer libcuda.
        "cuda_compat": os.environ.get("FASTLAUNCH_CUDA_COMPAT") or None,
        # The service that rents the machine out, if not EC2: `sagemaker` has its own prices.
        "service": os.environ.get("FASTLAUNCH_SERVICE") or None,
        "power_limit_w": None,
        "max_clock_mhz": None,
        "compute_capability": None,
    }
    if device is not None and device.type == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(device)
        facts |= gpu_facts()
        facts["device_name"] = properties.name
        facts["num_devices"] = torch.cuda.device_count()
        facts["memory_gib"] = round(properties.total_memory / 2**30, 2)
        facts["compute_capability"] = f"{properties.major}.{properties.minor}"
    return facts


def host_id() -> str:
    """Return twelve hex digits that identify this machine until it reboots, equal in all containers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    return hashlib.sha256(boot.encode()).hexdigest()[:12]


def versions(cudnn: tuple[int, ...] | None) -> dict[str, str | None]:
    """Return the header's `versions`. cudnn: the loaded release, if known.

    If torch is not loaded, give its installed release, and no versions of its libraries.
    """
    torch = sys.modules.get("torch")
    releases: dict[str, str | None] = {
        "python": platform.python_version(),
        # Do not import the package: it exports modules that import this one.
        "fastlaunch_train": sys.modules["fastlaunch_train"].__version__,
        "torch": torch.__version__ if torch else _installed("torch"),
        "cuda": torch.version.cuda if torch else None,
        "cudnn": ".".join(map(str, cudnn)) if cudnn else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version()))
        if torch and torch.cuda.is_available()
        else None,
    }
    return releases | {package: _installed(package) for package in _PACKAGES}


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
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


#: The value of the FP8 experiment of November 2023.
MAX_WORKERS = 12


def limit_cpu_threads(device: "torch.device", environ: Mapping[str, str] = os.environ) -> None:
    """Run this process's CPU operators on one core if `device` is a GPU, unless OMP_NUM_THREADS is set.

    Between two steps the CPU only has to make the next batch, and some operators wake a thread on every core:
    beside an H200, making and looking up 4,096 tokens took 5 to 15 ms of a 30 ms step on 64 cores, and 0.5 ms
    on one (2026-11-22). torchrun itself sets one core for several ranks.
    """
    if device.type == "cuda" and "OMP_NUM_THREADS" not in environ:
        import torch

        torch.set_num_threads(1)


def default_num_workers(environ: Mapping[str, str] = os.environ) -> int:
    """Return the default number of loader processes for this rank: one per core, up to MAX_WORKERS.

    The ranks on this machine, torchrun's LOCAL_WORLD_SIZE, share its cores.
    """
    ranks = max(1, int(environ.get("LOCAL_WORLD_SIZE", "1")))
    return min(MAX_WORKERS, max(1, len(os.sched_getaffinity(0)) // ranks))


def num_data_workers() -> int:
    """Count the processes that load data for this rank now. Call it after the first batch was fetched.

    A user's workload may start fewer than it was asked for, so count them.
    """
    # torch's loaders start daemons; pools for other work do not.
    return sum(child.daemon for child in multiprocessing.active_children())

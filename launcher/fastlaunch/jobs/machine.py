"""Look at this machine without importing torch."""

import importlib.util
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fastlaunch.catalog.prices import Catalogue
from fastlaunch_train.recipes.requirements import EXTRAS, Capabilities, Version, parse_version

#: What has to be importable beside torch, by the module of the workload. The extra `train` installs it.
_NEEDED_BY = {"vit": ("timm",), "causal_lm": ("transformers",), "sentiment": ("transformers",)}
#: GPUs that AWS rents out (P3, G4dn, G5g) and the catalogue leaves out, by how nvidia-smi's name begins:
#: compute capabilities of Volta and Turing, by NVIDIA's CUDA programming guide.
_OLD_GPUS = {"Tesla V100": (7, 0), "Tesla T4": (7, 5), "NVIDIA T4G": (7, 5)}
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The GPUs and cores that a job may use, and the packages that it finds."""

    #: Model names of the GPUs.
    devices: tuple[str, ...]
    num_cores: int
    #: Installed packages, of those that a workload or a recipe may need.
    modules: frozenset[str]

    def missing(self, workload_modules: Iterable[str] = ()) -> tuple[str, ...]:
        """Return what training needs and is not installed. workload_modules: as WorkloadInfo has them."""
        return tuple(name for name in needed_modules(workload_modules) if name not in self.modules)

    @property
    def description(self) -> str:
        """`2 x NVIDIA H200`, or `CPU with 2 cores`."""
        if not self.devices:
            return f"CPU with {self.num_cores} core{'s' if self.num_cores > 1 else ''}"
        names = dict.fromkeys(self.devices)
        return " and ".join(f"{self.devices.count(name)} x {name}" for name in names)

    def capabilities(self, catalogue: Catalogue | None) -> tuple[Capabilities, ...]:
        """Return what decides which recipes run, for every kind of GPU; without a GPU, for the CPU.

        We assume that a GPU that neither the catalogue nor we know runs everything.
        """

        def version_of(package: str) -> Version | None:
            # `missing` looks for torch.
            return () if package == "torch" or package in self.modules else None

        if not self.devices:
            return (Capabilities(compute_capability=None, version_of=version_of),)
        return tuple(
            Capabilities(compute_capability=_capability(name, catalogue), gpu=name, version_of=version_of)
            for name in dict.fromkeys(self.devices)
        )


def this_machine(environ: Mapping[str, str] | None = None) -> Machine:
    """Return the machine that this process runs on, as the jobs that it starts will see it."""
    environ = os.environ if environ is None else environ
    modules = {*needed_modules(_NEEDED_BY), *EXTRAS}
    return Machine(
        devices=visible_devices(_list_devices(_NVIDIA_SMI), environ.get("CUDA_VISIBLE_DEVICES")),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        modules=frozenset(name for name in modules if importlib.util.find_spec(name) is not None),
    )


def needed_modules(workload_modules: Iterable[str]) -> tuple[str, ...]:
    """Return what has to be importable to train these workloads, each once, torch first."""
    needed = [name for module in workload_modules for name in _NEEDED_BY.get(module.rpartition(".")[2], ())]
    return tuple(dict.fromkeys(["torch", *needed]))


def visible_devices(listing: str, cuda_visible_devices: str | None) -> tuple[str, ...]:
    """Return the names of the GPUs in nvidia-smi's `index, uuid, name` lines that CUDA would show a process.

    As in CUDA, the order of the variable counts, and nothing is shown after the first entry without a GPU.
    """
    rows = [
        tuple(part.strip() for part in line.split(",", 2)) for line in listing.splitlines() if line.strip()
    ]
    rows = [row for row in rows if len(row) == 3 and row[0].isdecimal()]
    if cuda_visible_devices is None:
        return tuple(name for _, _, name in rows)
    names = []
    for entry in (part.strip() for part in cuda_visible_devices.split(",")):
        # The listing lacks names of slices (MIG). Any GPU's name is the nearest.
        is_slice = entry.startswith("MIG-")
        fitting = [
            name
            for index, uuid, name in rows
            if index == entry or is_slice or (entry.startswith("GPU-") and uuid.startswith(entry))
        ]
        if not fitting:
            break
        names.append(fitting[0])
    return tuple(names)


def _capability(device: str, catalogue: Catalogue | None) -> Version:
    accelerator = catalogue.accelerator_of_device(device) if catalogue else None
    if accelerator is not None:
        return parse_version(accelerator.compute_capability or "")
    return next((version for start, version in _OLD_GPUS.items() if device.startswith(start)), ())


def _list_devices(command: Sequence[str]) -> str:
    try:
        listed = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return listed.stdout if listed.returncode == 0 else ""

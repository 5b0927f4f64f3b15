"""What this machine is, found without importing torch."""

import importlib.util
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

#: What training needs to be importable, by the module of its workload, beside torch; `fastlaunch[train]`
#: installs all of it.
_NEEDED_BY = {"vit": ("timm",), "causal_lm": ("transformers",), "sentiment": ("transformers",)}
#: What some recipes need beside it.
_RECIPE_MODULES = ("transformer_engine", "torchao", "deepspeed", "lightning", "torch_ort")
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """devices: model names of the GPUs that a job may use. modules: what is installed of what matters."""

    devices: tuple[str, ...]
    num_cores: int
    modules: frozenset[str]

    def missing(self, workload_modules: Iterable[str] = ()) -> tuple[str, ...]:
        """What training needs and is not installed. workload_modules: as WorkloadInfo has them."""
        return tuple(name for name in needed_modules(workload_modules) if name not in self.modules)

    @property
    def description(self) -> str:
        """`2 x NVIDIA H200`, or `CPU with 2 cores`."""
        if not self.devices:
            return f"CPU with {self.num_cores} core{'s' if self.num_cores > 1 else ''}"
        names = dict.fromkeys(self.devices)
        return " and ".join(f"{self.devices.count(name)} x {name}" for name in names)


def this_machine(environ: Mapping[str, str] | None = None) -> Machine:
    """The machine that this process runs on, as the jobs it starts will see it."""
    environ = os.environ if environ is None else environ
    wanted = (*needed_modules(_NEEDED_BY), *_RECIPE_MODULES)
    return Machine(
        devices=visible_devices(_list_devices(_NVIDIA_SMI), environ.get("CUDA_VISIBLE_DEVICES")),
        num_cores=_num_cores(),
        modules=frozenset(name for name in wanted if importlib.util.find_spec(name) is not None),
    )


def needed_modules(workload_modules: Iterable[str]) -> tuple[str, ...]:
    """What has to be importable to train these workloads, each once, torch first."""
    needed = [name for module in workload_modules for name in _NEEDED_BY.get(module.rpartition(".")[2], ())]
    return tuple(dict.fromkeys(["torch", *needed]))


def visible_devices(listing: str, cuda_visible_devices: str | None) -> tuple[str, ...]:
    """Model names of the GPUs in nvidia-smi's `index, uuid, name` lines that CUDA would show a process.

    As CUDA does: the list's order counts, and nothing after the first entry that fits no GPU is shown.
    """
    rows = [
        tuple(part.strip() for part in line.split(",", 2)) for line in listing.splitlines() if line.strip()
    ]
    rows = [row for row in rows if len(row) == 3 and row[0].isdecimal()]
    if cuda_visible_devices is None:
        return tuple(name for _, _, name in rows)
    names = []
    for entry in (part.strip() for part in cuda_visible_devices.split(",")):
        # A slice of a GPU has a name of its own kind, which this listing lacks; its GPU's is the nearest.
        is_slice = entry.startswith("MIG-")
        found = [
            name
            for index, uuid, name in rows
            if index == entry or is_slice or (entry.startswith("GPU-") and uuid.startswith(entry))
        ]
        if not found:
            break
        names.append(found[0])
    return tuple(names)


def _list_devices(command: Sequence[str]) -> str:
    try:
        listed = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return listed.stdout if listed.returncode == 0 else ""


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

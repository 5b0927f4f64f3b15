"""Accelerators as publications spell them, for predictions: also those that EC2 does not sell."""

import csv
import functools
import lzma
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fastlaunch.catalog.hardware import Accelerator

#: A row for each GPU: by vendors' datasheets, dense peaks in TFLOP/s with fp32 accumulation, empty where a
#: format is not supported. A board with two chips counts as one chip. The first of a family is meant where a
#: name gives neither form factor nor memory.
_GPUS = Path(__file__).with_name("gpus.csv")
#: Published training throughput, each row with its source and licence; the columns are those of predictions.
TRAINING_THROUGHPUT = Path(__file__).with_name("training_throughput.csv.xz")


def training_throughput() -> list[Mapping[str, str]]:
    """Return the rows of `TRAINING_THROUGHPUT`, as text."""
    with lzma.open(TRAINING_THROUGHPUT, "rt", encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator of a published measurement."""

    name: str
    # Those of one generation share the design of the chip: GA100 and GA10x are two, A100 and RTX 3090 differ
    # as much as neighbouring generations do.
    generation: str
    memory_gb: float
    bandwidth_gb_per_s: float
    # Dense peak of matrix products by format, TFLOP/s; a format that is missing is not supported.
    peak_tflops: Mapping[str, float] = field(compare=False)

    @property
    def linked(self) -> bool:
        """Return whether NVLink or its like usually joins the GPUs of a host."""
        return self.generation not in _UNLINKED and not re.search(r"PCIe|A30|Titan", self.name)


_UNLINKED = ("Kepler", "Maxwell", "Pascal", "Turing", "GA10x", "Ada", "GB20x")
_FORMATS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
_MAKER = re.compile(
    r"nvidia|tesla|geforce|amd|instinct|intel|habana|google|cloud|accelerator|ai |\(r\)|quadro(?= ?p)"
)
_MEMORY = re.compile(r"\b(\d+)\s*gi?b?\b")
_GENERATIONS = {"8.0": "GA100", "8.6": "GA10x", "8.9": "Ada", "9.0": "Hopper", "10.0": "Blackwell"}
_FORM = re.compile(r"\b(sxm\d?|pcie|nvl|\d+gb)\b", re.IGNORECASE)


@functools.cache
def _table() -> tuple[tuple[str, Gpu], ...]:
    """Return (family, GPU) for each row; the family is the name without form factor and memory."""
    gpus = []
    with _GPUS.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            gpu = Gpu(
                name=row["name"],
                generation=row["generation"],
                memory_gb=float(row["memory_gb"]),
                bandwidth_gb_per_s=float(row["bandwidth_gb_per_s"]),
                peak_tflops={form: float(row[form]) for form in _FORMATS if row[form]},
            )
            gpus.append((re.sub(r"[^a-z0-9]", "", _FORM.sub("", gpu.name).lower()), gpu))
    return tuple(gpus)


def identify(name: str, accelerators: Mapping[str, Accelerator] | None = None) -> Gpu | None:
    """Return the GPU that `name` means, such as `NVIDIA_H100_80GB_HBM3` or `A100-PCIe-40GB`, or None.

    accelerators: the user's own, by exact name, for what the table lacks.
    """
    return _identify(name) or _own(name, accelerators or {})


@functools.cache
def _identify(name: str) -> Gpu | None:
    text = _MAKER.sub(" ", re.sub(r"[_-]", " ", name.lower()))
    squeezed = re.sub(r"[^a-z0-9]", "", _MEMORY.sub("", text))
    families = {family for family, _ in _table()}
    # No digit before or after, so that A10 is not in A100 nor P4 in P40.
    present = [family for family in families if re.search(rf"(?<![0-9]){family}(?![0-9])", squeezed)]
    if not present:
        return None
    family = max(present, key=len)
    gpus = [gpu for other, gpu in _table() if other == family]
    # GH200 480GB counts the memory of the CPU.
    memory = [float(size) for size in _MEMORY.findall(text) if float(size) < 300]
    form = (
        "pcie" if "pcie" in text else "nvl" if re.search(r"\bnvl\b", text) else "sxm" if "sxm" in text else ""
    )
    return min(
        gpus,
        key=lambda gpu: (
            bool(form) and form not in gpu.name.lower() and len(gpus) > 1,
            min((abs(gpu.memory_gb - size) for size in memory), default=0.0),
        ),
    )


def _own(name: str, accelerators: Mapping[str, Accelerator]) -> Gpu | None:
    known_gpu = next(
        (known for key, known in accelerators.items() if name in (key, *known.device_names)), None
    )
    if known_gpu is None:
        return None
    capability = known_gpu.compute_capability or known_gpu.name
    return Gpu(
        name=known_gpu.name,
        generation=_GENERATIONS.get(capability, capability),
        memory_gb=known_gpu.memory_gib,
        bandwidth_gb_per_s=known_gpu.bandwidth_tb_per_s * 1000,
        peak_tflops=known_gpu.peak_tflops,
    )

"""Accelerators and instances: those of the price catalogue, and GPUs as publications spell them."""

import csv
import functools
import lzma
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fastlaunch.core.errors import UserError

#: Number formats of matrix products for which a peak can be given; `formats` of an accelerator uses them too.
FORMATS = ("fp32", "tf32", "fp16", "bf16", "fp8")
#: GPUs that AWS joins by NVSwitch wherever there are eight of them: p4d, p4de, p5.48xlarge, p5e, p5en,
#: p6-b200 and p6-b300, but not p5.4xlarge. CUDA answers with error 802 until their fabric manager is up.
_NVSWITCH_GPUS = ("A100 40GB", "A100 80GB", "H100", "H200", "B200", "B300")
PURCHASE_OPTIONS = ("on-demand", "spot", "capacity-block")
#: SageMaker's reserved capacity, which a job names by its ARN; beside the options, what prices may be of.
TRAINING_PLAN = "training-plan"
OFFERS = (*PURCHASE_OPTIONS, TRAINING_PLAN)


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One GPU, or one Trainium chip."""

    name: str
    # As EC2 reports it, a little less than on the box.
    memory_gib: float
    bandwidth_tb_per_s: float
    # CUDA's, such as `9.0`; None where it has none.
    compute_capability: str | None = None
    # Dense peak of matrix products by format; a format that is missing is unknown, not zero.
    peak_tflops: Mapping[str, float]
    # What the matrix units take, whether or not a peak is known.
    formats: frozenset[str]
    # As `torch.cuda.get_device_name` reports it.
    device_names: tuple[str, ...] = ()
    source: str

    def __post_init__(self) -> None:
        check_positive(f"memory_gib of {self.name}", self.memory_gib)
        check_positive(f"bandwidth_tb_per_s of {self.name}", self.bandwidth_tb_per_s)
        for format_name, peak in self.peak_tflops.items():
            check_positive(f"{format_name} peak of {self.name}", peak)
        if unknown := self.formats.difference(FORMATS):
            raise UserError(f"formats has {min(unknown)!r}", f"it takes {', '.join(FORMATS)}")
        unsupported = self.peak_tflops.keys() - self.formats
        if unsupported:
            raise UserError(
                f"peak_tflops of {self.name} has {', '.join(sorted(unsupported))}, which its formats lack",
                "add the format, or remove the peak",
            )


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    """One EC2 instance type; SageMaker's `ml.` types carry the same hardware."""

    name: str
    # Key of the catalogue's accelerators.
    accelerator: str
    num_accelerators: int
    vcpus: int
    memory_gib: float
    # All network cards together; where EC2 says "up to", that burst rate.
    network_gbps: float
    num_network_cards: int
    num_efa_interfaces: int
    local_nvme_gb: float
    # How AWS sells it, of PURCHASE_OPTIONS.
    purchase_options: tuple[str, ...]
    source: str

    def is_sold(self, offer: str) -> bool:
        """Return whether AWS sells it as `offer`, of OFFERS: plans are of the types sold in blocks."""
        return ("capacity-block" if offer == TRAINING_PLAN else offer) in self.purchase_options

    @property
    def has_nvswitch(self) -> bool:
        """Return whether its GPUs are joined by NVSwitch, and wait for a fabric manager."""
        return self.accelerator in _NVSWITCH_GPUS and self.num_accelerators == 8

    @property
    def all_reduce_floor_gb_per_s(self) -> float:
        """Return the bus bandwidth between nodes under which something is amiss: a quarter of the network's.

        A rule of thumb, not a measurement: reason for a warning, and not to refuse a machine.
        """
        return self.network_gbps / 8 / 4

    def __post_init__(self) -> None:
        for name in ("num_accelerators", "vcpus", "memory_gib", "network_gbps", "num_network_cards"):
            check_positive(f"{name} of {self.name}", getattr(self, name))
        for name in ("num_efa_interfaces", "local_nvme_gb"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"{name} of {self.name} is {value}", "give 0 or more")
        for option in self.purchase_options:
            if option not in PURCHASE_OPTIONS:
                raise UserError(f"purchase_options has {option!r}", f"it takes {', '.join(PURCHASE_OPTIONS)}")


def check_positive(what: str, value: float) -> None:
    """Raise UserError if `value` is not finite and above 0."""
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{what} is {value:g}", "give a finite number above 0, or leave the entry out")


#: A row for each GPU, with the document that gives it: dense peaks in TFLOP/s with fp32 accumulation, empty
#: where a format is not supported. A board with two chips counts as one chip. The first of a family is meant
#: where a name gives neither form factor nor memory.
_GPUS = Path(__file__).with_name("gpus.csv")
#: Published training throughput, each row with its source and licence; the columns are those of predictions.
TRAINING_THROUGHPUT = Path(__file__).with_name("training_throughput.csv.xz")
#: 10^9 multiply-adds of a forward pass on one image, by model and pixels a side, each row with its source.
_IMAGE_MACS = Path(__file__).with_name("image_macs.csv.xz")


def training_throughput() -> list[Mapping[str, str]]:
    """Return the rows of `TRAINING_THROUGHPUT`, as text."""
    return _packed_rows(TRAINING_THROUGHPUT)


def _packed_rows(path: Path) -> list[Mapping[str, str]]:
    with lzma.open(path, "rt", encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def image_flops(model: str, pixels: float | None) -> float | None:
    """Return the FLOPs of a forward and backward pass on one image; None for an unknown model.

    model: such as ResNet-50, resnet50.a1_in1k, or Classification/resnet50v1.5 (PyTorch). pixels:
    a side; None for the size nearest to 224. Other sizes than the table's count by their area.
    """
    name = model.lower().rpartition("/")[2].partition(" (")[0]
    sizes = next(
        (
            sizes
            for text in (name, name.partition(".")[0])
            if (sizes := _image_macs().get(re.sub(r"[^a-z0-9]", "", text)))
        ),
        None,
    )
    if sizes is None:
        return None
    nearest = min(sizes, key=lambda size: abs(math.log(size / (pixels or 224.0))))
    # Two FLOPs a multiply-add; the backward pass takes twice the forward pass.
    return 6 * sizes[nearest] * ((pixels or nearest) / nearest) ** 2


@functools.cache
def _image_macs() -> Mapping[str, Mapping[float, float]]:
    sizes: dict[str, dict[float, float]] = {}
    for row in _packed_rows(_IMAGE_MACS):
        name = re.sub(r"[^a-z0-9]", "", row["model"].lower())
        sizes.setdefault(name, {})[float(row["pixels"])] = float(row["gmacs"]) * 1e9
    return sizes


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator of a published measurement."""

    name: str
    # GPUs of one generation share a chip's design. GA100 and GA10x are two, since A100 and RTX 3090 differ as
    # much as neighbouring generations.
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
_FORM = re.compile(r"\b(pcie|nvl|\d+gb)\b", re.IGNORECASE)


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
    if re.search(r"\bmig\b", text):
        return None  # a slice has a part of the GPU's peaks
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
    form = _form(text)
    return min(
        gpus,
        key=lambda gpu: (
            form is not None and form != (_form(gpu.name.lower()) or "sxm"),
            min((abs(gpu.memory_gb - size) for size in memory), default=0.0),
        ),
    )


def _form(text: str) -> str | None:
    """Return the form factor that a name gives; names of the table leave out `sxm`."""
    return next((form for form in ("pcie", "nvl", "sxm") if re.search(rf"\b{form}\d?\b", text)), None)


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

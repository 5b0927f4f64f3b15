"""Accelerators as publications spell them, for predictions: also those that EC2 does not sell."""

import csv
import functools
import lzma
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fastlaunch.catalog.hardware import Accelerator

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


# Vendors' datasheets: dense, with fp32 accumulation. A board with two chips counts as one chip.
# The first of a family is meant where a name gives neither form factor nor memory.
# name | generation | memory GB | bandwidth GB/s | fp32 | tf32 | fp16 | bf16 | fp8 | fp4  (- is unsupported)
_TABLE = """
K80|Kepler|12|240|4.4|-|4.4|-|-|-
M60|Maxwell|8|160|4.8|-|4.8|-|-|-
P100|Pascal|16|732|10.6|-|21.2|-|-|-
P100 PCIe|Pascal|16|732|9.3|-|18.7|-|-|-
P40|Pascal|24|346|11.8|-|11.8|-|-|-
P4|Pascal|8|192|5.5|-|5.5|-|-|-
1080Ti|Pascal|11|484|11.3|-|11.3|-|-|-
Titan Xp|Pascal|12|548|12.1|-|12.1|-|-|-
V100 SXM 16GB|Volta|16|900|15.7|-|125|-|-|-
V100 SXM 32GB|Volta|32|900|15.7|-|125|-|-|-
V100 PCIe 16GB|Volta|16|900|14|-|112|-|-|-
V100 PCIe 32GB|Volta|32|900|14|-|112|-|-|-
Titan V|Volta|12|653|14.9|-|110|-|-|-
T4|Turing|16|320|8.1|-|65|-|-|-
T4G|Turing|16|320|8.1|-|65|-|-|-
2070|Turing|8|448|7.5|-|29.9|-|-|-
2070MaxQ|Turing|8|384|5.5|-|22|-|-|-
2080|Turing|8|448|10.1|-|40.3|-|-|-
2080MaxQ|Turing|8|384|6.4|-|26|-|-|-
2080SuperMaxQ|Turing|8|352|6.9|-|28|-|-|-
2080Ti|Turing|11|616|13.4|-|53.8|-|-|-
Titan RTX|Turing|24|672|16.3|-|130.5|-|-|-
Quadro RTX 5000|Turing|16|448|11.2|-|89.2|-|-|-
Quadro RTX 6000|Turing|24|672|16.3|-|130.5|-|-|-
Quadro RTX 8000|Turing|48|672|16.3|-|130.5|-|-|-
A100 SXM 40GB|GA100|40|1555|19.5|156|312|312|-|-
A100 SXM 80GB|GA100|80|2039|19.5|156|312|312|-|-
A100 PCIe 40GB|GA100|40|1555|19.5|156|312|312|-|-
A100 PCIe 80GB|GA100|80|1935|19.5|156|312|312|-|-
A800|GA100|80|2039|19.5|156|312|312|-|-
A30|GA100|24|933|10.3|82|165|165|-|-
A2|GA10x|16|200|4.5|9|18|18|-|-
A10|GA10x|24|600|31.2|62.5|125|125|-|-
A10G|GA10x|24|600|31.2|35|70|70|-|-
A16|GA10x|16|200|4.5|9|18|18|-|-
A40|GA10x|48|696|37.4|74.8|149.7|149.7|-|-
A4000|GA10x|16|448|19.2|38.3|76.7|76.7|-|-
A4500|GA10x|20|640|23.7|47.3|94.6|94.6|-|-
A5000|GA10x|24|768|27.8|55.6|111.1|111.1|-|-
A5500|GA10x|24|768|34.1|68.2|136.4|136.4|-|-
A6000|GA10x|48|768|38.7|77.4|154.8|154.8|-|-
3060|GA10x|12|360|12.7|12.7|25.5|25.5|-|-
3070|GA10x|8|448|20.3|20.3|40.6|40.6|-|-
3070Ti|GA10x|8|608|21.7|21.7|43.5|43.5|-|-
3080|GA10x|10|760|29.8|29.8|59.5|59.5|-|-
3080 MaxQ|GA10x|16|448|18|18|36|36|-|-
3080Ti|GA10x|12|912|34.1|34.1|68.2|68.2|-|-
3090|GA10x|24|936|35.6|35.6|71.2|71.2|-|-
3090Ti|GA10x|24|1008|40|40|80|80|-|-
L4|Ada|24|300|30.3|60|121|121|242|-
L40|Ada|48|864|90.5|90.5|181|181|362|-
L40S|Ada|48|864|91.6|183|362|362|733|-
4070Ti|Ada|12|504|40.1|40.1|80.2|80.2|160|-
4080|Ada|16|717|48.7|48.7|97.5|97.5|195|-
4090|Ada|24|1008|82.6|82.6|165|165|330|-
RTX 6000 Ada|Ada|48|960|91.1|182|364|364|728|-
RTX 5000 Ada|Ada|32|576|65.3|130|261|261|522|-
H100 SXM 80GB|Hopper|80|3350|67|494.7|989.4|989.4|1978.9|-
H100 PCIe 80GB|Hopper|80|2000|51|378|756|756|1513|-
H100 SXM 64GB|Hopper|64|2000|67|494.7|989.4|989.4|1978.9|-
H100 SXM 96GB|Hopper|96|2400|67|494.7|989.4|989.4|1978.9|-
H100 NVL 94GB|Hopper|94|3900|60|418|835|835|1671|-
H800|Hopper|80|3350|67|494.7|989.4|989.4|1978.9|-
H20|Hopper|96|4000|44|74|148|148|296|-
H200|Hopper|141|4800|67|494.7|989.4|989.4|1978.9|-
GH200 96GB|Hopper|96|4000|67|494.7|989.4|989.4|1978.9|-
GH200 144GB|Hopper|144|4900|67|494.7|989.4|989.4|1978.9|-
B100|Blackwell|192|8000|60|875|1750|1750|3500|7000
B200|Blackwell|180|8000|75|1125|2250|2250|4500|9000
GB200|Blackwell|186|8000|80|1250|2500|2500|5000|10000
B300|Blackwell|270|8000|75|1125|2250|2250|4500|13500
GB300|Blackwell|279|8000|80|1250|2500|2500|5000|15000
5080|GB20x|16|960|56.3|56.3|112.6|112.6|225|450
5090|GB20x|32|1792|104.8|104.8|209.5|209.5|419|838
RTX PRO 6000|GB20x|96|1600|125|252|504|504|1008|2016
MI50|CDNA|32|1024|13.3|-|26.5|-|-|-
MI100|CDNA|32|1229|46.1|-|184.6|92.3|-|-
MI210|CDNA2|64|1638|45.3|-|181|181|-|-
MI250|CDNA2|64|1638|45.3|-|181|181|-|-
MI250X|CDNA2|64|1638|47.9|-|191.5|191.5|-|-
MI300X|CDNA3|192|5300|163.4|653.7|1307|1307|2615|-
MI325X|CDNA3|256|6000|163.4|653.7|1307|1307|2615|-
MI350X|CDNA4|288|8000|144|-|2307|2307|4614|9228
MI355X|CDNA4|288|8000|157|-|2517|2517|5033|10066
Gaudi|Gaudi|32|1000|14|-|-|116|-|-
Gaudi2|Gaudi2|96|2460|54|108|432|432|865|-
Gaudi3|Gaudi3|128|3700|114|459|1835|1835|1835|-
TPU v2|TPU v2|16|700|-|-|-|46|-|-
TPU v3|TPU v3|32|900|-|-|-|123|-|-
TPU v4|TPU v4|32|1228|-|-|-|275|-|-
TPU v5e|TPU v5e|16|819|-|-|-|197|-|-
TPU v5p|TPU v5p|95|2765|-|-|-|459|-|-
TPU v6e|TPU v6e|32|1640|-|-|-|918|-|-
TPU trillium|TPU v6e|32|1640|-|-|-|918|-|-
Trainium1|Trainium|32|880|47.5|190|190|190|-|-
Trainium2|Trainium2|96|2900|181|667|667|667|1299|-
"""
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
    """Return (family, GPU) of every row; the family is its name without form factor and memory."""
    gpus = []
    for line in _TABLE.strip().splitlines():
        name, generation, memory, bandwidth, *peaks = line.split("|")
        tflops = {key: float(peak) for key, peak in zip(_FORMATS, peaks, strict=True) if peak != "-"}
        gpu = Gpu(
            name=name,
            generation=generation,
            memory_gb=float(memory),
            bandwidth_gb_per_s=float(bandwidth),
            peak_tflops=tflops,
        )
        gpus.append((re.sub(r"[^a-z0-9]", "", _FORM.sub("", name).lower()), gpu))
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

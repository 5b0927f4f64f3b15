"""Accelerators and the instances that carry them, as the price catalogue describes them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fastlaunch.core.errors import UserError

#: Number formats of matrix products for which a peak can be given; `formats` of an accelerator uses them too.
FORMATS = ("fp32", "tf32", "fp16", "bf16", "fp8")
#: GPUs that AWS joins by NVSwitch wherever there are eight of them: p4d, p4de, p5.48xlarge, p5e, p5en,
#: p6-b200 and p6-b300, but not p5.4xlarge. CUDA answers with error 802 until their fabric manager is up.
_NVSWITCH_GPUS = ("A100 40GB", "A100 80GB", "H100", "H200", "B200", "B300")
PURCHASE_OPTIONS = ("on-demand", "spot", "capacity-block")


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
        for field in ("num_accelerators", "vcpus", "memory_gib", "network_gbps", "num_network_cards"):
            check_positive(f"{field} of {self.name}", getattr(self, field))
        for field in ("num_efa_interfaces", "local_nvme_gb"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"{field} of {self.name} is {value}", "give 0 or more")
        for option in self.purchase_options:
            if option not in PURCHASE_OPTIONS:
                raise UserError(f"purchase_options has {option!r}", f"it takes {', '.join(PURCHASE_OPTIONS)}")


def check_positive(what: str, value: float) -> None:
    """Raise UserError if `value` is not finite and above 0."""
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{what} is {value:g}", "give a finite number above 0, or leave the entry out")

"""Hardware: what each accelerator supports, its peaks, and its name on the device."""

import dataclasses

import pytest

from fastlaunch.catalog.hardware import Accelerator
from fastlaunch.catalog.load import load_catalogue
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.errors import UserError


@pytest.fixture(scope="module")
def shipped() -> Catalogue:
    return load_catalogue()


def test_fp8_needs_ada_hopper_or_blackwell(shipped: Catalogue) -> None:
    with_fp8 = {name for name, item in shipped.accelerators.items() if "fp8" in item.formats}
    assert with_fp8 == {"L4", "L40S", "H100", "H200", "B200", "B300", "RTX PRO 6000", "Trainium2"}
    for name in ("A100 40GB", "A100 80GB", "A10G"):
        assert "fp8" not in shipped.accelerators[name].peak_tflops
        capability = shipped.accelerators[name].compute_capability
        assert capability is not None
        assert float(capability) < 8.9


@pytest.mark.parametrize(
    ("name", "bf16", "fp8", "bandwidth", "capability"),
    [
        ("A100 40GB", 312, None, 1.555, "8.0"),
        ("A100 80GB", 312, None, 2.039, "8.0"),
        ("H100", 989.4, 1978.9, 3.35, "9.0"),
        ("H200", 989.4, 1978.9, 4.8, "9.0"),
        ("B200", 2250, 4500, 8, "10.0"),
        ("B300", 2250, 4500, 8, "10.3"),
        ("A10G", 70, None, 0.6, "8.6"),
        ("L4", 121, 242, 0.3, "8.9"),
        ("L40S", 362, 733, 0.864, "8.9"),
    ],
)
def test_dense_peaks(
    shipped: Catalogue, name: str, bf16: float, fp8: float | None, bandwidth: float, capability: str
) -> None:
    accelerator = shipped.accelerators[name]
    assert accelerator.peak_tflops["bf16"] == bf16
    assert accelerator.peak_tflops.get("fp8") == fp8
    assert accelerator.bandwidth_tb_per_s == bandwidth
    assert accelerator.compute_capability == capability


def test_every_accelerator_has_a_source_and_a_bf16_peak(shipped: Catalogue) -> None:
    for accelerator in shipped.accelerators.values():
        assert len(accelerator.source) > 10
        assert accelerator.peak_tflops["bf16"] == accelerator.peak_tflops["fp16"]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        (" nvidia  h200 ", "H200"),
    ],
)
def test_accelerator_of_device(shipped: Catalogue, device: str, name: str) -> None:
    accelerator = shipped.accelerator_of_device(device)
    assert accelerator is not None
    assert accelerator.name == name


@pytest.mark.parametrize(
    "device",
    ["", "cpu", "H200", "NVIDIA H100 PCIe", "NVIDIA A10", "NVIDIA L40", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"],
)
def test_a_device_that_only_looks_like_one_is_unknown(shipped: Catalogue, device: str) -> None:
    assert shipped.accelerator_of_device(device) is None


def test_no_device_name_stands_for_two_accelerators(shipped: Catalogue) -> None:
    names = [name for item in shipped.accelerators.values() for name in item.device_names]
    assert len(names) == len(set(names))


def _h100(shipped: Catalogue) -> Accelerator:
    return shipped.accelerators["H100"]


@pytest.mark.parametrize(
    "change", [{"memory_gib": 0}, {"bandwidth_tb_per_s": -1}, {"peak_tflops": {"bf16": float("nan")}}]
)
def test_hardware_figures_are_above_zero(shipped: Catalogue, change: dict[str, object]) -> None:
    with pytest.raises(UserError, match="of H100 is"):
        dataclasses.replace(_h100(shipped), **change)  # type: ignore[arg-type]


def test_a_peak_needs_its_format(shipped: Catalogue) -> None:
    with pytest.raises(UserError, match="peak_tflops of H100 has fp8"):
        dataclasses.replace(_h100(shipped), formats=frozenset({"fp32", "tf32", "fp16", "bf16"}))


@pytest.mark.parametrize("change", [{"num_accelerators": 0}, {"vcpus": -1}, {"num_efa_interfaces": -1}])
def test_instance_figures(shipped: Catalogue, change: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"of p5\.48xlarge is"):
        dataclasses.replace(shipped.instances["p5.48xlarge"], **change)  # type: ignore[arg-type]

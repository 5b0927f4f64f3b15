"""What a record says of the machine and its device."""

import json
from types import SimpleNamespace

import pytest
import torch

from fastlaunch_train.process.device import DeviceMonitor, DeviceState, memory_gib
from fastlaunch_train.process.machine import host_id, machine, versions

CPU = torch.device("cpu")


def test_the_machine_is_plain_data() -> None:
    facts = machine(CPU)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["device_type"] == "cpu"
    assert facts["memory_gib"] > 0
    assert host_id() == host_id() and len(host_id()) == 12
    assert facts["driver"] is None


def test_versions_are_of_what_is_loaded() -> None:
    found = versions((9, 19, 0))
    assert found["torch"] == torch.__version__
    assert found["cudnn"] == "9.19.0"
    assert versions(None)["cudnn"] is None
    assert found["transformer_engine"] is None


def test_a_cpu_has_no_device_state_and_a_peak_memory() -> None:
    assert DeviceMonitor(CPU).read() == DeviceState()
    reserved, peak = memory_gib(CPU)
    assert reserved is None
    assert peak is not None
    assert 0.01 < peak < 1000


class Gpu:
    """NVML for a GPU that computes half of the time; its power is not known."""

    NVML_CLOCK_SM = NVML_TEMPERATURE_GPU = 0
    clock_mhz = 1980

    def nvmlDeviceGetClockInfo(self, gpu: None, kind: int) -> int:  # noqa: N802
        return self.clock_mhz

    def nvmlDeviceGetTemperature(self, gpu: None, kind: int) -> int:  # noqa: N802
        return 50

    def nvmlDeviceGetUtilizationRates(self, gpu: None) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=50)


def test_a_block_has_the_means_of_its_samples() -> None:
    gpu = Gpu()
    monitor = DeviceMonitor(None, nvml=gpu)
    monitor.sample()
    gpu.clock_mhz = 1000
    monitor.sample()
    assert monitor.read() == DeviceState(clock_mhz=1490, temperature_c=50, utilization=0.5)
    assert monitor.read() == DeviceState(clock_mhz=1000, temperature_c=50), "no sample"


@pytest.mark.parametrize(("passed_s", "use"), [(0.9, None), (1.0, 0.5)])
def test_what_reaches_back_into_a_pause_is_no_use_of_steps(passed_s: float, use: float | None) -> None:
    now = iter([0.0, 10.0, 10.0 + passed_s])
    monitor = DeviceMonitor(None, nvml=Gpu(), clock=lambda: next(now))
    monitor.sample()
    monitor.resume()
    assert monitor.read().utilization is None, "the sample was of the pause"
    monitor.sample()
    assert monitor.read().utilization == use

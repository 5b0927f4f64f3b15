"""What a record says of the machine and its device."""

import json

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

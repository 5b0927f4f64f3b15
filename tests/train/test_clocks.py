"""GPUs under load: what slows them down, and what of that makes the machine a faulty one."""

import pytest
import torch
from fake_nvidia_smi import report

from fastlaunch_train.checks.clocks import NUM_LOOKS, check_clocks_under_load, lasting_reasons
from fastlaunch_train.distributed.parallel import Process
from fastlaunch_train.process.failures import HardwareError

ALONE = Process(rank=0, local_rank=0, world_size=1, num_nodes=1, device=torch.device("cpu"))
SLOW = {"hw_slowdown": "Active", "hw_thermal_slowdown": "Active"}
CAPPED = {"sw_power_cap": "Active"}


def checked(*reports: str) -> str:
    looks = iter(reports)
    return check_clocks_under_load(ALONE, load_s=0.06, look=lambda: next(looks))


def test_a_slowdown_of_the_hardware_that_lasts_is_a_fault() -> None:
    with pytest.raises(HardwareError, match=r"hw_slowdown=0,3 hw_thermal_slowdown=0,3"):
        checked(*[report(4, {0: SLOW, 3: SLOW, 2: CAPPED})] * NUM_LOOKS)


def test_what_passes_is_none_and_a_power_cap_is_told() -> None:
    capped = report(4, {2: CAPPED, 3: {"gpu_idle": "Active"}})
    passing = report(4, {0: SLOW, 2: CAPPED, 3: {"gpu_idle": "Active"}})
    assert checked(passing, capped, capped) == "gpu_idle=3 sw_power_cap=2"
    assert checked(*[report(4)] * NUM_LOOKS) == "clocks=free"


def test_a_driver_before_535_names_them_otherwise() -> None:
    old = report(2, {1: SLOW}).replace("clocks_event_reason", "clocks_throttle_reason")
    assert lasting_reasons([old]) == {"hw_slowdown": [1], "hw_thermal_slowdown": [1]}


def test_without_an_answer_nothing_is_known() -> None:
    assert checked("", report(1, {0: SLOW}), report(1, {0: SLOW})) == "clocks=free"


def test_the_load_leaves_the_random_numbers_of_the_training_alone() -> None:
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    checked(*[report(1)] * NUM_LOOKS)
    assert torch.equal(torch.randn(4), expected)

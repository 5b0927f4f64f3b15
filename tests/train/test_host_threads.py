"""Cores that torch's operators leave alone while a GPU trains."""

from collections.abc import Iterator

import pytest
import torch

from fastlaunch_train.host_threads import leave_cores_alone

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_beside_a_gpu_one_core_is_enough() -> None:
    leave_cores_alone(GPU, {})
    assert torch.get_num_threads() == 1


def test_a_cpu_trains_on_all_and_the_users_word_counts() -> None:
    leave_cores_alone(CPU, {})
    leave_cores_alone(GPU, {"OMP_NUM_THREADS": "2"})
    assert torch.get_num_threads() == 2

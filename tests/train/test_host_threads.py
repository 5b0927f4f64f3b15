"""Cores that torch's operators leave alone while a GPU trains, and how many load its data."""

import os
from collections.abc import Iterator

import pytest
import torch

from fastlaunch_train.process.machine import default_num_workers, limit_cpu_threads

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_beside_a_gpu_one_core_is_enough() -> None:
    limit_cpu_threads(GPU, {})
    assert torch.get_num_threads() == 1


def test_a_cpu_trains_on_all_and_the_users_word_counts() -> None:
    limit_cpu_threads(CPU, {})
    limit_cpu_threads(GPU, {"OMP_NUM_THREADS": "2"})
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("cores", "environ", "num_workers"),
    [(2, {}, 2), (192, {}, 12), (64, {"LOCAL_WORLD_SIZE": "8"}, 8), (2, {"LOCAL_WORLD_SIZE": "8"}, 1)],
)
def test_a_rank_loads_with_its_share_of_the_cores(
    cores: int, environ: dict[str, str], num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert default_num_workers(environ) == num_workers

"""What copy engines do between GPUs, by threads that share their memory."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fastlaunch_train.distributed.copy_engines import average, average_by_copies, num_elements
from fastlaunch_train.distributed.parallel import Process, check_copy_engines, join_group, stop_process
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.recipes.recipes import resolve_recipe


class Threads:
    """Memory of ranks that are threads of one process."""

    def __init__(self, rank: int, memories: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.world_size = len(memories)
        self._memories = memories
        self._barrier = barrier

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor:
        memory = self._memories[rank].view(dtype)
        return memory[storage_offset : storage_offset + torch.Size(sizes).numel()].view(sizes)

    def barrier(self) -> None:
        self._barrier.wait(timeout=30)


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# None for some ranks, not as many for the last, and as many for each.
@pytest.mark.parametrize("num_values", [1, 1000, 64 * 24])
def test_every_rank_has_the_mean_of_all_in_every_round(
    num_values: int, dtype: torch.dtype, world_size: int
) -> None:
    rounds = 5
    given = torch.randn(rounds, world_size, num_values, generator=torch.Generator().manual_seed(0)).to(dtype)
    num_bytes = num_elements(num_values, world_size) * given.element_size()
    memories = [torch.full((num_bytes,), 255, dtype=torch.uint8) for _ in range(world_size)]
    barrier = threading.Barrier(world_size)

    def train(rank: int) -> list[torch.Tensor]:
        found = []
        for of_round in given:
            values = of_round[rank].clone()
            average(values, Threads(rank, memories, barrier))
            found.append(values)
        return found

    with ThreadPoolExecutor(world_size) as pool:
        by_rank = list(pool.map(train, range(world_size)))
    found = torch.stack([torch.stack(values) for values in by_rank])
    assert torch.equal(found, found[:1].expand_as(found))
    torch.testing.assert_close(found[0], given.mean(1))


class Doubling:
    """Averages nothing, to be seen."""

    def average(self, values: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(values.mul_(2))
        return done


def test_ddp_takes_what_its_hook_has_put_into_a_bucket() -> None:
    process = Process(rank=0, local_rank=0, world_size=1, num_nodes=1, device=torch.device("cpu"))
    join_group(process)
    try:
        model = torch.nn.Linear(3, 2)
        wrapped = torch.nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=True
        )
        wrapped.register_comm_hook(Doubling(), average_by_copies)
        for _ in range(3):
            model.zero_grad()
            wrapped(torch.ones(1, 3)).sum().backward()
            assert torch.equal(model.weight.grad, torch.full((2, 3), 2.0))
    finally:
        stop_process()


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_copy_engines_reach_only_gpus_beside_their_own(
    num_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: num_nodes > 1)
    process = Process(rank=0, local_rank=0, world_size=2, num_nodes=num_nodes, device=torch.device("cpu"))
    with pytest.raises(RecipeError, match="only GPUs of one machine"):
        check_copy_engines(resolve_recipe("bf16", ["all_reduce=copy_engine"]), process)

"""What copy engines do between GPUs, by threads that share their memory."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fastlaunch_train.distributed.copy_engines import average, average_by_copies
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
# All at once, and in parts of which the last is smaller.
@pytest.mark.parametrize("share_bytes", [4096, 256])
def test_every_rank_has_the_mean_of_all_in_every_round(
    share_bytes: int, dtype: torch.dtype, world_size: int
) -> None:
    # None for some ranks, not as many for the last, and as many for each: in turn, as DDP's buckets come.
    sizes = [1000, 1, 64 * 24, 700] * 3
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(world_size, size, generator=generator).to(dtype) for size in sizes]
    memories = [
        torch.full(((world_size + 1) * share_bytes,), 255, dtype=torch.uint8) for _ in range(world_size)
    ]
    barrier = threading.Barrier(world_size)

    def train(rank: int) -> list[torch.Tensor]:
        found = [of_ranks[rank].clone() for of_ranks in given]
        for values in found:
            average(values, Threads(rank, memories, barrier), share_bytes)
        return found

    with ThreadPoolExecutor(world_size) as pool:
        by_rank = list(pool.map(train, range(world_size)))
    for found in by_rank:
        for values, first, of_ranks in zip(found, by_rank[0], given, strict=True):
            assert torch.equal(values, first)
            torch.testing.assert_close(values, of_ranks.mean(0))


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

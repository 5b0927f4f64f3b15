"""Gradients averaged by the GPUs' copy engines, between the GPUs of one machine.

NCCL's kernels keep some multiprocessors busy. A matrix product that counts on all of them then takes up to
twice as long (train/measurements/fp8-fused.md). Copy engines leave them alone: each rank sends each other one
its share of the gradients, averages what arrives, and fetches the others' averages. Only the average and the
barriers are kernels.

By torch's symmetric memory, as its low-contention collectives (torch.distributed._symmetric_memory), which
have no all-reduce.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

#: Bytes to whose multiple shares are rounded, so that copies are aligned.
_ALIGNMENT = 256


class SharedMemory(Protocol):
    """Memory of this rank that its peers write and read, and theirs: torch's `_SymmetricMemory`."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor:
        """Return a view of a rank's memory; storage_offset: in elements."""
        ...

    def barrier(self) -> None:
        """Wait, on the stream, until every rank is there."""
        ...


def average(values: torch.Tensor, memory: SharedMemory, share_bytes: int) -> None:
    """Put the mean over the ranks of `values`, (n,), in its place. All ranks call it, in the same order.

    A rank's memory holds what each rank has sent it, a share of at most share_bytes each, and then the mean
    of these. More values than fit are averaged one part after another.
    Two barriers a part are enough, as everything keeps its place: who passes the second has been averaged by
    all, so that the next part may overwrite what was sent; who passes the first of the next part has fetched
    all means of this one.
    """
    for part in torch.split(values, memory.world_size * share_bytes // values.element_size()):
        _average_part(part, memory, share_bytes)


def _average_part(values: torch.Tensor, memory: SharedMemory, share_bytes: int) -> None:
    rank, world_size = memory.rank, memory.world_size
    place = share_bytes // values.element_size()
    share = _rounded_up(-(-len(values) // world_size), _ALIGNMENT // values.element_size())
    shares = [values[peer * share : (peer + 1) * share] for peer in range(world_size)]
    # Each rank begins with itself, so that no two send to the same one.
    peers = [(rank + step) % world_size for step in range(world_size)]
    for peer in peers:
        memory.get_buffer(peer, shares[peer].shape, values.dtype, rank * place).copy_(shares[peer])
    memory.barrier()
    sent = memory.get_buffer(rank, (world_size, place), values.dtype)[:, : len(shares[rank])]
    torch.mean(sent, 0, out=memory.get_buffer(rank, shares[rank].shape, values.dtype, world_size * place))
    memory.barrier()
    for peer in peers:
        shares[peer].copy_(memory.get_buffer(peer, shares[peer].shape, values.dtype, world_size * place))


class CopyEngines:
    """What averages DDP's buckets: memory for about so many bytes of gradients at once, and a stream.

    Every rank makes one, at the same time.
    """

    def __init__(self, device: torch.device, bytes_at_once: int) -> None:
        # Private by its name, up to 2.13.
        from torch.distributed import _symmetric_memory

        world_size = dist.get_world_size()
        self._share_bytes = _rounded_up(-(-bytes_at_once // world_size), _ALIGNMENT)
        size = (world_size + 1) * self._share_bytes
        self._buffer = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        assert dist.group.WORLD is not None
        self._memory: Any = _symmetric_memory.rendezvous(self._buffer, dist.group.WORLD)
        # Its short kernels go first.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._device = device

    def average(self, values: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Begin to average `values`, beside what the current stream does from now on."""
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            average(values, self._memory, self._share_bytes)
            # Who waits for it waits for this stream.
            done.set_result(values)
        return done


def average_by_copies(
    engines: CopyEngines,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket: a hook of DDP's, whose state is what averages."""
    return engines.average(bucket.buffer())


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

"""How fast the ranks add up a large buffer, before the steps: the bus bandwidth of the network between them.

The definition is nccl-tests': 2 (n - 1) / n x bytes / seconds, for n ranks, which is what the slowest link
carries whatever the number of ranks (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). GB are 10^9 bytes.
"""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from fastlaunch_train.distributed.fabric import checked_fabric
from fastlaunch_train.distributed.parallel import Process, agree, barrier
from fastlaunch_train.process.launch import Launched

#: Large enough for the full bandwidth of EFA; on a CPU, for a test of the same code.
MESSAGE_BYTES = {"cuda": 256 * 2**20, "cpu": 2**20}
NUM_WARMUPS = 3
NUM_REPEATS = 5
#: A repeat is of so many all-reduces that the ranks' different starts do not count, in about so long.
MAX_PER_REPEAT = 20
REPEAT_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """What an all-reduce took, as the median of the repeats, each of the slowest rank.

    message_bytes: that every rank gave.
    """

    seconds: float
    message_bytes: int
    num_ranks: int
    num_repeats: int

    @property
    def bus_gb_per_s(self) -> float:
        """10^9 bytes per second."""
        return 2 * (self.num_ranks - 1) / self.num_ranks * self.message_bytes / self.seconds / 1e9

    def detail(self, *, fabric: str, num_nodes: int) -> str:
        """`name=value` words for the record's phase `all-reduce`; the launcher reads them."""
        return (
            f"bus_gb_per_s={self.bus_gb_per_s:.6g} seconds={self.seconds:.6g} bytes={self.message_bytes} "
            f"repeats={self.num_repeats} ranks={self.num_ranks} nodes={num_nodes} fabric={fabric}"
        )


def all_reduce_between_nodes(process: Process, output: Path, launched: Launched) -> str:
    """Detail of the phase `all-reduce`: the bandwidth, and the network that it was had on.

    Raises FabricError, on all ranks, where `launched` asks for EFA and a node has something else.
    """
    found = checked_fabric(process, output, launched.fabric)
    return measure(process).detail(fabric=found.name, num_nodes=process.num_nodes)


def measure(process: Process, message_bytes: int | None = None) -> Bandwidth:
    """The bandwidth of an all-reduce over all ranks. For a world of several; all ranks call it together."""
    size = message_bytes or MESSAGE_BYTES[process.device.type]
    buffer = torch.zeros(size // 4, dtype=torch.float32, device=process.device)
    warmup_s = [_timed(process, buffer, 1) for _ in range(NUM_WARMUPS)][-1]
    per_repeat = max(1, min(MAX_PER_REPEAT, round(REPEAT_S / warmup_s)))
    repeats_s = [_timed(process, buffer, per_repeat) / per_repeat for _ in range(NUM_REPEATS)]
    del buffer
    if process.device.type == "cuda":
        # What comes after finds the memory as if this had not been.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(process.device)
    return Bandwidth(
        seconds=statistics.median(repeats_s),
        message_bytes=size // 4 * 4,
        num_ranks=process.world_size,
        num_repeats=NUM_REPEATS,
    )


def _timed(process: Process, buffer: torch.Tensor, times: int) -> float:
    """Seconds for so many all-reduces one after the other, on the slowest rank."""
    _synchronise(process)
    barrier(process)
    started = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(buffer)
    _synchronise(process)
    return agree(process, [time.perf_counter() - started])[0]


def _synchronise(process: Process) -> None:
    if process.device.type == "cuda":
        torch.cuda.synchronize(process.device)

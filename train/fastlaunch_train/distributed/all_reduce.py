"""Measure the bandwidth of an all-reduce over all ranks before the steps.

The bus bandwidth follows nccl-tests: 2 (n - 1) / n x bytes / seconds for n ranks, the rate of the slowest
link for any n (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). GB are 10^9 bytes.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from fastlaunch_train.distributed.fabric import check_fabric
from fastlaunch_train.distributed.parallel import Process, agree, barrier
from fastlaunch_train.process.launch import LaunchSettings

#: Bytes of a message: enough for EFA's full bandwidth; only tests use a CPU.
MESSAGE_BYTES = {"cuda": 256 * 2**20, "cpu": 2**20}
NUM_WARMUPS = 3
NUM_REPEATS = 5
#: All-reduces of a repeat: enough that the ranks' different starts do not matter, in about REPEAT_S.
MAX_PER_REPEAT = 20
REPEAT_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """The time of one all-reduce: the median over repeats of the slowest rank's time."""

    seconds: float
    message_bytes: int  #: of each rank
    num_ranks: int
    num_repeats: int

    @property
    def bus_gb_per_s(self) -> float:
        """Bus bandwidth in 10^9 bytes per second."""
        return 2 * (self.num_ranks - 1) / self.num_ranks * self.message_bytes / self.seconds / 1e9

    def detail(self, *, fabric: str, num_nodes: int) -> str:
        """Return `name=value` words for the record's phase `all-reduce`, which the launcher reads."""
        return (
            f"bus_gb_per_s={self.bus_gb_per_s:.6g} seconds={self.seconds:.6g} bytes={self.message_bytes} "
            f"repeats={self.num_repeats} ranks={self.num_ranks} nodes={num_nodes} fabric={fabric}"
        )


def all_reduce_between_nodes(
    process: Process, output: Path, launched: LaunchSettings, *, warn: Callable[[str], None]
) -> str:
    """Return the detail of the phase `all-reduce`: the measured bandwidth and its network.

    Warns if the bandwidth is less than an EFA network should give. Raises FabricError if `launched` requires
    EFA and a node uses another network.
    """
    fabric = check_fabric(process, output, launched.fabric)
    bandwidth = measure(process)
    if fabric.is_efa and (warning := slow_warning(bandwidth, launched.all_reduce_floor_gb_per_s)):
        warn(warning)
    return bandwidth.detail(fabric=fabric.name, num_nodes=process.num_nodes)


def slow_warning(bandwidth: Bandwidth, floor_gb_per_s: float) -> str | None:
    """Return a warning if the bandwidth is below the floor.

    A low bandwidth fails no run, since the floors are not measured.
    """
    if bandwidth.bus_gb_per_s >= floor_gb_per_s:
        return None
    return (
        f"all-reduce between the nodes reached {bandwidth.bus_gb_per_s:.3g} GB/s, under "
        f"{floor_gb_per_s:g} GB/s, a quarter of what their network carries"
    )


def measure(process: Process, message_bytes: int | None = None) -> Bandwidth:
    """Measure an all-reduce over several ranks, which all call it together."""
    size = message_bytes or MESSAGE_BYTES[process.device.type]
    buffer = torch.zeros(size // 4, dtype=torch.float32, device=process.device)
    warmup_s = [_timed(process, buffer, 1) for _ in range(NUM_WARMUPS)][-1]
    per_repeat = max(1, min(MAX_PER_REPEAT, round(REPEAT_S / warmup_s)))
    repeats_s = [_timed(process, buffer, per_repeat) / per_repeat for _ in range(NUM_REPEATS)]
    del buffer
    if process.device.type == "cuda":
        # Leave no trace in the memory statistics of the training.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(process.device)
    return Bandwidth(
        seconds=statistics.median(repeats_s),
        message_bytes=size // 4 * 4,
        num_ranks=process.world_size,
        num_repeats=NUM_REPEATS,
    )


def _timed(process: Process, buffer: torch.Tensor, times: int) -> float:
    """Return the seconds that the slowest rank takes for `times` all-reduces."""
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

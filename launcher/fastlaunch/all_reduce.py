"""What the nodes of a run measured of the network between them, as their records' phase `all-reduce` says."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastlaunch_train.records.records import RankRecord

#: Name of the phase whose detail is read here; `fastlaunch_train.distributed.all_reduce` writes it.
PHASE = "all-reduce"


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """The bandwidth of an all-reduce before the steps.

    bus_gb_per_s: 10^9 bytes per second by nccl-tests' definition, 2 (n - 1) / n x bytes / seconds for n
    ranks. message_bytes: that every rank gave. fabric: the network between nodes, such as `efa`, `socket`.
    """

    bus_gb_per_s: float
    message_bytes: int
    fabric: str

    @property
    def told(self) -> str:
        """`371 GB/s of bus bandwidth between nodes over efa (all-reduce of 256 MiB)`."""
        size = self.message_bytes / 2**20
        return (
            f"{self.bus_gb_per_s:.3g} GB/s of bus bandwidth between nodes over {self.fabric} "
            f"(all-reduce of {size:.3g} MiB)"
        )


def all_reduce_of(records: Sequence[RankRecord]) -> AllReduce | None:
    """What the ranks of one attempt measured; None if they did not, or not in words that are known here.

    All ranks measured the same; where the nodes took different networks, the one that is not EFA is told.
    """
    found = [
        told
        for record in records
        for phase in record.phases
        if phase.name == PHASE and (told := _read(phase.detail or ""))
    ]
    return min(found, key=lambda told: told.fabric == "efa", default=None)


def _read(detail: str) -> AllReduce | None:
    words = dict(word.split("=", 1) for word in detail.split() if "=" in word)
    try:
        bus_gb_per_s, message_bytes = float(words["bus_gb_per_s"]), int(words["bytes"])
    except (KeyError, ValueError):
        return None
    if not (math.isfinite(bus_gb_per_s) and bus_gb_per_s > 0 and message_bytes > 0):
        return None
    return AllReduce(
        bus_gb_per_s=bus_gb_per_s, message_bytes=message_bytes, fabric=words.get("fabric") or "unknown"
    )

"""How many of the host's cores each part of a training uses."""

import multiprocessing
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: As in the FP8 experiment of November 2023.
MAX_WORKERS = 12


def limit_cpu_threads(device: "torch.device", environ: Mapping[str, str] = os.environ) -> None:
    """Run this process's CPU operators on one core if `device` is a GPU, unless OMP_NUM_THREADS is set.

    The CPU has little to do between two steps, the next batch, and on all cores some operators wake a thread
    on each: beside an H200, making and looking up 4,096 tokens took 5 to 15 ms of a 30 ms step on 64 cores,
    and 0.5 ms on one (2026-11-22). torchrun itself sets one core for several ranks.
    """
    if device.type == "cuda" and "OMP_NUM_THREADS" not in environ:
        import torch

        torch.set_num_threads(1)


def default_num_workers(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many processes load images for this rank by default: a core each, up to MAX_WORKERS.

    The ranks on this machine, torchrun's LOCAL_WORLD_SIZE, share its cores.
    """
    ranks = max(1, int(environ.get("LOCAL_WORLD_SIZE", "1")))
    return min(MAX_WORKERS, max(1, len(os.sched_getaffinity(0)) // ranks))


def num_data_workers() -> int:
    """Count the processes that load data for this rank now. Call it after the first batch was fetched.

    Counted, because a user's workload may start fewer than it was asked for.
    """
    # torch's loaders start daemons, pools for other work do not.
    return sum(child.daemon for child in multiprocessing.active_children())

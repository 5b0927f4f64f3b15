"""How many of the host's cores each part of a training takes."""

import multiprocessing
import os
from collections.abc import Mapping

import torch

#: As many loaded the images of a rank in the FP8 experiment of November 2023.
MOST_WORKERS = 12


def leave_cores_alone(device: torch.device, environ: Mapping[str, str] = os.environ) -> None:
    """Have operators on the CPU run on one core in this process, where `device` is a GPU and nobody chose.

    What is left to the CPU between two steps is small: the next batch. On all cores some of its operators
    wake a thread on each: beside an H200, to write and look up 4,096 tokens took 5 to 15 ms of a step of 30
    on 64 cores, and takes 0.5 on one (2026-11-22). One is torchrun's own choice for several ranks;
    OMP_NUM_THREADS overrides it.
    """
    if device.type == "cuda" and "OMP_NUM_THREADS" not in environ:
        torch.set_num_threads(1)


def usual_num_workers(environ: Mapping[str, str] = os.environ) -> int:
    """Processes that load images for this rank where nobody said how many: one for each core of its share.

    At least one, and MOST_WORKERS at most. LOCAL_WORLD_SIZE is torchrun's, of the ranks on this machine.
    """
    ranks = max(1, int(environ.get("LOCAL_WORLD_SIZE", "1")))
    return min(MOST_WORKERS, max(1, len(os.sched_getaffinity(0)) // ranks))


def num_data_workers() -> int:
    """Processes that load data for this rank now: once its first batch was fetched, those of the training.

    They are counted, as a workload of one's own need not take as many as it was asked to.
    """
    # torch's loaders start daemons; a pool of other work is none.
    return sum(child.daemon for child in multiprocessing.active_children())

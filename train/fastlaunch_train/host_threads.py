"""How many of the host's cores torch's own operators take while a GPU trains."""

import os
from collections.abc import Mapping

import torch


def leave_cores_alone(device: torch.device, environ: Mapping[str, str] = os.environ) -> None:
    """Have operators on the CPU run on one core in this process, where `device` is a GPU and nobody chose.

    What is left to the CPU between two steps is small: the next batch. On all cores some of its operators
    wake a thread on each: beside an H200, to write and look up 4,096 tokens took 5 to 15 ms of a step of 30
    on 64 cores, and takes 0.5 on one (2026-11-22). One is torchrun's own choice for several ranks;
    OMP_NUM_THREADS overrides it.
    """
    if device.type == "cuda" and "OMP_NUM_THREADS" not in environ:
        torch.set_num_threads(1)

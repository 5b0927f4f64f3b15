"""One process among its peers: who it is, the data-parallel wrapper, and small messages between ranks."""

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from fastlaunch_train.recipes import Recipe, RecipeError

#: A peer that is silent for longer is taken for dead. Torch's own NCCL default; it must outlast the
#: difference between ranks in compile time.
TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True)
class Process:
    """This process among its peers. Without torchrun: rank 0 of 1, and no process group."""

    rank: int
    local_rank: int
    world_size: int
    num_nodes: int
    device: torch.device


def start_process() -> Process:
    """This process, after joining its peers if there are any.

    Rank and world size come from torchrun's environment variables; the device is the GPU of the local rank,
    or the CPU. On GPUs gradients go through NCCL and messages through gloo, so that a message neither waits
    for the GPU's queue nor adds to it. A peer that dies is an error here within TIMEOUT: at once in gloo,
    when its watchdog sees it in NCCL.
    Raises RecipeError if there are more processes on this machine than GPUs.
    """
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
        if local_rank >= num_gpus:
            raise RecipeError(
                f"{local_world_size} processes were started on a machine with {num_gpus} GPUs",
                f"start {num_gpus} (--nproc-per-node of torchrun)",
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if world_size > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)
    return Process(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        num_nodes=max(1, world_size // local_world_size),
        device=device,
    )


def stop_process() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def wrap_ddp(model: nn.Module, recipe: Recipe, process: Process, *, static_graph: bool = True) -> nn.Module:
    """`model` with its gradients averaged over the ranks; the model itself in a world of one.

    static_graph: every step uses the same parameters in the same order, which no model here breaks (timm's
    stochastic depth multiplies by zero, it skips no module). A compiled model must be compiled before.
    """
    if process.world_size == 1:
        return model
    if recipe.compile_mode != "none":
        # Else a compiled region would be cut wherever a bucket ends.
        torch._dynamo.config.optimize_ddp = False
    return nn.parallel.DistributedDataParallel(
        model,
        device_ids=[process.local_rank] if process.device.type == "cuda" else None,
        bucket_cap_mb=recipe.ddp_bucket_mb,
        gradient_as_bucket_view=True,
        static_graph=static_graph,
    )


def agree(process: Process, values: Sequence[float]) -> list[float]:
    """The largest of each value over the ranks. Values are finite; every rank gives as many."""
    if process.world_size == 1:
        return [float(value) for value in values]
    message = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(message, op=dist.ReduceOp.MAX)
    return [float(value) for value in message]


def broadcast(process: Process, values: Sequence[float]) -> list[float]:
    """Rank 0's values, on every rank; every rank gives as many."""
    if process.world_size == 1:
        return [float(value) for value in values]
    message = torch.tensor(values, dtype=torch.float64)
    dist.broadcast(message, src=0)
    return [float(value) for value in message]


def barrier(process: Process) -> None:
    """Returns when every rank has called it. Does not wait for the device."""
    # Not dist.barrier: with two backends it takes NCCL's.
    agree(process, [0.0])

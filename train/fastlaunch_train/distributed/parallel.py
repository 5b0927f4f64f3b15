"""One process among its peers: who it is, the data-parallel wrapper, and small messages between ranks."""

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastlaunch_train.recipes.recipes import Recipe, RecipeError

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


def join_group(process: Process) -> None:
    """Returns when there is a process group: in a world of one, sharding needs one too."""
    if dist.is_initialized():
        return
    assert process.world_size == 1
    backend = "cpu:gloo,cuda:nccl" if process.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)


def wrap_ddp(
    model: nn.Module, recipe: Recipe, process: Process, *, static_graph: bool | None = None
) -> nn.Module:
    """`model` with its gradients averaged over the ranks; the model itself in a world of one.

    Gradients travel in their parameters' dtype, or in bf16 with wire_dtype=bf16: there each rank rounds its
    own, divides by the world size, and the sum is bf16 too.
    static_graph: every step uses the same parameters in the same order, which no model here breaks (timm's
    stochastic depth multiplies by zero, it skips no module). By default so where torch allows it: not with
    several micro-batches, nor where DDP itself is compiled. A compiled model must be compiled before.
    """
    if process.world_size == 1:
        return model
    compiles_ddp = recipe.compile_mode != "none" and recipe.compile_scope == "wrapped"
    if recipe.compile_mode != "none":
        # Else a compiled region would be cut wherever a bucket ends; what is compiled with DDP has to be.
        torch._dynamo.config.optimize_ddp = compiles_ddp
    if static_graph is None:
        static_graph = recipe.grad_accumulation == 1 and not compiles_ddp
    wrapped = nn.parallel.DistributedDataParallel(
        model,
        device_ids=[process.local_rank] if process.device.type == "cuda" else None,
        bucket_cap_mb=recipe.ddp_bucket_mb,
        gradient_as_bucket_view=True,
        static_graph=static_graph,
    )
    if recipe.wire_dtype == "bf16":
        wrapped.register_comm_hook(None, sum_in_bf16)
    return wrapped


def sum_in_bf16(
    state: Any,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    # Under a name of our own, since DDP takes torch's hook for NCCL alone, and gloo can do it too.
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    return bf16_compress_hook(state, bucket)


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


def broadcast_object(process: Process, value: Any) -> Any:
    """Rank 0's `value`, which pickles, on every rank; every rank calls it."""
    if process.world_size == 1:
        return value
    message = [value]
    dist.broadcast_object_list(message, src=0)
    return message[0]


def barrier(process: Process) -> None:
    """Returns when every rank has called it. Does not wait for the device."""
    # Not dist.barrier: with two backends it takes NCCL's.
    agree(process, [0.0])

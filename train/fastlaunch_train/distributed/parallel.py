"""A rank and its peers: the process group, the DDP wrapper, and small messages between ranks."""

import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastlaunch_train.process.launch import num_nodes
from fastlaunch_train.recipes.recipe import Recipe, RecipeError

#: A peer that is silent for longer counts as dead. This is torch's default for NCCL; compile times of the
#: ranks have to differ by less.
TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True)
class Process:
    """This process among its peers. Without torchrun: rank 0 of 1, no process group."""

    rank: int
    local_rank: int
    world_size: int
    num_nodes: int
    device: torch.device


def start_process() -> Process:
    """Join this process's peers, if there are any, and return it.

    Rank and world size are torchrun's environment variables; the device is the local rank's GPU, or the CPU.
    On GPUs, gradients go through NCCL and messages through gloo, so that a message does not wait for the GPU.
    The death of a peer is an error here: at once in gloo, within TIMEOUT in NCCL.
    Raises RecipeError if this machine has more processes than GPUs.
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
        dist.init_process_group(_backend(device), timeout=TIMEOUT)
    return Process(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        num_nodes=num_nodes(os.environ, world_size),
        device=device,
    )


def stop_process() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def join_group(process: Process) -> None:
    """Create a process group if there is none: sharding needs one even for a single rank."""
    if dist.is_initialized():
        return
    assert process.world_size == 1
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group(_backend(process.device), store=store, rank=0, world_size=1)


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def wrap_ddp(model: nn.Module, recipe: Recipe, process: Process) -> nn.Module:
    """Return `model` with gradients averaged over the ranks; the model itself for a single rank.

    Gradients travel in their parameters' dtype, or in bf16 with wire_dtype=bf16: each rank rounds its
    gradients and divides them by the world size, and the sum is bf16, too. Every step has to use the same
    parameters in the same order, as all models here do: timm's stochastic depth multiplies by zero and skips
    no module. Compile the model first.
    """
    if process.world_size == 1:
        return model
    compiles_ddp = recipe.compile_mode != "none" and recipe.compile_scope == "wrapped"
    if recipe.compile_mode != "none":
        # Compiled regions need cuts at bucket ends only if DDP is compiled with its model.
        torch._dynamo.config.optimize_ddp = compiles_ddp
    # DDP sends rank 0's values at its start, which weights in FP8 or 4 bits do not allow. Every rank has
    # rounded the same ones.
    rounded = [name for name, value in model.named_parameters() if type(value.data) is not torch.Tensor]
    ignore: Callable[..., None] = (
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    )
    ignore(model, rounded)
    wrapped = nn.parallel.DistributedDataParallel(
        model,
        device_ids=[process.local_rank] if process.device.type == "cuda" else None,
        bucket_cap_mb=recipe.ddp_bucket_mb,
        gradient_as_bucket_view=True,
        # torch allows it with one micro-batch and uncompiled DDP.
        static_graph=recipe.grad_accumulation == 1 and not compiles_ddp,
    )
    if recipe.wire_dtype == "bf16":
        wrapped.register_comm_hook(None, sum_in_bf16)
    return wrapped


def sum_in_bf16(
    state: Any,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    # DDP refuses torch's own hook without NCCL, although gloo supports it.
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    return bf16_compress_hook(state, bucket)


def agree(process: Process, values: Sequence[float]) -> list[float]:
    """Return the maximum of each value over the ranks. All ranks give equally many finite values."""
    message = torch.tensor(values, dtype=torch.float64)
    if process.world_size > 1:
        dist.all_reduce(message, op=dist.ReduceOp.MAX)
    agreed: list[float] = message.tolist()
    return agreed


def broadcast_object(process: Process, value: Any) -> Any:
    """Return rank 0's `value`, which can be pickled, on every rank. All ranks call it."""
    if process.world_size == 1:
        return value
    message = [value]
    dist.broadcast_object_list(message, src=0)
    return message[0]


def gather_object(process: Process, value: Any) -> list[Any]:
    """Return all ranks' values in order on rank 0, only this rank's elsewhere. Every rank calls it."""
    if process.world_size == 1:
        return [value]
    gathered: list[Any] | None = [None] * process.world_size if process.rank == 0 else None
    dist.gather_object(value, gathered)
    return gathered or [value]


def barrier(process: Process) -> None:
    """Return once every rank has called it, without waiting for the device."""
    # Not dist.barrier, which uses NCCL if there are two backends.
    agree(process, [0.0])

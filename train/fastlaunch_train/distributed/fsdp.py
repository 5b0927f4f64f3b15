"""Shard parameters over the ranks by torch's fully_shard (FSDP2), and read its shards."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fastlaunch_train.distributed.parallel import Process, join_group
from fastlaunch_train.recipes.recipe import Recipe


def shard(
    model: nn.Module, blocks: nn.ModuleList | nn.Sequential | None, recipe: Recipe, process: Process
) -> nn.Module:
    """Shard each block of `model`, and the rest of it, over all ranks, in place; return it.

    In bf16 and fp16 the shards keep the parameters' dtype and are gathered in autocast's. This halves the
    traffic and gives products the same operands as autocast, but also rounds layer norms, biases and
    embeddings, which autocast leaves in fp32. Batch norms have fp32 running statistics, and stay in fp32.
    Gradients are reduced in the recipe's wire_dtype.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    join_group(process)
    computed = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
    reduced = torch.bfloat16 if recipe.wire_dtype == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=computed.get(recipe.precision),
        reduce_dtype=reduced,
        # Autocast casts only the inputs of operators that it runs in bf16.
        cast_forward_inputs=False,
    )
    mesh = init_device_mesh(process.device.type, (process.world_size,))
    uncast = MixedPrecisionPolicy(reduce_dtype=reduced, cast_forward_inputs=False)
    for module in [module for module in model.modules() if isinstance(module, _BatchNorm)]:
        fully_shard(module, mesh=mesh, mp_policy=uncast)
    for block in blocks or ():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def whole(state: dict[str, Any], *, keep: bool) -> dict[str, Any]:
    """Return a state dict with its shards gathered, on the CPU; all ranks call it.

    keep: whether this rank keeps the result; if not, sharded tensors are None and take no memory.
    """

    def gathered(value: Any) -> Any:
        if not is_sharded(value):
            return value
        full = value.detach().full_tensor()
        return full.cpu() if keep else None

    return {name: gathered(value) for name, value in state.items()}


def layout(value: Any) -> dict[str, Any]:
    """Return, as plain values, what `empty` needs to make a sharded tensor like this one."""
    dims = [placement.dim if placement.is_shard() else None for placement in value.placements]
    return {"size": [*value.shape], "dtype": value.dtype, "dims": dims}


def empty(like: dict[str, Any], process: Process) -> torch.Tensor:
    """Return a tensor of that `layout`, sharded over all present ranks, with any values."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import empty as empty_shards

    mesh = init_device_mesh(process.device.type, (process.world_size,))
    placements = [Replicate() if dim is None else Shard(dim) for dim in like["dims"]]
    return empty_shards(*like["size"], dtype=like["dtype"], device_mesh=mesh, placements=placements)


def shard_like(value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return `value`, the same on every rank, sharded as `parameter` is; all ranks call it."""
    if not is_sharded(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]


def reshard(model: nn.Module) -> None:
    """Turn parameters back into shards: an evaluation leaves the root's parameters gathered."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_shard(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of `value`, or `value` if it is not sharded."""
    return value.to_local() if is_sharded(value) else value  # type: ignore[attr-defined]


def is_sharded(value: Any) -> bool:
    """Return whether each rank has a part of `value`."""
    return hasattr(value, "full_tensor")

"""Shard parameters over the ranks by torch's fully_shard (FSDP2), and gather states from shards."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from fastlaunch_train.distributed.parallel import Process, join_group
from fastlaunch_train.recipes.recipe import Recipe

#: Keys of a gathered tensor: the whole tensor, and the dimension that each dimension of the mesh shards.
_FULL, _SHARDS = "full", "shards"


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


def gather(value: Any, *, keep: bool) -> Any:
    """Return `value`, nested mappings and lists, with its shards gathered on the CPU; all ranks call it.

    keep: whether this rank keeps the result; if not, tensors are None and take no memory.
    """

    def gathered(leaf: Any) -> Any:
        if not _is_sharded(leaf):
            return leaf
        full = leaf.detach().full_tensor()
        shards = [placement.dim if placement.is_shard() else None for placement in leaf.placements]
        return {_FULL: full.cpu(), _SHARDS: shards} if keep else None

    return tree_map(gathered, value)


def whole(state: dict[str, Any], *, keep: bool) -> dict[str, Any]:
    """Return a state dict without shards, on the CPU; all ranks call it. keep: as in `gather`."""
    gathered = gather(state, keep=keep)
    return {name: value[_FULL] if isinstance(value, dict) else value for name, value in gathered.items()}


def scatter(value: Any, process: Process) -> Any:
    """Shard again what `gather` returned; all ranks call it with the same value."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(process.device.type, (process.world_size,))

    def is_gathered(part: Any) -> bool:
        return isinstance(part, dict) and part.keys() == {_FULL, _SHARDS}

    def sharded(leaf: Any) -> Any:
        if not is_gathered(leaf):
            return leaf
        placements = [Replicate() if dim is None else Shard(dim) for dim in leaf[_SHARDS]]
        return distribute_tensor(leaf[_FULL].to(process.device), mesh, placements)

    return tree_map(sharded, value, is_leaf=is_gathered)


def shard_like(value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return `value`, the same on every rank, sharded as `parameter` is; all ranks call it."""
    if not _is_sharded(parameter):
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
    return value.to_local() if _is_sharded(value) else value  # type: ignore[attr-defined]


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "full_tensor")

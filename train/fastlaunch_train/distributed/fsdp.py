"""Parameters sharded over the ranks by torch's fully_shard (FSDP2), and states gathered from the shards."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fastlaunch_train.distributed.parallel import Process, join_group
from fastlaunch_train.recipes.recipes import Recipe

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Under which a gathered tensor is saved, beside the dimension that each dimension of the mesh shards.
_FULL, _SHARDS = "full", "shards"


def shard(
    model: nn.Module, blocks: nn.ModuleList | nn.Sequential | None, recipe: Recipe, process: Process
) -> nn.Module:
    """`model` with each block and the rest sharded over all ranks, in place.

    In bf16 and fp16 the shards stay in the parameters' dtype and are gathered in the autocast's, which halves
    what travels and gives the products the same operands as autocast; layer norms, biases and embeddings
    are rounded too, which autocast alone leaves in fp32. Batch norms are not: their running statistics are
    fp32. Gradients are reduced in the recipe's wire_dtype.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    join_group(process)
    computed = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
    reduced = torch.bfloat16 if recipe.wire_dtype == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=computed.get(recipe.precision),
        reduce_dtype=reduced,
        # Autocast casts the inputs of what it computes in bf16, and of nothing else.
        cast_forward_inputs=False,
    )
    mesh = init_device_mesh(process.device.type, (process.world_size,))
    as_it_is = MixedPrecisionPolicy(reduce_dtype=reduced, cast_forward_inputs=False)
    for module in [module for module in model.modules() if isinstance(module, _BatchNorm)]:
        fully_shard(module, mesh=mesh, mp_policy=as_it_is)
    for block in blocks or ():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def gathered(value: Any, *, keep: bool) -> Any:
    """`value`, a nest of mappings and lists, with its shards gathered on the CPU; every rank has to call it.

    keep: whether this rank wants the result; else its tensors are left out, so that they take no memory.
    """
    if isinstance(value, dict):
        return {key: gathered(item, keep=keep) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [gathered(item, keep=keep) for item in value]
    if not _is_sharded(value):
        return value
    full = value.detach().full_tensor()
    if not keep:
        return None
    shards = [placement.dim if placement.is_shard() else None for placement in value.placements]
    return {_FULL: full.cpu(), _SHARDS: shards}


def sharded(value: Any, process: Process) -> Any:
    """What was `gathered`, sharded as it was; every rank has to call it with the same."""
    from torch.distributed.device_mesh import init_device_mesh

    return _sharded(value, init_device_mesh(process.device.type, (process.world_size,)), process.device)


def _sharded(value: Any, mesh: "DeviceMesh", device: torch.device) -> Any:
    if isinstance(value, list):
        return [_sharded(item, mesh, device) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {_FULL, _SHARDS}:
        return {key: _sharded(item, mesh, device) for key, item in value.items()}
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placements = [Replicate() if dim is None else Shard(dim) for dim in value[_SHARDS]]
    return distribute_tensor(value[_FULL].to(device), mesh, placements)


def reshard(model: nn.Module) -> None:
    """Have every parameter of `model` be this rank's shard: an evaluation leaves the root's gathered."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(value: torch.Tensor) -> torch.Tensor:
    """This rank's share of `value`, which may be no shard at all."""
    return value.to_local() if _is_sharded(value) else value  # type: ignore[attr-defined]


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "full_tensor")

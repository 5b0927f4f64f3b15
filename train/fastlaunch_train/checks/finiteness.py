"""Check that a step left only finite values, so that a training can go on."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten_with_path

from fastlaunch_train.distributed.fsdp import local_shard

#: The state-dict key of Transformer Engine's FP8 scales.
_EXTRA_STATE = "_extra_state"
#: Prefixes that DDP, DeepSpeed, ONNX Runtime and torch.compile add to the names in a wrapped model.
_WRAPPERS = {"module", "_orig_mod", "_torch_module", "_original_module"}
#: Without 8-bit dtypes, which torch cannot compare on a CPU.
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def not_finite(state: Any, model: nn.Module) -> list[str]:
    """Return the names of the tensors in `state`, a nest of mappings and lists, that are not finite.

    model: wrapped or not. Its buffers and frozen parameters may be infinite, as masks are, but not NaN; so
        may FP8 scales.
    Waits for a GPU once.
    """
    frozen = [name for name, value in model.named_parameters() if not value.requires_grad]
    masks = {_unwrapped(name) for name in (*frozen, *(name for name, _ in model.named_buffers()))}
    # Each entry of a path is a mapping's key or an index.
    tensors = [
        ([str(getattr(entry, "key", getattr(entry, "idx", ""))) for entry in path], value.detach())
        for path, value in tree_flatten_with_path(state)[0]
        if isinstance(value, torch.Tensor) and value.dtype in _DTYPES and value.numel()
    ]
    extremes = _extremes([value for _, value in tensors])
    bad = []
    for (path, _), (least, most) in zip(tensors, extremes, strict=True):
        may_be_infinite = any(key.endswith(_EXTRA_STATE) or _unwrapped(key) in masks for key in path)
        limit = float("inf")
        if least != least or most != most or (not may_be_infinite and (least == -limit or most == limit)):
            bad.append(".".join(path))
    return bad


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the trained parameters of `model` and its saved buffers, by their names without wrappers.

    A sharded parameter is represented by this rank's shard, so that no rank waits for another.
    """
    parameters = [(name, value.detach()) for name, value in model.named_parameters() if value.requires_grad]
    tensors = {name: local_shard(value) for name, value in parameters}
    for prefix, module in model.named_modules():
        not_saved = module._non_persistent_buffers_set
        buffers = module.named_buffers(prefix, recurse=False)
        tensors |= {name: value for name, value in buffers if name.rpartition(".")[2] not in not_saved}
    return {_unwrapped(name): value for name, value in tensors.items()}


def first_names(names: list[str]) -> str:
    """Return the first of `names`, and the number of the others."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def not_finite_message(step: int, names: list[str]) -> str:
    """Return a message that `step` left non-finite values, with their `names` on this rank, if any."""
    return f"what step {step} left is not finite{f' ({first_names(names)})' if names else ''}"


def _extremes(values: Iterable[torch.Tensor]) -> list[list[float]]:
    """Return the minimum and maximum of each tensor, or NaN; synchronises with each device once.

    Allocates nothing of a tensor's size.
    """
    pairs: list[torch.Tensor] = []
    by_device: dict[torch.device, list[int]] = {}
    for index, value in enumerate(values):
        pairs.append(torch.stack(torch.aminmax(value)).double())
        by_device.setdefault(value.device, []).append(index)
    extremes: dict[int, list[float]] = {}
    for indices in by_device.values():
        read = torch.stack([pairs[index] for index in indices]).tolist()
        extremes.update(zip(indices, read, strict=True))
    return [extremes[index] for index in range(len(pairs))]


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)

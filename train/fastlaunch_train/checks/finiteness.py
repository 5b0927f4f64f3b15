"""Whether what a step left can be gone on from, or used: no NaN in it, and nothing infinite."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fastlaunch_train.distributed.fsdp import local

#: How Transformer Engine's modules call what they save of their FP8 scales.
_EXTRA_STATE = "_extra_state"
#: What DDP, DeepSpeed, ONNX Runtime and torch.compile put into the names of a model that they wrap.
_WRAPPERS = {"module", "_orig_mod", "_torch_module", "_original_module"}
#: Of an 8-bit number nothing is known: it has no largest value on a CPU.
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def not_finite(state: Any, model: nn.Module) -> list[str]:
    """Names of the tensors in `state`, a nest of mappings and lists, that are not finite; empty if all are.

    model: wrapped or not, whose buffers, and parameters that are not trained, may be infinite, as masks are,
        but not NaN; so may be FP8 scales.
    A GPU is waited for once.
    """
    frozen = [name for name, value in model.named_parameters() if not value.requires_grad]
    masks = {_unwrapped(name) for name in (*frozen, *(name for name, _ in model.named_buffers()))}
    found = [(path, value) for path, value in _tensors(state, ()) if value.dtype in _DTYPES and value.numel()]
    values = _extremes([value for _, value in found])
    bad = []
    for (path, _), (least, most) in zip(found, values, strict=True):
        may_be_infinite = any(key.endswith(_EXTRA_STATE) or _unwrapped(key) in masks for key in path)
        limit = float("inf")
        if least != least or most != most or (not may_be_infinite and (least == -limit or most == limit)):
            bad.append(".".join(path))
    return bad


def trained(model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """The parameters of `model` that are trained, and its buffers that are saved, by their names in it.

    model: wrapped or not. Of what is sharded it is the share of this `rank`, which waits for no other.
    """
    found = {name: _own(value, rank) for name, value in model.named_parameters() if value.requires_grad}
    for prefix, module in model.named_modules():
        passing = module._non_persistent_buffers_set
        buffers = module.named_buffers(prefix, recurse=False)
        found |= {name: value for name, value in buffers if name.rpartition(".")[2] not in passing}
    return {_unwrapped(name): value for name, value in found.items()}


def told(names: list[str]) -> str:
    """The first of `names`, and how many others there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def told_of(step: int, names: list[str]) -> str:
    """That what `step` left is not finite: `names` of it on this rank, which may be none."""
    return f"what step {step} left is not finite{f' ({told(names)})' if names else ''}"


def _own(parameter: nn.Parameter, rank: int) -> torch.Tensor:
    share = getattr(parameter, "ds_tensor", None)
    if share is None:
        return local(parameter.detach())
    # By DeepSpeed, whose last shares are longer than the parameter, by what the memory happened to hold.
    left: int = parameter.ds_numel - rank * share.numel()  # type: ignore[attr-defined]
    own: torch.Tensor = share.detach().flatten()[: max(0, left)]
    return own


def _tensors(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value.detach()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(item, (*path, str(index)))


def _extremes(values: Iterable[torch.Tensor]) -> list[list[float]]:
    """Least and largest of each, NaN where there is one: read once, and nothing of its size is made of it."""
    pairs: list[torch.Tensor] = []
    for value in values:
        # Torch 1.13 has no extremes of fp16 on a CPU.
        known = value.float() if value.dtype == torch.float16 and value.device.type == "cpu" else value
        pairs.append(torch.stack(torch.aminmax(known)).double())
    on: dict[torch.device, list[int]] = {}
    for index, pair in enumerate(pairs):
        on.setdefault(pair.device, []).append(index)
    found: list[list[float]] = [[] for _ in pairs]
    for indices in on.values():
        for index, both in zip(
            indices, torch.stack([pairs[index] for index in indices]).tolist(), strict=True
        ):
            found[index] = both
    return found


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)

"""Whether a training can go on from what a checkpoint holds: no NaN in it, and nothing infinite."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

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


def told(names: list[str]) -> str:
    """The first of `names`, and how many others there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


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

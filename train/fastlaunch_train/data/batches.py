"""A batch in parts: any nest of tuples, lists and mappings of tensors, split along the samples."""

from collections.abc import Mapping
from typing import Any

import torch

from fastlaunch_train.recipes.recipes import RecipeError
from fastlaunch_train.workloads.contract import Batch


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """`batch` in `parts` micro-batches of equal size, views of it; what is no tensor is in each of them.

    Raises RecipeError if a tensor's first dimension does not divide by `parts`.
    """
    if parts == 1:
        return [batch]
    return [_part(batch, index, parts) for index in range(parts)]


def _part(value: Any, index: int, parts: int) -> Any:
    if isinstance(value, torch.Tensor):
        size = value.shape[0] if value.dim() else 0
        if size == 0 or size % parts:
            raise RecipeError(
                f"a batch of {size} does not divide into {parts} micro-batches",
                f"give a --batch-size that is a multiple of grad_accumulation={parts}",
            )
        return value[index * (size // parts) : (index + 1) * (size // parts)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_part(item, index, parts) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_part(item, index, parts) for item in value)
    if isinstance(value, Mapping):
        return {key: _part(item, index, parts) for key, item in value.items()}
    return value

"""Blocks whose activations are computed again in the backward pass instead of kept."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from fastlaunch_train.recipes.recipes import Recipe, RecipeError


def checkpoint_blocks(blocks: nn.ModuleList | nn.Sequential | None, recipe: Recipe) -> None:
    """Have each of `blocks` keep its inputs alone, in place; names in the state dict stay as they were.

    Transformer Engine's blocks go through its own checkpoint, which computes with the same FP8 scales again.
    A block that keeps something between calls, such as a cache of keys, would keep it twice.
    Raises RecipeError if there are no blocks.
    """
    if blocks is None:
        raise RecipeError(
            f"recipe {recipe.label} recomputes each transformer block, and the model has none",
            "add --set activation_checkpointing=none",
        )
    again: Callable[..., Any] = torch.utils.checkpoint.checkpoint
    if recipe.blocks != "native":
        import transformer_engine.pytorch as te

        again = te.checkpoint
    for block in blocks:
        # Through __dict__: a module's __setattr__ is for parameters and modules, and mypy knows no other.
        block.__dict__["forward"] = _recomputed(block.forward, again)


def _recomputed(forward: Callable[..., Any], again: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return again(forward, *args, use_reentrant=False, **kwargs)

    return call

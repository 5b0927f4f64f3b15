"""Transformer Engine's FP8, from release 2.0 on: its recipe object for our recipe, and its autocast."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from fastlaunch_train.recipes.recipe import TE_SCALINGS, Recipe

#: Makes the context of a forward pass.
MakeContext = Callable[[], AbstractContextManager[Any]]

#: Transformer Engine's name of each scaling.
TE_SCALING_CLASSES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}


def fp8_recipe(recipe: Recipe, load: Callable[[str], Any] = importlib.import_module) -> Any:
    """Return Transformer Engine's recipe object for the recipe's FP8 fields; None if it computes no FP8.

    Every argument is given, since the defaults depend on the GPU. `delayed` takes the largest of the maxima
    of the last `amax_history` steps.
    """
    if recipe.fp8_scaling not in TE_SCALINGS or recipe.blocks == "fused":
        return None
    module = load("transformer_engine.common.recipe")
    arguments: dict[str, Any] = {
        "fp8_format": module.Format.HYBRID if recipe.fp8_format == "hybrid" else module.Format.E4M3
    }
    if recipe.fp8_scaling == "delayed":
        arguments |= {"amax_history_len": recipe.amax_history, "amax_compute_algo": "max"}
    return getattr(module, TE_SCALING_CLASSES[recipe.fp8_scaling])(**arguments)


def te_autocast(
    te_recipe: Any, *, enabled: bool = True, load: Callable[[str], Any] = importlib.import_module
) -> AbstractContextManager[Any]:
    """Return the context in which Transformer Engine's modules compute in FP8 as `te_recipe` says, or do not.

    The innermost of nested contexts counts.
    """
    te = load("transformer_engine.pytorch")
    # `autocast` since Transformer Engine 2.9, `fp8_autocast` before.
    context: AbstractContextManager[Any]
    if hasattr(te, "autocast"):
        context = te.autocast(enabled=enabled, recipe=te_recipe)
    else:
        context = te.fp8_autocast(enabled=enabled, fp8_recipe=te_recipe)
    return context


def no_fp8() -> AbstractContextManager[Any]:
    """Return a context in which Transformer Engine's modules compute in bf16, whatever surrounds it."""
    return te_autocast(None, enabled=False)


def nested(*contexts: MakeContext) -> MakeContext:
    """Return a maker of one context that enters several, in order."""

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            yield

    return enter


def reset_scales(model: nn.Module) -> None:
    """Reset the scales of delayed scaling in `model` to those of modules that have not run yet."""
    for module in model.modules():
        state = getattr(module, "fp8_meta", {}).get("scaling_fwd")
        # Other scalings remember nothing between passes.
        if hasattr(state, "amax_history"):
            module.reset_fp8_meta_tensors()  # type: ignore[operator]

"""Transformer Engine's FP8: its recipe object for a recipe of ours, and its autocast, from release 2.0 on."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from fastlaunch_train.recipes.recipes import Recipe
from fastlaunch_train.recipes.rules import TE_SCALINGS

#: Makes the context of one forward pass.
MakeContext = Callable[[], AbstractContextManager[Any]]

#: What Transformer Engine calls each scaling, and the release that brought it (its release notes).
TE_SCALING_CLASSES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
TE_RELEASES = {"delayed": (2, 0), "current": (2, 2), "block": (2, 3), "mxfp8": (2, 0)}


def fp8_recipe(recipe: Recipe, load: Callable[[str], Any] = importlib.import_module) -> Any:
    """Transformer Engine's own recipe object for the recipe's FP8 fields; None where FP8 is not its work.

    Always explicit, since its default depends on the GPU. `delayed` takes the largest of the last
    `amax_history` steps' maxima.
    """
    if recipe.fp8_scaling not in TE_SCALINGS:
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
    """Transformer Engine's context in which its modules compute in FP8 as `te_recipe` says, or do not.

    Contexts nest: the inner one counts.
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
    """A context in which Transformer Engine's modules compute in bf16, whatever surrounds it."""
    return te_autocast(None, enabled=False)


def nested(*contexts: MakeContext) -> MakeContext:
    """Makes one context of several, entered in order."""
    return functools.partial(_nested, contexts)


@contextlib.contextmanager
def _nested(contexts: tuple[MakeContext, ...]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


def reset_scales(model: nn.Module) -> None:
    """Make the scales of delayed scaling in `model` those of modules that have computed nothing yet."""
    for module in model.modules():
        state = getattr(module, "fp8_meta", {}).get("scaling_fwd")
        # The other scalings keep nothing between passes.
        if hasattr(state, "amax_history"):
            module.reset_fp8_meta_tensors()  # type: ignore[operator]

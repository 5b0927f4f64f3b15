"""A native model made into the one that a recipe trains: other blocks, FP8 products, pointwise functions."""

import contextlib
from collections.abc import Callable

from torch import nn

from fastlaunch_train.models.te_fp8 import MakeContext, no_fp8
from fastlaunch_train.recipes.recipes import Recipe, RecipeError
from fastlaunch_train.recipes.rules import TORCHAO_SCALINGS
from fastlaunch_train.workloads.contract import Workload


def convert_model(
    model: nn.Module,
    workload: Workload,
    recipe: Recipe,
    *,
    layer_factory: Callable[..., nn.Module] | None = None,
    outside_fp8: MakeContext = no_fp8,
) -> None:
    """Change `model`, in place, as the recipe's blocks, fp8_scaling, fp8_blocks and pointwise say.

    Its weights, device and mode stay; what `workload.build_model` built computes the same before and after,
    but for `blocks=te-article`. layer_factory: instead of Transformer Engine's TransformerLayer.
    outside_fp8: makes the context of a block that is not in fp8_blocks.
    Raises RecipeError where the workload has nothing to change so.
    """
    if recipe.pointwise != "written":
        if workload.pointwise is None:
            raise RecipeError(
                f"recipe {recipe.label}: workload {workload.name} writes out no pointwise functions",
                "use a recipe with pointwise=written, or the workload gelu",
            )
        workload.pointwise(model, recipe.pointwise)
    if recipe.blocks == "native" and recipe.fp8_scaling not in TORCHAO_SCALINGS:
        return
    if workload.blocks is None:
        raise RecipeError(
            f"recipe {recipe.label}: workload {workload.name} has no transformer blocks to change",
            "use a recipe with blocks=native and without FP8",
        )
    blocks = workload.blocks(model)
    in_fp8 = fp8_blocks(recipe, len(blocks))
    contexts: list[MakeContext] = [
        contextlib.nullcontext if index in in_fp8 else outside_fp8 for index in range(len(blocks))
    ]
    if recipe.blocks == "te":
        from fastlaunch_train.models.te_blocks import replace_blocks

        replace_blocks(model, blocks, contexts=contexts, layer_factory=layer_factory)
    elif recipe.blocks == "te-article":
        from fastlaunch_train.article_blocks import replace_with_article_blocks

        replace_with_article_blocks(blocks, contexts=contexts, layer_factory=layer_factory)
    else:
        from fastlaunch_train.float8 import convert_to_float8

        on_gpu = next(model.parameters()).device.type == "cuda"
        convert_to_float8([blocks[index] for index in in_fp8], recipe, emulate=not on_gpu)


def fp8_blocks(recipe: Recipe, num_blocks: int) -> range:
    """The blocks, from 0, that compute in FP8 in a recipe that has any such.

    Raises RecipeError if the recipe's slice takes none of the model's `num_blocks`.
    """
    if recipe.fp8_blocks == "all":
        return range(num_blocks)
    start, stop = (int(text) if text else None for text in recipe.fp8_blocks.split(":"))
    chosen = range(num_blocks)[start:stop]
    if not chosen:
        raise RecipeError(
            f"recipe {recipe.label}: none of the model's {num_blocks} blocks is in fp8_blocks",
            "give all, or a slice that takes some, such as 1:-1",
        )
    return chosen

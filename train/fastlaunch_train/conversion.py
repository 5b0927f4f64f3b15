"""A native model made into the one that a recipe trains: other blocks, FP8 products, pointwise functions."""

from torch import nn

from fastlaunch_train.recipes import Recipe, RecipeError
from fastlaunch_train.workload import Workload


def convert_model(model: nn.Module, workload: Workload, recipe: Recipe) -> None:
    """Change `model`, in place, as the recipe's blocks, fp8_scaling, fp8_blocks and pointwise say.

    Its weights, device and mode stay; what `workload.build_model` built computes the same before and after,
    but for `blocks=te-article`. Raises RecipeError where the workload has nothing to change so.
    """
    if recipe.blocks == "te":
        from fastlaunch_train.blocks import replace_blocks

        if workload.blocks is None:
            raise RecipeError(
                f"recipe {recipe.name}: workload {workload.name} has no transformer blocks to replace",
                "use a recipe with blocks=native",
            )
        replace_blocks(model, workload.blocks(model))

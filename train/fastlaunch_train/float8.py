"""torchao's float8 training in a model's own blocks: their Linear layers compute in FP8."""

from collections.abc import Iterable

from torch import nn

from fastlaunch_train.recipes.recipes import Recipe, RecipeError

#: FP8 products need both dimensions of a weight to be multiples of it.
_MULTIPLE = 16


def convert_to_float8(blocks: Iterable[nn.Module], recipe: Recipe, *, emulate: bool) -> None:
    """Change the Linear layers of `blocks` into torchao's, with the same weights under the same names.

    What is outside the blocks, the patch embedding and the head among it, stays in bf16. emulate: compute
    FP8 products in higher precision from values rounded to FP8, where there are no units for them.
    Raises RecipeError if a block has no layer that can be converted.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe.fp8_scaling)
    if emulate:
        # Set by its field, since the named configurations take no arguments; dataclasses.replace would
        # check again what they have filled in.
        object.__setattr__(config, "emulate", True)
    for block in blocks:
        chosen = [
            name
            for name, module in block.named_modules()
            if isinstance(module, nn.Linear) and takes_float8(module, recipe.fp8_scaling)
        ]
        if not chosen:
            raise RecipeError(
                f"recipe {recipe.label}: a {type(block).__name__} of the model has no Linear layer that "
                f"{recipe.fp8_scaling} FP8 is for",
                "use a recipe without FP8, or of another scaling",
            )
        convert_to_float8_training(
            block, config=config, module_filter_fn=lambda module, name, chosen=chosen: name in chosen
        )
        block.train(block.training)


def takes_float8(layer: nn.Linear, scaling: str) -> bool:
    """Whether FP8 with `scaling` is for a layer of this size.

    `rowwise` is for those that gain by it: torchao's own bounds, measured on H100 (torchao 0.18, in
    `float8_linear_utils._auto_filter_for_rowwise`). Of a ViT-Huge block that leaves the MLP's first layer.
    """
    outputs, inputs = layer.weight.shape
    if outputs % _MULTIPLE or inputs % _MULTIPLE:
        return False
    if scaling != "rowwise":
        return True
    return outputs > 2048 and inputs > 1024 and not (outputs <= 4096 and inputs <= 2048)

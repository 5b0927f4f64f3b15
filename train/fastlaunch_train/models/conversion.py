"""A native model turned into the one a recipe trains: other blocks, FP8 products, pointwise functions."""

import contextlib
from collections.abc import Callable, Iterable

import torch
from torch import nn

from fastlaunch_train.models.frozen import frozen_linears, hold_frozen, hold_in_fp8, hold_in_nf4
from fastlaunch_train.models.te_fp8 import MakeContext, no_fp8
from fastlaunch_train.recipes.recipe import TORCHAO_SCALINGS, Recipe, RecipeError
from fastlaunch_train.workloads.contract import Workload

#: FP8 products need weights whose two dimensions are multiples of this.
_MULTIPLE = 16
#: The dtype in which a recipe's precision holds frozen weights; others hold them in fp32.
_HELD_IN = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}


def check_conversion(model: nn.Module, workload: Workload, recipe: Recipe) -> None:
    """Raise RecipeError if `convert_model` would refuse the model, before anything is computed with it."""
    if recipe.pointwise != "written" and workload.pointwise is None:
        raise RecipeError(
            f"recipe {recipe.label}: workload {workload.name} writes out no pointwise functions",
            "use a recipe with pointwise=written, or the workload gelu",
        )
    if recipe.kernels != "torch" and workload.use_kernels is None:
        raise RecipeError(
            f"recipe {recipe.label}: {recipe.kernels} replaces no function of workload {workload.name}",
            "use a recipe with kernels=torch, or fine-tune a language model, as in hf-lora:llama-3.1-8b",
        )
    if recipe.frozen_weights != "native" and not frozen_linears(model, workload):
        raise RecipeError(
            f"recipe {recipe.label}: workload {workload.name} trains all its Linear layers",
            "use a recipe with frozen_weights=native, or a workload such as hf-lora:llama-3.1-8b",
        )
    if not _changes_blocks(recipe):
        return
    if workload.blocks is None:
        raise RecipeError(
            f"recipe {recipe.label}: workload {workload.name} has no transformer blocks to replace",
            "use a recipe with blocks=native and without FP8",
        )
    blocks = workload.blocks(model)
    in_fp8 = fp8_blocks(recipe, len(blocks))
    if recipe.blocks == "te":
        from fastlaunch_train.models.te_blocks import te_arguments

        for block in blocks:
            te_arguments(block)
    elif recipe.blocks == "fused":
        from fastlaunch_train.models.fp8_fused.block import check_blocks

        if recipe.last_block == "class_token" and getattr(model, "global_pool", None) != "token":
            raise RecipeError(
                f"recipe {recipe.label}: this model does not classify by its class token alone",
                "add --set last_block=all",
            )
        check_blocks(blocks, recipe)
    elif recipe.blocks == "te-article":
        from fastlaunch_train.models.te_blocks import article_arguments

        for block in blocks:
            article_arguments(block)
    else:
        for index in in_fp8:
            _float8_layers(blocks[index], recipe)


def _changes_blocks(recipe: Recipe) -> bool:
    return recipe.blocks != "native" or recipe.fp8_scaling in TORCHAO_SCALINGS


def convert_model(
    model: nn.Module,
    workload: Workload,
    recipe: Recipe,
    *,
    layer_factory: Callable[..., nn.Module] | None = None,
    outside_fp8: MakeContext = no_fp8,
) -> None:
    """Change `model`, in place, as the recipe's blocks, fp8_scaling, fp8_blocks and pointwise say.

    The model keeps its weights, device and mode, and computes the same as before, unless blocks=te-article.
    layer_factory: replaces Transformer Engine's TransformerLayer in tests. outside_fp8: makes the context of
    a block that is not in fp8_blocks. Raises RecipeError if the workload has nothing to change so.
    """
    check_conversion(model, workload, recipe)
    hold_frozen(model, workload, _HELD_IN.get(recipe.precision, torch.float32))
    if recipe.kernels != "torch" and workload.use_kernels is not None:
        workload.use_kernels(model, recipe.kernels)
    if recipe.frozen_weights == "nf4":
        hold_in_nf4(frozen_linears(model, workload))
    if recipe.pointwise != "written" and workload.pointwise is not None:
        workload.pointwise(model, recipe.pointwise)
    if not _changes_blocks(recipe) or workload.blocks is None:
        return
    blocks = workload.blocks(model)
    in_fp8 = fp8_blocks(recipe, len(blocks))
    contexts: list[MakeContext] = [
        contextlib.nullcontext if index in in_fp8 else outside_fp8 for index in range(len(blocks))
    ]
    if recipe.blocks == "te":
        from fastlaunch_train.models.te_blocks import replace_blocks

        replace_blocks(model, blocks, contexts=contexts, layer_factory=layer_factory)
    elif recipe.blocks == "fused":
        from fastlaunch_train.models.fp8_fused.block import patches_by_product
        from fastlaunch_train.models.fp8_fused.block import replace_blocks as replace_by_fused

        replace_by_fused(blocks, recipe)
        patches_by_product(model)
    elif recipe.blocks == "te-article":
        from fastlaunch_train.models.te_blocks import replace_with_article_blocks

        replace_with_article_blocks(blocks, contexts=contexts, layer_factory=layer_factory)
    else:
        on_gpu = next(model.parameters()).device.type == "cuda"
        convert_to_float8([blocks[index] for index in in_fp8], recipe, emulate=not on_gpu)
        if recipe.frozen_weights == "fp8":
            hold_in_fp8(frozen_linears(model, workload))


def fp8_blocks(recipe: Recipe, num_blocks: int) -> range:
    """Return the blocks, from 0, that compute in FP8.

    Raises RecipeError if the recipe's slice has none of the model's `num_blocks`.
    """
    if recipe.fp8_blocks == "all":
        return range(num_blocks)
    start, stop = (int(text) if text else None for text in recipe.fp8_blocks.split(":"))
    selected = range(num_blocks)[start:stop]
    if not selected:
        raise RecipeError(
            f"recipe {recipe.label}: none of the model's {num_blocks} blocks is in fp8_blocks",
            "give all, or another slice, such as 1:-1",
        )
    return selected


def convert_to_float8(blocks: Iterable[nn.Module], recipe: Recipe, *, emulate: bool) -> None:
    """Replace the Linear layers of `blocks` by torchao's, with the same weights under the same names.

    The rest of the model, such as the patch embedding and the head, stays in bf16. emulate: round to FP8 and
    multiply in higher precision, where there are no FP8 units. Raises RecipeError if a block has no layer
    that can be converted.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.config import Float8GemmConfig

    config = Float8LinearConfig.from_recipe_name(recipe.fp8_scaling)
    # from_recipe_name takes no arguments, and dataclasses.replace would check its fields again.
    if emulate:
        object.__setattr__(config, "emulate", True)
    if recipe.dgrad_accumulation == "fast":
        object.__setattr__(config, "gemm_config_grad_input", Float8GemmConfig(use_fast_accum=True))
    for block in blocks:
        chosen = _float8_layers(block, recipe)
        convert_to_float8_training(
            block, config=config, module_filter_fn=lambda module, name, chosen=chosen: name in chosen
        )
        block.train(block.training)


def _float8_layers(block: nn.Module, recipe: Recipe) -> list[str]:
    """Return the names of the Linear layers that are to be in FP8. Raises RecipeError if there are none.

    Beside frozen weights those that are trained, as adapters are, are too small to gain by it.
    """
    linears = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    frozen = {name: module for name, module in linears.items() if not module.weight.requires_grad}
    chosen = [
        name for name, module in (frozen or linears).items() if takes_float8(module, recipe.fp8_scaling)
    ]
    if not chosen:
        raise RecipeError(
            f"recipe {recipe.label}: no Linear layer of the model's {type(block).__name__} has a size "
            f"for {recipe.fp8_scaling} FP8",
            "use a recipe without FP8, or with another scaling",
        )
    return chosen


def takes_float8(layer: nn.Linear, scaling: str) -> bool:
    """Return whether a layer's size is suitable for FP8 with `scaling`.

    For `rowwise` the bounds are torchao's, above which FP8 gained on H100 (torchao 0.18,
    `float8_linear_utils._auto_filter_for_rowwise`). In a ViT-Huge block only the MLP's first layer is.
    """
    outputs, inputs = layer.weight.shape
    if outputs % _MULTIPLE or inputs % _MULTIPLE:
        return False
    if scaling != "rowwise":
        return True
    return outputs > 2048 and inputs > 1024 and not (outputs <= 4096 and inputs <= 2048)

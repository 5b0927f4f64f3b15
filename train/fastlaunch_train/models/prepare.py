"""What a recipe does to a model before it is wrapped for training: dtype of parameters, memory, compiling."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fastlaunch_train.activation_checkpointing import checkpoint_blocks
from fastlaunch_train.deterministic import set_deterministic
from fastlaunch_train.models.compile import compile_model
from fastlaunch_train.recipes.recipes import Recipe
from fastlaunch_train.workloads.contract import Workload


def prepare_model(workload: Workload, recipe: Recipe, model: nn.Module) -> nn.Module:
    """`model` with parameters in the recipe's dtype, recomputed and compiled as the recipe says, in place.

    With engine=ort it is ONNX Runtime's module around it that is returned. What is compiled with its wrapper
    (compile_scope=wrapped) is not compiled here. Raises RecipeError where the model has no blocks and the
    recipe needs them.
    """
    set_deterministic(recipe)
    blocks = workload.blocks(model) if workload.blocks else None
    if recipe.parameter_dtype != "fp32":
        hold_in_bf16(model)
    if recipe.activation_checkpointing == "block":
        checkpoint_blocks(blocks, recipe)
    if recipe.engine == "ort":
        from fastlaunch_train.models.ort import ort_module

        return ort_module(model)
    if recipe.compile_mode != "none" and recipe.compile_scope != "wrapped":
        compile_model(model, blocks, recipe)
    return model


def hold_in_bf16(model: nn.Module) -> None:
    """Make the floating-point parameters of `model` bf16, in place, but for those of batch norms.

    Buffers stay as they are, and a batch norm takes no parameters in bf16 beside fp32 statistics.
    """
    for module in model.modules():
        for parameter in () if isinstance(module, _BatchNorm) else module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.bfloat16)

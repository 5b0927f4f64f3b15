"""What a recipe does to a model before it is wrapped: parameters' dtype, recomputation, torch.compile.

Everything is done in place, so that the names in the state dict stay.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fastlaunch_train.models.precision import set_deterministic
from fastlaunch_train.recipes.recipe import Recipe, RecipeError
from fastlaunch_train.workloads.contract import Workload


def prepare_model(workload: Workload, recipe: Recipe, model: nn.Module) -> nn.Module:
    """Return `model` with the recipe's parameter dtype, recomputation and compilation, set in place.

    With engine=ort, return ONNX Runtime's module around it. With compile_scope=wrapped, compile nothing here.
    Raises RecipeError if the recipe needs blocks and the model has none.
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
        compile_model(model, blocks, recipe, regions=workload.regions(model) if workload.regions else ())
    return model


def hold_in_bf16(model: nn.Module) -> None:
    """Make the floating-point parameters of `model` bf16, in place, except those of batch norms.

    Buffers stay as they are, and a batch norm does not take bf16 parameters with fp32 statistics.
    """
    for module in model.modules():
        for parameter in () if isinstance(module, _BatchNorm) else module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.bfloat16)


def checkpoint_blocks(blocks: nn.ModuleList | nn.Sequential | None, recipe: Recipe) -> None:
    """Keep only the inputs of each of `blocks` and recompute the rest; names in the state dict stay.

    Transformer Engine's blocks use its own checkpoint, which recomputes with the same FP8 scales. A block
    that stores something in a call, such as a cache of keys, would store it twice. Raises RecipeError without
    blocks.
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
        # __dict__ is used because mypy takes a module's attributes for parameters and modules.
        block.__dict__["forward"] = _recomputed(block.forward, again)


def _recomputed(forward: Callable[..., Any], again: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return again(forward, *args, use_reentrant=False, **kwargs)

    return call


#: The least number of graphs of one function after which torch gives up compiling it.
_MIN_GRAPHS = 8


def compile_model(
    model: nn.Module,
    blocks: nn.ModuleList | nn.Sequential | None,
    recipe: Recipe,
    *,
    regions: Sequence[nn.Module] = (),
) -> nn.Module:
    """Mark `model` to be compiled at its first call, whole, or each block and region, and return it.

    Equal blocks share one graph, so that compiling block by block takes a fraction of the time. With
    compile_scope=wrapped `model` is the wrapper around another. Raises RecipeError if the recipe compiles
    blocks and the model has none.
    """
    assert recipe.compile_mode != "none"
    mode = None if recipe.compile_mode == "default" else recipe.compile_mode
    if recipe.compile_scope != "block":
        model.compile(backend=recipe.compile_backend, mode=mode)
        return model
    if blocks is None:
        raise RecipeError(
            f"recipe {recipe.label} compiles each transformer block, and the model has none",
            "add --set compile_scope=model",
        )
    # Blocks that differ, as in their drop path rate, need one graph each, for training and for evaluation.
    _allow_graphs(max(_MIN_GRAPHS, 2 * len(blocks)))
    for block in blocks:
        if recipe.parallelism == "fsdp2":
            # A block's shards are gathered before its forward, outside of what is compiled.
            block.__dict__["forward"] = torch.compile(
                block.forward, backend=recipe.compile_backend, mode=mode
            )
        else:
            block.compile(backend=recipe.compile_backend, mode=mode)
    for region in regions:
        region.compile(backend=recipe.compile_backend, mode=mode)
    return model


def num_compiles() -> int:
    """Return how many graphs this process has compiled so far."""
    if "torch._dynamo" not in sys.modules:
        return 0
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def num_cached() -> int:
    """Return how many compiled graphs this process has found in torch's disk cache so far."""
    if "torch._dynamo" not in sys.modules:
        return 0
    counters = torch._dynamo.utils.counters
    return int(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])


def _allow_graphs(number: int) -> None:
    config = torch._dynamo.config
    # Called cache_size_limit before torch 2.7.
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    setattr(config, name, max(number, getattr(config, name)))

"""torch.compile as a recipe says, in place, so that names in the state dict stay."""

import sys

import torch
from torch import nn

from fastlaunch_train.recipes.recipe import Recipe, RecipeError

#: The least number of graphs of one function after which torch gives up compiling it.
_MIN_GRAPHS = 8


def compile_model(
    model: nn.Module, blocks: nn.ModuleList | nn.Sequential | None, recipe: Recipe
) -> nn.Module:
    """Have `model` compiled at its first call, whole or block by block, and return it.

    Equal blocks share one graph, so that block by block takes a fraction of the time. With
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
    # Blocks that differ, as in their drop path rate, need a graph each, for training and for evaluation.
    _allow_graphs(max(_MIN_GRAPHS, 2 * len(blocks)))
    for block in blocks:
        if recipe.parallelism == "fsdp2":
            # A block's shards are gathered before its forward, outside of what is compiled.
            block.__dict__["forward"] = torch.compile(
                block.forward, backend=recipe.compile_backend, mode=mode
            )
        else:
            block.compile(backend=recipe.compile_backend, mode=mode)
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

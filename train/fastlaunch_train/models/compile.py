"""torch.compile as a recipe says, in place, so that names in the state dict stay as they were."""

import sys

import torch
from torch import nn

from fastlaunch_train.recipes.recipes import Recipe, RecipeError

#: Graphs that torch compiles of one function before it gives up and runs the rest eagerly, at least.
_MIN_GRAPHS = 8


def compile_model(
    model: nn.Module, blocks: nn.ModuleList | nn.Sequential | None, recipe: Recipe
) -> nn.Module:
    """`model`, whose forward is compiled whole or block by block when it is first called.

    Equal blocks share one compiled graph, so block by block takes a fraction of the time to compile. `model`
    may be a wrapper around another (compile_scope=wrapped).
    Raises RecipeError if the recipe compiles blocks and the model has none.
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
    # Blocks that differ, as in their drop path rate, take a graph each, training and evaluation one each.
    _allow_graphs(max(_MIN_GRAPHS, 2 * len(blocks)))
    for block in blocks:
        if recipe.parallelism == "fsdp2":
            # What gathers a block's shards comes before its forward, and is not to be compiled with it.
            block.__dict__["forward"] = torch.compile(
                block.forward, backend=recipe.compile_backend, mode=mode
            )
        else:
            block.compile(backend=recipe.compile_backend, mode=mode)
    return model


def num_compiles() -> int:
    """How many graphs torch.compile has compiled in this process so far."""
    if "torch._dynamo" not in sys.modules:
        return 0
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def num_cached() -> int:
    """How many graphs this process has found compiled in torch's cache on the disk so far."""
    if "torch._dynamo" not in sys.modules:
        return 0
    counters = torch._dynamo.utils.counters
    return int(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])


def _allow_graphs(number: int) -> None:
    config = torch._dynamo.config
    # Called cache_size_limit before torch 2.7.
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    setattr(config, name, max(number, getattr(config, name)))

"""Advice on recipes: which one to run instead, and what one that does less than its name is told about."""

from collections.abc import Callable, Iterator
from contextlib import suppress

from fastlaunch_train.recipes.recipe import ZERO_STAGES, Recipe, RecipeError
from fastlaunch_train.recipes.recipes import RECIPES, resolve_recipe
from fastlaunch_train.recipes.requirements import Capabilities, bf16_emulation

#: What trains in place of a recipe that cannot run; anything else gives way to bf16, and that to fp32.
_INSTEAD = {
    "te-mxfp8": "te-fp8-block",
    "te-fp8-block": "te-fp8",
    "te-fp8-current": "te-fp8",
    "te-fp8": "fp8-fused",
    "fp8-fused": "te-bf16",
    "te-article-fp8": "te-article",
    "ao-fp8-rowwise": "ao-fp8",
    "ao-fp8": "compile",
    "compile-max-autotune": "compile",
    "compile-reduce-overhead": "compile",
    "compile-model": "compile",
    "zero1": "fsdp2",
    "zero2": "fsdp2",
    "ort-zero1": "ort",
    "ort": "fp16",
    "fp16": "fp32",
    "tf32": "fp32",
    "bf16": "fp32",
    "fp32": "fp32",
}


def stand_in(recipe: Recipe, can_run: Callable[[Recipe], bool]) -> Recipe:
    """Return the first recipe along `_INSTEAD` that can run, with the overrides that it takes and runs with.

    The first candidate is `recipe` itself with fewer overrides. fp32 if none can run.
    """
    name = recipe.name
    while not can_run(RECIPES[name]) and name != "fp32":
        name = _INSTEAD.get(name, "bf16")
    kept: list[str] = []
    for field, value in recipe.overrides:
        with suppress(RecipeError):
            if can_run(resolve_recipe(name, [*kept, f"{field}={value}"])):
                kept.append(f"{field}={value}")
    return resolve_recipe(name, kept)


def caveats(recipe: Recipe, machine: Capabilities, *, world_size: int) -> Iterator[str]:
    """Yield warnings for the run's record."""
    if emulation := bf16_emulation(recipe, machine):
        yield emulation
    if recipe.blocks == "fused" and machine.compute_capability is None:
        yield "without a GPU plain torch computes what fused blocks do: their speed says nothing of a GPU's"
    if world_size > 1:
        if recipe.step_graph and recipe.blocks == "native":
            yield "step_graph with several ranks has no effect: no step is one CUDA graph"
        return
    if recipe.parallelism in ("fsdp2", *ZERO_STAGES):
        yield f"parallelism {recipe.parallelism} with one rank shards nothing: its figures say nothing of it"
    if recipe.wire_dtype != "fp32":
        yield f"wire_dtype {recipe.wire_dtype} with one rank has no effect: no gradient travels"

"""Advice on recipes: which one to run instead, and what one that does less than its name is told about."""

from collections.abc import Callable, Iterator

from fastlaunch_train.recipes.recipe import ZERO_STAGES, Recipe, RecipeError
from fastlaunch_train.recipes.recipes import OVERRIDABLE, RECIPES, resolve_recipe
from fastlaunch_train.recipes.requirements import Capabilities, bf16_emulation

#: From exact to coarse. Two precisions are as far apart as their places here.
_PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")
#: The nearest recipe computes as precisely; of those, runs the same way; of those, is tuned alike.
_PRECISION_STEP = 6.0
_DIFFERENT = {
    "blocks": 4.0,
    "engine": 4.0,
    "loop": 4.0,
    "parallelism": 4.0,
    "compile_mode": 4.0,
    "parameter_dtype": 3.0,
    "pointwise": 2.0,
    "fp8_scaling": 1.0,
}
#: Of any other field, and of two values that both do something, in one way or another.
_LITTLE = 1.0
_NOTHING = {"compile_mode": "none", "parallelism": "ddp"}
#: Recipes that train another model stand in for none that does not, nor the other way round.
_ANOTHER_MODEL = 1000.0


def nearest_recipe(recipe: Recipe, can_run: Callable[[Recipe], bool]) -> Recipe:
    """Return the recipe that can run and differs least from `recipe`, with its overrides as far as they fit.

    Of equals the first in the table; bf16 if none can run.
    """
    running = [_with_overrides(other, recipe, can_run) for other in RECIPES.values() if can_run(other)]
    return min(running, key=lambda other: distance(recipe, other), default=RECIPES["bf16"])


def _with_overrides(base: Recipe, recipe: Recipe, can_run: Callable[[Recipe], bool]) -> Recipe:
    """Return `base` with those overrides of `recipe` that it takes and can run with."""
    kept: list[str] = []
    resolved = base
    for field, value in recipe.overrides:
        try:
            changed = resolve_recipe(base.name, [*kept, f"{field}={value}"])
        except RecipeError:
            continue
        if can_run(changed):
            kept.append(f"{field}={value}")
            resolved = changed
    return resolved


def distance(first: Recipe, second: Recipe) -> float:
    """Return how much two recipes differ in what they do, 0 if only in name."""
    total = _PRECISION_STEP * abs(_PRECISIONS.index(first.precision) - _PRECISIONS.index(second.precision))
    if (first.blocks == "te-article") != (second.blocks == "te-article"):
        total += _ANOTHER_MODEL
    for field in OVERRIDABLE:
        values = (getattr(first, field), getattr(second, field))
        if field == "precision" or values[0] == values[1]:
            continue
        both_do_something = field in _NOTHING and _NOTHING[field] not in values
        total += _LITTLE if both_do_something else _DIFFERENT.get(field, _LITTLE)
    return total


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

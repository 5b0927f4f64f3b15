"""Which of several recipes comes nearest to one that cannot run."""

from collections.abc import Iterable

from fastlaunch_train.recipes.recipes import OVERRIDABLE, Recipe

#: From exact to coarse: how far apart two precisions are is how many stand between them.
_PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")
#: A recipe is looked for that computes as precisely, then one that runs the same way, then one as tuned.
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
#: Of any other field, and of two values that both mean that something is done, in one way or another.
_LITTLE = 1.0
_NOTHING = {"compile_mode": "none", "parallelism": "ddp"}
#: Recipes that train another model stand for none that does not, nor the other way round.
_ANOTHER_MODEL = 1000.0


def nearest_recipe(recipe: Recipe, others: Iterable[Recipe]) -> Recipe:
    """The one of `others`, at least one, that differs least from `recipe`; of equals the first."""
    return min(others, key=lambda other: distance(recipe, other))


def distance(one: Recipe, other: Recipe) -> float:
    """How much two recipes differ in what they do, 0 if only in name."""
    total = _PRECISION_STEP * abs(_PRECISIONS.index(one.precision) - _PRECISIONS.index(other.precision))
    if (one.blocks == "te-article") != (other.blocks == "te-article"):
        total += _ANOTHER_MODEL
    for field in OVERRIDABLE:
        values = (getattr(one, field), getattr(other, field))
        if field == "precision" or values[0] == values[1]:
            continue
        done_either_way = field in _NOTHING and _NOTHING[field] not in values
        total += _LITTLE if done_either_way else _DIFFERENT.get(field, _LITTLE)
    return total

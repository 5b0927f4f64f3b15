"""Recipes as record headers hold them, so that those of several versions can be held against each other."""

import json
from collections.abc import Mapping
from typing import Any

from fastlaunch_train.recipes.recipes import Recipe, RecipeError

#: Fields of a recipe that replace a workload's own, which headers hold beside its name.
_OF_WORKLOADS = ("optimizer", "learning_rate")


def resolved_record(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe of a header in the words of today's version; as it stands where they cannot be found."""
    try:
        known: Mapping[str, Any] = Recipe.from_record(recipe).to_record()
    except (RecipeError, TypeError, ValueError, KeyError, AttributeError):
        known = recipe
    plain: dict[str, Any] = json.loads(json.dumps(known))
    return plain


def label_of(header: Mapping[str, Any]) -> str:
    """The label of a header's recipe, without overrides that ask for what the workload does by itself.

    Runs that train alike have equal labels, as `resolve_recipe` sees to where the recipe does it by itself.
    Records of before the workload's own optimizer was kept have their label as it was.
    """
    recipe, workload = header["recipe"], header["workload"]
    own = {field for field in _OF_WORKLOADS if workload.get(field, ...) == recipe.get(field)}
    name, *overrides = recipe["label"].split(" ")
    return " ".join([name, *(text for text in overrides if text.partition("=")[0] not in own)])

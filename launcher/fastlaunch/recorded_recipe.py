"""Recipes as record headers hold them, so that those of several versions can be held against each other."""

import json
from collections.abc import Mapping
from typing import Any

from fastlaunch_train.recipes import Recipe, RecipeError


def resolved_record(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe of a header in the words of today's version; as it stands where they cannot be found."""
    try:
        known: Mapping[str, Any] = Recipe.from_record(recipe).to_record()
    except (RecipeError, TypeError, ValueError, KeyError, AttributeError):
        known = recipe
    plain: dict[str, Any] = json.loads(json.dumps(known))
    return plain

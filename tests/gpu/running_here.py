"""Which recipes this GPU runs. Transformer Engine is loaded before anything computes.

Once torch has loaded parts of its cuDNN, those that Transformer Engine brings may not fit them.
"""

import pytest
import torch

from fastlaunch_train.checks.runs_here import check_runs_here, runnable_recipes, this_machine
from fastlaunch_train.recipes.recipe import Recipe, RecipeError
from fastlaunch_train.recipes.recipes import resolve_recipe

if torch.cuda.is_available():
    runnable_recipes(
        this_machine(torch.device("cuda"))
    )  # what it has found of Transformer Engine it remembers


def runnable(label: str) -> Recipe:
    """The recipe of `NAME FIELD=VALUE ...`. Skips where something lacks; what is there but broken fails."""
    name, *overrides = label.split()
    recipe = resolve_recipe(name, overrides)
    try:
        check_runs_here(recipe, torch.device("cuda"))
    except RecipeError as error:
        if "cannot be imported" in error.message:
            raise
        pytest.skip(error.message)
    return recipe

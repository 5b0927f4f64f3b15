"""Deterministic algorithms: the settings, and which operator of a model has none."""

import os

import torch

from fastlaunch_train.recipes.recipes import Recipe, RecipeError

#: cuBLAS gives the same result every time only with such a workspace (its documentation, under "Results
#: reproducibility"). The other keeps Transformer Engine from attention whose backward adds in any order.
_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


def set_deterministic(recipe: Recipe) -> None:
    """Have torch compute the same bits every time, if `recipe` says so. Best before the GPU is first used."""
    if not recipe.deterministic:
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def without_deterministic(error: RuntimeError, recipe: Recipe) -> RecipeError | None:
    """The error to tell if torch raised `error` for want of a deterministic algorithm; None if not."""
    text = str(error)
    if not recipe.deterministic or "deterministic" not in text:
        return None
    operator, found, _ = text.partition(" does not have a deterministic implementation")
    what = operator if found else text.partition(". ")[0]
    return RecipeError(
        f"recipe {recipe.label}: torch has no deterministic algorithm for {what}"
        if found
        else f"recipe {recipe.label}: {what}",
        "leave out deterministic=true, or take another workload",
    )

"""The optimizer that a workload names, or a recipe instead, over the parameters that it is given."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fastlaunch_train.recipes.recipes import Recipe, refuse
from fastlaunch_train.recipes.rules import optimizer_problem
from fastlaunch_train.workloads import WorkloadError
from fastlaunch_train.workloads.contract import Workload

#: What torch's optimizers are told; `for-loop` needs no more, and torch 1.13 knows no more.
_IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "auto": {},
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def check_optimizer(workload: Workload, recipe: Recipe) -> None:
    """Returns if the workload's own optimizer can be built as the recipe says; else RecipeError.

    The recipe's can, or the recipe is none. For before the model is built, whose parameters it takes.
    """
    problem = optimizer_problem(recipe, _name(workload, recipe)) if workload.trains else None
    refuse(problem, f"recipe {recipe.label}")


def build_optimizer(
    workload: Workload, recipe: Recipe, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer that the workload names, unless the recipe names another.

    Raises WorkloadError for a name that is none of sgd, adamw and adafactor. Implementations that it has not
    are refused by `check_optimizer`.
    """
    name = _name(workload, recipe)
    rate = workload.learning_rate if recipe.learning_rate is None else recipe.learning_rate
    implementation = _IMPLEMENTATIONS[recipe.optimizer_impl]
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=workload.momentum, **implementation)
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=rate, **implementation)
    if name == "adafactor":
        from fastlaunch_train.steppers.adafactor import Adafactor

        return Adafactor(parameters, lr=rate, foreach=recipe.optimizer_impl != "for-loop")
    raise WorkloadError(
        f"workload {workload.name} asks for optimizer {name!r}", "sgd, adamw and adafactor are known"
    )


def _name(workload: Workload, recipe: Recipe) -> str:
    return workload.optimizer if recipe.optimizer == "workload" else recipe.optimizer

"""The optimizer that a workload or a recipe names, and fp32 masters for one."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fastlaunch_train.recipes.recipe import Recipe, refuse
from fastlaunch_train.recipes.rules import optimizer_problem
from fastlaunch_train.workloads.contract import Workload
from fastlaunch_train.workloads.registry import WorkloadError

#: Arguments of torch's optimizers; torch 1.13 knows no others for `for-loop`.
_IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "auto": {},
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def check_optimizer(workload: Workload, recipe: Recipe) -> None:
    """Raise RecipeError if the workload's own optimizer has not the implementation that the recipe names.

    The recipe's own was checked with the recipe. Called before the model is built.
    """
    problem = optimizer_problem(recipe, _name(workload, recipe)) if workload.trains else None
    refuse(problem, f"recipe {recipe.label}")


def build_optimizer(
    workload: Workload, recipe: Recipe, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return the optimizer that the workload names, unless the recipe names another.

    Raises WorkloadError for a name other than sgd, adamw and adafactor.
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


class MasterWeights:
    """An optimizer over fp32 copies of bf16 `parameters`, called as torch's optimizers are.

    A step adds to the masters and rounds them into the parameters, so that an update too small for bf16 is
    not lost. Gradients are bf16, as the model computes them. Parameters may be sharded (DTensor): the masters
    are sharded alike.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        build: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._masters = [nn.Parameter(parameter.detach().float()) for parameter in self._parameters]
        self.optimizer = build(self._masters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free or zero the parameters' gradients."""
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            if set_to_none:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """Update masters by the parameters' gradients, and the parameters from them."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._round()

    def _round(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state and the masters."""
        masters = [master.detach() for master in self._masters]
        return {"optimizer": self.optimizer.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, and round the masters into the parameters."""
        self.optimizer.load_state_dict(state["optimizer"])
        for master, saved in zip(self._masters, state["masters"], strict=True):
            master.copy_(saved)
        self._round()

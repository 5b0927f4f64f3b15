"""Steps of a workload that trains nothing: each step is a forward pass."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fastlaunch_train.distributed.parallel import Process
from fastlaunch_train.models.precision import Precision
from fastlaunch_train.models.prepare import prepare_model
from fastlaunch_train.recipes.recipe import Recipe, refuse
from fastlaunch_train.recipes.rules import forward_only_problem
from fastlaunch_train.steppers.phases import phase
from fastlaunch_train.steppers.stepper import Stepper
from fastlaunch_train.workloads.contract import Batch, Workload

#: torch.jit.script profiles the first pass and compiles in the second, which captures CUDA graphs too.
_PASSES_AHEAD = 3


def check_forward_only(workload: Workload, recipe: Recipe) -> None:
    """Raise RecipeError if `recipe` says how to train and `workload` trains nothing."""
    problem = None if workload.trains else forward_only_problem(recipe)
    refuse(problem, f"recipe {recipe.label} does not fit workload {workload.name}")


class ForwardStepper(Stepper):
    """Steps that are the workload's `loss` without gradients; their state is the model's."""

    def __init__(
        self, workload: Workload, recipe: Recipe, precision: Precision, process: Process, model: nn.Module
    ) -> None:
        self._workload = workload
        self.recipe = recipe
        self._precision = precision
        self._device = process.device
        if recipe.compile_scope == "wrapped":
            # Nothing is trained, so nothing is wrapped.
            recipe = replace(recipe, compile_scope="model")
        if recipe.pointwise == "scripted" and workload.pointwise is not None:
            # Again: the checks have called the model, and so compiled what they called.
            workload.pointwise(model, recipe.pointwise)
        self.model = self._native = prepare_model(workload, recipe, model)

    def zero_grad(self) -> None:
        pass

    def forward_backward(self, batch: Batch, *, last: bool) -> torch.Tensor:
        with phase("forward"), torch.no_grad(), self._precision.autocast():
            return self._workload.loss(self.model, batch).detach()

    def update(self) -> None:
        pass

    def compile_ahead(self, batch: Batch) -> None:
        for _ in range(_PASSES_AHEAD):
            self.forward_backward(batch, last=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])

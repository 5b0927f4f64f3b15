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
from fastlaunch_train.workloads.contract import Batch, Workload

#: torch.jit.script profiles the first pass and compiles in the second, which captures CUDA graphs too.
_PASSES_AHEAD = 3


def check_forward_only(workload: Workload, recipe: Recipe) -> None:
    """Raise RecipeError if `recipe` says how to train and `workload` trains nothing."""
    problem = None if workload.trains else forward_only_problem(recipe)
    refuse(problem, f"recipe {recipe.label} does not fit workload {workload.name}")


class ForwardStepper:
    """A `Stepper` whose step is the workload's `loss` without gradients; its state is the model's."""

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
        self.model = prepare_model(workload, recipe, model)

    def zero_grad(self) -> None:
        """Do nothing: there are no gradients."""

    def forward_backward(self, batch: Batch, *, last: bool) -> torch.Tensor:
        """Return the workload's loss, not waited for."""
        with phase("forward"), torch.no_grad(), self._precision.autocast():
            return self._workload.loss(self.model, batch).detach()

    def update(self) -> None:
        """Do nothing: there is no optimizer."""

    def scale_learning_rate(self, factor: float) -> None:
        """Do nothing: there is no learning rate."""

    def loss_scaling(self) -> None:
        """Return None: there are no gradients."""

    def compile_ahead(self, batch: Batch) -> None:
        """Run forward passes until nothing is left to compile."""
        for _ in range(_PASSES_AHEAD):
            self.forward_backward(batch, last=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def state(self) -> dict[str, Any]:
        """Return the model's state."""
        return {"model": self.model.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        self.model.load_state_dict(state["model"])

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of the model's state in host memory."""
        return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Restore what `weights` returned."""
        self.model.load_state_dict(weights)

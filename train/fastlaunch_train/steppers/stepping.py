"""`Stepper`: one optimizer step on a batch, whoever's code does it; and which one a recipe asks for."""

from typing import Any, Protocol

import torch
from torch import nn

from fastlaunch_train.distributed.parallel import Process
from fastlaunch_train.models.precision import Precision
from fastlaunch_train.recipes.recipes import Recipe
from fastlaunch_train.recipes.rules import ZERO_STAGES
from fastlaunch_train.steppers.forward_only import ForwardStepper
from fastlaunch_train.steppers.torch_stepper import TorchStepper
from fastlaunch_train.workloads.contract import Batch, Workload


class Stepper(Protocol):
    """What trains a model. `model` is the model as it is called in training: compiled, wrapped, sharded.

    Every method is called by every rank, in the same order: where parameters are sharded, ranks meet in it.
    """

    @property
    def model(self) -> nn.Module:
        """The model to call, in training and in evaluation (under the precision's autocast)."""
        ...

    def step(self, batch: Batch) -> torch.Tensor:
        """The detached loss of this rank's `batch`, not waited for, after one optimizer step on it.

        It is the mean over the recipe's micro-batches, each with its own mean. Raises RecipeError if the
        batch does not divide into them, WorkloadError if the workload's loss is no scalar.
        """
        ...

    def compile_ahead(self, batch: Batch) -> None:
        """Returns after forward and backward ran once on `batch`, with nothing trained by it."""
        ...

    def state(self) -> dict[str, Any]:
        """All that the next step depends on, tensors on the CPU where they were gathered from other ranks.

        Complete on rank 0; the other ranks, which have to call it too, may get an empty one.
        """
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned on rank 0; every rank gives the same. `state` may be changed."""
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of what `load_weights` needs on this rank, in host memory: its own share where sharded."""
        ...

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Put back what `weights` returned on this rank. The optimizer is left as it is."""
        ...


def build_stepper(
    workload: Workload, recipe: Recipe, precision: Precision, process: Process, model: nn.Module
) -> Stepper:
    """The stepper of `recipe` for `model`, which is converted and on this rank's device, and is changed.

    Raises RecipeError for what the recipe asks for and cannot be had: a package that is not installed, blocks
    that the model has not.
    """
    if not workload.trains:
        return ForwardStepper(workload, recipe, precision, process, model)
    if recipe.parallelism in ZERO_STAGES:
        from fastlaunch_train.steppers.deepspeed_engine import DeepSpeedStepper

        return DeepSpeedStepper(workload, recipe, precision, process, model)
    return TorchStepper(workload, recipe, precision, process, model)

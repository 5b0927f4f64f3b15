"""`Stepper`: one optimizer step on a batch, whoever's code makes it; which one a recipe asks for, on what."""

from typing import Any, Protocol

import torch
from torch import nn

from fastlaunch_train.distributed.parallel import Process
from fastlaunch_train.models.precision import Precision
from fastlaunch_train.recipes.recipe import ZERO_STAGES, Recipe
from fastlaunch_train.steppers.forward_only import ForwardStepper
from fastlaunch_train.steppers.torch_stepper import TorchStepper
from fastlaunch_train.workloads.contract import Batch, Workload
from fastlaunch_train.workloads.registry import WorkloadError


class Stepper(Protocol):
    """What trains a model. Every rank calls every method, in the same order: sharded ranks meet in it."""

    recipe: Recipe

    @property
    def model(self) -> nn.Module:
        """The model, compiled, wrapped and sharded; evaluation calls it under the precision's autocast."""
        ...

    def zero_grad(self) -> None:
        """Free or zero the gradients of the step before."""
        ...

    def forward_backward(self, batch: Batch, *, last: bool) -> torch.Tensor:
        """Add a micro-batch's gradients; return its loss, detached and not waited for.

        last: of its step, so that the ranks exchange their gradients. Raises WorkloadError if the workload's
        loss is not a scalar.
        """
        ...

    def update(self) -> None:
        """Clip the gradients and update the parameters by them."""
        ...

    def scale_learning_rate(self, factor: float) -> None:
        """Step from now on with the learning rate that the optimizer was built with, times `factor`."""
        ...

    def loss_scaling(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the last step's loss scale and whether it was skipped: scalars, not waited for.

        None if losses are not scaled. Call it once after each step.
        """
        ...

    def compile_ahead(self, batch: Batch) -> None:
        """Run forward and backward on `batch`, so that they are compiled, and train nothing by it."""
        ...

    def state(self) -> dict[str, Any]:
        """Return all that the next step depends on; tensors gathered from other ranks are on the CPU.

        Complete on rank 0; other ranks may get an empty one.
        """
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned on rank 0, the same on every rank. `state` may be changed."""
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of this rank's weights and buffers, or its shards of them, in host memory."""
        ...

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Put back what `weights` returned on this rank. The optimizer and fp32 masters stay."""
        ...


def build_stepper(
    workload: Workload, recipe: Recipe, precision: Precision, process: Process, model: nn.Module
) -> Stepper:
    """Return the stepper of `recipe` for `model`, which is converted, on this rank's device, and changed.

    Raises RecipeError if the recipe cannot be done, for example needs blocks that the model has not.
    """
    if not workload.trains:
        return ForwardStepper(workload, recipe, precision, process, model)
    if recipe.parallelism in ZERO_STAGES:
        from fastlaunch_train.steppers.deepspeed_engine import DeepSpeedStepper

        return DeepSpeedStepper(workload, recipe, precision, process, model)
    return TorchStepper(workload, recipe, precision, process, model)


def build_native(workload: Workload, seed: int, process: Process) -> nn.Module:
    """Return the workload's own model, with weights by `seed`, on this rank's device, in training mode."""
    torch.manual_seed(seed)
    model = workload.build_model()
    empty = isinstance(model, nn.Module) and next(model.parameters(), None) is None
    if not isinstance(model, nn.Module) or (workload.trains and empty):
        what = type(model).__name__
        raise WorkloadError(
            f"workload {workload.name!r}: build_model returned {what}, which has nothing to train",
            "return a torch module with parameters",
        )
    return model.to(process.device).train()

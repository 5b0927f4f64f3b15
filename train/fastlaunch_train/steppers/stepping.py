"""`Stepper`: one optimizer step on a batch, by whichever library; and the stepper and model of a recipe."""

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
    """Trains a model. All ranks call the methods in the same order: sharded ranks meet in them."""

    recipe: Recipe

    @property
    def model(self) -> nn.Module:
        """The model, compiled, wrapped and sharded; evaluation calls it under the precision's autocast."""
        ...

    def zero_grad(self) -> None:
        """Free or zero the previous step's gradients."""
        ...

    def forward_backward(self, batch: Batch, *, last: bool) -> torch.Tensor:
        """Add a micro-batch's gradients; return its loss, detached and not waited for.

        last: whether this is the step's last one, so that the ranks exchange their gradients. Raises
        WorkloadError if the workload's loss is not a scalar.
        """
        ...

    def update(self) -> None:
        """Clip the gradients and update the parameters by them."""
        ...

    def scale_learning_rate(self, factor: float) -> None:
        """Use the optimizer's original learning rate times `factor` from now on."""
        ...

    def loss_scaling(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the last step's loss scale and whether it was skipped: scalars, not waited for.

        None if losses are not scaled. Call it once after each step.
        """
        ...

    def compile_ahead(self, batch: Batch) -> None:
        """Run forward and backward on `batch` without training, so that they are compiled."""
        ...

    def state(self) -> dict[str, Any]:
        """Return all state that the next step depends on; tensors gathered from other ranks are on the CPU.

        The state is complete on rank 0; other ranks may get an empty one.
        """
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned on rank 0, the same on every rank. This may change `state`."""
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of this rank's weights and buffers, or its shards of them, in host memory."""
        ...

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Restore what `weights` returned on this rank. The optimizer and fp32 masters stay."""
        ...


def build_stepper(
    workload: Workload, recipe: Recipe, precision: Precision, process: Process, model: nn.Module
) -> Stepper:
    """Return the stepper of `recipe` for the converted `model` on this rank's device, and change the model.

    Raises RecipeError if the recipe is impossible, for example needs blocks that the model lacks.
    """
    if not workload.trains:
        return ForwardStepper(workload, recipe, precision, process, model)
    if recipe.parallelism in ZERO_STAGES:
        from fastlaunch_train.steppers.deepspeed_engine import DeepSpeedStepper

        return DeepSpeedStepper(workload, recipe, precision, process, model)
    return TorchStepper(workload, recipe, precision, process, model)


def build_native(workload: Workload, seed: int, process: Process) -> nn.Module:
    """Return the workload's model with weights by `seed`, on this rank's device, in training mode."""
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

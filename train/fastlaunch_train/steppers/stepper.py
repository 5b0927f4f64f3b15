"""`Stepper`: one optimizer step on a batch, by whichever library."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from fastlaunch_train.recipes.recipe import Recipe
from fastlaunch_train.steppers.optimizers import LearningRates
from fastlaunch_train.workloads.contract import Batch, Workload
from fastlaunch_train.workloads.registry import WorkloadError


class Stepper(ABC):
    """Trains a model. All ranks call the methods in the same order: sharded ranks meet in them."""

    recipe: Recipe
    #: The model, compiled, wrapped and sharded; evaluation calls it under the precision's autocast.
    model: nn.Module
    #: The model whose names the state uses, whatever wraps it.
    _native: nn.Module
    #: None without an optimizer.
    _rates: LearningRates | None = None

    @abstractmethod
    def zero_grad(self) -> None:
        """Free or zero the previous step's gradients."""

    @abstractmethod
    def forward_backward(self, batch: Batch, *, last: bool) -> torch.Tensor:
        """Add a micro-batch's gradients; return its loss, detached and not waited for.

        last: whether this is the step's last one, so that the ranks exchange their gradients. Raises
        WorkloadError if the workload's loss is not a scalar.
        """

    @abstractmethod
    def update(self) -> None:
        """Clip the gradients and update the parameters by them."""

    def scale_learning_rate(self, factor: float) -> None:
        """Use the optimizer's original learning rate times `factor` from now on."""
        if self._rates is not None:
            self._rates.scale(factor)

    def loss_scaling(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the last step's loss scale and whether it was skipped: scalars, not waited for.

        None if losses are not scaled. Call it once after each step.
        """
        return None

    @abstractmethod
    def compile_ahead(self, batch: Batch) -> None:
        """Run forward and backward on `batch` without training, so that they are compiled."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return all state that the next step depends on, sharded tensors among it.

        But for these it is complete on rank 0; other ranks may get an empty one.
        """

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned on rank 0, with the sharded tensors of all. This may change `state`."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of this rank's trained weights and buffers, or its shards of them, in host memory."""
        return {name: value.detach().to("cpu", copy=True) for name, value in self._tensors().items()}

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Restore what `weights` returned on this rank.

        The optimizer and fp32 masters stay: the next step rounds the masters into the model.
        """
        with torch.no_grad():
            for name, value in self._tensors().items():
                value.copy_(weights[name])

    def _tensors(self) -> dict[str, torch.Tensor]:
        trained = {name: value for name, value in self._native.named_parameters() if value.requires_grad}
        return {**trained, **dict(self._native.named_buffers())}


def check_loss(workload: Workload, loss: Any) -> None:
    """Raise WorkloadError if `loss` is not a scalar tensor."""
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return
    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
    raise WorkloadError(
        f"workload {workload.name!r}: its loss is {what}", "return the batch's mean, a scalar tensor"
    )

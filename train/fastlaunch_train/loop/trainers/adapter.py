"""`Adapter`: lets a Trainer of another library train as our loop does; a check of what it cannot train."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fastlaunch_train.data.batches import split_batch
from fastlaunch_train.distributed.parallel import sum_in_bf16
from fastlaunch_train.loop.train import TrainingLoop
from fastlaunch_train.models.model_state import preserve_state
from fastlaunch_train.recipes.recipe import CUDA_GRAPH_MODES, Recipe, RecipeError, refuse
from fastlaunch_train.recipes.rules import steps_problem
from fastlaunch_train.steppers.stepper import check_loss
from fastlaunch_train.steppers.torch_stepper import TorchStepper
from fastlaunch_train.workloads.contract import Batch, Workload


def check_trainer(workload: Workload, recipe: Recipe, device: torch.device) -> None:
    """Raise RecipeError if the recipe's Trainer cannot train `workload` as `recipe` says."""
    if not workload.trains:
        raise RecipeError(
            f"recipe {recipe.label}: workload {workload.name} has nothing to train, and a Trainer trains",
            "add --set loop=ours",
        )
    adds_up = recipe.grad_accumulation > 1 or not recipe.set_to_none
    if adds_up and device.type == "cuda" and recipe.compile_mode in CUDA_GRAPH_MODES:
        # A CUDA graph's outputs are lost when it runs again: our loop adds them to other gradients.
        raise RecipeError(
            f"recipe {recipe.label}: loop={recipe.loop} keeps the gradients that a CUDA graph overwrites",
            "add --set loop=ours, or --set compile_mode=default",
        )
    refuse(steps_problem(recipe), f"recipe {recipe.label}")
    mixed_fused = recipe.precision in ("bf16", "fp16") and recipe.optimizer_impl == "fused"
    if recipe.loop == "lightning" and mixed_fused and workload.max_grad_norm is not None:
        raise RecipeError(
            f"recipe {recipe.label}: in mixed precision Lightning clips no gradients for a fused optimizer",
            "add --set optimizer_impl=foreach, or --set loop=ours",
        )
    if recipe.loop == "transformers" and recipe.precision == "fp16" and device.type == "cpu":
        raise RecipeError(
            f"recipe {recipe.label}: the Transformers Trainer computes in fp16 on a GPU alone",
            "add --set precision=bf16, or --set loop=ours",
        )


class Adapter:
    """A loop as a Trainer sees it: batches, losses, optimizer and options.

    It is also the Trainer's loader: the micro-batches of the remaining steps, in our order. It has a length,
    so that the Trainer fetches none ahead.
    """

    def __init__(self, loop: TrainingLoop) -> None:
        self.loop = loop
        self.training = loop.training
        self._parts = loop.training.recipe.grad_accumulation
        self._num_steps = loop.training.last_step - loop.last_done
        #: Losses of the step's micro-batches so far; nothing waits for them.
        self._losses: list[torch.Tensor] = []

    def __len__(self) -> int:
        return self._num_steps * self._parts

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self._num_steps):
            yield from split_batch(self.loop.fetch(), self._parts)

    @property
    def max_grad_norm(self) -> float:
        """The norm to which a Trainer clips gradients; 0 for no clipping."""
        return self.training.workload.max_grad_norm or 0.0

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the model's own parameters, for a Trainer to step."""
        assert isinstance(self.training.stepper, TorchStepper)
        optimizer = self.training.stepper.optimizer
        assert isinstance(optimizer, torch.optim.Optimizer)
        return optimizer

    def ddp_options(self) -> dict[str, Any]:
        """Return the options with which a Trainer wraps the model as our loop does."""
        recipe = self.training.recipe
        if self.training.process.world_size > 1 and recipe.compile_mode != "none":
            # By default torch cuts a compiled region at the end of every bucket.
            torch._dynamo.config.optimize_ddp = False
        return {
            "bucket_cap_mb": recipe.ddp_bucket_mb,
            "gradient_as_bucket_view": True,
            "static_graph": recipe.grad_accumulation == 1,
        }

    def begin(self, wrapped: nn.Module | None, forward: Callable[[Batch], torch.Tensor]) -> None:
        """Begin the loop, with the model that the Trainer has wrapped.

        forward: returns the loss of a micro-batch in the Trainer's context, to compile ahead.
        """
        recipe = self.training.recipe
        if recipe.wire_dtype == "bf16" and isinstance(wrapped, nn.parallel.DistributedDataParallel):
            wrapped.register_comm_hook(None, sum_in_bf16)
        self.loop.begin(lambda batch: self._compile_ahead(batch, forward))

    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the workload's loss of a micro-batch. Raises WorkloadError if it is not a scalar."""
        if self.training.recipe.compile_mode in CUDA_GRAPH_MODES:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        loss = self.training.workload.loss(model, batch)
        check_loss(self.training.workload, loss)
        return loss

    def train_on(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss of a micro-batch, and note it as part of the step's loss."""
        loss = self.forward(model, batch)
        # A copy: a CUDA graph's output is overwritten by the next.
        self._losses.append(loss.detach().clone())
        return loss

    def end_step(self) -> None:
        """Record the step, whose loss is the mean of its micro-batches'."""
        losses, self._losses = self._losses, []
        self.loop.after_step(losses[0] if len(losses) == 1 else torch.stack(losses).mean())

    def _compile_ahead(self, batch: Batch, forward: Callable[[Batch], torch.Tensor]) -> None:
        """Run `forward` and backward on a micro-batch of `batch`, without training."""
        device = self.training.process.device
        with preserve_state(self.training.stepper.model):
            forward(split_batch(batch, self._parts)[0]).backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad(set_to_none=self.training.recipe.set_to_none)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

"""What Lightning's Trainer and Transformers' have in common here: who feeds them, and what they cannot do."""

import importlib
import math
from collections.abc import Callable, Iterator

import torch

from fastlaunch_train.data.batches import split_batch
from fastlaunch_train.data.cpu_torchvision import prepare_torchvision
from fastlaunch_train.loop.train import Progress
from fastlaunch_train.loop.training import Training
from fastlaunch_train.models.precision import Precision
from fastlaunch_train.recipes.recipes import Recipe, RecipeError, refuse
from fastlaunch_train.recipes.rules import steps_problem
from fastlaunch_train.steppers.torch_stepper import CUDA_GRAPH_MODES, TorchStepper
from fastlaunch_train.undisturbed import left_as_it_was
from fastlaunch_train.workloads.contract import Batch, Workload


def check_trainer(workload: Workload, recipe: Recipe, device: torch.device) -> None:
    """Returns if either Trainer can train `workload` as `recipe` says; else RecipeError."""
    if not workload.trains:
        raise RecipeError(
            f"recipe {recipe.label}: workload {workload.name} has nothing to train, and a Trainer trains",
            "add --set loop=ours",
        )
    added_up = recipe.grad_accumulation > 1 or not recipe.set_to_none
    if added_up and device.type == "cuda" and recipe.compile_mode in CUDA_GRAPH_MODES:
        # What a CUDA graph returned is lost when it runs again: our loop adds it to other gradients.
        raise RecipeError(
            f"recipe {recipe.label}: loop={recipe.loop} keeps the gradients that a CUDA graph overwrites",
            "add --set loop=ours, or --set compile_mode=default",
        )
    refuse(steps_problem(recipe), f"recipe {recipe.label}")
    if recipe.loop == "transformers" and recipe.precision == "fp16" and device.type == "cpu":
        raise RecipeError(
            f"recipe {recipe.label}: the Transformers Trainer computes in fp16 on a GPU alone",
            "add --set precision=bf16, or --set loop=ours",
        )


def import_trainer(loop: str) -> None:
    """Import all that `loop` will, now: before torch computes, and before its cuDNN is looked at.

    transformers imports peft where it is installed, and peft Transformer Engine, whose cuDNN may not fit the
    parts of torch's own that are loaded by then.
    """
    prepare_torchvision()
    if loop == "lightning":
        importlib.import_module("lightning.pytorch")
    else:
        importlib.import_module("transformers.trainer")


def torch_stepper(training: Training) -> TorchStepper:
    """The training's stepper, whose model and optimizer a Trainer uses; it makes no step itself."""
    assert isinstance(training.stepper, TorchStepper)
    return training.stepper


def torch_optimizer(training: Training) -> torch.optim.Optimizer:
    """The optimizer of the model's own parameters, which a Trainer steps."""
    optimizer = torch_stepper(training).optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


class Feed:
    """The micro-batches of the steps that are left, in our order; sized, so that none is fetched ahead."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._parts = progress.training.recipe.grad_accumulation
        self._num_steps = progress.training.last_step - progress.last_done

    def __len__(self) -> int:
        return self._num_steps * self._parts

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self._num_steps):
            yield from split_batch(self._progress.fetch(), self._parts)


class StepLoss:
    """The losses of a step's micro-batches, which are not waited for."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor) -> None:
        """Note one of them. A copy: a CUDA graph's output is overwritten by the next."""
        self._losses.append(loss.detach().clone())

    def take(self) -> torch.Tensor:
        """Their mean; the next step begins."""
        losses, self._losses = self._losses, []
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()


class LossShare:
    """Whether a Trainer takes the mean of a step's micro-batches, by the gradient of the first one's loss."""

    def __init__(self, recipe: Recipe, precision: Precision) -> None:
        self._recipe = recipe
        scale = 1.0 if precision.scaler is None else float(precision.scaler.get_scale())
        self._expected = scale / recipe.grad_accumulation
        self._found: list[torch.Tensor] = []
        self._watched = recipe.grad_accumulation == 1

    def watch(self, loss: torch.Tensor) -> None:
        """Note the gradient of `loss` in the backward pass to come, of the first one given."""
        if not self._watched:
            loss.register_hook(self._found.append)  # type: ignore[no-untyped-call]
            self._watched = True

    def check(self) -> None:
        """Returns if what was noted is a share of the mean, or was looked at before; else RecipeError.

        Transformers 4.46.1 adds micro-batches up: every step of plain SGD is that many times too long.
        """
        found = [float(gradient) for gradient in self._found]
        self._found.clear()
        if any(not math.isclose(each, self._expected, rel_tol=1e-3) for each in found):
            raise RecipeError(
                f"recipe {self._recipe.label}: this release of {self._recipe.loop} takes no mean of the "
                f"{self._recipe.grad_accumulation} micro-batches of a step",
                "install a newer one, or add --set loop=ours",
            )


def try_on(training: Training, batch: Batch, forward: Callable[[Batch], torch.Tensor]) -> None:
    """Returns after `forward` and backward have run on a micro-batch of `batch`; nothing is trained by it."""
    device = training.process.device
    with left_as_it_was(training.stepper.model):
        forward(split_batch(batch, training.recipe.grad_accumulation)[0]).backward()  # type: ignore[no-untyped-call]
    torch_optimizer(training).zero_grad(set_to_none=training.recipe.set_to_none)
    if device.type == "cuda":
        torch.cuda.synchronize(device)

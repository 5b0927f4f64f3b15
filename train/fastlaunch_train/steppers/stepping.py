"""The model and the stepper of a recipe."""

import contextlib

import torch
from torch import nn

from fastlaunch_train.distributed.parallel import Process
from fastlaunch_train.models.precision import Precision
from fastlaunch_train.recipes.recipe import ZERO_STAGES, Recipe
from fastlaunch_train.steppers.forward_only import ForwardStepper
from fastlaunch_train.steppers.stepper import Stepper
from fastlaunch_train.steppers.torch_stepper import TorchStepper
from fastlaunch_train.workloads.contract import Workload
from fastlaunch_train.workloads.registry import WorkloadError


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
    with process.device if workload.builds_on_device else contextlib.nullcontext():
        model = workload.build_model()
    empty = isinstance(model, nn.Module) and next(model.parameters(), None) is None
    if not isinstance(model, nn.Module) or (workload.trains and empty):
        what = type(model).__name__
        raise WorkloadError(
            f"workload {workload.name!r}: build_model returned {what}, which has nothing to train",
            "return a torch module with parameters",
        )
    return model.to(process.device).train()

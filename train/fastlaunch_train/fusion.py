"""Proof that pointwise functions were fused: the kernels that one forward pass really runs."""

import torch
from torch import nn

from fastlaunch_train.precision import Precision
from fastlaunch_train.workload import Batch, Workload


def describe_kernels(
    workload: Workload,
    model: nn.Module,
    batch: Batch,
    precision: Precision,
    device: torch.device,
    *,
    num_samples: int,
) -> str:
    """The kernels of one forward pass on a batch of `num_samples`, such as `1 kernel a tensor: triton_...`.

    Call it once everything is compiled.
    """
    return "unknown"

"""Compare the gradients of a recipe's model with the native model's, before training.

Outputs say nothing about a hand-written backward pass, such as that of fused blocks.
"""

import logging
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from fastlaunch_train.data.batches import map_tensors
from fastlaunch_train.models.te_blocks import native_name
from fastlaunch_train.workloads.contract import Batch, Workload

log = logging.getLogger("fastlaunch_train")

#: The most values of a tensor's gradient to keep.
MOST_VALUES = 2**16
#: The loss scale in fp16, without which small gradients would be 0.
FP16_SCALE = 2.0**12
#: A tensor is judged by itself only if its gradient has at least this share of a tensor's usual norm: the
#: gradient of a key's bias is 0 except for rounding.
LEAST_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class GradientErrors:
    """Relative errors: the norm of the difference over the norm of the reference."""

    total: float = 0.0  #: error of all gradients together
    #: errors of the tensors with at least LEAST_SHARE, by name
    by_tensor: Mapping[str, float] = field(default_factory=dict)


def gradients_of(
    workload: Workload,
    model: nn.Module,
    batch: Batch,
    autocast: Callable[[], AbstractContextManager[Any]],
    *,
    scale: float = 1.0,
) -> dict[str, torch.Tensor] | None:
    """Return the gradient of the loss for each trained parameter, by the native model's names.

    A large gradient is sampled, and scaled so that its norm stays about the same. Each gradient is freed
    as soon as its values are taken, so that only one takes memory at a time. Return None, with a warning, if
    the loss of `model` cannot be differentiated in its present mode, for example for lack of memory.
    """
    gradients: dict[str, torch.Tensor] = {}

    def keep(name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.detach()
        parameter.grad = None
        values = (gradient.to_dense() if gradient.is_sparse else gradient).flatten()
        # An odd stride samples every column of a matrix.
        some = values[:: max(1, values.numel() // MOST_VALUES) | 1].float()
        gradients[name] = gradients.get(name, 0) + some * (
            (values.numel() / max(1, some.numel())) ** 0.5 / scale
        )

    hooks = [
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            partial(keep, native_name(name))
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    # Fix the random draws of the loss, such as mixing of samples.
    torch.manual_seed(0)
    random.seed(0)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed(0)
    try:
        with autocast():
            loss = workload.loss(model, map_tensors(torch.Tensor.clone, batch))
        (scale * loss).backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # a loss of the user's own may refuse a model that is not in training
        first_line = str(error).strip().partition("\n")[0]
        log.warning("warning: gradients are not checked: %s: %s", type(error).__name__, first_line)
        return None
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in model.parameters():
            parameter.grad = None
    return gradients


def gradient_errors(
    gradients: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]
) -> GradientErrors:
    """Return the errors of `gradients`. A missing one, or one of another shape, counts as 0."""
    sizes = {name: float(value.norm()) for name, value in exact.items()}
    differences = {
        name: float((gradients[name] - value).norm())
        if name in gradients and gradients[name].shape == value.shape
        else sizes[name]
        for name, value in exact.items()
    }
    square = sum(size**2 for size in sizes.values())
    least = LEAST_SHARE * (square / max(1, len(sizes))) ** 0.5
    return GradientErrors(
        total=(sum(difference**2 for difference in differences.values()) / square) ** 0.5 if square else 0.0,
        by_tensor={
            name: differences[name] / size for name, size in sizes.items() if size and not size < least
        },
    )

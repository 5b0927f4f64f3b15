"""Adafactor as the Transformers Trainer with `--optim adafactor` runs it, which `run_clm.py` uses."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

#: Exponent of the second moment's decay: beta2 = 1 - step ** -0.8.
_DECAY = 0.8
#: Added to the square of gradients. Root mean square above which an update is scaled down.
_EPS = 1e-30
_CLIP = 1.0


class Adafactor(torch.optim.Optimizer):
    """Adafactor (Shazeer and Stern, 2018) with the learning rate it is given, and without first moment.

    The Transformers Trainer makes `transformers.Adafactor(lr=..., scale_parameter=False,
    relative_step=False)` of `--optim adafactor`, and this computes the same. torch.optim.Adafactor does not:
    it scales every update by the parameter's own size and caps the learning rate at step ** -0.5.
    Parameters may be sharded (DTensor) and in bf16; the moments are fp32.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"])

    def _update(self, parameter: nn.Parameter, lr: float) -> None:
        assert parameter.grad is not None
        grad = parameter.grad.float()
        state = self.state[parameter]
        step = state["step"] = state.get("step", 0) + 1
        kept = 1.0 - step**-_DECAY
        squares = grad.square().add_(_EPS)
        if grad.dim() >= 2:
            # Means of rows and columns stand for the whole matrix of second moments.
            row = _averaged(state, "exp_avg_sq_row", _mean(squares, -1), kept)
            column = _averaged(state, "exp_avg_sq_col", _mean(squares, -2), kept)
            row = (row / _mean(row, -1).unsqueeze(-1)).rsqrt_().unsqueeze(-1)
            update = row * column.unsqueeze(-2).rsqrt() * grad
        else:
            update = _averaged(state, "exp_avg_sq", squares, kept).rsqrt() * grad
        size = _whole(update.square().sum()).div(update.numel()).sqrt()
        update = update / size.div_(_CLIP).clamp_(min=1.0)
        parameter.copy_(parameter.float() - lr * update)


def _averaged(state: dict[str, Any], name: str, value: torch.Tensor, kept: float) -> torch.Tensor:
    """The running mean under `name`, with `value` taken in. In the first step it is `value`: kept is 0."""
    if name in state:
        state[name].mul_(kept).add_(value, alpha=1.0 - kept)
    else:
        state[name] = value.clone()
    mean: torch.Tensor = state[name]
    return mean


def _mean(value: torch.Tensor, dim: int) -> torch.Tensor:
    # A sum and a division: the mean of means of unequal shards is another number.
    return _whole(value.sum(dim=dim)).div(value.shape[dim])


def _whole(value: torch.Tensor) -> torch.Tensor:
    """`value`, summed over the ranks if each of them holds a part of the sum."""
    placements = getattr(value, "placements", ())
    if not any(placement.is_partial() for placement in placements):
        return value
    from torch.distributed.tensor import Replicate

    settled = [Replicate() if placement.is_partial() else placement for placement in placements]
    whole: torch.Tensor = value.redistribute(placements=settled)  # type: ignore[attr-defined]
    return whole

"""Adafactor as the Transformers Trainer with `--optim adafactor` runs it, which `run_clm.py` uses."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

#: Exponent of the second moment's decay: beta2 = 1 - step ** -0.8.
_DECAY = 0.8
#: Added to the square of gradients. Root mean square above which an update is scaled down.
_EPS = 1e-30
_CLIP = 1.0
#: The most numbers to update at once. A larger parameter keeps a GPU busy alone, and its copy is large.
_AT_ONCE = 2**24


class Adafactor(torch.optim.Optimizer):
    """Adafactor (Shazeer and Stern, 2018) with a given learning rate and without a first moment.

    It computes what `transformers.Adafactor(lr=..., scale_parameter=False, relative_step=False)` does, the
    optimizer of the Transformers Trainer for `--optim adafactor`. torch.optim.Adafactor differs: it scales
    every update by the parameter's own size and caps the learning rate at step ** -0.5. Parameters may be
    sharded (DTensor) and in bf16; the moments are fp32. Each step reduces weights by the share lr *
    weight_decay, as in Transformers.

    capturable: count steps on the GPU, as a step that is captured in a CUDA graph has to.
    foreach: stack parameters of one shape and update them at once, up to 2**24 numbers, which takes a fourth
        of the kernels. Sharded parameters are updated one by one.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float = 0.0,
        foreach: bool = True,
        capturable: bool = False,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        self._foreach = foreach
        self._capturable = capturable

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; a `closure`, if given, computes the gradients first."""
        loss = None
        if closure is not None:  # Lightning's Trainer passes one
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                state = self.state[parameter]
                if self._capturable:
                    # In place, for a graph that is replayed.
                    state.setdefault("step", torch.zeros((), device=parameter.device)).add_(1)
                else:
                    state["step"] = state.get("step", 0) + 1
            for alike in (
                self._alike(parameters) if self._foreach else ([parameter] for parameter in parameters)
            ):
                # Checkpoints from before the option weight_decay lack it.
                self._update(alike, group["lr"], group.get("weight_decay", 0.0))
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned. torch casts moments to the weights' dtype, this to fp32."""
        super().load_state_dict(state_dict)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(saved, parameters, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, torch.Tensor):
                    self.state[parameter][name] = value.to(parameter.device, torch.float32)

    def _alike(self, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Yield groups of parameters to update at once: of one shape, dtype, device and step."""
        alike: dict[Any, list[nn.Parameter]] = {}
        for parameter in parameters:
            if hasattr(parameter, "placements"):
                yield [parameter]
                continue
            step = 0 if self._capturable else self.state[parameter]["step"]
            key = (parameter.shape, parameter.dtype, parameter.device, step)
            waiting = alike.setdefault(key, [])
            waiting.append(parameter)
            if (len(waiting) + 1) * parameter.numel() > _AT_ONCE:
                yield alike.pop(key)
        yield from alike.values()

    def _update(self, parameters: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        """Do one step of `parameters`, all of one shape, stacked along the first dimension."""
        grad = _stacked([parameter.grad for parameter in parameters if parameter.grad is not None]).float()
        states = [self.state[parameter] for parameter in parameters]
        kept = 1.0 - states[0]["step"] ** -_DECAY
        squares = grad.square().add_(_EPS)
        if grad.dim() > 2:
            # Means of rows and columns stand for the whole matrix of second moments.
            row = _averaged(states, "exp_avg_sq_row", _mean(squares, -1), kept)
            column = _averaged(states, "exp_avg_sq_col", _mean(squares, -2), kept)
            row = (row / _mean(row, -1).unsqueeze(-1)).rsqrt_().unsqueeze(-1)
            update = row * column.unsqueeze(-2).rsqrt() * grad
        else:
            update = _averaged(states, "exp_avg_sq", squares, kept).rsqrt() * grad
        size = update.square()
        for _ in range(1, update.dim()):
            size = size.sum(dim=-1)
        size = _whole(size).div(parameters[0].numel()).sqrt().view(-1, *[1] * (update.dim() - 1))
        update = update / size.div_(_CLIP).clamp_(min=1.0)
        weights = _stacked(parameters).float()
        if weight_decay:
            weights = weights * (1 - lr * weight_decay)
        moved = weights - lr * update
        for parameter, new in zip(parameters, _apart(moved), strict=True):
            parameter.copy_(_placed_like(new, parameter))


def _stacked(tensors: list[Any]) -> torch.Tensor:
    # A single tensor is not copied, and may be sharded.
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0].detach().unsqueeze(0)


def _apart(values: torch.Tensor) -> list[torch.Tensor]:
    # Sharded tensors come one by one, and DTensor has no unbind before torch 2.10.
    return list(values.unbind()) if len(values) > 1 else [values.squeeze(0)]


def _averaged(states: list[dict[str, Any]], name: str, values: torch.Tensor, kept: Any) -> torch.Tensor:
    """Return the running means under `name`, updated with `values`; in the first step kept is 0."""
    if name not in states[0]:
        for state, value in zip(states, _apart(values), strict=True):
            state[name] = value.clone()
    elif isinstance(kept, torch.Tensor):
        for state, value in zip(states, _apart(values), strict=True):
            state[name].lerp_(value, 1.0 - kept)
    else:
        means = [state[name] for state in states]
        torch._foreach_mul_(means, kept)
        torch._foreach_add_(means, _apart(values), alpha=1.0 - kept)
    return _stacked([state[name] for state in states])


def _mean(value: torch.Tensor, dim: int) -> torch.Tensor:
    # Sum and divide: the mean of the means of unequal shards is another number.
    return _whole(value.sum(dim=dim)).div(value.shape[dim])


def _placed_like(value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return `value`, sharded as `parameter` is; torch has gathered it along a dimension of 1."""
    placements = getattr(parameter, "placements", None)
    if placements is None:
        return value
    placed: torch.Tensor = value.redistribute(placements=placements)  # type: ignore[attr-defined]
    return placed


def _whole(value: torch.Tensor) -> torch.Tensor:
    """Return `value`, summed over the ranks if each of them holds a part of the sum."""
    placements = getattr(value, "placements", ())
    if not any(placement.is_partial() for placement in placements):
        return value
    from torch.distributed.tensor import Replicate

    settled = [Replicate() if placement.is_partial() else placement for placement in placements]
    whole: torch.Tensor = value.redistribute(placements=settled)  # type: ignore[attr-defined]
    return whole

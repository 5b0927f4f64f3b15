"""The weights of fused blocks in FP8, rounded in the optimizer's pass over them, not in every forward pass.

That pass has the new weight at hand, which then needs no second read and no rounding kernel.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fastlaunch_train.models.fp8_fused.context import passes_for
from fastlaunch_train.models.fp8_fused.delayed_scaling import DelayedScaling, Slot
from fastlaunch_train.models.fp8_fused.reference import E4M3

Key = tuple[int, Slot]


class RoundedWeights:
    """FP8 copies of weights (rows, width) and their transposes, by block and slot.

    They match the weights and scales of the last rounding, by `check` or `CastingSgd`. Any other change of a
    weight or a scale, such as loading, makes them stale, which `check` notices.
    """

    def __init__(self, weights: Mapping[Key, nn.Parameter], scaling: DelayedScaling) -> None:
        self.weights = dict(weights)
        self.scaling = scaling
        self._copies: dict[Key, tuple[torch.Tensor, torch.Tensor]] = {}
        self._versions: tuple[int, int] | None = None
        #: Whether the copies match the weights, as of the last `check`.
        self.is_current = False

    def __getitem__(self, key: Key) -> tuple[torch.Tensor, torch.Tensor]:
        return self._copies[key]

    @torch.no_grad()
    def check(self, *, refresh: bool) -> None:
        """Set `is_current`; round stale copies anew if `refresh` is set, or if there is no scale yet."""
        self.is_current = self._versions == self._versions_now()
        if self.is_current:
            return
        is_fresh = self.scaling.is_fresh
        if not (refresh or is_fresh):
            return
        if is_fresh:
            self._round_all()
            self.scaling.update()
        self._round_all()
        self.mark_current()

    def mark_current(self) -> None:
        """Note that the copies match the current weights and scales."""
        self._versions = self._versions_now()
        self.is_current = True

    def _round_all(self) -> None:
        for (block, slot), weight in self.weights.items():
            scaled = self.scaling.slot(block, slot)
            rounded = passes_for(weight).cast_transpose((weight,), *scaled, E4M3, sums=False)[:2]
            # A captured step has the addresses of the old copies.
            kept = self._copies.setdefault((block, slot), rounded)
            for old, new in zip(kept, rounded, strict=True):
                if old is not new:
                    old.copy_(new)

    def _versions_now(self) -> tuple[int, int]:
        # Our kernels change weights without raising their version.
        scale: Any = self.scaling.scale
        return sum(weight._version for weight in self.weights.values()), scale._version


def rounded_weights(model: nn.Module) -> RoundedWeights:
    """Return the rounded weights that the model's fused blocks share."""
    candidates = (getattr(module, "rounded_weights", None) for module in model.modules())
    return next(rounded for rounded in candidates if isinstance(rounded, RoundedWeights))


class CastingSgd(torch.optim.SGD):
    """torch's fused SGD, whose pass over the weights of `rounded` makes their FP8 copies, too."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        rounded: RoundedWeights,
        *,
        lr: float,
        momentum: float,
    ) -> None:
        super().__init__(parameters, lr=lr, momentum=momentum, fused=True)
        self._rounded = rounded
        self._keys = {weight: key for key, weight in rounded.weights.items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters by their gradients, and round the new weights by the scales of past ones."""
        assert closure is None
        rounded = self._rounded
        rounded.check(refresh=True)
        rounded.scaling.update()
        gradients = {}
        for group in self.param_groups:
            for weight in group["params"]:
                if weight in self._keys and weight.grad is not None:
                    self._step(weight, group)
                    gradients[weight], weight.grad = weight.grad, None
        super().step()
        for weight, gradient in gradients.items():
            weight.grad = gradient
        rounded.mark_current()

    def _step(self, weight: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if group["momentum"] and state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(weight)
        key = self._keys[weight]
        scale, amax = self._rounded.scaling.slot(*key)
        passes_for(weight).sgd_cast(
            weight,
            weight.grad,
            state.get("momentum_buffer"),
            *self._rounded[key],
            scale,
            amax,
            lr=group["lr"],
            momentum=group["momentum"],
            decay=group["weight_decay"],
        )

"""Delayed scaling: each tensor's FP8 scale follows the largest magnitude that it had in the last steps.

This is Transformer Engine's `DelayedScaling` with `amax_compute_algo="max"` and no margin.
"""

from enum import IntEnum
from typing import Any

import torch
from torch import nn

from fastlaunch_train.models.fp8_fused.reference import E4M3, E5M2, LARGEST


class Slot(IntEnum):
    """The tensors of a block that are rounded to FP8; those of gradients are in E5M2."""

    NORM1 = 0
    ATTENTION = 1
    NORM2 = 2
    GELU = 3
    QKV_WEIGHT = 4
    PROJ_WEIGHT = 5
    FC1_WEIGHT = 6
    FC2_WEIGHT = 7
    FC2_GRADIENT = 8
    FC1_GRADIENT = 9
    PROJ_GRADIENT = 10
    QKV_GRADIENT = 11


WEIGHTS = (Slot.QKV_WEIGHT, Slot.PROJ_WEIGHT, Slot.FC1_WEIGHT, Slot.FC2_WEIGHT)
_GRADIENTS = (Slot.FC2_GRADIENT, Slot.FC1_GRADIENT, Slot.PROJ_GRADIENT, Slot.QKV_GRADIENT)


class DelayedScaling(nn.Module):
    """The scales of `num_blocks` blocks and the magnitudes that they follow, saved as buffers.

    history: number of steps whose largest magnitude counts. `update` takes over what `amax` has recorded
    since the last update. Several ranks first reduce `amax` to the maximum of all.
    """

    def __init__(self, num_blocks: int, history: int, device: torch.device) -> None:
        super().__init__()
        number = num_blocks * len(Slot)
        gradients = torch.tensor([slot in _GRADIENTS for slot in Slot], device=device).repeat(num_blocks)
        largest = torch.where(gradients, LARGEST[E5M2], LARGEST[E4M3])
        buffers: dict[str, torch.Tensor] = {
            "amax": torch.zeros(number, device=device),
            "history": torch.zeros(history, number, device=device),
            "position": torch.zeros(1, dtype=torch.int64, device=device),
            "scale": torch.ones(number, device=device),
            # cuBLAS takes scales at addresses that are multiples of 16.
            "inverse": torch.ones(number, 4, device=device),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value)
        self.register_buffer("largest", largest, persistent=False)
        self.register_buffer("scratch", torch.zeros_like(buffers["amax"]), persistent=False)

    @property
    def is_fresh(self) -> bool:
        """Whether nothing has been recorded yet."""
        history: Any = self.history
        return not bool(history.any())

    def slot(self, block: int, slot: Slot, *, record: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and amax, of one element each; without `record`, an amax that is never read."""
        at = block * len(Slot) + slot
        amax: Any = self.amax if record else self.scratch
        scale: Any = self.scale
        return scale[at : at + 1], amax[at : at + 1]

    def inverse_of(self, block: int, slot: Slot) -> torch.Tensor:
        """Return 1 / scale, a tensor without dimensions."""
        inverse: Any = self.inverse
        return inverse[block * len(Slot) + slot, 0]  # type: ignore[no-any-return]

    @torch.no_grad()
    def update(self) -> None:
        """Set the scales from the recorded magnitudes; a magnitude that is 0 or not finite changes none."""
        buffers: Any = self
        buffers.history.index_copy_(0, buffers.position, buffers.amax[None])
        buffers.position.add_(1).remainder_(len(buffers.history))
        top = buffers.history.amax(0)
        usable = torch.isfinite(top) & (top > 0)
        scale = torch.where(usable, buffers.largest / top, buffers.scale)
        buffers.scale.copy_(scale)
        buffers.inverse[:, 0].copy_(1 / scale)
        buffers.amax.zero_()

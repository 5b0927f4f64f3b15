"""States of models with Transformer Engine's blocks, under timm's names."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastlaunch_train.models.te_blocks import TE_NAMES


def timm_weights_from_te(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state of a timm block for that of a TransformerLayer, without FP8 scales."""
    return {name: weights[te_name] for name, te_name in TE_NAMES.items()}


def native_state_from_te(weights: Mapping[str, Any], block_names: Sequence[str]) -> dict[str, Any]:
    """Return the state of a model with timm's blocks for one with Transformer Engine's; no FP8 scales."""
    names = {
        f"{block}.layer.{new}": f"{block}.{old}" for block in block_names for old, new in TE_NAMES.items()
    }
    return {
        names.get(name, name): weight
        for name, weight in weights.items()
        if name.rpartition(".")[2] != "_extra_state"
    }

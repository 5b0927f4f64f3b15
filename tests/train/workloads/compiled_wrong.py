"""A model that a compiler gets wrong, as far as its outputs tell."""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import tiny

from fastlaunch_train.workloads.contract import Workload


class Wrong(nn.Linear):
    """Half as large again once it is compiled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return 1.5 * y if torch.compiler.is_compiling() else y


def build() -> Workload:
    return tiny.workload(build_model=lambda: Wrong(tiny.NUM_FEATURES, tiny.NUM_CLASSES))

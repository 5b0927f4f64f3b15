"""Adafactor as `run_clm.py --optim adafactor` of the Transformers examples uses it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class Adafactor(torch.optim.Optimizer):
    """Adafactor with a given learning rate."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, foreach: bool = True) -> None:
        super().__init__(parameters, {"lr": lr, "foreach": foreach})

    def step(self, closure: Any = None) -> Any:
        """Not yet here."""
        raise NotImplementedError

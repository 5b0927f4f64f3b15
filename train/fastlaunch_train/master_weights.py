"""fp32 masters: what the optimizer updates, of which the model computes with copies in bf16."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class MasterWeights:
    """An optimizer over fp32 copies of bf16 `parameters`, called as torch's optimizers are.

    A step adds to the masters and rounds them into the parameters, so that an update too small for bf16 is
    not lost. Gradients are bf16, as the model computes them. Parameters may be sharded (DTensor): the masters
    are sharded alike.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        build: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._masters = [nn.Parameter(parameter.detach().float()) for parameter in self._parameters]
        self.optimizer = build(self._masters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free or zero the parameters' gradients."""
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            if set_to_none:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """Update masters by the parameters' gradients, and the parameters from them."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._round()

    def _round(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state and the masters."""
        masters = [master.detach() for master in self._masters]
        return {"optimizer": self.optimizer.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, and round the masters into the parameters."""
        self.optimizer.load_state_dict(state["optimizer"])
        for master, saved in zip(self._masters, state["masters"], strict=True):
            master.copy_(saved)
        self._round()

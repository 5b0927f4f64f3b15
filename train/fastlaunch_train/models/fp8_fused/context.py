"""Whether fused blocks compute by their passes, or as the model was built; and by which passes."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_fused: ContextVar[bool] = ContextVar("_fused", default=False)


@contextlib.contextmanager
def fused_passes() -> Iterator[None]:
    """Have fused blocks compute by their passes inside this context."""
    token = _fused.set(True)
    try:
        yield
    finally:
        _fused.reset(token)


def uses_fused_passes() -> bool:
    """Return whether they do."""
    return _fused.get()


def passes_for(x: "torch.Tensor") -> ModuleType:
    """Return the module with the fused passes for x's device."""
    # Here, since an old torch has no FP8.
    if x.device.type != "cuda":
        from fastlaunch_train.models.fp8_fused import reference

        return reference
    from fastlaunch_train.models.fp8_fused import kernels

    return kernels

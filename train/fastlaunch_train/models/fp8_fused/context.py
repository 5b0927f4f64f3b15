"""Whether fused blocks use their passes or compute as the model was built, and which passes they use."""

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
    """Have fused blocks use their passes inside this context."""
    token = _fused.set(True)
    try:
        yield
    finally:
        _fused.reset(token)


def uses_fused_passes() -> bool:
    """Return whether fused blocks use their passes here."""
    return _fused.get()


def passes_for(x: "torch.Tensor") -> ModuleType:
    """Return the module with the fused passes for x's device."""
    # Imported here, since an old torch has no FP8.
    if x.device.type != "cuda":
        from fastlaunch_train.models.fp8_fused import reference

        return reference
    from fastlaunch_train.models.fp8_fused import kernels

    return kernels

"""Whether fused blocks compute by their passes, or as the model was built."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

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

"""Whether fused blocks compute in FP8."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_in_fp8: ContextVar[bool] = ContextVar("_in_fp8", default=False)


@contextlib.contextmanager
def fused_fp8() -> Iterator[None]:
    """Have fused blocks compute in FP8 inside this context."""
    token = _in_fp8.set(True)
    try:
        yield
    finally:
        _in_fp8.reset(token)


def is_in_fp8() -> bool:
    """Return whether they do."""
    return _in_fp8.get()

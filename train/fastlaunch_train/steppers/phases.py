"""Marks for the profiler around the phases of a step."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

#: Prefix of a mark's name in a trace.
PREFIX = "fastlaunch:"

_is_marking = False


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Enter a context in which `phase` sets marks; elsewhere `phase` costs nothing."""
    global _is_marking
    _is_marking = True
    try:
        yield
    finally:
        _is_marking = False


def phase(name: str) -> AbstractContextManager[object]:
    """Mark a step or, within it, `data`, `forward`, `backward` or `optimizer` for the profiler."""
    return torch.profiler.record_function(PREFIX + name) if _is_marking else contextlib.nullcontext()

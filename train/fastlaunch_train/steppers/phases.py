"""Marks for the profiler around the phases of a step."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

#: What a mark's name begins with in a trace.
PREFIX = "fastlaunch:"

_is_marking = False


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """A context in which `phase` marks; outside of it steps cost nothing more."""
    global _is_marking
    _is_marking = True
    try:
        yield
    finally:
        _is_marking = False


def phase(name: str) -> AbstractContextManager[object]:
    """A context that the profiler sees as `step`, or in it as `data`, `forward`, `backward`, `optimizer`."""
    return torch.profiler.record_function(PREFIX + name) if _is_marking else contextlib.nullcontext()

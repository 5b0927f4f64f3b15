"""Seconds spent on what is no step, as phases of the record."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

import torch

from fastlaunch_train.records.records import Phase, RecordWriter

log = logging.getLogger("fastlaunch_train")


class PhaseClock:
    """Times what is not a step and adds it to the record as a phase."""

    def __init__(self, writer: RecordWriter, device: torch.device) -> None:
        self._writer = writer
        self._device = device

    def __call__(self, name: str, work: Callable[[], str | None], *, step: int = 0) -> float:
        """Do `work`; its seconds, recorded under `name`. What it returns becomes the phase's detail."""
        started = time.perf_counter()
        return self._done(name, started, step, work())

    @contextlib.contextmanager
    def during(self, name: str, detail: str) -> Iterator[None]:
        """A context that is timed and recorded so, unless it ends with an exception."""
        started = time.perf_counter()
        yield
        self._done(name, started, 0, detail)

    def _done(self, name: str, started: float, step: int, detail: str | None) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - started
        self._writer.add(Phase(name=name, seconds=seconds, step=step, detail=detail))
        self._writer.flush()
        log.info("%s: %.1f s%s", name, seconds, f" ({detail})" if detail else "")
        return seconds

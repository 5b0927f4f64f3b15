"""Seconds spent on what is no step, as phases of the record."""

import logging
import time
from collections.abc import Callable

import torch

from fastlaunch_train.records import Phase, RecordWriter

log = logging.getLogger("fastlaunch_train")


class PhaseClock:
    """Times what is not a step and adds it to the record as a phase."""

    def __init__(self, writer: RecordWriter, device: torch.device) -> None:
        self._writer = writer
        self._device = device

    def __call__(self, name: str, work: Callable[[], str | None], *, step: int = 0) -> float:
        """Do `work`; its seconds, recorded under `name`. What it returns becomes the phase's detail."""
        started = time.perf_counter()
        detail = work()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - started
        self._writer.add(Phase(name=name, seconds=seconds, step=step, detail=detail))
        self._writer.flush()
        log.info("%s: %.1f s%s", name, seconds, f" ({detail})" if detail else "")
        return seconds

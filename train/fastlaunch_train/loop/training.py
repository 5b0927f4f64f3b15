"""`Training`: everything that a loop needs; and `PhaseClock`, for work other than steps."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fastlaunch_train.checks.compiled_model import CompiledModelCheck
from fastlaunch_train.distributed.parallel import Process
from fastlaunch_train.models.precision import Precision
from fastlaunch_train.process.interrupts import Interrupts
from fastlaunch_train.recipes.recipe import Recipe
from fastlaunch_train.records.records import Phase, RecordWriter
from fastlaunch_train.steppers.stepper import Stepper
from fastlaunch_train.workloads.contract import Batch, DataRequest, Workload

log = logging.getLogger("fastlaunch_train")


class PhaseClock:
    """Times work other than steps and records it as a phase."""

    def __init__(self, writer: RecordWriter, device: torch.device) -> None:
        self._writer = writer
        self._device = device

    def __call__(self, name: str, work: Callable[[], str | None], *, step: int = 0) -> float:
        """Do `work` as the phase `name`; return its seconds. What `work` returns becomes the detail."""
        started = time.perf_counter()
        return self._done(name, started, step, work())

    @contextlib.contextmanager
    def during(self, name: str, detail: str) -> Iterator[None]:
        """Enter a context that is recorded as a phase, unless it ends with an exception."""
        started = time.perf_counter()
        yield
        self._done(name, started, 0, detail)

    def _done(self, name: str, started: float, step: int, detail: str | None) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - started
        self.add(name, seconds, step=step, detail=detail)
        return seconds

    def add(self, name: str, seconds: float, *, step: int, detail: str | None) -> None:
        """Record work that took so long, in a thread beside the steps or here."""
        self._writer.add(Phase(name=name, seconds=seconds, step=step, detail=detail))
        self._writer.flush()
        log.info("%s: %.1f s%s", name, seconds, f" ({detail})" if detail else "")


class Saves:
    """Saves checkpoints while the steps go on. This one saves none; all ranks make the same calls."""

    @property
    def is_begun(self) -> bool:
        """Whether a checkpoint is under way, alike on every rank."""
        return False

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing its part of it."""
        return False

    def save(self, step: int) -> None:
        """Begin to save the checkpoint of `step`."""

    def finish(self) -> None:
        """Wait until all ranks have written the checkpoint under way, if there is one."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The model, the data, the length and the records of a training."""

    workload: Workload
    recipe: Recipe
    process: Process
    precision: Precision
    #: Holds the model, wrapped and compiled as the recipe says, and does its steps. Another library's Trainer
    #: takes the model and the optimizer, wraps the model itself and does the steps.
    stepper: Stepper
    #: The request for `batches`, from the first step on; held-out data are requested likewise.
    request: DataRequest
    batches: Iterator[Batch]
    last_step: int
    #: Steps between checkpoints; 0 for never.
    checkpoint_every: int
    checkpoints: Saves
    phase: PhaseClock
    writer: RecordWriter
    interrupts: Interrupts
    #: Whether to log a line for programs after each block.
    print_metrics: bool = False
    #: Checks the first passes of the model; None if an earlier attempt did.
    model_check: CompiledModelCheck | None = None
    #: Whether to profile a few steps after the last.
    step_profile: bool = False

    @property
    def first_step(self) -> int:
        """1, or the step after the resumed checkpoint."""
        return self.request.first_step

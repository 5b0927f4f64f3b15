"""Seconds: of steps by device events and the wall clock, and of phases, which are not steps.

A block is about a second of steps between two synchronisations of all ranks. Within it nothing waits for the
device: events are recorded and losses copied into a device buffer, and both are read when the block closes.
A block's wall time runs from the end of the block before, so the bookkeeping between blocks counts too.

torch is imported for GPUs and tensors only: a user's script may do without.
"""

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastlaunch_train.records.records import Phase, RecordWriter

if TYPE_CHECKING:
    import torch

log = logging.getLogger("fastlaunch_train")

#: A block ends here, so that the steps that warm up can be cut off.
WARMUP_STEPS = 10
BLOCK_S = 1.0
#: The most steps in a block, which bounds the loss buffer.
MAX_BLOCK_STEPS = 1000


#: Stands in the list for a loss that waits on the device; known by its identity.
_ON_DEVICE = float("nan")


@dataclass(frozen=True, kw_only=True)
class ClosedBlock:
    """The steps of a block."""

    #: The time of each step.
    step_times_s: list[float]
    data_waits_s: list[float]
    losses: list[float | None]  #: None: not known
    #: The time of all of them, until the slowest rank has come.
    wall_s: float

    @property
    def num_steps(self) -> int:
        return len(self.losses)


class BlockTimer:
    """Times the steps of one block after another on `device`, None for a CPU.

    Call `restart` once, then `step_done` after each step's work is queued, and `close` at a block's end.
    """

    def __init__(self, device: "torch.device | None", clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._clock = clock
        self._cuda = device is not None and device.type == "cuda"
        self._on_device: torch.Tensor | None = None  # losses of the block, where they are
        self._losses: list[float | None] = []
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self._data_waits: list[float] = []
        self._block_started = 0.0

    @property
    def num_steps(self) -> int:
        """Steps of the block so far."""
        return len(self._losses)

    def restart(self, meet: Callable[[], None]) -> None:
        """Begin a block now: at the start, and after work that is not a step, such as a checkpoint."""
        self._synchronise()
        meet()
        self._begin(self._clock())

    def step_done(self, loss: "torch.Tensor | float | None", data_wait_s: float) -> None:
        """Note that a step's work is queued. `loss`: scalar, detached if a tensor; None if not known."""
        if loss is None or isinstance(loss, float | int):
            self._losses.append(loss)
        elif loss.device.type == "cpu":
            self._losses.append(loss.item())
        else:
            self._keep(loss)
        self._data_waits.append(data_wait_s)
        if self._cuda:
            self._record_event()
        else:
            self._times.append(self._clock())

    def close(self, meet: Callable[[], None]) -> ClosedBlock:
        """Wait for the device and, by `meet`, the other ranks; return the block. The next begins at once."""
        self._synchronise()
        meet()
        now = self._clock()
        return self._close(self._step_times_s(), wall_s=now - self._block_started, now=now)

    def close_at_last_step(self) -> tuple[ClosedBlock | None, float]:
        """Wait for the device; return the block, None without a step, and the seconds since its last step.

        For work after a step that nobody announced. The next block begins now.
        """
        self._synchronise()
        now = self._clock()
        step_times_s = self._step_times_s()
        wall_s = sum(step_times_s)
        passed_s = max(0.0, now - self._block_started - wall_s)
        if not self.num_steps:
            self._begin(now)
            return None, passed_s
        return self._close(step_times_s, wall_s=wall_s, now=now), passed_s

    def _step_times_s(self) -> list[float]:
        marks = (
            [0.001 * self._events[0].elapsed_time(event) for event in self._events]
            if self._cuda
            else self._times
        )
        return [after - before for before, after in itertools.pairwise(marks)]

    def _close(self, step_times_s: list[float], *, wall_s: float, now: float) -> ClosedBlock:
        losses = self._losses
        if self._on_device is not None:
            kept = self._on_device[: self.num_steps].tolist()
            losses = [value if loss is _ON_DEVICE else loss for loss, value in zip(losses, kept, strict=True)]
        closed = ClosedBlock(
            step_times_s=step_times_s, data_waits_s=self._data_waits, losses=losses, wall_s=wall_s
        )
        self._begin(now)
        return closed

    def _begin(self, now: float) -> None:
        self._block_started = now
        self._data_waits, self._losses = [], []
        if self._cuda:
            self._events = []
            self._record_event()
        else:
            self._times = [now]

    def _keep(self, loss: "torch.Tensor") -> None:
        """Copy a loss without waiting for it."""
        if self._on_device is None:
            import torch

            self._on_device = torch.zeros(MAX_BLOCK_STEPS, device=loss.device, dtype=torch.float32)
        self._on_device[len(self._losses)].copy_(loss)
        self._losses.append(_ON_DEVICE)

    def _record_event(self) -> None:
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)

    def _synchronise(self) -> None:
        if self._cuda:
            import torch

            torch.cuda.synchronize(self._device)


def next_block_steps(
    *, next_step: int, first_step: int, last_step: int, step_time_s: float, every: Sequence[int]
) -> int:
    """Return how many steps the block has that begins at `next_step`: about a second, at least one step.

    The first step stands alone and the block after it ends with the warm-up, so that both can be cut off.
    A block ends at `last_step` and at every checkpoint and evaluation: `every` so many steps, 0 for none.
    """
    num_steps = max(1, round(min(BLOCK_S / step_time_s if step_time_s > 0 else math.inf, MAX_BLOCK_STEPS)))
    end = next_step + num_steps - 1
    if next_step == first_step:
        end = next_step
    elif next_step < first_step + WARMUP_STEPS:
        end = min(end, first_step + WARMUP_STEPS - 1)
    for each in filter(None, every):
        end = min(end, -(-next_step // each) * each)
    return min(end, last_step) - next_step + 1


class PhaseClock:
    """Times what is not a step and adds it to the record as a phase."""

    def __init__(self, writer: RecordWriter, device: "torch.device") -> None:
        self._writer = writer
        self._device = device

    def __call__(self, name: str, work: Callable[[], str | None], *, step: int = 0) -> float:
        """Do `work` as the phase `name`; return its seconds. What `work` returns becomes the detail."""
        started = time.perf_counter()
        return self._done(name, started, step, work())

    @contextlib.contextmanager
    def during(self, name: str, detail: str) -> Iterator[None]:
        """A context that is a phase, recorded unless it ends with an exception."""
        started = time.perf_counter()
        yield
        self._done(name, started, 0, detail)

    def _done(self, name: str, started: float, step: int, detail: str | None) -> float:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - started
        self._writer.add(Phase(name=name, seconds=seconds, step=step, detail=detail))
        self._writer.flush()
        log.info("%s: %.1f s%s", name, seconds, f" ({detail})" if detail else "")
        return seconds

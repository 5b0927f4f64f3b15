"""Step times: device events between synchronisations, and the wall clock at them.

A block is about a second of work between two synchronisations of all ranks. Within it nothing waits for the
device: events are recorded and losses copied into a device buffer, and both are read when the block closes.
A block's wall time runs from the end of the block before, so the bookkeeping between blocks is counted too.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

#: Steps after which the first block of a run may be longer than one step, and steps that warm up.
WARMUP_STEPS = 10
BLOCK_S = 1.0
#: The most steps in a block, which bounds the loss buffer.
MAX_BLOCK_STEPS = 1000


@dataclass(frozen=True, kw_only=True)
class ClosedBlock:
    """What a block held: per step its time in seconds and its loss, and the wall time of all."""

    step_times_s: list[float]
    data_waits_s: list[float]
    losses: list[float]
    wall_s: float


class BlockTimer:
    """Times the steps of one block after another on `device`.

    Call `restart` once, then `step_done` after each step's work was queued, and `close` at a block's end.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._clock = clock
        self._cuda = device.type == "cuda"
        self._losses = torch.zeros(MAX_BLOCK_STEPS, device=device, dtype=torch.float32)
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self._data_waits: list[float] = []
        self._block_started = 0.0

    def restart(self, meet: Callable[[], None]) -> None:
        """Begin a block now: at the start, and after work that is not a step (a checkpoint)."""
        self._synchronise()
        meet()
        self._block_started = self._clock()
        self._begin()

    def step_done(self, loss: torch.Tensor, data_wait_s: float) -> None:
        """Note that one step's work has been queued. `loss`: scalar, detached."""
        self._losses[len(self._data_waits)].copy_(loss)
        self._data_waits.append(data_wait_s)
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(self._clock())

    def close(self, meet: Callable[[], None]) -> ClosedBlock:
        """Wait for the device and the other ranks (`meet`) and return the block; the next begins at once."""
        self._synchronise()
        meet()
        now = self._clock()
        marks = (
            [0.001 * self._events[0].elapsed_time(event) for event in self._events]
            if self._cuda
            else self._times
        )
        closed = ClosedBlock(
            step_times_s=[after - before for before, after in itertools.pairwise(marks)],
            data_waits_s=self._data_waits,
            losses=self._losses[: len(self._data_waits)].tolist(),
            wall_s=now - self._block_started,
        )
        self._block_started = now
        self._begin()
        return closed

    def _begin(self) -> None:
        self._data_waits = []
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events = [event]
        else:
            self._times = [self._block_started]

    def _synchronise(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)


def next_block_steps(
    *, next_step: int, first_step: int, last_step: int, step_time_s: float, every: Sequence[int]
) -> int:
    """Steps in the block that begins at `next_step`: about a second of them, at least one.

    The first step stands alone and the block after it ends with the warm-up, so that both can be cut off.
    A block ends at `last_step` and at every checkpoint and evaluation: `every` so many steps, 0 for none.
    """
    wanted = max(1, round(min(BLOCK_S / step_time_s if step_time_s > 0 else math.inf, MAX_BLOCK_STEPS)))
    end = next_step + wanted - 1
    if next_step == first_step:
        end = next_step
    elif next_step < first_step + WARMUP_STEPS:
        end = min(end, first_step + WARMUP_STEPS - 1)
    for each in filter(None, every):
        end = min(end, -(-next_step // each) * each)
    return min(end, last_step) - next_step + 1

"""A block of steps on its way into the record, whoever makes the steps. torch is used where it is loaded."""

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastlaunch_train.loop.timing import BlockTimer, ClosedBlock
from fastlaunch_train.process.device import SAMPLED_S, DeviceMonitor, memory_gib
from fastlaunch_train.records.records import Block, RecordWriter, Step

if TYPE_CHECKING:
    import torch


class BlockRecorder:
    """Writes blocks and their steps to `writer`; decides nothing.

    Call `restart` once, `step_done` for each step, and `close` where a block ends.
    device: None for a CPU, without torch. meet: returns once every rank has called it.
    """

    def __init__(
        self,
        writer: RecordWriter,
        device: "torch.device | None",
        meet: Callable[[], None],
        *,
        last_done: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        monitor: DeviceMonitor | None = None,
    ) -> None:
        self.last_done = last_done
        self._writer = writer
        self._device = device
        self._meet = meet
        self._timer = BlockTimer(device, clock)
        self._monitor = monitor or DeviceMonitor(device)
        #: What evaluations compiled and allocated, which is not counted as the steps'.
        self._foreign_compiles = 0
        self._foreign_gib = 0.0
        #: In the process, when the last step was queued; and what the last block recorded.
        self._compiles_of_steps = 0
        self._recorded_gib: float | None = None
        self._paused = False

    def restart(self) -> None:
        """Start the clock of a block: before the first step, and after a pause. Ranks meet here."""
        self._timer.restart(self._meet)
        self._paused = True

    def step_done(self, loss: "torch.Tensor | float | None", wait_s: float) -> None:
        """Note that a step is queued. `loss`: scalar, detached, not waited for; None if not known."""
        self._timer.step_done(loss, wait_s)
        self.last_done += 1
        self._compiles_of_steps = _num_compiles()

    def close(self, details: Callable[[], Sequence[Mapping[str, Any]]]) -> ClosedBlock:
        """Wait for the device and the other ranks, then record the steps and the block they make up.

        details: of each step, the fields of its line that the clock does not know; called after the wait.
        """
        closed = self._timer.close(self._meet)
        self._record(closed, details())
        return closed

    def close_at_last_step(
        self, details: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> tuple[ClosedBlock | None, float]:
        """Record the block up to its last step; return it, if it has one, and the seconds since that step.

        The other ranks are not met. The next block begins now. What was compiled since that step, and what
        was allocated since the block before, is the pause's.
        """
        closed, passed_s = self._timer.close_at_last_step()
        self._foreign_compiles += _num_compiles() - self._compiles_of_steps
        self._compiles_of_steps = _num_compiles()
        if self._recorded_gib is not None:
            self._foreign_gib += max(0.0, self._reserved_gib() - self._foreign_gib - self._recorded_gib)
        if closed is not None:
            self._record(closed, details())
        self._paused = True
        return closed, passed_s

    @contextlib.contextmanager
    def not_counted(self) -> Iterator[None]:
        """A context whose compiles and memory do not count as the steps'."""
        compiles, reserved_gib = _num_compiles(), self._reserved_gib()
        try:
            yield
        finally:
            self._foreign_compiles += _num_compiles() - compiles
            self._foreign_gib += self._reserved_gib() - reserved_gib

    def _record(self, closed: ClosedBlock, details: Sequence[Mapping[str, Any]]) -> None:
        first_step = self.last_done - closed.num_steps + 1
        for offset, detail in enumerate(details):
            loss = closed.losses[offset]
            self._writer.add(
                Step(
                    step=first_step + offset,
                    step_time_s=closed.step_times_s[offset],
                    data_wait_s=closed.data_waits_s[offset],
                    loss=loss if loss is not None and math.isfinite(loss) else None,
                    **detail,
                )
            )
        state = self._monitor.read()
        if self._paused and closed.wall_s < SAMPLED_S:
            # The sample reaches back into the pause.
            state = dataclasses.replace(state, utilization=None)
        self._paused = False
        reserved_gib = memory_gib(self._device)[0]
        self._recorded_gib = None if reserved_gib is None else reserved_gib - self._foreign_gib
        self._writer.add(
            Block(
                first_step=first_step,
                last_step=self.last_done,
                wall_s=closed.wall_s,
                num_compiles=_num_compiles() - self._foreign_compiles,
                reserved_gib=None if self._recorded_gib is None else round(self._recorded_gib, 3),
                **dataclasses.asdict(state),
            )
        )
        self._writer.flush()

    def _reserved_gib(self) -> float:
        return memory_gib(self._device)[0] or 0.0


def _num_compiles() -> int:
    if "torch._dynamo" not in sys.modules:
        return 0
    from fastlaunch_train.models.compile import num_compiles

    return num_compiles()

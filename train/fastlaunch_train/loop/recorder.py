"""`Recorder`: times steps and blocks of steps and writes them to the record, for every kind of loop.

A block is the steps between two synchronisations of all ranks: about 1 s of them on a CPU, and 5 s on a GPU,
which idles after each until the host has queued work again. Nothing waits for the device within a block:
events are recorded, losses are copied into a device buffer, and both are read at its end. A block's wall time
runs from the end of the block before, so the bookkeeping between blocks counts too.

torch is imported for GPUs and tensors only: a user's script may run without it.
"""

import contextlib
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastlaunch_train.process.device import DeviceMonitor, memory_gib
from fastlaunch_train.records.records import Block, RecordWriter, Step

if TYPE_CHECKING:
    import torch

#: A block ends at this step, so that the warm-up steps can be cut off.
WARMUP_STEPS = 10
#: Seconds of steps in a block.
GPU_BLOCK_S, CPU_BLOCK_S = 5.0, 1.0
#: The most steps in a block, which bounds the loss buffer.
MAX_BLOCK_STEPS = 5000
#: Return, for each step of a block, the fields of its line other than times.
Details = Callable[[], Sequence[Mapping[str, Any]]]
#: Placeholder in the list for a loss that is still on the device; compared by identity.
_ON_DEVICE = float("nan")


def next_block_steps(
    *,
    next_step: int,
    first_step: int,
    last_step: int,
    step_time_s: float,
    block_s: float,
    every: Sequence[int],
) -> int:
    """Return the number of steps in the block that begins at `next_step`: about `block_s`, at least one.

    The first step stands alone and the block after it ends with the warm-up, so that both can be cut off.
    A block ends at `last_step` and at every checkpoint and evaluation: `every` so many steps, 0 for none.
    """
    num_steps = max(1, round(min(block_s / step_time_s if step_time_s > 0 else math.inf, MAX_BLOCK_STEPS)))
    end = next_step + num_steps - 1
    if next_step == first_step:
        end = next_step
    elif next_step < first_step + WARMUP_STEPS:
        end = min(end, first_step + WARMUP_STEPS - 1)
    for interval in filter(None, every):
        end = min(end, -(-next_step // interval) * interval)
    return min(end, last_step) - next_step + 1


@dataclass(frozen=True, kw_only=True)
class ClosedBlock:
    """The steps of a block."""

    losses: list[float | None]  #: losses of the steps; None: unknown
    wall_s: float  #: seconds of all steps, until the slowest rank has come

    @property
    def num_steps(self) -> int:
        return len(self.losses)


class Recorder:
    """Times steps and writes them and their blocks to `writer`; decides nothing.

    Call `restart` once, `step` after each step's work is queued, and `close` where a block ends.
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
        self._cuda = device is not None and device.type == "cuda"
        self._meet = meet
        self._clock = clock
        self._monitor = monitor or DeviceMonitor(device)
        # The block so far: losses, in memory or on a device; the time or an event after each step.
        self._losses: list[float | None] = []
        self._on_device: torch.Tensor | None = None
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self._data_waits: list[float] = []
        self._started = 0.0
        #: Graphs and memory of evaluations, which do not count as the steps'.
        self._foreign_compiles = 0
        self._foreign_gib = 0.0
        #: Graphs compiled in the process when the last step was queued, and the memory of the last block.
        self._compiles_of_steps = 0
        self._recorded_gib: float | None = None

    @property
    def block_s(self) -> float:
        """Seconds that a block should take."""
        return GPU_BLOCK_S if self._cuda else CPU_BLOCK_S

    @property
    def num_steps(self) -> int:
        """Steps of the block so far."""
        return len(self._losses)

    @property
    def seconds(self) -> float:
        """Seconds since the block began."""
        return self._clock() - self._started

    def restart(self) -> None:
        """Begin a block now: at the start, and after work that is not a step. Ranks meet here."""
        self._synchronise()
        self._meet()
        self._begin(self._clock())
        self._monitor.resume()

    def step(self, loss: "torch.Tensor | float | None", wait_s: float) -> None:
        """Note that a step's work is queued. `loss`: scalar, detached, not waited for; None if not known."""
        if loss is None or isinstance(loss, float | int):
            self._losses.append(loss)
        elif loss.device.type == "cpu":
            self._losses.append(loss.item())
        else:
            self._keep(loss)
        self._data_waits.append(wait_s)
        if self._cuda:
            self._record_event()
        else:
            self._times.append(self._clock())
        self.last_done += 1
        self._compiles_of_steps = _num_compiles()

    def close(self, details: Details) -> ClosedBlock:
        """Wait for the device and the other ranks; record the block and its steps. The next begins at once.

        details: called after the wait.
        """
        self._synchronise()
        self._meet()
        now = self._clock()
        return self._close(self._step_times_s(), now - self._started, now, details)

    def close_at_last_step(self, details: Details) -> tuple[ClosedBlock | None, float]:
        """Record the block up to its last step; return it, if it has one, and the seconds since that step.

        For unannounced work after a step. Does not meet the other ranks. The next block begins now.
        Graphs compiled since that step and memory allocated since the block before belong to the pause.
        """
        self._synchronise()
        now = self._clock()
        step_times_s = self._step_times_s()
        wall_s = sum(step_times_s)
        passed_s = max(0.0, now - self._started - wall_s)
        self._foreign_compiles += _num_compiles() - self._compiles_of_steps
        self._compiles_of_steps = _num_compiles()
        if self._recorded_gib is not None:
            self._foreign_gib += max(0.0, self._reserved_gib() - self._foreign_gib - self._recorded_gib)
        closed = None
        if self.num_steps:
            closed = self._close(step_times_s, wall_s, now, details)
        else:
            self._begin(now)
        self._monitor.resume()
        return closed, passed_s

    @contextlib.contextmanager
    def not_counted(self) -> Iterator[None]:
        """Enter a context whose compiles and memory do not count for the steps."""
        compiles, reserved_gib = _num_compiles(), self._reserved_gib()
        try:
            yield
        finally:
            self._foreign_compiles += _num_compiles() - compiles
            self._foreign_gib += self._reserved_gib() - reserved_gib

    def _close(
        self, step_times_s: Sequence[float], wall_s: float, now: float, details: Details
    ) -> ClosedBlock:
        losses, data_waits_s = self._losses, self._data_waits
        if self._on_device is not None:
            kept = self._on_device[: self.num_steps].tolist()
            losses = [value if loss is _ON_DEVICE else loss for loss, value in zip(losses, kept, strict=True)]
        self._begin(now)
        first_step = self.last_done - len(losses) + 1
        for offset, detail in enumerate(details()):
            loss = losses[offset]
            self._writer.add(
                Step(
                    step=first_step + offset,
                    step_time_s=step_times_s[offset],
                    data_wait_s=data_waits_s[offset],
                    loss=loss if loss is not None and math.isfinite(loss) else None,
                    **detail,
                )
            )
        reserved_gib = memory_gib(self._device)[0]
        self._recorded_gib = None if reserved_gib is None else reserved_gib - self._foreign_gib
        self._writer.add(
            Block(
                first_step=first_step,
                last_step=self.last_done,
                wall_s=wall_s,
                num_compiles=_num_compiles() - self._foreign_compiles,
                reserved_gib=None if self._recorded_gib is None else round(self._recorded_gib, 3),
                **dataclasses.asdict(self._monitor.read()),
            )
        )
        self._writer.flush()
        return ClosedBlock(losses=losses, wall_s=wall_s)

    def _step_times_s(self) -> list[float]:
        marks = (
            [0.001 * self._events[0].elapsed_time(event) for event in self._events]
            if self._cuda
            else self._times
        )
        return [after - before for before, after in itertools.pairwise(marks)]

    def _begin(self, now: float) -> None:
        self._started = now
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

    def _reserved_gib(self) -> float:
        return memory_gib(self._device)[0] or 0.0


def _num_compiles() -> int:
    if "torch._dynamo" not in sys.modules:
        return 0
    from fastlaunch_train.models.prepare import num_compiles

    return num_compiles()

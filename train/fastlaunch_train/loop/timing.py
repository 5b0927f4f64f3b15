"""Decide where blocks of steps end, and time phases, which are not steps. No torch without a GPU."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from fastlaunch_train.records.records import Phase, RecordWriter

if TYPE_CHECKING:
    import torch

log = logging.getLogger("fastlaunch_train")

#: A block ends here, so that the warm-up steps can be cut off.
WARMUP_STEPS = 10
BLOCK_S = 1.0
#: The most steps in a block, which bounds the loss buffer.
MAX_BLOCK_STEPS = 1000


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
    for interval in filter(None, every):
        end = min(end, -(-next_step // interval) * interval)
    return min(end, last_step) - next_step + 1


class PhaseClock:
    """Times work other than steps and records it as a phase."""

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

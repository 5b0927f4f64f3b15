"""What a training leaves in its record: a line for each step, and one for each block of them."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from fastlaunch_train.distributed.parallel import barrier
from fastlaunch_train.loop.blocks import BlockRecorder
from fastlaunch_train.loop.counting import SampleCounter
from fastlaunch_train.loop.timing import ClosedBlock
from fastlaunch_train.loop.training import Training
from fastlaunch_train.process.device import DeviceMonitor
from fastlaunch_train.workloads.contract import Batch, BatchCount

log = logging.getLogger("fastlaunch_train")


class StepRecorder:
    """Writes steps and blocks into the record of `training`; decides nothing.

    Call `restart` once, `batch_fetched` for each batch, `step_done` for each step on one, in the same order,
    and `close_block` where a block ends.
    """

    def __init__(
        self,
        training: Training,
        clock: Callable[[], float] = time.perf_counter,
        monitor: DeviceMonitor | None = None,
    ) -> None:
        self._training = training
        self._blocks = BlockRecorder(
            training.writer,
            training.process.device,
            self._meet,
            last_done=training.first_step - 1,
            clock=clock,
            monitor=monitor,
        )
        self._counter = SampleCounter(training.request.batch_size)
        #: Wait in seconds, samples (None: not known) and tokens of each batch whose step is not done.
        self._fetched: deque[tuple[float, int | None, BatchCount]] = deque()
        #: The same samples and tokens of each step of the block.
        self._counts: list[tuple[int | None, BatchCount]] = []
        #: Samples of all steps of the block that was closed last; None: not known.
        self._block_samples: int | None = None
        #: Loss scale of each step of the block, and whether it was skipped; empty without loss scaling.
        self._scaling: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def last_done(self) -> int:
        """The last step that is done."""
        return self._blocks.last_done

    def restart(self) -> None:
        """Start the clock of a block: before the first step, and after a pause. Ranks meet here."""
        self._blocks.restart()

    def batch_fetched(self, batch: Batch, wait_s: float) -> None:
        """Note a batch, and how long the loop waited for it."""
        workload, num_samples = self._training.workload, self._counter.count(batch)
        if workload.count is not None:
            count = workload.count(batch)
        else:
            count = BatchCount(num_tokens=(num_samples or 0) * workload.tokens_per_sample)
        self._fetched.append((wait_s, num_samples, count))

    def step_done(self, loss: torch.Tensor) -> None:
        """Note that the step on the oldest batch is queued. `loss`: scalar, detached, not waited for."""
        wait_s, num_samples, count = self._fetched.popleft()
        self._blocks.step_done(loss, wait_s)
        self._counts.append((num_samples, count))
        if (scaling := self._training.stepper.loss_scaling()) is not None:
            self._scaling.append(scaling)

    def close_block(self) -> ClosedBlock:
        """Wait for the device and the other ranks, then record the steps and the block they make up."""
        return self._blocks.close(self._details)

    def not_counted(self) -> AbstractContextManager[None]:
        """A context whose compiles and memory do not count as the steps'."""
        return self._blocks.not_counted()

    def log_block(self, closed: ClosedBlock) -> None:
        """Log how far the training is and how fast, on rank 0."""
        training = self._training
        if training.process.rank != 0:
            return
        step_time_s = closed.wall_s / closed.num_steps
        rate = metric = ""
        if self._block_samples is not None:
            # As if the other ranks' batches were like this one's: their own records say.
            per_s = self._block_samples * training.process.world_size / closed.wall_s
            rate, metric = f"  {per_s:.1f} {training.workload.sample_unit}/s", f" samples_per_s={per_s:.2f}"
        log.info(
            "step %d of %d  loss %.4f  %.1f ms%s",
            self.last_done,
            training.last_step,
            closed.losses[-1],
            1000 * step_time_s,
            rate,
        )
        if training.print_metrics:
            # Programs parse this line, such as SageMaker's metric definitions: its wording is fixed.
            log.info(
                "fastlaunch: step=%d loss=%.6f step_time_s=%.6f%s",
                self.last_done,
                closed.losses[-1],
                step_time_s,
                metric,
            )

    def _details(self) -> list[dict[str, Any]]:
        """Return what each step of the block did, and begin the next block."""
        scales, skipped = [torch.stack(row).tolist() for row in zip(*self._scaling, strict=True)] or ([], [])
        samples = [num_samples for num_samples, _ in self._counts]
        self._block_samples = None if None in samples else sum(filter(None, samples))
        details = [
            {
                "num_samples": num_samples,
                "num_tokens": count.num_tokens,
                "num_padding": int(count.num_padding),
                "loss_scale": scales[offset] if scales and math.isfinite(scales[offset]) else None,
                "skipped": skipped[offset] if skipped else None,
            }
            for offset, (num_samples, count) in enumerate(self._counts)
        ]
        self._counts, self._scaling = [], []
        return details

    def _meet(self) -> None:
        barrier(self._training.process)

"""What a training leaves in its record: a line for each step, and one for each block of them."""

import contextlib
import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from fastlaunch_train.distributed.parallel import barrier
from fastlaunch_train.loop.timing import BlockTimer, ClosedBlock
from fastlaunch_train.loop.training import Training
from fastlaunch_train.models.compile import num_compiles
from fastlaunch_train.process.device import SAMPLED_S, DeviceMonitor, memory_gib
from fastlaunch_train.records.records import Block, Step
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
        device = training.process.device
        self.last_done = training.first_step - 1
        self._training = training
        self._timer = BlockTimer(device, clock)
        self._monitor = monitor or DeviceMonitor(device)
        #: Wait in seconds and tokens of each batch whose step is not done.
        self._fetched: deque[tuple[float, BatchCount]] = deque()
        #: Tokens of each step of the block.
        self._counts: list[BatchCount] = []
        #: Loss scale of each step of the block, and whether it was skipped; empty without loss scaling.
        self._scaling: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: What evaluations compiled and allocated, which is not counted as the steps'.
        self._foreign_compiles = 0
        self._foreign_gib = 0.0
        self._paused = False

    def restart(self) -> None:
        """Start the clock of a block: before the first step, and after a pause. Ranks meet here."""
        self._timer.restart(self._meet)
        self._paused = True

    def batch_fetched(self, batch: Batch, wait_s: float) -> None:
        """Note a batch, and how long the loop waited for it."""
        training = self._training
        if training.workload.count is not None:
            count = training.workload.count(batch)
        else:
            count = BatchCount(num_tokens=training.request.batch_size * training.workload.tokens_per_sample)
        self._fetched.append((wait_s, count))

    def step_done(self, loss: torch.Tensor) -> None:
        """Note that the step on the oldest batch is queued. `loss`: scalar, detached, not waited for."""
        wait_s, count = self._fetched.popleft()
        self._timer.step_done(loss, wait_s)
        self._counts.append(count)
        if (scaling := self._training.stepper.loss_scaling()) is not None:
            self._scaling.append(scaling)
        self.last_done += 1

    def close_block(self) -> ClosedBlock:
        """Wait for the device and the other ranks, then record the steps and the block they make up."""
        training = self._training
        closed = self._timer.close(self._meet)
        first_step = self.last_done - closed.num_steps + 1
        scales, skipped = [torch.stack(row).tolist() for row in zip(*self._scaling, strict=True)] or ([], [])
        for offset, count in enumerate(self._counts):
            loss = closed.losses[offset]
            training.writer.add(
                Step(
                    step=first_step + offset,
                    step_time_s=closed.step_times_s[offset],
                    data_wait_s=closed.data_waits_s[offset],
                    loss=loss if math.isfinite(loss) else None,
                    num_samples=training.request.batch_size,
                    num_tokens=count.num_tokens,
                    num_padding=int(count.num_padding),
                    loss_scale=scales[offset] if scales and math.isfinite(scales[offset]) else None,
                    skipped=skipped[offset] if skipped else None,
                )
            )
        self._counts, self._scaling = [], []
        state = self._monitor.read()
        if self._paused and closed.wall_s < SAMPLED_S:
            # The sample reaches back into the pause.
            state = dataclasses.replace(state, utilization=None)
        self._paused = False
        reserved_gib = memory_gib(training.process.device)[0]
        training.writer.add(
            Block(
                first_step=first_step,
                last_step=self.last_done,
                wall_s=closed.wall_s,
                num_compiles=num_compiles() - self._foreign_compiles,
                reserved_gib=None if reserved_gib is None else round(reserved_gib - self._foreign_gib, 3),
                **dataclasses.asdict(state),
            )
        )
        training.writer.flush()
        return closed

    @contextlib.contextmanager
    def not_counted(self) -> Iterator[None]:
        """A context whose compiles and memory do not count as the steps'."""
        compiles, reserved_gib = num_compiles(), self._reserved_gib()
        try:
            yield
        finally:
            self._foreign_compiles += num_compiles() - compiles
            self._foreign_gib += self._reserved_gib() - reserved_gib

    def log_block(self, closed: ClosedBlock) -> None:
        """Log how far the training is and how fast, on rank 0."""
        training = self._training
        if training.process.rank != 0:
            return
        step_time_s = closed.wall_s / closed.num_steps
        samples_per_s = training.request.batch_size * training.process.world_size / step_time_s
        log.info(
            "step %d of %d  loss %.4f  %.1f ms  %.1f %s/s",
            self.last_done,
            training.last_step,
            closed.losses[-1],
            1000 * step_time_s,
            samples_per_s,
            training.workload.sample_unit,
        )
        if training.print_metrics:
            # Programs parse this line, such as SageMaker's metric definitions: its wording is fixed.
            log.info(
                "fastlaunch: step=%d loss=%.6f step_time_s=%.6f samples_per_s=%.2f",
                self.last_done,
                closed.losses[-1],
                step_time_s,
                samples_per_s,
            )

    def _meet(self) -> None:
        barrier(self._training.process)

    def _reserved_gib(self) -> float:
        return memory_gib(self._training.process.device)[0] or 0.0

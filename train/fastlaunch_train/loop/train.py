"""What happens after each step, whoever makes it: a record line for each, and a meeting every second."""

import dataclasses
import gc
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fastlaunch_train.checks.equivalence import told
from fastlaunch_train.checks.finiteness import not_finite, told_of, trained
from fastlaunch_train.distributed.parallel import agree, barrier
from fastlaunch_train.loop.evaluation import rehearse
from fastlaunch_train.loop.timing import BlockTimer, ClosedBlock, next_block_steps
from fastlaunch_train.loop.training import Training
from fastlaunch_train.models.compile import num_cached
from fastlaunch_train.models.fusion import describe_kernels
from fastlaunch_train.process.device import SAMPLED_S, DeviceMonitor, memory_gib
from fastlaunch_train.process.failures import InterruptedRun, NanLossError
from fastlaunch_train.process.host_threads import leave_cores_alone
from fastlaunch_train.recipes.recipes import Recipe
from fastlaunch_train.records.records import FROM_CACHE, Block, Step
from fastlaunch_train.workloads.contract import Batch, BatchCount, next_batch, put_back

if TYPE_CHECKING:
    from fastlaunch_train.checks.compiled_model import AsTrained

log = logging.getLogger("fastlaunch_train")


@dataclass(frozen=True, kw_only=True)
class _Fetched:
    """Of a batch whose step is not done: how long it was waited for, and its tokens."""

    wait_s: float
    count: BatchCount


class Progress:
    """A training on its way from first_step to last_step.

    A loop calls `begin`, and while it is not `finished` fetches a batch, trains on it and tells with
    `step_done`. Everything else happens in there: blocks and their records, compiling, evaluation,
    checkpoints, and what ends a run. All ranks call the same in the same order.
    clock: seconds, of the host. choose_threads: how many of its cores torch takes beside this device.
    """

    def __init__(
        self,
        training: Training,
        clock: Callable[[], float] = time.perf_counter,
        choose_threads: Callable[[torch.device], None] = leave_cores_alone,
    ) -> None:
        self.training = training
        self.last_done = training.first_step - 1
        self._batches: Iterator[Batch] = training.batches
        self._fetched: deque[_Fetched] = deque()
        self._counts: list[BatchCount] = []
        self._clock = clock
        self._choose_threads = choose_threads
        self._timer = BlockTimer(training.process.device, clock)
        self._monitor = DeviceMonitor(training.process.device)
        self._block_end = self.last_done
        self._step_time_s = 0.0
        # What evaluations compiled and allocated is none of the steps' business.
        self._foreign_compiles = 0
        self._foreign_gib = 0.0
        self._paused = False

    @property
    def finished(self) -> bool:
        """Whether the last step is done."""
        return self.last_done >= self.training.last_step

    def begin(self, compile_ahead: Callable[[Batch], None] | None = None) -> None:
        """Compile, catch up on an evaluation that an interruption put off, and start the clock.

        compile_ahead: in place of the stepper's, where a loop calls the model in another context than that.
        """
        if not self.finished:
            # Before anything is compiled: graphs are compiled again once the number of threads is another.
            self._choose_threads(self.training.process.device)
            self._rehearse(compile_ahead or self.training.stepper.compile_ahead)
        if self._evaluate():
            self._stop()
        if self.finished:
            self._finish()
            return
        # What is alive now stays: without this the garbage collector walks through all that the imports left,
        # which stopped one step in about eighty for 0.2 s (Transformer Engine on an H200, 2026-11-21).
        gc.collect()
        gc.freeze()
        self._begin_block()
        self._restart()

    def fetch(self) -> Batch:
        """The next batch. Raises WorkloadError if there is none."""
        training = self.training
        before = self._clock()
        batch = next_batch(training.workload, self._batches)
        wait_s = self._clock() - before
        self._fetched.append(_Fetched(wait_s=wait_s, count=self._count(batch)))
        return batch

    def step_done(self, loss: torch.Tensor) -> None:
        """The optimizer step on the batch that was fetched first, of those not done, has been queued.

        loss: scalar, detached; it is not waited for. Raises InterruptedRun after a signal, with a checkpoint
        saved if checkpoints are on, and NanLossError for a loss that is not finite or, after the last step,
        weights that are not; the record then holds every step up to the block in which it was seen.
        """
        fetched = self._fetched.popleft()
        self._timer.step_done(loss, fetched.wait_s)
        self._counts.append(fetched.count)
        self.last_done += 1
        # Alone, a rank stops at once when asked to.
        alone = self.training.process.world_size == 1
        if self.last_done == self._block_end or (alone and self.training.interrupts.requested):
            self._close_block()

    def _rehearse(self, compile_ahead: Callable[[Batch], None]) -> None:
        """Run the first batch, and train nothing on it, where there is something to learn or to compile."""
        training = self.training
        compiled = compiles(training.recipe)
        if not compiled and training.workload.trains:
            return
        first = next_batch(training.workload, self._batches)
        self._batches = put_back(first, self._batches)
        if compiled:
            training.phase("compile", lambda: _compile(compile_ahead, first))
            if training.evaluations is not None:
                training.phase("compile", lambda: rehearse(training))
        if not training.workload.trains:
            training.phase("kernels", lambda: self._kernels(first))

    def _kernels(self, batch: Batch) -> str:
        training = self.training
        # What is watched copies some outputs, which would be counted.
        return describe_kernels(
            training.as_trained.unwatched if training.as_trained else training.workload,
            training.stepper.model,
            batch,
            training.precision,
            training.process.device,
            num_samples=training.request.batch_size,
        )

    def _begin_block(self) -> None:
        training = self.training
        every = training.evaluations.every if training.evaluations else 0
        self._block_end = self.last_done + next_block_steps(
            next_step=self.last_done + 1,
            first_step=training.first_step,
            last_step=training.last_step,
            step_time_s=self._step_time_s,
            every=(training.checkpoint_every, every),
        )

    def _close_block(self) -> None:
        training, process = self.training, self.training.process
        closed = self._timer.close(self._meet)
        num_steps = len(closed.losses)
        closes_first = self.last_done - num_steps < training.first_step
        self._record(closed)
        if closes_first and training.as_trained is not None:
            self._check_as_trained(training.as_trained)
        nan = any(not math.isfinite(loss) for loss in closed.losses)
        longest_s, any_nan, any_interrupt = agree(
            process, [closed.wall_s / num_steps, float(nan), float(training.interrupts.requested)]
        )
        self._step_time_s = longest_s
        if any_nan:
            where = f" on rank {process.rank}" if nan and process.world_size > 1 else ""
            first = self.last_done - num_steps + 1
            raise NanLossError(f"the loss was not finite{where} between steps {first} and {self.last_done}")
        if process.rank == 0:
            self._report(closed)
        self._pause(asked=bool(any_interrupt))
        if not self.finished:
            self._begin_block()

    def _check_as_trained(self, as_trained: "AsTrained") -> None:
        """Record what the first passes tell of the model as it is trained; no step's time counts it."""
        training = self.training
        check = as_trained.check()
        if check is not None:
            training.writer.add(check)
            training.writer.flush()
            if not check.passed:
                log.warning("warning: %s", told(check))
        self._restart()

    def _pause(self, *, asked: bool) -> None:
        """What is due between two blocks: evaluation, checkpoint, the end."""
        training = self.training
        every = training.checkpoint_every
        # What is saved is looked at there.
        if self.finished and not (every and (asked or self.last_done % every == 0)):
            self._check_left()
        # Who was asked to stop has no time for an evaluation: the next attempt makes up for it.
        evaluated = (
            not asked and training.evaluations is not None and training.evaluations.due(self.last_done)
        )
        if evaluated:
            asked = self._evaluate()
        saved = bool(every) and (asked or self.last_done % every == 0)
        if saved:
            asked = self._save() or asked
        owed = training.evaluations is not None and training.evaluations.owed(self.last_done)
        if asked and (owed or not self.finished):
            raise InterruptedRun(training.interrupts.message)
        if self.finished:
            self._finish(saved=saved)
        elif evaluated or saved:
            self._restart()

    def _check_left(self) -> None:
        """NanLossError, on every rank, if what the last step left on one is not finite: no loss tells of it.

        The steps' clock has stopped before. A GPU is waited for once.
        """
        training = self.training
        if not training.workload.trains:
            return
        model = training.stepper.model
        bad = not_finite(trained(model, training.process.rank), model)
        (any_bad,) = agree(training.process, [float(bool(bad))])
        if any_bad:
            raise NanLossError(told_of(self.last_done, bad))

    def _evaluate(self) -> bool:
        """Evaluate the model if that is due now; whether a rank was asked to stop before it was done."""
        training, evaluations = self.training, self.training.evaluations
        if evaluations is None or not evaluations.due(self.last_done):
            return False
        compiles, reserved_gib = training.num_compiles(), self._reserved_gib()
        try:
            evaluations.validate(training, self.last_done)
        except InterruptedRun:
            return True
        finally:
            self._foreign_compiles += training.num_compiles() - compiles
            self._foreign_gib += self._reserved_gib() - reserved_gib
        return False

    def _save(self) -> bool:
        """Save a checkpoint; whether a rank was asked to stop meanwhile, so that it need not save again."""
        training = self.training
        with training.interrupts.saving():
            training.save_checkpoint(self.last_done)
            (asked,) = agree(training.process, [float(training.interrupts.requested)])
        return bool(asked)

    def _finish(self, *, saved: bool = True) -> None:
        training = self.training
        if training.evaluations is None:
            return
        try:
            training.evaluations.test(training, self.last_done)
        except InterruptedRun:
            if training.checkpoint_every and not saved:
                self._save()
            raise

    def _restart(self) -> None:
        """Begin to time a block after what was no step."""
        self._timer.restart(self._meet)
        self._paused = True

    def _stop(self) -> None:
        raise InterruptedRun(self.training.interrupts.message)

    def _meet(self) -> None:
        barrier(self.training.process)

    def _count(self, batch: Batch) -> BatchCount:
        workload = self.training.workload
        if workload.count is not None:
            return workload.count(batch)
        return BatchCount(num_tokens=self.training.request.batch_size * workload.tokens_per_sample)

    def _reserved_gib(self) -> float:
        return memory_gib(self.training.process.device)[0] or 0.0

    def _record(self, closed: ClosedBlock) -> None:
        training = self.training
        first_step = self.last_done - len(closed.losses) + 1
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
                )
            )
        self._counts = []
        state = self._monitor.read()
        if self._paused and closed.wall_s < SAMPLED_S:
            # What was sampled is the pause too.
            state = dataclasses.replace(state, utilization=None)
        self._paused = False
        reserved_gib = memory_gib(training.process.device)[0]
        training.writer.add(
            Block(
                first_step=first_step,
                last_step=self.last_done,
                wall_s=closed.wall_s,
                num_compiles=training.num_compiles() - self._foreign_compiles,
                reserved_gib=None if reserved_gib is None else round(reserved_gib - self._foreign_gib, 3),
                **dataclasses.asdict(state),
            )
        )
        training.writer.flush()

    def _report(self, closed: ClosedBlock) -> None:
        training = self.training
        step_time_s = closed.wall_s / len(closed.losses)
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
            # For programs, such as SageMaker's metric definitions: the words and their order stay.
            log.info(
                "fastlaunch: step=%d loss=%.6f step_time_s=%.6f samples_per_s=%.2f",
                self.last_done,
                closed.losses[-1],
                step_time_s,
                samples_per_s,
            )


def compiles(recipe: Recipe) -> bool:
    """Whether something is compiled, scripted or exported when the recipe's model is first called."""
    return recipe.compile_mode != "none" or recipe.pointwise == "scripted" or recipe.engine == "ort"


def train(training: Training) -> int:
    """Run the steps from first_step to last_step, as the recipe's loop; returns the last one done.

    Raises what `Progress.step_done` does.
    """
    progress = Progress(training)
    if progress.finished or training.recipe.loop == "ours":
        progress.begin()
        while not progress.finished:
            progress.step_done(training.stepper.step(progress.fetch()))
    elif training.recipe.loop == "lightning":
        from fastlaunch_train.loop.trainers.lightning import train_with_lightning

        train_with_lightning(progress)
    else:
        from fastlaunch_train.loop.trainers.transformers import train_with_transformers

        train_with_transformers(progress)
    return progress.last_done


def _compile(compile_ahead: Callable[[Batch], None], first: Batch) -> str | None:
    """Compile; the phase's detail says where a run before this one has left its work."""
    before = num_cached()
    compile_ahead(first)
    return FROM_CACHE if num_cached() > before else None

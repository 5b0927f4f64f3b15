"""The training loop: `train` fetches, steps and records; `train_step` is the step.

Only at the end of a block of steps do ranks meet and wait for the device. All other work happens there:
check, evaluate, save, stop. All ranks make the same calls in the same order.
"""

import gc
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from fastlaunch_train.checks.compiled_model import CompiledModelCheck
from fastlaunch_train.checks.finiteness import not_finite, not_finite_message, trained
from fastlaunch_train.data.batches import split_batch
from fastlaunch_train.distributed.parallel import agree, barrier
from fastlaunch_train.loop.counting import SampleCounter
from fastlaunch_train.loop.evaluation import Evaluations, rehearse
from fastlaunch_train.loop.graphed import CapturedStep, is_captured
from fastlaunch_train.loop.profiling import profile_steps
from fastlaunch_train.loop.recorder import ClosedBlock, Recorder, next_block_steps
from fastlaunch_train.loop.training import Training
from fastlaunch_train.models.fusion import describe_kernels
from fastlaunch_train.models.precision import name_nondeterministic
from fastlaunch_train.models.prepare import num_cached
from fastlaunch_train.process.device import DeviceMonitor
from fastlaunch_train.process.failures import InterruptedRun, NanLossError
from fastlaunch_train.process.machine import limit_cpu_threads
from fastlaunch_train.records.records import FROM_CACHE
from fastlaunch_train.steppers.phases import phase
from fastlaunch_train.steppers.stepper import Stepper
from fastlaunch_train.workloads.contract import Batch, BatchCount, next_batch, prepend

log = logging.getLogger("fastlaunch_train")


def train(
    training: Training,
    evaluations: Evaluations | None,
    trainer: "Callable[[TrainingLoop], None] | None" = None,
) -> int:
    """Train from first_step to last_step; return the last step done.

    trainer: another library's, which does the steps and makes the same calls as this loop.
    Raises what `TrainingLoop.after_step` does.
    """
    loop = TrainingLoop(training, evaluations)
    if trainer is not None and not loop.finished:
        trainer(loop)
        return loop.last_done
    loop.begin()
    while not loop.finished:
        # One expression, so that neither the batch nor the loss outlives its use.
        loop.after_step(loop.step(loop.fetch()))
    if training.step_profile:
        profile = partial(profile_steps, training, loop.step_uncounted)
        training.phase("profile", profile, step=loop.last_done)
    return loop.last_done


def train_step(stepper: Stepper, batch: Batch) -> torch.Tensor:
    """Do one optimizer step on this rank's `batch`; return its loss, detached and not waited for.

    The loss is the mean over the recipe's micro-batches, each with its own mean. Raises RecipeError if the
    batch does not divide into them, WorkloadError if the workload's loss is not a scalar.
    """
    stepper.zero_grad()
    micro_batches = split_batch(batch, stepper.recipe.grad_accumulation)
    with name_nondeterministic(stepper.recipe):
        losses = [
            stepper.forward_backward(micro_batch, last=index == len(micro_batches))
            for index, micro_batch in enumerate(micro_batches, start=1)
        ]
        stepper.update()
    return losses[0] if len(losses) == 1 else torch.stack(losses).mean()


class TrainingLoop:
    """A training from first_step to last_step, by our steps or another library's.

    The caller calls `begin`; until `finished`, it fetches a batch, trains on it and calls `after_step`.
    """

    def __init__(
        self,
        training: Training,
        evaluations: Evaluations | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        monitor: DeviceMonitor | None = None,
        choose_threads: Callable[[torch.device], None] = limit_cpu_threads,
    ) -> None:
        self.training = training
        #: Does one optimizer step on a batch; returns its loss.
        self.step: Callable[[Batch], torch.Tensor] = partial(train_step, training.stepper)
        self._compile_ahead = training.stepper.compile_ahead
        if is_captured(training.workload, training.recipe, training.process):
            captured = CapturedStep(training.stepper, train_step)
            self.step, self._compile_ahead = captured, captured.compile_ahead
        self._recorder = Recorder(
            training.writer,
            training.process.device,
            partial(barrier, training.process),
            last_done=training.first_step - 1,
            clock=clock,
            monitor=monitor,
        )
        self._counter = SampleCounter(training.request.batch_size)
        #: Wait in seconds, samples (None: unknown) and tokens of each batch whose step is not done.
        self._fetched: deque[tuple[float, int | None, BatchCount]] = deque()
        #: The same samples and tokens of each step of the block.
        self._counts: list[tuple[int | None, BatchCount]] = []
        #: Loss scale of each step of the block, and whether it was skipped; empty without loss scaling.
        self._scaling: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: Samples of all steps of the last closed block; None: unknown.
        self._block_samples: int | None = None
        self._evaluations = evaluations
        self._batches: Iterator[Batch] = training.batches
        self._clock = clock
        self._choose_threads = choose_threads
        self._block_end = self.last_done
        self._step_time_s = 0.0

    @property
    def last_done(self) -> int:
        """The last step that is done."""
        return self._recorder.last_done

    @property
    def finished(self) -> bool:
        """Whether the last step is done."""
        return self.last_done >= self.training.last_step

    def begin(self, compile_ahead: Callable[[Batch], None] | None = None) -> None:
        """Compile, do the evaluation that an interruption put off, and start the clock.

        compile_ahead: replaces the stepper's if a Trainer calls the model in a context of its own.
        """
        if not self.finished:
            # First: graphs are compiled again when the number of threads changes.
            self._choose_threads(self.training.process.device)
            self._compile(compile_ahead or self._compile_ahead)
        if self._evaluation_due() and self._evaluate():
            raise InterruptedRun(self.training.interrupts.message)
        if self.finished:
            self._test(saved=True)
            return
        # Imports leave so many objects that the garbage collector stopped one step in about eighty for 0.2 s
        # to walk through them (Transformer Engine on an H200, 2026-11-21). Have it skip all present objects.
        gc.collect()
        gc.freeze()
        self._set_learning_rate()
        self._plan_block()
        self._recorder.restart()

    def fetch(self) -> Batch:
        """Return the next batch. Raises WorkloadError if there is none."""
        before = self._clock()
        batch = next_batch(self.training.workload, self._batches)
        wait_s = self._clock() - before
        workload, num_samples = self.training.workload, self._counter.count(batch)
        if workload.count is not None:
            count = workload.count(batch)
        else:
            count = BatchCount(num_tokens=(num_samples or 0) * workload.tokens_per_sample)
        self._fetched.append((wait_s, num_samples, count))
        return batch

    def step_uncounted(self) -> None:
        """Do an unrecorded step after the last: nothing that is kept depends on its weights."""
        with phase("data"):
            batch = next_batch(self.training.workload, self._batches)
        self.step(batch)

    def after_step(self, loss: torch.Tensor) -> None:
        """Record the step on the oldest batch; if it ends a block: check, evaluate, save, stop.

        loss: scalar, detached, not waited for. Raises InterruptedRun after a signal, with a checkpoint saved
        if checkpoints are on, and NanLossError if a loss or the state after the last step is not finite; by
        then every step of the block is recorded.
        """
        wait_s, num_samples, count = self._fetched.popleft()
        self._recorder.step(loss, wait_s)
        self._counts.append((num_samples, count))
        if (scaling := self.training.stepper.loss_scaling()) is not None:
            self._scaling.append(scaling)
        self._set_learning_rate()
        if not self._block_ends():
            return
        block = self._recorder.close(self._details)
        stop = self._check(block)
        self._log(block)
        if self.finished and not self._save_due(stop):
            # What is saved is checked there.
            self._check_weights()
        # A rank that was asked to stop has no time to evaluate: the next attempt does it.
        evaluated = not stop and self._evaluation_due()
        if evaluated:
            stop = self._evaluate()
        saved = self._save_due(stop)
        if saved:
            stop = self._save(last=stop or self.finished) or stop
        owed = self._evaluations is not None and self._evaluations.owed(self.last_done)
        if stop and (not self.finished or owed):
            raise InterruptedRun(self.training.interrupts.message)
        if self.finished:
            self._test(saved=saved)
            return
        if evaluated or saved:
            self._recorder.restart()
        self._plan_block()

    def _set_learning_rate(self) -> None:
        """Set the next step's learning rate by the workload's schedule, from the step's number."""
        training, step = self.training, self.last_done + 1
        if training.workload.has_schedule and not self.finished:
            factor = training.workload.learning_rate_factor(step, training.last_step)
            training.stepper.scale_learning_rate(factor)

    def _compile(self, compile_ahead: Callable[[Batch], None]) -> None:
        """Run the first batch without training, to compile and to learn which kernels run."""
        training = self.training
        compiles = training.recipe.compiles
        if not compiles and training.workload.trains:
            return
        first = next_batch(training.workload, self._batches)
        self._batches = prepend(first, self._batches)
        if compiles:
            training.phase("compile", lambda: _compile(compile_ahead, first))
            if self._evaluations is not None:
                training.phase("compile", lambda: rehearse(training))
        if not training.workload.trains:
            # Leave out the check of the model: it copies some outputs, and copies are kernels too.
            check = training.model_check
            training.phase(
                "kernels",
                lambda: describe_kernels(
                    check.unwatched if check else training.workload,
                    training.stepper.model,
                    first,
                    training.precision,
                    training.process.device,
                    num_samples=SampleCounter().count(first) or training.request.batch_size,
                ),
            )

    def _plan_block(self) -> None:
        """Decide where the block that begins now ends."""
        training = self.training
        self._block_end = self.last_done + next_block_steps(
            next_step=self.last_done + 1,
            first_step=training.first_step,
            last_step=training.last_step,
            step_time_s=self._step_time_s,
            block_s=self._recorder.block_s,
            every=(training.checkpoint_every, self._evaluations.every if self._evaluations else 0),
        )

    def _block_ends(self) -> bool:
        """Return whether the block ends here: as planned, or early if a lone rank was asked to stop."""
        training = self.training
        alone = training.process.world_size == 1
        return self.last_done == self._block_end or (alone and training.interrupts.requested)

    def _check(self, block: ClosedBlock) -> bool:
        """Check the model after the first step, and every loss; return whether a rank was asked to stop.

        Raises NanLossError, on every rank, if a loss of any rank is not finite.
        """
        training, process = self.training, self.training.process
        first_step = self.last_done - block.num_steps + 1
        if first_step == training.first_step and training.model_check is not None:
            self._check_model(training.model_check)
        nan = any(loss is not None and not math.isfinite(loss) for loss in block.losses)
        checkpoints = training.checkpoints
        self._step_time_s, any_nan, stop, is_writing = agree(
            process,
            [
                block.wall_s / block.num_steps,
                float(nan),
                float(training.interrupts.requested),
                float(checkpoints.is_writing),
            ],
        )
        if checkpoints.is_begun and not is_writing:
            # If it could not be written, that is told now.
            checkpoints.finish()
        if any_nan:
            where = f" on rank {process.rank}" if nan and process.world_size > 1 else ""
            raise NanLossError(
                f"the loss was not finite{where} between steps {first_step} and {self.last_done}"
            )
        return bool(stop)

    def _check_model(self, model_check: CompiledModelCheck) -> None:
        """Record whether the compiled, wrapped model computes the same as before; outside of the steps."""
        training = self.training
        check = model_check.check()
        if check is not None:
            training.writer.add(check)
            training.writer.flush()
            if not check.passed:
                log.warning("warning: %s", check.warning)
        self._recorder.restart()

    def _check_weights(self) -> None:
        """Raise NanLossError, on every rank, if any rank's weights are not finite after the last step.

        No later loss would show it. The time counts for no step.
        """
        training = self.training
        if not training.workload.trains:
            return
        model = training.stepper.model
        bad = not_finite(trained(model), model)
        (any_bad,) = agree(training.process, [float(bool(bad))])
        if any_bad:
            raise NanLossError(not_finite_message(self.last_done, bad))

    def _details(self) -> list[dict[str, Any]]:
        """Return the fields of each step of the block, and begin the next block."""
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

    def _log(self, block: ClosedBlock) -> None:
        """Log the progress and speed of the training, on rank 0."""
        training = self.training
        if training.process.rank != 0:
            return
        step_time_s = block.wall_s / block.num_steps
        rate = metric = ""
        if self._block_samples is not None:
            # Assume that other ranks' batches are like this one's; their records have the exact counts.
            per_s = self._block_samples * training.process.world_size / block.wall_s
            rate, metric = f"  {per_s:.1f} {training.workload.sample_unit}/s", f" samples_per_s={per_s:.2f}"
        log.info(
            "step %d of %d  loss %.4f  %.1f ms%s",
            self.last_done,
            training.last_step,
            block.losses[-1],
            1000 * step_time_s,
            rate,
        )
        if training.print_metrics:
            # The wording of this line is fixed: programs parse it, such as SageMaker's metric definitions.
            log.info(
                "fastlaunch: step=%d loss=%.6f step_time_s=%.6f%s",
                self.last_done,
                block.losses[-1],
                step_time_s,
                metric,
            )

    def _evaluation_due(self) -> bool:
        return self._evaluations is not None and self._evaluations.due(self.last_done)

    def _evaluate(self) -> bool:
        """Evaluate on validation; return whether a rank was asked to stop before that was done."""
        assert self._evaluations is not None
        try:
            with self._recorder.not_counted():
                self._evaluations.validate(self.training, self.last_done)
        except InterruptedRun:
            return True
        return False

    def _test(self, *, saved: bool) -> None:
        """Evaluate on test, after the last step. Raises InterruptedRun when a rank is asked to stop."""
        if self._evaluations is None:
            return
        try:
            self._evaluations.test(self.training, self.last_done)
        except InterruptedRun:
            if self.training.checkpoint_every and not saved:
                self._save(last=True)
            raise

    def _save_due(self, stop: bool) -> bool:
        every = self.training.checkpoint_every
        return bool(every) and (stop or self.last_done % every == 0)

    def _save(self, *, last: bool) -> bool:
        """Save a checkpoint; return whether a rank was asked to stop meanwhile, which need not save again.

        last: whether no steps follow during which it could be written.
        """
        training = self.training
        with training.interrupts.saving():
            training.checkpoints.save(self.last_done)
            (stop,) = agree(training.process, [float(training.interrupts.requested)])
            if stop or last:
                training.checkpoints.finish()
        return bool(stop)


def _compile(compile_ahead: Callable[[Batch], None], first: Batch) -> str | None:
    """Compile; return the phase's detail if an earlier run left the work in a cache."""
    before = num_cached()
    compile_ahead(first)
    return FROM_CACHE if num_cached() > before else None

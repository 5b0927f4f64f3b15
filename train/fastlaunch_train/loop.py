"""The training loop: one optimizer step after another, a record line for each, and a meeting every second."""

import gc
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fastlaunch_train.environment import DeviceMonitor, memory_gib
from fastlaunch_train.failures import InterruptedRun, NanLossError
from fastlaunch_train.interrupts import Interrupts
from fastlaunch_train.parallel import Process, agree, barrier
from fastlaunch_train.precision import Precision
from fastlaunch_train.recipes import Recipe
from fastlaunch_train.records import Block, Phase, RecordWriter, Step
from fastlaunch_train.timing import BlockTimer, ClosedBlock, next_block_steps
from fastlaunch_train.workload import Batch, Workload, next_batch
from fastlaunch_train.workloads import WorkloadError

log = logging.getLogger("fastlaunch_train")


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything the loop needs, built. `model` is wrapped and compiled as the recipe says."""

    workload: Workload
    recipe: Recipe
    process: Process
    precision: Precision
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]
    batch_size: int
    first_step: int
    last_step: int
    checkpoint_every: int
    save_checkpoint: Callable[[int], None]
    writer: RecordWriter
    interrupts: Interrupts
    num_compiles: Callable[[], int]
    print_metrics: bool = False


def train_step(training: Training, batch: Batch) -> torch.Tensor:
    """One optimizer step on `batch`; returns the detached loss without waiting for it."""
    training.optimizer.zero_grad(set_to_none=True)
    loss = forward_backward(training, batch)
    scaler = training.precision.scaler
    if scaler is None:
        training.optimizer.step()
    else:
        scaler.step(training.optimizer)
        scaler.update()
    return loss


def forward_backward(training: Training, batch: Batch) -> torch.Tensor:
    """The detached loss of `batch`, its gradients accumulated in the parameters."""
    if training.recipe.compile_mode in ("reduce-overhead", "max-autotune"):
        # The CUDA graphs' outputs of the step before may be overwritten from here on.
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    with training.precision.autocast():
        loss = training.workload.loss(training.model, batch)
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise WorkloadError(
            f"workload {training.workload.name!r}: its loss is {what}",
            "return the batch's mean, a scalar tensor",
        )
    scaler = training.precision.scaler
    (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def compile_ahead(training: Training, batch: Batch) -> None:
    """Compile forward and backward on `batch` without training on it: buffers and generators are put back."""
    buffers = {name: buffer.clone() for name, buffer in training.model.named_buffers()}
    device = training.process.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        forward_backward(training, batch)
    training.optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in training.model.named_buffers():
            buffer.copy_(buffers[name])
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def train(training: Training) -> int:
    """Run the steps from first_step to last_step; returns the last one done.

    Raises InterruptedRun after a signal, with a checkpoint saved if checkpoints are on, and NanLossError;
    the record then holds every step up to the block in which it was seen.
    """
    process = training.process
    timer = BlockTimer(process.device)
    monitor = DeviceMonitor(process.device)
    step, step_time_s = training.first_step, 0.0

    def meet() -> None:
        barrier(process)

    # What is alive now stays: without this the garbage collector walks through all that the imports left,
    # which stopped one step in about eighty for 0.2 s (Transformer Engine on an H200, 2026-11-21).
    gc.collect()
    gc.freeze()
    timer.restart(meet)
    while step <= training.last_step:
        num_steps = next_block_steps(
            next_step=step,
            first_step=training.first_step,
            last_step=training.last_step,
            step_time_s=step_time_s,
            every=training.checkpoint_every,
        )
        done = _run_block(training, timer, num_steps)
        closed = timer.close(meet)
        _record_block(training, monitor, closed, first_step=step)
        step += done
        nan = any(not math.isfinite(loss) for loss in closed.losses)
        longest_s, any_nan, any_interrupt = agree(
            process, [closed.wall_s / done, float(nan), float(training.interrupts.requested)]
        )
        step_time_s = longest_s
        if any_nan:
            where = f" on rank {process.rank}" if nan and process.world_size > 1 else ""
            raise NanLossError(f"the loss was not finite{where} between steps {step - done} and {step - 1}")
        if process.rank == 0:
            _report(training, closed, step - 1)
        due = training.checkpoint_every and (step - 1) % training.checkpoint_every == 0
        if training.checkpoint_every and (due or any_interrupt):
            with training.interrupts.saving():
                training.save_checkpoint(step - 1)
                # Whoever was asked meanwhile need not do a step, and save again, for that.
                (asked,) = agree(process, [float(training.interrupts.requested)])
            any_interrupt = any_interrupt or asked
            timer.restart(meet)
        if any_interrupt and step <= training.last_step:
            raise InterruptedRun(training.interrupts.message)
    return step - 1


def _run_block(training: Training, timer: BlockTimer, num_steps: int) -> int:
    """Queue up to `num_steps` steps; returns how many. Alone, a rank stops at once when asked to."""
    for done in range(1, num_steps + 1):
        before = time.perf_counter()
        batch = next_batch(training.workload, training.batches)
        data_wait_s = time.perf_counter() - before
        timer.step_done(train_step(training, batch), data_wait_s)
        if training.process.world_size == 1 and training.interrupts.requested:
            return done
    return num_steps


def _record_block(
    training: Training, monitor: DeviceMonitor, closed: ClosedBlock, *, first_step: int
) -> None:
    num_samples = training.batch_size
    for offset, (step_time_s, data_wait_s, loss) in enumerate(
        zip(closed.step_times_s, closed.data_waits_s, closed.losses, strict=True)
    ):
        training.writer.add(
            Step(
                step=first_step + offset,
                step_time_s=step_time_s,
                data_wait_s=data_wait_s,
                loss=loss if math.isfinite(loss) else None,
                num_samples=num_samples,
                num_tokens=num_samples * training.workload.tokens_per_sample,
            )
        )
    state = monitor.read()
    training.writer.add(
        Block(
            first_step=first_step,
            last_step=first_step + len(closed.losses) - 1,
            wall_s=closed.wall_s,
            num_compiles=training.num_compiles(),
            reserved_gib=memory_gib(training.process.device)[0],
            clock_mhz=state.clock_mhz,
            power_w=state.power_w,
            temperature_c=state.temperature_c,
        )
    )
    training.writer.flush()


def _report(training: Training, closed: ClosedBlock, step: int) -> None:
    step_time_s = closed.wall_s / len(closed.losses)
    samples_per_s = training.batch_size * training.process.world_size / step_time_s
    log.info(
        "step %d of %d  loss %.4f  %.1f ms  %.1f %s/s",
        step,
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
            step,
            closed.losses[-1],
            step_time_s,
            samples_per_s,
        )


class PhaseClock:
    """Times what is not a step and adds it to the record as a phase."""

    def __init__(self, writer: RecordWriter, device: torch.device) -> None:
        self._writer = writer
        self._device = device

    def __call__(self, name: str, work: Callable[[], str | None], *, step: int = 0) -> float:
        """Do `work`; its seconds, recorded under `name`. What it returns becomes the phase's detail."""
        started = time.perf_counter()
        detail = work()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - started
        self._writer.add(Phase(name=name, seconds=seconds, step=step, detail=detail))
        self._writer.flush()
        log.info("%s: %.1f s%s", name, seconds, f" ({detail})" if detail else "")
        return seconds

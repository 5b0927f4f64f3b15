"""The record of one rank of a user's script, from its first call to the end of its process.

As in the built-in loop, only at the end of a block of steps do we wait for the device, read losses and answer
signals. There the ranks also agree when to do so next, without waiting for each other: a
block's wall time is this rank's own. Unannounced work between two steps counts for the second of them.
"""

import logging
import math
import operator
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlaunch_train.loop.recorder import WARMUP_STEPS, ClosedBlock, Recorder, next_block_steps
from fastlaunch_train.process.device import memory_gib
from fastlaunch_train.process.failures import EXIT_CODES, classify
from fastlaunch_train.process.interrupts import Interrupts
from fastlaunch_train.records.records import MAX_INTEGER, End, Eval, Phase, RecordWriter, record_path
from fastlaunch_train.script.checkpoints import Note, write_note
from fastlaunch_train.script.ranks import Agreed, Meeting
from fastlaunch_train.script.settings import ScriptSettings, header

if TYPE_CHECKING:
    import torch

log = logging.getLogger("fastlaunch_train")

#: Seconds after which `checkpoint_due` returns True without a signal: a lost spot instance takes unsaved work
#: along.
CHECKPOINT_EVERY_S = 600.0


class Recording:
    """Writes a rank's record. Raises OSError if it cannot, as for a second record of one rank."""

    def __init__(
        self,
        settings: ScriptSettings,
        *,
        clock: Callable[[], float] = time.perf_counter,
        meeting: Meeting | None = None,
    ) -> None:
        self._settings = settings = _place(settings)
        settings.records.mkdir(parents=True, exist_ok=True)
        self._attempt = settings.attempt or _next_attempt(settings)
        self._writer = RecordWriter(record_path(settings.records, rank=settings.rank, attempt=self._attempt))
        self._is_alone = settings.world_size == 1
        self._clock = clock
        self._meeting = meeting or Meeting()
        self._recorder: Recorder | None = None  # None: the clock has not started
        self._device: torch.device | None = None
        first_step = settings.steps_done + 1
        self._block_end = first_step
        self._samples: list[Any] = []  # of each step of the block, as `counted` returns them
        self._wait_s = 0.0
        self._waiting: list[Eval] = []  # for the steps that they follow to be recorded
        #: Batches since the last step ended, and their samples; None if a batch's samples are unknown.
        self.open_batches = 0
        self._open_samples: int | None = 0
        self.accumulate = 1
        #: Samples of a full step as the loader says, unless `step` is told those of the first; None: unknown.
        self.batch_size: int | None = None
        self._names_samples = False
        self._is_after_loop = False
        self._agreed = Agreed(num_steps=1, block_end=first_step)
        self._stop = self._asks_stop = self._asks_checkpoint = False
        self._checkpoint_due = self._saved_for_stop = False
        self._saved_at = clock()
        self._saving: ExitStack | None = None
        self._saved_step = settings.steps_done
        self._problem: str | None = None  # of a loss
        self._ended: tuple[str, str] | None = None  # the status and message of an end of our own making
        self._closed = False
        self.interrupts = Interrupts(grace_s=settings.launch.stop_grace_s)
        self.interrupts.on_stuck = lambda message: self._write_end("interrupted", message)
        with suppress(ValueError):  # not the main thread: signals stay as they are
            self.interrupts.install(keep_handlers=True)

    @property
    def is_started(self) -> bool:
        """Whether the clock runs."""
        return self._recorder is not None

    @property
    def records(self) -> Path:
        """The folder of the command's records."""
        return self._settings.records

    @property
    def _num_done(self) -> int:
        return self._recorder.last_done if self._recorder else 0

    def start(self) -> None:
        """Start the clock, unless it runs."""
        if self._recorder is None:
            self._device = _cuda_device()
            self._recorder = self._new_recorder(self._settings.steps_done)
            self._recorder.close_at_last_step(self._details)
            self._add_waiting()

    def waited(self, wait_s: float) -> None:
        """Note that the loop waited `wait_s` seconds for data."""
        self._wait_s += wait_s

    def batch_fetched(self, num_samples: int | None) -> None:
        """Note the samples of a fetched batch; None if unknown."""
        self.open_batches += 1
        before = self._open_samples
        self._open_samples = None if before is None or num_samples is None else before + num_samples

    def drop_batches(self) -> None:
        """Forget the batches and the wait since the last step, which are no part of a later step."""
        self._wait_s, self.open_batches, self._open_samples = 0.0, 0, 0

    def step(self, num_samples: Any = None, loss: Any = None) -> None:
        """Note that a step is queued; at a block's end record it, and end the script if it has to end.

        num_samples: as `counted` takes it; None for the samples of the fetched batches. loss: a number or a
        tensor with one number. Tensors on a GPU are not waited for. Raises SystemExit with the exit code for
        a loss that is not finite, or for a stop if the script never calls `stop_requested`.
        """
        if self._closed:
            return
        samples = self._open_samples if self.open_batches else None
        if num_samples is not None:
            samples = counted(num_samples, waits=False)
        self._end_saving()
        if self._recorder is None:
            self.start()
            return
        if not self._writer.header_written:
            self._names_samples = num_samples is not None
        self._recorder.step(_detached(loss), self._wait_s)
        self._samples.append(samples)
        self.drop_batches()
        # Slower steps would make the block too long, and a killed process loses its block.
        is_long = self._recorder.seconds > 1.25 * self._recorder.block_s
        if self._recorder.last_done >= self._block_end or is_long or self._hears_alone():
            with self._giving_up():
                self._close_block()

    @contextmanager
    def loop(self, nominal_batch: int | None, accumulate: int) -> Iterator[None]:
        """Enter a loop over `steps`. The time since the last loop of several steps is a phase."""
        self.start()
        if self._saving is not None:
            self.saved()
        elif self._is_after_loop:
            self.phase("between loops")
        self.accumulate = accumulate
        self.batch_size = nominal_batch and nominal_batch * accumulate
        # This loop divides the batch of the loop around it.
        self.open_batches, self._open_samples = 0, 0
        before = self._num_done
        try:
            yield
        finally:
            # If the body leaves the loop with a batch, we do not know whether that made a step.
            self.drop_batches()
            # A loop of one step may lie within a loop of steps; the rest of that step follows.
            self._is_after_loop = self._num_done > before + 1
            if self._is_after_loop:
                self._loop_left()

    def end_short_step(self) -> None:
        """End the step of a loop over `steps` whose loader has ended before it was full."""
        if self.open_batches:
            self.step()

    def end_full_step(self) -> None:
        """End the step of a loop over `steps`, if its last batch was fetched and nothing has ended it."""
        if self.open_batches >= self.accumulate:
            self.step()

    def phase(self, name: str, detail: str | None = None) -> None:
        """Record the time since the last step as a phase."""
        if self._closed:
            return
        with self._giving_up():
            step, seconds = self._pause_ended()
            self._writer.add(Phase(name=name, seconds=seconds, step=step, detail=detail))

    def evaluate(
        self, loss: float | None, metric: str | None, value: float | None, split: str, num_samples: int
    ) -> None:
        """Record an evaluation of the model after the last step; it began when that step ended."""
        if self._closed:
            return
        # Within a step, its time belongs to the step.
        within = self._recorder if self.open_batches else None
        with self._giving_up():
            step, seconds = (within.last_done, 0.0) if within else self._pause_ended()
            self._waiting.append(
                Eval(
                    step=step,
                    split=split,
                    loss=_finite(loss),
                    has_loss=False if loss is None else None,
                    num_samples=num_samples,
                    seconds=seconds,
                    metric=metric,
                    metric_value=_finite(value),
                )
            )
            if not within:
                self._add_waiting()

    def stop_requested(self) -> bool:
        """Return whether the script should save and end. From now on we leave the ending to the script."""
        self._asks_stop = True
        return self._stop or self._hears_alone()

    def checkpoint_due(self) -> bool:
        """Return whether to save now: once after a signal, and every CHECKPOINT_EVERY_S."""
        self._asks_checkpoint = True
        stop = self._stop or self._hears_alone()
        due = self._checkpoint_due or (stop and not self._saved_for_stop)
        if not due or self._closed:
            return False
        self.end_full_step()
        self._checkpoint_due, self._saved_for_stop, self._saved_at = False, stop, self._clock()
        self._saving = ExitStack()
        self._saving.enter_context(self.interrupts.saving())
        self._note(is_saving=True)
        return True

    def saved(self) -> None:
        """Record the checkpoint that was due, if any, as a phase: the script asks for the next batch."""
        if self._saving is not None:
            self._end_saving()
            self.phase("checkpoint")
            self._leave_if_stopped()

    def has_saved(self) -> None:
        """Record a checkpoint that the script has just saved by itself."""
        self._note(is_saving=False)
        self.phase("checkpoint")

    def finish(self) -> None:
        """Write pending lines and the end line, as the process ends."""
        if self._closed:
            return
        # multiprocessing prints the exception of a child itself, and finishes while it handles it.
        error = getattr(sys, "last_value", None) or sys.exc_info()[1]
        if error is None and (self._saving is not None or (self._stop and self._asks_stop)):
            self._end_saving()
            self._note(is_saving=False)
        if self._ended is not None:
            status, message = self._ended
        elif self._stop or self.interrupts.requested or isinstance(error, KeyboardInterrupt):
            status, message = "interrupted", self.interrupts.message
        elif isinstance(error, Exception):
            failure = classify(error)
            status, message = failure.status, failure.message
        else:
            status, message = "completed", ""
        if self._recorder is not None:
            with suppress(Exception):  # a GPU after an error, or a full disk
                closed, _ = self._recorder.close_at_last_step(self._details)
                self._add_waiting()
                problem = self._not_finite(closed)
                if problem and status == "completed":
                    status, message = "nan_loss", problem
        self._write_end(status, message)
        self.interrupts.done()

    def abandon(self) -> None:
        """Forget the record in a forked child: it belongs to the parent."""
        self._closed = True

    def _pause_ended(self) -> tuple[int, float]:
        """Return the last step and the seconds since it, which count for no step; the next begins now."""
        if self._recorder is None:
            return self._settings.steps_done, 0.0
        closed, passed_s = self._recorder.close_at_last_step(self._details)
        self._add_waiting()
        self._check(closed)
        return self._recorder.last_done, passed_s

    def _loop_left(self) -> None:
        """Record the loop's last steps: the script may run long after the loop, and be killed."""
        # After an error of the GPU, that error ends the script.
        with suppress(Exception), self._giving_up():
            if self._recorder is not None and not self._closed:
                closed, _ = self._recorder.close_at_last_step(self._details)
                self._add_waiting()
                self._not_finite(closed)

    def _close_block(self) -> None:
        assert self._recorder is not None
        device = self._device
        if not self._writer.header_written:
            device = _cuda_device()
            if device is not None and self._device is None:
                # The script has put its model there since the clock started.
                import torch

                torch.cuda.synchronize(device)
        closed = self._recorder.close(self._details)
        if not self._writer.header_written:
            self._write_header(device)
            if device != self._device:
                self._device = device
                self._recorder = self._new_recorder(self._recorder.last_done)
            # Without the other ranks: a meeting is theirs to count.
            self._recorder.close_at_last_step(self._details)
        self._add_waiting()
        self._block_end = self._agreed.block_end
        self._check(closed)
        self._stop = self._stop or self._agreed.stop
        if self._agreed.checkpoint:
            self._checkpoint_due, self._saved_at = True, self._clock()
        # A script that calls `checkpoint_due` may save a checkpoint first.
        if not self._asks_checkpoint or self._saved_for_stop:
            self._leave_if_stopped()

    def _leave_if_stopped(self) -> None:
        """End the script if it was asked to stop and never calls `stop_requested`."""
        if self._stop and not self._asks_stop:
            self._leave("interrupted", self.interrupts.message)

    def _check(self, closed: ClosedBlock | None) -> None:
        """End the script if a loss of the block is not finite."""
        if problem := self._not_finite(closed):
            self._leave("nan_loss", problem)

    def _not_finite(self, closed: ClosedBlock | None) -> str | None:
        """Return a message if a loss of this or an earlier block is not finite, else None."""
        if closed is not None and not all(loss is None or math.isfinite(loss) for loss in closed.losses):
            first = self._num_done - closed.num_steps + 1
            self._problem = f"the loss was not finite between steps {first} and {self._num_done}"
        return self._problem

    def _leave(self, status: str, message: str) -> None:
        self._ended = (status, message)
        print(f"fastlaunch: {message}; the script ends here", file=sys.stderr)  # noqa: T201
        raise SystemExit(EXIT_CODES[status])

    def _meet(self) -> None:
        """Agree with the other ranks when to meet again and what to do then, unless the block ends early."""
        assert self._recorder is not None
        last = self._recorder.last_done
        if last < self._block_end and not self._is_alone:
            self._agreed = replace(self._agreed, checkpoint=False)
            return
        num_steps = max(1, self._recorder.num_steps)
        num_next = next_block_steps(
            next_step=last + 1,
            first_step=self._settings.steps_done + 1,
            last_step=sys.maxsize,
            step_time_s=self._recorder.seconds / num_steps,
            block_s=self._recorder.block_s,
            every=(),
        )
        num_done = last - self._settings.steps_done
        if num_done >= WARMUP_STEPS:
            # A short script that is killed, or ends by os._exit, loses the last fifth of its steps at most.
            num_next = min(num_next, max(num_next // 10, num_done // 4))
        self._agreed = self._meeting.agree(
            Agreed(
                num_steps=num_next,
                block_end=last + num_next,
                stop=self.interrupts.requested,
                checkpoint=self._clock() - self._saved_at >= CHECKPOINT_EVERY_S,
            )
        )

    def _new_recorder(self, last_done: int) -> Recorder:
        return Recorder(self._writer, self._device, self._meet, last_done=last_done, clock=self._clock)

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Enter a context in which a refusing disk ends the recording, and not the script."""
        try:
            yield
        except OSError as error:
            self._closed = True
            self._writer.close()
            log.warning("warning: this script is recorded no further: %s", error)

    def _add_waiting(self) -> None:
        for line in self._waiting:
            self._writer.add(line)
        self._waiting = []
        self._writer.flush()

    def _details(self) -> list[dict[str, Any]]:
        queued, self._samples = self._samples, []
        samples = [None if number is None else counted(number) for number in queued]
        if samples and self._names_samples and self._num_done - len(samples) == self._settings.steps_done:
            self.batch_size = samples[0] or None
        return [{"num_samples": number, "num_tokens": None} for number in samples]

    def _hears_alone(self) -> bool:
        """Whether a signal has come to a rank that has no others to agree with."""
        return self._is_alone and self.interrupts.requested

    def _end_saving(self) -> None:
        if self._saving is not None:
            self._saving.close()
            self._saving = None
            self._note(is_saving=False)

    def _note(self, *, is_saving: bool) -> None:
        """Tell the process that started the script that the last step's state is saved, or about to be."""
        if self._closed or self._recorder is None:
            return
        if not is_saving:
            self._saved_step = self._recorder.last_done
        with suppress(OSError):  # then it is not packed
            write_note(
                self._settings.records, self._settings.rank, Note(step=self._saved_step, is_saving=is_saving)
            )

    def _write_header(self, device: "torch.device | None") -> None:
        self._writer.write_header(
            header(
                self._settings,
                device,
                attempt=self._attempt,
                batch_size=self.batch_size,
                warnings=[self._meeting.warning] if self._meeting.warning else [],
            )
        )

    def _write_end(self, status: str, message: str) -> None:
        self._closed = True
        try:
            if not self._writer.header_written:
                self._write_header(self._device)
            peak_gib = memory_gib(self._device)[1]
            self._writer.add(
                End(
                    status=status, message=message or None, num_steps=self._num_done, peak_memory_gib=peak_gib
                )
            )
            self._writer.flush()
        except OSError as error:
            log.error("the record could not be finished: %s", error)
        self._writer.close()


def _place(settings: ScriptSettings) -> ScriptSettings:
    """Return the settings with the rank from torch.distributed, if it is initialised."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return settings
    return replace(settings, rank=distributed.get_rank(), world_size=distributed.get_world_size())


def _next_attempt(settings: ScriptSettings) -> int:
    """Return the attempt after this rank's last record; other ranks may have begun the new attempt."""
    attempt = 1
    while record_path(settings.records, rank=settings.rank, attempt=attempt).exists():
        attempt += 1
    return attempt


def _cuda_device() -> "torch.device | None":
    """Return the GPU that the script uses; None if it has used none yet, or has not imported torch."""
    loaded = sys.modules.get("torch")
    if loaded is None or not loaded.cuda.is_initialized():
        return None
    device: torch.device = loaded.device("cuda", loaded.cuda.current_device())
    return device


def counted(num_samples: Any, *, waits: bool = True) -> Any:
    """Return a whole number of any type, at least 0, as an int.

    waits: whether to wait for a GPU; if not, its tensors are returned as they are. Raises TypeError for a
    value that is not a whole number, and ValueError for a number out of range.
    """
    number = num_samples
    if not waits and getattr(number, "is_cuda", False):
        return number.detach().clone()
    try:
        if hasattr(number, "item"):  # of torch or NumPy
            number = number.item()
            if isinstance(number, float) and number.is_integer():
                number = int(number)
        number = int(operator.index(number))
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"num_samples is {num_samples!r}, not a whole number") from None
    if not 0 <= number <= MAX_INTEGER:
        raise ValueError(f"num_samples is {number}, but must be at least 0")
    return number


def _detached(loss: Any) -> Any:
    """Return a loss as Recorder takes it. Raises TypeError unless it is one number."""
    if loss is None or isinstance(loss, float | int):
        return loss
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(loss, torch.Tensor):
        if loss.numel() != 1:
            raise TypeError(f"loss has shape {tuple(loss.shape)}, but must be one number")
        return loss.detach().reshape(())
    return float(loss)


def _finite(value: Any) -> float | None:
    number = None if value is None else float(value)
    return number if number is not None and math.isfinite(number) else None

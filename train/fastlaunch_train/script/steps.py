"""What a script calls: `steps` or `step`, `evaluate`, `checkpoint_due`, `stop_requested`.

Outside of fastlaunch, where the environment names no folder for records, each call returns at once.
"""

import atexit
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from fastlaunch_train.loop.counting import SampleCounter
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.records.records import SPLITS
from fastlaunch_train.script.ending import note_unrecorded
from fastlaunch_train.script.recording import Recording, counted
from fastlaunch_train.script.settings import read_settings

log = logging.getLogger("fastlaunch_train")

Batch = TypeVar("Batch")

#: This process's recording; None outside of fastlaunch, and in a forked child.
_recording: Recording | None = None
_is_open = False
#: In a forked child that has not called us yet: its parent's, which it is not recorded in.
_of_parent: Recording | None = None


def steps(loader: Iterable[Batch], num_samples: int | None = None, accumulate: int = 1) -> Iterable[Batch]:
    """Return the batches of `loader` and record every `accumulate` of them as a step, the last with the rest.

    A step ends when the loop asks for the next batch, or at a `step` in its body, which can give a loss. Call
    `step` before the body does anything else, such as an evaluation. Work between two such loops of several
    steps counts for no step.
    num_samples: samples in every batch of this rank; by default `SampleCounter` counts those of each batch.
    """
    if accumulate < 1 or (num_samples is not None and num_samples < 1):
        raise ValueError(
            f"accumulate is {accumulate} and num_samples {num_samples}, but both must be at least 1"
        )
    recording = current()
    if recording is None:
        return loader
    return RecordedSteps(recording, loader, None if num_samples is None else counted(num_samples), accumulate)


def step(num_samples: int | None = None, loss: Any = None) -> None:
    """End an optimizer step, once its work is queued. The first call starts the clock, if `steps` has not.

    num_samples: samples of this rank, a whole number. loss: a number. Either may be a tensor with one number;
    a tensor on a GPU is read when a block of steps ends, about every 5 s. Raises TypeError or ValueError
    for an invalid number of samples. A loss that is not finite ends the script with exit code 33. A SIGTERM
    ends it between two steps with 130, unless the script calls `stop_requested`.
    """
    recording = current()
    if recording is not None:
        recording.step(num_samples, loss)


def evaluate(
    loss: Any = None, accuracy: Any = None, *, split: str = "validation", num_samples: int = 0, **metrics: Any
) -> None:
    """Record the model's score on held-out data after the last step. Call it on one rank, or on all.

    loss, accuracy: numbers; give another metric, if higher is better, by its name. split: `validation` or
    `test`. num_samples: samples that were scored, 0 if unknown. Raises TypeError for several metrics,
    ValueError for another split or if no number is given.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, not {' or '.join(SPLITS)}")
    named = {name: value for name, value in {"accuracy": accuracy, **metrics}.items() if value is not None}
    if len(named) > 1:
        raise TypeError(f"only one metric can be recorded, not {', '.join(named)}")
    if loss is None and not named:
        raise ValueError("neither a loss nor a metric is given")
    recording = current()
    if recording is not None:
        metric, value = next(iter(named.items()), (None, None))
        recording.evaluate(loss, metric, value, split, counted(num_samples))


def checkpoint_due() -> bool:
    """Return whether to save a checkpoint now: after a SIGTERM, as on a spot instance, and every ten minutes.

    All ranks get the same answer if each calls it after the same step; False outside of fastlaunch.
    """
    recording = current()
    return recording is not None and recording.checkpoint_due()


def stop_requested() -> bool:
    """Return whether the script was asked to end, by SIGTERM or Ctrl-C: it should save and return.

    All ranks get the same answer once a block of steps ends; False outside of fastlaunch.
    """
    recording = current()
    return recording is not None and recording.stop_requested()


def current() -> Recording | None:
    """Return this process's recording, begun at the first call; None outside of fastlaunch."""
    global _recording, _is_open, _of_parent
    if not _is_open:
        _is_open = True
        _recording = _open()
    if _of_parent is not None:
        _note_unrecorded(_of_parent.records)
        _of_parent = None
    return _recording


def nominal_batch(loader: Any) -> int | None:
    """Return the samples of a full batch of this rank, as a loader or its `batch_sampler` says; or None."""
    for _ in range(4):
        if hasattr(loader, "batch_size") or hasattr(loader, "batch_sampler"):
            break
        # Wrappers such as tqdm and timm's PrefetchLoader pass on another loader's batches, but not their
        # size.
        names = ("iterable", "loader", "dataloader", "base_dataloader")
        loader = next((inner for name in names if (inner := getattr(loader, name, None)) is not None), None)
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        return None
    # Accelerate's: each batch is of all ranks together.
    for owner, processes in ((sampler, sampler), (loader, getattr(loader, "state", None))):
        if getattr(owner, "split_batches", False):
            return size // getattr(processes, "num_processes", 1) or None
    return size


def _open() -> Recording | None:
    try:
        settings = read_settings(os.environ, script=sys.argv[0], command=sys.orig_argv)
        if settings is None:
            return None
        try:
            recording = Recording(settings)
        except FileExistsError:
            _note_unrecorded(settings.records)
            log.warning("warning: this process is not recorded: another one of the same command and rank is")
            return None
    except (RecipeError, OSError) as error:
        log.warning("warning: this script is not recorded: %s", error)
        return None
    os.register_at_fork(after_in_child=_forget)
    atexit.register(_finish)
    if (multiprocessing := sys.modules.get("multiprocessing.util")) is not None:
        # Its forked children end without atexit.
        multiprocessing.Finalize(None, _finish, exitpriority=0)
    return recording


def _note_unrecorded(records: Path) -> None:
    with suppress(OSError):
        note_unrecorded(records, Path(sys.argv[0]).name)


def _finish() -> None:
    if _recording is not None:
        _recording.finish()


def _forget() -> None:
    global _recording, _of_parent
    if _recording is not None:
        _recording.abandon()
        _recording, _of_parent = None, _recording


class RecordedSteps(Generic[Batch]):
    """The batches of a loader, recorded as steps. The length, if there is one, is the loader's."""

    def __init__(
        self, recording: Recording, loader: Iterable[Batch], num_samples: int | None, accumulate: int
    ) -> None:
        self._recording = recording
        self._loader = loader
        self._num_samples = num_samples
        self._accumulate = accumulate

    def __len__(self) -> int:
        if isinstance(self._loader, Sized):
            return len(self._loader)
        raise TypeError(f"{type(self._loader).__name__} has no length")

    def __iter__(self) -> Iterator[Batch]:
        recording, loader = self._recording, self._loader
        nominal = self._num_samples or nominal_batch(loader)
        counter = SampleCounter(nominal)
        with recording.loop(nominal, self._accumulate):
            before = time.perf_counter()
            batches = iter(loader)
            while True:
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                recording.waited(time.perf_counter() - before)
                recording.batch_fetched(self._num_samples or counter.count(batch))
                yield batch
                # This does nothing if the body has ended the step.
                recording.end_full_step()
                recording.saved()
                before = time.perf_counter()
            recording.end_short_step()

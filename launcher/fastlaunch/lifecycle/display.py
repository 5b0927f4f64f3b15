"""Shows how far a run is: reads its record file as it grows, and draws a bar or prints lines."""

import json
import math
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO, TypeAlias

from fastlaunch.core.terminal import printable, raw_output, report_line
from fastlaunch.core.units import rounded
from fastlaunch.measure.record_files import MAX_LINE_BYTES, header_problem, line_problem
from fastlaunch_train.recipes.recipe import Recipe
from fastlaunch_train.records.records import (
    BUILD_CHECKS,
    BUILD_MODEL,
    BUILD_STEPS,
    FETCH_PHASE,
    KINDS,
    SCRIPT_PHASE,
)

if TYPE_CHECKING:
    from rich.progress import TaskID

#: Number of last blocks, of about a second each, that samples/s and the time left come from.
_NUM_BLOCKS = 10
_PLAIN_INTERVAL_S = 5.0
#: How a run ended, in colours that dark and light terminals show.
_COLOURS = {"completed": "green", "failed": "red", "lost": "red"}


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is. None is not known yet; for a script, perhaps not before its end."""

    step: int
    num_steps: int | None
    sample_unit: str = "samples"
    #: Over all ranks and the last blocks.
    samples_per_s: float | None = None
    #: Over the last blocks.
    step_time_s: float | None = None
    #: Only if the number of samples is unknown.
    steps_per_s: float | None = None
    loss: float | None = None
    #: Whether it records losses, so that a loss of None is not finite. A script need not record any.
    has_loss: bool = True
    seconds_left: float | None = None
    #: The phase before its first step: `compiling; build took 5.1 s`.
    phase: str | None = None


class RecordTail:
    """Reads what was added to rank 0's newest record since the last look. A half-written line waits."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._start(None)

    def _start(self, path: Path | None) -> None:
        self._path = path
        self._offset = 0
        self._header: dict[str, Any] = {}
        self._steps: dict[str, Any] = {}
        self._num_samples: int | None = 0
        self._phase: str | None = None
        #: Steps, samples and seconds of each.
        self._blocks: deque[tuple[int, int | None, float]] = deque(maxlen=_NUM_BLOCKS)

    def read(self) -> Progress | None:
        """Return how far the run is now; None until its header is there."""
        records = self._directory.glob("rank-00000-attempt-*.jsonl")
        # Compare by length first: attempt 10 comes after attempt 9.
        newest = max(records, key=lambda path: (len(path.name), path.name), default=None)
        if newest != self._path:
            # A job that SageMaker starts again goes on in another file.
            self._start(newest)
        if self._path is not None:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                # A line that is too long comes in pieces, which are skipped.
                while (line := file.readline(MAX_LINE_BYTES)).endswith(b"\n") or len(line) == MAX_LINE_BYTES:
                    self._offset += len(line)
                    self._take(line)
        return self._progress() if self._header else None

    def _take(self, line: bytes) -> None:
        try:
            data = json.loads(line)
            kind = data.pop("kind")
            data.pop("crc", None)
            problem = header_problem(data) if kind == "header" else line_problem(KINDS[kind], data)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            problem = "no line of a record"
        if problem:
            # Following goes on; collecting the run reports the damaged line.
            return
        if kind == "header":
            self._header = data
        elif kind == "step":
            self._steps = data
            num_samples = data["num_samples"]
            is_known = self._num_samples is not None and num_samples is not None
            self._num_samples = self._num_samples + num_samples if is_known else None
        # The phase of a whole script is not one before its steps.
        elif kind == "phase" and data["name"] != SCRIPT_PHASE:
            self._phase = self._after(data["name"], data["detail"], data["seconds"])
        elif kind == "block":
            num_steps = data["last_step"] - data["first_step"] + 1
            self._blocks.append((num_steps, self._num_samples, data["wall_s"]))
            self._num_samples = 0

    def _after(self, name: str, detail: str | None, seconds: float) -> str:
        """Return what a run does after this phase. A phase is recorded when it is over."""
        if name == FETCH_PHASE and "script" not in self._header:
            return f"fetching weights, {detail}"
        compiles = False
        with suppress(LookupError, TypeError):  # a script's
            compiles = Recipe.from_record(self._header["recipe"]).compiles
        following = {
            ("build", BUILD_MODEL): "converting and checking the model",
            ("build", BUILD_CHECKS): "preparing its steps",
            ("build", BUILD_STEPS): "compiling" if compiles else "warming up",
        }
        done = f"{name} took {seconds:.1f} s"
        now = following.get((name, detail or ""))
        return f"{now}; {done}" if now else done

    def _progress(self) -> Progress:
        step = self._steps.get("step", 0)
        num_steps: int | None = self._header["steps"]
        wall_s = sum(wall for _, _, wall in self._blocks)
        num_timed = sum(n for n, _, _ in self._blocks)
        samples = [n for _, n, _ in self._blocks if n is not None]
        rate = steps_per_s = step_time_s = left = None
        if num_timed > 0 and math.isfinite(left_s := ((num_steps or step) - step) * wall_s / num_timed):
            if len(samples) == len(self._blocks):
                rate = sum(samples) * self._header["world_size"] / wall_s
            else:
                steps_per_s = num_timed / wall_s
            left = left_s if num_steps else None
            step_time_s = wall_s / num_timed
        return Progress(
            step=step,
            num_steps=num_steps,
            sample_unit=self._header["workload"].get("sample_unit", "samples"),
            samples_per_s=rate,
            step_time_s=step_time_s,
            steps_per_s=steps_per_s,
            loss=self._steps.get("loss"),
            has_loss="script" not in self._header,
            seconds_left=left,
            phase=self._phase,
        )


@dataclass(kw_only=True)
class PlainLines:
    """Prints the progress of one run after another: a line for every tenth of the steps or five seconds."""

    stream: TextIO = field(default_factory=lambda: sys.stderr)
    clock: Callable[[], float]
    #: Begins every line, where several displays share the stream.
    prefix: str = ""
    _label: str = ""
    _shown: Progress | None = None
    _shown_at: float = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def start(self, label: str, num_steps: int | None) -> None:
        """Show another run. num_steps: None if only its record will have it."""
        self._label, self._shown, self._shown_at = f"{self.prefix}{label}", None, self.clock()
        report_line(f"{self._label}: started" + (f", {num_steps} steps" if num_steps else ""), self.stream)

    def show(self, progress: Progress) -> None:
        before = self._shown
        tenth = max(1, progress.num_steps or math.inf) / 10
        if before is not None and (progress.step, progress.phase) == (before.step, before.phase):
            return
        moved = before is None or progress.step // tenth > before.step // tenth
        if not moved and self.clock() - self._shown_at < _PLAIN_INTERVAL_S:
            return
        self._shown, self._shown_at = progress, self.clock()
        report_line(f"{self._label}: {describe(progress)}", self.stream)

    def wait(self, what: str) -> None:
        """Show what is waited for before a run starts, until `finish`."""
        self._label = f"{self.prefix}{what}"
        report_line(self._label, self.stream)

    def finish(self, outcome: str) -> None:
        report_line(f"{self._label}: {printable(outcome)}", self.stream)


class ProgressBar:
    """Draws the progress of one run after another as a bar with step, samples/s, loss and time left."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
        from rich.theme import Theme

        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None, style="bright_black", complete_style="green", pulse_style="green"),
            # The clock moves while nothing else does, as while a machine boots.
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            # The bar steers the terminal itself. rich's yellow cannot be read on a light one.
            console=Console(file=raw_output(stream), theme=Theme({"progress.elapsed": "none"})),
            expand=True,
        )
        self._task: TaskID | None = None
        self._label = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._bar.stop()

    def start(self, label: str, num_steps: int | None) -> None:
        self._label = printable(label)
        self._task = self._bar.add_task(self._label, total=num_steps, status="starting")

    def wait(self, what: str) -> None:
        """Show what is waited for before a run starts, until `finish`."""
        self._label = printable(what)
        self._task = self._bar.add_task(self._label, total=None, status="")

    def show(self, progress: Progress) -> None:
        assert self._task is not None
        with suppress(OSError):
            # Only the record knows how many steps the epochs come to.
            self._bar.update(
                self._task,
                completed=progress.step,
                total=progress.num_steps or None,
                status=describe(progress),
            )

    def finish(self, outcome: str) -> None:
        assert self._task is not None
        with suppress(OSError):
            # A line for every run that ended, and a bar for the run under way.
            colour = _COLOURS.get(outcome)
            line = f"{self._label}: {printable(outcome)}"
            self._bar.console.print(line, style=colour, markup=False, highlight=False)
            self._bar.remove_task(self._task)


Display: TypeAlias = PlainLines | ProgressBar


def make_display(stream: TextIO, clock: Callable[[], float]) -> Display:
    """Return a progress bar if `stream` is a terminal, else plain lines."""
    return ProgressBar(stream) if stream.isatty() else PlainLines(stream=stream, clock=clock)


def describe(progress: Progress) -> str:
    """`step 40/200, 652 images/s, loss 2.31, 4 s left`, or the phase before the first step."""
    if progress.step == 0:
        before = "before the first step"
        return printable(f"{before} ({progress.phase})") if progress.phase else before
    parts = [f"step {progress.step}{f'/{progress.num_steps}' if progress.num_steps else ''}"]
    if progress.samples_per_s is not None:
        parts.append(f"{rounded(progress.samples_per_s)} {progress.sample_unit}/s")
    elif progress.steps_per_s is not None:
        parts.append(f"{rounded(progress.steps_per_s)} steps/s")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.3f}")
    elif progress.has_loss:
        parts.append("loss not finite")
    if progress.seconds_left is not None and progress.step < (progress.num_steps or 0):
        parts.append(f"{_clock_time(progress.seconds_left)} left")
    return printable(", ".join(parts))


def _clock_time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"

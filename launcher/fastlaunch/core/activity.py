"""Show slow work on stderr: as one transient line on a terminal, as a few plain lines elsewhere."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread
from typing import TextIO, TypeVar

from fastlaunch.core.terminal import plain, printable, raw_output, report_line

#: Work that is done sooner is not shown: on a terminal, and elsewhere, where lines stay.
_DELAY_S = 2.0
_PLAIN_DELAY_S = 10.0
#: Without a terminal: the pause between looks, and between two equal lines.
_PLAIN_INTERVAL_S = 5.0
_REPEAT_S = 20.0
_REDRAW_S = 0.25
#: Held by the activity that is shown.
_SHOWN = Lock()
#: The shown activity, if any.
_CURRENT: "list[Activity]" = []

T = TypeVar("T")


class Activity:
    """The work under way: its name, step and details.

    A thread shows it, also while a call blocks.
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        self.what = what
        self.total = total
        self.num_begun = 0
        self.detail = ""
        self.wait = ""

    def update(self, detail: str) -> None:
        """Set the details, in a line."""
        # The last state of a progress bar that a program draws.
        self.detail = printable(plain(detail.strip().rpartition("\r")[2]))

    def begin(self, step: str) -> None:
        """Begin the next step; the one before is done."""
        self.num_begun += 1
        self.update(step)

    def over(self, items: Iterable[T], name: Callable[[T], str] = str) -> Iterator[T]:
        """Yield the items, each a step."""
        for item in items:
            self.begin(name(item))
            yield item

    def line(self) -> str:
        """Return `asking AWS for prices, 3 of 8: spot in us-east-1`."""
        done = f", {self.num_begun} of {self.total}" if self.total else ""
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.what}{done}{detail}{f'; {self.wait}' if self.wait else ''}"


def note_wait(wait: str) -> None:
    """Set what the shown activity is waiting for; "" for nothing."""
    if _CURRENT:
        _CURRENT[-1].wait = plain(wait)


@contextmanager
def activity(what: str, *, total: int | None = None) -> Iterator[Activity]:
    """Show an activity on stderr as soon as it takes longer than two seconds; off a terminal, ten.

    Inside another activity it is that one's detail. Do not use it while runs are shown. total: the number of
    steps.
    """
    shown, over = Activity(what, total), Event()
    if not _SHOWN.acquire(blocking=False):
        outer = next(iter(_CURRENT), None)
        if outer is None or outer.detail:
            yield shown
            return
        outer.update(what)
        try:
            yield shown
        finally:
            outer.update("")
        return
    thread = Thread(target=show, args=(shown, sys.stderr, over.wait), name="activity", daemon=True)
    thread.start()
    _CURRENT.append(shown)
    try:
        yield shown
    finally:
        _CURRENT.clear()
        over.set()
        thread.join()
        _SHOWN.release()


def show(shown: Activity, stream: TextIO | None, wait: Callable[[float], bool]) -> None:
    """Show the activity on the stream until `wait(seconds)` returns True, when it is over."""
    if stream is None or wait(_DELAY_S if stream.isatty() else _PLAIN_DELAY_S):
        return
    if stream.isatty():
        _draw(shown, stream, wait)
        return
    printed, passed_s, silent_s = "", _PLAIN_DELAY_S, 0.0
    while True:
        if (line := shown.line()) != printed:
            report_line(line, stream)
            printed, silent_s = line, 0.0
        elif silent_s >= _REPEAT_S:
            report_line(f"{line} ({passed_s:.0f} s)", stream)
            silent_s = 0.0
        if wait(_PLAIN_INTERVAL_S):
            return
        passed_s += _PLAIN_INTERVAL_S
        silent_s += _PLAIN_INTERVAL_S


def _draw(shown: Activity, stream: TextIO, wait: Callable[[float], bool]) -> None:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column
    from rich.theme import Theme

    # rich's own colours cannot be read on a light terminal.
    theme = Theme({"progress.elapsed": "none", "progress.spinner": "none"})
    line = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1))
    columns = (SpinnerColumn(), TimeElapsedColumn(), line)
    console = Console(file=raw_output(stream), theme=theme)
    with suppress(OSError), Progress(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task(shown.line())
        # It began before it was shown.
        bar.tasks[0].start_time = bar.get_time() - _DELAY_S
        while not wait(_REDRAW_S):
            bar.update(task, description=shown.line())

"""The agent's clock and log, and the programs that it runs, each with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fastlaunch_train.node.protocol import HARDWARE, Outcome

T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Seconds between SIGTERM and SIGKILL for a program that exceeds its time limit.
_KILL_AFTER_S = 5.0
_LOOK_S = 0.1


class Clock:
    """The time since boot, since the time of day jumps when the machine sets its clock."""

    def uptime_s(self) -> float:
        """Return seconds since the machine booted."""
        return round(time.clock_gettime(time.CLOCK_BOOTTIME), 2)

    def wait(self, seconds: float, event: threading.Event | None = None) -> bool:
        """Wait for `seconds`, or until the event is set; return whether it is."""
        return (event or threading.Event()).wait(seconds)

    def attempts(
        self, number: int, pause_s: float, step: Callable[[], T], *, cut: threading.Event | None = None
    ) -> T | None:
        """Call `step` up to `number` times until its result is true; return that result, or None.

        pause_s: between two calls. cut: ends the attempts once it is set.
        """
        for at in range(number):
            if at and self.wait(pause_s, cut):
                return None
            if result := step():
                return result
        return None

    def every(
        self, seconds: float, look: Callable[[], bool], *, name: str, say: Callable[[str], None]
    ) -> threading.Thread:
        """Call `look` every `seconds` in a thread until it returns True; log its exceptions and go on."""

        def loop() -> None:
            while True:
                try:
                    if look():
                        return
                except Exception:
                    say(f"{name}: {traceback.format_exc()}")
                self.wait(seconds)

        thread = threading.Thread(target=loop, name=name, daemon=True)
        thread.start()
        return thread


class Log:
    """Prints lines, each after what `stamp` returns, and copies them to `file` if stdout is not that file."""

    def __init__(self, stamp: Callable[[], object], file: Path | None = None) -> None:
        self._stamp = stamp
        self._file = file

    def __call__(self, text: str) -> None:
        line = f"fastlaunch {self._stamp()}: {text}\n".encode(errors="replace")
        # A full disk, or a console that nobody reads, is no reason to end.
        with suppress(OSError):
            os.write(1, line)
        if self._file is not None:
            with suppress(OSError), self._file.open("ab") as file:
                file.write(line)


class Stop:
    """A request to begin no more runs, and why: the first reason and the first problem count.

    event: set by either of them.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self._lock = threading.Lock()
        #: Why the run under way has to end, too.
        self.reason: str | None = None
        #: Why no run would fare better than the last one: CONFIGURATION or HARDWARE.
        self.problem: Outcome | None = None

    def ask(self, reason: str) -> bool:
        """Ask to stop; return whether this is the first request."""
        with self._lock:
            is_first = self.reason is None
            self.reason = self.reason or reason
        self.event.set()
        return is_first

    @property
    def is_faulty(self) -> bool:
        """Return whether the machine is faulty; then the run under way has to end, too."""
        return self.problem is not None and self.problem.name == HARDWARE

    def fail(self, problem: Outcome) -> bool:
        """Report that this machine can do nothing more; return whether this is the first report."""
        with self._lock:
            is_first = self.problem is None
            self.problem = self.problem or problem
        self.event.set()
        return is_first


def stop_on_signals(stop: Stop, reason: str, clock: Clock) -> None:
    """Ask to stop when a signal asks this process to end."""
    heard: list[int] = []
    for number in SIGNALS:
        # The handler only notes the signal: the thread that it interrupts may hold a lock of `stop`.
        signal.signal(number, lambda number, frame: heard.append(number))

    def look() -> bool:
        return bool(heard) and (stop.ask(reason) or True)

    clock.every(0.2, look, name="signals", say=print)


@dataclass(frozen=True)
class Done:
    """A program that has ended.

    code: its exit code; 124 if it exceeded its limit or was cut short, 127 if there is no such program.
    """

    code: int
    stdout: str = ""

    @property
    def is_ok(self) -> bool:
        """Return whether the program succeeded."""
        return self.code == 0


@dataclass(frozen=True)
class Commands:
    """Runs programs, whose messages go to the agent's own stdout.

    cut: while it is set, programs are ended at once; None: only their limits end them. is_nice: they leave
    the processors to training.
    """

    cut: threading.Event | None = None
    is_nice: bool = False

    def run(
        self,
        *command: str,
        limit_s: float,
        stdin: str = "",
        is_quiet: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> Done:
        """Run a program to its end, for at most `limit_s` seconds. is_quiet: drop its messages.

        environment: variables on top of this process's.
        """
        try:
            process = subprocess.Popen(
                ["nice", "-n", "10", *command] if self.is_nice else command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if is_quiet else None,
                env={**os.environ, **(environment or {})},
                # The program leads a process group, so that ending the group ends what it started.
                start_new_session=True,
            )
        except OSError as error:
            sys.stderr.write(f"{command[0]}: {error}\n")
            return Done(127)
        end = time.monotonic() + limit_s
        given: bytes | None = stdin.encode()
        while True:
            try:
                out, _ = process.communicate(given, timeout=_LOOK_S)
            except subprocess.TimeoutExpired:
                given = None
                if time.monotonic() < end and not (self.cut is not None and self.cut.is_set()):
                    continue
                end_group(process, _KILL_AFTER_S)
                return Done(124)
            return Done(process.returncode, out.decode(errors="replace"))


def end_group(process: subprocess.Popen[bytes], wait_s: float) -> None:
    """End a process group by its leader: send SIGTERM, and SIGKILL `wait_s` seconds later."""
    for number, patience_s in ((signal.SIGTERM, wait_s), (signal.SIGKILL, 5.0)):
        with suppress(OSError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()

"""The command line in processes that start in milliseconds and can be killed at any step.

Importing boto3 and making its clients takes longer than most trials. A `Zygote` is a process that has
imported everything; each command is a fork of it, so that SIGKILL is real while start-up is cheap.

    {"run": {...an Order...}}  ->  {"pid": 123}
    {"wait": 123}              ->  {"status": -9}     after it has ended; its exit code, or minus the signal
"""

import json
import os
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self

#: Seconds that really pass when the launcher sleeps for one.
TIME_SCALE = 1 / 2000
_LONGEST_S = 90.0


@dataclass(frozen=True, kw_only=True)
class Order:
    """One command. environment: all of it. output: the file that takes what it prints.

    kill_at_commit: it ends by SIGKILL at its n-th commit to the ledger, from 1; just before, or just after.
    ahead_s: how far its clock is ahead of the real one.
    """

    argv: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    output: str = os.devnull
    kill_at_commit: int | None = None
    before_commit: bool = False
    ahead_s: float = 0.0


class Zygote:
    """The process that commands are forked from. Use it as a context manager."""

    def __enter__(self) -> Self:
        path = os.pathsep.join(part for part in sys.path if part)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def start(self, order: Order) -> "Command":
        """The started command. Its process is there until it is waited for, whatever became of it."""
        pid = int(self._ask({"run": asdict(order)})["pid"])
        return Command(pid, self._ask)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


class Command:
    """A forked command."""

    def __init__(self, pid: int, ask: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.pid = pid
        self._ask = ask
        self._lock = Lock()
        self._status: int | None = None
        self._descriptor = os.pidfd_open(pid)

    def kill(self) -> None:
        """End it at once; nothing, if it has ended. From any thread."""
        with self._lock:
            # Not once it was waited for: its id may be another process's by now.
            if self._status is None:
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        select.select([self._descriptor], [], [])
        with self._lock:
            self._status = int(self._ask({"wait": self.pid})["status"])
            os.close(self._descriptor)
        return self._status


def serve() -> None:
    """Fork commands and wait for them, as asked on stdin."""
    for line in sys.stdin:
        question = json.loads(line)
        if "run" in question:
            pid = os.fork()
            if pid == 0:
                os._exit(_carry_out(Order(**question["run"])))
            answer = {"pid": pid}
        else:
            answer = {"status": os.waitstatus_to_exitcode(os.waitpid(question["wait"], 0)[1])}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _carry_out(order: Order) -> int:
    descriptor = os.open(order.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for standard, source in ((0, nothing), (1, descriptor), (2, descriptor)):
        os.dup2(source, standard)
    sys.stdin = os.fdopen(0)
    os.environ.clear()
    os.environ.update(order.environment)
    # One that hangs must not hold up the trial for ever; SIGALRM ends it, and the trial fails.
    signal.setitimer(signal.ITIMER_REAL, _LONGEST_S)
    if order.kill_at_commit is not None:
        dying = partial(_Dying, at=order.kill_at_commit, before=order.before_commit)
        sqlite3.connect = partial(sqlite3.connect, factory=dying)  # type: ignore[assignment]
    from chaos_commands import fastlaunch

    try:
        code = fastlaunch(order.argv, FastClock(order.ahead_s))
        sys.stdout.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 70
    sys.stderr.flush()
    return code


class FastClock:
    """A clock that is ahead of the real one by `ahead_s`, and by all that was slept."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def sleep(self, seconds: float) -> None:
        self._ahead_s += seconds
        time.sleep(seconds * TIME_SCALE)

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self._ahead_s)

    def monotonic_s(self) -> float:
        return time.monotonic() + self._ahead_s


class _Dying(sqlite3.Connection):
    """A connection whose process dies at a commit that changes something."""

    num_commits = 0

    def __init__(self, *args: Any, at: int, before: bool, **more: Any) -> None:
        super().__init__(*args, **more)
        self._at, self._before = at, before

    def execute(self, statement: str, *args: Any) -> sqlite3.Cursor:
        if statement != "COMMIT":
            return super().execute(statement, *args)
        _Dying.num_commits += 1
        due = _Dying.num_commits == self._at
        if due and self._before:
            os.kill(os.getpid(), signal.SIGKILL)
        cursor = super().execute(statement, *args)
        if due:
            os.kill(os.getpid(), signal.SIGKILL)
        return cursor


if __name__ == "__main__":
    import chaos_commands

    chaos_commands.warm_up()
    serve()

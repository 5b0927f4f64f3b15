"""`python -m fastlaunch_train.process.torchrun ARGUMENTS...`: torchrun that stops more patiently.

On SIGTERM or SIGINT torchrun kills its ranks after 30 s, in the middle of a checkpoint if need be. Here every
such signal is passed on to the ranks, which end by themselves; they are killed only if one still runs
FASTLAUNCH_STOP_GRACE_S and a little more after the first signal. Arguments and all other behaviour are
torchrun's. So is the exit code, 1 if a rank fails, except that the ranks' 79 (a GPU is faulty), 78 (the
machines cannot run this) and 130 (asked to stop, on this node or another) are passed on. When a rank fails,
torchrun asks the others to stop: their 130 does not count, and FIRST_FAILED in the records' folder then says
which ranks failed.

This uses three public methods of torch.distributed.elastic.multiprocessing.api.PContext, `start`, `close` and
`pids` (torch 1.9 to 2.13). If they are missing, torchrun behaves as usual, and a warning says so.
"""

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from fastlaunch_train.process.failures import EXIT_CODES, EXIT_CONFIGURATION, EXIT_HARDWARE
from fastlaunch_train.process.launch import LaunchSettings, read_launch_settings
from fastlaunch_train.recipes.recipe import RecipeError

#: Seconds to add to a rank's own limit, which is 90 s under `docker stop -t 100`: the ranks must end before
#: that.
MARGIN_S = 5.0
#: File with the exit codes, by rank, of the ranks that failed first; a negative code is a signal.
FIRST_FAILED = "first-failed.json"
_PASSED_ON = (signal.SIGTERM, signal.SIGINT)


class Ranks(Protocol):
    """The part of torch's PContext that we use: the ranks that the agent has started."""

    def pids(self) -> Mapping[int, int]:
        """Process ids by local rank."""
        ...


class SignalRelay:
    """Pass signals on to the ranks, and kill those that outlive the first signal by `limit_s` seconds.

    Before and after the ranks run, a signal ends this process.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._ranks: Ranks | None = None
        self._starting = False
        self._signal: int | None = None
        self._is_limited = False
        #: Local ranks that had ended when torchrun began to end the others.
        self.ended_first: set[int] = set()

    @property
    def is_asked(self) -> bool:
        """Whether a signal has come."""
        return self._signal is not None

    def listen(self) -> None:
        """Catch SIGTERM and SIGINT from now on; call it in the main thread."""
        for number in _PASSED_ON:
            signal.signal(number, self.handle)

    def starting(self) -> None:
        """Hold signals back while ranks are started, until their ids are known."""
        if self._signal is not None:  # torchrun is restarting ranks that were asked to end
            raise SystemExit(128 + self._signal)
        self._starting = True

    def started(self, ranks: Ranks) -> None:
        """Pass signals on to these ranks from now on."""
        self._ranks, self._starting = ranks, False
        if self._signal is not None:
            self._forward(self._signal)

    def closing(self, ranks: Ranks) -> None:
        """Note which ranks have ended: torchrun is about to end the others. Only the first call counts."""
        # torchrun has waited for them, so a rank that has ended is no longer a process.
        self.ended_first = self.ended_first or {at for at, pid in ranks.pids().items() if not _send(0, pid)}

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self._signal = self._signal or number
        if not self._starting:
            self._forward(number)

    def _forward(self, number: int) -> None:
        # Signal only the ranks, not their process groups: they need their data workers until the last step.
        reached = [_send(number, pid) for pid in self._pids()]
        if not any(reached):
            raise SystemExit(128 + number)
        if not self._is_limited:
            self._is_limited = True
            # Not a thread: a signal handler must take no lock.
            signal.signal(signal.SIGALRM, self._kill)
            signal.setitimer(signal.ITIMER_REAL, self._limit_s)
            _report(f"{signal.Signals(number).name}: the ranks have {self._limit_s:g} s to end")

    def _kill(self, number: int, frame: FrameType | None) -> None:
        for pid in self._pids():
            if _send(0, pid):
                _report(f"the rank with process id {pid} has not ended: killed")
                with suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)

    def _pids(self) -> list[int]:
        return list(self._ranks.pids().values()) if self._ranks else []


def attach(relay: SignalRelay, api: Any) -> bool:
    """Have `relay` follow all ranks started through the module `api`; return False if it has no hooks."""
    context = getattr(api, "PContext", None)
    if not all(callable(getattr(context, name, None)) for name in ("start", "close", "pids")):
        return False
    start, close = api.PContext.start, api.PContext.close

    def start_and_follow(ranks: Any) -> None:
        relay.starting()
        start(ranks)
        relay.listen()  # torch has just installed its own handlers
        relay.started(ranks)

    def note_and_close(ranks: Any, *arguments: Any, **options: Any) -> None:
        relay.closing(ranks)
        close(ranks, *arguments, **options)

    api.PContext.start, api.PContext.close = start_and_follow, note_and_close
    # torch's own handler until then: a signal in between would leave ranks behind.
    if hasattr(api, "_terminate_process_handler"):
        api._terminate_process_handler = relay.handle
    return True


def main(arguments: list[str]) -> None:
    """Run torchrun with `arguments` and end as it does, or with 2 for an invalid environment."""
    try:
        launched = read_launch_settings(os.environ)
    except RecipeError as error:
        _report(f"error: {error.message}\n  {error.hint}")
        raise SystemExit(2) from None
    relay = SignalRelay(launched.stop_grace_s + MARGIN_S)
    # Listen before importing torch, which takes a second: process 1 of a container would lose a signal.
    relay.listen()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import api

    if not attach(relay, api):
        _fall_back(launched)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(arguments)
    except ChildFailedError as error:
        failures = error.failures
        first = {
            rank: failure.exitcode
            for rank, failure in failures.items()
            if not relay.is_asked and failure.local_rank in relay.ended_first
        }
        code = exit_code_of([failure.exitcode for failure in failures.values()], list(first.values()))
        if first and code != EXIT_CODES["interrupted"] and (folder := os.environ.get("FASTLAUNCH_RECORDS")):
            with suppress(OSError):  # then we know only that a rank failed
                (Path(folder) / FIRST_FAILED).write_text(json.dumps(first))
        if code is None:
            raise
        raise SystemExit(code) from None


def exit_code_of(codes: Sequence[int], first: Sequence[int] = ()) -> int | None:
    """Return the exit code of a rank that means more than `failed`; None if there is none.

    first: codes of the ranks that ended before torchrun asked the others to end; empty if it was itself asked
    to stop.
    A negative code is a signal: torchrun kills the other ranks after the first has failed.
    """
    for code in (EXIT_HARDWARE, EXIT_CONFIGURATION):
        if code in codes:
            return code
    interrupted = EXIT_CODES["interrupted"]
    is_stopped = interrupted in (first or codes)
    return interrupted if is_stopped and all(c == interrupted or c < 0 for c in codes) else None


def _fall_back(launched: LaunchSettings) -> None:
    import torch

    # Newer releases read the time to wait from this variable.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(round(launched.stop_grace_s + MARGIN_S)))
    _report(
        f"warning: torch {torch.__version__} has no PContext.start, close and pids, so torchrun stops in its "
        "own way and may kill its ranks 30 s after a signal, in the middle of a checkpoint"
    )


def _send(number: int, pid: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _report(text: str) -> None:
    # A signal can interrupt a print, which may not be entered twice.
    os.write(2, f"{text}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])

"""`python -m fastlaunch_train.process.torchrun ARGUMENTS...`: torchrun, except in how it stops.

Asked to stop by SIGTERM or SIGINT, torchrun asks its ranks and kills them 30 s later, in the midst of a
checkpoint if need be. Here every such signal is passed on to the ranks, which end by themselves; they are
killed only if one still runs FASTLAUNCH_STOP_GRACE_S and a little more after the first. Arguments and all
else are torchrun's, and so is the exit code, 1 if a rank fails, except that 78 (the machines cannot do what
was asked for) and 130 (asked to stop, on this node or another) are the ranks' own.

It rests on two public methods of torch.distributed.elastic.multiprocessing.api.PContext, `start` and `pids`
(torch 1.9 to 2.13). Where they are missing torchrun's own behaviour stays, and a warning says so.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn, Protocol

from fastlaunch_train.exit_codes import EXIT_CODES, EXIT_CONFIGURATION
from fastlaunch_train.process.launch import Launched, read_launched
from fastlaunch_train.recipes.recipes import RecipeError

#: Seconds more than a rank's own limit: of 90, so that the ranks are gone before `docker stop -t 100` kills.
MARGIN_S = 5.0
_PASSED_ON = (signal.SIGTERM, signal.SIGINT)


class Ranks(Protocol):
    """The ranks that the agent has started: what of torch's PContext is used."""

    def pids(self) -> Mapping[int, int]:
        """Process ids by local rank."""
        ...


class SignalRelay:
    """Passes signals on to the ranks, and kills those that outlive the first one by `limit_s` seconds.

    Before there are ranks, and after they have ended, a signal ends this process.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._ranks: Ranks | None = None
        self._starting = False
        self._asked: int | None = None
        self._is_limited = False

    def listen(self) -> None:
        """Take SIGTERM and SIGINT from now on. Call it in the main thread."""
        for number in _PASSED_ON:
            signal.signal(number, self.handle)

    def starting(self) -> None:
        """Ranks are about to be started: a signal has to wait until their ids are known."""
        if self._asked is not None:  # torchrun's restart of ranks that were asked to end
            _leave(self._asked)
        self._starting = True

    def started(self, ranks: Ranks) -> None:
        """These are the ranks from now on."""
        self._ranks, self._starting = ranks, False
        if self._asked is not None:
            self._ask(self._asked)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handler of a signal."""
        self._asked = self._asked or number
        if not self._starting:
            self._ask(number)

    def _ask(self, number: int) -> None:
        # The ranks alone, not their process groups: they need their data workers until the last step.
        heard = [_sent(number, pid) for pid in self._pids()]
        if not any(heard):
            _leave(number)
        if not self._is_limited:
            self._is_limited = True
            # Not a thread: a signal handler must take no lock.
            signal.signal(signal.SIGALRM, self._kill)
            signal.setitimer(signal.ITIMER_REAL, self._limit_s)
            _tell(f"{signal.Signals(number).name}: the ranks have {self._limit_s:g} s to end")

    def _kill(self, number: int, frame: FrameType | None) -> None:
        for pid in self._pids():
            if _sent(0, pid):
                _tell(f"the rank with process id {pid} has not ended: killed")
                with suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)

    def _pids(self) -> list[int]:
        return list(self._ranks.pids().values()) if self._ranks else []


def attach(relay: SignalRelay, api: Any) -> str | None:
    """Tell `relay` of all ranks started through the module `api`; what it lacks for that, None if nothing."""
    context = getattr(api, "PContext", None)
    missing = [name for name in ("start", "pids") if not callable(getattr(context, name, None))]
    if context is None or missing:
        return "there is no " + (f"PContext.{missing[0]}" if context else "PContext")
    start = context.start

    def start_and_tell(ranks: Any) -> None:
        relay.starting()
        start(ranks)
        relay.listen()  # torch has just taken the signals for itself
        relay.started(ranks)

    context.start = start_and_tell
    # What torch takes them with until then: a signal in between would leave ranks behind.
    if hasattr(api, "_terminate_process_handler"):
        api._terminate_process_handler = relay.handle
    return None


def main(arguments: list[str]) -> None:
    """Run torchrun with `arguments`; ends as it does, or with 2 if the environment means nothing."""
    try:
        launched = read_launched(os.environ)
    except RecipeError as error:
        _tell(f"error: {error.message}\n  {error.hint}")
        raise SystemExit(2) from None
    relay = SignalRelay(launched.stop_grace_s + MARGIN_S)
    # Before torch is imported, which takes a second: to process 1 of a container a signal would be lost.
    relay.listen()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import api

    problem = attach(relay, api)
    if problem:
        _fall_back(launched, problem)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(arguments)
    except ChildFailedError as error:
        code = own_code([failure.exitcode for failure in error.failures.values()])
        if code is None:
            raise
        raise SystemExit(code) from None


def own_code(codes: Sequence[int]) -> int | None:
    """The exit code that says more than that a rank failed, by the exit codes of all; None if none does.

    Negative: killed by that signal, as the ranks are that torchrun ends after the first.
    """
    if EXIT_CONFIGURATION in codes:
        return EXIT_CONFIGURATION
    interrupted = EXIT_CODES["interrupted"]
    return interrupted if interrupted in codes and all(c == interrupted or c < 0 for c in codes) else None


def _fall_back(launched: Launched, problem: str) -> None:
    import torch

    # Newer releases take their patience from here.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(round(launched.stop_grace_s + MARGIN_S)))
    _tell(
        f"warning: torch {torch.__version__}: {problem}, so that torchrun stops in its own way: it may kill "
        "its ranks 30 s after a signal, in the midst of a checkpoint"
    )


def _leave(number: int) -> NoReturn:
    raise SystemExit(128 + number)


def _sent(number: int, pid: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _tell(text: str) -> None:
    # A signal can come in the midst of a print, which may not be entered twice.
    os.write(2, f"{text}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])

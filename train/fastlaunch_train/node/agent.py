"""The runs of a machine, one after another, and its last word: the same on every platform.

What differs, a `Machine` does: starting and stopping training, keeping nodes in step, sending words.
"""

from __future__ import annotations

import errno
import math
import shutil
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastlaunch_train.node.commands import Commands
from fastlaunch_train.node.protocol import (
    CONFIGURATION,
    CONTAINER_CODES,
    FABRIC_CODE,
    FAILED,
    INTERRUPTED,
    NodeRun,
    Outcome,
    RunEnd,
)
from fastlaunch_train.node.training import Training

_LOOK_S = 0.2
_MIN_FREE_BYTES = 1_000_000_000


@dataclass(frozen=True)
class Ending:
    """How a run under way has to end: killed after so many seconds.

    grace_s: that it is given after having been asked to; None if it is not asked.
    """

    kill_after_s: float
    grace_s: float | None = None


class Machine(ABC):
    """The platform that an agent runs on."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Tell it in the log."""

    @abstractmethod
    def uptime_s(self) -> float:
        """Return seconds since boot."""

    @abstractmethod
    def prepare(self) -> bool:
        """Get ready for the first run; return whether it can be begun."""

    @abstractmethod
    def goes_on(self) -> bool:
        """Return whether the next run is to be begun."""

    @abstractmethod
    def settled(self, run: NodeRun) -> RunEnd | None:
        """Return how the run has ended already; None if it is to be done."""

    @abstractmethod
    def start(self, number: int, run: NodeRun) -> Training | None:
        """Start run `number`, from 1; return None if that is not to be, or cannot be."""

    @abstractmethod
    def ending(self, number: int) -> Ending | None:
        """Return how the run under way has to end; None while it may go on."""

    @abstractmethod
    def conclude(self, number: int, run: NodeRun, code: int, *, is_killed: bool, started_s: float) -> RunEnd:
        """Return what became of a run whose training has ended.

        is_killed: it was ended without having been asked to.
        """

    @abstractmethod
    def leave(self) -> None:
        """Do what has to be done together once all runs are."""

    @abstractmethod
    def outcome(self, ends: Sequence[RunEnd]) -> Outcome:
        """Return what the ends of all runs come to."""

    @abstractmethod
    def finish(self, outcome: Outcome, ends: Sequence[RunEnd]) -> int:
        """Upload what is left, say the last word; return the exit code."""


class Agent:
    """Does runs on a machine."""

    def __init__(self, runs: Sequence[NodeRun], machine: Machine) -> None:
        self._runs = runs
        self._machine = machine
        self._ends = [RunEnd(run.run_id) for run in runs]

    def work(self) -> int:
        """Do the runs; return the exit code."""
        machine = self._machine
        try:
            if machine.prepare():
                for number, run in enumerate(self._runs, 1):
                    if not machine.goes_on():
                        break
                    self._do(number, run)
                if machine.goes_on():
                    machine.leave()
            outcome = machine.outcome(self._ends)
        except Exception as error:
            # What was recorded is uploaded all the same.
            machine.say(traceback.format_exc())
            is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            outcome = (
                Outcome(CONFIGURATION, "disk full")
                if is_full
                else Outcome(
                    FAILED, f"the node's program ended unexpectedly: {type(error).__name__}: {error}"
                )
            )
        return machine.finish(outcome, self._ends)

    def _do(self, number: int, run: NodeRun) -> None:
        machine = self._machine
        before = machine.settled(run)
        if before is not None:
            machine.say(f"run {run.run_id}: {before.state} before")
            self._ends[number - 1] = before
            return
        training = machine.start(number, run)
        if training is None:
            return
        started_s = machine.uptime_s()
        self._ends[number - 1] = RunEnd(run.run_id, INTERRUPTED, started_s=started_s)
        try:
            code, is_killed = self._attend(training, number)
        finally:
            training.close()
        self._ends[number - 1] = machine.conclude(number, run, code, is_killed=is_killed, started_s=started_s)

    def _attend(self, training: Training, number: int) -> tuple[int, bool]:
        """Return the training's exit code, and whether it was ended without having been asked to."""
        is_asked = is_killed = False
        end = math.inf
        while (code := training.exit_code()) is None:
            ending = self._machine.ending(number)
            asks = ending is not None and ending.grace_s is not None and not is_asked
            if ending is not None and (asks or end == math.inf):
                end = min(end, time.monotonic() + ending.kill_after_s)
            if ending is not None and ending.grace_s is not None and asks:
                is_asked = True
                self._machine.say("asked to stop")
                training.ask(ending.grace_s)
            if time.monotonic() >= end:
                is_killed = not is_asked
                self._machine.say("the training has not ended by itself: killed")
                training.kill()
            time.sleep(_LOOK_S)
        return code, is_killed


def problem_after(code: int, *, work: Path, num_gpus: int, has_fabric: bool) -> str | None:
    """Return why no other run would fare better than one that ended with `code`; None if one might.

    num_gpus: that there were. has_fabric: whether training over a network could say that it is not as asked.
    """
    if code == FABRIC_CODE and has_fabric:
        return "fabric"
    if code in CONTAINER_CODES:
        return f"container: exit code {code}"
    if shutil.disk_usage(work).free < _MIN_FREE_BYTES:
        return "disk full"
    if num_gpus and count_gpus() < num_gpus:
        return "driver"
    return None


def count_gpus() -> int:
    """Return how many GPUs the driver shows; 0 where there is none."""
    if shutil.which("nvidia-smi") is None:
        return 0
    told = Commands().run("nvidia-smi", "-L", limit_s=60, is_quiet=True).stdout
    return sum(line.startswith("GPU") for line in told.splitlines())

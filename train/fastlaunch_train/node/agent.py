"""A machine's runs, one after another, and its last word: the same on every platform."""

from __future__ import annotations

import errno
import hashlib
import math
import shutil
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastlaunch_train.node.aws_cli import AwsCli
from fastlaunch_train.node.commands import Clock, Commands, Done, Log, Stop
from fastlaunch_train.node.gpus import Gpus
from fastlaunch_train.node.idle import IdleWatch
from fastlaunch_train.node.protocol import (
    CHECKPOINT,
    CONFIGURATION,
    CONTAINER_CODES,
    FABRIC_CODE,
    FAILED,
    HARDWARE,
    HARDWARE_CODE,
    IDLE_CODE,
    INTERRUPTED,
    LASTING_CODES,
    NodeProgram,
    NodeRun,
    Outcome,
    RunEnd,
    outcome_of,
)
from fastlaunch_train.node.training import Training
from fastlaunch_train.node.verdicts import is_lasting, noted_step

_LOOK_S = 0.2
_MIN_FREE_BYTES = 1_000_000_000
#: Time limit, in seconds, to unpack a gigabyte of wheels on a slow volume.
_UNPACK_S = 600.0
_MAX_REASON = 400
#: Seconds in which a run that idles may save a checkpoint and end, and then until it is killed.
_IDLE_GRACE_S, _IDLE_MARGIN_S = 100.0, 30.0


@dataclass(frozen=True)
class Ending:
    """How to end a run under way: it is killed after `kill_after_s` seconds.

    grace_s: seconds that it has after a request to end; None to kill it without a request.
    """

    kill_after_s: float
    grace_s: float | None = None


class Machine(ABC):
    """A node that does the program's runs; subclasses hold what differs between EC2 and SageMaker.

    work: the folder of what the runs leave. gpus: this machine's. stop: set from outside, or by the machine
    itself.
    """

    def __init__(
        self, program: NodeProgram, *, work: Path, gpus: Gpus, stop: Stop, clock: Clock, log: Log
    ) -> None:
        self.program = program
        self.work_folder = work
        self.gpus = gpus
        self.stop = stop
        self.clock = clock
        #: Writes a line to the log.
        self.say = log
        #: How each run has ended so far.
        self.ends = [RunEnd(run.run_id) for run in program.runs]
        #: The number of the records of the run under way, how often it was begun again, and why.
        self.attempt = program.attempt
        self.num_restarts = 0
        self.restarted_after = ""
        #: Ids of runs that need not be done.
        self.skipped: list[str] = []
        #: Values by environment variable, for training alone.
        self.secrets: dict[str, str] = {}
        #: Work before the runs that the launcher counts, such as installing requirements.
        self.phases: list[dict[str, Any]] = []

    def output_of(self, run: NodeRun) -> Path:
        """Return the folder of the run's output, its records among it."""
        return self.work_folder / "out" / run.run_id

    def uptime_s(self) -> float:
        """Return seconds since boot."""
        return self.clock.uptime_s()

    def fail(self, problem: str, name: str = CONFIGURATION) -> None:
        """Report that this machine can do nothing more. name: CONFIGURATION or HARDWARE."""
        if self.stop.fail(Outcome(name, problem)):
            self.say(f"failed: {name} {problem}")
            if name == HARDWARE:
                # The last word names it even if all runs have completed.
                self.gpus.notes.append(problem)

    def has_sound_gpus(self, code: int = 0) -> bool:
        """Return whether all GPUs are sound; fail if one is not. code: the training's exit code."""
        fault = "slowdown" if code == HARDWARE_CODE else self.gpus.fault()
        if fault:
            self.fail(fault, HARDWARE)
        return not fault

    def read_secrets(self, cli: AwsCli) -> bool:
        """Return whether all of the program's secrets could be read."""
        for name, arn in self.program.secrets.items():
            value = cli.secret(arn)
            if value is None:
                self.say(f"{name}: {arn} has no text that this machine may read")
                return False
            self.secrets[name] = value
        return True

    def phase(self, name: str, began_s: float | None, num_bytes: int | None) -> None:
        """Record a phase that began at `began_s`, and the bytes that it brought.

        began_s: in seconds since boot; None if SageMaker did the work.
        """
        seconds = None if began_s is None else round(self.uptime_s() - began_s, 2)
        self.phases.append({"name": name, "seconds": seconds, "bytes": num_bytes})
        self.say(f"{name}: {num_bytes} bytes in {seconds} s")

    def unpack(self, file: Path, sha256: str | None, folder: Path) -> bool:
        """Unpack a tar.gz into the folder; return whether its digest was right and it was unpacked."""
        if hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
            self.say(f"{file} is not what was asked for")
            return False
        folder.mkdir(parents=True, exist_ok=True)
        unpack = ("tar", "-xzf", str(file), "-C", str(folder), "--no-same-owner")
        return Commands(cut=self.stop.event).run(*unpack, limit_s=_UNPACK_S).is_ok

    def has_installed(self, done: Done) -> bool:
        """Return whether pip succeeded; fail with its last error if not. done: pip, with all it printed."""
        self.say(done.stdout)
        if not (done.is_ok or self.stop.event.is_set()):
            errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR:")]
            last = errors[-1].partition(":")[2].strip() if errors else f"exit code {done.code}"
            self.fail(f"requirements: {last}"[:_MAX_REASON])
        return done.is_ok

    @abstractmethod
    def prepare(self) -> bool:
        """Prepare for the first run; return whether it can begin."""

    def goes_on(self) -> bool:
        """Return whether the next run may begin."""
        return not self.stop.event.is_set()

    def settled(self, run: NodeRun) -> RunEnd | None:
        """Return how the run ended earlier; None if it has yet to be done."""
        return None

    @abstractmethod
    def start(self, number: int, run: NodeRun) -> Training | None:
        """Start run `number`, from 1; return None if it is skipped or cannot be started."""

    def begins_again(self, number: int, run: NodeRun, code: int, saved: int) -> bool:
        """Return whether to begin the run again here. saved: the last step that was saved before it began.

        Its training has failed with `code`, perhaps by chance. It goes on from what it has saved since; if
        that is nothing, it has failed for good, so whatever always fails at a step is done twice at most.
        """
        return self.saved_step(run) > saved and self.may_go_on(run, code)

    def may_go_on(self, run: NodeRun, code: int) -> bool:
        """Return whether a run that ended here with `code` may have failed by chance, on sound GPUs."""
        is_lasting_here = code in LASTING_CODES or is_lasting(self.output_of(run), self.attempt)
        if is_lasting_here or self.stop.event.is_set() or problem_after(code, work=self.work_folder):
            return False
        return self.has_sound_gpus(code_of_machine(run, code))

    def saved_step(self, run: NodeRun) -> int:
        """Return the last step after which the run can go on; 0 for none, or if a script does not say."""
        output = self.output_of(run)
        folders = (output / "checkpoints", *self.checkpoint_folders(run))
        # The first file of a checkpoint comes last.
        names = (path.name for folder in folders for path in folder.glob("step-*"))
        steps = [int(match["step"]) for match in map(CHECKPOINT.fullmatch, names) if match]
        return min(max(steps, default=0), noted_step(output)) if run.is_script else max(steps, default=0)

    def checkpoint_folders(self, run: NodeRun) -> Sequence[Path]:
        """Return the folders, besides its output's, where the run's checkpoints lie on this machine."""
        return ()

    @abstractmethod
    def cause(self, run: NodeRun) -> str:
        """Return in a line why the run's training failed; "" if nothing is known."""

    @abstractmethod
    def ending(self, number: int) -> Ending | None:
        """Return how to end the run under way; None while it may go on."""

    @abstractmethod
    def conclude(self, number: int, run: NodeRun, code: int, *, is_killed: bool) -> None:
        """Find out how a run has ended, now that its training has, and record it with `note_end`.

        is_killed: whether the training had to be killed.
        """

    def leave(self) -> None:  # noqa: B027 alone has to
        """Do what all nodes do together after the last run."""

    def note_end(self, number: int, state: str, code: int, cause: str = "") -> RunEnd:
        """Record and log how run `number` has ended."""
        end = replace(self.ends[number - 1], state=state, exit_code=code, ended_s=self.uptime_s())
        self.ends[number - 1] = end
        self.say(f"run {end.run_id}: {state}, exit code {code}" + (f": {cause}" if cause else ""))
        return end

    @abstractmethod
    def finish(self, outcome: Outcome) -> int:
        """Upload what is left and say the last word; return the exit code."""

    def work(self) -> int:
        """Do the runs; return the exit code."""
        try:
            if self.prepare():
                for number, run in enumerate(self.program.runs, 1):
                    if not self.goes_on():
                        break
                    self._do(number, run)
                if self.goes_on():
                    self.leave()
            stop = self.stop
            outcome = outcome_of(self.ends, skipped=self.skipped, stop=stop.reason, problem=stop.problem)
        except Exception as error:
            # The records are uploaded all the same.
            self.say(traceback.format_exc())
            reason = f"the node's program ended unexpectedly: {type(error).__name__}: {error}"
            outcome = Outcome(FAILED, reason)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                outcome = Outcome(CONFIGURATION, "disk full")
        return self.finish(outcome)

    def _do(self, number: int, run: NodeRun) -> None:
        before = self.settled(run)
        if before is not None:
            self.say(f"run {run.run_id}: {before.state} before")
            self.ends[number - 1] = before
            return
        self.attempt, self.num_restarts, self.restarted_after = self.program.attempt, 0, ""
        code, is_killed = 0, False
        while (training := self.start(number, run)) is not None:
            saved = self.saved_step(run)
            if not self.num_restarts:
                self.ends[number - 1] = RunEnd(run.run_id, INTERRUPTED, started_s=self.uptime_s())
            limit_s = self.program.idle_timeout_s
            watch = IdleWatch(limit_s, gpus=self.gpus, records=self.output_of(run), clock=self.clock)
            try:
                code, is_killed = self._attend(training, number, watch)
            finally:
                training.close()
            if not (code and self.begins_again(number, run, code, saved)):
                break
            self.restarted_after = self.cause(run) or f"exit code {code}"
            self.attempt, self.num_restarts = self.attempt + 1, self.num_restarts + 1
            self.say(f"run {run.run_id}: {self.restarted_after}: begun again from its last checkpoint")
        # A run that failed is over also if it cannot begin again.
        if training is not None or self.num_restarts:
            self.conclude(number, run, code, is_killed=is_killed)

    def _attend(self, training: Training, number: int, watch: IdleWatch) -> tuple[int, bool]:
        """Return the training's exit code, IDLE_CODE if it idled, and whether it had to be killed."""
        is_asked = is_killed = is_idle = False
        end = math.inf
        while (code := training.exit_code()) is None:
            ending = self.ending(number)
            if ending is None and (is_idle := is_idle or watch.is_over()):
                ending = Ending(kill_after_s=_IDLE_GRACE_S + _IDLE_MARGIN_S, grace_s=_IDLE_GRACE_S)
            grace_s = None if ending is None or is_asked else ending.grace_s
            if ending is not None and (grace_s is not None or end == math.inf):
                end = min(end, time.monotonic() + ending.kill_after_s)
            if grace_s is not None:
                is_asked = True
                self.say("asked to stop")
                training.ask(grace_s)
            if time.monotonic() >= end:
                is_killed = not is_asked
                self.say("the training has not ended by itself: killed")
                training.kill()
            time.sleep(_LOOK_S)
        return IDLE_CODE if is_idle and code else code, is_killed


def code_of_machine(run: NodeRun, code: int) -> int:
    """Return the exit code; 0 if it means a faulty machine, but a script returned it and not our training."""
    return 0 if run.is_script and code in (FABRIC_CODE, HARDWARE_CODE) else code


def problem_after(code: int, *, work: Path) -> str | None:
    """Return why every other run would fail like one that ended with `code`; None if it might not."""
    if code == FABRIC_CODE:
        return "fabric"
    if code in CONTAINER_CODES:
        return f"container: exit code {code}"
    if shutil.disk_usage(work).free < _MIN_FREE_BYTES:
        return "disk full"
    return None

"""A host of a SageMaker training job: training is a process of the container; SageMaker copies its files.

The files that the launcher needs lie below /opt/ml/checkpoints, which SageMaker copies to S3 while the job
runs. After a spot interruption it brings all of it back and starts the agent again: nothing is
truncated, logs go on at the next byte, records get the next attempt number, completed runs are not done
again, and the others go on from their newest checkpoint.

If a run fails, the next one is done all the same, on all hosts: each host says how the run ended for it, and
none begins the next before all have. A host whose peer failed ends its own part of the run `PEER_GRACE_S`
later if it has not ended by itself. If a host is gone, or finds that it can run nothing more, all end.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fastlaunch_train.node.agent import Ending, Machine, code_of_machine, problem_after
from fastlaunch_train.node.aws_cli import AwsCli
from fastlaunch_train.node.commands import Clock, Commands, Log, Stop, stop_on_signals
from fastlaunch_train.node.gpus import Gpus
from fastlaunch_train.node.hosts import Hosts
from fastlaunch_train.node.protocol import (
    COMPLETED,
    CONFIGURATION,
    FAILED,
    HARDWARE,
    IDLE,
    IDLE_CODE,
    INTERRUPTED,
    LOG,
    NOT_STARTED,
    PEER,
    STOP,
    Identity,
    NodeProgram,
    NodeRun,
    Outcome,
    RunEnd,
    after_restart,
    boot_name,
    checkpoint_key,
    last_attempt,
    newest_checkpoint,
    now,
    program_from_json,
    status,
    status_name,
)
from fastlaunch_train.node.shelf import Shelf
from fastlaunch_train.node.training import ProcessTraining, Training, adopt_orphans
from fastlaunch_train.node.uploads import Uploads, checkpoints
from fastlaunch_train.node.verdicts import Word, cause_of, verdict

#: Seconds in which a training whose peer has failed may report why by itself.
PEER_GRACE_S = 8.0
#: As many checkpoints as training itself keeps: the newest may not be copied when the machine is taken.
KEPT_CHECKPOINTS = 2
#: The characters that SageMaker keeps of a job's failure message.
FAILURE_CHARS = 1024
#: Seconds that training has to end after SIGTERM: longer than any limit that it may be given, and less than
#: the 120 s after which SageMaker kills the container.
_DEFAULT_STOP_GRACE_S = 60.0
#: Seconds between two times at which new data is left for SageMaker to copy.
_DEFAULT_SHIP_EVERY_S = 20.0
#: Seconds beyond training's own limit, which is checked between steps, and beyond torchrun's, 5 s later.
_STOP_MARGIN_S = 10.0
#: Seconds to wait for SIGTERM here, once another host has it: a container that ends before fails the job.
_SIGNAL_LIMIT_S = 60.0
#: Seconds to wait for the other hosts' words after SIGTERM.
_LAST_WORDS_S = 5.0
#: Seconds for the last upload; the folder is on this machine, and takes everything at once or not at all.
_LAST_UPLOAD_S = 10.0
_LOOK_S = 0.2
_SECRET_PAUSE_S = 2.0
#: Seconds to install gigabytes of wheels.
_INSTALL_S = 1800.0
_EXIT_CODES = {COMPLETED: 0, FAILED: 1, CONFIGURATION: 2, HARDWARE: 3, INTERRUPTED: 143}
_TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class Request:
    """What SageMaker tells a container. hosts: names of all, in order of rank; rank: this one's."""

    hosts: tuple[str, ...]
    rank: int
    #: The machine's type as EC2 names it; "" if it is unknown.
    instance: str
    #: The folder that SageMaker copies to S3.
    checkpoints: Path
    #: Seconds in which training has to end after SIGTERM.
    stop_grace_s: float
    ship_every_s: float


class SageMaker(Machine):
    """The host that this program runs on.

    entrypoint: run_train.sh. stop: set by SIGTERM, with which SageMaker stops a job or takes a machine;
    SIGKILL comes 120 s later. Raises OSError if the folder that is copied cannot be written.
    """

    def __init__(
        self,
        program: NodeProgram,
        request: Request,
        *,
        entrypoint: Path,
        opt_ml: Path,
        scratch: Path,
        stop: Stop,
        clock: Clock,
    ) -> None:
        self._shelf = Shelf(request.checkpoints, opt_ml, scratch)
        work = self._shelf.work
        # A rehearsal may run on another kind of machine than the planned one.
        gpus = Gpus(program.num_gpus if request.instance else 0, has_nvswitch=program.has_nvswitch)
        super().__init__(program, work=work, gpus=gpus, stop=stop, clock=clock, log=Log(now, work / LOG))
        self._request = request
        self._rank = request.rank
        self._entrypoint = entrypoint
        self._failure = opt_ml / "output" / "failure"
        self._channels = opt_ml / "input" / "data"
        self._identity = Identity(
            token=program.token,
            node=request.rank,
            instance_id=None,
            instance_type=request.instance or None,
            zone=None,
            host=request.hosts[request.rank],
        )
        self._folder = f"{program.token}/node-{request.rank}"
        self._uploads = Uploads(
            self._shelf,
            self._folder,
            work=self.work_folder,
            log=self.work_folder / LOG,
            every_s=request.ship_every_s,
            say=self.say,
            clock=clock,
            checkpoints=self._take_checkpoints,
            gpu_use=gpus.use,
        )
        self._hosts = Hosts(request.hosts, request.rank, token=program.token)
        #: What the failure file says, cause first.
        self._causes: list[str] = []
        self._began_at = now()

    def uptime_s(self) -> float:
        """Return seconds since this job's first container booted here, gaps between containers included."""
        started = datetime.strptime(self._began_at, _TIME).replace(tzinfo=timezone.utc)
        return round((datetime.now(timezone.utc) - started).total_seconds(), 2)

    def prepare(self) -> bool:
        root, token, hosts = self._shelf.root, self.program.token, self._request.hosts
        name = f"{token}/{boot_name(self._rank)}"
        before = _read(root / name)
        if before is not None:
            self._began_at = str(before["began_at"])
        # Each container of a job writes it anew, so that an earlier container's last word is known to be old.
        booted = {"lifecycle": None, "booted_at": now(), "began_at": self._began_at}
        self._shelf.put_json(name, {**self._identity.to_json(), **booted})
        (root / token / status_name(self._rank)).unlink(missing_ok=True)
        self.say(
            f"job {token}, {hosts[self._rank]} of {len(hosts)} host(s), "
            f"{self._request.instance or 'unknown instance'}, {len(self.program.runs)} run(s)"
            + (f", continues since {self._began_at}" if before else "")
        )
        for run in self.program.runs:
            # All checkpoints stay in S3, and SageMaker has brought all of them here.
            saved = [*(root / run.run_id / "checkpoints").glob("step-*")]
            kept = newest_checkpoint(path.name for path in saved)
            for path in saved:
                if checkpoint_key(path.name) and path.name not in kept:
                    path.unlink()
        self._uploads.start()
        # The check comes once all have joined, since the others wait for a host that is missing.
        has_joined = self._hosts.join(lambda: self.stop.reason is not None)
        is_sound = has_joined and self.has_sound_gpus() and self._has_secrets()
        return is_sound and self._has_inputs() and self._install()

    def _has_secrets(self) -> bool:
        cut = self.stop.event
        # Each ARN names its own region.
        cli = AwsCli("", cut=cut)
        if not self.clock.attempts(5, _SECRET_PAUSE_S, lambda: self.read_secrets(cli), cut=cut):
            if not cut.is_set():
                self.fail("secret")
            return False
        return True

    def _has_inputs(self) -> bool:
        """Record the size of the inputs, which SageMaker has brought; fail if one is empty."""
        for name, uri in self.program.inputs.items():
            paths = (self._channels / name).rglob("*")
            num_bytes = sum(path.stat().st_size for path in paths if path.is_file())
            if not num_bytes:
                self.fail(f"input {name}: nothing lies under {uri}")
                return False
            self.phase(f"input {name}", None, num_bytes)
        return True

    def _install(self) -> bool:
        """Install the runs' requirements with pip into this container's Python, once."""
        program, folder = self.program, self.work_folder / "requirements"
        if program.requirements_sha256 is None:
            return True
        began_s = self.uptime_s()
        file = self._channels / "requirements" / f"{program.requirements_sha256}.tar.gz"
        if not self.unpack(file, program.requirements_sha256, folder):
            self.fail("requirements")
            return False
        command = ["/bin/bash", str(self._entrypoint), "--install", str(folder)]
        environment = {**program.environment, **self.secrets}
        commands = Commands(cut=self.stop.event)
        if not self.has_installed(commands.run(*command, limit_s=_INSTALL_S, environment=environment)):
            return False
        shutil.rmtree(folder, ignore_errors=True)
        self.phase("requirements", began_s, file.stat().st_size)
        return True

    # Runs

    def goes_on(self) -> bool:
        return super().goes_on() and not (self._hosts.lost or self._hosts.has_any_said("ends"))

    def settled(self, run: NodeRun) -> RunEnd | None:
        """Return how the run ended in an earlier container of this job.

        All hosts have to say that it has ended; they read the same files, so that they decide the same.
        """
        nodes = range(len(self._request.hosts))
        folder = self._shelf.root / self.program.token
        ends = [_read(folder / f"node-{node}" / run.run_id / "ended.json") for node in nodes]
        end = ends[self._rank]
        return RunEnd(**end) if end is not None and None not in ends else None

    def start(self, number: int, run: NodeRun) -> Training | None:
        self.say(f"run {run.run_id}")
        root, output, log = self._shelf.root, self.output_of(run), self.work_folder / "log" / run.run_id
        names = (path.name for path in root.glob(f"*/node-*/{run.run_id}/rank-*"))
        self.attempt = max(self.attempt, 1 + last_attempt(names))
        output.mkdir(parents=True, exist_ok=True)
        log.mkdir(parents=True, exist_ok=True)
        saved = root / run.run_id / "checkpoints"
        left = newest_checkpoint(path.name for path in saved.glob("step-*"))
        for name in left:
            if not (output / "checkpoints" / name).exists():
                _link_or_copy(saved / name, output / "checkpoints" / name)
        if left:
            self.say(f"run {run.run_id}: going on from {left[0]}")
        if run.is_script:
            self._uploads.script_starts(run.run_id)
            # Its checkpoint holds all of it, as it was when it was saved.
            shutil.rmtree(output / "output", ignore_errors=True)
        command = [
            "/bin/bash",
            str(self._entrypoint),
            "--output",
            str(output),
            *(["--resume"] if left else []),
        ]
        return ProcessTraining(
            [*command, *run.arguments],
            log=log / LOG,
            environment={
                # On the job's volume.
                "FASTLAUNCH_HUB": str(self.work_folder / "hub"),
                **os.environ,
                **self.program.environment,
                **run.environment,
                **self.secrets,
                "FASTLAUNCH_RUN_ID": run.run_id,
                "FASTLAUNCH_ATTEMPT": str(self.attempt),
                "FASTLAUNCH_RESTARTED_AFTER": self.restarted_after,
                "FASTLAUNCH_INSTANCE": self._request.instance,
                # A rehearsal has no instance, and costs nothing.
                "FASTLAUNCH_SERVICE": "sagemaker" if self._request.instance else "",
            },
        )

    def ending(self, number: int) -> Ending | None:
        grace_s = self._request.stop_grace_s
        if self.stop.reason:
            return Ending(kill_after_s=grace_s + _STOP_MARGIN_S, grace_s=grace_s)
        if self._hosts.lost:
            return Ending(kill_after_s=PEER_GRACE_S)
        words = self._words(number).values()
        if any(word.is_stopped for word in words):
            # SageMaker asks this host as well.
            return Ending(kill_after_s=grace_s + _STOP_MARGIN_S)
        return Ending(kill_after_s=PEER_GRACE_S) if any(word.code for word in words) else None

    def conclude(self, number: int, run: NodeRun, code: int, *, is_killed: bool) -> None:
        if self.stop.reason is None:
            self.has_sound_gpus(code_of_machine(run, code))
        cause = self._cause(run, code) if code else ""
        word = Word(
            code=code,
            cause=cause,
            is_stopped=self.stop.reason is not None,
            is_made_to=is_killed,
            ends=self.stop.event.is_set(),
        )
        self._hosts.say(number, asdict(word))
        words = self._await_words(number)
        outcome = verdict(self._rank, words, is_one_lost=len(words) < len(self._request.hosts))
        state = INTERRUPTED if outcome.state == FAILED and self.stop.is_faulty else outcome.state
        end = self.note_end(number, state, code, cause)
        self._uploads.now()
        if run.is_script:
            self._uploads.script_ended(run.run_id)
        self._uploads.output_folders(run.run_id, self.attempt)
        if outcome.blamed is not None:
            blamed, host = words[outcome.blamed], self._request.hosts[outcome.blamed]
            why = blamed.cause or "no cause known"
            self._causes.append(f"{why} (run {run.run_id} on {host}, exit code {blamed.code})")
        if outcome.is_final:
            # A later container of this job reads it.
            with suppress(OSError):
                self._shelf.put_json(f"{self._folder}/{run.run_id}/ended.json", asdict(end))
            remove_older(self._shelf.root, run.run_id, 1)
        shutil.rmtree(self.output_of(run) / "checkpoints", ignore_errors=True)

    def _words(self, number: int) -> dict[int, Word]:
        """Return what the hosts, this one included, have said about a run."""
        return {rank: Word(**fields) for rank, fields in self._hosts.words(number).items()}

    def _await_words(self, number: int) -> dict[int, Word]:
        """Return all hosts' words on the run; only those at hand if a host is gone, or SIGKILL is near."""
        end = math.inf
        while len(words := self._words(number)) < len(self._request.hosts) and not self._hosts.lost:
            if self.stop.reason:
                end = min(end, time.monotonic() + _LAST_WORDS_S)
            if time.monotonic() >= end:
                break
            time.sleep(_LOOK_S)
        return words

    def _cause(self, run: NodeRun, code: int) -> str:
        """Return why the run failed; report a problem that would keep all other runs from being done, too."""
        if self.stop.reason:
            return ""
        if code == IDLE_CODE:
            return IDLE
        problem = problem_after(code_of_machine(run, code), work=self.work_folder)
        if problem:
            self.fail(problem)
        return after_restart(self.restarted_after, self.cause(run))

    def begins_again(self, number: int, run: NodeRun, code: int, saved: int) -> bool:
        # Other hosts have no way to a checkpoint that lies on the first one alone.
        if len(self._request.hosts) > 1:
            return False
        self._uploads.now()
        return super().begins_again(number, run, code, saved)

    def checkpoint_folders(self, run: NodeRun) -> Sequence[Path]:
        return (self._shelf.root / run.run_id / "checkpoints",)

    def cause(self, run: NodeRun) -> str:
        return cause_of(self.output_of(run), self.work_folder / "log" / run.run_id / LOG, self.attempt)

    def _take_checkpoints(self) -> None:
        for folder in sorted((self.work_folder / "out").glob("*/checkpoints")):
            run_id, here = folder.parent.name, checkpoints(folder, self._uploads.leave_out_file)
            shelved = self._shelf.root / run_id / "checkpoints"
            newest = max(checkpoints(shelved), default=(0, 0))
            # The checkpoint that training resumes from is there already, and must stay here until it is read.
            for path in (path for key, paths in here.items() if key >= newest for path in paths):
                # Training may remove it meanwhile, once it is older than the newest two.
                with suppress(FileNotFoundError):
                    if not (shelved / path.name).exists():
                        self._shelf.move(path, f"{run_id}/checkpoints/{path.name}")
                        self.say(f"run {run_id}: {path.name}")
            remove_older(self._shelf.root, run_id, KEPT_CHECKPOINTS)

    # The end

    def finish(self, outcome: Outcome) -> int:
        self._uploads.stop(60)
        is_stopped_elsewhere = self._hosts.has_any_said("is_stopped")
        if outcome.reason == PEER and is_stopped_elsewhere and self.stop.event.wait(_SIGNAL_LIMIT_S):
            outcome = Outcome(INTERRUPTED, STOP)
        self.say(f"{outcome.name} {outcome.reason or ''}".rstrip())
        self._shelf.release_reserve()
        self._uploads.last(_LAST_UPLOAD_S)
        last = status(
            self._identity,
            outcome,
            self.ends,
            uptime_s=self.uptime_s(),
            phases=self.phases,
            gpu_notes=self.gpus.notes,
            left_out=self._uploads.left_out,
        )
        with suppress(OSError):
            self._shelf.put_json(f"{self.program.token}/{status_name(self._rank)}", last)
        if outcome.name != COMPLETED and outcome.reason != STOP:
            lost = [self._hosts.lost] if self._hosts.lost else []
            with suppress(OSError):
                write_failure(self._failure, "\n".join([*self._causes, *lost, outcome.reason or ""]) + "\n")
        self._hosts.close(is_done=all(end.state != NOT_STARTED for end in self.ends))
        return _EXIT_CODES[outcome.name] if outcome.reason != PEER else 1


def main(arguments: Sequence[str], clock: Clock) -> int:
    """Do the job's runs on this host. arguments: the paths of run_train.sh and of the list of runs.

    Returns the container's exit code: 0 every run completed, 1 a run failed, 2 a wrong configuration,
    3 faulty hardware, 143 stopped.
    """
    stop = Stop()
    # This comes first: without a handler, process 1 of a container would miss a signal.
    stop_on_signals(stop, STOP, clock)
    entrypoint, run_list = map(Path, arguments)
    root = Path(os.environ.get("FASTLAUNCH_SYSTEM_ROOT") or "/")
    opt_ml = root / "opt" / "ml"
    adopt_orphans()
    try:
        request = read_request(opt_ml, os.environ)
        program = program_from_json(run_list.read_text())
        machine = SageMaker(
            program,
            request,
            entrypoint=entrypoint,
            opt_ml=opt_ml,
            scratch=root / "tmp",
            stop=stop,
            clock=clock,
        )
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        write_failure(opt_ml / "output" / "failure", f"the job cannot be begun: {error}\n")
        return _EXIT_CODES[CONFIGURATION]
    return machine.work()


def read_request(opt_ml: Path, environment: Mapping[str, str]) -> Request:
    """Read the request from SageMaker's files below `opt_ml` and from the environment. Raises ValueError."""
    file = opt_ml / "input" / "config" / "resourceconfig.json"
    try:
        resources = json.loads(file.read_bytes())
        hosts = sorted(resources["hosts"])
        rank = hosts.index(resources["current_host"])
        instance = str(resources.get("current_instance_type") or "")
    except FileNotFoundError:
        raise ValueError(f"{file.name} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{file.name} does not say which of which hosts this is") from None
    folder = environment.get("FASTLAUNCH_CHECKPOINT_FOLDER")
    return Request(
        # run_train.sh orders them in the same way.
        hosts=tuple(hosts),
        rank=rank,
        instance=environment.get("FASTLAUNCH_INSTANCE", re.sub(r"^ml\.", "", instance)),
        checkpoints=Path(folder) if folder else opt_ml / "checkpoints",
        stop_grace_s=float(environment.get("FASTLAUNCH_STOP_GRACE_S") or _DEFAULT_STOP_GRACE_S),
        ship_every_s=float(environment.get("FASTLAUNCH_SHIP_EVERY_S") or _DEFAULT_SHIP_EVERY_S),
    )


def write_failure(path: Path, text: str) -> None:
    """Write the job's FailureReason, cause first, cut to the length that SageMaker keeps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text[:FAILURE_CHARS])


def remove_older(root: Path, run_id: str, num_kept: int) -> None:
    """Remove all but the run's newest checkpoints from this disk; in S3 they stay."""
    for paths in [*checkpoints(root / run_id / "checkpoints").values()][:-num_kept]:
        for path in paths:
            path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any] | None:
    """Return a JSON object that an earlier container left; None if there is none, or it is damaged."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _link_or_copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)

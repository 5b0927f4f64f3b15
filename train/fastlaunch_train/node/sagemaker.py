"""One host's part in a training job: the runs in order, in step with the other hosts, and the last word.

Where a run fails the next one is done all the same, on all hosts: each says how the run ended for it, and
none begins the next before all have. A host whose peer failed ends its own part of the run `PEER_GRACE_S`
later if it has not ended by itself. If a host is gone, or finds that it can run nothing more, all end.
"""

import errno
import math
import os
import shutil
import subprocess
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fastlaunch_train.node import protocol as words
from fastlaunch_train.node.causes import cause_of
from fastlaunch_train.node.hosts import Hosts
from fastlaunch_train.node.protocol import Outcome, RunEnd
from fastlaunch_train.node.request import AskedRun, Request
from fastlaunch_train.node.shelf import Shelf
from fastlaunch_train.node.training import Training
from fastlaunch_train.node.uploads import LOG, Shipping, checkpoints, last_attempt, remove_older
from fastlaunch_train.node.verdicts import Verdict, Word, verdict

#: Time to tell why by itself, for a training whose peer has failed.
PEER_GRACE_S = 8.0
#: More than training's own limit, which is counted between its steps, and than torchrun's, which is 5 s more.
_STOP_MARGIN_S = 10.0
#: Until SIGTERM comes here too, where another host has it: a container that ends before fails the job.
_SIGNAL_LIMIT_S = 60.0
#: For the others' words, after SIGTERM.
_LAST_WORDS_S = 5.0
_LOOK_S = 0.2
_MIN_FREE_BYTES = 1_000_000_000
#: The training's own word for a network that is not the one asked for.
_FABRIC_CODE = 78
#: Of a shell, or run_train.sh, that finds nothing to run: the next run would fare no better.
_CONTAINER_CODES = (126, 127)
_EXIT_CODES = {"completed": 0, "failed": 1, "configuration": 2, "interrupted": 143}


class Job:
    """A job on this host. entrypoint: run_train.sh. stopped: set by SIGTERM, by which SageMaker stops a job
    or takes a machine; SIGKILL comes 120 s later.
    """

    def __init__(
        self,
        request: Request,
        *,
        entrypoint: Path,
        opt_ml: Path,
        scratch: Path,
        environment: Mapping[str, str],
        stopped: threading.Event,
    ) -> None:
        self._request = request
        self._entrypoint = entrypoint
        self._environment = environment
        self._failure = opt_ml / "output" / "failure"
        self._shelf = Shelf(request.checkpoints, opt_ml, scratch)
        self._folder = words.node_folder(request)
        self._shipping = Shipping(self._shelf, self._folder, every_s=request.ship_every_s, say=self.say)
        self._hosts = Hosts(request.hosts, request.rank, token=request.token)
        self._stopped = stopped
        self._ends = [RunEnd(run_id=run.run_id) for run in request.runs]
        self._num_gpus = _num_gpus()
        #: Why nothing more can be done here, and what the failure file says, cause first.
        self._problem = ""
        self._causes: list[str] = []
        self._began_at = words.now()

    def say(self, text: str) -> None:
        """Tell it in this host's log, and in SageMaker's."""
        line = f"fastlaunch {words.now()}: {text}\n"
        # A full disk, or a log that nobody takes, is no reason to end.
        with suppress(OSError):
            os.write(1, line.encode())
        with suppress(OSError), (self._shelf.work / LOG).open("a") as file:
            file.write(line)

    def work(self) -> int:
        """Do the job; returns the container's exit code, 0 only if every run completed."""
        try:
            self._begin()
            if self._hosts.join(self._stopped.is_set):
                for number, run in enumerate(self._request.runs):
                    if not self._goes_on():
                        break
                    self._ends[number] = self._do(number, run)
            outcome = self._outcome()
        except Exception as error:
            # What was recorded is shipped all the same.
            self.say(traceback.format_exc())
            self._causes.insert(0, f"{type(error).__name__}: {error}")
            is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            outcome = (
                Outcome(name="configuration", reason="disk full")
                if is_full
                else Outcome(name="failed", reason=f"the job's program ended unexpectedly: {error}")
            )
        return self._finish(outcome)

    def _begin(self) -> None:
        request = self._request
        before = words.read(self._shelf.root / words.boot_name(request))
        if before is not None:
            self._began_at = str(before["began_at"])
        self._shelf.put_json(words.boot_name(request), words.boot(request, self._began_at))
        (self._shelf.root / self._folder / "status.json").unlink(missing_ok=True)
        self.say(
            f"job {request.token}, {request.hosts[request.rank]} of {request.num_nodes} host(s), "
            f"{request.instance or 'unknown instance'}, {len(request.runs)} run(s)"
            + (f", goes on since {self._began_at}" if before else "")
        )
        for run in request.runs:
            # In S3 every checkpoint stays, and all of them were brought here.
            remove_older(self._shelf.root, run.run_id, 1)
        self._shipping.start()

    def _goes_on(self) -> bool:
        return not (self._stopped.is_set() or self._problem or self._hosts.lost or self._has_peer_ended())

    def _has_peer_ended(self) -> bool:
        """Whether another host has said that it does no more runs."""
        return any(word.ends for at in range(len(self._ends)) for word in self._heard(at).values())

    def _do(self, number: int, run: AskedRun) -> RunEnd:
        before = words.ended_before(self._shelf.root, self._request, run.run_id)
        if before is not None:
            self.say(f"run {run.run_id}: {before.state} before")
            return before
        self.say(f"run {run.run_id}")
        started_s = words.uptime_s(self._began_at)
        attempt = max(self._request.attempt, 1 + last_attempt(self._shelf.root, run.run_id))
        code, is_made_to = self._train(number, run, attempt)
        cause = self._cause(run, code, attempt) if code else ""
        is_stopped = self._stopped.is_set()
        word = Word(
            code=code,
            cause=cause,
            is_stopped=is_stopped,
            is_made_to=is_made_to,
            ends=bool(is_stopped or self._problem),
        )
        self._hosts.say(number, vars(word))
        said = self._await_words(number)
        told = verdict(self._request.rank, said, is_one_lost=len(said) < self._request.num_nodes)
        end = RunEnd(
            run_id=run.run_id,
            state=told.state,
            exit_code=code,
            started_s=started_s,
            ended_s=words.uptime_s(self._began_at),
        )
        self.say(f"run {run.run_id}: {told.state}, exit code {code}{': ' if cause else ''}{cause}")
        self._shipping.now()
        self._note(end, told, said)
        return end

    def _train(self, number: int, run: AskedRun, attempt: int) -> tuple[int, bool]:
        """Exit code of the run's training, and whether it was ended here since a peer's had failed."""
        folder = self._shipping.run_folder(run.run_id)
        output = folder / "output"
        output.mkdir(parents=True)
        left = checkpoints(self._shelf.root / run.run_id / "checkpoints")[-1:]
        for path in left:
            self.say(f"run {run.run_id}: going on from {path.name}")
            _link_or_copy(path, output / "checkpoints" / path.name)
        training = Training(
            [
                "/bin/bash",
                str(self._entrypoint),
                *run.arguments,
                "--output",
                str(output),
                *["--resume"][: len(left)],
            ],
            log=folder / LOG,
            environment={
                **self._environment,
                "FASTLAUNCH_RUN_ID": run.run_id,
                "FASTLAUNCH_ATTEMPT": str(attempt),
                "FASTLAUNCH_INSTANCE": self._request.instance,
                # A rehearsal is on no instance, and nobody is paid for it.
                "FASTLAUNCH_SERVICE": "sagemaker" if self._request.instance else "",
            },
        )
        try:
            return self._attend(training, number)
        finally:
            training.close()

    def _attend(self, training: Training, number: int) -> tuple[int, bool]:
        is_asked = is_made_to = False
        end = math.inf
        while (code := training.exit_code()) is None:
            if self._stopped.is_set() and not is_asked:
                is_asked = True
                end = min(end, time.monotonic() + self._request.stop_grace_s + _STOP_MARGIN_S)
                self.say("asked to stop")
                training.ask()
            wait_s = self._peers_wait_s(number)
            end = min(end, time.monotonic() + wait_s) if end == math.inf else end
            if time.monotonic() >= end:
                is_made_to = not is_asked
                self.say("the training has not ended by itself: killed")
                training.kill()
            time.sleep(_LOOK_S)
        return code, is_made_to

    def _peers_wait_s(self, number: int) -> float:
        """How long the training may go on after what is heard of the other hosts."""
        if self._hosts.lost:
            return PEER_GRACE_S
        heard = self._heard(number).values()
        if any(word.is_stopped for word in heard):
            return self._request.stop_grace_s + _STOP_MARGIN_S
        return PEER_GRACE_S if any(word.code for word in heard) else math.inf

    def _heard(self, number: int) -> dict[int, Word]:
        """What the hosts have said of a run, this one included."""
        return {rank: Word(**said) for rank, said in self._hosts.words(number).items()}

    def _await_words(self, number: int) -> dict[int, Word]:
        """What all hosts say of the run; what is known where one is gone, or SIGKILL is near."""
        end = math.inf
        while len(said := self._heard(number)) < self._request.num_nodes and not self._hosts.lost:
            if self._stopped.is_set():
                end = min(end, time.monotonic() + _LAST_WORDS_S)
            if time.monotonic() >= end:
                break
            time.sleep(_LOOK_S)
        return said

    def _cause(self, run: AskedRun, code: int, attempt: int) -> str:
        """Why the run failed; notes what would keep every other run from being done, too."""
        if self._stopped.is_set():
            return ""
        if code == _FABRIC_CODE:
            self._problem = "fabric"
        elif code in _CONTAINER_CODES:
            self._problem = f"container: exit code {code}"
        elif shutil.disk_usage(self._shelf.work).free < _MIN_FREE_BYTES:
            self._problem = "disk full"
        elif _num_gpus() < self._num_gpus:
            self._problem = "driver"
        if self._problem:
            self.say(f"failed: configuration {self._problem}")
        folder = self._shipping.run_folder(run.run_id)
        return cause_of(folder / "output", folder / LOG, attempt)

    def _note(self, end: RunEnd, told: Verdict, said: Mapping[int, Word]) -> None:
        """Note why it failed and, for a container after this one, that it has ended; make room."""
        if told.blamed is not None:
            word, host = said[told.blamed], self._request.hosts[told.blamed]
            cause = word.cause or "no cause known"
            self._causes.append(f"{cause} (run {end.run_id} on {host}, exit code {word.code})")
        if told.is_final:
            with suppress(OSError):
                self._shelf.put_json(f"{self._folder}/{end.run_id}/ended.json", vars(end))
            remove_older(self._shelf.root, end.run_id, 1)
        shutil.rmtree(self._shipping.run_folder(end.run_id) / "output" / "checkpoints", ignore_errors=True)

    def _outcome(self) -> Outcome:
        failed = [end for end in self._ends if end.state == "failed"]
        if all(end.state == "completed" for end in self._ends):
            return Outcome(name="completed")
        if self._stopped.is_set():
            return Outcome(name="interrupted", reason="stop")
        if self._problem:
            return Outcome(name="configuration", reason=self._problem)
        if failed:
            return Outcome(name="failed", reason=f"run {failed[0].run_id}: exit code {failed[0].exit_code}")
        return Outcome(name="interrupted", reason="peer")

    def _finish(self, outcome: Outcome) -> int:
        """Ship all, say the last word, and leave; the exit code."""
        self._shipping.stop()
        is_stopped_elsewhere = any(
            word.is_stopped for at in range(len(self._ends)) for word in self._heard(at).values()
        )
        if outcome.reason == "peer" and is_stopped_elsewhere and self._stopped.wait(_SIGNAL_LIMIT_S):
            outcome = Outcome(name="interrupted", reason="stop")
        self.say(f"{outcome.name} {outcome.reason or ''}".rstrip())
        self._shelf.release_reserve()
        for _ in range(5):
            if self._shipping.now():
                break
            time.sleep(1)
        uptime_s = words.uptime_s(self._began_at)
        with suppress(OSError):
            self._shelf.put_json(
                f"{self._folder}/status.json", words.status(self._request, outcome, self._ends, uptime_s)
            )
        if outcome.name != "completed" and outcome.reason != "stop":
            lost = [self._hosts.lost] if self._hosts.lost else []
            said = [*self._causes, *lost, outcome.reason or ""]
            with suppress(OSError):
                words.write_failure(self._failure, "\n".join(said) + "\n")
        self._hosts.close(is_done=all(end.state != "not-started" for end in self._ends))
        return _EXIT_CODES[outcome.name] if outcome.reason != "peer" else 1


def _num_gpus() -> int:
    """GPUs that the driver shows; 0 where there is none."""
    if shutil.which("nvidia-smi") is None:
        return 0
    with suppress(OSError, subprocess.TimeoutExpired):
        told = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
        return sum(line.startswith("GPU") for line in told.splitlines())
    return 0


def _link_or_copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)

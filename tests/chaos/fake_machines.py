"""Machines and jobs of a trial: those of the AWS in memory, on the trial's server, each in a thread.

What each does after it was launched is drawn from the trial's seed.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

from fake_cloud import NUM_STEPS, FakeNode
from fake_training import FakeJob
from lives import Lives, Objects, Output
from moto_server import MotoServer

from fastlaunch_train.node.protocol import NodeProgram, NodeRun

#: What a node may do: its runs, to their end; fail; be taken back by EC2; boot and hang; end without a word;
#: never boot.
FATES = {"completes": 6, "fails": 2, "is-taken": 2, "hangs": 2, "vanishes": 1, "never-boots": 2}
#: What one may do that saves checkpoints: it may also be taken in its last run, or before it could say so.
SAVING_FATES = {
    **{"completes": 3, "fails": 1, "is-taken": 4, "is-taken-late": 2, "is-taken-at-once": 2},
    **{"hangs": 1, "vanishes": 1, "never-boots": 1},
}
#: What may become of a job: its runs are done, also after its machines were taken back and it was restarted;
#: they fail; its container hangs, or ends without a word; its time is up; there is no capacity, at once or,
#: of spot, for too long; it waits for ever.
JOB_FATES = {
    **{"completes": 5, "restarts": 3, "fails": 2, "hangs": 3, "vanishes": 1, "runs-out": 1},
    **{"no-capacity": 2, "waits-too-long": 1, "waits": 1},
}
_STEPS_UNTIL_TAKEN = 10
_UPTIME_S = 3.0
_CHECKPOINT = re.compile(r".*/runs/(?P<run>[^/]+)/checkpoints/step-(?P<step>\d{8})\.pt")


def nodes(
    server: MotoServer,
    rng: random.Random,
    fates: Sequence[str] = (),
    *,
    saves: bool = False,
    report: Callable[[str], None] = lambda problem: None,
) -> Lives:
    """The machines that a server launches. fates: instead of those that are drawn, by turns.

    saves: they save checkpoints. report: called with what is wrong with what a node is to do.
    """

    def live(region: str, instance_id: str, fate: str, wait: Callable[[], bool]) -> None:
        instance = server.instance(instance_id)
        tags = [{"Key": tag["key"], "Value": tag["value"]} for tag in instance.get_tags()]
        node = _Node(
            aws=_Aws(server=server, launched_at=instance.launch_time.replace(tzinfo=UTC)),
            instance_id=instance_id,
            request={"TagSpecifications": [{"Tags": tags}], "MinCount": 1},
            rank=instance.ami_launch_index,
            wait=wait,
            report=report,
        )
        # An instance that the launcher terminates ends its node in the middle of whatever it does.
        with suppress(_Ended):
            node.live(fate, saves=saves)

    return Lives(drawn=SAVING_FATES if saves else FATES, live=live, rng=rng, fates=fates)


def jobs(server: MotoServer, rng: random.Random, fates: Sequence[str] = ()) -> Lives:
    """The training jobs that a server takes. fates: instead of those that are drawn, by turns."""

    def live(region: str, name: str, fate: str, wait: Callable[[], bool]) -> None:
        aws = _Aws(server=server, launched_at=datetime.now(UTC))
        request = server.training_jobs.job(name).request
        with suppress(_Ended):
            _Job(aws=aws, instance_id=name, request=request, wait=wait).live(fate)

    return Lives(drawn=JOB_FATES, live=live, rng=rng, fates=fates)


class _Ended(Exception):
    pass


@dataclass(frozen=True, kw_only=True)
class _Aws:
    """The server as `FakeNode` acts on it. launched_at: perhaps by a clock that is ahead."""

    server: MotoServer
    launched_at: datetime

    @property
    def objects(self) -> Objects:
        return Objects()

    @property
    def instances(self) -> Mapping[str, Any]:
        return {
            instance.id: SimpleNamespace(is_live=instance.state in ("pending", "running"))
            for instance in self.server.instances()
        }

    @property
    def jobs(self) -> Any:
        return self.server.training_jobs

    @property
    def clock(self) -> Any:
        return SimpleNamespace(moment=max(datetime.now(UTC), self.launched_at) + timedelta(seconds=_UPTIME_S))

    def end(self, instance_id: str, reason: str, transition: str) -> None:
        self.server.set_instance(
            instance_id,
            state="terminated",
            state_reason=reason,
            transition_reason=f"{transition} ({self.clock.moment:%Y-%m-%d %H:%M:%S} GMT)",
        )


@dataclass(kw_only=True)
class _Node(FakeNode):
    """wait: takes a while; returns whether time stands still."""

    wait: Callable[[], bool]
    report: Callable[[str], None]

    @property
    def token(self) -> str:
        return self._output.token

    def put(self, name: str, body: bytes) -> None:
        self._pause()
        super().put(name, body)

    def live(self, fate: str, *, saves: bool) -> None:
        """Do as fate has it. Raises _Ended if the launcher ends the machine meanwhile."""
        if fate == "never-boots":
            return
        self.boot()
        if fate == "hangs":
            return
        states = {}
        program = self._output.program()
        is_taken = fate.startswith("is-taken")
        for run in program.runs:
            is_spared = fate == "is-taken-late" and run != program.runs[-1]
            interrupted = (is_taken and not is_spared) or self._output.get("abort")
            state = {"fails": "failed"}.get(fate, "interrupted" if interrupted else "completed")
            self.put(f"node-{self.rank}/{run.run_id}/log.txt.000000000000", b"training\n")
            if saves and fate != "fails":
                self._train(program, run, is_whole=state == "completed")
            states[run.run_id] = state
        if fate not in ("vanishes", "is-taken-at-once"):
            outcome = "interrupted" if is_taken else {"fails": "failed"}.get(fate, "completed")
            reason = "spot" if is_taken else None
            if outcome == "completed" and (asked := self._output.get("abort")):
                outcome, reason = "interrupted", "stop" if asked.startswith("stop") else "peer"
            elif outcome != "completed":
                # The others cannot train without it.
                self.put("abort", f"node {self.rank} ended: {outcome}".encode())
            self.say_last(outcome, states, reason=reason)
        self._pause()
        if is_taken:
            self.take_back()
        else:
            self.turn_off()

    def _train(self, program: NodeProgram, run: NodeRun, *, is_whole: bool) -> None:
        """Upload records from the newest checkpoint on, to the last step or to the one that is then saved."""
        saved = _checkpoints(run.run_id)
        # As the agent does: the first attempt looks for none, and none looks in another bucket.
        own = [step for uri, step in saved.items() if uri.startswith(f"{program.runs_uri}/")]
        first = max(own, default=0) if program.attempt > 1 else 0
        if first < max(saved.values(), default=0):
            self.report(f"{program.token} began {run.run_id} at step {first}, with these saved: {saved}")
        saved_at = min(first + _STEPS_UNTIL_TAKEN, NUM_STEPS - 1)
        last = NUM_STEPS if is_whole else saved_at
        given = dict(zip(run.arguments[::2], run.arguments[1::2], strict=False))
        assert int(given["--steps"]) == NUM_STEPS
        self.upload_records(
            run.run_id,
            recipe=given["--recipe"],
            first_step=first + 1,
            steps=last - first,
            header={"steps": NUM_STEPS},
            status="completed" if is_whole else "interrupted",
        )
        self._pause()
        bucket, _, prefix = program.runs_uri.removeprefix("s3://").partition("/")
        self.aws.objects[bucket, f"{prefix}/{run.run_id}/checkpoints/step-{saved_at:08}.pt"] = b"weights"

    @property
    def _output(self) -> Output:
        tags = self.request["TagSpecifications"][0]["Tags"]
        return Output(tags={tag["Key"]: tag["Value"] for tag in tags})

    def _pause(self) -> None:
        """Take a while; raises _Ended if the machine was terminated meanwhile, or time stands still."""
        if self.wait() or not self.aws.instances[self.instance_id].is_live:
            raise _Ended


def _checkpoints(run_id: str) -> dict[str, int]:
    """Steps of the run's checkpoints in every bucket, by URI."""
    found = {}
    for bucket, key in Objects():
        match = _CHECKPOINT.fullmatch(key)
        if match and match["run"] == run_id:
            found[f"s3://{bucket}/{key}"] = int(match["step"])
    return found


@dataclass(kw_only=True)
class _Job(FakeJob):
    """wait: takes a while; returns whether time stands still."""

    wait: Callable[[], bool]

    def put(self, name: str, body: bytes) -> None:
        # What it wrote before its end is there, however late it is looked for.
        bucket, key = self.output
        self.aws.objects[bucket, f"{key}/{name}"] = body

    def live(self, fate: str) -> None:
        """Do as fate has it. Raises _Ended if somebody stops the job meanwhile."""
        jobs = self.aws.jobs
        self._pause()
        jobs.move(self.instance_id, "Pending")
        if fate == "waits":
            return
        self._pause()
        if fate == "no-capacity":
            self.end("Failed", reason="CapacityError: Unable to provision requested ML compute capacity.")
            return
        if fate == "waits-too-long" and self.request.get("EnableManagedSpotTraining"):
            self.end("Stopped", secondary="MaxWaitTimeExceeded")
            return
        jobs.move(self.instance_id, "Downloading", "Training")
        self._pause()
        self.boot()
        if fate == "restarts":
            # The same job goes on, in the same folder.
            for words in (("Interrupted",), ("Restarting", "Downloading", "Training")):
                self._pause()
                jobs.move(self.instance_id, *words)
        try:
            self._pause()
        except _Ended:
            if jobs.job(self.instance_id).status in ("Stopping", "Stopped"):
                self._say_last("interrupted", reason="stop")
            raise
        if fate == "hangs":
            return
        state = {"fails": "failed", "runs-out": "interrupted"}.get(fate, "completed")
        if fate != "vanishes":
            reason = {"failed": "a run failed", "interrupted": "watchdog"}.get(state)
            self._say_last(state, reason=reason)
        self._pause()
        if fate == "runs-out":
            self.end("Stopped", secondary="MaxRuntimeExceeded")
        elif fate == "fails":
            self.end("Failed", reason="AlgorithmError: Execute user script Error")
        else:
            self.end("Completed")

    def _say_last(self, state: str, *, reason: str | None) -> None:
        self.say_last(state, dict.fromkeys(self.run_ids(), state), reason=reason)

    def _pause(self) -> None:
        """Take a while; raises _Ended if somebody stopped the job meanwhile, or time stands still."""
        if self.wait() or self.aws.jobs.job(self.instance_id).status != "InProgress":
            raise _Ended

"""Machines of a trial: what each does after it was launched is drawn from the trial's seed."""

import random
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fake_records import write_run
from lives import Lives, Output
from moto_server import MotoServer, backend

from fastlaunch_train.node.protocol import NodeProgram, NodeRun

#: What a node may do: its runs, to their end; fail; be taken back by EC2; boot and hang; end without a word;
#: never boot.
FATES = {"completes": 6, "fails": 2, "is-taken": 2, "hangs": 2, "vanishes": 1, "never-boots": 2}
#: What one may do that saves checkpoints: it may also be taken in its last run, or before it could say so.
SAVING_FATES = {
    **{"completes": 3, "fails": 1, "is-taken": 4, "is-taken-late": 2, "is-taken-at-once": 2},
    **{"hangs": 1, "vanishes": 1, "never-boots": 1},
}
_STEPS_UNTIL_TAKEN = 10
_UPTIME_S = 3.0
_CHECKPOINT = re.compile(r".*/runs/(?P<run>[^/]+)/checkpoints/step-(?P<step>\d{8})\.pt")
_SPOT = "Server.SpotInstanceTermination: Spot instance termination"
_SHUTDOWN = "Client.InstanceInitiatedShutdown: Instance initiated shutdown"


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
        # An instance that the launcher terminates ends its node in the middle of whatever it does.
        with suppress(_Ended):
            node = _Node(server=server, region=region, id=instance_id, wait=wait, saves=saves, report=report)
            node.live(fate)

    return Lives(drawn=SAVING_FATES if saves else FATES, live=live, rng=rng, fates=fates)


class _Ended(Exception):
    pass


@dataclass(frozen=True, kw_only=True)
class _Node:
    """One machine's. wait: takes a while; returns whether time stands still."""

    server: MotoServer
    region: str
    id: str
    wait: Callable[[], bool]
    saves: bool
    report: Callable[[str], None]

    def live(self, fate: str) -> None:
        if fate == "never-boots":
            return
        rank = self.server.instance(self.id).ami_launch_index
        self._put(
            "boot.json" if rank == 0 else f"node-{rank}/boot.json",
            {**self._who(), "booted_at": self._now().isoformat()},
        )
        self._put(f"node-{rank}/log.txt.000000000000", b"pulling\n")
        if fate == "hangs":
            return
        states = []
        program = self._output.program()
        is_taken = fate.startswith("is-taken")
        for run in program.runs:
            is_spared = fate == "is-taken-late" and run != program.runs[-1]
            interrupted = (is_taken and not is_spared) or self._output.get("abort")
            state = {"fails": "failed"}.get(fate, "interrupted" if interrupted else "completed")
            self._put(f"node-{rank}/{run.run_id}/log.txt.000000000000", b"training\n")
            if self.saves and fate != "fails":
                self._train(program, run, is_whole=state == "completed")
            states.append(
                {"run_id": run.run_id, "state": state, "exit_code": 0, "started_s": 1, "ended_s": 2}
            )
        if fate not in ("vanishes", "is-taken-at-once"):
            outcome = "interrupted" if is_taken else {"fails": "failed"}.get(fate, "completed")
            reason = "spot" if is_taken else None
            if outcome == "completed" and (asked := self._output.get("abort")):
                outcome, reason = "interrupted", "stop" if asked.startswith("stop") else "peer"
            elif outcome != "completed":
                # The others cannot train without it.
                self._put("abort", f"node {rank} ended: {outcome}".encode())
            status = {
                **self._who(),
                "node": rank,
                "outcome": outcome,
                "reason": reason,
                "boot_s": 1.0,
                "pull_s": 1.0,
                "uptime_s": _UPTIME_S,
                "billed_until": self._now().isoformat(),
                "runs": states,
            }
            self._put(f"node-{rank}/status.json", status)
        self._pause()
        self.server.set_instance(
            self.id,
            state="terminated",
            state_reason=_SPOT if is_taken else _SHUTDOWN,
            transition_reason=f"User initiated ({self._now():%Y-%m-%d %H:%M:%S} GMT)",
        )

    def _train(self, program: NodeProgram, run: NodeRun, *, is_whole: bool) -> None:
        """Upload records from the newest checkpoint on, to the last step or to the one that is then saved."""
        saved = self._checkpoints(run.run_id)
        # As the agent does: the first attempt looks for none, and none looks in another bucket.
        own = [step for uri, step in saved.items() if uri.startswith(f"{program.runs_uri}/")]
        first = max(own, default=0) if program.attempt > 1 else 0
        if first < max(saved.values(), default=0):
            self.report(f"{program.token} began {run.run_id} at step {first}, with these saved: {saved}")
        given = dict(zip(run.arguments[::2], run.arguments[1::2], strict=False))
        num_steps = int(given["--steps"])
        saved_at = min(first + _STEPS_UNTIL_TAKEN, num_steps - 1)
        last = num_steps if is_whole else saved_at
        with tempfile.TemporaryDirectory() as folder:
            paths = write_run(
                Path(folder),
                run_id=run.run_id,
                recipe=given["--recipe"],
                batch_size=int(given["--batch-size"]),
                attempt=program.attempt,
                world_size=8,
                first_step=first + 1,
                steps=last - first,
                header={"steps": num_steps},
                status="completed" if is_whole else "interrupted",
            )
            for path in paths:
                self._put(f"node-0/{run.run_id}/{path.name}.000000000000", path.read_bytes())
        self._pause()
        bucket, _, prefix = program.runs_uri.removeprefix("s3://").partition("/")
        key = f"{prefix}/{run.run_id}/checkpoints/step-{saved_at:08}.pt"
        backend("s3", "aws").put_object(bucket, key, b"weights")

    def _checkpoints(self, run_id: str) -> dict[str, int]:
        """Steps of the run's checkpoints in every bucket, by URI."""
        found = {}
        for bucket in list(backend("s3", "aws").buckets.values()):
            for key in list(bucket.keys):
                match = _CHECKPOINT.fullmatch(key)
                if match and match["run"] == run_id:
                    found[f"s3://{bucket.name}/{key}"] = int(match["step"])
        return found

    def _who(self) -> dict[str, Any]:
        instance = self.server.instance(self.id)
        return {
            "instance_id": self.id,
            "instance_type": instance.instance_type,
            "zone": f"{self.region}a",
            "lifecycle": "spot" if instance.lifecycle == "spot" else "on-demand",
        }

    @property
    def _output(self) -> Output:
        tags = {tag["key"]: tag["value"] for tag in self.server.instance(self.id).get_tags()}
        return Output(tags=tags)

    def _put(self, name: str, content: Mapping[str, Any] | bytes) -> None:
        self._pause()
        self._output.put(name, content)

    def _now(self) -> datetime:
        """The time after a while, on a machine that a clock may have launched that is ahead."""
        launched_at: datetime = self.server.instance(self.id).launch_time
        return max(datetime.now(UTC), launched_at.replace(tzinfo=UTC)) + timedelta(seconds=_UPTIME_S)

    def _pause(self) -> None:
        """Take a while; raises _Ended if the machine was terminated meanwhile, or time stands still."""
        if self.wait() or self.server.instance(self.id).state not in ("pending", "running"):
            raise _Ended

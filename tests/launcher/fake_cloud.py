"""AWS in memory with a clock of its own: machines that boot, upload and end as a test has them do.

Only what the life of a submission needs. What crosses the wire is tested against moto.
"""

import json
import tempfile
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from fake_aws_facts import BLOCK
from fake_records import write_run

from fastlaunch.aws.account import Schedule
from fastlaunch.aws.client import Aws
from fastlaunch.aws.ec2 import Reservation
from fastlaunch.aws.sagemaker import TrainingJob
from fastlaunch.aws.types import Identity, Instance, StoredObject
from fastlaunch.core.errors import BadConfiguration, CloudRefused, Unreachable

START = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
BOOT_S, SHUTDOWN_S = 60, 40
#: Of a run; what its records say where it was interrupted halfway; and what another attempt does of it.
NUM_STEPS = 40
HALF: Mapping[str, Any] = {"steps": 20, "header": {"steps": NUM_STEPS}, "status": "interrupted"}
REST: Mapping[str, Any] = {"steps": 20, "first_step": 21}


@dataclass
class Clock:
    """Time that passes only when somebody sleeps; what is planned `at` a moment happens then."""

    moment: datetime = START
    #: By so much it was set back.
    behind: timedelta = timedelta()
    planned: list[tuple[datetime, int, Callable[[], None]]] = field(default_factory=list)

    def now(self) -> datetime:
        return self.moment - self.behind

    def at(self, seconds: float, do: Callable[[], None]) -> None:
        """Plan `do` so many seconds from now."""
        self.planned.append((self.moment + timedelta(seconds=seconds), len(self.planned), do))

    def sleep(self, seconds: float) -> None:
        until = self.moment + timedelta(seconds=seconds)
        while due := [item for item in self.planned if item[0] <= until]:
            item = min(due, key=lambda item: item[:2])
            self.planned.remove(item)
            self.moment = max(self.moment, item[0])
            item[2]()
        self.moment = max(self.moment, until)


class FakeAws(Aws):
    """answers: to the next RunInstances, in turn: an error to raise, `lost`, which starts the machines and
    then answers nothing, or `few`, which starts one too few; after them every request is carried out.
    hidden_s: so long EC2 does not show them. node: what a machine does, called when it was started.
    refusals: errors by method, raised once each. caller: who is logged in. is_blind: EC2 answers, and shows
    nothing. schedules: by name, with what each sends. when_asked: called before a schedule is made.
    block_begins: when every capacity block is active. lost_blocks: those that were not paid for.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(sleep=clock.sleep, now=clock.now)
        self.clock = clock
        self.instances: dict[str, Instance] = {}
        self.requests: list[tuple[str, Mapping[str, Any]]] = []
        self.objects: dict[tuple[str, str], bytes] = {}
        self.answers: list[CloudRefused | str] = []
        self.refusals: dict[str, list[CloudRefused]] = {}
        self.calls: Counter[str] = Counter()
        self.hidden_s = 0.0
        self.shutdown_s = SHUTDOWN_S
        self.node: Callable[[FakeNode], None] = lambda node: node.train()
        self.nodes: dict[str, FakeNode] = {}
        self.spot_usd: float | None = 17.0
        self.caller = Identity(account="123456789012", arn="arn:aws:iam::123456789012:user/ada")
        self.is_blind = False
        self.schedules: dict[str, str] = {}
        self.when_asked: Callable[[], None] = lambda: None
        self.block_begins: datetime | None = None
        self.lost_blocks: set[str] = set()

    # What the launcher calls

    def identity(self) -> Identity:
        self._called("identity")
        return self.caller

    def run_instances(self, region: str, request: Mapping[str, Any]) -> list[Instance]:
        self._called("run_instances")
        self.requests.append((region, request))
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, CloudRefused):
            raise answer
        started = [one for one in self.instances.values() if one.token == request["ClientToken"]]
        if not started:
            number = request["MinCount"] - (answer == "few")
            started = [self._start(region, request, rank) for rank in range(number)]
            # As in a cluster: none of them does anything before all are there.
            for one in started:
                self.node(self.nodes[one.id])
        if answer == "lost":
            raise Unreachable("no answer to ec2:RunInstances")
        return started

    def describe_instances(
        self,
        region: str,
        *,
        ids: Sequence[str] = (),
        tokens: Sequence[str] = (),
        tags: Mapping[str, Sequence[str]] | None = None,
    ) -> list[Instance]:
        self._called("describe_instances")
        return [
            one
            for one in self.instances.values()
            if one.region == region
            and not self.is_blind
            and (not ids or one.id in ids)
            and (not tokens or one.token in tokens)
            and all(
                key in one.tags and (not values or one.tags[key] in values)
                for key, values in (tags or {}).items()
            )
            and (ids or tokens or tags)
            and self.clock.moment >= one.launch_time + timedelta(seconds=self.hidden_s)
        ]

    def live_training_jobs(self, region: str) -> list[TrainingJob]:
        self._called("live_training_jobs")
        return []

    def reservation(self, region: str, id: str) -> Reservation | None:
        self._called("reservation")
        if id in self.lost_blocks:
            return replace(BLOCK, id=id, state="payment-failed")
        state = "active" if self.block_begins and self.clock.moment >= self.block_begins else "scheduled"
        return replace(BLOCK, id=id, state=state)

    def list_schedules(self, region: str) -> list[Schedule]:
        self._called("list_schedules")
        return [Schedule(name=name, region=region, created_at=START) for name in sorted(self.schedules)]

    def terminate(self, region: str, ids: Sequence[str]) -> None:
        self._called("terminate")
        for instance_id in ids:
            one = self.instances.get(instance_id)
            # Like EC2's, an order that is given before it shows the machine does nothing.
            if one is None or not self.describe_instances(region, ids=[instance_id]):
                continue
            if one.is_live:
                self.end(
                    instance_id, "Client.UserInitiatedShutdown: User initiated shutdown", "User initiated"
                )

    def console_output(self, region: str, instance_id: str) -> str:
        self._called("console_output")
        return "Kernel panic - not syncing"

    def spot_price_usd(self, region: str, instance_type: str, zone: str | None) -> tuple[float, str] | None:
        self._called("spot_price_usd")
        return (self.spot_usd, zone or "us-east-1a") if self.spot_usd else None

    def put_object(self, region: str, bucket: str, key: str, body: bytes, *, only_new: bool = False) -> bool:
        self._called("put_object")
        self.objects[bucket, key] = body
        return True

    def download(self, region: str, bucket: str, key: str, file: BinaryIO, *, max_bytes: int) -> bool:
        self._called("download")
        file.write(self.objects.get((bucket, key), b"")[:max_bytes])
        return (bucket, key) in self.objects

    def list_objects(self, region: str, bucket: str, prefix: str, **_: object) -> list[StoredObject]:
        self._called("list_objects")
        return sorted(
            (
                StoredObject(key=key, size=len(body))
                for (where, key), body in self.objects.items()
                if where == bucket and key.startswith(prefix)
            ),
            key=lambda one: one.key,
        )

    def call(self, service: str, region: str, action: str, *, subject: str = "", **given: Any) -> Any:
        assert service == "scheduler", action
        self._called(action)
        if action == "CreateSchedule":
            self.when_asked()
            self.schedules.setdefault(given["Name"], given["Target"]["Input"])
            if given["Target"]["Arn"].endswith(":runInstances"):
                self._start_later(region, given)
        elif self.schedules.pop(given["Name"], None) is None:
            error = BadConfiguration("there is none of the name")
            error.code = "ResourceNotFoundException"
            raise error
        return {}

    def _start_later(self, region: str, given: Mapping[str, Any]) -> None:
        """Send the schedule's request at its time, as EventBridge Scheduler does; it is gone then."""
        at = datetime.strptime(given["ScheduleExpression"], "at(%Y-%m-%dT%H:%M:%S)").replace(tzinfo=UTC)
        request = json.loads(given["Target"]["Input"])
        request["UserData"] = b64decode(request["UserData"]).decode()

        def fire() -> None:
            if self.schedules.pop(given["Name"], None) is not None:
                with suppress(CloudRefused):
                    self.run_instances(region, request)

        self.clock.at((at - self.clock.moment).total_seconds(), fire)

    # What a test does

    def refuse(self, method: str, *errors: CloudRefused) -> None:
        """Raise these errors from the next calls of `method`."""
        self.refusals.setdefault(method, []).extend(errors)

    def change(self, instance_id: str, **changes: Any) -> None:
        """Change what EC2 says of an instance, unless it has ended."""
        if self.instances[instance_id].state != "terminated":
            self.instances[instance_id] = replace(self.instances[instance_id], **changes)

    def end(self, instance_id: str, reason: str, transition: str) -> None:
        """End a machine: shutting down now, terminated after a while."""
        if not self.instances[instance_id].is_live:
            return
        told = f"{transition} ({self.clock.moment:%Y-%m-%d %H:%M:%S} GMT)"
        self.change(instance_id, state="shutting-down", state_reason=reason, transition_reason=told)
        self.clock.at(self.shutdown_s, lambda: self.change(instance_id, state="terminated"))

    def live(self) -> list[str]:
        """Ids of the machines that cost."""
        return [one.id for one in self.instances.values() if one.is_live]

    def _called(self, method: str) -> None:
        self.calls[method] += 1
        if self.refusals.get(method):
            raise self.refusals[method].pop(0)

    def _start(self, region: str, request: Mapping[str, Any], rank: int) -> Instance:
        number = len(self.instances) + 1
        tags = {tag["Key"]: tag["Value"] for tag in request["TagSpecifications"][0]["Tags"]}
        zone = {"subnet-b": "us-east-1b"}.get(request.get("SubnetId", ""), f"{region}a")
        one = Instance(
            id=f"i-{number:04d}",
            region=region,
            zone=zone,
            instance_type=request["InstanceType"],
            state="pending",
            is_spot=request.get("InstanceMarketOptions", {}).get("MarketType") == "spot",
            launch_time=self.clock.moment,
            token=request["ClientToken"],
            launch_index=rank,
            tags=tags,
        )
        self.instances[one.id] = one
        self.nodes[one.id] = FakeNode(aws=self, instance_id=one.id, request=request, rank=rank)
        self.clock.at(20, lambda: self.change(one.id, state="running") if one.id in self.live() else None)
        return one


class StoredObjects(Protocol):
    """Objects of S3 by bucket and key."""

    def __iter__(self) -> Iterator[tuple[str, str]]: ...
    def __getitem__(self, place: tuple[str, str]) -> bytes: ...


def listed_runs(objects: StoredObjects, bucket: str, output: str) -> list[str]:
    """Ids of the runs in the list that lies below an attempt's output."""
    (found,) = [key for key in objects if key[0] == bucket and key[1].startswith(f"{output}/runs-")]
    return [run["run_id"] for run in json.loads(objects[found])["runs"]]


@dataclass
class FakeNode:
    """A machine's own side: what it uploads, and how it ends. stops: whether it heeds being asked to.

    rank: of the node among those of the request, each of which does its share of the ranks. aws: a FakeAws,
    or what stands for one: `objects`, `instances`, `clock` and `end`.
    """

    aws: Any
    instance_id: str
    request: Mapping[str, Any]
    stops: bool = True
    rank: int = 0

    @property
    def token(self) -> str:
        return str(self.request["ClientToken"])

    @property
    def output(self) -> tuple[str, str]:
        """Bucket and key."""
        tags = self.request["TagSpecifications"][0]["Tags"]
        uri = next(tag["Value"] for tag in tags if tag["Key"] == "fastlaunch:output")
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        return bucket, key

    @property
    def attempt(self) -> int:
        return int(self.token.rpartition("-a")[2])

    @property
    def num_nodes(self) -> int:
        return int(self.request["MinCount"])

    def put(self, name: str, body: bytes) -> None:
        """Upload an object of the attempt's output, if the machine lives."""
        if self.aws.instances[self.instance_id].is_live:
            bucket, key = self.output
            self.aws.objects[bucket, f"{key}/{name}"] = body

    def boot(self) -> None:
        said = {"schema": 1, "token": self.token, "instance_id": self.instance_id, "booted_at": self._now()}
        self.put("boot.json" if self.rank == 0 else f"node-{self.rank}/boot.json", json.dumps(said).encode())
        self.put(f"node-{self.rank}/log.txt.000000000000", b"pulling the image\n")

    def upload_records(self, run_id: str, *, segments: int = 1, **how: Any) -> None:
        """Upload this node's records of a run in so many segments, as `write_run` makes them, and a log."""
        folder = f"node-{self.rank}/{run_id}"
        with tempfile.TemporaryDirectory() as written:
            usual = {"steps": NUM_STEPS, "batch_size": 64, "world_size": 8, "attempt": self.attempt}
            paths = write_run(Path(written), run_id=run_id, **{**usual, **how})
            share = len(paths) // self.num_nodes
            for path in paths[self.rank * share : (self.rank + 1) * share]:
                body, size = path.read_bytes(), -(-path.stat().st_size // segments)
                for start in range(0, len(body), size):
                    self.put(f"{folder}/{path.name}.{start:012d}", body[start : start + size])
        self.put(f"{folder}/log.txt.000000000000", f"training on {self.instance_id}\n".encode())

    def say_last(
        self,
        outcome: str,
        runs: Mapping[str, str],
        *,
        reason: str | None = None,
        exit_codes: Mapping[str, int] | None = None,
    ) -> None:
        """Upload status.json. runs: state by run id. exit_codes: by state, for others than the usual."""
        codes = {"completed": 0, "failed": 1, **(exit_codes or {})}
        said = {
            "schema": 1,
            "token": self.token,
            "node": self.rank,
            "instance_id": self.instance_id,
            "outcome": outcome,
            "reason": reason,
            "uptime_s": 200.0,
            "billed_until": self._now(),
            "runs": [
                {"run_id": run_id, "state": state, "exit_code": codes.get(state)}
                for run_id, state in runs.items()
            ],
        }
        self.put(f"node-{self.rank}/status.json", json.dumps(said).encode())

    def interrupt(
        self, at_s: float, reason: str, *, how: Mapping[str, Any] = HALF, state: str = "interrupted"
    ) -> None:
        """Train halfway; at that time say why it ends, with what became of the runs that are not done."""
        self.train(upto=1, how=lambda run_id: how)
        states = dict.fromkeys(self.run_ids(), state)
        self.aws.clock.at(at_s, lambda: self.say_last("interrupted", states, reason=reason))

    def turn_off(self) -> None:
        reason = "Client.InstanceInitiatedShutdown: Instance initiated shutdown"
        self.aws.end(self.instance_id, reason, "User initiated")

    def take_back(self) -> None:
        """EC2's spot interruption."""
        reason = "Server.SpotInstanceTermination: Spot instance termination"
        self.aws.end(self.instance_id, reason, "Server.SpotInstanceTermination")

    def run_ids(self) -> list[str]:
        """The runs that the stored list names, in its order."""
        return listed_runs(self.aws.objects, *self.output)

    def train(
        self,
        *,
        states: Mapping[str, str] | None = None,
        how: Callable[[str], Mapping[str, Any]] = lambda run_id: {},
        seconds_per_run: float = 60,
        upto: int | None = None,
    ) -> None:
        """Boot, do the runs one after another, say how it went, turn off. upto: only so many, then silence.

        Asked to stop, it ends as the node's program does.
        """
        clock, runs = self.aws.clock, self.run_ids()
        clock.at(BOOT_S, self.boot)
        done: dict[str, str] = {}

        def do(run_id: str) -> None:
            bucket, key = self.output
            if (bucket, f"{key}/skip/{run_id}") in self.aws.objects:
                return
            self.upload_records(run_id, **how(run_id))
            done[run_id] = (states or {}).get(run_id, "completed")

        for number, run_id in enumerate(runs[:upto], start=1):
            clock.at(BOOT_S + number * seconds_per_run, lambda run_id=run_id: do(run_id))  # type: ignore[misc]
        if upto is not None:
            self._watch_abort(done, runs)
            return

        def end() -> None:
            outcome = "completed" if set(done.values()) == {"completed"} else "failed"
            self.say_last(outcome, done)
            self.turn_off()

        clock.at(BOOT_S + (len(runs) + 1) * seconds_per_run, end)

    def _now(self) -> str:
        return f"{self.aws.clock.moment:%Y-%m-%dT%H:%M:%SZ}"

    def _watch_abort(self, done: Mapping[str, str], runs: Sequence[str]) -> None:
        bucket, key = self.output

        def look() -> None:
            if not self.aws.instances[self.instance_id].is_live:
                return
            if self.stops and (bucket, f"{key}/abort") in self.aws.objects:
                states = {run_id: done.get(run_id, "interrupted") for run_id in runs}
                self.say_last("interrupted", states, reason="stop")
                self.turn_off()
                return
            self.aws.clock.at(10, look)

        self.aws.clock.at(10, look)

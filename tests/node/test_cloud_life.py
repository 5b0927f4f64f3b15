"""Launcher and node together: what `submit` does with instances that run their own user data. Slow."""

import io
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from ec2_builders import job, site
from instance_network import Switch
from moto_server import MotoServer
from node_scene import BUCKET, IMAGE, REGION, Scene, code_bundle
from simulated_instance import SimulatedInstance, cannot_simulate

from fastlaunch.aws.client import Aws
from fastlaunch.backends.ec2.ec2 import Ec2Backend
from fastlaunch.backends.placements import Ec2Placement
from fastlaunch.core.plan import CodeBundle, RunState
from fastlaunch.core.settings import Settings
from fastlaunch.jobs.spec import JobSpec, Terms
from fastlaunch.ledger.attempt_cost import attempt_cost
from fastlaunch.ledger.ledger import Ledger, Run
from fastlaunch.runs.display import PlainLines
from fastlaunch.runs.launcher import Launcher, Submission
from fastlaunch.runs.stop_request import StopRequest
from fastlaunch_train.recipes.recipes import resolve_recipe

REASON = cannot_simulate()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]
#: Seconds of the launcher and of the instances in one of ours.
SCALE = 20.0
JOB = job(
    workload="vit-tiny",
    batch_size=4,
    steps=20,
    num_gpus=1,
    instance="g5.xlarge",
    image=IMAGE,
    checkpoint_every=10,
)


@dataclass
class World:
    """A launcher whose machines boot as simulated instances, and then meet what `events` does to them.

    machines: how they are, as arguments of SimulatedInstance.
    """

    scene: Scene
    home: Path
    ledger: Ledger
    stop: StopRequest
    site: Ec2Placement
    told: list[str]
    events: Callable[[int, SimulatedInstance], None] = lambda number, instance: None
    started_at: float = 0.0
    machines: dict[str, Any] = field(default_factory=dict)
    max_minutes: int = 120

    def __post_init__(self) -> None:
        self.started_at = time.time()
        self.scene.moto.when_launched.append(self._launched)

    def now(self) -> datetime:
        elapsed_s = (time.time() - self.started_at) * SCALE
        return datetime.fromtimestamp(self.started_at, tz=UTC) + timedelta(seconds=elapsed_s)

    def run_id(self) -> str:
        """Of the first run, read by a thread of its own."""
        with Ledger(self.ledger.path) as ledger:
            return ledger.select()[0].id

    def submit(self, *jobs: JobSpec) -> list[Run]:
        def sleep(seconds: float) -> None:
            time.sleep(seconds / SCALE)

        aws = Aws()
        launcher = Launcher(
            backends={"ec2": Ec2Backend(aws=aws, home=self.home, sleep=sleep, now=self.now)},
            ledger=self.ledger,
            settings=Settings(home=self.home),
            display=PlainLines(stream=io.StringIO(), clock=time.monotonic),
            stop=self.stop,
            report=self.told.append,
        )
        submission = Submission(
            placements=(self.site,),
            jobs_at=lambda at: jobs,
            max_minutes=self.max_minutes,
        )
        return launcher.submit(submission, command="fastlaunch submit")

    def _launched(self, region: str, instance_id: str) -> None:
        # In a thread of its own: booting asks the server, which is still about to answer.
        threading.Thread(target=self._boot, args=(instance_id,), daemon=True).start()

    def _boot(self, instance_id: str) -> None:
        instance = self.scene.boot(instance_id, scale=SCALE, **self.machines)
        self.events(len(self.scene.started), instance)


@pytest.fixture
def world(tmp_path: Path, aws_server: MotoServer) -> Iterator[World]:
    settings = aws_server.set_up_region(REGION)
    assert settings.bucket == BUCKET
    scene = Scene(moto=aws_server, folder=tmp_path)
    code = code_bundle()
    key = f"fastlaunch/code/{code.sha256}.tar.gz"
    scene.s3.put_object(Bucket=BUCKET, Key=key, Body=code.data)
    zone, subnet = next(iter(settings.subnets.items()))
    place = site(
        "g5.xlarge",
        zone=zone,
        subnet=subnet,
        bucket=BUCKET,
        instance_profile=settings.instance_profile,
        security_groups=settings.security_groups,
        ami=Aws().parameter(REGION, settings.ami_parameter),
        image=IMAGE,
        code=CodeBundle(key=key, sha256=code.sha256),
    )
    home = tmp_path / "home"
    home.mkdir()
    with Ledger(home / "ledger.sqlite") as ledger:
        yield World(scene=scene, home=home, ledger=ledger, stop=StopRequest(), site=place, told=[])
        for instance in scene.started:
            instance.close()


def consoles(world: World) -> str:
    return "\n".join([*world.told, *(instance.console for instance in world.scene.started)])


def test_two_recipes_come_home(world: World) -> None:
    first, second = world.submit(JOB, replace(JOB, recipe=resolve_recipe("fp32")))
    assert [first.state, second.state] == [RunState.COMPLETED] * 2, consoles(world)
    for run in (first, second):
        assert run.summary is not None and run.summary.num_steps == 20
        assert run.summary.setup.instance == "g5.xlarge"
        assert run.directory is not None and (run.directory / "log.txt").read_text()
    (attempt,) = world.ledger.attempts_of(second.id)
    assert attempt.state is RunState.COMPLETED and attempt.run_ids == (first.id, second.id)
    assert attempt_cost(attempt, world.now()).is_final
    node_log = world.home / "runs" / first.id / "node-a1.log"
    assert second.id in node_log.read_text()
    assert not world.scene.moto.instances("pending", "running")


def test_a_spot_interruption_is_gone_on_from(world: World) -> None:
    def interrupt(number: int, instance: SimulatedInstance) -> None:
        if number > 1:
            return
        run_id = world.run_id()
        output = f"s3://{BUCKET}/fastlaunch/runs/{run_id}/attempt-1"
        world.scene.wait_for(f"{output}/node-0/{run_id}/rank-", 120)
        instance.spot_notice()
        world.scene.wait_for(f"{output}/node-0/status.json", 120)
        instance.take()

    world.events = interrupt
    (run,) = world.submit(replace(JOB, terms=Terms(purchase="spot"), steps=4000, checkpoint_every=100))
    assert run.state is RunState.COMPLETED, consoles(world)
    assert run.summary is not None and run.summary.num_steps == 4000
    one, two = world.ledger.attempts_of(run.id)
    assert (one.state, one.reason) == (RunState.INTERRUPTED, "EC2 took the spot instance back")
    assert (one.billing.source, one.billing.billed_s) == ("free", 0.0)
    assert two.state is RunState.COMPLETED and (two.max_minutes or 0) < 120
    # It went on, and did not begin again.
    steps = [path.read_text().count('"kind":"step"') for path in sorted(run.directory.glob("rank-*"))]  # type: ignore[union-attr]
    assert len(steps) == 2 and 4000 <= sum(steps) < 4000 + 200 and steps[0] > 0


def test_ctrl_c_brings_home_what_was_done(world: World) -> None:
    def interrupt(number: int, instance: SimulatedInstance) -> None:
        run_id = world.run_id()
        world.scene.wait_for(f"s3://{BUCKET}/fastlaunch/runs/{run_id}/attempt-1/node-0/{run_id}/rank-", 120)
        world.stop.by = "Ctrl-C"

    world.events = interrupt
    (run,) = world.submit(replace(JOB, steps=3000))
    assert (run.state, run.reason) == (RunState.INTERRUPTED, "stopped by Ctrl-C"), consoles(world)
    assert run.summary is not None and 0 < run.summary.num_steps < 3000
    assert world.scene.keys(f"s3://{BUCKET}/fastlaunch/runs/{run.id}/checkpoints")
    assert not world.scene.moto.instances("pending", "running")


@pytest.fixture
def two_nodes(world: World) -> Iterator[World]:
    """The same with real training, on machines that reach each other."""
    switch = Switch()
    world.machines.update(switch=switch, training="real")
    # Real training takes its time on a busy machine, and a node's minutes are few seconds here.
    world.max_minutes = 1200
    yield world
    for instance in world.scene.started:
        instance.close()
    switch.close()


TWO = replace(JOB, num_nodes=2, num_gpus=2, allow_tcp=True)


def test_two_nodes_come_home(two_nodes: World) -> None:
    (run,) = two_nodes.submit(TWO)
    assert run.state is RunState.COMPLETED, consoles(two_nodes)
    assert run.summary is not None and run.summary.num_steps == 20
    assert run.directory is not None
    names = {path.name for path in run.directory.iterdir()}
    assert {"rank-00000-attempt-1.jsonl", "rank-00001-attempt-1.jsonl", "log.txt", "log-node-1.txt"} <= names
    (attempt,) = two_nodes.ledger.attempts_of(run.id)
    assert attempt.state is RunState.COMPLETED and attempt.handle is not None
    ids = [instance.instance_id for instance in two_nodes.scene.started]
    assert sorted(attempt.handle["instance_ids"]) == sorted(ids) and len(ids) == 2
    assert not two_nodes.scene.moto.instances("pending", "running")

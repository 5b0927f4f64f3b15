"""`fastlaunch resume`: what can go on, from where, for how long and how much; and the run that goes on."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from ec2_builders import job, site
from fake_cloud import Clock, FakeAws, FakeNode

from fastlaunch.backends.ec2.ec2 import Ec2Backend
from fastlaunch.backends.local import LocalBackend, LocalSettings
from fastlaunch.cli.context import AppContext
from fastlaunch.cli.main import run as run_command
from fastlaunch.core import locks
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import Settings
from fastlaunch.jobs.machine import Machine
from fastlaunch.ledger.ledger import LEDGER_NAME, Ledger, Run
from fastlaunch.runs.display import PlainLines
from fastlaunch.runs.launcher import Launcher, Submission
from fastlaunch.runs.stop_request import StopRequest

A = site(zone="us-east-1a", subnet="subnet-a")
B = site(zone="us-east-1b", subnet="subnet-b")
WEST = site(region="us-west-2", zone="us-west-2a", subnet="subnet-w", bucket="acme-west")


@dataclass
class World:
    home: Path
    clock: Clock
    aws: FakeAws
    ledger: Ledger

    @property
    def backend(self) -> Ec2Backend:
        return Ec2Backend(aws=self.aws, home=self.home, sleep=self.clock.sleep, now=self.clock.now)

    def interrupted(self, *, after_min: float = 30, max_minutes: int = 120, saved: bool = True) -> Run:
        """A run whose node's watchdog stopped it so late, with a checkpoint at step 80."""

        def stop(node: FakeNode) -> None:
            (run_id,) = node.run_ids()
            how = {"steps": 80, "header": {"steps": 200}, "status": "interrupted"}
            node.train(upto=1, how=lambda run_id: how)
            at_s = 60 * after_min
            self.clock.at(
                at_s, lambda: node.say_last("interrupted", {run_id: "interrupted"}, reason="watchdog")
            )
            self.clock.at(at_s, node.turn_off)
            if saved:
                for step in (40, 80):
                    self.aws.objects[checkpoint(run_id, step)] = b"weights"

        self.aws.node = stop
        launcher = Launcher(
            backends={"ec2": self.backend},
            ledger=self.ledger,
            settings=Settings(home=self.home),
            display=PlainLines(clock=lambda: 0.0),
            stop=StopRequest(),
            report=lambda line: None,
        )
        submission = Submission(
            placements=(A, B, WEST),
            jobs_at=lambda at: (job(checkpoint_every=40, max_minutes=max_minutes, region=at.region),),
            max_minutes=max_minutes,
        )
        (run,) = launcher.submit(submission, command="fastlaunch submit")
        assert run.state is RunState.INTERRUPTED
        self.aws.node = lambda node: node.train(how=lambda run_id: {"steps": 120, "first_step": 81})
        return run

    def type(self, *arguments: str) -> int:
        settings = Settings(home=self.home)
        local = LocalBackend(LocalSettings(home=self.home, working_directory=self.home))
        context = AppContext(
            settings=settings,
            find_machine=lambda: Machine(devices=(), num_cores=2, modules=frozenset()),
            backends={
                "local": local,
                "ec2": self.backend,
            },
            argv=arguments,
            sleep=self.clock.sleep,
            connect=lambda: self.aws,
            now=self.clock.now,
        )
        return run_command(list(arguments), obj=context)


def checkpoint(run_id: str, step: int) -> tuple[str, str]:
    return "acme-training", f"fastlaunch/runs/{run_id}/checkpoints/step-{step:08d}.pt"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    clock = Clock()
    with ExitStack() as stack:
        ledger = stack.enter_context(Ledger(tmp_path / LEDGER_NAME, clock=clock.now))
        yield World(home=tmp_path, clock=clock, aws=FakeAws(clock), ledger=ledger)


def test_a_run_goes_on_from_its_checkpoint(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    run = world.interrupted()
    capsys.readouterr()
    assert world.type("resume", run.id, "--yes", "--output", "json") == 0
    captured = capsys.readouterr()
    # 30 minutes were used: 90 are left, and the margin of 10 is billed too.
    assert "from step-00000080.pt, with 90 minutes left; at most $91.73 of instance time" in captured.err
    assert json.loads(captured.out)["runs"][0]["state"] == "completed"
    after = world.ledger.get(run.id)
    assert after.state is RunState.COMPLETED
    assert after.summary is not None and after.summary.num_steps == 200
    _, two = world.ledger.attempts_of(run.id)
    assert (two.token, two.max_minutes) == (f"{run.id}-a2", 90)
    # The attempts of the same request differ in what they must and in nothing else.
    first, second = (request for _, request in world.aws.requests)
    assert first["ImageId"] == second["ImageId"] and first["SubnetId"] == second["SubnetId"]
    assert [str(event.state) for event in world.ledger.history(run.id)] == [
        "planned",
        "running",
        "interrupted",
        "planned",
        "running",
        "completed",
    ]


def test_detached_it_returns_when_a_machine_was_started(world: World) -> None:
    run = world.interrupted()
    assert world.type("resume", run.id, "--yes", "--detach") == 0
    assert world.ledger.get(run.id).state is RunState.RUNNING
    assert len(world.aws.live()) == 1


def test_what_it_may_cost_is_asked_and_bounded(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    run = world.interrupted()
    assert world.type("resume", run.id) == 2
    assert "add --yes" in capsys.readouterr().err
    assert world.type("resume", run.id, "--yes", "--max-cost", "50") == 2
    assert "above --max-cost 50" in capsys.readouterr().err
    assert world.ledger.get(run.id).state is RunState.INTERRUPTED
    assert len(world.aws.instances) == 1


def never(world: World, run: Run) -> None:
    pass


def complete(world: World, run: Run) -> None:
    with world.ledger.transaction():
        world.ledger._file.write("UPDATE runs SET state = 'completed'")


def make_local(world: World, run: Run) -> None:
    with world.ledger.transaction():
        world.ledger._file.write("UPDATE runs SET backend = 'local'")


def forget_attempts(world: World, run: Run) -> None:
    with world.ledger.transaction():
        world.ledger._file.write("UPDATE attempts SET handle = NULL")


@pytest.mark.parametrize(
    ("how", "change", "told"),
    [
        ({"saved": False}, never, "saved no checkpoint"),
        ({"after_min": 50, "max_minutes": 60}, never, "of the 60 minutes of run .*, 10 are left"),
        ({}, complete, "is completed"),
        ({}, make_local, "ran on local(.|\\n)* with --resume"),
        ({}, forget_attempts, "never had a machine"),
    ],
)
def test_what_cannot_go_on_is_told_why(
    world: World,
    capsys: pytest.CaptureFixture[str],
    how: dict[str, Any],
    change: Callable[[World, Run], None],
    told: str,
) -> None:
    import re

    run = world.interrupted(**how)
    change(world, run)
    assert world.type("resume", run.id, "--yes") == 2
    assert re.search(told, capsys.readouterr().err)
    assert len(world.aws.instances) == 1


def test_half_a_checkpoint_is_none(world: World) -> None:
    run = world.interrupted(saved=False)
    bucket, key = checkpoint(run.id, 120)
    world.aws.objects[bucket, key.replace(".pt", ".partial")] = b"half"
    assert world.type("resume", run.id, "--yes") == 2


def test_only_places_with_its_checkpoints_are_tried(world: World) -> None:
    from fastlaunch.runs.resume import resumable

    run = world.interrupted()
    plan = resumable(run, backends={"ec2": world.backend}, ledger=world.ledger)
    assert [each.zone for each in plan.placements] == ["us-east-1a", "us-east-1b"]
    assert plan.jobs_at(B)[run.id] == replace(
        job(checkpoint_every=40, max_minutes=120), image=B.image, region="us-east-1"
    )


def test_a_run_of_a_submission_that_is_followed_is_not_waited_for(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    run = world.interrupted()
    with locks.held(world.ledger.launcher_lock(run.submission_id)):
        assert world.type("resume", run.id, "--yes") == 2
    assert "another fastlaunch follows" in capsys.readouterr().err
    assert len(world.aws.requests) == 1

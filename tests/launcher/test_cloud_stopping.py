"""A submission on EC2 that is stopped, at any moment, or left to itself."""

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from cloud_world import A, B, World, make_world
from ec2_builders import job
from fake_cloud import FakeNode

from fastlaunch.core.errors import NoCapacity, NotAuthorised
from fastlaunch.core.plan import RunState
from fastlaunch.runs.launcher import Submission


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path)


def test_ctrl_c_lets_the_node_write_its_end(world: World) -> None:
    def interrupt(node: FakeNode) -> None:
        node.train(
            upto=1, how=lambda run_id: {"steps": 80, "header": {"steps": 200}, "status": "interrupted"}
        )
        world.clock.at(150, lambda: setattr(world.stop, "by", "Ctrl-C"))

    world.aws.node = interrupt
    (run,) = world.submit()
    assert (run.state, run.reason) == (RunState.INTERRUPTED, "stopped by Ctrl-C")
    assert run.summary is not None and run.summary.num_steps == 80
    assert any(key.endswith("/abort") for _, key in world.aws.objects)
    assert world.aws.calls["terminate"] == 0
    assert world.ledger.attempts_of(run.id)[0].state is RunState.INTERRUPTED
    assert any("stopping instance i-0001" in line for line in world.told)


def test_a_node_that_does_not_stop_is_ended(world: World) -> None:
    def interrupt(node: FakeNode) -> None:
        node.stops = False
        node.train(upto=1)
        world.clock.at(150, lambda: setattr(world.stop, "by", "Ctrl-C"))

    world.aws.node = interrupt
    (run,) = world.submit(jobs=(job(), job("fp32")))[:1]
    assert run.state is RunState.COMPLETED
    other = world.runs()[1]
    assert (other.state, other.reason) == (RunState.CANCELLED, "stopped by Ctrl-C before it started")
    assert world.aws.live() == [] and world.aws.calls["terminate"] >= 1
    lived_s = world.ledger.attempts_of(run.id)[0].billing.lived_s or 0
    assert 150 + 240 <= lived_s <= 150 + 270


def test_ctrl_c_during_provisioning_ends_what_was_started(world: World) -> None:
    world.aws.node = lambda node: setattr(world.stop, "by", "Ctrl-C")
    (run,) = world.submit()
    assert (run.state, run.reason) == (RunState.CANCELLED, "stopped by Ctrl-C before it started")
    assert world.aws.live() == []
    # It had not booted: there was nothing to wait for.
    assert (world.ledger.attempts_of(run.id)[0].billing.lived_s or 0) < 60


def test_ctrl_c_between_two_places_starts_nothing_more(world: World) -> None:
    world.aws.answers = [NoCapacity("none")]
    launcher = world.launcher()
    tell = lambda line: setattr(world.stop, "by", "SIGTERM")  # noqa: E731
    submission = Submission(placements=(A, B), jobs_at=lambda at: (job(),), max_minutes=120)
    (run,) = replace(launcher, report=tell).submit(submission, command="x")
    assert len(world.aws.requests) == 1
    assert (run.state, run.reason) == (RunState.CANCELLED, "stopped by SIGTERM")


def test_a_second_ctrl_c_ends_the_machine_at_once(world: World) -> None:
    def twice() -> None:
        world.stop.by = "Ctrl-C"
        world.clock.at(15, interrupt)

    def interrupt() -> None:
        raise KeyboardInterrupt

    def hang(node: FakeNode) -> None:
        node.stops = False
        node.train(upto=0)
        world.clock.at(100, twice)

    world.aws.node = hang
    with pytest.raises(KeyboardInterrupt):
        world.submit()
    assert world.aws.live() == []
    assert any("is terminated" in line for line in world.told)
    assert world.ledger.unfinished_attempts("ec2")[0].reason == "stopped by Ctrl-C"


def test_a_second_ctrl_c_during_the_request_says_what_may_be_running(world: World) -> None:
    def interrupt(node: FakeNode) -> None:
        world.stop.by = "Ctrl-C"
        raise KeyboardInterrupt

    world.aws.node = interrupt
    with pytest.raises(KeyboardInterrupt):
        world.submit()
    (run,) = world.runs()
    assert any("may be running in us-east-1" in line and f"{run.id}-a1" in line for line in world.told)
    assert run.state is RunState.RUNNING
    assert world.ledger.unfinished_attempts("ec2")[0].handle is None


def test_a_machine_that_cannot_be_ended_is_told_with_the_command(world: World) -> None:
    def interrupt(node: FakeNode) -> None:
        def fail() -> None:
            world.aws.refuse("describe_instances", *[NotAuthorised("expired")] * 50)
            raise RuntimeError("a bug")

        node.train()
        world.clock.at(90, fail)

    world.aws.node = interrupt
    with pytest.raises(RuntimeError, match="a bug"):
        world.submit()
    (line,) = [line for line in world.told if "may still be running" in line]
    assert f"fastlaunch cancel {world.runs()[0].id}" in line and "within 120 min" in line


# Detached


def test_ctrl_c_after_a_cancel_that_did_not_stop_it_stops_it(world: World) -> None:
    def cancel_in_vain(node: FakeNode) -> None:
        node.train(upto=0)
        (attempt,) = world.ledger.unfinished_attempts("ec2")
        note = "stopped by fastlaunch cancel"
        world.clock.at(90, lambda: world.ledger.explain_attempt(attempt.id, note))
        world.clock.at(120, lambda: setattr(world.stop, "by", "Ctrl-C"))

    world.aws.node = cancel_in_vain
    (run,) = world.submit()
    assert any(key.endswith("/abort") for _, key in world.aws.objects)
    assert run.state is RunState.CANCELLED and world.aws.live() == []


@pytest.mark.parametrize("num_cancelled", [1, 2])
def test_what_was_cancelled_while_it_was_placed_is_not_started(world: World, num_cancelled: int) -> None:
    world.aws.answers = [NoCapacity("none")]

    def cancel_meanwhile(line: str) -> None:
        for run in world.runs()[:num_cancelled]:
            world.ledger.set_state(run.id, RunState.CANCELLED, "cancelled before it started")

    submission = Submission(
        placements=(A, B), jobs_at=lambda at: (job(), job("fp32")), max_minutes=120, detach=True
    )
    runs = replace(world.launcher(), report=cancel_meanwhile).submit(submission, command="x")
    states = [RunState.CANCELLED] * num_cancelled + [RunState.RUNNING] * (2 - num_cancelled)
    assert [run.state for run in runs] == states
    assert len(world.aws.requests) == 3 - num_cancelled
    assert [one.run_ids for one in world.ledger.unfinished_attempts("ec2")] == [
        (run.id,) for run in runs[num_cancelled:]
    ]


def test_a_start_that_cannot_be_noted_is_told(world: World) -> None:
    full = sqlite3.connect(world.ledger.path)
    # As on a full disk: what is written for the start is refused.
    full.execute(
        "CREATE TRIGGER full BEFORE UPDATE OF handle ON attempts"
        " BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
    )
    full.close()
    with pytest.raises(sqlite3.IntegrityError, match="disk is full"):
        world.submit()
    assert world.aws.live() == ["i-0001"]
    (line,) = [line for line in world.told if "may be running in us-east-1" in line]
    assert "fastlaunch cancel" in line

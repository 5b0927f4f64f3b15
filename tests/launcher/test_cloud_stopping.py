"""A submission on EC2 that is stopped, at any moment."""

import sqlite3
from functools import partial

import pytest
from cloud_world import A, B, World, job
from fake_cloud import HALF, FakeNode

from fastlaunch.core.errors import NoCapacity, NotAuthorised
from fastlaunch.core.plan import Ending, RunState

BEFORE_START = "stopped by Ctrl-C before it started"


def ctrl_c(world: World) -> None:
    world.stop.by = "Ctrl-C"


def test_ctrl_c_lets_the_node_write_its_end(world: World) -> None:
    world.aws.node = lambda node: node.train(upto=1, how=lambda run_id: HALF)
    world.clock.at(150, lambda: ctrl_c(world))
    (run,) = world.submit()
    assert (run.state, run.reason) == (RunState.INTERRUPTED, "stopped by Ctrl-C")
    assert run.summary is not None and run.summary.num_steps == 20
    assert any(key.endswith("/abort") for _, key in world.aws.objects)
    assert world.aws.calls["terminate"] == 0
    assert world.attempt(run).state is RunState.INTERRUPTED
    assert world.reported("stopping instance i-0001")


def test_a_node_that_does_not_stop_is_ended(world: World) -> None:
    def be_deaf(node: FakeNode) -> None:
        node.stops = False
        node.train(upto=1)

    world.aws.node = be_deaf
    world.clock.at(150, lambda: ctrl_c(world))
    run, other = world.submit(jobs=(job(), job("fp32")))
    assert run.state is RunState.COMPLETED
    assert (other.state, other.reason) == (RunState.CANCELLED, BEFORE_START)
    assert world.aws.live() == [] and world.aws.calls["terminate"] >= 1
    lived_s = world.attempt(run).billing.lived_s or 0
    assert 150 + 240 <= lived_s <= 150 + 270


def test_ctrl_c_during_provisioning_ends_what_was_started(world: World) -> None:
    world.aws.node = lambda node: ctrl_c(world)
    (run,) = world.submit()
    assert (run.state, run.reason) == (RunState.CANCELLED, BEFORE_START)
    assert world.aws.live() == []
    # It had not booted: there was nothing to wait for.
    assert (world.attempt(run).billing.lived_s or 0) < 60


def test_ctrl_c_between_two_places_starts_nothing_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.aws.answers = [NoCapacity("none")]
    monkeypatch.setattr(world, "report", lambda line: ctrl_c(world))
    (run,) = world.submit(A, B)
    assert len(world.aws.requests) == 1
    assert (run.state, run.reason) == (RunState.CANCELLED, "stopped by Ctrl-C")


def test_a_second_ctrl_c_ends_the_machine_at_once(world: World) -> None:
    def again() -> None:
        raise KeyboardInterrupt

    def hang(node: FakeNode) -> None:
        node.stops = False
        node.train(upto=0)
        world.clock.at(100, lambda: ctrl_c(world))
        world.clock.at(115, again)

    world.aws.node = hang
    with pytest.raises(KeyboardInterrupt):
        world.submit()
    assert world.aws.live() == []
    assert world.reported("was told to end")
    assert world.ledger.unfinished_attempts("ec2")[0].reason == "stopped by Ctrl-C"


def test_a_second_ctrl_c_during_the_request_says_what_may_be_running(world: World) -> None:
    def interrupt(node: FakeNode) -> None:
        ctrl_c(world)
        raise KeyboardInterrupt

    world.aws.node = interrupt
    with pytest.raises(KeyboardInterrupt):
        world.submit()
    (run,) = world.ledger.select()
    assert world.reported("may be running in us-east-1", f"{run.id}-a1")
    assert run.state is RunState.RUNNING
    assert world.ledger.unfinished_attempts("ec2")[0].handle is None


def test_a_machine_that_cannot_be_ended_is_reported_with_the_command(world: World) -> None:
    def fail() -> None:
        world.aws.refuse("describe_instances", *[NotAuthorised("expired")] * 50)
        raise RuntimeError("a bug")

    def train(node: FakeNode) -> None:
        node.train()
        world.clock.at(90, fail)

    world.aws.node = train
    with pytest.raises(RuntimeError, match="a bug"):
        world.submit()
    (run,) = world.ledger.select()
    assert world.reported("may still be running", f"fastlaunch cancel {run.id}", "within 120 min")


def test_ctrl_c_after_a_cancel_that_did_not_stop_it_stops_it(world: World) -> None:
    def cancel_in_vain(node: FakeNode) -> None:
        node.train(upto=0)
        (attempt,) = world.ledger.unfinished_attempts("ec2")
        stop = partial(world.ledger.note_stop, attempt.id, "fastlaunch cancel", ending=Ending.CANCELLED)
        world.clock.at(90, stop)
        world.clock.at(120, lambda: ctrl_c(world))

    world.aws.node = cancel_in_vain
    (run,) = world.submit()
    assert any(key.endswith("/abort") for _, key in world.aws.objects)
    assert run.state is RunState.CANCELLED and world.aws.live() == []


@pytest.mark.parametrize("num_cancelled", [1, 2])
def test_what_was_cancelled_while_it_was_placed_is_not_started(
    world: World, monkeypatch: pytest.MonkeyPatch, num_cancelled: int
) -> None:
    world.aws.answers = [NoCapacity("none")]

    def cancel_meanwhile(line: str) -> None:
        for run in world.ledger.select()[:num_cancelled]:
            world.ledger.set_state(run.id, RunState.CANCELLED, "cancelled before it started")

    monkeypatch.setattr(world, "report", cancel_meanwhile)
    runs = world.submit(A, B, jobs=(job(), job("fp32")), detach=True)
    states = [RunState.CANCELLED] * num_cancelled + [RunState.RUNNING] * (2 - num_cancelled)
    assert [run.state for run in runs] == states
    assert len(world.aws.requests) == 3 - num_cancelled
    assert [each.run_ids for each in world.ledger.unfinished_attempts("ec2")] == [
        (run.id,) for run in runs[num_cancelled:]
    ]


def test_a_start_that_cannot_be_noted_is_reported(world: World) -> None:
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
    assert world.reported("may be running in us-east-1", "fastlaunch cancel")

"""`cancel` of runs on AWS: with and without a machine, and beside a launcher."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from fake_cloud import FakeNode
from unfollowed_world import AFTER_FORGETTING_S, World, opened_world

from fastlaunch.core import locks
from fastlaunch.core.errors import Throttled, Unreachable, UserError
from fastlaunch.core.plan import RunState


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with opened_world(tmp_path) as found:
        yield found


def hang(node: FakeNode) -> None:
    node.train(upto=0)


def test_cancel_stops_the_machine_with_all_its_runs(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.aws.node = hang
    run = world.add(num_runs=2)
    world.clock.sleep(120)
    other = next(one for one in world.ledger.select() if one.id != run.id)
    assert world.cancel(run) is RunState.CANCELLED
    assert other.id in capsys.readouterr().err
    assert world.state(other) == (RunState.CANCELLED, "stopped by fastlaunch cancel before it started")
    assert world.aws.live() == [] and world.aws.calls["terminate"] == 0
    (attempt,) = world.ledger.attempts_of(run.id)
    assert attempt.ended_at is not None and attempt.billing.billed_s
    assert world.aws.instances["i-0001"].state == "terminated"


def test_cancel_is_patient_with_a_network_that_fails_for_a_while(world: World) -> None:
    world.aws.node = lambda node: node.train(
        upto=1, how=lambda run_id: {"steps": 60, "header": {"steps": 200}, "status": "interrupted"}
    )
    run = world.add()
    world.clock.sleep(200)
    # First the bucket, then the machine.
    world.aws.refuse("list_objects", Unreachable("no answer"), Throttled("slow down"))
    world.aws.refuse("put_object", Unreachable("no answer"))
    world.aws.refuse("describe_instances", *[Unreachable("no answer")] * 6)
    assert world.cancel(run) is RunState.INTERRUPTED
    assert world.aws.calls["terminate"] == 0
    assert world.aws.live() == []


def test_cancel_finds_a_machine_that_nobody_noted(world: World) -> None:
    world.aws.node = hang
    run = world.add(noted=False)
    world.clock.sleep(120)
    assert world.cancel(run) is RunState.CANCELLED
    assert world.aws.live() == []


def test_cancel_before_it_is_known_whether_there_is_a_machine(world: World) -> None:
    world.aws.node, world.aws.hidden_s = hang, 200
    run = world.add(noted=False)
    with pytest.raises(UserError, match="is not known yet") as raised:
        world.cancel(run)
    assert "fastlaunch reap --region us-east-1" in (raised.value.hint or "")
    world.clock.sleep(201)
    assert world.cancel(run) is RunState.CANCELLED
    assert world.aws.live() == []


def test_cancel_of_a_request_that_was_never_sent(world: World) -> None:
    run = world.add(sent=False)
    world.clock.sleep(AFTER_FORGETTING_S)
    assert world.cancel(run) is RunState.CANCELLED
    assert world.ledger.unfinished_attempts("ec2") == []


def test_cancel_while_the_launcher_starts_it_waits_for_the_launcher(world: World) -> None:
    world.aws.node = hang
    run = world.add(noted=False)
    (attempt,) = world.ledger.attempts_of(run.id)
    plan = world.ledger.plan_of(attempt.id)
    assert plan is not None
    world.clock.at(30, lambda: world.ledger.set_handle(attempt.id, world.backend.find(plan) or {}))
    lock = world.ledger.launcher_lock(run.submission_id)
    lock.parent.mkdir()
    before = world.clock.now()
    with locks.held(lock):
        assert world.cancel(run) is RunState.CANCELLED
    assert world.clock.now() - before >= timedelta(seconds=30)
    assert world.aws.live() == []


def test_cancel_of_a_run_that_ended_says_so(world: World) -> None:
    run = world.add()
    world.clock.sleep(600)
    world.reconcile()
    assert world.cancel(run) is RunState.COMPLETED
    assert world.aws.calls["terminate"] == 0


def test_a_cancelled_run_keeps_what_it_recorded(world: World) -> None:
    world.aws.node = lambda node: node.train(
        upto=1, how=lambda run_id: {"steps": 60, "header": {"steps": 200}, "status": "interrupted"}
    )
    run = world.add()
    world.clock.sleep(200)
    assert world.cancel(run) is RunState.INTERRUPTED
    found = world.ledger.get(run.id)
    assert found.reason == "stopped by fastlaunch cancel"
    assert found.summary is not None and found.summary.num_steps == 60


def test_cancel_between_two_places_ends_the_run_at_once(world: World) -> None:
    run = world.add(sent=False)
    (attempt,) = world.ledger.attempts_of(run.id)
    world.ledger.end_attempt(attempt.id, RunState.FAILED, reason="no capacity")
    lock = world.ledger.launcher_lock(run.submission_id)
    lock.parent.mkdir()
    before = world.clock.now()
    with locks.held(lock):
        assert world.cancel(run) is RunState.CANCELLED
    assert world.clock.now() == before


def test_cancel_between_two_machines_leaves_it_interrupted(world: World) -> None:
    run = world.add()
    (attempt,) = world.ledger.attempts_of(run.id)
    world.ledger.end_attempt(attempt.id, RunState.INTERRUPTED, reason="EC2 took the spot instance back")
    assert world.cancel(run) is RunState.INTERRUPTED
    assert world.state(run)[1] == "stopped by fastlaunch cancel"


def test_cancel_stops_the_machine_though_the_disk_is_full(world: World) -> None:
    world.aws.node = hang
    run = world.add()
    world.clock.sleep(120)
    (world.home / "runs").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        world.cancel(run)
    assert world.aws.live() == []


def test_cancel_that_is_interrupted_says_what_may_go_on(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    def deaf(node: FakeNode) -> None:
        node.stops = False
        node.train(upto=0)

    world.aws.node = deaf
    run = world.add()
    world.clock.sleep(120)
    world.clock.at(30, interrupt)
    with pytest.raises(KeyboardInterrupt):
        world.cancel(run)
    told = capsys.readouterr().err
    assert "i-0001 in us-east-1 was not seen to end" in told and f"fastlaunch cancel {run.id}" in told


def test_cancel_does_not_wait_for_a_machine_that_takes_long_to_shut_down(world: World) -> None:
    world.aws.node, world.aws.shutdown_s = hang, 1200
    run = world.add()
    world.clock.sleep(120)
    before = world.clock.now()
    assert world.cancel(run) is RunState.CANCELLED
    assert world.clock.now() - before < timedelta(minutes=2)

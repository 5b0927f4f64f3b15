"""`cancel` of runs on AWS: with and without a machine, and beside a launcher."""

from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from cloud_world import AFTER_FORGETTING_S, World, opened_world
from fake_cloud import HALF, FakeNode

from fastlaunch.core.activity import activity
from fastlaunch.core.errors import CloudRefused, Throttled, Unreachable, UserError
from fastlaunch.core.plan import RunState
from fastlaunch.lifecycle.cancel import siblings


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Its machines hang once they have booted."""
    with opened_world(tmp_path) as opened:
        opened.aws.node = lambda node: node.train(upto=0)
        yield opened


def test_cancel_stops_the_machine_with_all_its_runs(world: World) -> None:
    run = world.add(num_runs=2)
    world.clock.sleep(120)
    other = next(each for each in world.ledger.select() if each.id != run.id)
    assert siblings(world.ledger, run) == [other.id]
    assert world.cancel(run) is RunState.CANCELLED
    assert siblings(world.ledger, run) == []
    assert world.state(other) == (RunState.CANCELLED, "stopped by fastlaunch cancel before it started")
    assert world.aws.live() == [] and world.aws.calls["terminate"] == 0
    attempt = world.attempt(run)
    assert attempt.ended_at is not None and attempt.billing.billed_s
    assert world.aws.instances["i-0001"].state == "terminated"


def test_cancel_keeps_what_was_recorded_and_is_patient_with_a_network_that_fails(world: World) -> None:
    world.aws.node = lambda node: node.train(upto=1, how=lambda run_id: HALF)
    run = world.add()
    world.clock.sleep(200)
    # First the bucket, then the machine.
    world.aws.refuse("list_objects", Unreachable("no answer"), Throttled("slow down"))
    world.aws.refuse("put_object", Unreachable("no answer"))
    world.aws.refuse("describe_instances", *[Unreachable("no answer")] * 6)
    assert world.cancel(run) is RunState.INTERRUPTED
    assert world.aws.calls["terminate"] == 0
    assert world.aws.live() == []
    now = world.ledger.get(run.id)
    assert now.reason == "stopped by fastlaunch cancel"
    assert now.summary is not None and now.summary.num_steps == 20


@pytest.mark.parametrize("hidden_s", [0, 200])
def test_cancel_finds_a_machine_that_nobody_noted(world: World, hidden_s: int) -> None:
    world.aws.hidden_s = hidden_s
    run = world.add(noted=False)
    if hidden_s:
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
    run = world.add(noted=False)
    attempt, plan = world.attempt(run), world.plan_of(run)
    world.clock.at(30, lambda: world.ledger.set_handle(attempt.id, world.backend.find(plan) or {}))
    before = world.clock.now()
    with world.followed(run):
        assert world.cancel(run) is RunState.CANCELLED
    assert world.clock.now() - before >= timedelta(seconds=30)
    assert world.aws.live() == []


def test_cancel_of_a_run_that_ended_says_so(world: World) -> None:
    world.aws.node = lambda node: node.train()
    run = world.add()
    world.clock.sleep(600)
    world.reconcile()
    assert world.cancel(run) is RunState.COMPLETED
    assert world.aws.calls["terminate"] == 0


@pytest.mark.parametrize("had_machine", [False, True])
def test_cancel_between_two_attempts_ends_the_run_at_once(world: World, had_machine: bool) -> None:
    run = world.add(sent=had_machine)
    world.ledger.end_attempt(world.attempt(run).id, RunState.FAILED, reason="AWS took it, or has none")
    before = world.clock.now()
    with world.followed(run):
        assert world.cancel(run) is (RunState.INTERRUPTED if had_machine else RunState.CANCELLED)
    assert world.clock.now() == before


def test_cancel_stops_the_machine_though_the_disk_is_full(world: World) -> None:
    run = world.add()
    world.clock.sleep(120)
    (world.home / "runs").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        world.cancel(run)
    assert world.aws.live() == []


def test_cancel_that_is_interrupted_says_what_may_go_on(world: World) -> None:
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
    assert world.reported("i-0001 in us-east-1 was not seen to end", f"fastlaunch cancel {run.id}")


def test_cancel_says_what_it_waits_for_where_aws_shows_nothing(world: World) -> None:
    run = world.add()
    world.clock.sleep(120)
    world.aws.hidden_s = 10_000
    seen: list[str] = []
    with activity("stopping") as shown:
        for second in (20, 40):
            world.clock.at(second, lambda: seen.append(shown.line()))
        with suppress(CloudRefused):
            world.cancel(run)
    assert len(seen) == 2 and all("instance i-0001 in us-east-1" in line for line in seen)


def test_cancel_ends_a_machine_that_aws_shows_again_after_the_order(world: World) -> None:
    world.aws.node = lambda node: None  # It never boots.
    run = world.add()
    world.clock.sleep(3600)
    world.aws.hidden_s = 3630
    assert world.cancel(run) is RunState.CANCELLED
    assert world.aws.live() == []


def test_cancel_does_not_wait_for_a_machine_that_takes_long_to_shut_down(world: World) -> None:
    world.aws.shutdown_s = 1200
    run = world.add()
    world.clock.sleep(120)
    before = world.clock.now()
    assert world.cancel(run) is RunState.CANCELLED
    assert world.clock.now() - before < timedelta(minutes=2)

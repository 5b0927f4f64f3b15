"""Submissions of spot instances: taken back, gone on with, priced."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cloud_world import P5EN, WEST, A, B, World, make_world
from ec2_builders import job
from fake_cloud import FakeNode

from fastlaunch.core.errors import NoCapacity
from fastlaunch.core.plan import RunState
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.ledger.attempt_cost import attempt_cost


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path)


def spot(**changes: Any) -> JobSpec:
    return job(purchase="spot", checkpoint_every=20, **changes)


def taken_once(world: World, *, after_s: float, steps: int = 80) -> Callable[[FakeNode], None]:
    def node_does(node: FakeNode) -> None:
        if len(world.aws.instances) > 1:
            node.train(how=lambda run_id: {"steps": 200 - steps, "first_step": steps + 1})
            return
        node.train(
            upto=1, how=lambda run_id: {"steps": steps, "header": {"steps": 200}, "status": "interrupted"}
        )
        states = dict.fromkeys(node.run_ids(), "interrupted")
        world.clock.at(after_s - 60, lambda: node.say_last("interrupted", states, reason="spot"))
        world.clock.at(after_s, node.take_back)

    return node_does


def test_a_spot_interruption_is_gone_on_from(world: World) -> None:
    world.aws.node = taken_once(world, after_s=50 * 60)
    (run,) = world.submit(A, B, jobs=(spot(),))
    assert (run.state, run.reason) == (RunState.COMPLETED, None)
    assert run.summary is not None and run.summary.num_steps == 200
    one, two = world.ledger.attempts_of(run.id)
    assert (one.state, one.reason) == (RunState.INTERRUPTED, "EC2 took the spot instance back")
    assert (one.billing.source, one.billing.billed_s, one.billing.lived_s) == ("free", 0.0, 3000.0)
    assert attempt_cost(one, world.clock.now()).usd == 0
    # Candidates from the start, and only the minutes that remain.
    assert (two.token, two.max_minutes) == (f"{run.id}-a2", 70)
    assert [request["SubnetId"] for _, request in world.aws.requests] == ["subnet-a", "subnet-a"]
    assert run.price is not None and (run.price.purchase, run.price.usd_per_hour) == ("spot", 17.0)
    assert two.billing.usd_per_hour == 17.0
    states = [event.state for event in world.ledger.history(run.id)]
    assert states == ["planned", "running", "completed"]
    log = (world.home / "runs" / run.id / "log.txt").read_text()
    assert log == "training on i-0001\ntraining on i-0002\n"


def test_after_its_first_hour_an_interrupted_machine_is_billed(world: World) -> None:
    world.aws.node = taken_once(world, after_s=61 * 60)
    (run,) = world.submit(jobs=(spot(),))
    one = world.ledger.attempts_of(run.id)[0]
    assert (one.billing.source, one.billing.billed_s) == ("times", 3660.0)
    assert attempt_cost(one, world.clock.now()).usd == pytest.approx(17.0 * 3660 / 3600)


def test_too_little_time_left_is_not_gone_on_with(world: World) -> None:
    world.aws.node = taken_once(world, after_s=50 * 60)
    (run,) = world.submit(jobs=(spot(),), max_minutes=60)
    assert run.state is RunState.INTERRUPTED
    assert run.reason == "EC2 took its machine, and 10 minutes are too few"
    assert len(world.aws.instances) == 1


def test_what_is_completed_is_not_done_again(world: World) -> None:
    def node_does(node: FakeNode) -> None:
        if len(world.aws.instances) > 1:
            node.train(how=lambda run_id: {"recipe": "fp32"})
            return
        first, second = node.run_ids()
        node.train(upto=1)
        states = {first: "completed", second: "not-started"}
        world.clock.at(300, lambda: node.say_last("interrupted", states, reason="spot"))
        world.clock.at(400, node.take_back)

    world.aws.node = node_does
    first, second = world.submit(jobs=(spot(), replace(spot(), recipe=job("fp32").recipe)))
    assert [first.state, second.state] == [RunState.COMPLETED, RunState.COMPLETED]
    assert [token for _, token in world.tokens()] == [f"{first.id}-a1", f"{second.id}-a2"]
    assert len(world.ledger.attempts_of(first.id)) == 1


def test_no_capacity_for_going_on_leaves_it_interrupted(world: World) -> None:
    def node_does(node: FakeNode) -> None:
        taken_once(world, after_s=600)(node)
        world.aws.answers = [NoCapacity("none")]

    world.aws.node = node_does
    with pytest.raises(NoCapacity):
        world.submit(jobs=(spot(),))
    (run,) = world.runs()
    assert (run.state, run.reason) == (RunState.INTERRUPTED, "none")


def test_once_begun_it_goes_on_only_with_its_own_type_and_bucket(world: World) -> None:
    def node_does(node: FakeNode) -> None:
        taken_once(world, after_s=600)(node)
        world.aws.answers = [NoCapacity("none")] * 10

    world.aws.node = node_does
    with pytest.raises(NoCapacity):
        world.submit(A, B, WEST, P5EN, jobs=(spot(),))
    kinds = [(region, request["InstanceType"]) for region, request in world.aws.requests[1:]]
    assert kinds == [("us-east-1", "p5.48xlarge")] * 2


def test_spot_without_a_price_has_none(world: World) -> None:
    world.aws.spot_usd = None
    (run,) = world.submit(jobs=(spot(),))
    assert run.price is None
    assert attempt_cost(world.ledger.attempts_of(run.id)[0], world.clock.now()).usd is None


def test_a_discount_is_taken_off_the_list_price(world: World) -> None:
    world.discount = 0.25
    (run,) = world.submit()
    assert run.price is not None and run.price.usd_per_hour == A.usd_per_hour
    assert world.ledger.attempts_of(run.id)[0].billing.usd_per_hour == pytest.approx(0.75 * A.usd_per_hour)


def test_what_cannot_go_on_ends_though_its_machine_takes_long_to_shut_down(world: World) -> None:
    world.aws.node = taken_once(world, after_s=110 * 60)
    world.aws.shutdown_s = 1200
    (run,) = world.submit(jobs=(spot(),))
    assert run.state is RunState.INTERRUPTED
    assert "minutes are too few" in (run.reason or "")
    assert [one.id for one in world.ledger.unfinished_attempts("ec2")] == [1]

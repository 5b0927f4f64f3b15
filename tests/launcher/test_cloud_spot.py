"""Machines that AWS takes back: what is gone on with, where, and at what price."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cloud_world import P5EN, WEST, A, B, World, job
from ec2_builders import BLOCK, block_site
from fake_cloud import REST, FakeNode

from fastlaunch.core.errors import NoCapacity
from fastlaunch.core.plan import RunState
from fastlaunch.jobs.job import Job
from fastlaunch.ledger.attempt_cost import attempt_cost


def spot(**changes: Any) -> Job:
    return job(purchase="spot", checkpoint_every=20, **changes)


def taken_once(
    world: World, *, after_s: float, then: Callable[[], None] = lambda: None
) -> Callable[[FakeNode], None]:
    """What the first machine does, and the next one, which does the rest. then: called with the first."""

    def node_does(node: FakeNode) -> None:
        if len(world.aws.instances) > 1:
            node.train(how=lambda run_id: REST)
            return
        node.interrupt(after_s - 60, "spot")
        world.clock.at(after_s, node.take_back)
        then()

    return node_does


def test_a_spot_interruption_is_gone_on_from(world: World) -> None:
    world.aws.node = taken_once(world, after_s=20 * 60)
    (run,) = world.submit(A, B, jobs=(spot(),))
    assert (run.state, run.reason) == (RunState.COMPLETED, None)
    assert run.summary is not None and run.summary.num_steps == 40
    one, two = world.ledger.attempts_of(run.id)
    assert (one.state, one.reason) == (RunState.INTERRUPTED, "EC2 took the spot instance back")
    assert (one.billing.source, one.billing.billed_s, one.billing.lived_s) == ("free", 0.0, 1200.0)
    assert attempt_cost(one, world.clock.now()).usd == 0
    # Candidates from the start, and only the minutes that remain.
    assert (two.token, two.max_minutes) == (f"{run.id}-a2", 100)
    assert [request["SubnetId"] for _, request in world.aws.requests] == ["subnet-a", "subnet-a"]
    assert run.price is not None and (run.price.purchase, run.price.usd_per_hour) == ("spot", 17.0)
    assert two.billing.usd_per_hour == 17.0
    states = [event.state for event in world.ledger.history(run.id)]
    assert states == ["planned", "running", "completed"]
    log = (world.home / "runs" / run.id / "log.txt").read_text()
    assert log == "training on i-0001\ntraining on i-0002\n"


@pytest.mark.parametrize("shutdown_s", [40, 1200])
def test_too_little_time_left_is_not_gone_on_with(world: World, shutdown_s: int) -> None:
    world.aws.shutdown_s = shutdown_s
    world.aws.node = taken_once(world, after_s=10 * 60)
    (run,) = world.submit(jobs=(spot(),), max_minutes=20)
    assert run.state is RunState.INTERRUPTED
    assert "minutes are too few" in (run.reason or "")
    assert len(world.aws.instances) == 1
    # The attempt ends when the machine has.
    assert len(world.ledger.unfinished_attempts("ec2")) == (shutdown_s == 1200)


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


def test_once_begun_it_goes_on_only_with_its_own_type_and_bucket(world: World) -> None:
    def refuse_more() -> None:
        world.aws.answers = [NoCapacity("none")] * 10

    world.aws.node = taken_once(world, after_s=600, then=refuse_more)
    with pytest.raises(NoCapacity):
        world.submit(A, B, WEST, P5EN, jobs=(spot(),))
    kinds = [(region, request["InstanceType"]) for region, request in world.aws.requests[1:]]
    assert kinds == [("us-east-1", "p5.48xlarge")] * 2
    (run,) = world.ledger.select()
    assert run.state is RunState.INTERRUPTED and "none" in (run.reason or "")


def test_the_end_of_a_block_ends_the_run_and_nothing_goes_on(world: World) -> None:
    def end(node: FakeNode) -> None:
        node.interrupt(600, "block")
        world.clock.at(620, node.turn_off)

    world.aws.node = end
    in_block = job(purchase="capacity-block", reservation=BLOCK.reservation)
    (run,) = world.submit(block_site(), jobs=(in_block,))
    assert run.state is RunState.INTERRUPTED
    assert len(world.aws.requests) == 1
    assert world.attempt(run).reason == "the capacity block is about to end"

"""A submission in a capacity block: its cost is told two ways, and its end ends it."""

from pathlib import Path

import pytest
from cloud_world import World, make_world
from ec2_builders import BLOCK, block_site, job
from fake_cloud import FakeNode

from fastlaunch.core.plan import RunState
from fastlaunch.ledger.attempt_cost import attempt_cost, total_cost

IN_BLOCK = job(purchase="capacity-block", reservation=BLOCK.reservation)


@pytest.fixture
def world(tmp_path: Path) -> World:
    found = make_world(tmp_path)
    # One on list prices: what was paid for a block is what it cost.
    found.discount = 0.5
    return found


def test_what_a_block_costs_is_sunk_and_what_the_run_took_of_it_effective(world: World) -> None:
    (run,) = world.submit(block_site(), jobs=(IN_BLOCK,))
    assert run.state is RunState.COMPLETED
    assert run.price is not None
    assert (run.price.purchase, run.price.usd_per_hour) == ("capacity-block", 40.0)
    (attempt,) = world.ledger.attempts_of(run.id)
    cost = attempt_cost(attempt, world.clock.now())
    # $3,840 for four machines and a day, of which one took 180 s.
    assert (cost.usd, cost.sunk_usd) == (pytest.approx(2.0), 3840.0)
    assert cost.text == "$2.00 of the $3,840.00 paid before for the capacity block"
    plan = world.ledger.plan_of(attempt.id)
    assert plan is not None and plan.sunk_usd == 3840.0 and (plan.max_cost_usd or 0) > 0


def test_the_end_of_the_block_ends_the_run_and_nothing_goes_on(world: World) -> None:
    def end(node: FakeNode) -> None:
        how = {"steps": 80, "header": {"steps": 200}, "status": "interrupted"}
        node.train(upto=1, how=lambda run_id: how)
        states = dict.fromkeys(node.run_ids(), "interrupted")
        world.clock.at(600, lambda: node.say_last("interrupted", states, reason="block"))
        world.clock.at(620, node.turn_off)

    world.aws.node = end
    (run,) = world.submit(block_site(), jobs=(IN_BLOCK,))
    assert run.state is RunState.INTERRUPTED
    assert len(world.aws.requests) == 1
    assert world.ledger.attempts_of(run.id)[0].reason == "the capacity block is about to end"


def test_attempts_in_one_block_share_its_fee(world: World) -> None:
    runs = [world.submit(block_site(), jobs=(IN_BLOCK,))[0] for _ in range(2)]
    attempts = [one for run in runs for one in world.ledger.attempts_of(run.id)]
    cost = total_cost(attempts, world.clock.now())
    assert (cost.usd, cost.sunk_usd) == (pytest.approx(4.0), 3840.0)

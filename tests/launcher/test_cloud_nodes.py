"""A submission of several nodes on EC2: one request, one life, one end."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cloud_world import World, job, opened_world
from ec2_builders import site
from fake_cloud import BOOT_S, HALF, REST, FakeNode

from fastlaunch.core.errors import NoCapacity
from fastlaunch.core.plan import Ending, RunState
from fastlaunch.jobs.job import Job
from fastlaunch.ledger.attempt_cost import attempt_cost

A = site(zone="us-east-1a", subnets=("subnet-a",), placement_group="fastlaunch-us-east-1a")
B = site(zone="us-east-1b", subnets=("subnet-b",), placement_group="fastlaunch-us-east-1b")
#: What the records of two machines say.
TWO = {"num_nodes": 2, "world_size": 16}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with opened_world(tmp_path, site=A) as opened:
        opened.aws.node = lambda node: node.train(how=lambda run_id: TWO)
        yield opened


def pair(**changes: Any) -> Job:
    return job(num_nodes=2, num_gpus=16, **changes)


def test_two_machines_are_one_attempt(world: World) -> None:
    (run,) = world.submit(jobs=(pair(),))
    assert (run.state, run.reason) == (RunState.COMPLETED, None)
    assert run.summary is not None and (run.summary.setup.num_gpus, run.summary.setup.num_nodes) == (16, 2)
    assert len(world.aws.requests) == 1 and len(world.aws.instances) == 2
    attempt = world.attempt(run)
    assert (attempt.num_nodes, attempt.billing.billed_s) == (2, 180.0)
    assert attempt.handle is not None and attempt.handle["instance_ids"] == ["i-0001", "i-0002"]
    # Both are billed.
    usd = attempt_cost(attempt, world.clock.now()).usd
    assert usd == pytest.approx(2 * 180 / 3600 * A.usd_per_hour)
    assert world.aws.live() == []
    assert "2 x p5.48xlarge in us-east-1: pending" in world.shown.getvalue()


@pytest.mark.parametrize("num_booted", [0, 1])
def test_all_are_ended_where_not_all_boot(world: World, num_booted: int) -> None:
    def boot_some(node: FakeNode) -> None:
        if node.rank < num_booted:
            world.clock.at(BOOT_S, node.boot)

    world.aws.node = boot_some
    (run,) = world.submit(jobs=(pair(),))
    assert run.state is RunState.FAILED
    assert f"only {num_booted} of its 2 nodes booted within 12 minutes" in (run.reason or "")
    assert world.aws.live() == []
    assert 12 * 60 <= (world.attempt(run).billing.lived_s or 0) <= 15 * 60


@pytest.mark.parametrize("at_s", [30, BOOT_S + 30])
def test_those_that_are_left_of_a_pair_before_it_trains_are_ended_soon(world: World, at_s: int) -> None:
    def lose_one(node: FakeNode) -> None:
        world.clock.at(BOOT_S, node.boot)
        if node.rank == 1:
            reason = "Server.InternalError: Internal error on launch"
            world.clock.at(at_s, lambda: world.aws.end(node.instance_id, reason, "Server.InternalError"))

    world.aws.node = lose_one
    (run,) = world.submit(jobs=(pair(),))
    assert run.state is RunState.FAILED and "1 of its 2 nodes" in (run.reason or ""), run.reason
    assert world.aws.live() == []
    # Long before those that wait for it would give up.
    assert (world.attempt(run).billing.lived_s or 0) <= at_s + 240


@pytest.mark.parametrize("state", ["interrupted", "failed"])
@pytest.mark.parametrize("reason", ["Server.InternalError: Internal error", ""])
def test_a_lost_one_is_replaced_once_the_other_one_has_saved(world: World, state: str, reason: str) -> None:
    """Also if the training of the other one failed before its node had noticed: its peer was gone."""

    def lose_one(node: FakeNode) -> None:
        if len(world.aws.instances) > 2:
            node.train(how=lambda run_id: {**TWO, **REST})
        elif node.rank == 0:
            failed = {"status": "failed", "message": "RuntimeError: Connection closed by peer"}
            node.interrupt(
                700, "peer", how={**TWO, **HALF, **(failed if state == "failed" else {})}, state=state
            )
            world.clock.at(710, node.turn_off)
        else:
            world.clock.at(BOOT_S, node.boot)
            world.clock.at(300, lambda: world.aws.end(node.instance_id, reason, reason.partition(":")[0]))

    world.aws.node = lose_one
    (run,) = world.submit(jobs=(pair(checkpoint_every=20),))
    assert (run.state, run.reason) == (RunState.COMPLETED, None)
    assert run.summary is not None and run.summary.num_steps == 40
    one, two = world.ledger.attempts_of(run.id)
    assert (one.state, one.ending, two.num_nodes) == (RunState.INTERRUPTED, Ending.NODE_LOST, 2)
    assert (one.reason or "").startswith("node 1 ended without a last word")
    assert "Internal error" in (one.reason or "") or not reason
    # Minutes, and so the ceiling, are the submission's; no machine of the first attempt is left.
    assert two.max_minutes is not None and two.max_minutes <= 120 - 11
    assert world.aws.live() == [] and world.aws.calls["terminate"] == 0
    assert world.reported("ended without a last word", "going on, on another, from the last checkpoint")


def test_one_that_hangs_without_a_word_after_the_other_has_ended_is_ended_and_replaced(world: World) -> None:
    """EC2 calls it running, as if its network were gone."""

    def hang(node: FakeNode) -> None:
        if len(world.aws.instances) > 2:
            node.train(how=lambda run_id: {**TWO, **REST})
        elif node.rank == 0:
            node.interrupt(300, "peer", how={**TWO, **HALF})
            world.clock.at(310, node.turn_off)
        else:
            world.clock.at(BOOT_S, node.boot)

    world.aws.node = hang
    (run,) = world.submit(jobs=(pair(checkpoint_every=20),))
    assert (run.state, run.reason) == (RunState.COMPLETED, None)
    one, _ = world.ledger.attempts_of(run.id)
    assert one.ending is Ending.NODE_LOST and 35 * 60 < (one.billing.lived_s or 0) - 310 < 38 * 60
    assert world.reported("1 of its 2 nodes ended long before the others") and world.aws.live() == []


def test_no_more_are_replaced_than_are_allowed(world: World) -> None:
    def lose_one(node: FakeNode) -> None:
        if node.rank == 0:
            node.interrupt(400, "peer", how={**TWO, **HALF})
            world.clock.at(410, node.turn_off)
        else:
            world.clock.at(BOOT_S, node.boot)
            world.clock.at(300, lambda: world.aws.end(node.instance_id, "", ""))

    world.aws.node = lose_one
    (run,) = world.submit(jobs=(pair(checkpoint_every=20),))
    assert run.state is RunState.INTERRUPTED and "--max-replacements 2" in (run.reason or "")
    assert len(world.aws.requests) == 3 and world.aws.live() == []


def test_what_one_of_them_takes_along_is_gone_on_with_on_others(world: World) -> None:
    def take_one(node: FakeNode) -> None:
        if len(world.aws.instances) > 2:
            node.train(how=lambda run_id: {**TWO, **REST})
            return
        is_taken = node.rank == 1
        node.interrupt(240, "spot" if is_taken else "peer", how={**TWO, **HALF})
        world.clock.at(300, node.take_back if is_taken else node.turn_off)

    world.aws.node = take_one
    (run,) = world.submit(jobs=(pair(purchase="spot", checkpoint_every=20),))
    assert (run.state, run.reason) == (RunState.COMPLETED, None)
    assert run.summary is not None and run.summary.num_steps == 40
    one, two = world.ledger.attempts_of(run.id)
    assert (one.state, two.num_nodes) == (RunState.INTERRUPTED, 2)
    # Minutes are of the job, not of each machine.
    assert two.max_minutes == 120 - 5
    assert world.reported("took a spot instance back: going on")


def test_too_few_machines_are_none_and_the_next_zone_is_tried(world: World) -> None:
    world.aws.answers = ["few"]
    (run,) = world.submit(A, B, jobs=(pair(),))
    assert run.state is RunState.COMPLETED
    assert [token for _, token in world.tokens()] == [f"{run.id}-a1", f"{run.id}-a2"]
    assert world.aws.instances["i-0001"].state == "terminated" and world.aws.live() == []
    world.aws.answers = ["few"]
    with pytest.raises(NoCapacity, match="1 of 2"):
        world.submit(jobs=(pair(),))

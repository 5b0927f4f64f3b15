"""Machines with a faulty GPU: replaced by others, within the minutes and the ceiling of the submission."""

from collections.abc import Callable

import pytest
from cloud_world import WEST, A, B, World, job
from fake_cloud import HALF, REST, FakeNode

from fastlaunch.backends.site import Site
from fastlaunch.core.errors import NoCapacity
from fastlaunch.core.plan import RunState
from fastlaunch.jobs.options import Options
from fastlaunch.ledger.attempt_cost import total_cost
from fastlaunch.lifecycle.launcher import Submission
from fastlaunch.lifecycle.monitor import LOOK_INTERVAL_S
from fastlaunch.placement.cost_ceiling import cost_ceiling

FAULT = "GPU 3: a row remap is pending"
IN_WORDS = f"its machine is faulty: {FAULT}"


def faulty(num: int, *, after_s: float = 300) -> Callable[[FakeNode], None]:
    """The first `num` machines find a fault before their first run, and the next one is sound."""

    def node_does(node: FakeNode) -> None:
        if len(node.aws.instances) > num:
            node.train()
            return
        node.aws.clock.at(60, node.boot)
        states = dict.fromkeys(node.run_ids(), "not-started")
        node.aws.clock.at(after_s, lambda: node.say_last("hardware", states, reason=FAULT))
        node.aws.clock.at(after_s, node.turn_off)

    return node_does


def test_a_faulty_machine_is_replaced_and_the_run_is_none_the_worse(world: World) -> None:
    world.aws.node = faulty(2)
    first, second = world.submit(A, B, jobs=(job(), job()))
    assert {(run.state, run.reason) for run in (first, second)} == {(RunState.COMPLETED, None)}
    one, two, three = world.ledger.attempts_of(first.id)
    assert [(each.state, each.reason) for each in (one, two)] == [(RunState.INTERRUPTED, IN_WORDS)] * 2
    assert three.state is RunState.COMPLETED
    assert world.reported(IN_WORDS, "going on, on another")


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize(("max_replacements", "num_machines"), [(0, 1), (1, 2), (2, 3)])
def test_no_more_machines_are_replaced_than_are_allowed(
    world: World, max_replacements: int, num_machines: int, detach: bool
) -> None:
    world.aws.node = faulty(9)
    submission = Submission(
        placements=(A,),
        jobs_at=lambda at: (job(),),
        options=Options(max_replacements=max_replacements, detach=detach),
    )
    (run,) = world.launcher().submit(submission, command="fastlaunch submit")
    # What nobody follows is replaced by looks.
    for _ in range(5 * detach):
        world.clock.sleep(400)
        world.reconcile()
        world.launcher().go_on()
    no_more = f"--max-replacements {max_replacements}"
    state, reason = world.state(run)
    assert state is RunState.INTERRUPTED
    assert reason == (IN_WORDS if detach else f"{IN_WORDS}; {no_more} allows no other")
    assert world.reported(no_more) or not detach
    assert len(world.aws.instances) == num_machines and world.aws.live() == []


@pytest.mark.parametrize("at", [B, WEST])
def test_of_a_detached_submission_the_next_look_replaces_it(world: World, at: Site) -> None:
    world.aws.node = faulty(1)
    runs = world.submit(A, at, jobs=(job(), job()), detach=True)
    world.clock.sleep(400)
    world.reconcile()
    assert world.state(runs[0]) == (RunState.INTERRUPTED, IN_WORDS)
    # Its own place has none: nothing has begun, so that every place will do.
    world.aws.answers = [NoCapacity("none")]
    assert world.launcher().go_on() is False
    world.clock.sleep(3600)
    world.reconcile()
    assert {world.state(run) for run in runs} == {(RunState.COMPLETED, None)}
    one, _, two = world.ledger.attempts_of(runs[0].id)
    assert (two.region, two.run_ids) == (at.region, one.run_ids)
    assert two.max_minutes is not None and two.max_minutes < 120


def test_replacements_share_the_minutes_and_so_the_ceiling(world: World) -> None:
    """However late the faults come, all machines together cost no more than one that hangs."""

    def node_does(node: FakeNode) -> None:
        faulty(2, after_s=50 * 60)(node)
        if len(node.aws.instances) == 3:
            # It hangs, for as long as it may.
            node.aws.clock.planned = []

    world.aws.node = node_does
    (run,) = world.submit(max_minutes=120)
    attempts = world.ledger.attempts_of(run.id)
    assert len(attempts) == 3
    assert [attempt.max_minutes for attempt in attempts] == [120, 70, 20]
    cost = total_cost(attempts, world.clock.now()).usd
    # Ten seconds later the launcher sees that it is time to end it.
    look_usd = LOOK_INTERVAL_S / 3600 * A.usd_per_hour
    ceiling = cost_ceiling([A], num_nodes=1, max_minutes=120)
    assert cost is not None and cost == pytest.approx(ceiling.usd + look_usd)


def test_with_too_few_minutes_left_nothing_is_replaced(world: World) -> None:
    world.aws.node = faulty(1, after_s=10 * 60)
    (run,) = world.submit(max_minutes=20)
    assert run.state is RunState.INTERRUPTED and len(world.aws.instances) == 1
    assert (run.reason or "").startswith(f"{IN_WORDS}, and ") and "minutes are too few" in (run.reason or "")


def test_a_run_that_a_fault_broke_is_no_failure_and_goes_on(world: World) -> None:
    """Its record says that it failed; another run, which failed by itself before, stays so."""

    def node_does(node: FakeNode) -> None:
        if len(world.aws.instances) > 1:
            node.train(how=lambda run_id: REST)
            return
        broken, hit = node.run_ids()
        failed = {**HALF, "status": "failed", "message": "CUDA error: unspecified launch failure"}
        node.train(
            upto=2,
            how=lambda run_id: (
                failed if run_id == hit else {**failed, "recipe": "fp32", "message": "ValueError"}
            ),
        )
        states, codes = {broken: "failed", hit: "interrupted"}, {"interrupted": 1}
        reason = "Xid 79 at 0000:53:00 (fallen off the bus)"
        world.clock.at(250, lambda: node.say_last("hardware", states, reason=reason, exit_codes=codes))
        world.clock.at(260, node.turn_off)

    world.aws.node = node_does
    broken, hit = world.submit(jobs=(job("fp32", checkpoint_every=20), job(checkpoint_every=20)))
    assert broken.state is RunState.FAILED and "ValueError" in (broken.reason or "")
    assert (hit.state, hit.reason) == (RunState.COMPLETED, None)
    assert hit.summary is not None and hit.summary.num_steps == 40
    assert [len(world.ledger.attempts_of(run.id)) for run in (broken, hit)] == [1, 2]

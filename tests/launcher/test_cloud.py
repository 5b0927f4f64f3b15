"""A submission on EC2 from its rows to a machine: where it is tried, what is noted, what is not known."""

from collections.abc import Mapping
from typing import Any

import pytest
from cloud_world import P5EN, WEST, A, B, World, job
from ec2_builders import BLOCK, block_site
from fake_cloud import BOOT_S, FakeNode

from fastlaunch.core.errors import (
    BadConfiguration,
    CloudRefused,
    NoCapacity,
    NotAuthorised,
    QuotaExceeded,
    Throttled,
    Unreachable,
)
from fastlaunch.core.plan import RunState
from fastlaunch.ledger.attempt_cost import attempt_cost
from fastlaunch.ledger.ledger import Ledger


def test_a_plain_run(world: World) -> None:
    world.discount = 0.25
    (run,) = world.submit()
    assert (run.state, run.reason, run.instance) == (RunState.COMPLETED, None, "p5.48xlarge")
    assert run.summary is not None and run.summary.setup.num_gpus == 8
    assert run.price is not None and run.price.usd_per_hour == A.usd_per_hour
    assert run.price.purchase == "on-demand"
    attempt = world.attempt(run)
    assert (attempt.state, attempt.zone) == (RunState.COMPLETED, "us-east-1a")
    # One run: booted after 60 s, done at 120, turned off at 180.
    assert (attempt.billing.source, attempt.billing.billed_s) == ("times", BOOT_S + 120)
    cost = attempt_cost(attempt, world.clock.now())
    assert cost.is_final and cost.usd == pytest.approx(0.75 * 180 / 3600 * A.usd_per_hour)
    assert world.aws.live() == []
    assert (world.home / "runs" / run.id / "log.txt").read_text() == "training on i-0001\n"
    assert (world.home / "runs" / run.id / "node-a1.log").read_text() == "pulling the image\n"
    shown = world.shown.getvalue()
    assert "p5.48xlarge in us-east-1: pending" in shown
    assert "instance i-0001 in us-east-1: waiting for the machine to boot" in shown
    assert "step 40/40" in shown and shown.rstrip().endswith("bf16: completed")


def test_rows_and_plan_are_there_before_anything_is_asked_for(world: World) -> None:
    seen: list[Any] = []

    def look(node: FakeNode) -> None:
        with Ledger(world.ledger.path) as other:
            for run in other.select():
                (attempt,) = other.attempts_of(run.id)
                plan = other.plan_of(attempt.id)
                seen.append((run.state, attempt.state, attempt.handle, plan and plan.request))
        node.train()

    world.aws.node = look
    world.submit(jobs=(job(), job("fp32")))
    request = world.aws.requests[0][1]
    # What is sent is what the plan says, byte by byte.
    assert seen == [(RunState.PLANNED, RunState.PLANNED, None, request)] * 2


def test_several_runs_on_one_machine(world: World) -> None:
    def some(node: FakeNode) -> None:
        _, second, _ = node.run_ids()
        failed = {"recipe": "fp32", "status": "out_of_memory", "message": "CUDA out of memory"}
        how: Mapping[str, Mapping[str, Any]] = {second: failed}
        node.train(states={second: "failed"}, how=lambda run_id: how.get(run_id, {}))

    world.aws.node = some
    first, second, third = world.submit(jobs=(job(), job("fp32"), job(seed=1)))
    assert first.state is RunState.COMPLETED
    assert (second.state, second.reason) == (RunState.FAILED, "out of memory on rank 0: CUDA out of memory")
    # Its record says seed 0: what is measured is not what was asked for.
    assert third.state is RunState.FAILED and "seed 0 for 1" in (third.reason or "")
    assert len(world.aws.requests) == 1
    attempt = world.attempt(third)
    assert (attempt.state, len(attempt.run_ids)) == (RunState.FAILED, 3)
    assert "[2/3] fp32: failed" in world.shown.getvalue()


def test_what_a_block_costs_is_sunk_and_what_the_run_took_of_it_effective(world: World) -> None:
    # A discount is one on list prices: what was paid for a block is what it cost.
    world.discount = 0.5
    in_block = job(purchase="capacity-block", reservation=BLOCK.reservation)
    (run,) = world.submit(block_site(), jobs=(in_block,))
    assert run.state is RunState.COMPLETED and run.price is not None
    assert (run.price.purchase, run.price.usd_per_hour) == ("capacity-block", 40.0)
    # $3,840 for four machines and a day, of which one took 180 s.
    cost = attempt_cost(world.attempt(run), world.clock.now())
    assert (cost.usd, cost.sunk_usd) == (pytest.approx(2.0), 3840.0)
    plan = world.plan_of(run)
    assert plan.sunk_usd == 3840.0 and (plan.max_cost_usd or 0) > 0


# Places


def test_no_capacity_leads_to_the_next_zone_region_and_type(world: World) -> None:
    world.aws.answers = [NoCapacity("none in a"), NoCapacity("none in b"), NoCapacity("none in the west")]
    (run,) = world.submit(A, B, WEST, P5EN)
    regions = ["us-east-1", "us-east-1", "us-west-2", "us-east-1"]
    assert world.tokens() == [(region, f"{run.id}-a{n}") for n, region in enumerate(regions, start=1)]
    subnets = [request["SubnetId"] for _, request in world.aws.requests]
    assert subnets == ["subnet-a", "subnet-b", "subnet-w", "subnet-a"]
    assert (run.state, run.instance) == (RunState.COMPLETED, "p5en.48xlarge")
    assert run.spec is not None and run.spec["instance"] == "p5en.48xlarge"
    assert run.price is not None and run.price.instance == "p5en.48xlarge"
    refused = world.ledger.attempts_of(run.id)[:3]
    assert {(each.state, each.billing.billed_s) for each in refused} == {(RunState.FAILED, None)}
    assert [each.reason for each in refused] == ["none in a", "none in b", "none in the west"]
    assert attempt_cost(refused[0], world.clock.now()).usd == 0


def test_a_quota_is_not_asked_in_another_zone(world: World) -> None:
    world.aws.answers = [QuotaExceeded("no vCPUs")]
    (run,) = world.submit(A, B, P5EN, WEST)
    assert [region for region, _ in world.tokens()] == ["us-east-1", "us-west-2"]
    assert run.state is RunState.COMPLETED


@pytest.mark.parametrize("error", [NotAuthorised("denied"), BadConfiguration("no such profile")])
def test_what_no_place_can_mend_ends_it(world: World, error: CloudRefused) -> None:
    world.aws.answers = [error]
    with pytest.raises(type(error), match=error.message):
        world.submit(A, B)
    assert len(world.aws.requests) == 1
    assert world.state(world.ledger.select()[0]) == (RunState.FAILED, error.message)


def test_a_place_with_a_wrong_subnet_of_its_own_is_passed_over(world: World) -> None:
    world.aws.answers = [BadConfiguration("InvalidSubnetID.NotFound: subnet-a does not exist")]
    (run,) = world.submit(A, B)
    assert run.state is RunState.COMPLETED
    assert world.reported("us-east-1a", "subnet-a does not exist")


# No answer


@pytest.mark.parametrize("answer", [Throttled("slow down"), "lost"])
def test_a_request_without_an_answer_is_sent_again_as_it_was(
    world: World, answer: CloudRefused | str
) -> None:
    world.aws.answers = [answer, answer]
    (run,) = world.submit(A, B)
    sent = [request for _, request in world.aws.requests]
    assert len(sent) == 3 and sent[0] == sent[1] == sent[2]
    assert len(world.aws.instances) == 1
    assert (run.state, run.reason) == (RunState.COMPLETED, None)
    assert world.attempt(run).reason is None


def test_what_stays_unknown_is_reported_and_nothing_else_is_tried(world: World) -> None:
    world.aws.answers = [Unreachable("no answer")] * 200
    with pytest.raises(Unreachable) as raised:
        world.submit(A, B)
    (run,) = world.ledger.select()
    message, hint = raised.value.message, raised.value.hint or ""
    assert "one p5.48xlarge may be running in us-east-1" in message
    assert f"client token {run.id}-a1" in message and "within 120 min" in message
    assert f"fastlaunch cancel {run.id}" in hint and "fastlaunch reap --region us-east-1" in hint
    assert {token for _, token in world.tokens()} == {f"{run.id}-a1"}
    assert len(world.tokens()) < 30
    assert run.state is RunState.RUNNING and "is not known" in (run.reason or "")
    (attempt,) = world.ledger.unfinished_attempts("ec2")
    assert attempt.handle is None and "is not known" in (attempt.reason or "")


@pytest.mark.parametrize(
    "answers",
    [[Unreachable("no answer")] * 200, [NoCapacity("none")], [NotAuthorised("expired")]],
    ids=["silence", "no capacity", "expired"],
)
def test_after_silence_the_machine_that_is_found_by_its_token_is_followed(
    world: World, answers: list[CloudRefused]
) -> None:
    world.aws.answers = ["lost", *answers]
    (run,) = world.submit(A, B)
    assert run.state is RunState.COMPLETED
    assert len(world.aws.instances) == 1


def test_expired_credentials_after_silence_leave_it_unknown(world: World) -> None:
    world.aws.answers = [Unreachable("no answer"), NotAuthorised("expired")]
    with pytest.raises(Unreachable, match="may be running"):
        world.submit(A, B)
    assert len(world.aws.requests) == 2


def end_unheard(node: FakeNode) -> None:
    """The first answer was lost; the repeated request finds the machine ended."""
    node.turn_off()
    error = BadConfiguration("AWS refused it: IdempotentInstanceTerminated")
    error.code = "IdempotentInstanceTerminated"
    raise error


def test_a_machine_that_ended_before_it_was_shown_is_billed_when_it_is(world: World) -> None:
    world.aws.node, world.aws.hidden_s = end_unheard, 600.0
    with pytest.raises(Unreachable, match="may be running"):
        world.submit(A, B)
    (run,) = world.ledger.select()
    assert run.state is RunState.RUNNING
    world.clock.sleep(700.0)
    world.reconcile()
    attempt = world.attempt(run)
    assert attempt.handle is not None and attempt.billing.billed_s == 60.0


def test_a_token_whose_machine_has_ended_is_not_tried_elsewhere(world: World) -> None:
    world.aws.node = end_unheard
    (run,) = world.submit(A, B)
    assert len(world.aws.requests) == 1
    assert run.state is RunState.LOST
    attempt = world.attempt(run)
    assert attempt.handle is not None and attempt.billing.billed_s == 60.0

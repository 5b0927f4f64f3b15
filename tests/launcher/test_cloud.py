"""A submission on EC2 from its rows to a machine: where it is tried, what is noted, what is not known."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cloud_world import P5EN, WEST, A, B, World, make_world
from ec2_builders import job
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


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path)


def test_a_plain_run(world: World) -> None:
    (run,) = world.submit()
    assert (run.state, run.reason, run.instance) == (RunState.COMPLETED, None, "p5.48xlarge")
    assert run.summary is not None and run.summary.setup.num_gpus == 8
    assert run.price is not None and run.price.usd_per_hour == A.usd_per_hour
    assert run.price.purchase == "on-demand"
    (attempt,) = world.ledger.attempts_of(run.id)
    assert (attempt.state, attempt.zone) == (RunState.COMPLETED, "us-east-1a")
    assert attempt.billing.source == "times"
    # One run: booted after 60 s, done at 120, told and turned off at 180.
    assert attempt.billing.billed_s == BOOT_S + 120
    cost = attempt_cost(attempt, world.clock.now())
    assert cost.is_final and cost.usd == pytest.approx(180 / 3600 * A.usd_per_hour)
    assert world.aws.live() == []
    assert (world.home / "runs" / run.id / "log.txt").read_text() == "training on i-0001\n"
    assert (world.home / "runs" / run.id / "node-a1.log").read_text() == "pulling the image\n"
    shown = world.shown.getvalue()
    assert "p5.48xlarge in us-east-1: pending" in shown
    assert "instance i-0001 in us-east-1: booting" in shown
    assert "step 200/200" in shown and shown.rstrip().endswith("bf16: completed")


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
    assert seen == [(RunState.PLANNED, RunState.PLANNED, None, request)] * 2
    # What is sent is what the plan says, byte by byte.
    assert request["ClientToken"] == f"{world.runs()[0].id}-a1"


def test_several_runs_on_one_machine(world: World) -> None:
    def some(node: FakeNode) -> None:
        first, second, third = node.run_ids()
        how: Mapping[str, Mapping[str, Any]] = {
            first: {},
            second: {"recipe": "fp32", "status": "out_of_memory", "message": "CUDA out of memory"},
            third: {},
        }
        node.train(states={second: "failed"}, how=how.__getitem__)

    world.aws.node = some
    jobs = (job(), job("fp32"), job(seed=1))
    first, second, third = world.submit(jobs=jobs)
    assert first.state is RunState.COMPLETED
    assert (second.state, second.reason) == (
        RunState.FAILED,
        "out of memory on rank 0: CUDA out of memory",
    )
    # Its record says seed 0: what is measured is not what was asked for.
    assert (third.state, third.reason) == (
        RunState.FAILED,
        "the record contradicts the request: seed 0 for 1",
    )
    assert len(world.aws.requests) == 1
    (attempt,) = world.ledger.attempts_of(third.id)
    assert (attempt.state, len(attempt.run_ids)) == (RunState.FAILED, 3)
    assert "[2/3] fp32: failed" in world.shown.getvalue()


# Places


def test_no_capacity_leads_to_the_next_zone_region_and_type(world: World) -> None:
    world.aws.answers = [NoCapacity("none in a"), NoCapacity("none in b"), NoCapacity("none in the west")]
    (run,) = world.submit(A, B, WEST, P5EN)
    assert world.tokens() == [
        ("us-east-1", f"{run.id}-a1"),
        ("us-east-1", f"{run.id}-a2"),
        ("us-west-2", f"{run.id}-a3"),
        ("us-east-1", f"{run.id}-a4"),
    ]
    assert [request.get("SubnetId") for _, request in world.aws.requests] == [
        "subnet-a",
        "subnet-b",
        "subnet-w",
        "subnet-a",
    ]
    assert (run.state, run.instance) == (RunState.COMPLETED, "p5en.48xlarge")
    assert run.spec is not None and run.spec["instance"] == "p5en.48xlarge"
    assert run.price is not None and run.price.instance == "p5en.48xlarge"
    refused = world.ledger.attempts_of(run.id)[:3]
    assert [(one.state, one.reason, one.billing.billed_s) for one in refused] == [
        (RunState.FAILED, "none in a", None),
        (RunState.FAILED, "none in b", None),
        (RunState.FAILED, "none in the west", None),
    ]
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
    assert (world.runs()[0].state, world.runs()[0].reason) == (RunState.FAILED, error.message)


def test_a_place_with_a_wrong_subnet_of_its_own_is_passed_over(world: World) -> None:
    world.aws.answers = [BadConfiguration("InvalidSubnetID.NotFound: subnet-a does not exist")]
    (run,) = world.submit(A, B)
    assert run.state is RunState.COMPLETED
    assert any("us-east-1a" in line and "subnet-a does not exist" in line for line in world.told)


def test_too_many_requests_are_waited_out_with_the_same_request(world: World) -> None:
    world.aws.answers = [Throttled("slow down"), Throttled("slow down")]
    (run,) = world.submit(A, B)
    assert world.tokens() == [("us-east-1", f"{run.id}-a1")] * 3
    assert run.state is RunState.COMPLETED


# No answer


def test_a_request_without_an_answer_is_sent_again_as_it_was(world: World) -> None:
    world.aws.answers = ["lost", "lost"]
    (run,) = world.submit(A, B)
    sent = [request for _, request in world.aws.requests]
    assert len(sent) == 3 and sent[0] == sent[1] == sent[2]
    assert len(world.aws.instances) == 1
    assert (run.state, run.reason) == (RunState.COMPLETED, None)
    assert world.ledger.attempts_of(run.id)[0].reason is None


def test_what_stays_unknown_is_told_and_nothing_else_is_tried(world: World) -> None:
    world.aws.answers = [Unreachable("no answer")] * 200
    with pytest.raises(Unreachable) as raised:
        world.submit(A, B)
    (run,) = world.runs()
    message, hint = raised.value.message, raised.value.hint or ""
    assert "one p5.48xlarge may be running in us-east-1" in message
    assert f"client token {run.id}-a1" in message and "within 120 min" in message
    assert f"fastlaunch cancel {run.id}" in hint and "fastlaunch reap --region us-east-1" in hint
    assert {token for _, token in world.tokens()} == {f"{run.id}-a1"}
    assert len(world.tokens()) < 30
    assert run.state is RunState.RUNNING and "is not known" in (run.reason or "")
    (attempt,) = world.ledger.unfinished_attempts("ec2")
    assert attempt.handle is None and "is not known" in (attempt.reason or "")


def test_an_unanswered_request_that_is_found_by_its_token_is_followed(world: World) -> None:
    world.aws.answers = ["lost", *[Unreachable("no answer")] * 200]
    (run,) = world.submit(A, B)
    assert run.state is RunState.COMPLETED
    assert len(world.aws.instances) == 1


@pytest.mark.parametrize("error", [NoCapacity("none"), NotAuthorised("expired")])
def test_a_refusal_after_silence_is_believed_only_if_nothing_is_found(
    world: World, error: CloudRefused
) -> None:
    world.aws.answers = ["lost", error]
    (run,) = world.submit(A, B)
    assert run.state is RunState.COMPLETED and len(world.aws.instances) == 1


def test_expired_credentials_after_silence_leave_it_unknown(world: World) -> None:
    world.aws.answers = [Unreachable("no answer"), NotAuthorised("expired")]
    with pytest.raises(Unreachable, match="may be running"):
        world.submit(A, B)
    assert len(world.aws.requests) == 2


def test_a_token_whose_machine_has_ended_is_not_tried_elsewhere(world: World) -> None:
    def end_unheard(node: FakeNode) -> None:
        # The first answer was lost below; the repeated request finds the machine ended.
        node.turn_off()
        error = BadConfiguration("AWS refused it: IdempotentInstanceTerminated")
        error.code = "IdempotentInstanceTerminated"
        raise error

    world.aws.node = end_unheard
    (run,) = world.submit(A, B)
    assert len(world.aws.requests) == 1
    assert run.state is RunState.LOST
    (attempt,) = world.ledger.attempts_of(run.id)
    assert attempt.handle is not None and attempt.billing.billed_s == 60.0

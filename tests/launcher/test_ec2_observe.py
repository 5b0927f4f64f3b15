"""What EC2's words about an attempt's machines come to: how they stand, and what they are billed."""

from datetime import UTC, datetime
from typing import Any

import pytest

from fastlaunch.aws.types import Instance
from fastlaunch.backends.ec2.observe import attempt_status, billed_on_ec2
from fastlaunch.backends.protocol import AttemptStatus, Billed

START = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
TAKEN = "Server.SpotInstanceTermination: Spot instance termination"


def instance(reason: str | None = None, transition: str | None = None) -> Instance:
    return Instance(
        id="i-1",
        region="us-east-1",
        zone="us-east-1a",
        instance_type="p5.48xlarge",
        state="terminated",
        is_spot=True,
        launch_time=START,
        state_reason=reason,
        transition_reason=transition,
    )


@pytest.mark.parametrize(
    ("machine", "status", "expected"),
    [
        # EC2's own time comes first.
        (
            instance("Client.UserInitiatedShutdown: x", "User initiated (2026-11-21 09:30:00 GMT)"),
            {"uptime_s": 5.0},
            (1800, 1800, "times"),
        ),
        (instance("x", "User initiated (2026-11-21 09:00:30 GMT)"), None, (30, 60, "times")),
        # Without it, the node's.
        (instance("x", ""), {"billed_until": "2026-11-21T09:20:00Z", "uptime_s": 5.0}, (1200, 1200, "node")),
        (None, {"billed_until": "2026-11-21T09:20:00", "uptime_s": 5.0}, (1200, 1200, "node")),
        (None, {"billed_until": "not a time", "uptime_s": 700.5}, (700.5, 700.5, "node")),
        # Without any, the limit and the margin.
        (None, None, (7800, 7800, "limit")),
        (instance(TAKEN, None), None, (7800, 7800, "limit")),
        (None, {"billed_until": "2026-11-20T09:20:00Z"}, (7800, 7800, "limit")),
        # EC2 took it: free within its first hour.
        (instance(TAKEN, "Server.Spot (2026-11-21 09:59:59 GMT)"), None, (3599, 0, "free")),
        (instance(TAKEN, "Server.Spot (2026-11-21 10:00:00 GMT)"), None, (3600, 3600, "times")),
        (None, {"reason": "spot", "billed_until": "2026-11-21T09:20:00Z"}, (1200, 0, "free")),
        # It turned itself off after the notice: that is billed, whatever the node says.
        (
            instance("Client.InstanceInitiatedShutdown: x", "User initiated (2026-11-21 09:10:00 GMT)"),
            {"reason": "spot"},
            (600, 600, "times"),
        ),
    ],
)
def test_billed_seconds(
    machine: Instance | None, status: dict[str, Any] | None, expected: tuple[float, float, str]
) -> None:
    lived_s, billed_s, billing = expected
    aws_status = attempt_status([machine] if machine else [], num_unseen=0 if machine else 1)
    assert aws_status.has_ended or machine is None
    assert billed_on_ec2(launched_at=START, max_minutes=120, aws_status=aws_status, status=status) == Billed(
        lived_s=lived_s, billed_s=billed_s, billing=billing
    )


SHUTDOWN = "Client.InstanceInitiatedShutdown: x"


def billed(*machines: Instance, status: dict[str, Any] | None = None) -> Billed:
    aws_status = attempt_status(machines, num_unseen=0)
    return billed_on_ec2(launched_at=START, max_minutes=120, aws_status=aws_status, status=status)


def test_of_several_machines_the_mean_is_billed() -> None:
    # 30 minutes, and 31: each of both is billed as long as it lived.
    first = instance(SHUTDOWN, "User initiated (2026-11-21 09:30:00 GMT)")
    second = instance(SHUTDOWN, "User initiated (2026-11-21 09:31:00 GMT)")
    assert billed(first, second) == Billed(lived_s=1860, billed_s=1830, billing="times")


def test_of_several_machines_only_those_taken_in_their_first_hour_are_free() -> None:
    taken = instance(TAKEN, "Server.Spot (2026-11-21 09:20:00 GMT)")
    stopped = instance(SHUTDOWN, "User initiated (2026-11-21 09:21:00 GMT)")
    assert billed(taken, stopped) == Billed(lived_s=1260, billed_s=630, billing="times")
    assert billed(taken, taken) == Billed(lived_s=1200, billed_s=0, billing="free")


def test_nodes_of_which_one_was_taken_are_billed_where_ec2_tells_no_times() -> None:
    told = {"num_nodes": 2, "reason": "spot", "billed_until": "2026-11-21T09:20:00Z"}
    assert billed(instance(TAKEN), instance(SHUTDOWN), status=told).billed_s == 1200
    gone = AttemptStatus(has_ended=True, is_seen=False)
    assert billed_on_ec2(launched_at=START, max_minutes=120, aws_status=gone, status=told).billing == "node"


def test_a_node_that_ec2_has_forgotten_is_not_free_because_another_was_taken() -> None:
    taken = instance(TAKEN, "Server.Spot (2026-11-21 09:20:00 GMT)")
    aws_status = attempt_status([taken], num_unseen=1)
    told = billed_on_ec2(launched_at=START, max_minutes=120, aws_status=aws_status, status=None)
    assert told == Billed(lived_s=1200, billed_s=1200, billing="times")


def test_a_machine_whose_end_is_not_told_leaves_the_end_open() -> None:
    known = instance(SHUTDOWN, "User initiated (2026-11-21 09:30:00 GMT)")
    aws_status = attempt_status([known, instance(SHUTDOWN, "")], num_unseen=0)
    assert (aws_status.has_ended, aws_status.ended_at, aws_status.billable_s) == (True, None, None)


def test_why_the_first_one_ended_is_told() -> None:
    assert attempt_status([instance(TAKEN), instance(SHUTDOWN)], num_unseen=0).detail == TAKEN
    (problem,) = [attempt_status([instance("Server.InternalError: x")], num_unseen=0).problem]
    assert problem is not None and "ended by an error of its host" in problem.message

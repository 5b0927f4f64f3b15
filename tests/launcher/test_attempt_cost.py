"""What machines cost: known answers, before and after their end."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fastlaunch.attempt_cost import Billed, attempt_cost, billed, minutes_used, total_cost
from fastlaunch.aws import Instance
from fastlaunch.backends import RunState
from fastlaunch.run_attempts import Attempt

START = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
ATTEMPT = Attempt(
    id=1,
    token="run-a-a1",
    n=1,
    backend="ec2",
    region="us-east-1",
    handle={"instance_id": "i-1"},
    state=RunState.RUNNING,
    started_at=START.isoformat(),
    ended_at=None,
    billed_seconds=None,
    run_ids=("run-a",),
    max_minutes=120,
    usd_per_hour=36.0,
    launched_at=START.isoformat(),
)
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


def ended(seconds: float | None, billing: str | None) -> Attempt:
    return replace(
        ATTEMPT,
        ended_at=(START + timedelta(hours=5)).isoformat(),
        state=RunState.COMPLETED,
        billed_seconds=seconds,
        billing=billing,
        lived_s=seconds,
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
        (None, {"billed_until": START.timestamp() + 90}, (90, 90, "node")),
        (None, {"billed_until": "", "uptime_s": 700.5}, (700.5, 700.5, "node")),
        (None, {"billed_until": "not a time", "uptime_s": 700}, (700, 700, "node")),
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
    assert billed(launched_at=START, max_minutes=120, instance=machine, status=status) == Billed(
        lived_s=lived_s, billed_s=billed_s, billing=billing
    )


def test_the_cost_so_far_grows() -> None:
    cost = attempt_cost(ATTEMPT, START + timedelta(minutes=30))
    assert (cost.usd, cost.is_final, cost.told) == (18.0, False, "$18.00 so far")
    assert attempt_cost(ATTEMPT, START - timedelta(minutes=1)).usd == 0


@pytest.mark.parametrize(
    ("attempt", "usd", "told"),
    [
        (ended(1800, "times"), 18.0, "$18.00"),
        (ended(1800, "node"), 18.0, "$18.00"),
        (ended(7800, "limit"), 78.0, "at most $78.00"),
        (ended(0, "free"), 0.0, "$0.00: EC2 took it back within its first hour"),
        (ended(None, None), 0.0, "nothing: no machine was started"),
        (
            replace(ended(1800, "times"), usd_per_hour=None),
            None,
            "n/a: 30 min of a machine whose price is not known",
        ),
    ],
)
def test_the_final_cost(attempt: Attempt, usd: float | None, told: str) -> None:
    cost = attempt_cost(attempt, START + timedelta(days=1))
    assert (cost.usd, cost.is_final, cost.told) == (usd, True, told)


def test_before_there_is_a_machine() -> None:
    waiting = replace(ATTEMPT, launched_at=None, handle=None)
    assert attempt_cost(waiting, START).usd == 0


def test_a_machine_that_ec2_does_not_show_yet_costs_since_it_was_started() -> None:
    unseen = replace(ATTEMPT, launched_at=None, handle={"launched_at": START.isoformat()})
    now = START + timedelta(minutes=30)
    assert attempt_cost(unseen, now) == attempt_cost(ATTEMPT, now)
    assert minutes_used([unseen], now) == 30


def test_several_attempts_together() -> None:
    now = START + timedelta(minutes=30)
    both = total_cost([ended(3600, "times"), ATTEMPT], now)
    assert (both.usd, both.is_final, both.told) == (54.0, False, "$54.00 so far")
    done = total_cost([ended(3600, "times"), ended(7800, "limit")], now)
    assert (done.usd, done.is_final, done.told) == (114.0, True, "at most $114.00")
    unknown = total_cost([ATTEMPT, replace(ATTEMPT, usd_per_hour=None)], now)
    assert unknown.usd is None and unknown.told.startswith("n/a")


def test_minutes_count_whether_they_were_billed_or_not() -> None:
    now = START + timedelta(minutes=30)
    free = replace(ended(0, "free"), lived_s=1800.0)
    refused = replace(ended(None, None), launched_at=None, lived_s=None)
    assert minutes_used([free, refused, ATTEMPT], now) == 60

"""What machines cost: known answers, before and after their end."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from fastlaunch.backends import RunState
from fastlaunch.ledger.attempt_cost import attempt_cost, minutes_used, total_cost
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


def ended(seconds: float | None, billing: str | None) -> Attempt:
    return replace(
        ATTEMPT,
        ended_at=(START + timedelta(hours=5)).isoformat(),
        state=RunState.COMPLETED,
        billed_seconds=seconds,
        billing=billing,
        lived_s=seconds,
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


# Several machines, blocks, warm pools


def test_every_node_costs() -> None:
    four = replace(ATTEMPT, num_nodes=4)
    assert attempt_cost(four, START + timedelta(minutes=30)).usd == 72.0
    assert attempt_cost(replace(ended(1800, "times"), num_nodes=4), START).told == "$72.00"
    # Minutes are counted once: the machines live side by side.
    assert minutes_used([four], START + timedelta(minutes=30)) == 30


def test_a_block_is_told_as_its_fee_and_as_what_the_time_took_of_it() -> None:
    in_block = replace(ended(1800, "times"), sunk_usd=3840.0, usd_per_hour=40.0)
    cost = attempt_cost(in_block, START)
    assert (cost.usd, cost.sunk_usd) == (20.0, 3840.0)
    assert cost.told == "$20.00 of the $3,840.00 paid before for the capacity block"
    # Before a machine is there the fee is spent too.
    assert (
        attempt_cost(replace(ATTEMPT, handle=None, launched_at=None, sunk_usd=3840.0), START).sunk_usd == 3840
    )
    # Two attempts in one block: it was paid once.
    both = total_cost([in_block, in_block], START)
    assert (both.usd, both.sunk_usd) == (40.0, 3840.0)
    assert both.told == "$40.00 of the $3,840.00 paid before for the capacity block"


def test_waiting_for_a_training_job_to_start_costs_nothing() -> None:
    asked = replace(ATTEMPT, backend="sagemaker", launched_at=None, handle={"launched_at": START.isoformat()})
    now = START + timedelta(hours=2)
    assert attempt_cost(asked, now).usd == 0 and minutes_used([asked], now) == 0
    # It never got a machine.
    assert attempt_cost(replace(asked, ended_at=now.isoformat(), billed_seconds=0.0), now).told == "$0.00"


def test_a_warm_pool_may_go_on_costing() -> None:
    kept = replace(ended(1800, "times"), backend="sagemaker", num_nodes=2, idle_minutes=30)
    assert attempt_cost(kept, START).told == "$36.00, and up to $36.00 while its warm pool is kept"
    assert total_cost([kept, kept], START).told.endswith(
        "$72.00, and up to $72.00 while its warm pool is kept"
    )
    assert not attempt_cost(kept, START).is_final and not total_cost([kept], START).is_final
    assert attempt_cost(replace(kept, idle_minutes=0), START).is_final


def test_machines_that_a_job_never_got_are_not_kept_after_it() -> None:
    without = replace(ended(0.0, "times"), backend="sagemaker", idle_minutes=30)
    for cost in (attempt_cost(without, START), total_cost([without], START)):
        assert (cost.told, cost.is_final) == ("$0.00", True)

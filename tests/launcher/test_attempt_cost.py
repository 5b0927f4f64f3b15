"""What an attempt cost: known answers."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from attempt_builders import attempt_with

from fastlaunch.ledger.attempt_cost import attempt_cost, cost_text, minutes_used, total_cost
from fastlaunch.ledger.rows import Attempt
from fastlaunch.lifecycle.describe import ceiling_usd

START = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
LATER = START + timedelta(minutes=30)


def attempt(**changes: Any) -> Attempt:
    """An attempt that began at START at $36 an hour."""
    return attempt_with(**{"usd_per_hour": 36.0, "launched_at": START.isoformat(), **changes})


def ended(billed_s: float | None, source: str | None = "times", **changes: Any) -> Attempt:
    end = (START + timedelta(hours=5)).isoformat()
    billing = {"billed_s": billed_s, "source": source, "lived_s": billed_s}
    return attempt(**{"ended_at": end, **billing, **changes})


WAITING = {"backend": "sagemaker", "launched_at": None, "handle": {"launched_at": START.isoformat()}}
BLOCK = {"sunk_usd": 3840.0, "usd_per_hour": 40.0}
UNSEEN = (LATER.isoformat(),)


@pytest.mark.parametrize(
    ("attempt", "usd", "is_final", "text"),
    [
        (attempt(), 18.0, False, "$18.00 so far"),
        # Until it is seen, EC2's answer says since when it runs.
        (attempt(launched_at=None, handle={"launched_at": START.isoformat()}), 18.0, False, "$18.00 so far"),
        (attempt(launched_at=(LATER + timedelta(minutes=1)).isoformat()), 0.0, False, "$0.00 so far"),
        (attempt(**WAITING), 0.0, False, "nothing yet"),
        (attempt(usd_per_hour=None), None, False, "n/a: 30 min of a machine whose price is not known"),
        (ended(1800, num_nodes=4), 72.0, True, "$72.00"),
        (ended(7800, "limit"), 78.0, True, "at most $78.00"),
        (ended(0, "free"), 0.0, True, "$0.00: EC2 took it back within its first hour"),
        (ended(None, None), 0.0, True, "nothing: no machine was started"),
        (ended(1800, **BLOCK), 20.0, True, "$20.00 of the $3,840.00 paid before for the capacity block"),
        # While AWS does not show it, it counts up to its ceiling: 10 minutes, and 10 of margin.
        (attempt(absences=UNSEEN, max_minutes=60), 18.0, False, "$18.00 so far"),
        (attempt(absences=UNSEEN, max_minutes=10), 12.0, False, "at most $12.00 if it ended in time"),
        (attempt(max_minutes=10), 18.0, False, "$18.00 so far"),
        (ended(0.0), 0.0, True, "$0.00"),
    ],
)
def test_cost_of_an_attempt(attempt: Attempt, usd: float | None, is_final: bool, text: str) -> None:
    cost = attempt_cost(attempt, LATER)
    assert (cost.usd, cost.is_final, cost.text) == (usd, is_final, text)
    assert cost.sunk_usd == attempt.billing.sunk_usd


def test_the_cost_in_a_training_plan_says_that_it_was_paid_for_before() -> None:
    cost = attempt_cost(ended(1800), LATER)
    assert [cost_text(cost, spec) for spec in (None, {}, {"training_plan": None})] == ["$18.00"] * 3
    assert "paid for before" in cost_text(cost, {"training_plan": "arn:x"})


def test_the_ceiling_of_what_is_under_way_is_the_one_that_submit_showed() -> None:
    # At list price and with its volume, whatever an hour turns out to cost.
    under_way = attempt(max_cost_usd=42.1)
    assert ceiling_usd([under_way]) == 42.1
    assert ceiling_usd([ended(1800), under_way]) == pytest.approx(18.0 + 42.1)
    # Of 60 minutes and 10 more, where none is stored.
    assert ceiling_usd([attempt()]) == pytest.approx(42.0)


@pytest.mark.parametrize(
    ("attempts", "usd", "is_final", "text"),
    [
        ([ended(3600), attempt()], 54.0, False, "$54.00 so far"),
        ([ended(3600), ended(7800, "limit")], 114.0, True, "at most $114.00"),
        (
            [ended(3600), attempt(absences=UNSEEN, max_minutes=10)],
            48.0,
            False,
            "at most $48.00 if it ended in time",
        ),
        ([attempt(), attempt(usd_per_hour=None)], None, False, "n/a: the price is not known"),
        # A block that two attempts share was paid for once.
        (
            [ended(1800, **BLOCK)] * 2,
            40.0,
            True,
            "$40.00 of the $3,840.00 paid before for the capacity block",
        ),
    ],
)
def test_cost_of_several_attempts(
    attempts: list[Attempt], usd: float | None, is_final: bool, text: str
) -> None:
    cost = total_cost(attempts, LATER)
    assert (cost.usd, cost.is_final, cost.text) == (usd, is_final, text)
    assert cost.sunk_usd == attempts[0].billing.sunk_usd


def test_minutes_count_whether_billed_or_not_and_once_for_all_nodes() -> None:
    free, refused = ended(0, "free", lived_s=1800.0), ended(None, None, launched_at=None)
    assert minutes_used([free, refused, attempt(num_nodes=4), attempt(**WAITING)], LATER) == 60

"""Attempts as a ledger returns them."""

from dataclasses import fields, replace
from typing import Any

from fastlaunch.core.plan import RunState
from fastlaunch.ledger.rows import Attempt, Billing

_BILLING = {field.name for field in fields(Billing)}


def attempt_with(**changes: Any) -> Attempt:
    """A running attempt of EC2 on one machine; changes of its billing stand among the others."""
    usual = Attempt(
        id=1,
        token="run-a-a1",
        n=1,
        backend="ec2",
        region="us-east-1",
        handle={"instance_id": "i-1"},
        state=RunState.RUNNING,
        started_at="2026-11-21T09:00:00+00:00",
        ended_at=None,
        run_ids=("run-a",),
        max_minutes=60,
        billing=Billing(**{name: value for name, value in changes.items() if name in _BILLING}),
    )
    return replace(usual, **{name: value for name, value in changes.items() if name not in _BILLING})

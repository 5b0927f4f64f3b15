"""Runs and attempts as a ledger returns them, and in a ledger."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from fastlaunch.core.plan import Plan, RunState
from fastlaunch.jobs.job import Job
from fastlaunch.ledger.ledger import Ledger
from fastlaunch.ledger.rows import Attempt, Billing, Run

_BILLING = {field.name for field in fields(Billing)}


def run_with(**changes: Any) -> Run:
    """A run that trains on EC2."""
    usual = Run(
        id="run-a",
        submission_id="s",
        created_at="2026-11-21T09:00:00+00:00",
        backend="ec2",
        state=RunState.RUNNING,
        reason=None,
        workload="vit-tiny",
        recipe="bf16",
        instance="p5.48xlarge",
        directory=None,
        price=None,
        summary=None,
        purchase="spot",
    )
    return replace(usual, **changes)


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


def add_attempt(
    ledger: Ledger, *jobs: Job, plan: Callable[[Mapping[str, Job], int], Plan], **more: Any
) -> Attempt:
    """An attempt at these jobs, of a new submission, that was not sent. plan: of the jobs, and attempt n."""
    submission = ledger.add_submission("fastlaunch submit")
    by_id = {ledger.new_run_id(): job for job in jobs}
    for run_id, job in by_id.items():
        ledger.add_run(
            submission,
            run_id,
            spec=job.to_json(),
            plan=None,
            workload=job.workload,
            recipe=job.recipe.label,
            instance=job.instance,
            backend=job.backend,
            directory=ledger.path.parent / "runs" / run_id,
        )
    identity = {"account": "123456789012", "partition": "aws"}
    attempt_id, _ = ledger.add_attempt(list(by_id), make_plan=lambda n: plan(by_id, n), **(identity | more))
    return ledger.attempt(attempt_id)

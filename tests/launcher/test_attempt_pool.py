"""What a warm pool cost is added when SageMaker tells it, once, and asked for only where there was one."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_cloud import START, Clock
from fake_training import FakeTrainingAws
from sagemaker_builders import training_job, training_plan_of, training_site

from fastlaunch.attempt_pool import note_pools
from fastlaunch.backends import RunState
from fastlaunch.ledger.attempt_cost import attempt_cost
from fastlaunch.ledger.ledger import Ledger
from fastlaunch.run_attempts import Attempt

KEPT = 20


@pytest.fixture
def aws() -> FakeTrainingAws:
    aws = FakeTrainingAws(Clock())
    aws.job = lambda job: None
    return aws


@pytest.fixture
def attempt(tmp_path: Path, aws: FakeTrainingAws) -> Iterator[tuple[Ledger, Attempt]]:
    """An attempt that ended at START, with 1,000 s billed of one machine at $36 an hour."""
    with Ledger(tmp_path / "ledger.sqlite", clock=lambda: START) as ledger:
        plan = training_plan_of(at=training_site(keep_alive_minutes=KEPT))
        submission, run_id = ledger.add_submission("x"), ledger.new_run_id()
        spec = training_job(keep_alive_minutes=KEPT).to_json()
        ledger.add_run(
            submission, run_id, spec=spec, plan=None, workload="x", recipe="bf16", backend="sagemaker"
        )
        made, token = ledger.add_attempt([run_id], usd_per_hour=36.0, make_plan=lambda n: plan)
        request = {**plan.request, "TrainingJobName": token}
        aws.ask("sagemaker", "us-east-1", "CreateTrainingJob", **request)
        aws.jobs.move(token, "Training")
        ledger.end_attempt(made, RunState.COMPLETED, billed_seconds=1000.0, lived_s=1000.0, billing="times")
        yield ledger, ledger.attempt(made)


def note(ledger: Ledger, aws: FakeTrainingAws) -> Attempt:
    attempts = ledger.attempts_of(ledger.select()[0].id)
    note_pools(ledger, aws, attempts)
    return ledger.attempt(attempts[0].id)


def test_a_pool_is_added_once_it_is_gone(attempt: tuple[Ledger, Attempt], aws: FakeTrainingAws) -> None:
    ledger, made = attempt
    assert made.idle_minutes == KEPT
    assert attempt_cost(made, START).told == "$10.00, and up to $12.00 while its warm pool is kept"
    # It is still kept, and grows.
    aws.jobs.end(made.token)
    assert note(ledger, aws) == made
    aws.jobs.end(made.token, pool_s=500)
    assert note(ledger, aws).billed_seconds == 1500.0
    asked = aws.calls["DescribeTrainingJob"]
    again = note(ledger, aws)
    assert (again.billed_seconds, again.lived_s) == (1500.0, 1000.0)
    assert aws.calls["DescribeTrainingJob"] == asked
    assert attempt_cost(again, START).told == "$15.00"


def test_a_job_that_got_no_machines_is_not_asked_about(
    attempt: tuple[Ledger, Attempt], aws: FakeTrainingAws
) -> None:
    ledger, made = attempt
    note_pools(ledger, aws, [replace(made, billed_seconds=0.0)])
    assert aws.calls["DescribeTrainingJob"] == 0

"""What is made of a training job's status: how it stands, what went wrong, what is billed."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fastlaunch.aws.sagemaker import TrainingJob
from fastlaunch.backends.protocol import AttemptStatus, Billed
from fastlaunch.backends.sagemaker.observe import attempt_status, billed_on_sagemaker
from fastlaunch.core.errors import BadConfiguration, CloudRefused, NoCapacity
from fastlaunch.core.plan import Ending

THEN = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)


def job(**changes: Any) -> TrainingJob:
    """A job on demand that trains since ten minutes after it was asked for."""
    usual: dict[str, Any] = {
        "name": "run-a1",
        "arn": "arn:aws:sagemaker:us-east-1:1:training-job/run-a1",
        "region": "us-east-1",
        "status": "InProgress",
        "secondary_status": "Training",
        "created_at": THEN,
        "started_at": THEN + timedelta(minutes=10),
        "instance_type": "ml.p5.48xlarge",
    }
    return TrainingJob(**{**usual, **changes})


def failed(reason: str | None, **changes: Any) -> AttemptStatus:
    return attempt_status(job(status="Failed", secondary_status="Failed", failure_reason=reason, **changes))


def test_a_job_that_trains() -> None:
    assert attempt_status(job()) == AttemptStatus(
        has_ended=False,
        is_live=True,
        is_up=True,
        instance_type="p5.48xlarge",
        launched_at=THEN + timedelta(minutes=10),
        detail="training",
    )


def test_a_job_that_waits_has_no_machine_yet() -> None:
    waiting = job(
        secondary_status="Pending", started_at=None, instance_type=None, status_message="no capacity"
    )
    assert attempt_status(waiting) == AttemptStatus(
        has_ended=False, is_live=True, detail="waiting for capacity (no capacity)"
    )


@pytest.mark.parametrize(
    ("status", "secondary", "is_up"),
    [
        ("InProgress", "Starting", False),
        ("InProgress", "Uploading", True),
        ("InProgress", "Interrupted", False),
        ("InProgress", "SomethingNew", False),
        ("Stopping", "Training", False),
        ("Stopped", "MaxRuntimeExceeded", False),
        ("Completed", "Completed", False),
    ],
)
def test_which_jobs_are_up_live_or_over(status: str, secondary: str, is_up: bool) -> None:
    aws_status = attempt_status(job(status=status, secondary_status=secondary))
    assert aws_status.is_up is is_up and aws_status.detail
    assert aws_status.has_ended is (status in ("Stopped", "Completed")) is not aws_status.is_live


def test_a_job_that_is_not_shown_has_not_ended() -> None:
    assert attempt_status(None) == AttemptStatus(has_ended=False, is_seen=False, num_unseen=1)


@pytest.mark.parametrize(
    ("reason", "kind", "code"),
    [
        ("CapacityError: Unable to provision requested ML compute capacity.", NoCapacity, "CapacityError"),
        ("There is not enough capacity for instance type ml.p5.48xlarge.", NoCapacity, "CapacityError"),
        ("Job exceeded its maximum pending time", NoCapacity, "CapacityError"),
        ("AlgorithmError: the pending time is over", CloudRefused, "AlgorithmError"),
        ("ClientError: Data download failed", BadConfiguration, "ClientError"),
        ("InternalServerError: We encountered an error.", CloudRefused, "InternalServerError"),
        ("The role may not pull the image", BadConfiguration, "Failed"),
        (None, BadConfiguration, "Failed"),
    ],
)
def test_what_went_wrong(reason: str | None, kind: type, code: str) -> None:
    problem, ending = failed(reason).problem, failed(reason).ending
    assert (ending is Ending.NO_CAPACITY) is (kind is NoCapacity)
    assert type(problem) is kind and problem.code == code
    assert (reason or "does not say why") in problem.message and problem.hint


def test_a_time_that_was_up() -> None:
    over = attempt_status(job(status="Stopped", secondary_status="MaxRuntimeExceeded"))
    assert type(over.problem) is CloudRefused and over.problem.code == "MaxRuntimeExceeded"
    assert over.ending is Ending.TIME_LIMIT
    waited = attempt_status(job(status="Stopped", secondary_status="MaxWaitTimeExceeded"))
    assert type(waited.problem) is NoCapacity and waited.ending is Ending.NO_CAPACITY


@pytest.mark.parametrize(
    ("waited_s", "changes", "is_capacity"),
    [
        (1_830, {}, True),
        (600, {}, False),
        (1_830, {"started_at": THEN}, False),
        (1_830, {"is_spot": True}, False),
    ],
)
def test_a_job_that_waited_as_long_as_it_may_found_no_capacity(
    waited_s: int, changes: dict[str, Any], is_capacity: bool
) -> None:
    ended_at = THEN + timedelta(seconds=waited_s)
    ended = {"status": "Stopped", "secondary_status": "Stopped", "started_at": None, "ended_at": ended_at}
    waited = job(**{**ended, **changes})
    problem, ending = attempt_status(waited).problem, attempt_status(waited).ending
    assert isinstance(problem, NoCapacity) is is_capacity
    # SageMaker calls it stopped, as if somebody had done it.
    assert ending is (Ending.NO_CAPACITY if is_capacity else Ending.STOPPED)
    if problem is not None:
        assert problem.code == "MaxPendingTimeExceeded" and "no machines for 30 minutes" in problem.message


def test_an_end_that_was_asked_for_is_no_problem() -> None:
    assert attempt_status(job(status="Stopped", secondary_status="Stopped")).problem is None


def billed(aws_status: AttemptStatus, status: dict[str, Any] | None = None) -> Billed:
    return billed_on_sagemaker(launched_at=THEN, max_minutes=120, aws_status=aws_status, status=status)


def test_what_is_billed_is_sagemakers_own_count() -> None:
    # It holds the spot discount: 900 s of 50 minutes.
    end = THEN + timedelta(minutes=60)
    aws_status = failed("AlgorithmError: x", ended_at=end, billable_s=900, is_spot=True)
    assert billed(aws_status) == Billed(lived_s=3000.0, billed_s=900, billing="times")
    # What it waited for other machines is not a part of what it trained.
    waited = replace(aws_status, is_spot=True, training_s=2000.0)
    assert billed(waited) == Billed(lived_s=2000.0, billed_s=900, billing="times")


def test_without_a_count_the_times_are_billed() -> None:
    aws_status = failed("AlgorithmError: x", ended_at=THEN + timedelta(minutes=60))
    assert billed(aws_status) == Billed(lived_s=3000.0, billed_s=3000.0, billing="times")
    never = failed("CapacityError: x", started_at=None, ended_at=THEN + timedelta(minutes=30))
    assert billed(never) == Billed(lived_s=0.0, billed_s=0.0, billing="times")


@pytest.mark.parametrize(
    ("status", "seconds", "billing"),
    [
        ({"billed_until": "2026-11-21T09:20:00Z", "uptime_s": 1000}, 1200.0, "node"),
        ({"billed_until": "2026-11-21T08:59:00Z", "uptime_s": 1000}, 1000.0, "node"),
        ({"uptime_s": 1000.5}, 1000.5, "node"),
        ({}, 7800.0, "limit"),
        (None, 7800.0, "limit"),
    ],
)
def test_of_a_job_that_is_gone_its_containers_last_word_counts(
    status: dict[str, Any] | None, seconds: float, billing: str
) -> None:
    assert billed(attempt_status(None), status) == Billed(lived_s=seconds, billed_s=seconds, billing=billing)

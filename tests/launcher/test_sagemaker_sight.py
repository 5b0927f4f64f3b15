"""What is made of a training job's status: how it stands, what went wrong, what is billed."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.aws.sagemaker import TrainingJob
from fastlaunch.backends.protocol import Billed, Sight
from fastlaunch.backends.sagemaker.observe import billed_on_sagemaker, sight_of
from fastlaunch.core.errors import BadConfiguration, CloudRefused, NoCapacity

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


def failed(reason: str | None, **changes: Any) -> Sight:
    return sight_of(
        job(status="Failed", secondary_status="Failed", failure_reason=reason, **changes), is_old=False
    )


def test_a_job_that_trains() -> None:
    assert sight_of(job(), is_old=True) == Sight(
        has_ended=False,
        is_live=True,
        is_up=True,
        instance_type="p5.48xlarge",
        launched_at=THEN + timedelta(minutes=10),
        told="training",
    )


def test_a_job_that_waits_has_no_machine_yet() -> None:
    waiting = job(secondary_status="Pending", started_at=None, instance_type=None, is_spot=True)
    sight = sight_of(waiting, is_old=True)
    assert (sight.is_live, sight.is_up, sight.launched_at, sight.instance_type) == (True, False, None, None)
    assert sight.told == "waiting for capacity" and sight.is_spot


@pytest.mark.parametrize(
    ("status", "secondary", "words", "is_up"),
    [
        ("InProgress", "Starting", "preparing machines", False),
        ("InProgress", "Downloading", "downloading the image and the code", False),
        ("InProgress", "Uploading", "uploading what the job leaves", True),
        (
            "InProgress",
            "Interrupted",
            "interrupted: SageMaker took the machines back and restarts",
            False,
        ),
        ("InProgress", "SomethingNew", "SomethingNew", False),
        ("Stopping", "Stopping", "stopping", False),
        ("Stopping", "Training", "stopping", False),
        ("Stopped", "Stopped", "Stopped: someone asked it to stop", False),
        ("Stopped", "MaxRuntimeExceeded", "MaxRuntimeExceeded: the time limit was reached", False),
        ("Completed", "Completed", "completed", False),
    ],
)
def test_the_status_in_words(status: str, secondary: str, words: str, is_up: bool) -> None:
    sight = sight_of(job(status=status, secondary_status=secondary), is_old=False)
    assert (sight.told, sight.is_up) == (words, is_up)
    assert sight.has_ended is (status in ("Stopped", "Completed")) is not sight.is_live


def test_what_sagemaker_says_itself_is_told_too() -> None:
    sight = sight_of(job(secondary_status="Pending", status_message="Insufficient capacity"), is_old=False)
    assert sight.told == "waiting for capacity (Insufficient capacity)"


def test_every_status_of_the_model_has_words() -> None:
    import botocore.session

    from fastlaunch.backends.sagemaker import observe as sagemaker_sight

    model = botocore.session.get_session().get_service_model("sagemaker")
    assert set(model.shape_for("SecondaryStatus").enum) == set(sagemaker_sight._WORDS)


def test_a_job_that_is_not_shown_has_ended_only_when_it_is_old() -> None:
    assert sight_of(None, is_old=False) == Sight(has_ended=False, is_seen=False)
    assert sight_of(None, is_old=True) == Sight(has_ended=True, is_seen=False)


@pytest.mark.parametrize(
    ("reason", "kind", "code", "words"),
    [
        (
            "CapacityError: Unable to provision requested ML compute capacity. Please retry using a "
            "different ML instance type.",
            NoCapacity,
            "CapacityError",
            "got no machines: CapacityError",
        ),
        (
            "There is not enough capacity for instance type ml.p5.48xlarge.",
            NoCapacity,
            "CapacityError",
            "no mach",
        ),
        (
            "AlgorithmError: code bundle not usable, exit code: 1",
            CloudRefused,
            "AlgorithmError",
            "not usable",
        ),
        ("ClientError: Data download failed", BadConfiguration, "ClientError", "Data download"),
        (
            "InternalServerError: We encountered an internal error.",
            CloudRefused,
            "InternalServerError",
            "intern",
        ),
        ("The role may not pull the image", BadConfiguration, "Failed", "The role may not"),
        ("Job exceeded its maximum pending time", NoCapacity, "CapacityError", "pending time"),
        ("AlgorithmError: the pending time is over", CloudRefused, "AlgorithmError", "is over"),
        (None, BadConfiguration, "Failed", "SageMaker does not say why"),
    ],
)
def test_what_went_wrong(reason: str | None, kind: type, code: str, words: str) -> None:
    problem = failed(reason).problem
    assert type(problem) is kind and problem.code == code
    assert words in problem.message and "run-a1" in problem.message and problem.hint


def test_a_time_that_was_up() -> None:
    over = sight_of(job(status="Stopped", secondary_status="MaxRuntimeExceeded"), is_old=False)
    assert type(over.problem) is CloudRefused and over.problem.code == "MaxRuntimeExceeded"
    waited = sight_of(job(status="Stopped", secondary_status="MaxWaitTimeExceeded"), is_old=False)
    assert type(waited.problem) is NoCapacity and "MaxWaitTimeExceeded" in (waited.told or "")


@pytest.mark.parametrize(
    ("waited_s", "changes", "is_capacity"),
    [
        (1_830, {}, True),
        (600, {}, False),
        (40_000, {}, False),
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
    problem = sight_of(waited, is_old=False).problem
    assert isinstance(problem, NoCapacity) is is_capacity
    if problem is not None:
        assert problem.code == "MaxPendingTimeExceeded" and "no machines for 30 minutes" in problem.message


@pytest.mark.parametrize(("status", "secondary"), [("Completed", "Completed"), ("Stopped", "Stopped")])
def test_an_end_that_was_asked_for_is_no_problem(status: str, secondary: str) -> None:
    assert sight_of(job(status=status, secondary_status=secondary), is_old=False).problem is None


def billed(sight: Sight, status: dict[str, Any] | None = None) -> Billed:
    return billed_on_sagemaker(launched_at=THEN, max_minutes=120, sight=sight, status=status)


def test_what_is_billed_is_sagemakers_own_count() -> None:
    # It holds the spot discount: 900 s of 50 minutes.
    end = THEN + timedelta(minutes=60)
    sight = failed("AlgorithmError: x", ended_at=end, billable_s=900, is_spot=True)
    assert billed(sight) == Billed(lived_s=3000.0, billed_s=900, billing="times")
    # What it waited for other machines is not a part of what it trained.
    waited = replace(sight, is_spot=True, training_s=2000.0)
    assert billed(waited) == Billed(lived_s=2000.0, billed_s=900, billing="times")


def test_a_job_that_never_had_a_machine_costs_nothing() -> None:
    sight = failed("CapacityError: x", started_at=None, ended_at=THEN + timedelta(minutes=30))
    assert billed(sight) == Billed(lived_s=0.0, billed_s=0.0, billing="times")


def test_without_a_count_the_times_are_taken() -> None:
    sight = failed("AlgorithmError: x", ended_at=THEN + timedelta(minutes=60))
    assert billed(sight) == Billed(lived_s=3000.0, billed_s=3000.0, billing="times")


@pytest.mark.parametrize(
    ("status", "seconds", "billing"),
    [
        ({"billed_until": "2026-11-21T09:20:00Z", "uptime_s": 1000}, 1200.0, "node"),
        ({"billed_until": "2026-11-21T09:20:00"}, 1200.0, "node"),
        ({"billed_until": "2026-11-21T08:59:00Z", "uptime_s": 1000}, 1000.0, "node"),
        ({"uptime_s": 1000.5}, 1000.5, "node"),
        ({"uptime_s": True, "billed_until": "soon"}, 7800.0, "limit"),
        ({}, 7800.0, "limit"),
        (None, 7800.0, "limit"),
    ],
)
def test_of_a_job_that_is_gone_its_containers_last_word_counts(
    status: dict[str, Any] | None, seconds: float, billing: str
) -> None:
    assert billed(sight_of(None, is_old=True), status) == Billed(
        lived_s=seconds, billed_s=seconds, billing=billing
    )


@given(
    started_s=st.none() | st.integers(0, 10_000),
    lasted_s=st.none() | st.integers(0, 10_000),
    billable_s=st.none() | st.integers(1, 10_000),
)
def test_bills_are_never_negative(
    started_s: int | None, lasted_s: int | None, billable_s: int | None
) -> None:
    started_at = None if started_s is None else THEN + timedelta(seconds=started_s)
    ended_at = None if lasted_s is None else (started_at or THEN) + timedelta(seconds=lasted_s)
    told = billed(failed("x", started_at=started_at, ended_at=ended_at, billable_s=billable_s))
    assert told.billed_s >= 0 and told.lived_s >= 0
    if billable_s is not None:
        assert told.billed_s == billable_s

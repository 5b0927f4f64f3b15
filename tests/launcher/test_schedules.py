"""The timer in the account: its own step of the ledger, once for each machine, and taken away again."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from fastlaunch.aws.client import Aws
from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import Ledger, open_ledger
from fastlaunch.ledger.rows import Attempt
from fastlaunch.lifecycle.schedules import arm, deadline, disarm, names, schedule_request, schedule_token

if TYPE_CHECKING:
    from moto_server import MotoServer
    from stubbed_aws import StubbedAws

ROLE = "arn:aws:iam::123456789012:role/fastlaunch-scheduler"
LAUNCHED = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
NOW = LAUNCHED + timedelta(minutes=1)


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with open_ledger(load_settings()) as opened:
        yield opened


def started(ledger: Ledger) -> Attempt:
    """An attempt that has machines, for two hours."""
    submission = ledger.add_submission("fastlaunch submit --detach")
    run_id = ledger.new_run_id()
    ledger.add_run(submission, run_id, spec={}, plan=None, workload="vit-tiny", recipe="bf16", backend="ec2")
    attempt, _ = ledger.add_attempt([run_id], region="us-east-1", max_minutes=120)
    machines = {"instance_ids": ["i-0a", "i-0b"], "launched_at": LAUNCHED.isoformat()}
    ledger.set_handle(attempt, {"region": "us-east-1", **machines})
    return ledger.attempt(attempt)


def made(server: "MotoServer") -> dict[str, Any]:
    """moto's own schedules of us-east-1, by name."""
    from moto_server import backend

    found: dict[str, Any] = backend("scheduler", "us-east-1").schedule_groups["default"].schedules
    return found


def test_a_schedule_ends_one_machine_once_and_goes() -> None:
    request = schedule_request("fastlaunch-t-a1", "i-0ab", role=ROLE, at=LAUNCHED)
    assert request == {
        "Name": "fastlaunch-t-a1",
        "ClientToken": "fastlaunch-t-a1",
        "Description": "Ends i-0ab, in case that nothing else did",
        "ScheduleExpression": "at(2026-11-21T09:00:00)",
        "ScheduleExpressionTimezone": "UTC",
        "FlexibleTimeWindow": {"Mode": "OFF"},
        "ActionAfterCompletion": "DELETE",
        "Target": {
            "Arn": "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances",
            "RoleArn": ROLE,
            "Input": '{"InstanceIds": ["i-0ab"]}',
            "RetryPolicy": {"MaximumEventAgeInSeconds": 3600, "MaximumRetryAttempts": 10},
        },
    }
    china = schedule_request("n", "i-0ab", role=ROLE.replace("aws", "aws-cn", 1), at=LAUNCHED)
    assert china["Target"]["Arn"].startswith("arn:aws-cn:scheduler:::")


def test_an_attempt_gets_a_schedule_for_each_machine_and_loses_them(
    ledger: Ledger, aws: Aws, aws_server: "MotoServer"
) -> None:
    attempt = started(ledger)
    told = arm(ledger, aws, attempt, role=ROLE, now=NOW)
    assert told == (
        f"a timer in the account ends what is left at 2026-11-21 11:15 UTC (fastlaunch-{attempt.token})"
    )
    there = made(aws_server)
    assert sorted(there) == names(attempt.token, 2)
    assert [json.loads(schedule.target["Input"])["InstanceIds"] for _, schedule in sorted(there.items())] == [
        ["i-0a"],
        ["i-0b"],
    ]
    assert {schedule.schedule_expression for schedule in there.values()} == {"at(2026-11-21T11:15:00)"}
    noted = ledger.attempt(attempt.id).schedule
    assert noted is not None
    assert (noted["state"], noted["name"]) == ("created", f"fastlaunch-{attempt.token}")
    # Once more, as after a launcher that was killed: no second one, and no error.
    assert arm(ledger, aws, attempt, role=ROLE, now=NOW) == told
    assert [schedule.name for schedule in aws.list_schedules("us-east-1")] == names(attempt.token, 2)

    disarm(ledger, aws, attempt)
    assert not made(aws_server)
    assert ledger.attempt(attempt.id).schedule is None
    disarm(ledger, aws, attempt)


def test_the_ledger_names_the_schedule_before_it_is_asked_for(ledger: Ledger) -> None:
    attempt = started(ledger)
    seen: list[Any] = []

    class Dies:
        def create_schedule(self, **given: Any) -> None:
            seen.append(ledger.attempt(attempt.id).schedule)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        arm(ledger, Aws(connect=lambda *_: Dies()), attempt, role=ROLE, now=NOW)
    assert seen == [ledger.attempt(attempt.id).schedule]
    assert seen[0]["state"] == "unknown"
    assert seen[0]["names"] == names(attempt.token, 2)
    assert [schedule.id for schedule in ledger.scheduled_attempts()] == [attempt.id]


@pytest.mark.parametrize(
    ("code", "status", "state", "said"),
    [
        ("AccessDeniedException", 403, "refused", "was refused"),
        ("InternalServerException", 500, "unknown", "is not known"),
    ],
)
def test_what_is_refused_is_said_and_noted(
    ledger: Ledger, stubbed_aws: "StubbedAws", code: str, status: int, state: str, said: str
) -> None:
    attempt = started(ledger)
    for _ in range(2 if status == 500 else 1):
        stubbed_aws.error("scheduler", "create_schedule", code, status=status)
    told = arm(ledger, stubbed_aws.aws, attempt, role=ROLE, now=NOW)
    assert said in told
    assert told.endswith("only the node's own timer protects")
    noted = ledger.attempt(attempt.id).schedule
    assert noted is not None and noted["state"] == state


def test_what_cannot_be_deleted_stays_noted(ledger: Ledger, stubbed_aws: "StubbedAws") -> None:
    attempt = started(ledger)
    ledger.set_schedule(attempt.id, {"names": ["fastlaunch-x-a1"], "region": "us-east-1", "state": "created"})
    stubbed_aws.error("scheduler", "delete_schedule", "AccessDeniedException", status=403)
    disarm(ledger, stubbed_aws.aws, attempt)
    assert ledger.attempt(attempt.id).schedule is not None
    stubbed_aws.error("scheduler", "delete_schedule", "ResourceNotFoundException", status=404)
    disarm(ledger, stubbed_aws.aws, attempt)
    assert ledger.attempt(attempt.id).schedule is None


def test_a_deadline_that_is_over_becomes_one_soon(ledger: Ledger) -> None:
    attempt = started(ledger)
    assert deadline(attempt, NOW) == LAUNCHED + timedelta(minutes=135)
    late = LAUNCHED + timedelta(hours=9)
    assert deadline(attempt, late) == late + timedelta(minutes=5)


def test_a_schedule_is_known_by_the_token_in_its_name() -> None:
    for token in ("20261121-090000-abcd-a1", "20261121-090000-abcd-a12"):
        for name in names(token, 3):
            assert schedule_token(name) == token
    for name in (
        "fastlaunch-20261121-090000-abcd-a1x",
        "fastlaunch-web-a1",
        "nightly-20261121-090000-abcd-a1",
    ):
        assert schedule_token(name) is None

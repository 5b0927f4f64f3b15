"""What commands really ask of AWS, against the scenarios to which the policies are held."""

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
import yaml
from cloud_commands import aws, cloud
from policy_table import SCENARIOS

from fastlaunch.aws_schedules import create_schedule
from fastlaunch.deadline_schedule import schedule_request

if TYPE_CHECKING:
    from pathlib import Path

    from moto_server import MotoServer

ROLE = "arn:aws:iam::123456789012:role/fastlaunch-scheduler"


@pytest.fixture
def account(aws_server: "MotoServer", isolated: "Path") -> "MotoServer":
    """An account with all that a job on EC2 uses, and a config file that names it."""
    here = aws_server.set_up_region("us-east-1", bucket="acme")
    named = {
        "bucket": here.bucket,
        "instance_profile": here.instance_profile,
        "security_groups": list(here.security_groups),
        "subnets": dict(here.subnets),
        "scheduler_role": ROLE,
    }
    (isolated.parent / "config.yaml").write_text(yaml.safe_dump({"aws": {"us-east-1": named}}))
    return aws_server


def asked(server: "MotoServer") -> set[str]:
    """`service:Action` of all that came in."""
    return {f"{one.service}:{one.action}" for one in server.sent()}


def planned(*names: str) -> set[str]:
    """The calls of the scenarios, whatever the case of them."""
    return {operation.partition(" ")[0] for name in names for operation in SCENARIOS[name].operations}


def test_doctor_asks_what_its_scenario_does(account: "MotoServer") -> None:
    cloud("doctor", "--instance", "p5.48xlarge", "--purchase", "spot")
    assert len(asked(account)) > 8
    assert asked(account) - planned("doctor", "submit to EC2, spot") == set()


def test_reap_asks_what_its_scenario_does(account: "MotoServer") -> None:
    request = schedule_request(
        "fastlaunch-gone-a1", "i-0123", role=ROLE, at=datetime(2026, 11, 22, tzinfo=UTC)
    )
    create_schedule(aws(), "us-east-1", request)
    before = asked(account)
    assert cloud("reap", "--yes", now=lambda: datetime.now(UTC) + timedelta(hours=1)) == 0
    assert {"scheduler:DeleteSchedule", "sagemaker:ListTrainingJobs"} <= asked(account)
    assert asked(account) - before - planned("reap") == set()

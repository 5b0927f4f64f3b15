"""What commands really ask of AWS, against the scenarios to which the policies are held."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
import yaml
from cloud_commands import aws, cloud
from policy_table import SCENARIOS

from fastlaunch.aws.scheduler import create_schedule, schedules
from fastlaunch.runs.deadline_schedule import schedule_request

if TYPE_CHECKING:
    from pathlib import Path

    from moto_server import MotoServer

ROLE = "arn:aws:iam::123456789012:role/fastlaunch-scheduler"
IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch@sha256:" + "0123456789abcdef" * 4
SUBMIT = ("submit", "--image", IMAGE, "--steps", "20", "--yes", "--detach", "--instance")

#: What the commands since the last time asked, less what the scenarios of these names do.
Unplanned = Callable[..., set[str]]


@pytest.fixture
def account(aws_server: "MotoServer", isolated: "Path") -> "MotoServer":
    """An account with all that jobs on EC2 and SageMaker use, and a config file that names it."""
    here = aws_server.set_up_region("us-east-1", bucket="acme")
    aws_server.quotas["us-east-1", "L-DB2E81BA"] = 768
    aws_server.quotas["us-east-1", "ml.g5.xlarge for training job usage"] = 2
    named = {
        "bucket": here.bucket,
        "instance_profile": here.instance_profile,
        "security_groups": list(here.security_groups),
        "subnets": dict(list(here.subnets.items())[:2]),
        "role": aws_server.training_jobs.role(),
        "scheduler_role": ROLE,
    }
    (isolated.parent / "config.yaml").write_text(yaml.safe_dump({"aws": {"us-east-1": named}}))
    return aws_server


@pytest.fixture
def unplanned(account: "MotoServer") -> Unplanned:
    seen = 0

    def asked(*names: str) -> set[str]:
        nonlocal seen
        new = account.sent()[seen:]
        seen += len(new)
        assert new, "nothing was asked"
        planned = {operation for name in names for operation in SCENARIOS[name].operations}
        return {f"{one.service}:{one.action}" for one in new} - {one.partition(" ")[0] for one in planned}

    return asked


def test_doctor(account: "MotoServer", unplanned: Unplanned) -> None:
    cloud("doctor", "--instance", "p5.48xlarge", "--purchase", "spot")
    assert unplanned("doctor", "submit to EC2, spot") == set()


def test_a_detached_run_on_ec2_from_submit_to_cancel(account: "MotoServer", unplanned: Unplanned) -> None:
    account.pending_describes = account.shutting_down_describes = 0
    assert cloud(*SUBMIT, "g5.xlarge") == 0
    assert unplanned("submit to EC2", "submit to EC2, detached") == set()
    (timer,) = schedules(aws(), "us-east-1")
    unplanned("reap")
    assert cloud("status") == 0
    assert unplanned("status") == set()
    run_id = timer.name.removeprefix("fastlaunch-").rpartition("-a")[0]
    cloud("cancel", run_id)
    assert unplanned("cancel", "status") == set()
    assert schedules(aws(), "us-east-1") == []
    assert account.instances("pending", "running") == []


def test_a_detached_run_on_sagemaker_from_submit_to_cancel(
    account: "MotoServer", unplanned: Unplanned
) -> None:
    assert cloud(*SUBMIT, "ml.g5.xlarge") == 0
    assert unplanned("submit to SageMaker") == set()
    (job,) = account.training_jobs.live()
    account.training_jobs.move(job.name, "Training")
    assert cloud("status") == 0
    assert unplanned("status") == set()
    cloud("cancel", job.name.rpartition("-a")[0])
    assert unplanned("cancel", "status", "a job that said nothing") == set()
    assert account.training_jobs.live() == []


def test_reap(account: "MotoServer", unplanned: Unplanned) -> None:
    at = datetime(2026, 11, 22, tzinfo=UTC)
    create_schedule(aws(), "us-east-1", schedule_request("fastlaunch-gone-a1", "i-0123", role=ROLE, at=at))
    unplanned()
    assert cloud("reap", "--yes", now=lambda: datetime.now(UTC) + timedelta(hours=1)) == 0
    assert account.sent("DeleteSchedule")
    assert unplanned("reap") == set()

"""What `fastlaunch submit` says when EC2 refuses: exit code, words, next action; and what it tries then."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from fake_train.launcher import app_context
from fake_train.processes import runs
from moto_server import MotoServer

from fastlaunch.aws.client import Aws
from fastlaunch.cli.main import run

IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch@sha256:" + "0123456789abcdef" * 4
SUBMIT = ("submit", "--instance", "g5.xlarge", "--image", IMAGE, "--steps", "20", "--detach", "--yes")
AWS = Aws(attempts=2, sleep=lambda seconds: None, timeouts_s=(5, 20))


@pytest.fixture
def region(aws_server: MotoServer, isolated: Path) -> MotoServer:
    """An account that may start jobs in two zones of us-east-1."""
    settings = aws_server.set_up_region("us-east-1")
    aws_server.quotas["us-east-1", "L-DB2E81BA"] = 768
    config = {
        "bucket": settings.bucket,
        "instance_profile": settings.instance_profile,
        "security_groups": list(settings.security_groups),
        "subnets": dict(list(settings.subnets.items())[:2]),
    }
    (isolated.parent / "config.yaml").write_text(yaml.safe_dump({"aws": {"us-east-1": config}}))
    return aws_server


#: Code of EC2's error, its words, how often RunInstances is sent, part of the hint.
REFUSALS = [
    ("InsufficientInstanceCapacity", "We do not have sufficient capacity", 2, "--region R1,R2"),
    ("VcpuLimitExceeded", "You have requested more vCPU capacity", 1, "L-DB2E81BA"),
    ("UnauthorizedOperation", "You are not authorized", 1, "the right ec2:RunInstances"),
    ("IdempotentInstanceTerminated", "The request uses the same client token", 1, "fastlaunch resume"),
    ("RequestExpired", "Request has expired.", 1, "log in again"),
    ("InvalidParameterCombination", "The parameters do not fit", 1, "correct what the message names"),
]


@pytest.mark.parametrize(("code", "words", "times", "hint"), REFUSALS)
def test_a_refusal(
    region: MotoServer, capsys: pytest.CaptureFixture[str], code: str, words: str, times: int, hint: str
) -> None:
    region.refuse("RunInstances", code, words)
    assert run(list(SUBMIT), replace(app_context(*SUBMIT), connect=lambda: AWS)) == 3
    err = " ".join(capsys.readouterr().err.split())
    assert code in err and words in err and hint in err, err
    assert "Traceback" not in err
    assert len(region.sent("RunInstances")) == times
    assert region.instances() == [] and all(one.state.is_final for one in runs())


def test_throttling_is_told_and_waited_for(region: MotoServer, capsys: pytest.CaptureFixture[str]) -> None:
    refusal = region.refuse("RunInstances", "RequestLimitExceeded", "Request limit exceeded.")

    def sleep(seconds: float) -> None:
        region.allow(refusal)

    assert run(list(SUBMIT), replace(app_context(*SUBMIT), connect=lambda: AWS, sleep=sleep)) == 0
    assert "Request limit exceeded.; the same request is sent again" in capsys.readouterr().err
    sent = region.sent("RunInstances")
    assert [each.status for each in sent] == [503, 503, 200] and len({each.body for each in sent}) == 1
    assert len(region.instances()) == 1


def test_expired_credentials_are_noticed_before_anything_else(
    region: MotoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for action in ("GetCallerIdentity", "DescribeRegions", "GetParameter", "HeadBucket", "DescribeSubnets"):
        region.refuse(action, "ExpiredToken", "The security token included in the request is expired")
    assert run(list(SUBMIT), replace(app_context(*SUBMIT), connect=lambda: AWS)) == 3
    err = capsys.readouterr().err
    assert "The security token included in the request is expired" in err and "aws sso login" in err
    assert region.sent("RunInstances") == [] and runs() == []

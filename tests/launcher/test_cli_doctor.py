"""`fastlaunch doctor` over an AWS on loopback: what a new user sees, and what it ends with."""

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cloud_commands import configure
from fake_train.launcher import app_context
from moto_gaps import image_digest
from moto_server import MotoServer, backend
from wheel_builder import make_wheel

from fastlaunch.aws.client import Aws
from fastlaunch.backends.node_agent import agent_archive, agent_object, agent_sha256
from fastlaunch.cli.main import run
from fastlaunch.jobs.code_bundle import cached_bundle

TYPE = ("--instance", "p5.48xlarge")
P_QUOTA, P5_SPOT_QUOTA = "L-417A185B", "L-C4BD4855"
BASE = "2.13-cu133-amzn2023"
#: For all tests, since making a client takes most of their time.
AWS = Aws(attempts=1, timeouts_s=(5, 20))


#: As an update writes it.
FRESH = """prices:
- {instance: p5.48xlarge, service: ec2, region: us-east-1, usd_per_hour: 55.04, as_of: 2026-11-20, source: x}
- {instance: p5.48xlarge, service: sagemaker, region: us-east-1, usd_per_hour: 63,
   as_of: 2026-11-20, source: x}
"""
ROLE = "arn:aws:iam::123456789012:role/fastlaunch-scheduler"


@pytest.fixture
def account(aws_server: MotoServer, isolated: Path) -> MotoServer:
    """An account with all that a job on p5 in us-east-1 needs, and a config file that names it."""
    region = aws_server.set_up_region("us-east-1")
    aws_server.quotas["us-east-1", P_QUOTA] = 384.0
    aws_server.images["us-east-1", "763104351884", "pytorch", BASE] = image_digest(BASE)
    # A default VPC of AWS's has a way out; moto's has none.
    ec2 = backend("ec2", "us-east-1")
    gateway, vpc = ec2.create_internet_gateway(), ec2.get_default_vpc()
    ec2.attach_internet_gateway(gateway.id, vpc.id)
    (main,) = (table for table in ec2.route_tables.values() if table.vpc_id == vpc.id)
    ec2.create_route(main.id, "0.0.0.0/0", gateway_id=gateway.id)
    configure(isolated, region)
    isolated.mkdir(exist_ok=True)
    (isolated / "prices.yaml").write_text(FRESH)
    return aws_server


def doctor(*argv: str, aws: Aws = AWS) -> int:
    """Exit code of `fastlaunch doctor ARGV` on 2026-11-21."""
    now = datetime(2026, 11, 21, 12, tzinfo=UTC)
    return run(["doctor", *argv], replace(app_context("doctor", *argv), connect=lambda: aws, now=lambda: now))


def checks(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict[str, dict[str, Any]]:
    """The first check of every name, from the command's JSON."""
    capsys.readouterr()
    assert doctor(*argv, "--output", "json") == code
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is (code == 0)
    return {check["name"]: check for check in reversed(data["checks"])}


def test_where_all_is_there_it_ends_with_0_and_the_next_command(
    account: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(*TYPE) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Nothing is missing: 17 of 17 checks ok.\n\n")
    # A column has one kind of thing: types and places stand in two.
    assert "  region or zone  " in out and "p5.48xlarge in us-east-1" not in out
    assert "(account 123456789012)" in out and "config.yaml" in out
    assert err.endswith("next: fastlaunch submit --instance p5.48xlarge --recipe bf16 --dry-run\n")
    # It changes nothing but one object, and asks each thing once, but for who is logged in and the role.
    reads = ("Describe", "Get", "BatchGet", "Head", "Simulate", "List")
    (changed,) = (sent for sent in account.sent() if not sent.action.startswith(reads))
    assert (changed.action, changed.parameters["Key"]) == ("PutObject", "fastlaunch/runs/written-by-doctor")
    twice = {name for name, count in account.counts().items() if count > 1}
    assert twice <= {"GetCallerIdentity", "GetInstanceProfile", "SimulatePrincipalPolicy"}
    (isolated / "prices.yaml").unlink()
    old = checks(capsys, *TYPE)["price"]
    assert old["result"] == "warning" and "fastlaunch prices update" in old["hint"]


@pytest.mark.parametrize(
    "argv",
    [
        ("--instance", "g5.xlarge", "--num-nodes", "2", "--allow-tcp"),
        ("--instance", "p5.48xlarge", "--purchase", "spot", "--max-price", "30", "--region", "us-east-1"),
    ],
)
def test_the_next_command_is_for_what_was_checked(
    account: MotoServer, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]
) -> None:
    account.default_quotas["us-east-1", "L-DB2E81BA"] = 384
    account.default_quotas["us-east-1", "L-C4BD4855"] = 384
    assert doctor(*argv) == 0
    err = capsys.readouterr().err
    assert err.startswith(f"next: fastlaunch submit {' '.join(argv)} --recipe bf16 ")
    # It is one that can be typed.
    typed = err.removeprefix("next: fastlaunch ").split()
    assert run(typed, app_context(*typed)) == 0


def test_what_sagemaker_needs_is_checked_instead(
    account: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    account.quotas["us-east-1", "ml.p5.48xlarge for training job usage"] = 1
    argv = ("--instance", "ml.p5.48xlarge", "--num-nodes", "2")
    configure(isolated, bucket="runs-us-east-1", role=account.training_jobs.role())
    results = checks(capsys, *argv, code=3)
    assert results["quota"]["instance"] == "ml.p5.48xlarge"
    assert "needs 2 instances of 1: ml.p5.48xlarge for training job usage" in results["quota"]["message"]
    account.quotas["us-east-1", "ml.p5.48xlarge for training job usage"] = 2
    assert list(checks(capsys, *argv)) == [
        *("quota", "stored code", "bucket", "role", "container image", "price", "region", "config"),
        *("price file", "login", "config file"),
    ]
    capsys.readouterr()
    assert doctor(*argv) == 0
    assert capsys.readouterr().err == (
        "next: fastlaunch submit --instance ml.p5.48xlarge --num-nodes 2 --recipe bf16 --dry-run\n"
    )
    assert {check["result"] for check in checks(capsys, "--backend", "sagemaker").values()} == {"ok"}
    configure(isolated, bucket="runs-us-east-1")
    assert "role: ARN" in checks(capsys, *argv, code=2)["config"]["hint"]


def test_without_a_login_it_says_what_to_do(
    isolated: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(*TYPE, aws=Aws(attempts=1)) == 3
    out, err = capsys.readouterr()
    assert re.match(r"\d of \d+ checks failed: (.*, )?config(, .*)?; .* not checked\.\n\n", out)
    assert "failed: login: " in out and "Unable to locate credentials" in out
    assert "failed: config (us-east-1): neither bucket nor instance profile is named" in out
    assert "not asked, for want of a login" in out
    assert "next: aws configure" in err.splitlines()


@pytest.mark.parametrize("profile", ["missing-program", "no-json"])
def test_a_login_that_failed_is_not_mended_by_configuring_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], profile: str
) -> None:
    programs = {"missing-program": "/no/such/program", "no-json": "/bin/echo no json"}
    config = tmp_path / "aws-config"
    config.write_text(f"[profile {profile}]\ncredential_process = {programs[profile]}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_PROFILE", profile)
    assert doctor(*TYPE, aws=Aws(attempts=1)) == 3
    out, err = capsys.readouterr()
    assert f"failed: login: the AWS login of profile '{profile}' failed" in out
    assert err.splitlines()[-1] == "next: fastlaunch doctor --instance p5.48xlarge"


def test_an_empty_config_ends_with_2(
    account: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(isolated)
    results = checks(capsys, *TYPE, code=2)
    assert (
        results["config"]["error"] == "UserError"
        and "`fastlaunch doctor --setup`" in results["config"]["hint"]
    )
    assert results["bucket"]["result"] == "not checked"
    assert results["quota"]["result"] == "ok"


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("instance profile", {"instance_profile": "nobodys"}),
        ("bucket", {"bucket": "nobodys-bucket"}),
        ("subnet", {"subnets": {"us-east-1a": "subnet-0123456789abcdef0"}}),
    ],
)
def test_what_does_not_exist_ends_with_3(
    account: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str], name: str, wrong: dict[str, Any]
) -> None:
    named = {"bucket": "runs-us-east-1", "instance_profile": "fastlaunch-node"}
    configure(isolated, **{**named, "scheduler_role": ROLE, **wrong})
    results = checks(capsys, code=3).values()
    assert [check["name"] for check in results if check["result"] == "failed"] == [name]


def test_what_lies_where_agent_and_code_belong_is_compared(
    account: MotoServer,
    isolated: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pin = make_wheel(isolated / "wheels", "tiny")
    pins = tmp_path / "wheels.txt"
    pins.write_text(f"{pin.name}=={pin.version} --hash=sha256:{pin.sha256}\n")
    monkeypatch.setenv("FASTLAUNCH_WHEELS", str(pins))
    bundle = cached_bundle(isolated / "wheels", [pin])
    assert bundle is not None
    agent = agent_object("runs-us-east-1", "fastlaunch", agent_sha256()).key
    belong = {agent: agent_archive(), f"fastlaunch/code/{bundle.sha256}.tar.gz": bundle.data}
    for bodies, code in ((belong, 0), (dict.fromkeys(belong, b"junk"), 3)):
        for key, body in bodies.items():
            backend("s3", "aws").put_object("runs-us-east-1", key, body)
        assert doctor(*TYPE, "--output", "json") == code
        results = json.loads(capsys.readouterr().out)["checks"]
        stored = [check for check in results if check["name"] == "stored code"]
        for key, check in zip(belong, stored, strict=True):
            assert f"s3://runs-us-east-1/{key}" in check["message"]
        assert {check["result"] for check in stored} == {"failed" if code else "ok"}


@pytest.mark.parametrize("argv", [("--purchase", "auction"), ("--instance", "p9.huge")])
def test_a_wrong_option_is_a_usage_error(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(*argv) == 2


def test_what_an_account_needs_is_printed_without_asking_anything(
    aws_server: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor("--setup") == 0
    assert capsys.readouterr().out == Path(__file__).parents[2].joinpath("docs/setup.md").read_text()
    assert not aws_server.sent()

"""`fastlaunch doctor` over an AWS on loopback: what a new user sees, and what it ends with."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_train.launcher import app_context
from moto_gaps import image_digest
from moto_nodes import Block
from moto_server import MotoServer, backend

from fastlaunch.aws.client import Aws
from fastlaunch.cli.main import run
from fastlaunch.core.settings import RegionSettings

TYPE = ("--instance", "p5.48xlarge")
P_QUOTA, P5_SPOT_QUOTA = "L-417A185B", "L-C4BD4855"
BASE = "2.13-cu133-amzn2023"
#: For all tests, since making a client takes most of their time.
AWS = Aws(attempts=1, timeouts_s=(5, 20))


def configure(isolated: Path, region: RegionSettings | None, **changes: Any) -> None:
    """Write the config file of us-east-1."""
    written: dict[str, Any] = {}
    if region is not None:
        written = {
            "bucket": region.bucket,
            "instance_profile": region.instance_profile,
            "security_groups": list(region.security_groups),
            "subnets": dict(list(region.subnets.items())[:2]),
            **({"scheduler_role": region.scheduler_role} if region.scheduler_role else {}),
        }
    (isolated.parent / "config.yaml").write_text(yaml.safe_dump({"aws": {"us-east-1": written | changes}}))


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
    configure(isolated, replace(region, scheduler_role=scheduler_role()))
    return aws_server


def scheduler_role() -> str:
    """ARN of a role that EventBridge Scheduler may take on."""
    trust = {"Effect": "Allow", "Principal": {"Service": "scheduler.amazonaws.com"}}
    policy = json.dumps({"Statement": [{**trust, "Action": "sts:AssumeRole"}]})
    return str(backend("iam", "aws").create_role("timer", policy, "/", None, "", [], None).arn)


def doctor(*argv: str, aws: Aws = AWS) -> int:
    """Exit code of `fastlaunch doctor ARGV` on 2026-11-21."""
    now = datetime(2026, 11, 21, 12, tzinfo=UTC)
    return run(["doctor", *argv], replace(app_context("doctor", *argv), connect=lambda: aws, now=lambda: now))


def told(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict[str, dict[str, Any]]:
    """The first check of every name, from the command's JSON."""
    capsys.readouterr()
    assert doctor(*argv, "--output", "json") == code
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is (code == 0)
    return {check["name"]: check for check in reversed(data["checks"])}


def test_where_all_is_there_it_ends_with_0_and_the_next_command(
    account: MotoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(*TYPE) == 0
    out, err = capsys.readouterr()
    assert out.endswith("16 checks: 16 ok.\n")
    assert "arn:aws:sts::123456789012:user/moto (account 123456789012)" in out
    assert err == "next: fastlaunch submit --instance p5.48xlarge --recipe bf16 --dry-run\n"


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


def test_it_changes_nothing_but_one_object(account: MotoServer, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert doctor(*TYPE) == 0
    reads = ("Describe", "Get", "BatchGet", "Head", "Simulate", "List")
    changes = [one.action for one in account.sent() if not one.action.startswith(reads)]
    assert changes == ["PutObject"] * 2
    keys = {str(one.parameters["Key"]) for one in account.sent("PutObject")}
    assert keys == {"fastlaunch/doctor/written-by-doctor"}


def test_each_thing_is_asked_once(account: MotoServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--instance", "p5.48xlarge,p4d.24xlarge") == 0
    expected_twice = {"DescribeInstanceTypeOfferings", "GetCallerIdentity"}
    # Of who is logged in, and of the machine's role.
    expected_twice |= {"GetInstanceProfile", "SimulatePrincipalPolicy"}
    assert {name for name, count in account.counts().items() if count > 1} == expected_twice


def test_what_sagemaker_needs_is_checked_instead(
    account: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    account.quotas["us-east-1", "ml.p5.48xlarge for training job usage"] = 1
    argv = ("--instance", "ml.p5.48xlarge", "--num-nodes", "2")
    configure(isolated, None, bucket="runs-us-east-1", role=account.training_jobs.role())
    found = told(capsys, *argv, code=3)
    assert found["quota"]["instance"] == "ml.p5.48xlarge"
    assert "needs 2 instances of 1: ml.p5.48xlarge for training job usage" in found["quota"]["told"]
    account.quotas["us-east-1", "ml.p5.48xlarge for training job usage"] = 2
    assert list(told(capsys, *argv)) == [
        *("price", "price file", "quota", "bucket", "role", "container image", "region", "config", "login"),
        "config file",
    ]
    capsys.readouterr()
    assert doctor(*argv) == 0
    assert capsys.readouterr().err == (
        "next: fastlaunch submit --instance ml.p5.48xlarge --num-nodes 2 --recipe bf16 --dry-run\n"
    )
    # What a training plan holds counts against no quota.
    account.quotas["us-east-1", "ml.p5.48xlarge for training job usage"] = 0
    plan = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/ours"
    assert "quota" not in told(capsys, *argv, "--training-plan", plan)
    account.quotas["us-east-1", "ml.p5.48xlarge for training job usage"] = 2
    # A user's machine, an instance profile and a subnet are EC2's.
    assert {check["result"] for check in told(capsys, "--backend", "sagemaker").values()} == {"ok"}
    configure(isolated, None, bucket="runs-us-east-1")
    missing = told(capsys, *argv, code=2)
    assert "role: ARN" in missing["config"]["hint"]
    assert "aws cloudformation deploy --region us-east-1" in missing["role"]["hint"]


def test_a_block_is_looked_at(account: MotoServer, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--purchase", "capacity-block", "--reservation", "cr-0a1b2c3d", "--block-fee", "944")
    assert (
        "there is no reservation cr-0a1b2c3d" in told(capsys, *TYPE, *argv, code=3)["capacity block"]["told"]
    )
    start = datetime(2026, 11, 21, 11, 30, tzinfo=UTC)
    account.blocks["cr-0a1b2c3d"] = Block(
        id="cr-0a1b2c3d",
        region="us-east-1",
        zone="us-east-1b",
        instance_type="p5.48xlarge",
        num_instances=1,
        starts_at=start,
        ends_at=start + timedelta(days=1),
    )
    found = told(capsys, *TYPE, *argv)
    assert found["capacity block"]["told"].endswith("1 of 1 instances free, 23 h 30 min left")
    assert "quota" not in found


def test_without_a_login_it_says_what_to_do(
    isolated: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(*TYPE, aws=Aws(attempts=1)) == 3
    out, err = capsys.readouterr()
    assert "failed: login: " in out and "Unable to locate credentials" in out
    assert "failed: config (us-east-1): neither bucket nor instance profile is named" in out
    assert "not asked, for want of a login" in out
    assert err.startswith("next: aws configure")


def test_an_empty_config_ends_with_2(
    account: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(isolated, None)
    found = told(capsys, *TYPE, code=2)
    assert (
        found["config"]["error"] == "UserError" and "`fastlaunch doctor --setup`" in found["config"]["hint"]
    )
    assert found["bucket"]["result"] == "not checked"
    assert found["quota"]["result"] == "ok"


def test_the_config_file_is_named(account: MotoServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys)["config file"]["told"].endswith("config.yaml")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("instance profile", "NotAuthorised"), ("bucket", "BadConfiguration"), ("subnet", "BadConfiguration")],
)
def test_what_does_not_exist_ends_with_3(
    account: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    wrong = {
        "instance profile": {"instance_profile": "nobodys"},
        "bucket": {"bucket": "nobodys-bucket"},
        "subnet": {"subnets": {"us-east-1a": "subnet-0123456789abcdef0"}},
    }
    configure(isolated, RegionSettings(bucket="runs-us-east-1", instance_profile="fastlaunch-node"))
    assert told(capsys)["bucket"]["result"] == "ok"
    good = {"bucket": "runs-us-east-1", "instance_profile": "fastlaunch-node"}
    configure(isolated, None, **{**good, **wrong[name]})
    found = told(capsys, code=3)
    assert (found[name]["result"], found[name]["error"]) == ("failed", kind)
    assert [one["name"] for one in found.values() if one["result"] == "failed"] == [name]


def test_quota_counts_what_others_run(account: MotoServer, capsys: pytest.CaptureFixture[str]) -> None:
    from moto_gaps import machine_image_id

    AWS.run_instances(
        "us-east-1",
        {
            "ImageId": machine_image_id("us-east-1"),
            "InstanceType": "p4d.24xlarge",
            "MinCount": 3,
            "MaxCount": 3,
            "ClientToken": "somebody-elses",
        },
    )
    found = told(capsys, *TYPE, code=3)["quota"]
    assert (found["error"], found["instance"]) == ("QuotaExceeded", "p5.48xlarge")
    assert "needs 192 vCPUs, 288 of 384 are in use" in found["told"]
    assert "ask for 480 vCPUs: https://us-east-1.console" in found["hint"]
    # Spot has a quota of its own.
    account.quotas["us-east-1", P5_SPOT_QUOTA] = 192.0
    assert "0 of 192 are in use" in told(capsys, *TYPE, "--purchase", "spot")["quota"]["told"]


def test_a_new_account_has_aws_default_quota(account: MotoServer, capsys: pytest.CaptureFixture[str]) -> None:
    account.quotas.clear()
    account.default_quotas["us-east-1", P_QUOTA] = 0.0
    assert "0 of 0, AWS's default" in told(capsys, *TYPE, code=3)["quota"]["told"]


def test_a_role_that_may_not_be_passed_fails(account: MotoServer, capsys: pytest.CaptureFixture[str]) -> None:
    account.denied.add("iam:PassRole")
    found = told(capsys, code=3)["instance profile"]
    assert "may not pass" in found["told"]


@pytest.mark.parametrize(
    ("action", "names"),
    [
        ("GetServiceQuota", ["quota"]),
        ("GetInstanceProfile", ["instance profile"]),
        ("SimulatePrincipalPolicy", ["scheduler role", "instance profile"]),
        ("GetRole", []),
        ("DescribeVpcs", []),
        ("DescribeRouteTables", []),
        ("HeadBucket", []),
    ],
)
def test_a_lesser_right_that_is_lacking_fails_nothing(
    account: MotoServer, capsys: pytest.CaptureFixture[str], action: str, names: list[str]
) -> None:
    account.refuse(action, "AccessDenied", status=403)
    found = told(capsys, *TYPE)
    assert [one["name"] for one in found.values() if one["result"] != "ok"] == names


@pytest.mark.parametrize(
    ("action", "name"),
    [
        ("GetParameter", "machine image"),
        ("BatchGetImage", "container image"),
        ("PutObject", "bucket"),
    ],
)
def test_a_right_that_the_job_needs_fails_that_check(
    account: MotoServer, capsys: pytest.CaptureFixture[str], action: str, name: str
) -> None:
    account.refuse(action, "AccessDenied", status=403)
    found = told(capsys, *TYPE, code=3)
    assert (found[name]["result"], found[name]["error"]) == ("failed", "NotAuthorised")
    assert found["login"]["result"] == found["price"]["result"] == "ok"


def test_a_failure_is_told_with_what_to_do(account: MotoServer, capsys: pytest.CaptureFixture[str]) -> None:
    account.quotas["us-east-1", P_QUOTA] = 96.0
    assert doctor(*TYPE) == 3
    out, err = capsys.readouterr()
    assert "failed: quota (p5.48xlarge in us-east-1): not enough quota: needs 192 vCPUs" in out
    assert "  ask for 192 vCPUs: " in out
    assert "16 checks: 15 ok, 1 failed." in out
    assert err == "next: mend the first that failed, then fastlaunch doctor --instance p5.48xlarge\n"


def test_an_unknown_region_is_told(account: MotoServer, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "--region", "eu-west-9", code=3)
    assert "eu-west-9 does not exist" in found["region"]["told"]


def test_p5e_wants_a_limit(account: MotoServer, capsys: pytest.CaptureFixture[str]) -> None:
    account.quotas["us-east-1", P5_SPOT_QUOTA] = 192.0
    argv = ("--instance", "p5e.48xlarge", "--purchase", "spot")
    assert "--max-price" in told(capsys, *argv, code=3)["price"]["hint"]
    assert told(capsys, *argv, "--max-price", "30", code=3)["price"]["told"].startswith("at most $30/h")


@pytest.mark.parametrize("argv", [("--purchase", "auction"), ("--instance", "p9.huge")])
def test_a_wrong_option_is_a_usage_error(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(*argv) == 2


def test_what_an_account_needs_is_printed_without_asking_anything(
    aws_server: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor("--setup") == 0
    assert capsys.readouterr().out == Path(__file__).parents[2].joinpath("docs/setup.md").read_text()
    assert not aws_server.sent()

"""`fastlaunch runs push` and `pull`, as they are typed, against a mock of AWS: two homes, two people."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import pytest
from cloud_commands import aws, cloud, configure

if TYPE_CHECKING:
    from moto_server import MotoServer

pytestmark = pytest.mark.cloud

TEAM = "s3://team/runs"


@pytest.fixture(autouse=True)
def _region(isolated: Path, aws_server: "MotoServer") -> None:
    configure(isolated, aws_server.set_up_region("us-east-1"))
    aws_server.set_up_region("eu-west-1", bucket="team-eu")
    boto3.client("s3").create_bucket(Bucket="team")


def become(name: str, isolated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a login and a home of that name from now on."""
    boto3.client("iam").create_role(RoleName=f"role-{name}", AssumeRolePolicyDocument="{}")
    given = boto3.client("sts").assume_role(
        RoleArn=f"arn:aws:iam::123456789012:role/role-{name}", RoleSessionName=name
    )["Credentials"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", given["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", given["SecretAccessKey"])
    monkeypatch.setenv("AWS_SESSION_TOKEN", given["SessionToken"])
    monkeypatch.setenv("FASTLAUNCH_HOME", str(isolated / name))


def typed(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    # Clients, and the session, keep the credentials that they were made with.
    aws()._clients.clear()
    aws()._session = None
    assert cloud(*argv) == code
    out, err = capsys.readouterr()
    return out, err


def test_two_people_share_their_runs(
    isolated: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training = ("submit", "--local", "--workload", "vit-tiny", "--steps", "24", "--batch-size", "2")
    for name, recipe in (("ann", "fp32"), ("bob", "bf16")):
        become(name, isolated, monkeypatch)
        typed(capsys, *training, "--recipe", recipe)
        assert "1 run" in typed(capsys, "runs", "push", TEAM, "--dry-run")[0]
        assert typed(capsys, "runs", "push", TEAM)[0] == f"Pushed 1 run to {TEAM}/.\n"
    assert typed(capsys, "runs", "pull", TEAM)[0].startswith(f"Pulled 1 run from {TEAM}/; 1 was")
    again = json.loads(typed(capsys, "runs", "pull", TEAM, "--output", "json")[0])
    assert (again["new"], len(again["known"])) == ([], 2)
    rows = json.loads(typed(capsys, "runs", "list", "--output", "json")[0])
    owners = sorted(((row["owner"] or "").rpartition(":")[2], row["recipe"]) for row in rows)
    assert owners == [("", "bf16"), ("ann", "fp32")]
    (theirs,) = (row["id"] for row in rows if row["owner"])
    (of_ann,) = (row["owner"] for row in rows if row["owner"])
    # Each lies in the folder of whoever pushed it.
    keys = [stored["Key"] for stored in boto3.client("s3").list_objects_v2(Bucket="team")["Contents"]]
    assert sorted(key.rpartition("/")[0].rpartition(":")[2] for key in keys) == ["ann", "bob"]
    shown = json.loads(typed(capsys, "runs", "show", theirs, "--output", "json")[0])
    assert (shown["owner"], shown["account"]) == (of_ann, "123456789012")
    compared = json.loads(typed(capsys, "compare", "--every-run", "--output", "json")[0])
    assert {row["recipe"]: row["shared_by"] for row in compared["rows"]} == {"fp32": [of_ann], "bf16": []}
    joined = json.loads(typed(capsys, "compare", "--every-run", "--with-shared", "--output", "json")[0])
    assert [row["shared_by"] for row in joined["rows"]] == [row["shared_by"] for row in compared["rows"]]
    # It is looked at, and nothing more.
    typed(capsys, "resume", theirs, code=2)
    assert typed(capsys, "runs", "push", TEAM, theirs, code=1)[1].startswith(
        f"warning: run {theirs} is left out"
    )


def test_without_a_uri_the_config_files_bucket_counts(capsys: pytest.CaptureFixture[str]) -> None:
    where = "s3://runs-us-east-1/fastlaunch/shared/"
    assert typed(capsys, "runs", "push")[0] == f"Pushed 0 runs to {where}.\n"
    assert typed(capsys, "runs", "pull")[0] == f"Pulled 0 runs from {where}.\n"


@pytest.mark.parametrize(
    ("argv", "code", "problem"),
    [
        (["pull", "s3://nobodys-bucket/x"], 2, "no bucket nobodys-bucket"),
        (["pull", "s3://team-eu/x"], 2, "eu-west-1"),
        (["pull", "/tmp/x"], 2, "no folder in S3"),
        (["push", "s3://team/a", "s3://team/b"], 2, "one folder"),
        (["push", TEAM, "nothing"], 2, "nothing"),
        (["pull", "--region", "ap-south-1"], 2, "no bucket in ap-south-1"),
    ],
)
def test_what_cannot_be_is_said(
    capsys: pytest.CaptureFixture[str], argv: list[str], code: int, problem: str
) -> None:
    out, err = typed(capsys, "runs", *argv, code=code)
    assert out == "" and problem in err


@pytest.mark.parametrize("action", ["HeadBucket", "ListObjectsV2"])
def test_a_denied_call_is_named(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str], action: str
) -> None:
    aws_server.refuse(action, "AccessDenied", status=403)
    err = typed(capsys, "runs", "pull", TEAM, code=3)[1]
    assert "s3:ListBucket" in err or action in err

"""docs/aws-setup.md: its policies parse, and name exactly what the launcher and the node ask of AWS."""

import ast
import json
import re
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastlaunch.base_image_file import shipped_base_images
from fastlaunch.image_build import DEFAULT_REPOSITORY
from fastlaunch.preflight import DOCTOR_KEY
from fastlaunch.settings import RegionSettings, load_settings
from fastlaunch.shipped import shipped

DOC = shipped("docs/aws-setup.md")

#: What a call is called in IAM, where it is not its own name. GetCallerIdentity is allowed to everybody.
IAM_NAMES = {
    "s3:HeadBucket": {"s3:ListBucket"},
    "s3:ListObjectsV2": {"s3:ListBucket"},
    "sts:GetCallerIdentity": set(),
    "ec2:RunInstances": {"ec2:RunInstances", "ec2:CreateTags", "iam:PassRole"},
}
#: What docker asks of a registry; docs.aws.amazon.com/AmazonECR, "Pushing" and "Private repository policies".
PULL = {"ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"}
PUSH = {"ecr:CompleteLayerUpload", "ecr:InitiateLayerUpload", "ecr:PutImage", "ecr:UploadLayerPart"}

#: What the commands of the node's program need. Large files go in parts, which are dropped if that fails.
NODE_COMMANDS = {
    ("s3", "cp"): {"s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"},
    ("s3", "ls"): {"s3:ListBucket"},
    ("s3api", "head-object"): {"s3:GetObject"},
    ("ecr", "get-login-password"): {"ecr:GetAuthorizationToken"},
}


def policy(name: str) -> dict[str, Any]:
    """The policy that the text gives under this file name."""
    found = re.search(
        rf"`{re.escape(name)}`:\n\n```json\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL
    )
    assert found, f"{DOC} has no {name}"
    data: dict[str, Any] = json.loads(found[1])
    assert data["Version"] == "2012-10-17"
    return data


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def actions(name: str) -> set[str]:
    """Every action that the policy allows."""
    return {action for statement in policy(name)["Statement"] for action in listed(statement["Action"])}


def calls_of_the_launcher() -> set[str]:
    """`service:Action` of every call in aws.py and the modules of typed calls beside it."""
    sources = [path for path in files("fastlaunch").iterdir() if re.fullmatch(r"aws(_\w+)?\.py", path.name)]
    found = set()
    for node in (node for path in sources for node in ast.walk(ast.parse(path.read_text()))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("ask", "pages"):
            parts = [node.args[0], node.args[2]]
        elif name == "Asked":
            named = {keyword.arg: keyword.value for keyword in node.keywords}
            parts = [named["service"], named["action"]]
        else:
            continue
        if all(isinstance(part, ast.Constant) for part in parts):
            found.add(":".join(str(part.value) for part in parts))  # type: ignore[attr-defined]
    return found


def test_every_call_of_the_launcher_is_allowed_and_nothing_else() -> None:
    calls = calls_of_the_launcher()
    assert len(calls) > 20
    needed = set().union(*(IAM_NAMES.get(call, {call}) for call in calls))
    assert actions("launcher-policy.json") == needed | PULL | PUSH


def test_every_command_of_the_node_is_allowed_and_nothing_else() -> None:
    template = (files("fastlaunch.backends") / "templates" / "user_data.sh.j2").read_text()
    commands = set(re.findall(r"\bcloud (s3|s3api|ecr) ([a-z-]+)", template))
    assert commands == set(NODE_COMMANDS)
    needed = set().union(*(NODE_COMMANDS[command] for command in commands))
    assert actions("node-policy.json") == needed | PULL


def test_the_node_reaches_its_runs_and_the_code_alone() -> None:
    by_name = {statement["Sid"]: statement for statement in policy("node-policy.json")["Statement"]}
    prefix = RegionSettings().prefix
    assert by_name["Runs"]["Resource"] == f"arn:aws:s3:::BUCKET/{prefix}/runs/*"
    assert by_name["Code"]["Resource"] == f"arn:aws:s3:::BUCKET/{prefix}/code/*"
    assert by_name["Code"]["Action"] == "s3:GetObject"
    assert by_name["FindCheckpoints"]["Condition"] == {"StringLike": {"s3:prefix": f"{prefix}/runs/*"}}
    assert not any(action.startswith(("ec2:", "iam:")) for action in actions("node-policy.json"))


@pytest.mark.parametrize(
    ("name", "sid"), [("node-policy.json", "ImagePull"), ("launcher-policy.json", "ContainerImage")]
)
def test_images_of_aws_and_of_the_account_can_be_pulled(name: str, sid: str) -> None:
    # A registry of another account wants rights on both sides: `fastlaunch build` pulls its base image.
    (statement,) = (one for one in policy(name)["Statement"] if one["Sid"] == sid)
    assert set(statement["Action"]) == PULL
    wanted = {f"763104351884:repository/{image.repository}" for image in shipped_base_images().images}
    for repository in {*wanted, f"ACCOUNT:repository/{DEFAULT_REPOSITORY}"}:
        arn = f"arn:aws:ecr:us-west-2:{repository}"
        assert any(fnmatchcase(arn, pattern) for pattern in statement["Resource"]), arn


def test_only_ec2_takes_the_nodes_role() -> None:
    (statement,) = policy("node-trust.json")["Statement"]
    assert statement["Principal"] == {"Service": "ec2.amazonaws.com"}
    assert statement["Action"] == "sts:AssumeRole"


def test_the_launcher_starts_and_ends_tagged_instances_alone() -> None:
    by_name = {statement["Sid"]: statement for statement in policy("launcher-policy.json")["Statement"]}
    tags = {"aws:RequestTag/fastlaunch:run": "false", "aws:RequestTag/fastlaunch:max-minutes": "false"}
    assert by_name["StartTagged"]["Condition"] == {"Null": tags}
    assert by_name["EndTagged"]["Condition"] == {"Null": {"aws:ResourceTag/fastlaunch:run": "false"}}
    started = [s["Resource"] for s in by_name.values() if s["Action"] == "ec2:RunInstances"]
    untagged = [arn for arn in started[1] if "instance/" in arn or "volume/" in arn]
    assert len(started) == 2 and untagged == []
    assert f"{RegionSettings().prefix}/{DOCTOR_KEY}".startswith("fastlaunch/")
    assert by_name["Objects"]["Resource"] == "arn:aws:s3:::BUCKET/fastlaunch/*"


@pytest.mark.parametrize(("name", "limit"), [("launcher-policy.json", 6144), ("node-policy.json", 10240)])
def test_a_policy_is_no_larger_than_iam_takes(name: str, limit: int) -> None:
    # IAM does not count white space. docs.aws.amazon.com/IAM, "IAM and AWS STS quotas".
    assert len(re.sub(r"\s", "", json.dumps(policy(name)))) < limit - 200


def test_the_config_file_of_the_text_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(r"```yaml\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    path = tmp_path / "config.yaml"
    path.write_text(found[1])
    monkeypatch.setenv("FASTLAUNCH_CONFIG", str(path))
    here = load_settings().aws["us-east-1"]
    assert here.bucket == "acme-training" and list(here.subnets) == ["us-east-1a", "us-east-1b"]
    assert yaml.safe_load(found[1])["region"] == "us-east-1"

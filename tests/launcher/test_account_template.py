"""The CloudFormation template: what it makes, its policies, and moto's deployment of it."""

import ast
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from fastlaunch.account.policies import policy, trust
from fastlaunch.account.template import template, template_text
from fastlaunch.account_statements import AccountNames
from fastlaunch.cli import run
from fastlaunch.core.settings import load_settings

if TYPE_CHECKING:
    from pathlib import Path

    from moto_server import MotoServer

ZONES = ("us-east-1a", "us-east-1b")
#: What moto 5.2.5's CloudFormation does not make, and warns of: held to the schemas of cfn-lint alone.
NOT_IN_MOTO = {"AWS::EC2::PlacementGroup", "AWS::EC2::SecurityGroupEgress", "AWS::S3::BucketPolicy"}
KEY = "arn:aws:kms:us-east-1:123456789012:key/0a1b2c3d"


def resources() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(template_text(template(zones=ZONES)))["Resources"]
    return found


def plain(value: Any) -> Any:
    """The data with the text of every Fn::Sub in its place."""
    if isinstance(value, dict):
        return value["Fn::Sub"] if value.keys() == {"Fn::Sub"} else {k: plain(v) for k, v in value.items()}
    return [plain(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kms_key", [None, KEY])
def test_its_policies_are_the_policies(kms_key: str | None) -> None:
    names = AccountNames(
        account="${AWS::AccountId}",
        partition="${AWS::Partition}",
        bucket="${BucketName}",
        prefix="${Prefix}",
        registry="${ImageRegistry}",
        repository="${RepositoryName}",
        node_role="${NodeRole.Arn}",
        training_role="${TrainingRole.Arn}",
        scheduler_role="${SchedulerRole.Arn}",
        kms_key=kms_key,
    )
    made = yaml.safe_load(template_text(template(zones=ZONES, kms_key=kms_key)))["Resources"]
    for name in ("node", "training", "scheduler"):
        properties = made[f"{name.capitalize()}Role"]["Properties"]
        assert plain(properties["Policies"][0]["PolicyDocument"]) == policy(name, names)
        assert plain(properties["AssumeRolePolicyDocument"]) == trust(name, names)
    for name, logical in (
        ("launcher", "LauncherPolicy"),
        ("launcher-sagemaker", "LauncherSageMakerPolicy"),
        ("launcher-build", "LauncherBuildPolicy"),
    ):
        assert plain(made[logical]["Properties"]["PolicyDocument"]) == policy(name, names)
        assert {"Ref": logical} in made["LauncherRole"]["Properties"]["ManagedPolicyArns"]


def test_the_bucket_is_closed_encrypted_and_kept() -> None:
    made = resources()
    properties = made["Bucket"]["Properties"]
    assert set(properties["PublicAccessBlockConfiguration"].values()) == {True}
    assert made["Bucket"]["DeletionPolicy"] == made["Repository"]["DeletionPolicy"] == "Retain"
    (statement,) = made["BucketTlsOnly"]["Properties"]["PolicyDocument"]["Statement"]
    assert statement["Effect"] == "Deny"
    assert statement["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    for key, algorithm in ((None, "AES256"), (KEY, "aws:kms")):
        (rule,) = template(zones=(), kms_key=key)["Resources"]["Bucket"]["Properties"]["BucketEncryption"][
            "ServerSideEncryptionConfiguration"
        ]
        assert rule["ServerSideEncryptionByDefault"]["SSEAlgorithm"] == algorithm


def test_machines_are_reached_by_each_other_alone() -> None:
    made = resources()
    group = {"Fn::GetAtt": ["SecurityGroup", "GroupId"]}
    assert "SecurityGroupIngress" not in made["SecurityGroup"]["Properties"]
    ingress = [one for one in made.values() if one["Type"] == "AWS::EC2::SecurityGroupIngress"]
    assert [one["Properties"]["SourceSecurityGroupId"] for one in ingress] == [group]
    assert made["ToEachOther"]["Properties"]["DestinationSecurityGroupId"] == group
    placed = {name for name, one in made.items() if one["Type"] == "AWS::EC2::PlacementGroup"}
    assert placed == {"PlacementGroupuseast1a", "PlacementGroupuseast1b"}


def test_the_text_says_what_every_statement_is_for_and_has_no_aliases() -> None:
    text = template_text(template(zones=ZONES, kms_key=KEY))
    lines = text.splitlines()
    statements = [n for n, line in enumerate(lines) if "- Sid: " in line and "TlsOnly" not in line]
    assert len(statements) > 30
    assert all(lines[n - 1].lstrip().startswith("# ") for n in statements)
    assert "&id" not in text and "*id" not in text
    assert len(text.encode()) < 51_200  # what `--template-body` takes


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_it_deploys_and_its_output_is_a_config_file(
    aws_server: "MotoServer", isolated: "Path", monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    aws_server.set_up_region("us-east-1")
    ec2 = boto3.client("ec2", region_name="us-east-1")
    vpc = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    table = ec2.describe_route_tables()["RouteTables"][0]["RouteTableId"]
    data = template(zones=ZONES, bucket="acme-training")
    types = {one["Type"] for one in data["Resources"].values()}
    assert types > NOT_IN_MOTO
    data["Resources"] = {
        name: one for name, one in data["Resources"].items() if one["Type"] not in NOT_IN_MOTO
    }
    lines = data["Outputs"]["ConfigFile"]["Value"]["Fn::Sub"]
    for zone in ZONES:
        lines = lines.replace(f"${{PlacementGroup{zone.replace('-', '')}}}", f"group-{zone}")
    data["Outputs"]["ConfigFile"]["Value"]["Fn::Sub"] = lines
    cloudformation = boto3.client("cloudformation", region_name="us-east-1")
    cloudformation.create_stack(
        StackName="fastlaunch",
        TemplateBody=template_text(data),
        Parameters=[
            {"ParameterKey": "Vpc", "ParameterValue": vpc},
            {"ParameterKey": "RouteTables", "ParameterValue": table},
        ],
        Capabilities=["CAPABILITY_IAM"],
    )
    (stack,) = cloudformation.describe_stacks(StackName="fastlaunch")["Stacks"]
    assert stack["StackStatus"] == "CREATE_COMPLETE"
    outputs = {one["OutputKey"]: one["OutputValue"] for one in stack["Outputs"]}
    config = isolated.parent / "config.yaml"
    config.write_text(outputs["ConfigFile"])
    here = load_settings().aws["us-east-1"]
    assert here.bucket == "acme-training"
    assert here.role is not None and here.scheduler_role is not None
    assert here.placement_groups == {zone: f"group-{zone}" for zone in ZONES}

    (endpoint,) = ec2.describe_vpc_endpoints()["VpcEndpoints"]
    assert (endpoint["ServiceName"], endpoint["RouteTableIds"]) == ("com.amazonaws.us-east-1.s3", [table])
    (group,) = ec2.describe_security_groups(GroupIds=here.security_groups)["SecurityGroups"]
    (ingress,) = group["IpPermissions"]
    assert [pair["GroupId"] for pair in ingress["UserIdGroupPairs"]] == list(here.security_groups)
    assert ingress["IpRanges"] == []

    iam = boto3.client("iam", region_name="us-east-1")
    (role,) = iam.get_instance_profile(InstanceProfileName=here.instance_profile)["InstanceProfile"]["Roles"]
    document = iam.get_role_policy(RoleName=role["RoleName"], PolicyName="fastlaunch")["PolicyDocument"]
    names = AccountNames(
        account="123456789012",
        bucket="acme-training",
        node_role=role["Arn"],
        training_role=here.role,
        scheduler_role=here.scheduler_role,
    )
    # moto keeps it as Python would print it.
    assert ast.literal_eval(document) == policy("node", names)
    version = iam.get_policy_version(PolicyArn=outputs["LauncherPolicy"], VersionId="v1")["PolicyVersion"]
    assert version["Document"] == policy("launcher", names)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_it_fits_cloudformations_own_schemas(tmp_path: "Path") -> None:
    pytest.importorskip("cfnlint", reason="moto's server brings cfn-lint along")
    paths = []
    for kms_key in (None, KEY):
        paths.append(tmp_path / f"{len(paths)}.yaml")
        paths[-1].write_text(template_text(template(zones=ZONES, kms_key=kms_key)))
    start = "import sys; from cfnlint.runner import main; sys.exit(main())"
    argv = [sys.executable, "-c", start, "--regions", "us-east-1", "--", *map(str, paths)]
    told = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (0, ""), told.stdout + told.stderr


def test_the_command_prints_one_policy_or_all_with_the_config_files_names(
    isolated: "Path", capsys: pytest.CaptureFixture[str]
) -> None:
    config = isolated.parent / "config.yaml"
    role = "arn:aws:iam::210987654321:role/own"
    config.write_text(f"aws: {{eu-west-1: {{bucket: acme, prefix: deep/er, role: '{role}'}}}}\n")
    argv = ["iam", "print", "node", "--region", "eu-west-1", "--account", "210987654321"]
    assert run(argv) == 0
    one = json.loads(capsys.readouterr().out)
    assert one["Statement"][0]["Resource"] == "arn:aws:s3:::acme/deep/er/runs/*"
    assert run(["iam", "print", *argv[3:]]) == 0
    every = json.loads(capsys.readouterr().out)
    assert every["node-policy.json"] == one
    passed = [
        s["Resource"] for s in every["launcher-sagemaker-policy.json"]["Statement"] if "Job" in s["Sid"]
    ]
    assert role in passed
    assert run(["iam", "print", "nodes"]) == 2
    assert "node-policy.json" in capsys.readouterr().err


def test_the_command_prints_the_template(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["iam", "print", "--cloudformation", "--bucket", "acme", "--region", "ap-east-1"]) == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert found["Parameters"]["BucketName"]["Default"] == "acme"
    assert found["Parameters"]["ImageRegistry"]["Default"] == "871362719292"
    assert "PlacementGroupapeast1c" in found["Resources"]
    assert run(["iam", "print", "node", "--cloudformation"]) == 2
    assert run(["iam", "print", "--cloudformation", "--prefix", ""]) == 2

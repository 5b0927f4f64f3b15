"""The CloudFormation template, docs/setup.md, docs/policies.md, and the commands that print both.

To write docs/policies.md anew: python tests/launcher/test_account_template.py
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fastlaunch.aws.policies import documents, names_by_hand, statements, template, template_text
from fastlaunch.cli.main import run
from fastlaunch.core.paths import shipped
from fastlaunch.core.settings import load_settings

ZONES = ("us-east-1a", "us-east-1b")
KEY = "arn:aws:kms:us-east-1:123456789012:key/0a1b2c3d"
SECRET = "arn:aws:secretsmanager:us-east-1:123456789012:secret:hub-x1y2z3"


def test_the_bucket_is_closed_encrypted_and_kept() -> None:
    resources = template(zones=ZONES)["Resources"]
    properties = resources["Bucket"]["Properties"]
    assert set(properties["PublicAccessBlockConfiguration"].values()) == {True}
    assert resources["Bucket"]["DeletionPolicy"] == resources["Repository"]["DeletionPolicy"] == "Retain"
    for key, algorithm in ((None, "AES256"), (KEY, "aws:kms")):
        encryption = template(zones=(), kms_key=key)["Resources"]["Bucket"]["Properties"]["BucketEncryption"]
        (rule,) = encryption["ServerSideEncryptionConfiguration"]
        assert rule["ServerSideEncryptionByDefault"]["SSEAlgorithm"] == algorithm


def test_old_versions_are_kept_for_a_while_and_those_of_expired_checkpoints_for_a_day() -> None:
    resources = template(zones=ZONES)["Resources"]
    properties = resources["Bucket"]["Properties"]
    assert properties["VersioningConfiguration"] == {"Status": "Enabled"}
    leftovers, checkpoints = properties["LifecycleConfiguration"]["Rules"]
    days = [rule["NoncurrentVersionExpiration"]["NoncurrentDays"] for rule in (leftovers, checkpoints)]
    assert days == [30, 1]
    assert leftovers["ExpiredObjectDeleteMarker"] and "Prefix" not in leftovers
    assert resources["Repository"]["Properties"]["ImageScanningConfiguration"] == {"ScanOnPush": True}
    # The text's rule, in the words of S3's own interface.
    found = re.search(r"lifecycle-configuration '(.*?)'", SETUP, re.DOTALL)
    assert found
    (by_hand,) = json.loads(found[1])["Rules"]
    assert by_hand.pop("Filter") == {}
    assert {"Id": by_hand.pop("ID"), **by_hand.pop("Expiration"), **by_hand} == leftovers


def test_machines_are_reached_by_each_other_alone() -> None:
    resources = template(zones=ZONES)["Resources"]
    group = {"Fn::GetAtt": ["SecurityGroup", "GroupId"]}
    assert "SecurityGroupIngress" not in resources["SecurityGroup"]["Properties"]
    ingress = [one for one in resources.values() if one["Type"] == "AWS::EC2::SecurityGroupIngress"]
    assert [one["Properties"]["SourceSecurityGroupId"] for one in ingress] == [group]
    assert resources["ToEachOther"]["Properties"]["DestinationSecurityGroupId"] == group


def test_every_statement_has_its_comment_and_names_the_stack() -> None:
    text = template_text(template(zones=ZONES, kms_key=KEY))
    lines = text.splitlines()
    statements = [n for n, line in enumerate(lines) if "- Sid: " in line and "TlsOnly" not in line]
    assert len(statements) > 30
    assert all(lines[n - 1].lstrip().startswith("# ") for n in statements)
    assert "Why" not in text and "&id" not in text and "*id" not in text
    assert len(text.encode()) < 51_200  # what `--template-body` takes
    role = yaml.safe_load(text)["Resources"]["NodeRole"]["Properties"]["Policies"][0]["PolicyDocument"]
    resource = {"Fn::Sub": "arn:${AWS::Partition}:s3:::${BucketName}/${Prefix}/runs/*"}
    assert role["Statement"][0]["Resource"] == resource


def test_its_output_is_a_config_file(isolated: Path) -> None:
    def value(part: re.Match[str]) -> str:
        known = {"AWS::Region": "us-east-1", "Prefix": "team"}
        role = f"arn:aws:iam::123456789012:role/{part[1].removesuffix('.Arn')}"
        group = "sg-1" if part[1] == "SecurityGroup.GroupId" else f"my-{part[1]}"
        return known.get(part[1], role if part[1].endswith(".Arn") else group)

    _, (roles, only_first) = template(zones=ZONES)["Outputs"]["ConfigFile"]["Value"]["Fn::Join"]
    _, network, without = only_first["Fn::If"]
    groups = {zone: f"my-PlacementGroup{zone.replace('-', '')}" for zone in ZONES}
    for rest, security_groups, placement_groups in (
        (network["Fn::Sub"], ("sg-1",), groups),
        # A further user's stack has only roles.
        (without, (), {}),
    ):
        text = re.sub(r"\$\{(.*?)\}", value, roles["Fn::Sub"] + rest)
        (isolated.parent / "config.yaml").write_text(text)
        here = load_settings().aws["us-east-1"]
        assert (here.bucket, here.prefix) == ("my-BucketName", "team")
        assert here.role == "arn:aws:iam::123456789012:role/TrainingRole"
        assert (here.security_groups, here.placement_groups) == (security_groups, placement_groups)


def test_a_further_users_stack_makes_roles_alone_and_every_role_is_bounded() -> None:
    resources = template(zones=ZONES)["Resources"]
    of_all = {name for name, one in resources.items() if "Condition" not in one}
    assert {resources[name]["Type"] for name in of_all} == {
        "AWS::IAM::InstanceProfile",
        "AWS::IAM::ManagedPolicy",
        "AWS::IAM::Role",
    }
    roles = [one["Properties"] for one in resources.values() if one["Type"] == "AWS::IAM::Role"]
    assert len(roles) == 4
    for role in roles:
        bound, unbound = role["PermissionsBoundary"]["Fn::If"][1:]
        assert (bound, unbound) == ({"Ref": "PermissionsBoundary"}, {"Ref": "AWS::NoValue"})


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_it_fits_cloudformations_own_schemas(tmp_path: Path) -> None:
    pytest.importorskip("cfnlint", reason="moto's server brings cfn-lint along")
    paths = []
    strict = {
        "kms_key": KEY,
        "vpc": "vpc-0a1b2c3d",
        "instance_types": ("p5*",),
        "secrets": (SECRET,),
        "inputs": ("s3://acme-data/imagenet/",),
    }
    for options in ({}, strict):
        paths.append(tmp_path / f"{len(paths)}.yaml")
        paths[-1].write_text(template_text(template(zones=ZONES, **options)))
    start = "import sys; from cfnlint.runner import main; sys.exit(main())"
    argv = [sys.executable, "-c", start, "--regions", "us-east-1", "--", *map(str, paths)]
    told = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (0, ""), told.stdout + told.stderr


def test_the_command_prints_one_policy_or_all_with_the_config_files_names(
    isolated: Path, capsys: pytest.CaptureFixture[str]
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
    for refused in (["nodes"], ["node", "--cloudformation"], ["--cloudformation", "--prefix", ""]):
        assert run(["iam", "print", *refused]) == 2


@pytest.mark.parametrize(
    ("option", "text"),
    [
        *(("--bucket", text) for text in ("*", "acme-*", "acme?", "${aws:userid}")),
        *((option, "*") for option in ("--prefix", "--account", "--repository", "--zone")),
        ("--kms-key", KEY.replace("123456789012", "*")),
        ("--node-role", "arn:aws:iam::123456789012:role/*"),
        *((option, "*") for option in ("--queue", "--only-region", "--only-vpc")),
    ],
)
def test_a_name_that_stands_for_others_is_refused(
    option: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["iam", "print", "--cloudformation", "--bucket", "acme", option, text]) == 2
    out, err = capsys.readouterr()
    assert not out and f"{text!r} would allow others, too" in err


def test_the_role_of_a_profile_made_by_the_template_has_to_be_named(
    isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (isolated.parent / "config.yaml").write_text("aws: {us-east-1: {instance_profile: NodeProfile-CK40}}\n")
    role = "arn:aws:iam::123456789012:role/NodeRole-91BQ"
    for options, is_warned in (([], True), (["--node-role", role], False)):
        assert run(["iam", "print", "launcher", *options]) == 0
        out, err = capsys.readouterr()
        assert ("get-instance-profile --instance-profile-name NodeProfile-CK40" in err) == is_warned
        assert (role in out) == (not is_warned) and ("role/fastlaunch-node" in out) == is_warned


def test_the_command_allows_what_the_config_file_and_the_options_name(
    isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = KEY.replace("0a1b", "ffff")
    here = f"volume_kms_key: '{KEY}', output_kms_key: '{other}', ami_parameter: /ours/ami"
    (isolated.parent / "config.yaml").write_text(f"aws: {{us-east-1: {{{here}}}}}\n")
    options = ["--secret", SECRET, "--only-type", "p5*", "--only-region", "us-east-1", "--only-vpc", "vpc-1"]
    assert run(["iam", "print", *options]) == 0
    by_file = json.loads(capsys.readouterr().out)
    launcher = {one["Sid"]: one for one in by_file["launcher-policy.json"]["Statement"]}
    assert launcher["VolumeKey"]["Resource"] == [KEY, other]
    assert launcher["OwnMachineImage"]["Resource"] == "arn:aws:ssm:*:*:parameter/ours/ami"
    assert launcher["StartTagged"]["Condition"]["StringLike"]["ec2:InstanceType"] == "p5*"
    assert launcher["StartTagged"]["Condition"]["StringEquals"] == {"aws:RequestedRegion": "us-east-1"}
    vpc = {"ArnLike": {"ec2:Vpc": "arn:aws:ec2:*:ACCOUNT:vpc/vpc-1"}}
    assert launcher["StartIn"]["Condition"] == vpc
    for name in ("node", "training"):
        node = {one["Sid"]: one for one in by_file[f"{name}-policy.json"]["Statement"]}
        assert node["Secrets"]["Resource"] == SECRET
    assert run(["iam", "print", "--cloudformation", "--bucket", "acme", *options]) == 0
    data = yaml.safe_load(capsys.readouterr().out)
    assert data["Parameters"]["Vpc"]["Default"] == "vpc-1"
    assert data["Parameters"]["BucketName"]["Default"] == "acme"
    in_template = data["Resources"]["LauncherPolicy"]["Properties"]["PolicyDocument"]["Statement"]
    conditions = {one["Sid"]: one.get("Condition") for one in in_template}
    within = {"Fn::Sub": "arn:${AWS::Partition}:ec2:*:${AWS::AccountId}:vpc/${Vpc}"}
    assert conditions["StartIn"] == {"ArnLike": {"ec2:Vpc": within}}
    # The keys of volumes and output are not the bucket's.
    assert KEY not in json.dumps(data["Resources"]["Bucket"])


# docs/setup.md and docs/policies.md

SETUP = shipped("docs/setup.md").read_text(encoding="utf-8")
SETUP_NAMES = names_by_hand(account="ACCOUNT", bucket="BUCKET")
POLICIES = Path(__file__).parents[2] / "docs" / "policies.md"


def policies_page() -> str:
    """Return docs/policies.md."""
    sections = [
        "# Policies\n\n[Set up an account](setup.md) says who gets which. `fastlaunch iam print NAME` prints"
        " each with the\nvalues of your account. `python tests/launcher/test_account_template.py` writes this"
        " page.\n"
    ]
    for file, document in documents(SETUP_NAMES).items():
        name = file.removesuffix("-policy.json")
        reasons = [(one["Sid"], one["Why"]) for one in statements(name, SETUP_NAMES)] if name != file else []
        table = [f"| `{sid}` | {why} |\n" for sid, why in reasons]
        head = ["| statement | what it is for |\n|---|---|\n", *table, "\n"] if table else []
        sections.append(f"## {file}\n\n{''.join(head)}```json\n{json.dumps(document, indent=2)}\n```\n")
    return "\n".join(sections)


def test_the_policies_of_the_documents_are_the_datas() -> None:
    assert POLICIES.read_text(encoding="utf-8") == policies_page()


def test_what_makes_the_account_by_hand_prints_every_document() -> None:
    printed = SETUP.partition("for file in ")[2].partition("; do")[0].replace("\\\n", " ").split()
    assert printed == [file.removesuffix(".json") for file in documents(SETUP_NAMES)]


def test_the_config_file_of_the_text_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(r"```yaml\n(.*?)```", SETUP, re.DOTALL)
    assert found
    path = tmp_path / "config.yaml"
    path.write_text(found[1])
    monkeypatch.setenv("FASTLAUNCH_CONFIG", str(path))
    settings = load_settings()
    here = settings.aws["us-east-1"]
    assert settings.region == "us-east-1"
    assert here.bucket == "acme-training" and list(here.subnets) == ["us-east-1a", "us-east-1b"]
    assert list(here.placement_groups) == list(here.subnets)
    assert (here.role, here.scheduler_role) == tuple(
        role.replace("ACCOUNT", "123456789012")
        for role in (SETUP_NAMES.training_role, SETUP_NAMES.scheduler_role)
    )


if __name__ == "__main__":
    POLICIES.write_text(policies_page(), encoding="utf-8")

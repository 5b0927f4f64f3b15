"""`fastlaunch init` over an AWS on loopback: what is made, what is not, and what is said."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import moto_stacks
import pytest
import yaml
from cloud_commands import on_terminal
from faulty_proxy import Fault, FaultyProxy
from moto_server import ACCOUNT, MotoServer, backend

from fastlaunch.aws.client import Aws
from fastlaunch.cli.main import run
from fastlaunch.core.settings import load_settings
from fastlaunch.lifecycle.world import default_context

REGION = "us-east-1"
BUCKET = f"fastlaunch-{ACCOUNT}-{REGION}"
#: For all tests, since making a client takes most of their time.
AWS = Aws(attempts=2, sleep=lambda _: None, timeouts_s=(5, 20))
CHANGES = ("Create", "Execute", "Delete", "Put", "Run", "Authorize")


@pytest.fixture
def account(aws_server: MotoServer, isolated: Path) -> MotoServer:
    """A new account: a default VPC that has a way out, and no config file."""
    ec2 = backend("ec2", REGION)
    gateway, vpc = ec2.create_internet_gateway(), ec2.get_default_vpc()
    ec2.attach_internet_gateway(gateway.id, vpc.id)
    (main,) = (table for table in ec2.route_tables.values() if table.vpc_id == vpc.id)
    ec2.create_route(main.id, "0.0.0.0/0", gateway_id=gateway.id)
    config(isolated).unlink()
    return aws_server


def config(isolated: Path) -> Path:
    return isolated.parent / "config.yaml"


def init(*argv: str, aws: Aws = AWS) -> int:
    """Exit code of `fastlaunch init`, in this process, without a terminal."""
    aws._identity = None
    argv = ("init", *argv)
    return run(
        list(argv), replace(default_context(argv, config_may_lack=True), connect=lambda: aws, ask=None)
    )


def changes(server: MotoServer) -> list[str]:
    """What was changed at AWS, in order."""
    return [sent.action for sent in server.sent() if sent.action.startswith(CHANGES)]


def deploy(template: str, bucket: str) -> None:
    """Deploy a template as an administrator."""
    parameters = {"BucketName": bucket, "Vpc": backend("ec2", REGION).get_default_vpc().id}
    change_set = AWS.create_change_set(
        *(REGION, "fastlaunch"), is_new=True, template=template, parameters=parameters, import_existing=False
    )
    AWS.execute_change_set(REGION, "fastlaunch", change_set)


def lose_default_vpc(*, names: tuple[str, ...] = ()) -> list[str]:
    """Replace the default VPC by others of these names; return their ids."""
    ec2 = backend("ec2", REGION)
    default = ec2.get_default_vpc()
    for subnet in list(ec2.get_default_subnets().values()):
        ec2.delete_subnet(subnet.id)
    del ec2.vpcs[default.id]
    made = []
    for number, name in enumerate(names):
        vpc = ec2.create_vpc(f"10.{number}.0.0/16", tags=[{"Key": "Name", "Value": name}])
        made.append(vpc.id)
        ec2.create_subnet(vpc.id, f"10.{number}.0.0/24", availability_zone=f"{REGION}a")
    return made


def test_an_account_becomes_ready_and_the_second_time_nothing_changes(
    account: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init("--yes") == 0
    out, err = capsys.readouterr()
    assert changes(account) == ["CreateChangeSet", "ExecuteChangeSet"]
    (sent,) = account.sent("CreateChangeSet")
    assert sent.parameters["Capabilities.member.1"] == "CAPABILITY_IAM"
    assert BUCKET in backend("s3", "aws").buckets
    # A gateway to S3 for the table that the subnets use, as there was none.
    (endpoint,) = backend("ec2", REGION).vpc_end_points.values()
    assert endpoint.service_name == f"com.amazonaws.{REGION}.s3" and len(endpoint.route_table_ids) == 1
    settings = load_settings()
    here = settings.aws[REGION]
    assert (settings.region, settings.max_cost, here.bucket) == (REGION, 25.0, BUCKET)
    subnets = {zone: one.id for zone, one in backend("ec2", REGION).get_default_subnets().items()}
    assert dict(here.subnets) == subnets and set(here.placement_groups) == set(subnets)
    profiles = {one.name for one in backend("iam", "aws").instance_profiles.values()}
    assert here.instance_profile in profiles and here.scheduler_role and here.role
    assert set(here.security_groups) < set(
        backend("ec2", REGION).groups[backend("ec2", REGION).get_default_vpc().id]
    )
    assert config(isolated).stat().st_mode & 0o777 == 0o600
    assert f"account {ACCOUNT}" in err and "AWS::IAM::Role" in err and f"bucket: {BUCKET}" in err
    assert err.index("AWS::IAM::Role") < err.index("is CREATE_COMPLETE") < err.index("max_cost: 25")
    assert err.endswith("next: fastlaunch doctor --instance g6.xlarge\n") and str(config(isolated)) in out

    text = config(isolated).read_text()
    # Without --yes: there is nothing to agree to.
    assert init() == 0
    assert changes(account)[2:] == ["CreateChangeSet", "DeleteChangeSet"]
    assert config(isolated).read_text() == text
    err = capsys.readouterr().err
    assert "stack fastlaunch is up to date" in err and "needs no change" in err


def parameters(sent: Any) -> dict[str, str]:
    """The stack's parameters that a request to CloudFormation gives a value."""
    given = sent.parameters
    keys = {name: value for name, value in given.items() if name.endswith(".ParameterKey")}
    values = {key: given.get(name.replace("ParameterKey", "ParameterValue")) for name, key in keys.items()}
    return {key: value for key, value in values.items() if value is not None}


def test_a_queue_is_made_with_the_stack(account: MotoServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert init("--queue", "a/b", "--yes") == 2
    assert init("--queue", "team", "--queue-instances", "8", "--yes") == 0
    assert "AWS::Batch::JobQueue" in capsys.readouterr().err
    made = {name: value for part in moto_stacks.QUEUES for name, value in part.items()}
    assert made == {
        **{"name": "team", "region": REGION, "kind": "SAGEMAKER_TRAINING"},
        **{"num_instances": 8, "sharing": "fairsharePolicy"},
    }
    policies = backend("iam", "aws").managed_policies.values()
    documents = [str(version.document) for one in policies for version in one.versions]
    assert any("job-queue/team" in document for document in documents)
    # The queue stays when nobody names it.
    assert init() == 0
    assert not {"QueueName", "QueueInstances"} & set(parameters(account.sent("CreateChangeSet")[-1]))


def test_a_queue_is_added_to_a_stack(account: MotoServer) -> None:
    assert init("--yes") == 0
    assert moto_stacks.QUEUES == []
    # That the parameter makes a difference only CloudFormation knows.
    assert init("--queue", "team", "--update", "--yes") == 0
    assert parameters(account.sent("CreateChangeSet")[-1]) == {"QueueName": "team"}


def test_without_a_terminal_nothing_is_changed_unless_it_says_yes(
    account: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init() == 2
    assert "add --yes" in capsys.readouterr().err
    assert changes(account) == [] and not config(isolated).exists()


def test_of_several_vpcs_one_has_to_be_named(account: MotoServer, capsys: pytest.CaptureFixture[str]) -> None:
    lab, prod = lose_default_vpc(names=("lab", "prod"))
    assert init("--yes") == 2
    err = capsys.readouterr().err
    assert f"--vpc {lab}  10.0.0.0/16" in err and f"--vpc {prod}  10.1.0.0/16" in err and "prod" in err
    assert changes(account) == []
    # Its subnet has no way out that is seen: it has to be named as well.
    assert init("--yes", "--vpc", prod) == 2
    (subnet,) = (one.id for one in AWS.subnets_of(REGION, prod))
    assert f"--subnet {subnet}" in capsys.readouterr().err
    assert init("--yes", "--vpc", prod, "--subnet", subnet, "--max-cost", "3.5", "--bucket", "acme-runs") == 0
    settings = load_settings()
    assert dict(settings.aws[REGION].subnets) == {f"{REGION}a": subnet} and settings.max_cost == 3.5
    assert settings.aws[REGION].bucket == "acme-runs"


@pytest.mark.parametrize("action", ["DescribeVpcs", "CreateChangeSet", "ExecuteChangeSet"])
def test_a_call_that_is_denied_says_who_lacks_which_right_and_how_it_goes_without(
    account: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    code = "UnauthorizedOperation" if action == "DescribeVpcs" else "AccessDenied"
    account.refuse(action, code, status=403)
    assert init("--yes") == 3
    err = capsys.readouterr().err
    service = "ec2" if action == "DescribeVpcs" else "cloudformation"
    assert f"{service}:{action}" in err and f"you are arn:aws:sts::{ACCOUNT}:user/moto" in err
    assert f"fastlaunch iam print --cloudformation --region {REGION} > fastlaunch.yaml" in err
    assert not config(isolated).exists() and not backend("s3", "aws").buckets


def test_whoever_may_not_deploy_uses_the_stack_that_an_administrator_deployed(
    account: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["iam", "print", "--cloudformation", "--region", REGION]) == 0
    template, err = capsys.readouterr()
    assert set(yaml.safe_load(template)["Resources"]) > {"Bucket", "NodeRole", "PlacementGroupuseast1a"}
    assert "aws cloudformation deploy --region us-east-1 --stack-name fastlaunch" in err
    assert account.sent() == []
    deploy(template, "acme")
    account.refuse("CreateChangeSet", "AccessDenied", status=403)
    assert init("--yes") == 0
    assert "not compared with the template" in capsys.readouterr().err
    here = load_settings().aws[REGION]
    assert here.bucket == "acme" and len(here.subnets) == 6 and len(here.placement_groups) == 3


def test_a_config_file_of_the_users_keeps_what_it_says(
    account: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    above = "# mine\nregion: eu-west-1\nmax_cost: 80\naws:\n"
    below = "  eu-west-1:\n    bucket: old  # here\n"
    config(isolated).write_text(above + below)
    config(isolated).chmod(0o600)
    assert init("--yes", "--region", REGION) == 0
    text = config(isolated).read_text()
    settings = load_settings()
    assert text.startswith(above) and text.endswith(below)
    assert set(settings.aws) == {"eu-west-1", REGION}
    assert (settings.region, settings.max_cost) == ("eu-west-1", 80.0)
    assert "fastlaunch doctor --instance g6.xlarge --region us-east-1" in capsys.readouterr().err
    # What the user changed since stays, and is shown.
    config(isolated).write_text(text.replace(BUCKET, "another"))
    assert init("--yes", "--region", REGION) == 0
    err = capsys.readouterr().err
    assert "other values for us-east-1" in err and f"bucket: {BUCKET}" in err
    assert "another" in config(isolated).read_text()


def test_a_stack_that_failed_says_why_and_what_to_delete(
    account: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    denied = "API: iam:CreateRole User: x is not authorized to perform: iam:CreateRole"
    moto_stacks.FAILING["NodeRole"] = denied
    assert init("--yes") == 3
    err = capsys.readouterr().err
    assert f"stack fastlaunch is ROLLBACK_COMPLETE: NodeRole: {denied}" in err
    assert "iam print --cloudformation" in err and "cancelled" not in err
    delete = "aws cloudformation delete-stack --region us-east-1 --stack-name fastlaunch"
    assert delete in err and not config(isolated).exists()
    moto_stacks.FAILING.clear()
    assert init("--yes") == 2
    err = capsys.readouterr().err
    assert "is ROLLBACK_COMPLETE" in err and delete in err
    AWS.call("cloudformation", REGION, "DeleteStack", StackName="fastlaunch")
    assert init("--yes") == 0


def test_a_bucket_of_the_account_is_taken_over_only_if_that_is_said(
    account: MotoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    backend("s3", "aws").create_bucket(BUCKET, REGION)
    AWS.put_object(REGION, BUCKET, "mine", b"data")
    assert init("--yes") == 2
    err = capsys.readouterr().err
    assert f"has bucket {BUCKET} already" in err and "--import-existing, or name another: --bucket" in err
    assert changes(account) == ["PutObject"]
    assert init("--yes", "--import-existing") == 0
    assert "  Import   AWS::S3::Bucket" in capsys.readouterr().err
    assert AWS.has_objects(REGION, BUCKET, "mine")


def test_a_bucket_of_another_account_is_taken(
    account: MotoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    account.refuse("HeadBucket", "403", status=403)
    assert init("--yes", "--bucket", "data") == 2
    err = capsys.readouterr().err
    assert "bucket data" in err and "--bucket NAME" in err
    assert init("--yes", "--bucket", "A_B") == 2
    assert changes(account) == []


def test_a_stack_that_is_changing_is_waited_for(account: MotoServer) -> None:
    assert init("--yes") == 0
    (stack,) = backend("cloudformation", REGION).stacks.values()
    stack.num_looks = 3
    before = len(account.sent("DescribeStacks"))
    assert init() == 0
    # The last look is that of the change set's end: only an empty stack is deleted with it.
    assert len(account.sent("DescribeStacks")) - before == 5


def test_what_a_stack_has_is_not_changed_by_an_option(
    account: MotoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init("--yes") == 0
    assert init("--yes", "--bucket", "other") == 2
    assert f"has {BUCKET}, not other" in capsys.readouterr().err
    assert init("--yes", "--vpc", "vpc-1") == 2
    assert "--stack-name" in capsys.readouterr().err


def test_another_template_changes_a_stack_only_with_update(
    account: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init("--yes") == 0
    key = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/0a1b2c3d"
    text = config(isolated).read_text()
    config(isolated).write_text(f"{text}    volume_kms_key: {key}\n")
    for argv, code, num_executed in (
        ((), 0, 1),
        (("--yes",), 0, 1),
        (("--update",), 2, 1),
        (("--update", "--yes"), 0, 2),
    ):
        assert init(*argv) == code
        assert len(account.sent("ExecuteChangeSet")) == num_executed
        assert ("would change" in capsys.readouterr().err) == (not argv or argv == ("--yes",))
    assert init() == 0
    assert "is up to date" in capsys.readouterr().err


def test_a_network_that_is_lost_in_the_middle_is_gone_on_from(
    account: MotoServer, faulty_proxy: FaultyProxy, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aws = Aws(attempts=2, sleep=lambda _: None, timeouts_s=(5, 20))
    # CloudFormation has the request, and nobody hears so.
    faulty_proxy.script("ExecuteChangeSet", Fault.LOSE_ANSWER, Fault.LOSE_REQUEST)
    assert init("--yes", aws=aws) == 3
    assert "type the same again" in capsys.readouterr().err
    assert not config(isolated).exists()
    assert init("--yes", aws=aws) == 0
    assert len(backend("cloudformation", REGION).stacks) == 1 and config(isolated).exists()


def test_a_terminal_is_asked_for_what_was_not_typed(account: MotoServer, isolated: Path) -> None:
    code, err = on_terminal("init", answers=("", "", "acme-runs", "n"))
    assert code == 2 and "nothing was done" in err
    assert err.index("region [us-east-1]") < err.index(f"bucket to make [{BUCKET}]")
    assert err.index("AWS::IAM::Role") < err.index("Make stack fastlaunch? [y/N]")
    # Nor does an empty stack stay behind.
    assert not backend("cloudformation", REGION).stacks and not config(isolated).exists()
    code, err = on_terminal("init", answers=("", "0.9", "acme-runs", "y", "y"))
    assert code == 0, err
    assert err.index("bucket: acme-runs") < err.index(f"Write {config(isolated)}? [y/N]")
    settings = load_settings()
    assert settings.max_cost == 0.9 and settings.aws[REGION].bucket == "acme-runs"
    # All that is left to answer is the region.
    code, err = on_terminal("init", answers=("",))
    assert code == 0 and "up to date" in err, err

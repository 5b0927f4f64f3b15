"""`Aws` against an AWS on loopback: what it sends, what it makes of the answers."""

import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
from moto_gaps import image_digest, machine_image_id
from moto_server import MotoServer, backend

from fastlaunch.aws import MAX_FILTER_VALUES, Aws, Identity, MachineImage, StoredObject
from fastlaunch.errors import (
    BadConfiguration,
    CloudRefused,
    NoCapacity,
    NotAuthorised,
    QuotaExceeded,
    Throttled,
    Unreachable,
)
from fastlaunch.settings import DEFAULT_AMI_PARAMETER

REGION = "us-east-1"


PAUSES_S: list[float] = []


@pytest.fixture(scope="module")
def one_aws() -> Aws:
    """For all tests, since making a client takes most of their time."""
    return Aws(attempts=3, sleep=PAUSES_S.append, timeouts_s=(5, 20))


@pytest.fixture
def aws(one_aws: Aws, aws_server: MotoServer) -> Aws:
    PAUSES_S.clear()
    return one_aws


def request(token: str = "run-a1", **changed: Any) -> dict[str, Any]:
    return {
        "ImageId": machine_image_id(REGION),
        "InstanceType": "g6.xlarge",
        "MinCount": 1,
        "MaxCount": 1,
        "ClientToken": token,
        "UserData": "#!/bin/sh\necho 'ä & <b>'\n",
        "TagSpecifications": [
            {"ResourceType": "instance", "Tags": [{"Key": "fastlaunch:run", "Value": token[:-3]}]}
        ],
        **changed,
    }


def test_importing_it_imports_no_boto3() -> None:
    code = (
        "import sys, fastlaunch.aws, fastlaunch.aws_errors as e;"
        "fastlaunch.aws.Aws();"
        "print([name for name in sys.modules if name.startswith(('boto3', 'botocore'))])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_identity(aws: Aws) -> None:
    assert aws.identity() == Identity(account="123456789012", arn="arn:aws:sts::123456789012:user/moto")


# Instances


def test_an_instance_is_started_as_it_was_asked_for(aws: Aws, aws_server: MotoServer) -> None:
    settings = aws_server.set_up_region(REGION)
    asked = request(
        SubnetId=settings.subnets["us-east-1b"],
        InstanceMarketOptions={"MarketType": "spot", "SpotOptions": {"SpotInstanceType": "one-time"}},
    )
    (started,) = aws.run_instances(REGION, asked)
    assert (started.region, started.zone, started.instance_type) == (REGION, "us-east-1b", "g6.xlarge")
    assert started.state == "pending" and started.is_live and started.is_spot
    assert (started.token, started.tags) == ("run-a1", {"fastlaunch:run": "run"})
    assert started.launch_time.tzinfo is not None
    assert (started.state_reason, started.transition_reason) == (None, None)
    (sent,) = aws_server.sent("RunInstances")
    assert sent.user_data() == asked["UserData"]
    assert sent.parameters["InstanceMarketOptions.SpotOptions.SpotInstanceType"] == "one-time"
    # Nothing but what was asked for, and the two words that say what it is.
    prefixes = {name.partition(".")[0] for name in sent.parameters}
    assert prefixes - {"Action", "Version"} == {
        "TagSpecification" if name == "TagSpecifications" else name for name in asked
    }


def test_a_request_is_not_changed_by_sending_it(aws: Aws) -> None:
    asked = request()
    aws.run_instances(REGION, asked)
    assert asked == request()


def test_a_request_without_a_token_is_a_bug(aws: Aws) -> None:
    with pytest.raises(AssertionError, match="token"):
        aws.run_instances(REGION, {"InstanceType": "g6.xlarge", "MinCount": 1, "MaxCount": 1})


@pytest.mark.parametrize("code", ["RequestLimitExceeded", "InternalError", "ServiceUnavailable"])
def test_the_same_bytes_go_out_again(aws: Aws, aws_server: MotoServer, code: str) -> None:
    aws_server.refuse("RunInstances", code, times=2)
    (started,) = aws.run_instances(REGION, request())
    first, second, third = aws_server.sent("RunInstances")
    assert first.body == second.body == third.body
    assert [first.status, second.status, third.status] == [503 if code != "InternalError" else 500] * 2 + [
        200
    ]
    assert PAUSES_S == [1.0, 2.0]
    assert [one.id for one in aws_server.instances()] == [started.id]


def test_a_definite_refusal_is_not_asked_again(aws: Aws, aws_server: MotoServer) -> None:
    # EC2 says it with a server's error, which boto3 alone would repeat.
    aws_server.refuse("RunInstances", "InsufficientInstanceCapacity")
    with pytest.raises(NoCapacity):
        aws.run_instances(REGION, request())
    assert aws_server.counts() == {"RunInstances": 1} and PAUSES_S == []


def test_throttling_ends(aws: Aws, aws_server: MotoServer) -> None:
    aws_server.refuse("RunInstances", "RequestLimitExceeded")
    with pytest.raises(Throttled):
        aws.run_instances(REGION, request())
    assert aws_server.counts() == {"RunInstances": 3}


@pytest.mark.parametrize("later", ["RequestLimitExceeded", "ExpiredToken", "UnauthorizedOperation"])
def test_an_unanswered_request_stays_so_whatever_its_repetition_met(
    aws: Aws, aws_server: MotoServer, later: str
) -> None:
    aws_server.refuse("RunInstances", "InternalError", times=1)
    aws_server.refuse("RunInstances", later)
    with pytest.raises(Unreachable):
        aws.run_instances(REGION, request())


def test_a_definite_refusal_after_an_unanswered_request_is_believed(aws: Aws, aws_server: MotoServer) -> None:
    aws_server.refuse("RunInstances", "InternalError", times=1)
    aws_server.refuse("RunInstances", "VcpuLimitExceeded")
    with pytest.raises(QuotaExceeded):
        aws.run_instances(REGION, request())


def test_a_token_that_is_used_up(aws: Aws) -> None:
    (started,) = aws.run_instances(REGION, request())
    with pytest.raises(BadConfiguration) as mismatch:
        aws.run_instances(REGION, request(InstanceType="g6.12xlarge"))
    assert mismatch.value.code == "IdempotentParameterMismatch"
    aws.terminate(REGION, [started.id])
    with pytest.raises(BadConfiguration) as ended:
        aws.run_instances(REGION, request())
    assert ended.value.code == "IdempotentInstanceTerminated"


def test_instances_are_found_by_id_token_and_tag(aws: Aws) -> None:
    one, two, three = (aws.run_instances(REGION, request(f"r{n}-a1"))[0].id for n in (1, 2, 3))

    def found(**how: Any) -> set[str]:
        return {instance.id for instance in aws.describe_instances(REGION, **how)}

    assert found(ids=[one, three, "i-0123456789abcdef0"]) == {one, three}
    assert found(tokens=["r2-a1", "r9-a1"]) == {two}
    assert found(tags={"fastlaunch:run": ["r1", "r2"]}) == {one, two}
    assert found(tags={"fastlaunch:run": []}) == {one, two, three}
    assert found(tags={"other": []}) == set()
    assert found(tokens=["r1-a1", "r2-a1"], tags={"fastlaunch:run": ["r2", "r3"]}) == {two}
    assert aws.describe_instances("us-west-2", ids=[one]) == []


def test_nothing_asked_for_is_nothing_sent(aws: Aws, aws_server: MotoServer) -> None:
    assert aws.describe_instances(REGION) == []
    assert aws.describe_instances(REGION, ids=[], tokens=[]) == []
    aws.terminate(REGION, [])
    assert aws.subnets(REGION, []) == [] and aws.security_group_vpcs(REGION, []) == {}
    assert aws_server.sent() == []


def test_500_instances_take_three_requests(aws: Aws, aws_server: MotoServer) -> None:
    (started,) = aws.run_instances(REGION, request())
    ids = [f"i-{n:017x}" for n in range(499)]
    assert [one.id for one in aws.describe_instances(REGION, ids=[*ids, started.id])] == [started.id]
    sent = aws_server.sent("DescribeInstances")
    values = [sum(name.startswith("Filter.1.Value.") for name in each.parameters) for each in sent]
    assert values == [MAX_FILTER_VALUES, MAX_FILTER_VALUES, 100]


def test_why_an_instance_ended_is_told(aws: Aws, aws_server: MotoServer) -> None:
    started = aws.run_instances(REGION, request())[0].id
    aws_server.set_instance(
        started,
        state="terminated",
        state_reason="Client.InternalError: Client error on launch",
        transition_reason="Client.InternalError: Client error on launch",
        launch_time=datetime(2026, 11, 21, 9, tzinfo=UTC),
    )
    (told,) = aws.describe_instances(REGION, ids=[started])
    assert not told.is_live
    assert told.state_reason == "Client.InternalError: Client error on launch"
    assert told.transition_reason == "Client.InternalError: Client error on launch"
    assert told.launch_time == datetime(2026, 11, 21, 9, tzinfo=UTC)


def test_terminating_is_no_error_where_one_is_gone(aws: Aws, aws_server: MotoServer) -> None:
    one, two = (aws.run_instances(REGION, request(f"r{n}-a1"))[0].id for n in (1, 2))
    gone = "i-0123456789abcdef0"
    aws.terminate(REGION, [one, gone, two])
    aws.terminate(REGION, [gone])
    aws.terminate(REGION, [one])
    assert {i.id for i in aws_server.instances("shutting-down", "terminated")} == {one, two}


def test_terminating_what_may_not_be_is_an_error(aws: Aws, aws_server: MotoServer) -> None:
    aws_server.refuse("TerminateInstances", "UnauthorizedOperation")
    with pytest.raises(NotAuthorised):
        aws.terminate(REGION, ["i-0123456789abcdef0"])


def test_console(aws: Aws, aws_server: MotoServer) -> None:
    started = aws.run_instances(REGION, request())[0].id
    assert aws.console_output(REGION, started) == ""
    aws_server.console[started] = "[    0.0] Linux\nKernel panic ä\n"
    assert aws.console_output(REGION, started) == "[    0.0] Linux\nKernel panic ä\n"
    assert aws_server.sent("GetConsoleOutput")[-1].parameters["Latest"] == "true"
    assert aws.console_output(REGION, "i-0123456789abcdef0") == ""


def test_console_of_a_type_without_the_newest(aws: Aws, aws_server: MotoServer) -> None:
    started = aws.run_instances(REGION, request())[0].id
    aws_server.console[started] = "boot"
    aws_server.refuse("GetConsoleOutput", "UnsupportedOperation", where={"Latest": "true"})
    assert aws.console_output(REGION, started) == "boot"


# What requests name


def test_zones_regions_and_prices(aws: Aws, aws_server: MotoServer) -> None:
    assert aws.zones_offering(REGION, "p5en.48xlarge") == ["us-east-1a", "us-east-1c"]
    assert aws.zones_offering(REGION, "p9.48xlarge") == []
    assert {"us-east-1", "eu-west-2"} <= set(aws.regions()) and aws.regions() == sorted(aws.regions())
    assert aws.spot_price_usd(REGION, "p5.48xlarge", None) is None
    aws_server.spot_prices[REGION, "p5.48xlarge", "us-east-1a"] = 18.73
    aws_server.spot_prices[REGION, "p5.48xlarge", "us-east-1c"] = 16.95
    aws_server.spot_prices[REGION, "p5en.48xlarge", "us-east-1c"] = 1.0
    assert aws.spot_price_usd(REGION, "p5.48xlarge", None) == (16.95, "us-east-1c")
    assert aws.spot_price_usd(REGION, "p5.48xlarge", "us-east-1a") == (18.73, "us-east-1a")
    assert aws.spot_price_usd(REGION, "p5.48xlarge", "us-east-1f") is None


def test_only_the_newest_spot_prices_are_asked_for(aws_server: MotoServer) -> None:
    then = datetime(2026, 11, 21, 12, tzinfo=UTC)
    Aws(now=lambda: then).spot_price_usd(REGION, "p5.48xlarge", None)
    (sent,) = aws_server.sent("DescribeSpotPriceHistory")
    assert sent.parameters["StartTime"].startswith("2026-11-21T12:00:00")
    assert sent.parameters["ProductDescription.1"] == "Linux/UNIX"


def test_the_machine_image_and_its_own_root_device(aws: Aws) -> None:
    ami = aws.parameter(REGION, DEFAULT_AMI_PARAMETER)
    assert aws.machine_image(REGION, ami) == MachineImage(id=ami, root_device="/dev/sda1", root_gib=75)
    with pytest.raises(BadConfiguration, match="ami-0123456789abcdef0"):
        aws.machine_image(REGION, "ami-0123456789abcdef0")
    with pytest.raises(BadConfiguration, match="/none"):
        aws.parameter(REGION, "/none")


def test_subnets_groups_and_gateways(aws: Aws, aws_server: MotoServer) -> None:
    settings = aws_server.set_up_region(REGION)
    wanted = [settings.subnets["us-east-1c"], settings.subnets["us-east-1a"]]
    found = {subnet.id: subnet for subnet in aws.subnets(REGION, wanted)}
    assert [found[one].zone for one in wanted] == ["us-east-1c", "us-east-1a"]
    vpc = found[wanted[0]].vpc
    assert found[wanted[0]].maps_public_ip
    assert aws.security_group_vpcs(REGION, settings.security_groups) == {settings.security_groups[0]: vpc}
    for what, ids in ((aws.subnets, ["subnet-0"]), (aws.security_group_vpcs, ["sg-0"])):
        with pytest.raises(BadConfiguration, match=ids[0]):
            what(REGION, ids)
    assert not aws.s3_gateways(REGION, vpc)
    ec2 = boto3.client("ec2", region_name=REGION)
    ec2.create_vpc_endpoint(
        VpcId=vpc, ServiceName=f"com.amazonaws.{REGION}.dynamodb", VpcEndpointType="Gateway"
    )
    assert not aws.s3_gateways(REGION, vpc)
    ec2.create_vpc_endpoint(VpcId=vpc, ServiceName=f"com.amazonaws.{REGION}.s3", VpcEndpointType="Gateway")
    assert aws.s3_gateways(REGION, vpc) and not aws.s3_gateways(REGION, "vpc-0")


def test_quotas(aws: Aws, aws_server: MotoServer) -> None:
    aws_server.quotas[REGION, "L-417A185B"] = 384.0
    assert aws.quota(REGION, "ec2", "L-417A185B") == 384.0
    assert aws.quota(REGION, "ec2", "L-0") is None
    assert aws_server.sent("GetServiceQuota")[0].parameters["ServiceCode"] == "ec2"


def test_roles(aws: Aws, aws_server: MotoServer) -> None:
    aws_server.set_up_region(REGION)
    assert aws.may_pass_role("fastlaunch-node") is None
    (sent,) = aws_server.sent("SimulatePrincipalPolicy")
    assert sent.parameters["ResourceArns.member.1"] == "arn:aws:iam::123456789012:role/fastlaunch-node"
    assert sent.parameters["ContextEntries.member.1.ContextKeyValues.member.1"] == "ec2.amazonaws.com"
    assert "there is no instance profile none" in (aws.may_pass_role("none") or "")
    backend("iam", "aws").create_instance_profile("empty", "/", [])
    assert "holds no role" in (aws.may_pass_role("empty") or "")
    aws_server.denied.add("iam:PassRole")
    assert "iam:PassRole is not allowed" in (aws.may_pass_role("fastlaunch-node") or "")
    for action in ("SimulatePrincipalPolicy", "GetInstanceProfile"):
        aws_server.refuse(action, "AccessDenied")
        assert aws.may_pass_role("fastlaunch-node") is None


def test_an_assumed_role_is_asked_about_by_its_own_arn(aws_server: MotoServer, aws: Aws) -> None:
    aws_server.set_up_region(REGION)
    iam = boto3.client("iam")
    iam.create_role(RoleName="admin", Path="/people/", AssumeRolePolicyDocument="{}")
    given = boto3.client("sts").assume_role(
        RoleArn="arn:aws:iam::123456789012:role/people/admin", RoleSessionName="me"
    )["Credentials"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", given["AccessKeyId"])
        patch.setenv("AWS_SECRET_ACCESS_KEY", given["SecretAccessKey"])
        patch.setenv("AWS_SESSION_TOKEN", given["SessionToken"])
        them = Aws(attempts=1)
        assert ":assumed-role/admin/me" in them.identity().arn
        assert them.may_pass_role("fastlaunch-node") is None
        aws_server.refuse("GetRole", "AccessDenied")
        assert them.may_pass_role("fastlaunch-node") is None
    first, second = (
        sent.parameters["PolicySourceArn"] for sent in aws_server.sent("SimulatePrincipalPolicy")
    )
    assert first == "arn:aws:iam::123456789012:role/people/admin"
    assert second == "arn:aws:iam::123456789012:role/admin"


# Objects


def test_objects(aws: Aws, aws_server: MotoServer) -> None:
    bucket = aws_server.set_up_region(REGION).bucket or ""
    assert aws.bucket_exists(REGION, bucket) and not aws.bucket_exists(REGION, "nobodys-bucket")
    data = bytes(range(256)) * 100
    assert aws.put_object(REGION, bucket, "p/b c/ä", data)
    assert aws.put_object(REGION, bucket, "p/b c/ä", data)
    assert aws.get_object(REGION, bucket, "p/b c/ä") == data
    assert aws.get_object(REGION, bucket, "p/none") is None
    assert aws.put_object(REGION, bucket, "p/a", b"1", only_new=True)
    assert not aws.put_object(REGION, bucket, "p/a", b"2", only_new=True)
    assert aws.get_object(REGION, bucket, "p/a") == b"1"
    listed = [StoredObject(key="p/a", size=1), StoredObject(key="p/b c/ä", size=len(data))]
    assert aws.list_objects(REGION, bucket, "p/") == listed
    assert aws.list_objects(REGION, bucket, "q/") == []


def test_more_than_a_page_of_objects(aws: Aws, aws_server: MotoServer) -> None:
    bucket = aws_server.set_up_region(REGION).bucket or ""
    keys = [f"runs/{n:04d}" for n in range(1001)]
    for key in keys:
        backend("s3", "aws").put_object(bucket, key, b"x")
    assert [one.key for one in aws.list_objects(REGION, bucket, "runs/")] == keys
    assert aws_server.counts() == {"ListObjectsV2": 2}


def test_what_s3_denies_to_tell_is_not_there(aws: Aws, aws_server: MotoServer) -> None:
    aws_server.refuse("GetObject", "AccessDenied", status=403)
    assert aws.get_object(REGION, "bucket", "key") is None


def test_an_object_of_ones_own_is_not_in_the_way(aws: Aws, aws_server: MotoServer) -> None:
    bucket = aws_server.set_up_region(REGION).bucket or ""
    # The first answer was lost, and the object had been stored.
    for body, ours in ((b"mine", True), (b"theirs", False)):
        aws.put_object(REGION, bucket, "lock", body)
        aws_server.refuse("PutObject", "InternalError", times=1)
        assert aws.put_object(REGION, bucket, "lock", b"mine", only_new=True) is ours


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("AccessDenied", 403, NotAuthorised),
        ("PermanentRedirect", 301, BadConfiguration),
        ("ExpiredToken", 400, NotAuthorised),
        ("SlowDown", 503, Throttled),
    ],
)
def test_objects_that_cannot_be_stored(
    aws: Aws, aws_server: MotoServer, code: str, status: int, kind: type[CloudRefused]
) -> None:
    aws_server.refuse("PutObject", code, status=status)
    with pytest.raises(kind):
        aws.put_object(REGION, "bucket", "key", b"", only_new=True)


def test_a_bucket_of_others_is_not_taken_for_none(aws: Aws, aws_server: MotoServer) -> None:
    aws_server.refuse("HeadBucket", "", status=403)
    with pytest.raises(NotAuthorised, match="403") as error:
        aws.bucket_exists(REGION, "bucket")
    assert "s3:ListBucket" in (error.value.hint or "")


def test_a_bucket_of_another_region_is_no_bucket_of_this_one(aws: Aws, aws_server: MotoServer) -> None:
    aws_server.set_up_region("eu-west-2", bucket="london")
    assert aws.bucket_exists("eu-west-2", "london")
    with pytest.raises(BadConfiguration, match="eu-west-2"):
        aws.bucket_exists(REGION, "london")


def test_a_name_that_no_bucket_can_have(aws: Aws) -> None:
    with pytest.raises(BadConfiguration, match="no bucket"):
        aws.bucket_exists(REGION, "no bucket")


# Images


def test_digests_of_images_of_aws(aws: Aws, aws_server: MotoServer) -> None:
    digest = image_digest("pytorch:2.13")
    aws_server.images[REGION, "763104351884", "pytorch", "2.13"] = digest
    assert aws.image_digest(REGION, "763104351884", "pytorch", "2.13") == digest
    assert aws.image_digest(REGION, "763104351884", "pytorch", "2.99") is None
    assert aws.image_digest("us-west-2", "763104351884", "pytorch", "2.13") is None


def test_the_accounts_own_repository(aws: Aws, aws_server: MotoServer) -> None:
    uri = aws.ensure_repository(REGION, "fastlaunch")
    assert uri == f"123456789012.dkr.ecr.{REGION}.amazonaws.com/fastlaunch"
    assert aws.ensure_repository(REGION, "fastlaunch") == uri
    (made,) = aws_server.sent("CreateRepository")
    assert made.parameters["imageTagMutability"] == "IMMUTABLE"
    assert aws.image_digest(REGION, "123456789012", "fastlaunch", "none") is None
    assert aws.image_digest(REGION, "123456789012", "nothing", "none") is None


def test_a_repository_that_somebody_makes_at_the_same_time(aws: Aws, aws_server: MotoServer) -> None:
    boto3.client("ecr", region_name=REGION).create_repository(repositoryName="ours")
    aws_server.refuse("DescribeRepositories", "RepositoryNotFoundException", times=1)
    assert aws.ensure_repository(REGION, "ours").endswith("/ours")


def test_a_registry_login_is_not_shown(aws: Aws) -> None:
    login = aws.registry_login(REGION)
    assert login.host == f"123456789012.dkr.ecr.{REGION}.amazonaws.com"
    assert (login.user, login.password) == ("AWS", "123456789012-auth-token")
    assert login.password not in repr(login)

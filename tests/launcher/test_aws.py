"""`Aws` against an AWS on loopback: what it sends, what it makes of the answers."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
from moto_gaps import image_digest, machine_image_id
from moto_nodes import Block
from moto_server import MotoServer, backend

from fastlaunch.aws.client import Aws
from fastlaunch.aws.types import MachineImage, StoredObject
from fastlaunch.core.errors import BadConfiguration, CloudRefused, NotAuthorised
from fastlaunch.core.settings import DEFAULT_AMI_PARAMETER

REGION = "us-east-1"


def test_importing_it_imports_no_boto3() -> None:
    code = (
        "import sys, fastlaunch.aws.client, fastlaunch.aws.errors as e;"
        "fastlaunch.aws.client.Aws();"
        "print([name for name in sys.modules if name.startswith(('boto3', 'botocore'))])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


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
    assert aws.endpoints(REGION, vpc) == frozenset()
    ec2 = boto3.client("ec2", region_name=REGION)
    ec2.create_vpc_endpoint(
        VpcId=vpc, ServiceName=f"com.amazonaws.{REGION}.dynamodb", VpcEndpointType="Gateway"
    )
    ec2.create_vpc_endpoint(VpcId=vpc, ServiceName=f"com.amazonaws.{REGION}.s3", VpcEndpointType="Gateway")
    assert aws.endpoints(REGION, vpc) == {"s3", "dynamodb"} and not aws.endpoints(REGION, "vpc-0")


def test_quotas(aws: Aws, aws_server: MotoServer) -> None:
    aws_server.quotas[REGION, "L-417A185B"] = 384.0
    assert aws.quota(REGION, "ec2", "L-417A185B") == 384.0
    assert aws.quota(REGION, "ec2", "L-0") is None
    assert aws.default_quota(REGION, "ec2", "L-417A185B") is None
    aws_server.default_quotas[REGION, "L-417A185B"] = 0.0
    assert aws.default_quota(REGION, "ec2", "L-417A185B") == 0.0


def test_roles(aws: Aws, aws_server: MotoServer) -> None:
    aws_server.set_up_region(REGION)
    role = "arn:aws:iam::123456789012:role/fastlaunch-node"
    assert aws.profile_role("fastlaunch-node") == role and aws.profile_role("none") is None
    backend("iam", "aws").create_instance_profile("empty", "/", [])
    assert aws.profile_role("empty") is None
    assert aws.may_pass(role, "ec2.amazonaws.com")
    (sent,) = aws_server.sent("SimulatePrincipalPolicy")
    assert sent.parameters["ResourceArns.member.1"] == role
    assert sent.parameters["ContextEntries.member.1.ContextKeyValues.member.1"] == "ec2.amazonaws.com"
    stored = ("arn:PARTITION:s3:::b/k", ("s3:GetObject", "s3:PutObject"))
    rights = (("*", ("ecr:GetAuthorizationToken",)), stored)
    assert aws.role_lacks(role, rights) == []
    sent = aws_server.sent("SimulatePrincipalPolicy")[-1]
    assert sent.parameters["PolicySourceArn"] == role
    assert sent.parameters["ResourceArns.member.1"] == "arn:aws:s3:::b/k"
    aws_server.denied |= {"iam:PassRole", "s3:PutObject"}
    assert not aws.may_pass(role, "ec2.amazonaws.com")
    assert aws.role_lacks(role, rights) == ["s3:PutObject on arn:aws:s3:::b/k"]
    aws_server.refuse("GetInstanceProfile", "AccessDenied")
    with pytest.raises(NotAuthorised, match="GetInstanceProfile"):
        aws.profile_role("fastlaunch-node")
    aws_server.refuse("SimulatePrincipalPolicy", "InvalidInput", "Invalid Entity Arn")
    with pytest.raises(NotAuthorised, match=r"IAM does not say what arn:aws:.*Invalid Entity Arn"):
        aws.may_pass(role, "ec2.amazonaws.com")


def test_an_assumed_role_is_asked_about_by_its_own_arn(aws_server: MotoServer, aws: Aws) -> None:
    role = "arn:aws:iam::123456789012:role/fastlaunch-node"
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
        assert them.may_pass(role, "ec2.amazonaws.com")
        aws_server.refuse("GetRole", "AccessDenied")
        assert them.may_pass(role, "ec2.amazonaws.com")
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
    assert not aws.put_object(REGION, bucket, "p/a", b"1", only_new=True)
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


def test_an_object_of_ones_own_is_not_in_the_way(aws: Aws, aws_server: MotoServer) -> None:
    bucket = aws_server.set_up_region(REGION).bucket or ""
    # The first answer was lost, and the object had been stored.
    for body, ours in ((b"mine", True), (b"theirs", False)):
        aws.put_object(REGION, bucket, "lock", body)
        aws_server.refuse("PutObject", "InternalError", times=1)
        assert aws.put_object(REGION, bucket, "lock", b"mine", only_new=True) is ours


def test_buckets_that_are_elsewhere_or_closed(aws: Aws, aws_server: MotoServer) -> None:
    aws_server.set_up_region("eu-west-2", bucket="london")
    assert aws.bucket_exists("eu-west-2", "london")
    with pytest.raises(BadConfiguration, match="eu-west-2"):
        aws.bucket_exists(REGION, "london")
    # Without the right to list, what does not exist is denied.
    aws_server.refuse("GetObject", "AccessDenied", status=403)
    assert aws.get_object(REGION, "bucket", "key") is None


# Images


def test_digests_of_images(aws: Aws, aws_server: MotoServer) -> None:
    digest = image_digest("pytorch:2.13")
    aws_server.images[REGION, "763104351884", "pytorch", "2.13"] = digest
    assert aws.image_digest(REGION, "763104351884", "pytorch", "2.13") == digest
    assert aws.image_digest(REGION, "763104351884", "pytorch", "2.99") is None
    # Else ECR could tell the digest of what it converts an OCI image into.
    kinds = aws_server.sent("BatchGetImage")[0].parameters["acceptedMediaTypes"]
    assert "application/vnd.oci.image.index.v1+json" in kinds
    aws.ensure_repository(REGION, "fastlaunch")
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json"}
    ecr = boto3.client("ecr", region_name=REGION)
    put = ecr.put_image(repositoryName="fastlaunch", imageManifest=json.dumps(manifest), imageTag="one")
    own = put["image"]["imageId"]["imageDigest"]
    known = {"one": own, own: own, f"sha256:{'0' * 64}": None, "none": None}
    assert {tag: aws.image_digest(REGION, "123456789012", "fastlaunch", tag) for tag in known} == known
    assert aws.image_digest(REGION, "123456789012", "nothing", "none") is None


def test_the_default_vpc(aws: Aws, aws_server: MotoServer) -> None:
    ec2 = boto3.client("ec2", region_name=REGION)
    (vpc,) = ec2.describe_vpcs()["Vpcs"]
    ec2.create_vpc(CidrBlock="10.9.0.0/16")
    assert aws.default_vpc(REGION) == vpc["VpcId"]
    backend("ec2", REGION).vpcs[vpc["VpcId"]].is_default = "false"
    assert aws.default_vpc(REGION) is None


def test_the_accounts_own_repository(aws: Aws, aws_server: MotoServer) -> None:
    uri = aws.ensure_repository(REGION, "fastlaunch")
    assert uri == f"123456789012.dkr.ecr.{REGION}.amazonaws.com/fastlaunch"
    assert aws.ensure_repository(REGION, "fastlaunch") == uri
    (made,) = aws_server.sent("CreateRepository")
    assert made.parameters["imageTagMutability"] == "IMMUTABLE"


def test_a_registry_login_is_not_shown(aws: Aws) -> None:
    login = aws.registry_login(REGION)
    assert login.host == f"123456789012.dkr.ecr.{REGION}.amazonaws.com"
    assert (login.user, login.password) == ("AWS", "123456789012-auth-token")
    assert login.password not in repr(login)


@pytest.mark.parametrize(
    ("changes", "kind", "hint"),
    [
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, NotAuthorised, "aws sso login"),
        ({"AWS_SECRET_ACCESS_KEY": None}, NotAuthorised, "AWS_SECRET_ACCESS_KEY"),
        ({"AWS_PROFILE": "nobody"}, BadConfiguration, "aws configure"),
        ({"AWS_ENDPOINT_URL": "localhost:5000"}, BadConfiguration, "AWS_ENDPOINT_URL"),
        ({"AWS_DEFAULT_REGION": "nowhere at all"}, BadConfiguration, "--region"),
    ],
)
def test_an_environment_that_is_not_set_up(
    aws_server: MotoServer,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str | None],
    kind: type[CloudRefused],
    hint: str,
) -> None:
    for name, value in changes.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(kind) as error:
        Aws(attempts=1).identity()
    assert hint in (error.value.hint or "") and error.value.exit_code == 3


# What is known before money is spent


def test_what_runs_is_counted_in_vcpus(aws: Aws, aws_server: MotoServer) -> None:
    def start(token: str, instance_type: str, market: str | None, **more: Any) -> str:
        asked = {
            "ImageId": machine_image_id(REGION),
            "InstanceType": instance_type,
            "MinCount": 1,
            "MaxCount": 1,
            "ClientToken": token,
            **({"InstanceMarketOptions": {"MarketType": market}} if market else {}),
            **more,
        }
        return aws.run_instances(REGION, asked)[0].id

    assert aws.running_vcpus(REGION) == {}
    ended, *_ = (start(f"r{n}-a1", "g6.12xlarge", None) for n in range(3))
    start("r4-a1", "g6.12xlarge", "spot")
    zone, subnet = next(iter(aws_server.set_up_region(REGION).subnets.items()))
    aws_server.blocks["cr-0a1b2c3d"] = Block(
        id="cr-0a1b2c3d",
        region=REGION,
        zone=zone,
        instance_type="p5.48xlarge",
        num_instances=1,
        starts_at=datetime(2026, 11, 20, 11, 30, tzinfo=UTC),
        ends_at=datetime(2026, 11, 25, 11, 30, tzinfo=UTC),
    )
    block = {"CapacityReservationTarget": {"CapacityReservationId": "cr-0a1b2c3d"}}
    start("r5-a1", "p5.48xlarge", "capacity-block", SubnetId=subnet, CapacityReservationSpecification=block)
    aws.terminate(REGION, [ended])
    assert aws.running_vcpus(REGION) == {
        ("g6.12xlarge", "on-demand"): 96,
        ("g6.12xlarge", "spot"): 48,
        ("p5.48xlarge", "capacity-block"): 192,
    }
    assert aws.running_vcpus("us-west-2") == {}


def test_where_a_subnet_leads(aws: Aws, aws_server: MotoServer) -> None:
    settings = aws_server.set_up_region(REGION)
    one, two = settings.subnets["us-east-1a"], settings.subnets["us-east-1b"]
    vpc = aws.subnets(REGION, [one])[0].vpc
    ec2 = boto3.client("ec2", region_name=REGION)
    assert aws.default_routes(REGION, vpc) == {None: ""}
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    (main,) = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["RouteTables"]
    ec2.create_route(RouteTableId=main["RouteTableId"], DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)
    closed = ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
    ec2.associate_route_table(RouteTableId=closed, SubnetId=two)
    assert aws.default_routes(REGION, vpc) == {None: gateway, two: ""}
    assert aws.default_routes(REGION, "vpc-0") == {}

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
        refusal = aws_server.refuse(action, "AccessDenied")
        with pytest.raises(NotAuthorised, match=action):
            aws.may_pass_role("fastlaunch-node")
        aws_server.allow(refusal)
    aws_server.refuse("SimulatePrincipalPolicy", "InvalidInput", "Invalid Entity Arn")
    with pytest.raises(NotAuthorised, match=r"IAM does not say what arn:aws:.*Invalid Entity Arn"):
        aws.may_pass_role("fastlaunch-node")


def test_what_the_machines_role_lacks(aws: Aws, aws_server: MotoServer) -> None:
    aws_server.set_up_region(REGION)
    stored = ("arn:PARTITION:s3:::b/k", ("s3:GetObject", "s3:PutObject"))
    rights = (("*", ("ecr:GetAuthorizationToken",)), stored)
    assert aws.node_lacks("fastlaunch-node", rights) == []
    sent = aws_server.sent("SimulatePrincipalPolicy")[-1].parameters
    assert sent["PolicySourceArn"] == "arn:aws:iam::123456789012:role/fastlaunch-node"
    assert sent["ResourceArns.member.1"] == "arn:aws:s3:::b/k"
    aws_server.denied.add("s3:PutObject")
    assert aws.node_lacks("fastlaunch-node", rights) == ["s3:PutObject on arn:aws:s3:::b/k"]


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


def test_a_bucket_of_another_region_is_no_bucket_of_this_one(aws: Aws, aws_server: MotoServer) -> None:
    aws_server.set_up_region("eu-west-2", bucket="london")
    assert aws.bucket_exists("eu-west-2", "london")
    with pytest.raises(BadConfiguration, match="eu-west-2"):
        aws.bucket_exists(REGION, "london")


# Images


def test_digests_of_images_of_aws(aws: Aws, aws_server: MotoServer) -> None:
    digest = image_digest("pytorch:2.13")
    aws_server.images[REGION, "763104351884", "pytorch", "2.13"] = digest
    assert aws.image_digest(REGION, "763104351884", "pytorch", "2.13") == digest
    assert aws.image_digest(REGION, "763104351884", "pytorch", "2.99") is None
    assert aws.image_digest("us-west-2", "763104351884", "pytorch", "2.13") is None
    # Else ECR could tell the digest of what it converts an OCI image into.
    kinds = aws_server.sent("BatchGetImage")[0].parameters["acceptedMediaTypes"]
    assert {"application/vnd.oci.image.manifest.v1+json", "application/vnd.oci.image.index.v1+json"} < {
        *kinds
    }


def test_an_image_of_the_account_by_its_digest(aws: Aws, aws_server: MotoServer) -> None:
    aws.ensure_repository(REGION, "fastlaunch")
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json"}
    ecr = boto3.client("ecr", region_name=REGION)
    told = ecr.put_image(repositoryName="fastlaunch", imageManifest=json.dumps(manifest), imageTag="one")
    digest = told["image"]["imageId"]["imageDigest"]
    assert aws.image_digest(REGION, "123456789012", "fastlaunch", "one") == digest
    assert aws.image_digest(REGION, "123456789012", "fastlaunch", digest) == digest
    assert aws.image_digest(REGION, "123456789012", "fastlaunch", f"sha256:{'0' * 64}") is None


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
    assert aws.image_digest(REGION, "123456789012", "fastlaunch", "none") is None
    assert aws.image_digest(REGION, "123456789012", "nothing", "none") is None


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

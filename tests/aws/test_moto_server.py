"""The AWS of the tests answers as EC2, S3, ECR, IAM and the rest do, where the launcher depends on it."""

from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.request import urlopen

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from moto_gaps import image_digest, machine_image_id
from moto_server import MotoServer

from fastlaunch.core.settings import DEFAULT_AMI_PARAMETER

ONCE = Config(retries={"total_max_attempts": 1, "mode": "standard"})


def client(service: str, region: str = "us-east-1") -> Any:
    return boto3.client(service, region_name=region, config=ONCE)


def launch(region: str = "us-east-1", **changed: Any) -> dict[str, Any]:
    request = {
        "ImageId": machine_image_id(region),
        "InstanceType": "g6.xlarge",
        "MinCount": 1,
        "MaxCount": 1,
        "ClientToken": "run-a1",
        "UserData": "#!/bin/sh\necho hello\n",
        **changed,
    }
    return client("ec2", region).run_instances(**request)["Instances"][0]


def states(region: str = "us-east-1") -> list[str]:
    told = client("ec2", region).describe_instances()
    return [i["State"]["Name"] for r in told["Reservations"] for i in r["Instances"]]


def code_of(error: pytest.ExceptionInfo[ClientError]) -> str:
    return error.value.response["Error"]["Code"]


def test_an_instance_is_pending_then_running_then_shutting_down_then_terminated(
    aws_server: MotoServer,
) -> None:
    first = launch()
    assert first["State"]["Name"] == "pending"
    assert [states(), states(), states()] == [["pending"], ["running"], ["running"]]
    client("ec2").terminate_instances(InstanceIds=[first["InstanceId"]])
    assert [states(), states(), states()] == [["shutting-down"], ["terminated"], ["terminated"]]


def test_same_token_and_parameters_give_the_original_reservation(aws_server: MotoServer) -> None:
    assert launch()["InstanceId"] == launch()["InstanceId"]
    assert len(aws_server.instances()) == 1
    assert launch(ClientToken="run-a2")["InstanceId"] != launch()["InstanceId"]


def test_same_token_with_other_parameters_is_refused(aws_server: MotoServer) -> None:
    launch()
    with pytest.raises(ClientError) as error:
        launch(InstanceType="g6.12xlarge")
    assert code_of(error) == "IdempotentParameterMismatch"
    assert len(aws_server.instances()) == 1


def test_the_token_of_a_terminated_instance_starts_none(aws_server: MotoServer) -> None:
    client("ec2").terminate_instances(InstanceIds=[launch()["InstanceId"]])
    with pytest.raises(ClientError) as error:
        launch()
    assert code_of(error) == "IdempotentInstanceTerminated"


def test_a_token_is_of_one_region_and_not_used_up_by_a_refusal(aws_server: MotoServer) -> None:
    aws_server.refuse("RunInstances", "InsufficientInstanceCapacity", times=1)
    with pytest.raises(ClientError) as error:
        launch()
    assert code_of(error) == "InsufficientInstanceCapacity"
    assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == 500
    assert launch()["InstanceId"] != launch("us-west-2")["InstanceId"]


def test_refusals_pick_their_requests(aws_server: MotoServer) -> None:
    aws_server.refuse("RunInstances", "VcpuLimitExceeded", where={"InstanceType": "g6.12xlarge"})
    launch()
    for _ in range(2):
        with pytest.raises(ClientError, match="VcpuLimitExceeded"):
            launch(InstanceType="g6.12xlarge", ClientToken="run-a2")


def test_requests_are_kept_with_what_moto_drops(aws_server: MotoServer) -> None:
    settings = aws_server.set_up_region("us-east-1")
    aws_server.placement_groups["us-east-1", "together"] = "cluster"
    launch(
        NetworkInterfaces=[
            {
                "DeviceIndex": 0,
                "NetworkCardIndex": 0,
                "InterfaceType": "efa",
                "SubnetId": settings.subnets["us-east-1b"],
                "Groups": list(settings.security_groups),
            }
        ],
        Placement={"GroupName": "together"},
        TagSpecifications=[
            {"ResourceType": "instance", "Tags": [{"Key": "fastlaunch:run", "Value": "run"}]},
            {"ResourceType": "volume", "Tags": [{"Key": "Name", "Value": "disk"}]},
        ],
    )
    (sent,) = aws_server.sent("RunInstances")
    assert (sent.service, sent.region, sent.method, sent.status) == ("ec2", "us-east-1", "POST", 200)
    assert sent.parameters["NetworkInterface.1.InterfaceType"] == "efa"
    assert sent.parameters["NetworkInterface.1.SecurityGroupId.1"] == settings.security_groups[0]
    assert sent.parameters["Placement.GroupName"] == "together"
    assert sent.user_data() == "#!/bin/sh\necho hello\n"
    assert sent.tags() == {"fastlaunch:run": "run"} and sent.tags("volume") == {"Name": "disk"}
    assert aws_server.counts() == {"RunInstances": 1}


def test_a_region_that_is_set_up_takes_a_whole_request(aws_server: MotoServer) -> None:
    settings = aws_server.set_up_region("eu-west-2")
    started = launch(
        "eu-west-2",
        SubnetId=settings.subnets["eu-west-2b"],
        SecurityGroupIds=list(settings.security_groups),
        IamInstanceProfile={"Name": settings.instance_profile},
        InstanceMarketOptions={"MarketType": "spot"},
    )
    assert started["Placement"]["AvailabilityZone"] == "eu-west-2b"
    assert started["InstanceLifecycle"] == "spot"
    assert aws_server.user_data(started["InstanceId"]) == "#!/bin/sh\necho hello\n"
    client("s3", "eu-west-2").head_bucket(Bucket=settings.bucket)


def test_unknown_image_and_instance_type_are_refused(aws_server: MotoServer) -> None:
    with pytest.raises(ClientError) as error:
        launch(ImageId="ami-0123456789abcdef0")
    assert code_of(error) == "InvalidAMIID.NotFound"
    with pytest.raises(ClientError) as error:
        launch(InstanceType="p9.48xlarge")
    assert code_of(error) == "InvalidInstanceType.NotFound"


def test_the_machine_image_is_named_by_its_parameter(aws_server: MotoServer) -> None:
    named = client("ssm", "us-west-2").get_parameter(Name=DEFAULT_AMI_PARAMETER)["Parameter"]["Value"]
    (image,) = client("ec2", "us-west-2").describe_images(ImageIds=[named])["Images"]
    assert image["RootDeviceName"] == "/dev/sda1"
    assert [disk.get("Ebs", {}).get("VolumeSize") for disk in image["BlockDeviceMappings"]] == [None, 75]


def test_an_instance_can_be_made_to_be_anything(aws_server: MotoServer) -> None:
    started = launch()["InstanceId"]
    then = datetime(2026, 11, 1, 12, tzinfo=UTC)
    aws_server.set_instance(
        started,
        state="terminated",
        state_reason="Server.SpotInstanceTermination: Spot instance termination",
        transition_reason="Server.SpotInstanceTermination",
        launch_time=then.astimezone(UTC) + timedelta(hours=1),
    )
    aws_server.console[started] = "Kernel panic"
    told = client("ec2").describe_instances()["Reservations"][0]["Instances"][0]
    assert told["State"]["Name"] == "terminated"
    assert told["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    assert told["StateTransitionReason"] == "Server.SpotInstanceTermination"
    assert told["LaunchTime"] == datetime(2026, 11, 1, 13, tzinfo=UTC)
    assert client("ec2").get_console_output(InstanceId=started)["Output"] == "Kernel panic"
    aws_server.forget(started)
    assert states() == []


def test_terminating_twice_keeps_the_first_reason(aws_server: MotoServer) -> None:
    started = launch()["InstanceId"]
    reason = "Server.SpotInstanceTermination: Spot instance termination"
    aws_server.set_instance(started, state="terminated", state_reason=reason)
    client("ec2").terminate_instances(InstanceIds=[started])
    told = client("ec2").describe_instances()["Reservations"][0]["Instances"][0]
    assert told["StateReason"]["Message"] == reason and told["State"]["Name"] == "terminated"


def test_launching_and_terminating_are_told(aws_server: MotoServer) -> None:
    told: list[tuple[str, ...]] = []
    aws_server.when_launched.append(lambda region, instance: told.append(("launched", region, instance)))
    aws_server.when_terminated.append(lambda region, instance: told.append(("terminated", region, instance)))
    started = launch()["InstanceId"]
    launch()
    client("ec2").terminate_instances(InstanceIds=[started])
    assert told == [("launched", "us-east-1", started), ("terminated", "us-east-1", started)]


def test_the_registries_of_aws_answer_for_the_tags_of_the_test(aws_server: MotoServer) -> None:
    digest = image_digest("pytorch:2.13-cu133-amzn2023")
    aws_server.images["us-east-1", "763104351884", "pytorch", "2.13-cu133-amzn2023"] = digest
    asked = {"registryId": "763104351884", "repositoryName": "pytorch"}
    tags = [{"imageTag": "2.13-cu133-amzn2023"}, {"imageTag": "9.9"}]
    told = client("ecr").batch_get_image(**asked, imageIds=tags)
    assert [image["imageId"]["imageDigest"] for image in told["images"]] == [digest]
    assert [failure["failureCode"] for failure in told["failures"]] == ["ImageNotFound"]


def test_quotas_prices_and_rights_are_the_tests_own(aws_server: MotoServer) -> None:
    aws_server.quotas["us-east-1", "L-417A185B"] = 384.0
    aws_server.spot_prices["us-east-1", "p5.48xlarge", "us-east-1a"] = 18.73
    aws_server.denied.add("iam:PassRole")
    quotas = client("service-quotas")
    assert quotas.get_service_quota(ServiceCode="ec2", QuotaCode="L-417A185B")["Quota"]["Value"] == 384.0
    with pytest.raises(ClientError) as error:
        quotas.get_service_quota(ServiceCode="ec2", QuotaCode="L-0")
    assert code_of(error) == "NoSuchResourceException"
    (price,) = client("ec2").describe_spot_price_history(InstanceTypes=["p5.48xlarge"])["SpotPriceHistory"]
    assert (price["SpotPrice"], price["AvailabilityZone"]) == ("18.730000", "us-east-1a")
    told = client("iam").simulate_principal_policy(
        PolicySourceArn="arn:aws:iam::123456789012:user/moto", ActionNames=["iam:PassRole", "s3:GetObject"]
    )
    assert [result["EvalDecision"] for result in told["EvaluationResults"]] == ["implicitDeny", "allowed"]


def test_placement_groups_exist_once_made(aws_server: MotoServer) -> None:
    ec2 = client("ec2")
    ec2.create_placement_group(GroupName="together", Strategy="cluster")
    assert ec2.describe_placement_groups()["PlacementGroups"][0]["GroupName"] == "together"
    with pytest.raises(ClientError) as error:
        ec2.create_placement_group(GroupName="together", Strategy="cluster")
    assert code_of(error) == "InvalidPlacementGroup.Duplicate"
    ec2.delete_placement_group(GroupName="together")
    with pytest.raises(ClientError) as error:
        ec2.describe_placement_groups(GroupNames=["together"])
    assert code_of(error) == "InvalidPlacementGroup.Unknown"


def test_what_moto_does_not_do_is_an_error_of_the_service(aws_server: MotoServer) -> None:
    with pytest.raises(ClientError) as error:
        client("ec2").get_spot_placement_scores(TargetCapacity=1, InstanceTypes=["p5.48xlarge"])
    assert code_of(error) == "NotInMoto"


def test_objects_come_back_and_are_counted(aws_server: MotoServer) -> None:
    bucket = aws_server.set_up_region("us-east-1").bucket
    s3 = client("s3")
    data = bytes(range(256)) * 4096
    s3.put_object(Bucket=bucket, Key="runs/a b/log.txt", Body=data)
    assert s3.get_object(Bucket=bucket, Key="runs/a b/log.txt")["Body"].read() == data
    assert s3.head_object(Bucket=bucket, Key="runs/a b/log.txt")["ContentLength"] == len(data)
    with pytest.raises(ClientError) as error:
        s3.put_object(Bucket=bucket, Key="runs/a b/log.txt", Body=b"", IfNoneMatch="*")
    assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == 412
    s3.list_objects_v2(Bucket=bucket)
    counts = {"PutObject": 2, "GetObject": 1, "HeadObject": 1, "ListObjectsV2": 1}
    assert aws_server.counts() == counts
    assert {r.parameters["Key"] for r in aws_server.sent("PutObject")} == {"runs/a b/log.txt"}


def test_another_test_begins_with_an_empty_account(aws_server: MotoServer) -> None:
    launch()
    aws_server.quotas["us-east-1", "L-417A185B"] = 1.0
    aws_server.reset()
    assert states() == [] and not aws_server.quotas and aws_server.counts() == {"DescribeInstances": 1}
    launch()
    assert len(aws_server.instances()) == 1


def test_it_answers_at_other_addresses_of_this_machine_too(aws_server: MotoServer) -> None:
    url = aws_server.listen("0.0.0.0").replace("0.0.0.0", "127.0.0.2")
    assert url != aws_server.url
    with urlopen(f"{url}/moto-api/data.json") as told:
        assert told.status == 200

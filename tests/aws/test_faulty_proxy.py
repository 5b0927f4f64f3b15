"""The proxy does what it is told to, and nothing else."""

from contextlib import suppress

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectionClosedError
from faulty_proxy import Fault, FaultyProxy
from moto_gaps import machine_image_id
from moto_server import MotoServer

from fastlaunch.aws.ec2 import Aws
from fastlaunch.core.errors import Throttled, Unreachable

pytestmark = pytest.mark.slow  # with the suite that uses it

REGION = "us-east-1"
ONCE = Config(retries={"total_max_attempts": 1})
ANYTHING = {fault: 0.15 for fault in Fault if fault is not Fault.NONE}


def request(token: str = "run-a1") -> dict[str, object]:
    return {
        "ImageId": machine_image_id(REGION),
        "InstanceType": "g6.xlarge",
        "MinCount": 1,
        "MaxCount": 1,
        "ClientToken": token,
    }


def test_without_faults_it_is_not_there(faulty_proxy: FaultyProxy, aws_server: MotoServer) -> None:
    aws = Aws(attempts=1)
    bucket = aws_server.set_up_region(REGION).bucket or ""
    data = bytes(range(256)) * 2048
    aws.put_object(REGION, bucket, "a b/ä", data)
    assert aws.get_object(REGION, bucket, "a b/ä") == data
    assert aws.get_object(REGION, bucket, "none") is None
    assert aws.bucket_exists(REGION, bucket)
    (started,) = aws.run_instances(REGION, request())
    assert [one.id for one in aws.describe_instances(REGION, tokens=["run-a1"])] == [started.id]
    told = [(each.action, each.fault, each.status) for each in faulty_proxy.log]
    assert told[:3] == [("PutObject", "none", 200), ("GetObject", "none", 200), ("GetObject", "none", 404)]
    assert aws_server.counts().total() == len(told) == 6
    client = boto3.client("s3", region_name=REGION, config=ONCE)
    assert client.head_object(Bucket=bucket, Key="a b/ä")["ContentLength"] == len(data)


def test_a_lost_answer_leaves_an_instance_behind(faulty_proxy: FaultyProxy, aws_server: MotoServer) -> None:
    faulty_proxy.script("RunInstances", Fault.LOSE_ANSWER)
    with pytest.raises(Unreachable):
        Aws(attempts=1).run_instances(REGION, request())
    (left,) = aws_server.instances()
    # Asked again with the same token, EC2 tells of the one that it started.
    assert [one.id for one in Aws(attempts=1).run_instances(REGION, request())] == [left.id]
    assert [each.status for each in faulty_proxy.log] == [None, 200]


def test_a_lost_request_leaves_nothing_behind(faulty_proxy: FaultyProxy, aws_server: MotoServer) -> None:
    faulty_proxy.script("RunInstances", Fault.LOSE_REQUEST)
    with pytest.raises(Unreachable):
        Aws(attempts=1).run_instances(REGION, request())
    assert aws_server.instances() == [] and aws_server.sent() == []


def test_a_lost_answer_is_asked_for_again_by_the_launcher(
    faulty_proxy: FaultyProxy, aws_server: MotoServer
) -> None:
    faulty_proxy.script("RunInstances", Fault.LOSE_ANSWER, Fault.LOSE_REQUEST, Fault.THROTTLE)
    slept_s: list[float] = []
    (started,) = Aws(attempts=4, sleep=slept_s.append).run_instances(REGION, request())
    assert [one.id for one in aws_server.instances()] == [started.id] and len(slept_s) == 3
    assert len({each.request.body for each in faulty_proxy.log}) == 1


@pytest.mark.parametrize(
    ("fault", "code", "status"),
    [
        (Fault.THROTTLE, "RequestLimitExceeded", 503),
        (Fault.INTERNAL_ERROR, "InternalError", 500),
        (Fault.UNAVAILABLE, "ServiceUnavailable", 503),
    ],
)
def test_errors_are_those_of_ec2(faulty_proxy: FaultyProxy, fault: Fault, code: str, status: int) -> None:
    faulty_proxy.script("DescribeInstances", fault)
    client = boto3.client("ec2", region_name=REGION, config=ONCE)
    with pytest.raises(ClientError) as error:
        client.describe_instances()
    assert error.value.response["Error"]["Code"] == code
    assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == status
    client.describe_instances()


@pytest.mark.parametrize("service", ["ssm", "s3"])
def test_other_services_throttle_in_their_own_words(faulty_proxy: FaultyProxy, service: str) -> None:
    faulty_proxy.at_random({Fault.THROTTLE: 1.0})
    aws = Aws(attempts=1)
    with pytest.raises(Throttled):
        aws.parameter(REGION, "/p") if service == "ssm" else aws.get_object(REGION, "b", "k")


def test_a_new_instance_is_not_seen_at_once(faulty_proxy: FaultyProxy) -> None:
    faulty_proxy.hide_describes = 2
    aws = Aws(attempts=1)
    (started,) = aws.run_instances(REGION, request())

    def found() -> list[str]:
        return [one.id for one in aws.describe_instances(REGION, ids=[started.id])]

    client = boto3.client("ec2", region_name=REGION, config=ONCE)
    with pytest.raises(ClientError, match=r"InvalidInstanceID\.NotFound"):
        client.terminate_instances(InstanceIds=[started.id])
    assert [found(), found(), found(), found()] == [[], [], [started.id], [started.id]]
    (again,) = aws.run_instances(REGION, request())
    assert again.id == started.id and found() == [started.id]
    client.terminate_instances(InstanceIds=[started.id])


def test_an_ended_instance_is_forgotten(faulty_proxy: FaultyProxy, aws_server: MotoServer) -> None:
    faulty_proxy.show_ended = 1
    aws = Aws(attempts=1)
    (started,) = aws.run_instances(REGION, request())
    aws_server.set_instance(started.id, state="terminated")
    assert [one.id for one in aws.describe_instances(REGION, ids=[started.id])] == [started.id]
    assert aws.describe_instances(REGION, ids=[started.id]) == []
    aws.terminate(REGION, [started.id])
    with pytest.raises(ClientError, match=r"InvalidInstanceID\.NotFound"):
        boto3.client("ec2", region_name=REGION, config=ONCE).terminate_instances(InstanceIds=[started.id])
    faulty_proxy.calm()
    assert len(aws.describe_instances(REGION, ids=[started.id])) == 1


def faults_of(proxy: FaultyProxy, count: int) -> list[Fault]:
    client = boto3.client("ec2", region_name=REGION, config=ONCE, endpoint_url=proxy.url)
    for _ in range(count):
        with suppress(ClientError, ConnectionClosedError):
            client.describe_instances()
    return [each.fault for each in proxy.log]


def test_a_seed_says_what_happens(aws_server: MotoServer) -> None:
    drawn = []
    for seed in (1, 1, 2):
        proxy = FaultyProxy(aws_server.url, seed=seed)
        proxy.at_random(ANYTHING)
        drawn.append(faults_of(proxy, 40))
        proxy.close()
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) | set(drawn[2]) == set(Fault)


def test_faults_are_for_the_actions_they_are_meant_for(faulty_proxy: FaultyProxy) -> None:
    faulty_proxy.at_random({Fault.THROTTLE: 1.0}, actions=["RunInstances"])
    assert set(faults_of(faulty_proxy, 3)) == {Fault.NONE}
    faulty_proxy.at_random({Fault.THROTTLE: 1.0})
    assert faults_of(faulty_proxy, 1)[-1] is Fault.THROTTLE
    assert len(faulty_proxy.happened(Fault.THROTTLE)) == 1
    faulty_proxy.calm()
    assert faults_of(faulty_proxy, 1)[-1] is Fault.NONE

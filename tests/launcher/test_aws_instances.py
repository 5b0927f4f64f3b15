"""Instances started, found and ended through `Aws`, on an AWS on loopback, and a network that fails."""

import socket
from typing import Any

import pytest
from faulty_proxy import Fault, FaultyProxy
from moto_gaps import machine_image_id
from moto_server import MotoServer

from fastlaunch.aws.client import Aws
from fastlaunch.aws.ec2 import MAX_FILTER_VALUES
from fastlaunch.core.errors import BadConfiguration, CloudRefused, NoCapacity, QuotaExceeded, Unreachable

REGION = "us-east-1"


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


@pytest.mark.parametrize("code", ["RequestLimitExceeded", "InternalError"])
def test_the_same_bytes_go_out_again(
    aws: Aws, aws_pauses_s: list[float], aws_server: MotoServer, code: str
) -> None:
    aws_server.refuse("RunInstances", code, times=2)
    (started,) = aws.run_instances(REGION, request())
    first, second, third = aws_server.sent("RunInstances")
    assert first.body == second.body == third.body
    assert third.status == 200
    assert aws_pauses_s == [1.0, 2.0]
    assert [one.id for one in aws_server.instances()] == [started.id]


def test_a_definite_refusal_is_not_asked_again(
    aws: Aws, aws_pauses_s: list[float], aws_server: MotoServer
) -> None:
    # EC2 says it with a server's error, which boto3 alone would repeat.
    aws_server.refuse("RunInstances", "InsufficientInstanceCapacity")
    with pytest.raises(NoCapacity):
        aws.run_instances(REGION, request())
    assert aws_server.counts() == {"RunInstances": 1} and aws_pauses_s == []


@pytest.mark.parametrize(
    ("later", "kind"),
    [
        ("RequestLimitExceeded", Unreachable),
        ("ExpiredToken", Unreachable),
        # Only this says that nothing was started.
        ("VcpuLimitExceeded", QuotaExceeded),
    ],
)
def test_an_unanswered_request_stays_so_until_a_definite_refusal(
    aws: Aws, aws_server: MotoServer, later: str, kind: type[CloudRefused]
) -> None:
    aws_server.refuse("RunInstances", "InternalError", times=1)
    aws_server.refuse("RunInstances", later)
    with pytest.raises(CloudRefused) as caught:
        aws.run_instances(REGION, request())
    assert type(caught.value) is kind


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


def test_terminating_is_no_error_where_one_is_gone(aws: Aws, aws_server: MotoServer) -> None:
    one, two = (aws.run_instances(REGION, request(f"r{n}-a1"))[0].id for n in (1, 2))
    gone = "i-0123456789abcdef0"
    aws.terminate(REGION, [one, gone, two])
    aws.terminate(REGION, [gone])
    assert {i.id for i in aws_server.instances("shutting-down", "terminated")} == {one, two}
    aws_server.refuse("TerminateInstances", "OperationNotPermitted")
    with pytest.raises(BadConfiguration):
        aws.terminate(REGION, [one, gone])


def test_console(aws: Aws, aws_server: MotoServer) -> None:
    started = aws.run_instances(REGION, request())[0].id
    assert aws.console_output(REGION, started) == ""
    aws_server.console[started] = "[    0.0] Linux\nKernel panic ä\n"
    assert aws.console_output(REGION, started) == "[    0.0] Linux\nKernel panic ä\n"
    assert aws_server.sent("GetConsoleOutput")[-1].parameters["Latest"] == "true"
    assert aws.console_output(REGION, "i-0123456789abcdef0") == ""


def test_a_lost_answer_is_asked_for_again(faulty_proxy: FaultyProxy, aws_server: MotoServer) -> None:
    faulty_proxy.script("RunInstances", Fault.LOSE_ANSWER, Fault.LOSE_REQUEST, Fault.THROTTLE)
    slept_s: list[float] = []
    (started,) = Aws(attempts=4, sleep=slept_s.append).run_instances(REGION, request())
    assert [one.id for one in aws_server.instances()] == [started.id] and len(slept_s) == 3
    assert len({each.request.body for each in faulty_proxy.log}) == 1


def test_somebody_listens_and_says_nothing(aws_server: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        aws = Aws(attempts=2, sleep=lambda seconds: None, timeouts_s=(0.2, 0.2))
        with pytest.raises(Unreachable) as error:
            aws.run_instances(REGION, request())
    assert error.value.code == "ReadTimeoutError"
    assert "fastlaunch status" in (error.value.hint or "")

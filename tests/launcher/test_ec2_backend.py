"""The EC2 backend over HTTP: what it sends, and what it makes of what comes back."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from ec2_builders import job, site
from fake_cloud import Clock, FakeAws, FakeNode
from moto_cloud import REGION, MotoCloud
from moto_server import MotoServer
from stubbed_aws import StubbedAws

from fastlaunch.backends.ec2.ec2 import Ec2Backend
from fastlaunch.backends.protocol import FORGOTTEN_AFTER
from fastlaunch.core.errors import CloudRefused, NoCapacity, Throttled, Unreachable
from fastlaunch.core.plan import Plan

RUN_ID = "20261121-090312-k3f9"
FORGOTTEN_S = (FORGOTTEN_AFTER + timedelta(minutes=1)).total_seconds()


@pytest.fixture
def cloud(aws_server: MotoServer) -> MotoCloud:
    """Whose machines never say a word, unless a test gives them something to do."""
    made = MotoCloud(aws_server)
    made.node = lambda node: None
    return made


@pytest.fixture
def backend(cloud: MotoCloud, tmp_path: Path) -> Ec2Backend:
    settings = cloud.settings
    zone, subnet = next(iter(settings.subnets.items()))
    place = site(
        zone=zone,
        subnet=subnet,
        bucket=settings.bucket,
        instance_profile=settings.instance_profile,
        security_groups=settings.security_groups,
        ami=cloud.aws.machine_image(REGION, cloud.aws.parameter(REGION, settings.ami_parameter)).id,
    )
    made = Ec2Backend(aws=cloud.aws, home=tmp_path, sleep=cloud.clock.sleep, now=cloud.clock.now)
    return made.at(place, 120)


def plan(backend: Ec2Backend, *, attempt: int = 1, run_id: str = RUN_ID) -> Plan:
    return backend.plan({run_id: job()}, attempt=attempt)


def in_strides(backend: Ec2Backend, cloud: MotoCloud) -> Ec2Backend:
    """The backend with a clock that goes on six times as far, so that it asks a sixth as often."""
    return replace(backend, sleep=lambda seconds: cloud.clock.sleep(6 * seconds))


def test_exactly_the_plans_request_is_sent(backend: Ec2Backend, cloud: MotoCloud) -> None:
    planned = plan(backend)
    handle = backend.execute(planned)
    (sent,) = cloud.server.sent("RunInstances")
    assert sent.parameters["ClientToken"] == f"{RUN_ID}-a1" == handle["token"]
    assert sent.parameters["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert sent.parameters["MinCount"] == sent.parameters["MaxCount"] == "1"
    assert cloud.server.user_data(handle["instance_id"]) == planned.request["UserData"]
    assert handle["region"] == REGION
    assert handle["output"] == f"s3://{cloud.settings.bucket}/fastlaunch/runs/{RUN_ID}/attempt-1"
    assert handle["instance_ids"] == [handle["instance_id"]]
    assert json.loads(json.dumps(handle)) == handle


def test_machines_are_seen_in_one_request(backend: Ec2Backend, cloud: MotoCloud) -> None:
    handles = [backend.execute(plan(backend, attempt=n)) for n in range(1, 4)]
    before = cloud.server.counts()["DescribeInstances"]
    aws_statuses = backend.describe([*handles, handles[0]])
    assert [
        (aws_status.is_seen, aws_status.is_live, aws_status.has_ended) for aws_status in aws_statuses
    ] == [(True, True, False)] * 4
    assert aws_statuses[0].zone == "us-east-1a" and aws_statuses[0].instance_type == "p5.48xlarge"
    assert cloud.server.counts()["DescribeInstances"] - before == 1


def test_a_forgotten_machine_has_ended_only_after_fifteen_minutes(
    backend: Ec2Backend, cloud: MotoCloud
) -> None:
    handle = backend.execute(plan(backend))
    cloud.server.forget(handle["instance_id"])
    (aws_status,) = backend.describe([handle])
    assert not aws_status.has_ended and not aws_status.is_seen
    cloud.clock.sleep(FORGOTTEN_S)
    assert backend.describe([handle])[0].has_ended


def test_a_wrong_id_does_not_hide_the_machine_of_the_token(backend: Ec2Backend, cloud: MotoCloud) -> None:
    handle = backend.execute(plan(backend))
    wrong = {**handle, "instance_id": "i-00000000000000000"}
    cloud.clock.sleep(FORGOTTEN_S)
    (aws_status,) = backend.describe([wrong])
    assert aws_status.is_live and not aws_status.has_ended
    backend.kill(wrong)
    assert not cloud.server.instances("pending", "running")


def test_a_live_machine_is_found_before_an_ended_one(backend: Ec2Backend, cloud: MotoCloud) -> None:
    first = backend.execute(plan(backend))
    cloud.server.set_instance(first["instance_id"], state="terminated")
    # A second one with the same tags, started by hand or by an account without idempotency.
    request = {**plan(backend).request, "ClientToken": "another"}
    (second,) = cloud.aws.run_instances(REGION, request)
    found = backend.find(plan(backend))
    assert found is not None and found["instance_id"] == second.id


def test_stopping_asks_the_node_first(backend: Ec2Backend, cloud: MotoCloud) -> None:
    cloud.node = lambda node: node.train(upto=0)
    handle = backend.execute(plan(backend))
    cloud.clock.sleep(90)
    backend.stop(handle)
    key = f"fastlaunch/runs/{RUN_ID}/attempt-1/abort"
    assert cloud.aws.get_object(REGION, cloud.settings.bucket or "", key) is not None
    assert cloud.server.counts()["TerminateInstances"] == 0
    assert backend.sync(handle).status is not None


def test_a_node_that_has_not_booted_is_terminated_without_asking(
    backend: Ec2Backend, cloud: MotoCloud
) -> None:
    handle = backend.execute(plan(backend))
    before = cloud.clock.now()
    backend.stop(handle)
    assert cloud.server.counts()["TerminateInstances"] == 1
    assert cloud.clock.now() - before < timedelta(seconds=30)
    assert not cloud.server.instances("pending", "running")


def test_a_node_that_does_not_listen_is_terminated_after_its_time(
    backend: Ec2Backend, cloud: MotoCloud
) -> None:
    def deaf(node: FakeNode) -> None:
        node.stops = False
        node.train(upto=0)

    cloud.node = deaf
    handle = backend.execute(plan(backend))
    cloud.clock.sleep(90)
    before = cloud.clock.now()
    in_strides(backend, cloud).stop(handle)
    assert timedelta(seconds=240) <= cloud.clock.now() - before < timedelta(seconds=300)
    assert not cloud.server.instances("pending", "running")


def test_a_bucket_that_refuses_does_not_keep_a_machine_alive(backend: Ec2Backend, cloud: MotoCloud) -> None:
    cloud.node = lambda node: node.train(upto=0)
    handle = backend.execute(plan(backend))
    cloud.clock.sleep(90)
    cloud.server.refuse("ListObjectsV2", "AccessDenied", status=403)
    backend.stop(handle)
    assert not cloud.server.instances("pending", "running")


def test_killing_is_repeated_until_it_is_seen(backend: Ec2Backend, cloud: MotoCloud) -> None:
    handle = backend.execute(plan(backend))
    cloud.server.refuse("TerminateInstances", "RequestLimitExceeded", times=3)
    backend.kill(handle)
    assert not cloud.server.instances("pending", "running")


def test_a_machine_that_cannot_be_ended_is_an_error(backend: Ec2Backend, cloud: MotoCloud) -> None:
    handle = backend.execute(plan(backend))
    cloud.server.refuse("TerminateInstances", "RequestLimitExceeded")
    with pytest.raises(Throttled):
        in_strides(backend, cloud).kill(handle)
    cloud.server.refuse("DescribeInstances", "UnauthorizedOperation")
    with pytest.raises(CloudRefused):
        backend.kill(handle)


def test_the_consoles_are_kept(backend: Ec2Backend, cloud: MotoCloud, tmp_path: Path) -> None:
    handle = backend.execute(plan(backend))
    cloud.server.console[handle["instance_id"]] = "Kernel panic"
    path = backend.console_log(handle)
    assert path == tmp_path / "runs" / RUN_ID / "console-a1.log"
    assert path.read_text() == "Kernel panic"
    two = {**handle, "instance_ids": [handle["instance_id"], "i-0"]}
    assert backend.console_log(two).read_text() == f"== {handle['instance_id']}\nKernel panic\n== i-0\n\n"


# Several nodes


def cluster(backend: Ec2Backend, num_nodes: int = 3) -> Plan:
    """A plan of so many nodes; what else such a request has, ec2_plan's tests see to."""
    one = plan(backend)
    return replace(one, request={**one.request, "MinCount": num_nodes, "MaxCount": num_nodes})


def test_a_handle_lists_every_instance_in_the_order_of_ranks(backend: Ec2Backend, cloud: MotoCloud) -> None:
    ranks: list[int] = []
    cloud.node = lambda node: ranks.append(node.rank)
    handle = backend.execute(cluster(backend))
    assert ranks == [0, 1, 2] and handle["num_nodes"] == 3
    assert len(set(handle["instance_ids"])) == 3
    assert handle["instance_id"] == handle["instance_ids"][0]
    assert backend.resource_name(handle).startswith(f"instances {handle['instance_id']}, ")
    found = backend.find(cluster(backend))
    assert found == handle


def test_an_attempt_is_up_when_all_its_machines_run_and_has_ended_when_all_have(
    backend: Ec2Backend, cloud: MotoCloud
) -> None:
    handle = backend.execute(cluster(backend, 2))
    first, second = handle["instance_ids"]
    taken = "Server.SpotInstanceTermination: Spot instance termination"

    def status() -> tuple[bool, bool, bool, bool]:
        (shown,) = backend.describe([handle])
        return shown.is_up, shown.is_live, shown.is_taken, shown.has_ended

    cloud.server.set_instance(first, state="running")
    cloud.server.set_instance(second, state="pending")
    assert backend.describe([handle])[0].detail == "1 pending, 1 running"
    cloud.server.set_instance(second, state="pending")
    assert status() == (False, True, False, False)
    cloud.server.set_instance(second, state="running")
    assert status() == (True, True, False, False)
    cloud.server.set_instance(second, state="terminated", state_reason=taken)
    assert status() == (False, True, True, False)
    cloud.server.set_instance(first, state="terminated")
    assert status() == (False, False, True, True)


def test_one_that_is_not_shown_yet_keeps_an_attempt_from_ending(
    backend: Ec2Backend, cloud: MotoCloud
) -> None:
    handle = backend.execute(cluster(backend, 2))
    first, second = handle["instance_ids"]
    cloud.server.set_instance(first, state="terminated")
    cloud.server.forget(second)
    assert not backend.describe([handle])[0].has_ended
    cloud.clock.sleep(FORGOTTEN_S)
    assert backend.describe([handle])[0].has_ended


@pytest.mark.parametrize("order", ["stop", "kill"])
def test_machines_that_the_handle_does_not_list_are_ended_too(
    backend: Ec2Backend, cloud: MotoCloud, order: str
) -> None:
    handle = backend.execute(cluster(backend))
    partial = {**handle, "instance_ids": handle["instance_ids"][:1]}
    getattr(backend, order)(partial)
    assert not cloud.server.instances("pending", "running")


def test_machines_that_the_handle_does_not_list_are_seen(backend: Ec2Backend, cloud: MotoCloud) -> None:
    handle = backend.execute(cluster(backend, 2))
    first, second = handle["instance_ids"]
    cloud.server.set_instance(first, state="terminated")
    partial = {**handle, "instance_ids": [first]}
    (aws_status,) = backend.describe([partial])
    assert aws_status.is_live and not aws_status.has_ended
    # As long as one is not shown at all it may be on its way.
    cloud.server.forget(second)
    assert not backend.describe([partial])[0].has_ended


def offline(tmp_path: Path) -> tuple[Ec2Backend, FakeAws]:
    """A backend on an AWS that starts one machine too few."""
    clock = Clock()
    aws = FakeAws(clock)
    aws.answers, aws.node = ["few"], lambda node: None
    return Ec2Backend(aws=aws, home=tmp_path, sleep=clock.sleep, now=clock.now).at(site(), 120), aws


def test_fewer_machines_than_the_job_has_nodes_are_ended_at_once(tmp_path: Path) -> None:
    backend, aws = offline(tmp_path)
    with pytest.raises(NoCapacity, match="started 2 of 3 instances"):
        backend.execute(cluster(backend))
    assert aws.live() == [] and len(aws.instances) == 2


def test_fewer_machines_that_cannot_be_ended_are_unknown(tmp_path: Path) -> None:
    backend, aws = offline(tmp_path)
    aws.refuse("terminate", CloudRefused("not allowed"))
    with pytest.raises(Unreachable, match="not allowed"):
        backend.execute(cluster(backend))
    assert len(aws.live()) == 2


def test_all_nodes_are_asked_to_stop_if_one_has_booted(tmp_path: Path) -> None:
    backend, aws = offline(tmp_path)
    aws.answers, aws.node = [], lambda node: node.train(upto=0) if node.rank == 1 else None
    handle = backend.execute(cluster(backend, 2))
    backend.sleep(90)
    backend.stop(handle)
    assert [key for _, key in aws.objects if key.endswith("/abort")]
    assert aws.live() == []
    # One that stopped by itself, one that had to be ended.
    assert backend.sync(handle).statuses.keys() == {1}


def test_checkpoints_lie_beside_the_attempts(tmp_path: Path) -> None:
    output = f"s3://acme/fastlaunch/runs/{RUN_ID}/attempt-3"
    folder = offline(tmp_path)[0].checkpoint_folder(output, "other")
    assert folder == "s3://acme/fastlaunch/runs/other/checkpoints/"


@pytest.mark.parametrize(
    "name", ["ec2-p5en.48xlarge-4-nodes-capacity-block", "ec2-p6-b300.48xlarge-2-nodes-on-demand"]
)
def test_the_plan_of_several_nodes_is_sent_as_it_is(
    name: str, stubbed_aws: StubbedAws, tmp_path: Path
) -> None:
    data = json.loads((Path(__file__).parents[1] / "plans" / f"{name}.json").read_text())
    data["request"]["UserData"] = "\n".join(data["request"]["UserData"])
    # What the machines fetch goes another way.
    planned = replace(Plan.from_json(data), objects=())
    machine = {
        "InstanceType": planned.request["InstanceType"],
        "ClientToken": planned.request["ClientToken"],
        "State": {"Name": "pending"},
        "LaunchTime": datetime(2026, 11, 21, 12, 0, tzinfo=UTC),
    }
    numbers = range(planned.request["MaxCount"])
    # EC2 may list the last one first.
    answer = [{**machine, "InstanceId": f"i-{n}", "AmiLaunchIndex": n} for n in reversed(numbers)]
    stubbed_aws.stub("ec2").add_response("run_instances", {"Instances": answer}, dict(planned.request))
    handle = Ec2Backend(aws=stubbed_aws.aws, home=tmp_path).execute(planned)
    assert handle["instance_ids"] == [f"i-{n}" for n in numbers]
    assert (handle["instance_id"], handle["token"]) == ("i-0", planned.request["ClientToken"])

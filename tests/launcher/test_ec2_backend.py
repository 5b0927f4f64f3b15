"""The EC2 backend: what it sends, what it makes of what EC2 shows, and how its machines end."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from ec2_builders import job, site
from fake_cloud import Clock, FakeAws, FakeNode
from moto_server import MotoServer
from moto_server import backend as moto_backend
from stubbed_aws import StubbedAws

from fastlaunch.aws.client import Aws
from fastlaunch.backends.ec2.ec2 import Ec2Backend
from fastlaunch.backends.protocol import FORGOTTEN_AFTER
from fastlaunch.core.data import read
from fastlaunch.core.errors import (
    BadConfiguration,
    CloudRefused,
    NoCapacity,
    NotAuthorised,
    Throttled,
    Unreachable,
)
from fastlaunch.core.plan import Ending, Plan

RUN_ID = "20261121-090312-k3f9"
FORGOTTEN_S = (FORGOTTEN_AFTER + timedelta(minutes=1)).total_seconds()


@pytest.fixture
def aws() -> FakeAws:
    """Its machines never say a word, unless a test gives them something to do."""
    made = FakeAws(Clock())
    made.node = lambda node: None
    return made


@pytest.fixture
def backend(aws: FakeAws, tmp_path: Path) -> Ec2Backend:
    made = Ec2Backend(aws=aws, home=tmp_path, sleep=aws.clock.sleep, now=aws.clock.now)
    return made.at(site(), 120)


def plan(backend: Ec2Backend, num_nodes: int = 1, *, attempt: int = 1) -> Plan:
    """A plan of so many nodes; what else such a request has, the planner's tests see to."""
    one = backend.plan({RUN_ID: job()}, attempt=attempt)
    return replace(one, request={**one.request, "MinCount": num_nodes, "MaxCount": num_nodes})


@pytest.mark.parametrize(
    "name", ["ec2-p5en.48xlarge-4-nodes-capacity-block", "ec2-p6-b300.48xlarge-2-nodes-on-demand"]
)
def test_exactly_the_plans_request_is_sent(name: str, stubbed_aws: StubbedAws, tmp_path: Path) -> None:
    data = json.loads((Path(__file__).parents[1] / "plans" / f"{name}.json").read_text())
    data["request"]["UserData"] = "\n".join(data["request"]["UserData"])
    # What the machines fetch goes another way.
    planned = replace(read(Plan, data, "plan"), objects=())
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
    assert json.loads(json.dumps(handle)) == handle


def test_no_machine_is_started_while_something_else_lies_where_the_agent_belongs(
    aws_server: MotoServer, tmp_path: Path
) -> None:
    backend = Ec2Backend(aws=Aws(), home=tmp_path).at(site(), 120)
    planned = plan(backend)
    agent = next(one for one in planned.objects if one.text is None)
    s3 = moto_backend("s3", "aws")
    s3.create_bucket(agent.bucket, "us-east-1")
    s3.put_object(agent.bucket, agent.key, b"junk")
    with pytest.raises(BadConfiguration, match=agent.uri):
        backend.execute(planned)
    assert aws_server.sent("RunInstances") == []


def test_machines_are_seen_in_one_request(backend: Ec2Backend, aws: FakeAws) -> None:
    handles = [backend.execute(plan(backend, attempt=n)) for n in range(1, 4)]
    statuses = backend.describe([*handles, handles[0]])
    assert [(one.is_seen, one.is_live, one.has_ended) for one in statuses] == [(True, True, False)] * 4
    assert (statuses[0].zone, statuses[0].instance_type) == ("us-east-1a", "p5.48xlarge")
    assert aws.calls["describe_instances"] == 1


def test_a_machine_that_ec2_does_not_show_has_not_ended(backend: Ec2Backend, aws: FakeAws) -> None:
    handle = backend.execute(plan(backend))
    aws.is_blind = True
    backend.sleep(FORGOTTEN_S)
    (status,) = backend.describe([handle])
    assert (status.has_ended, status.is_seen, status.num_unseen) == (False, False, 1)


def test_a_wrong_id_does_not_hide_the_machine_of_the_token(backend: Ec2Backend, aws: FakeAws) -> None:
    wrong = {**backend.execute(plan(backend)), "instance_id": "i-none", "instance_ids": ["i-none"]}
    backend.sleep(FORGOTTEN_S)
    (status,) = backend.describe([wrong])
    assert status.is_live and not status.has_ended
    backend.kill(wrong)
    assert aws.live() == []


@pytest.mark.parametrize(
    "changes", [{"token": None}, {"token": "another"}, {"tags": {}}, {"tags": {"fastlaunch:run": RUN_ID}}]
)
def test_what_only_looks_like_the_attempts_machine_is_not_found(
    backend: Ec2Backend, aws: FakeAws, changes: dict[str, Any]
) -> None:
    assert backend.find(plan(backend)) is None
    handle = backend.execute(plan(backend))
    assert (backend.find(plan(backend)) or {})["instance_id"] == handle["instance_id"]
    aws.change(handle["instance_id"], **changes)
    assert backend.find(plan(backend)) is None
    backend.kill({**handle, "instance_ids": []})
    assert aws.live() == [handle["instance_id"]]


def test_a_machine_with_the_tags_of_another_run_is_not_ended(backend: Ec2Backend, aws: FakeAws) -> None:
    ours, theirs = backend.execute(plan(backend)), backend.execute(plan(backend, attempt=2))
    aws.change(theirs["instance_id"], tags={"fastlaunch:run": "web-frontend"})
    both = {**ours, "instance_ids": [ours["instance_id"], theirs["instance_id"]]}
    with pytest.raises(BadConfiguration, match=f"{theirs['instance_id']} .*does not carry") as caught:
        backend.kill(both)
    assert "aws ec2 describe-instances" in (caught.value.hint or "")
    assert theirs["instance_id"] in aws.live()


def test_stopping_asks_the_node_first(backend: Ec2Backend, aws: FakeAws) -> None:
    aws.node = lambda node: node.train(upto=0)
    handle = backend.execute(plan(backend))
    backend.sleep(90)
    backend.stop(handle)
    assert [key for _, key in aws.objects if key.endswith(f"/runs/{RUN_ID}/attempt-1/abort")]
    assert aws.calls["terminate"] == 0
    assert backend.sync(handle).status is not None
    # It has ended already, which is no error.
    backend.stop(handle)
    backend.kill(handle)
    backend.sleep(300)
    assert backend.describe([handle])[0].has_ended


def test_a_node_that_has_not_booted_is_terminated_without_asking(backend: Ec2Backend, aws: FakeAws) -> None:
    handle = backend.execute(plan(backend))
    backend.sleep(60)
    before = aws.clock.now()
    backend.stop(handle)
    assert aws.clock.now() - before < timedelta(seconds=30)
    assert aws.live() == []


def test_a_node_that_does_not_listen_is_terminated_after_its_time(backend: Ec2Backend, aws: FakeAws) -> None:
    def deaf(node: FakeNode) -> None:
        node.stops = False
        node.train(upto=0)

    aws.node = deaf
    handle = backend.execute(plan(backend))
    backend.sleep(90)
    before = aws.clock.now()
    backend.stop(handle)
    assert timedelta(seconds=240) <= aws.clock.now() - before < timedelta(seconds=300)
    assert aws.live() == []


def test_a_bucket_that_refuses_does_not_keep_a_machine_alive(backend: Ec2Backend, aws: FakeAws) -> None:
    aws.node = lambda node: node.train(upto=0)
    handle = backend.execute(plan(backend))
    backend.sleep(90)
    aws.refuse("list_objects", *[NotAuthorised("denied")] * 100)
    backend.stop(handle)
    assert aws.live() == []


def test_killing_is_repeated_until_it_is_seen(backend: Ec2Backend, aws: FakeAws) -> None:
    handle = backend.execute(plan(backend))
    aws.refuse("terminate", *[Throttled("too fast")] * 3)
    backend.kill(handle)
    assert aws.live() == []


@pytest.mark.parametrize(
    ("method", "error"),
    [("terminate", Throttled("too fast")), ("describe_instances", NotAuthorised("denied"))],
)
def test_a_machine_that_cannot_be_ended_is_an_error(
    backend: Ec2Backend, aws: FakeAws, method: str, error: CloudRefused
) -> None:
    handle = backend.execute(plan(backend))
    aws.refuse(method, *[error] * 100)
    with pytest.raises(type(error)):
        backend.kill(handle)


def test_a_machine_that_is_not_seen_to_end_is_an_error(backend: Ec2Backend, aws: FakeAws) -> None:
    handle = backend.execute(plan(backend))
    aws.hidden_s = 1e6
    with pytest.raises(CloudRefused, match=handle["instance_id"]) as caught:
        backend.kill(handle)
    assert "aws ec2 describe-instances --region us-east-1" in (caught.value.hint or "")


def test_the_consoles_are_kept(backend: Ec2Backend, tmp_path: Path) -> None:
    handle = backend.execute(plan(backend))
    path = backend.console_log(handle)
    assert path == tmp_path / "runs" / RUN_ID / "console-a1.log"
    assert path.read_text() == "Kernel panic - not syncing"
    two = {**handle, "instance_ids": ["i-1", "i-2"]}
    panic = "Kernel panic - not syncing"
    assert backend.console_log(two).read_text() == f"== i-1\n{panic}\n== i-2\n{panic}\n"


def test_checkpoints_lie_beside_the_attempts(backend: Ec2Backend) -> None:
    output = f"s3://acme/fastlaunch/runs/{RUN_ID}/attempt-3"
    assert backend.checkpoint_folder(output, "other") == "s3://acme/fastlaunch/runs/other/checkpoints/"


# Several nodes


def test_a_handle_lists_every_instance_in_the_order_of_ranks(backend: Ec2Backend) -> None:
    handle = backend.execute(plan(backend, 3))
    assert handle["num_nodes"] == 3 and len(set(handle["instance_ids"])) == 3
    assert handle["instance_id"] == handle["instance_ids"][0]
    assert backend.resource_name(handle).startswith(f"instances {handle['instance_id']}, ")
    assert backend.find(plan(backend, 3)) == handle


def test_an_attempt_is_up_when_all_its_machines_run_and_has_ended_when_all_have(
    backend: Ec2Backend, aws: FakeAws
) -> None:
    handle = backend.execute(plan(backend, 2))
    first, second = handle["instance_ids"]

    def status() -> tuple[bool, bool, bool, bool]:
        (shown,) = backend.describe([handle])
        return shown.is_up, shown.is_live, shown.ending is Ending.RECLAIMED, shown.has_ended

    aws.change(first, state="running")
    assert status() == (False, True, False, False)
    assert backend.describe([handle])[0].detail == "1 pending, 1 running"
    aws.change(second, state="running")
    assert status() == (True, True, False, False)
    aws.change(second, state="terminated", state_reason="Server.SpotInstanceTermination: taken")
    assert status() == (False, True, True, False)
    aws.change(first, state="terminated")
    assert status() == (False, False, True, True)


def test_one_that_is_not_shown_yet_keeps_an_attempt_from_ending(backend: Ec2Backend, aws: FakeAws) -> None:
    handle = backend.execute(plan(backend, 2))
    first, second = handle["instance_ids"]
    aws.change(first, state="terminated")
    del aws.instances[second]
    assert not backend.describe([handle])[0].has_ended
    assert not backend.describe([{**handle, "instance_ids": [first]}])[0].has_ended
    backend.sleep(FORGOTTEN_S)
    assert not backend.describe([handle])[0].has_ended


@pytest.mark.parametrize("order", ["stop", "kill"])
def test_machines_that_the_handle_does_not_list_are_seen_and_ended_too(
    backend: Ec2Backend, aws: FakeAws, order: str
) -> None:
    handle = backend.execute(plan(backend, 3))
    partial = {**handle, "instance_ids": handle["instance_ids"][:1]}
    aws.change(handle["instance_id"], state="terminated")
    (status,) = backend.describe([partial])
    assert status.is_live and not status.has_ended
    getattr(backend, order)(partial)
    assert aws.live() == []


def test_fewer_machines_than_the_job_has_nodes_are_ended_at_once(backend: Ec2Backend, aws: FakeAws) -> None:
    aws.answers = ["few"]
    with pytest.raises(NoCapacity, match="started 2 of 3 instances"):
        backend.execute(plan(backend, 3))
    assert aws.live() == [] and len(aws.instances) == 2


def test_fewer_machines_that_cannot_be_ended_are_unknown(backend: Ec2Backend, aws: FakeAws) -> None:
    aws.answers = ["few"]
    aws.refuse("terminate", CloudRefused("not allowed"))
    with pytest.raises(Unreachable, match="not allowed"):
        backend.execute(plan(backend, 3))
    assert len(aws.live()) == 2


def test_all_nodes_are_asked_to_stop_if_one_has_booted(backend: Ec2Backend, aws: FakeAws) -> None:
    aws.node = lambda node: node.train(upto=0) if node.rank == 1 else None
    handle = backend.execute(plan(backend, 2))
    backend.sleep(90)
    backend.stop(handle)
    assert [key for _, key in aws.objects if key.endswith("/abort")]
    assert aws.live() == []
    # One that stopped by itself, one that had to be ended.
    assert backend.sync(handle).statuses.keys() == {1}

"""Golden plans of several nodes, sent: exactly the plan, and EC2's answers by kind.

The tests' EC2 takes such requests its own way: here every answer is made beforehand, and both are held to
botocore's model.
"""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from stubbed_aws import StubbedAws

from fastlaunch.backends.ec2.ec2 import Ec2Backend
from fastlaunch.core.errors import BadConfiguration, CloudRefused, NoCapacity, QuotaExceeded
from fastlaunch.core.plan import Plan

PLANS = Path(__file__).parents[1] / "plans"
BLOCK = "ec2-p5.48xlarge-2-nodes-capacity-block"


def golden(name: str) -> Plan:
    """The plan, whose user data stands in the file line by line."""
    data = json.loads((PLANS / f"{name}.json").read_text())
    data["request"]["UserData"] = "\n".join(data["request"]["UserData"])
    # What the machines fetch goes another way.
    return replace(Plan.from_json(data), objects=())


@pytest.mark.parametrize(
    "name", ["ec2-p4d.24xlarge-2-nodes-spot", "ec2-p6-b300.48xlarge-2-nodes-on-demand", BLOCK]
)
def test_the_plan_is_sent_as_it_is(name: str, stubbed_aws: StubbedAws, tmp_path: Path) -> None:
    plan = golden(name)
    machine = {
        "InstanceType": plan.request["InstanceType"],
        "ClientToken": plan.request["ClientToken"],
        "State": {"Name": "pending"},
        "LaunchTime": datetime(2026, 11, 21, 12, 0, tzinfo=UTC),
        "NetworkInterfaces": [
            {
                "InterfaceType": each["InterfaceType"],
                "Attachment": {key: each[key] for key in ("DeviceIndex", "NetworkCardIndex")},
            }
            for each in plan.request["NetworkInterfaces"]
        ],
    }
    # EC2 may list the last node first.
    answer = {"Instances": [{**machine, "InstanceId": f"i-{n}", "AmiLaunchIndex": n} for n in (1, 0)]}
    stubbed_aws.stub("ec2").add_response("run_instances", answer, dict(plan.request))
    handle = Ec2Backend(aws=stubbed_aws.aws, home=tmp_path).execute(plan)
    assert handle["instance_ids"] == ["i-0", "i-1"]
    assert (handle["instance_id"], handle["token"]) == ("i-0", plan.request["ClientToken"])


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("InsufficientReservedInstanceCapacity", NoCapacity),
        ("ReservationCapacityExceeded", NoCapacity),
        ("InvalidCapacityReservationId.NotFound", BadConfiguration),
        ("AttachmentLimitExceeded", CloudRefused),
        ("VcpuLimitExceeded", QuotaExceeded),
    ],
)
def test_refusals_of_a_block_have_their_kind(
    code: str, kind: type[CloudRefused], stubbed_aws: StubbedAws, tmp_path: Path
) -> None:
    stubbed_aws.error("ec2", "run_instances", code)
    with pytest.raises(kind) as error:
        Ec2Backend(aws=stubbed_aws.aws, home=tmp_path).execute(golden(BLOCK))
    assert error.value.code == code and error.value.hint

"""Golden plans of several nodes and of capacity blocks, sent: exactly the plan, and EC2's answers told apart.

The tests' EC2 takes such requests its own way: here every answer is made beforehand, and both are held
to botocore's model.
"""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from stubbed_aws import StubbedAws

from fastlaunch.backends.ec2.ec2 import Ec2Backend
from fastlaunch.core.errors import BadConfiguration, CloudRefused, NoCapacity, QuotaExceeded
from fastlaunch.core.plan import Plan

PLANS = Path(__file__).parents[1] / "plans"
BLOCK = "ec2-p5.48xlarge-2-nodes-capacity-block"
THEN = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def golden(name: str) -> Plan:
    """The plan, whose user data stands in the file line by line."""
    data = json.loads((PLANS / f"{name}.json").read_text())
    data["request"]["UserData"] = "\n".join(data["request"]["UserData"])
    # What the machines fetch goes another way.
    return replace(Plan.from_json(data), objects=())


def started(plan: Plan) -> dict[str, Any]:
    """What EC2 answers: the machines, last one first, each with its interfaces as it lists them."""
    lifecycle = plan.request.get("InstanceMarketOptions", {}).get("MarketType")
    interfaces = [
        {
            "InterfaceType": one["InterfaceType"],
            "Attachment": {key: one[key] for key in ("DeviceIndex", "NetworkCardIndex")},
        }
        for one in plan.request["NetworkInterfaces"]
    ]
    machine = {
        "InstanceType": plan.request["InstanceType"],
        "ClientToken": plan.request["ClientToken"],
        "State": {"Name": "pending"},
        "LaunchTime": THEN,
        "NetworkInterfaces": interfaces,
        **({"InstanceLifecycle": lifecycle} if lifecycle else {}),
    }
    numbers = reversed(range(plan.request["MaxCount"]))
    return {
        "Instances": [
            {**machine, "InstanceId": f"i-{number}", "AmiLaunchIndex": number} for number in numbers
        ]
    }


@pytest.mark.parametrize(
    "name",
    [
        "ec2-p4d.24xlarge-2-nodes-spot",
        "ec2-p5en.48xlarge-4-nodes-capacity-block",
        "ec2-p6-b300.48xlarge-2-nodes-on-demand",
        BLOCK,
    ],
)
def test_the_plan_is_sent_as_it_is(name: str, stubbed_aws: StubbedAws, tmp_path: Path) -> None:
    plan = golden(name)
    stubbed_aws.stub("ec2").add_response("run_instances", started(plan), dict(plan.request))
    handle = Ec2Backend(aws=stubbed_aws.aws, home=tmp_path).execute(plan)
    num_nodes = plan.request["MinCount"]
    assert handle["instance_ids"] == [f"i-{number}" for number in range(num_nodes)]
    assert (handle["instance_id"], handle["token"]) == ("i-0", plan.request["ClientToken"])


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("InsufficientInstanceCapacity", NoCapacity),
        ("InsufficientReservedInstanceCapacity", NoCapacity),
        ("ReservationCapacityExceeded", NoCapacity),
        ("InvalidCapacityReservationId.NotFound", BadConfiguration),
        ("InvalidParameterCombination", BadConfiguration),
        ("AttachmentLimitExceeded", CloudRefused),
        ("VcpuLimitExceeded", QuotaExceeded),
    ],
)
def test_refusals_of_a_block_are_told_apart(
    code: str, kind: type[CloudRefused], stubbed_aws: StubbedAws, tmp_path: Path
) -> None:
    stubbed_aws.error("ec2", "run_instances", code)
    with pytest.raises(kind) as error:
        Ec2Backend(aws=stubbed_aws.aws, home=tmp_path).execute(golden(BLOCK))
    assert error.value.code == code and error.value.hint

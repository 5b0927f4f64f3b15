"""The rules of EC2 that botocore's model does not know: each breaks on one change to a plan that holds."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from ec2_builders import job, plan, site

from fastlaunch.backends import Plan
from fastlaunch.backends.ec2_rules import RULES, broken_rules

ON_DEMAND = plan()
SPOT = plan(job(purchase="spot", checkpoint_every=50), at=site(max_price_usd=25.5))

Change = Callable[[dict[str, Any]], object]


def changed(base: Plan, change: Change) -> list[str]:
    """What is wrong with `base` after a change to its request."""
    request = deepcopy(dict(base.request))
    change(request)
    return broken_rules(replace(base, request=request), root_device="/dev/sda1")


def merged(**values: Any) -> Change:
    return lambda request: request.update(values)


def without_subnet(**values: Any) -> Change:
    """Interfaces instead of subnet and groups, as several nodes have them."""

    def change(request: dict[str, Any]) -> None:
        del request["SubnetId"], request["SecurityGroupIds"]
        request.update(values)

    return change


def spot_options(**values: Any) -> Change:
    return lambda request: request["InstanceMarketOptions"]["SpotOptions"].update(values)


def root(**values: Any) -> Change:
    return lambda request: request["BlockDeviceMappings"][0]["Ebs"].update(values)


def tags(*pairs: tuple[str, str]) -> Change:
    return lambda request: request["TagSpecifications"][0].update(
        Tags=[{"Key": key, "Value": value} for key, value in pairs]
    )


PRIMARY = {"DeviceIndex": 0, "NetworkCardIndex": 0, "SubnetId": "subnet-0a", "Groups": ["sg-0"]}
SECOND = {"DeviceIndex": 1, "NetworkCardIndex": 1, "InterfaceType": "efa-only", "SubnetId": "subnet-0a"}
RESERVATION = {"CapacityReservationTarget": {"CapacityReservationId": "cr-0123"}}
GPU_HIBERNATES = "p5.48xlarge cannot hibernate: no accelerated instance type can"


@pytest.mark.parametrize("base", [ON_DEMAND, SPOT])
def test_plans_as_they_are_break_nothing(base: Plan) -> None:
    assert broken_rules(base, root_device="/dev/sda1") == []


@pytest.mark.parametrize(
    ("base", "change", "told"),
    [
        (ON_DEMAND, merged(MinCount=2), ["MinCount 2 and MaxCount 1"]),
        (ON_DEMAND, merged(MinCount=0), ["MinCount 0 and MaxCount 1"]),
        (ON_DEMAND, merged(ClientToken="x" * 65), ["is not up to 64 ASCII"]),
        (ON_DEMAND, merged(ClientToken="é"), ["is not up to 64 ASCII"]),
        (ON_DEMAND, merged(UserData="x" * 16_385), ["UserData has 16,385 bytes"]),
        (ON_DEMAND, merged(UserData="é" * 8_193), ["UserData has 16,386 bytes"]),
        (ON_DEMAND, merged(IamInstanceProfile={"Arn": "arn:x", "Name": "x"}), ["both Arn and Name"]),
        (
            ON_DEMAND,
            merged(NetworkInterfaces=[PRIMARY]),
            ["SubnetId stands beside", "SecurityGroupIds stands beside"],
        ),
        (ON_DEMAND, merged(SecurityGroups=["default"]), ["SecurityGroups are names"]),
        (
            ON_DEMAND,
            without_subnet(NetworkInterfaces=[{**PRIMARY, "AssociatePublicIpAddress": True}, SECOND]),
            ["AssociatePublicIpAddress is for a single"],
        ),
        (
            ON_DEMAND,
            without_subnet(NetworkInterfaces=[{**PRIMARY, "InterfaceType": "efa-only"}]),
            ["primary network interface is efa-only"],
        ),
        (
            ON_DEMAND,
            without_subnet(NetworkInterfaces=[PRIMARY, {**SECOND, "PrivateIpAddress": "10.0.0.9"}]),
            ["takes no IP address"],
        ),
        (ON_DEMAND, without_subnet(NetworkInterfaces=[PRIMARY, PRIMARY]), ["2 network interfaces are dev"]),
        (ON_DEMAND, without_subnet(NetworkInterfaces=[SECOND]), ["no network interface is the primary"]),
        (SPOT, lambda request: request["InstanceMarketOptions"].pop("MarketType"), ["with MarketType on-d"]),
        (SPOT, spot_options(InstanceInterruptionBehavior="stop"), ["one-time spot request cannot stop"]),
        (SPOT, spot_options(ValidUntil="2026-12-01T00:00:00Z"), ["ValidUntil is for persistent"]),
        (SPOT, spot_options(BlockDurationMinutes=60), ["no longer sells spot blocks"]),
        (SPOT, spot_options(MaxPrice="25,5"), ["MaxPrice '25,5' is not a decimal"]),
        (SPOT, spot_options(MaxPrice="1e3"), ["MaxPrice '1e3' is not a decimal"]),
        (SPOT, spot_options(MaxPrice="0.0009"), ["MaxPrice '0.0009' is not a decimal"]),
        (SPOT, merged(InstanceInitiatedShutdownBehavior="stop"), ["cannot stop when it shuts down"]),
        (
            SPOT,
            lambda request: [
                spot_options(InstanceInterruptionBehavior="stop", SpotInstanceType="persistent")(request),
                merged(Placement={"GroupName": "cluster"})(request),
            ],
            ["may not be in a placement group"],
        ),
        (SPOT, merged(Placement={"Tenancy": "host"}), ["dedicated hosts"]),
        (SPOT, merged(CapacityReservationSpecification=RESERVATION), ["out of a reservation"]),
        (
            SPOT,
            merged(
                CapacityReservationSpecification={
                    "CapacityReservationPreference": "capacity-reservations-only"
                }
            ),
            ["out of a reservation"],
        ),
        (
            ON_DEMAND,
            merged(InstanceMarketOptions={"MarketType": "capacity-block"}),
            ["needs its CapacityReservationId"],
        ),
        (
            ON_DEMAND,
            merged(
                CapacityReservationSpecification={
                    "CapacityReservationTarget": {
                        "CapacityReservationId": "cr-0123",
                        "CapacityReservationResourceGroupArn": "arn:aws:resource-groups:x",
                    }
                }
            ),
            ["not both"],
        ),
        (
            ON_DEMAND,
            merged(CapacityReservationSpecification={**RESERVATION, "CapacityReservationPreference": "open"}),
            ["CapacityReservationPreference open with a target"],
        ),
        (
            ON_DEMAND,
            merged(HibernationOptions={"Configured": True}),
            [GPU_HIBERNATES, "with InstanceInitiatedShutdownBehavior terminate"],
        ),
        (ON_DEMAND, merged(Placement={"GroupName": "a", "GroupId": "pg-0"}), ["both GroupName and GroupId"]),
        (
            ON_DEMAND,
            lambda request: request["BlockDeviceMappings"][0].update(DeviceName="/dev/xvda"),
            ["/dev/xvda is not the AMI's root device /dev/sda1"],
        ),
        (
            ON_DEMAND,
            lambda request: request["BlockDeviceMappings"].append({"DeviceName": "/dev/sda1"}),
            ["/dev/sda1 is mapped 2 times"],
        ),
        (ON_DEMAND, root(VolumeSize=70_000), ["70,000 GiB"]),
        (ON_DEMAND, root(Throughput=751), ["751 MiB/s need 3,004 IOPS, not 3,000"]),
        (ON_DEMAND, root(Throughput=100), ["100 MiB/s: it takes 125 to 2,000"]),
        (ON_DEMAND, root(VolumeType="gp2"), ["Throughput is for gp3"]),
        (ON_DEMAND, root(Encrypted=False, KmsKeyId="alias/x"), ["not encrypted"]),
        (ON_DEMAND, merged(MetadataOptions={"HttpPutResponseHopLimit": 65}), ["HttpPutResponseHopLimit 65"]),
        (
            ON_DEMAND,
            lambda request: [
                merged(MetadataOptions={"InstanceMetadataTags": "enabled"})(request),
                tags(("a/b", "1"))(request),
                request["TagSpecifications"].pop(),
            ],
            ["tag 'a/b' cannot be shown"],
        ),
        (ON_DEMAND, tags(*((f"t{number}", "") for number in range(51))), ["51 tags on instance"]),
        (ON_DEMAND, tags(("k" * 129, "")), ["is not of 1 to 128"]),
        (ON_DEMAND, tags(("AWS:x", "")), ["begins with aws:"]),
        (ON_DEMAND, tags(("k", "v" * 257)), ["has 257 characters"]),
        (ON_DEMAND, tags(("k", "1"), ("k", "2")), ["a tag of instance is given twice"]),
        (
            ON_DEMAND,
            lambda request: request["TagSpecifications"][1].update(ResourceType="instance"),
            ["instance has 2 TagSpecifications"],
        ),
        (
            ON_DEMAND,
            lambda request: request["TagSpecifications"][1].update(ResourceType="subnet"),
            ["does not tag a subnet"],
        ),
        (
            ON_DEMAND,
            lambda request: request["TagSpecifications"][1].update(ResourceType="spot-instances-request"),
            ["tags for a spot request"],
        ),
    ],
)
def test_a_broken_rule_is_told_and_no_other(base: Plan, change: Change, told: list[str]) -> None:
    found = changed(base, change)
    assert len(found) == len(told), found
    for problem, words in zip(found, told, strict=True):
        assert words in problem


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (ON_DEMAND, without_subnet(NetworkInterfaces=[PRIMARY, SECOND])),
        (ON_DEMAND, without_subnet(NetworkInterfaces=[{**PRIMARY, "AssociatePublicIpAddress": True}])),
        (ON_DEMAND, merged(MinCount=4, MaxCount=4)),
        (ON_DEMAND, merged(UserData="x" * 16_384)),
        (ON_DEMAND, root(Throughput=1000, Iops=4000)),
        (ON_DEMAND, merged(Placement={"GroupName": "cluster"})),
        (
            ON_DEMAND,
            merged(
                InstanceMarketOptions={"MarketType": "capacity-block"},
                CapacityReservationSpecification=RESERVATION,
            ),
        ),
        (SPOT, lambda request: request["InstanceMarketOptions"].pop("SpotOptions")),
        (SPOT, merged(Placement={"GroupName": "cluster"})),
        (SPOT, spot_options(MaxPrice="0.001")),
        (
            ON_DEMAND,
            lambda request: request["BlockDeviceMappings"][0].update(DeviceName="<root-device>"),
        ),
    ],
)
def test_what_ec2_takes_breaks_nothing(base: Plan, change: Change) -> None:
    assert changed(base, change) == []


def test_every_rule_is_in_the_table() -> None:
    from fastlaunch.backends import ec2_rules

    rules = {name for name, value in vars(ec2_rules).items() if getattr(value, "__annotations__", {})}
    takes_a_request = {
        name
        for name in rules
        if list(getattr(ec2_rules, name).__annotations__) == ["request", "return"]
        and "Iterator" in str(getattr(ec2_rules, name).__annotations__["return"])
    }
    assert takes_a_request == {rule.__name__ for rule in RULES}

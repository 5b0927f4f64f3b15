"""The rules of EC2 that botocore's model does not know: each breaks on one change to a plan that holds."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from ec2_builders import block_site, catalogue, job, plan, site

from fastlaunch.backends import Plan
from fastlaunch.backends.ec2_network_rules import NETWORK_RULES
from fastlaunch.backends.ec2_rules import RULES, broken_rules

ON_DEMAND = plan()
SPOT = plan(job(purchase="spot", checkpoint_every=50), at=site(max_price_usd=25.5))
IN_BLOCK = plan(job(purchase="capacity-block", reservation="cr-0"), at=block_site())
TWO_NODES = plan(job(num_nodes=2, num_gpus=16), at=site(placement_group="cluster"))
B300 = plan(job(instance="p6-b300.48xlarge", num_nodes=2, num_gpus=16), at=site("p6-b300.48xlarge"))
PLAIN = plan(job(instance="g5.xlarge", num_nodes=2, num_gpus=2, allow_tcp=True), at=site("g5.xlarge"))

Change = Callable[[dict[str, Any]], object]


def changed(base: Plan, change: Change) -> list[str]:
    """What is wrong with `base` after a change to its request."""
    request = deepcopy(dict(base.request))
    change(request)
    instance = catalogue().instance(request["InstanceType"])
    return broken_rules(replace(base, request=request), root_device="/dev/sda1", instance=instance)


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


def interface(at: int, **values: Any) -> Change:
    return lambda request: request["NetworkInterfaces"][at].update(values)


def another(**values: Any) -> Change:
    """One more interface, like the first one but for these."""
    return lambda request: request["NetworkInterfaces"].append({**request["NetworkInterfaces"][0], **values})


def tags(*pairs: tuple[str, str]) -> Change:
    return lambda request: request["TagSpecifications"][0].update(
        Tags=[{"Key": key, "Value": value} for key, value in pairs]
    )


PRIMARY = {"DeviceIndex": 0, "NetworkCardIndex": 0, "SubnetId": "subnet-0a", "Groups": ["sg-0"]}
SECOND = {"DeviceIndex": 1, "NetworkCardIndex": 1, "InterfaceType": "efa-only", "SubnetId": "subnet-0a"}
RESERVATION = {"CapacityReservationTarget": {"CapacityReservationId": "cr-0123"}}
GPU_HIBERNATES = "p5.48xlarge cannot hibernate: no accelerated instance type can"


@pytest.mark.parametrize("base", [ON_DEMAND, SPOT, IN_BLOCK, TWO_NODES, B300, PLAIN])
def test_plans_as_they_are_break_nothing(base: Plan) -> None:
    assert changed(base, lambda request: None) == []


@pytest.mark.parametrize(
    ("base", "change", "told"),
    [
        (ON_DEMAND, merged(MinCount=2), ["MinCount 2 and MaxCount 1"]),
        (ON_DEMAND, merged(MinCount=0), ["MinCount 0 and MaxCount 1"]),
        (ON_DEMAND, merged(MaxCount=2), ["MinCount 1 and MaxCount 2: fewer machines may come"]),
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
        (TWO_NODES, merged(SubnetId="subnet-0a"), ["SubnetId stands beside"]),
        (TWO_NODES, merged(SecurityGroupIds=["sg-0"]), ["SecurityGroupIds stands beside"]),
        (
            TWO_NODES,
            interface(0, AssociatePublicIpAddress=True),
            ["AssociatePublicIpAddress is for a single"],
        ),
        (
            TWO_NODES,
            interface(0, InterfaceType="efa-only"),
            [
                "primary network interface is efa-only",
                "2 EFA interfaces on network card 0",
                "33 EFA interfaces: p5.48xlarge has 32",
            ],
        ),
        (
            TWO_NODES,
            interface(5, NetworkCardIndex=32),
            ["network card 32: p5.48xlarge has 32, counted from 0"],
        ),
        (
            TWO_NODES,
            interface(5, NetworkCardIndex=6),
            ["2 network interfaces are device 0 of network card 6", "2 EFA interfaces on network card 6"],
        ),
        (TWO_NODES, interface(5, NetworkCardIndex=6, DeviceIndex=1), ["2 EFA interfaces on network card 6"]),
        (TWO_NODES, interface(0, PrivateIpAddress="10.0.0.5"), ["2 instances cannot share one address"]),
        (
            PLAIN,
            another(NetworkCardIndex=0, DeviceIndex=1, InterfaceType="efa-only"),
            ["1 EFA interfaces: g5.xlarge has 0"],
        ),
        (
            B300,
            interface(1, NetworkCardIndex=0, DeviceIndex=1),
            ["EFA on network card 0, which p6-b300.48xlarge has not"],
        ),
        (
            IN_BLOCK,
            merged(Placement={"GroupName": "cluster"}),
            ["a capacity block places its instances itself"],
        ),
        (IN_BLOCK, lambda request: request.pop("SubnetId"), ["a capacity block lies in one zone"]),
        (
            IN_BLOCK,
            lambda request: request.pop("CapacityReservationSpecification"),
            ["needs its CapacityReservationId"],
        ),
        (
            IN_BLOCK,
            lambda request: request["InstanceMarketOptions"].update(SpotOptions={"MaxPrice": "1"}),
            ["SpotOptions with MarketType capacity-block"],
        ),
        (
            IN_BLOCK,
            lambda request: request["InstanceMarketOptions"].update(MarketType="spot"),
            ["spot does not take capacity out of a reservation"],
        ),
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
        (IN_BLOCK, without_subnet(NetworkInterfaces=[PRIMARY])),
        (TWO_NODES, interface(0, InterfaceType="interface")),
        (PLAIN, interface(0, AssociatePublicIpAddress=True)),
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
    from fastlaunch.backends import ec2_network_rules, ec2_rules

    def rules_in(module: Any) -> set[str]:
        """Names of its functions from a request to what is wrong with it."""
        annotated = {
            name: value.__annotations__
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__ and getattr(value, "__annotations__", {})
        }
        return {
            name
            for name, types in annotated.items()
            if list(types) == ["request", "return"] and "Iterator" in str(types["return"])
        }

    assert rules_in(ec2_network_rules) == {rule.__name__ for rule in NETWORK_RULES}
    assert rules_in(ec2_rules) | rules_in(ec2_network_rules) == {rule.__name__ for rule in RULES}

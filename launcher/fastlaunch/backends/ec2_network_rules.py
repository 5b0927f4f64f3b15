"""What EC2 refuses of a request's network: interfaces, cards, addresses, placement. See `ec2_rules`.

Sources: the EC2 user guide, "Maximize network bandwidth on instances with multiple network cards", and the
API reference of RunInstances, read 2026-11.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastlaunch.backends.ec2_interfaces import first_efa_card
from fastlaunch.catalog.hardware import InstanceType

Request = Mapping[str, Any]

_WITH_EFA = ("efa", "efa-only")
_ADDRESSES = ("AssociatePublicIpAddress", "PrivateIpAddress", "PrivateIpAddresses", "Ipv6Addresses")


def network_level(request: Request) -> Iterator[str]:
    """What stands at the top though it belongs into interfaces, and names that a subnet does not take."""
    interface_level = ("SubnetId", "SecurityGroupIds", "SecurityGroups", "PrivateIpAddress")
    for name in interface_level if request.get("NetworkInterfaces") else ():
        if name in request:
            yield f"{name} stands beside NetworkInterfaces, where it belongs inside"
    if "SubnetId" in request and "SecurityGroups" in request:
        yield "SecurityGroups are names, which a subnet does not take: SecurityGroupIds"


def interfaces(request: Request) -> Iterator[str]:
    """What holds of several interfaces whatever the instance type."""
    given = _interfaces(request)
    places = Counter(_place(interface) for interface in given)
    for (card, device), number in places.items():
        if number > 1:
            yield f"{number} network interfaces are device {device} of network card {card}"
    if given and (0, 0) not in places:
        yield "no network interface is the primary one: device 0 of network card 0"
    for interface in given:
        kind = interface.get("InterfaceType", "interface")
        if kind == "efa-only" and _place(interface) == (0, 0):
            yield "the primary network interface is efa-only, which has no IP address"
        if kind == "efa-only" and {*_ADDRESSES} & interface.keys():
            yield "an efa-only network interface takes no IP address"
        if len(given) > 1 and "AssociatePublicIpAddress" in interface:
            yield "AssociatePublicIpAddress is for a single network interface"
    for interface in given if request["MaxCount"] > 1 else ():
        if {"PrivateIpAddress", "NetworkInterfaceId"} & interface.keys():
            yield f"{request['MaxCount']} instances cannot share one address or interface"


def efa_cards(request: Request) -> Iterator[str]:
    """A network card carries one EFA."""
    cards = Counter(_place(interface)[0] for interface in _interfaces(request) if _is_efa(interface))
    for card, number in cards.items():
        if number > 1:
            yield f"{number} EFA interfaces on network card {card}: a card has one"


def hardware(request: Request, instance: InstanceType) -> Iterator[str]:
    """Cards and EFA interfaces that the instance type does not have."""
    given = _interfaces(request)
    for card in sorted({_place(interface)[0] for interface in given}):
        if card >= instance.num_network_cards:
            yield (f"network card {card}: {instance.name} has {instance.num_network_cards}, counted from 0")
    efa = [interface for interface in given if _is_efa(interface)]
    if len(efa) > instance.num_efa_interfaces:
        yield f"{len(efa)} EFA interfaces: {instance.name} has {instance.num_efa_interfaces}"
    elif any(_place(interface)[0] < first_efa_card(instance) for interface in efa):
        yield f"EFA on network card 0, which {instance.name} has not"


def placement_group(request: Request) -> Iterator[str]:
    """A group by name or by id, and none where a capacity block places the instances."""
    placement: Request = request.get("Placement", {})
    named = {"GroupName", "GroupId"} & placement.keys()
    if len(named) == 2:
        yield "Placement has both GroupName and GroupId"
    market: Request = request.get("InstanceMarketOptions", {})
    if named and market.get("MarketType") == "capacity-block":
        yield "a capacity block places its instances itself: no placement group"


def block_zone(request: Request) -> Iterator[str]:
    """A capacity block lies in one zone, which subnet or placement have to name."""
    market: Request = request.get("InstanceMarketOptions", {})
    if market.get("MarketType") != "capacity-block":
        return
    subnets = ["SubnetId" in request, *("SubnetId" in interface for interface in _interfaces(request))]
    if not any(subnets) and "AvailabilityZone" not in request.get("Placement", {}):
        yield "a capacity block lies in one zone: name its subnet or its zone"


def _interfaces(request: Request) -> Sequence[Request]:
    given: Sequence[Request] = request.get("NetworkInterfaces", ())
    return given


def _is_efa(interface: Request) -> bool:
    return interface.get("InterfaceType") in _WITH_EFA


def _place(interface: Request) -> tuple[int, int]:
    return interface.get("NetworkCardIndex", 0), interface.get("DeviceIndex", 0)


NETWORK_RULES = (network_level, interfaces, efa_cards, placement_group, block_zone)

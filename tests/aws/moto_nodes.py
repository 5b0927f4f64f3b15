"""What EC2 does for several nodes and moto does not: it refuses requests that name no such placement group or
capacity block, or that do not fit theirs.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sent_request import SentRequest

if TYPE_CHECKING:
    from moto_server import Answer, MotoServer


@dataclass(frozen=True, kw_only=True)
class Block:
    """A capacity block, or with kind `default` a reservation by the hour. Times have zones."""

    id: str
    region: str
    zone: str
    instance_type: str
    num_instances: int
    starts_at: datetime
    ends_at: datetime
    state: str = "active"
    kind: str = "capacity-block"


def free(server: "MotoServer", block: Block) -> int:
    """How many instances of a block nobody uses now."""
    live = {instance.id for instance in server.instances("pending", "running")}
    used = [id for id, reservation in server.in_blocks.items() if reservation == block.id and id in live]
    return block.num_instances - len(used)


def refusal(server: "MotoServer", request: SentRequest) -> tuple[str, str] | None:
    """Code and message with which EC2 refuses a RunInstances request, None if it does not."""
    given = request.parameters
    interfaces = interfaces_of(given)
    if len(interfaces) > 1 and any("AssociatePublicIpAddress" in one for one in interfaces):
        message = (
            "The associatePublicIPAddress parameter cannot be specified with multiple network interfaces."
        )
        return "InvalidParameterCombination", message
    group = given.get("Placement.GroupName")
    if group and (request.region, group) not in server.placement_groups:
        return "InvalidPlacementGroup.Unknown", f"The Placement Group '{group}' is unknown."
    target = given.get(_TARGET)
    in_block = given.get("InstanceMarketOptions.MarketType") == "capacity-block"
    if target is None:
        if in_block:
            return "InvalidParameterCombination", "MarketType capacity-block needs a CapacityReservationId."
        return None
    block = server.blocks.get(target)
    if block is None or block.region != request.region:
        message = f"The Capacity Reservation '{target}' does not exist"
        return "InvalidCapacityReservationId.NotFound", message
    if in_block != (block.kind == "capacity-block"):
        return "InvalidParameterCombination", f"MarketType does not fit the reservation '{target}'."
    if block.instance_type != given["InstanceType"] or _zone(server, request) != block.zone:
        message = f"The attributes of the launch do not match those of the Capacity Reservation '{target}'."
        return "InvalidParameterCombination", message
    if block.state != "active" or free(server, block) < int(given["MinCount"]):
        message = f"The requested reservation '{target}' does not have sufficient compatible capacity."
        return "ReservationCapacityExceeded", message
    return None


def note(server: "MotoServer", request: SentRequest, ids: list[str]) -> None:
    """Remember in which block the instances were launched."""
    if block := request.parameters.get(_TARGET):
        server.in_blocks |= dict.fromkeys(ids, block)


def interfaces_of(parameters: Mapping[str, Any]) -> tuple[Mapping[str, str], ...]:
    """The network interfaces of a RunInstances request, in order, each with its members as sent."""
    found: dict[int, dict[str, str]] = {}
    for name, value in parameters.items():
        if match := re.fullmatch(r"NetworkInterface\.(\d+)\.(.+)", name):
            found.setdefault(int(match[1]), {})[match[2]] = value
    return tuple(found[number] for number in sorted(found))


def describe_reservations(server: "MotoServer", request: SentRequest) -> "Answer":
    """The blocks and reservations of the request's region."""
    from moto_gaps import error, xml

    given = request.parameters
    asked = [value for key, value in given.items() if key.startswith("CapacityReservationId.")]
    here = {id: block for id, block in server.blocks.items() if block.region == request.region}
    for id in asked:
        if id not in here:
            message = f"The Capacity Reservation '{id}' does not exist"
            return error(request, "InvalidCapacityReservationId.NotFound", message, 400)
    items = [
        f"<item><capacityReservationId>{block.id}</capacityReservationId>"
        f"<instanceType>{block.instance_type}</instanceType><availabilityZone>{block.zone}</availabilityZone>"
        f"<totalInstanceCount>{block.num_instances}</totalInstanceCount>"
        f"<availableInstanceCount>{free(server, block)}</availableInstanceCount><state>{block.state}</state>"
        f"<startDate>{_iso(block.starts_at)}</startDate><endDate>{_iso(block.ends_at)}</endDate>"
        f"<endDateType>limited</endDateType><reservationType>{block.kind}</reservationType></item>"
        for id, block in here.items()
        if not asked or id in asked
    ]
    body = f"<capacityReservationSet>{''.join(items)}</capacityReservationSet>"
    return xml("DescribeCapacityReservations", body)


_TARGET = "CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId"


def _zone(server: "MotoServer", request: SentRequest) -> str | None:
    """The zone that a launch names, by itself or by its subnet."""
    given = request.parameters
    interfaces = interfaces_of(given)
    subnet = given.get("SubnetId") or (interfaces[0].get("SubnetId") if interfaces else None)
    if subnet is None:
        zone: str | None = given.get("Placement.AvailabilityZone")
        return zone
    return server.zone_of(request.region, subnet)


def _iso(when: datetime) -> str:
    return when.strftime("%Y-%m-%dT%H:%M:%S.000Z")

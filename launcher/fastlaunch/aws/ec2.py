"""EC2: instances, what is offered and where, networks and reservations; and AMIs by SSM parameter."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from typing import Any

from fastlaunch.aws.errors import ApiCall
from fastlaunch.aws.pricing import usd_of
from fastlaunch.aws.session import AwsSession
from fastlaunch.aws.types import BlockOffering, Instance, MachineImage, RouteTable, Subnet, Vpc
from fastlaunch.core.errors import BadConfiguration
from fastlaunch.core.terminal import printable, printable_data

#: Values that one filter takes. docs.aws.amazon.com/AWSEC2/latest/APIReference/API_Filter.html
MAX_FILTER_VALUES = 200
#: Types that DescribeInstanceTypes takes by name.
MAX_TYPES = 100
_ROUTE_TARGETS = (
    *("GatewayId", "NatGatewayId", "TransitGatewayId", "NetworkInterfaceId", "InstanceId"),
    *("VpcPeeringConnectionId", "CarrierGatewayId", "LocalGatewayId", "CoreNetworkArn"),
)
_NO_INSTANCE = "InvalidInstanceID.NotFound"
#: IpProtocol of a rule for all protocols.
_ALL = "-1"


@dataclass(frozen=True, kw_only=True)
class GroupRules:
    """A security group: the groups from which, and to which, it lets all traffic through."""

    id: str
    lets_in: frozenset[str]
    lets_out: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class PlacementGroup:
    name: str
    # cluster, spread, partition, ...
    strategy: str
    # available, or on its way there.
    state: str


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """A capacity reservation."""

    id: str
    # `capacity-block`, or `default` for a reservation paid by the hour.
    kind: str
    instance_type: str
    zone: str
    # active, scheduled, payment-pending, expired, ...
    state: str
    num_instances: int
    num_free: int
    # Both with their time zone.
    starts_at: datetime | None
    ends_at: datetime | None


class Ec2Calls(AwsSession):
    # Instances

    def run_instances(self, region: str, request: Mapping[str, Any]) -> list[Instance]:
        """Start instances: send `request` as it is, and again with the same token if no answer came.

        Raises QuotaExceeded, NoCapacity, ... if nothing was started; Unreachable if that is unknown.
        """
        assert request.get("ClientToken"), "without a token, asking again could start a second instance"
        api_call = ApiCall(
            service="ec2",
            action="RunInstances",
            region=region,
            subject=request.get("InstanceType", ""),
            instance_type=request.get("InstanceType"),
            purchase=request.get("InstanceMarketOptions", {}).get("MarketType", "on-demand"),
        )
        answer = self._send(api_call, request)
        return [_instance(region, instance) for instance in answer["Instances"]]

    def describe_instances(
        self,
        region: str,
        *,
        ids: Sequence[str] = (),
        tokens: Sequence[str] = (),
        tags: Mapping[str, Sequence[str]] | None = None,
    ) -> list[Instance]:
        """Return the instances with these ids, client tokens or tags; all pages, in few requests.

        With several arguments, an instance fits all of them; with none, the result is empty. Skips ids that
        EC2 does not know (yet, or any more): they go out as a filter, so an unknown id does not fail the
        others. tags: the values that a tag may have; an empty list for any value.
        """
        filters = [
            _filters(name, values)
            for name, values in {"instance-id": ids, "client-token": tokens}.items()
            if values
        ]
        for key, values in (tags or {}).items():
            filters.append(_filters(f"tag:{key}", values) if values else _filters("tag-key", [key]))
        if not filters:
            return []
        instances = {
            machine["InstanceId"]: _instance(region, machine)
            for chosen in product(*filters)
            for machine in self._describe_instances(region, chosen)
        }
        return list(instances.values())

    def _describe_instances(self, region: str, filters: Sequence[Mapping[str, Any]]) -> list[Any]:
        reservations = self.items(
            "ec2", region, "DescribeInstances", "Reservations", Filters=list(filters), MaxResults=1000
        )
        return [machine for reservation in reservations for machine in reservation["Instances"]]

    def terminate(self, region: str, ids: Sequence[str]) -> None:
        """Terminate instances. An id that EC2 does not know any more, or yet, is no error.

        Look again at an instance that was started a moment ago.
        """
        if not ids:
            return
        try:
            self.call("ec2", region, "TerminateInstances", subject=", ".join(ids), InstanceIds=list(ids))
        except BadConfiguration as error:
            if error.code != _NO_INSTANCE:
                raise
            # EC2 terminates all or none, so the known ones are terminated one by one.
            for id in ids if len(ids) > 1 else ():
                self.terminate(region, [id])

    def console_output(self, region: str, instance_id: str) -> str:
        """Return the newest console output of the instance; empty if there is none (yet)."""
        answer = self.call_or_none(
            "ec2", region, "GetConsoleOutput", absent=[_NO_INSTANCE], InstanceId=instance_id, Latest=True
        )
        return str((answer or {}).get("Output", ""))

    def running_vcpus(self, region: str) -> dict[tuple[str, str], int]:
        """Return the running vCPUs by instance type and purchase option, as quotas count them.

        Purchase option: on-demand, spot or capacity-block.
        """
        states = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
        counts = Counter(
            (machine["InstanceType"], machine.get("InstanceLifecycle", "on-demand"))
            for machine in self._describe_instances(region, states)
        )
        types = sorted({name for name, _ in counts})
        vcpus = {
            entry["InstanceType"]: entry["VCpuInfo"]["DefaultVCpus"]
            for start in range(0, len(types), MAX_TYPES)
            for entry in self.items(
                *("ec2", region, "DescribeInstanceTypes", "InstanceTypes"),
                InstanceTypes=types[start : start + MAX_TYPES],
            )
        }
        return {(name, purchase): vcpus[name] * number for (name, purchase), number in counts.items()}

    # What is offered

    def regions(self) -> list[str]:
        """Return the regions that the account may use, sorted."""
        answer = self.call("ec2", self.home_region(), "DescribeRegions")
        return sorted(region["RegionName"] for region in answer["Regions"])

    def zones_offering(self, region: str, instance_type: str) -> list[str]:
        """Return the zones of the region that have the instance type, sorted."""
        offerings = self.items(
            *("ec2", region, "DescribeInstanceTypeOfferings", "InstanceTypeOfferings"),
            LocationType="availability-zone",
            Filters=_filters("instance-type", [instance_type]),
        )
        return sorted(offering["Location"] for offering in offerings)

    def spot_price_usd(self, region: str, instance_type: str, zone: str | None) -> tuple[float, str] | None:
        """Return the spot price per hour and its zone: the cheapest zone unless given. None if unknown."""
        # No price changes after now.
        changes = self.spot_changes(region, [instance_type], self._now(), zone)
        return min(((prices[-1][1], name) for (_, name), prices in changes.items()), default=None)

    def spot_changes(
        self, region: str, instance_types: Sequence[str], since: datetime, zone: str | None = None
    ) -> dict[tuple[str, str], list[tuple[datetime, float]]]:
        """Return (time, USD per hour) of each change of the spot price, by type and zone, the oldest first.

        The first entry is the price at `since`, if it is older.
        """
        history = self.items(
            *("ec2", region, "DescribeSpotPriceHistory", "SpotPriceHistory"),
            InstanceTypes=list(instance_types),
            ProductDescriptions=["Linux/UNIX"],
            # EC2 adds the last change before it, for each zone.
            StartTime=since,
            **({"AvailabilityZone": zone} if zone else {}),
        )
        changes: dict[tuple[str, str], list[tuple[datetime, float]]] = {}
        for change in history:
            offer, usd = (change["InstanceType"], change["AvailabilityZone"]), usd_of(change["SpotPrice"])
            if usd is not None:
                changes.setdefault(offer, []).append((change["Timestamp"], usd))
        return {offer: sorted(prices) for offer, prices in changes.items()}

    def block_offerings(
        self, region: str, instance_type: str, hours: int, num_instances: int = 1
    ) -> list[BlockOffering]:
        """Return the capacity blocks of so many instances that EC2 offers for so many hours."""
        blocks = self.items(
            *("ec2", region, "DescribeCapacityBlockOfferings", "CapacityBlockOfferings"),
            subject=instance_type,
            InstanceType=instance_type,
            InstanceCount=num_instances,
            CapacityDurationHours=hours,
        )
        return [
            BlockOffering(
                id=block["CapacityBlockOfferingId"],
                zone=block["AvailabilityZone"],
                starts_at=block["StartDate"],
                hours=block["CapacityBlockDurationHours"],
                fee_usd=fee_usd,
                num_instances=block["InstanceCount"],
            )
            for block in blocks
            if block.get("CurrencyCode", "USD") == "USD" and (fee_usd := usd_of(block["UpfrontFee"]))
        ]

    def reservation(self, region: str, id: str) -> Reservation | None:
        """Return the capacity reservation of this id, None if there is none in the region."""
        answer = self.call_or_none(
            "ec2",
            region,
            "DescribeCapacityReservations",
            absent=("InvalidCapacityReservationId.NotFound", "InvalidCapacityReservationId.Malformed"),
            subject=id,
            CapacityReservationIds=[id],
        )
        for entry in answer["CapacityReservations"] if answer else ():
            return Reservation(
                id=entry["CapacityReservationId"],
                kind=entry.get("ReservationType", "default"),
                instance_type=entry["InstanceType"],
                zone=entry["AvailabilityZone"],
                state=entry["State"],
                num_instances=entry["TotalInstanceCount"],
                num_free=entry["AvailableInstanceCount"],
                starts_at=entry.get("StartDate"),
                ends_at=entry.get("EndDate"),
            )
        return None

    def parameter(self, region: str, name: str) -> str:
        """Return the value of an SSM parameter. Raises BadConfiguration if it does not exist."""
        return str(self.call("ssm", region, "GetParameter", subject=name, Name=name)["Parameter"]["Value"])

    def machine_image(self, region: str, ami: str) -> MachineImage:
        """Return the AMI. Raises BadConfiguration if it does not exist."""
        answer = self.call("ec2", region, "DescribeImages", subject=ami, ImageIds=[ami])
        image = _only(answer["Images"], f"machine image {ami}", region)
        root = image["RootDeviceName"]
        sizes = [
            device["Ebs"]["VolumeSize"]
            for device in image["BlockDeviceMappings"]
            if device.get("DeviceName") == root and "VolumeSize" in device.get("Ebs", {})
        ]
        return MachineImage(id=ami, root_device=root, root_gib=_only(sizes, f"root volume of {ami}", region))

    # Networks

    def subnets(self, region: str, ids: Sequence[str]) -> list[Subnet]:
        """Return the subnets with these ids. Raises BadConfiguration if one does not exist."""
        if not ids:
            return []
        answer = self.call("ec2", region, "DescribeSubnets", subject=", ".join(ids), SubnetIds=list(ids))
        return [_subnet(subnet) for subnet in answer["Subnets"]]

    def subnets_of(self, region: str, vpc: str) -> list[Subnet]:
        """Return the subnets of a VPC, sorted by zone and id; all pages."""
        filters = _filters("vpc-id", [vpc])
        subnets = map(_subnet, self.items("ec2", region, "DescribeSubnets", "Subnets", Filters=filters))
        return sorted(subnets, key=lambda subnet: (subnet.zone, subnet.id))

    def vpcs(self, region: str) -> list[Vpc]:
        """Return the region's VPCs, the default one first; all pages."""
        vpcs = [
            Vpc(
                id=vpc["VpcId"],
                name=printable(
                    next((tag["Value"] for tag in vpc.get("Tags", ()) if tag["Key"] == "Name"), "")
                ),
                cidr=vpc["CidrBlock"],
                is_default=vpc["IsDefault"],
            )
            for vpc in self.items("ec2", region, "DescribeVpcs", "Vpcs")
        ]
        return sorted(vpcs, key=lambda vpc: (not vpc.is_default, vpc.name, vpc.id))

    def s3_gateway_tables(self, region: str, vpc: str) -> frozenset[str]:
        """Return the ids of the VPC's route tables that a gateway to S3 serves."""
        filters = [
            *_filters("vpc-id", [vpc]),
            *_filters("service-name", [f"com.amazonaws.{region}.s3"]),
            *_filters("vpc-endpoint-type", ["Gateway"]),
        ]
        return frozenset(
            table
            for endpoint in self.items("ec2", region, "DescribeVpcEndpoints", "VpcEndpoints", Filters=filters)
            for table in endpoint.get("RouteTableIds", ())
        )

    def security_group_vpcs(self, region: str, ids: Sequence[str]) -> dict[str, str]:
        """Return the VPC by security group id. Raises BadConfiguration if one does not exist."""
        return {group["GroupId"]: group["VpcId"] for group in self._security_groups(region, ids)}

    def group_rules(self, region: str, ids: Sequence[str]) -> dict[str, GroupRules]:
        """Return the rules by security group id. Raises BadConfiguration if one does not exist."""
        return {
            group["GroupId"]: GroupRules(
                id=group["GroupId"],
                lets_in=_all_traffic(group.get("IpPermissions", ())),
                lets_out=_all_traffic(group.get("IpPermissionsEgress", ())),
            )
            for group in self._security_groups(region, ids)
        }

    def _security_groups(self, region: str, ids: Sequence[str]) -> Sequence[Any]:
        if not ids:
            return ()
        answer = self.call(
            "ec2", region, "DescribeSecurityGroups", subject=", ".join(ids), GroupIds=list(ids)
        )
        groups: Sequence[Any] = answer["SecurityGroups"]
        return groups

    def default_vpc(self, region: str) -> str | None:
        """Return the id of the region's default VPC, which EC2 takes if no subnet is named; or None."""
        answer = self.call("ec2", region, "DescribeVpcs", Filters=_filters("is-default", ["true"]))
        return next((str(vpc["VpcId"]) for vpc in answer["Vpcs"]), None)

    def endpoints(self, region: str, vpc: str) -> frozenset[str]:
        """Return the services that the VPC has a working endpoint for: `s3`, `ecr.api`, `ecr.dkr`, ..."""
        filters = _filters("vpc-id", [vpc])
        return frozenset(
            endpoint["ServiceName"].partition(f".{region}.")[2]
            for endpoint in self.items("ec2", region, "DescribeVpcEndpoints", "VpcEndpoints", Filters=filters)
            if endpoint["State"].lower() == "available"
            # Without private DNS an interface endpoint has names of its own, which nobody uses.
            and (endpoint["VpcEndpointType"] == "Gateway" or endpoint.get("PrivateDnsEnabled"))
        )

    def default_routes(self, region: str, vpc: str) -> dict[str | None, str]:
        """Return the target of the route to 0.0.0.0/0, such as `igw-0a1b` or `nat-0a1b`, by subnet.

        None stands for the main route table, which serves the subnets without a table of their own. "" if a
        table has no such route.
        """
        routes: dict[str | None, str] = {}
        for table in self.route_tables(region, vpc):
            routes |= dict.fromkeys([*table.subnets, *([None] if table.is_main else [])], table.default_route)
        return routes

    def route_tables(self, region: str, vpc: str) -> list[RouteTable]:
        """Return the VPC's route tables; all pages."""
        filters = _filters("vpc-id", [vpc])
        return [
            RouteTable(
                id=table["RouteTableId"],
                is_main=any(link.get("Main") for link in table["Associations"]),
                subnets=frozenset(link["SubnetId"] for link in table["Associations"] if "SubnetId" in link),
                default_route=_default_route(table["Routes"]),
            )
            for table in self.items("ec2", region, "DescribeRouteTables", "RouteTables", Filters=filters)
        ]

    def placement_group(self, region: str, name: str) -> PlacementGroup | None:
        """Return the placement group of this name, None if there is none."""
        absent = ["InvalidPlacementGroup.Unknown"]
        answer = self.call_or_none(
            "ec2", region, "DescribePlacementGroups", absent=absent, subject=name, GroupNames=[name]
        )
        groups = (
            PlacementGroup(name=group["GroupName"], strategy=group["Strategy"], state=group["State"])
            for group in (answer or {}).get("PlacementGroups", ())
        )
        return next(groups, None)


def _filters(name: str, values: Sequence[str]) -> list[dict[str, Any]]:
    """Return the filters that together cover all `values`, one request each."""
    starts = range(0, len(values), MAX_FILTER_VALUES)
    return [{"Name": name, "Values": list(values[start : start + MAX_FILTER_VALUES])} for start in starts]


def _instance(region: str, answer: Mapping[str, Any]) -> Instance:
    reason = answer.get("StateReason", {})
    code, message = reason.get("Code", ""), reason.get("Message", "")
    state_reason = printable(message if message.startswith(code) else f"{code}: {message}")
    return Instance(
        id=answer["InstanceId"],
        region=region,
        zone=answer.get("Placement", {}).get("AvailabilityZone"),
        instance_type=answer["InstanceType"],
        state=answer["State"]["Name"],
        is_spot=answer.get("InstanceLifecycle") == "spot",
        launch_time=answer["LaunchTime"],
        token=answer.get("ClientToken") or None,
        state_reason=state_reason if code and code != "pending" else None,
        transition_reason=printable(answer.get("StateTransitionReason", "")) or None,
        launch_index=answer.get("AmiLaunchIndex", 0),
        tags=printable_data({tag["Key"]: tag["Value"] for tag in answer.get("Tags", ())}),
    )


def _subnet(answer: Mapping[str, Any]) -> Subnet:
    return Subnet(
        id=answer["SubnetId"],
        zone=answer["AvailabilityZone"],
        vpc=answer["VpcId"],
        maps_public_ip=answer["MapPublicIpOnLaunch"],
    )


def _all_traffic(rules: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    return frozenset(
        pair["GroupId"]
        for rule in rules
        if rule["IpProtocol"] == _ALL
        for pair in rule.get("UserIdGroupPairs", ())
    )


def _default_route(routes: Sequence[Mapping[str, Any]]) -> str:
    """Return the id of the gateway or NAT that takes traffic to the internet; empty if nothing does."""
    for route in routes:
        if route.get("DestinationCidrBlock") == "0.0.0.0/0" and route.get("State") != "blackhole":
            return next((str(route[name]) for name in _ROUTE_TARGETS if route.get(name)), "")
    return ""


def _only(items: Sequence[Any], what: str, region: str) -> Any:
    if len(items) != 1:
        raise BadConfiguration(
            f"{region} has no {what}", "correct the id, or `ami_parameter`, in the config file"
        )
    return items[0]

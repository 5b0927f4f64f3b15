"""What nodes need to reach each other: rules of security groups, and placement groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastlaunch.aws.ec2 import Aws
from fastlaunch.core.errors import BadConfiguration

#: IpProtocol for all of them.
_ALL = "-1"


@dataclass(frozen=True, kw_only=True)
class GroupRules:
    """A security group: the groups from which, and to which, it lets all traffic through."""

    id: str
    lets_in: frozenset[str]
    lets_out: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class PlacementGroup:
    """A placement group. strategy: cluster, spread, partition, ...; state: available, or on its way."""

    name: str
    strategy: str
    state: str


def group_rules(aws: Aws, region: str, ids: Sequence[str]) -> dict[str, GroupRules]:
    """Rules by security group (ec2:DescribeSecurityGroups). BadConfiguration if one does not exist."""
    told = aws.ask("ec2", region, "DescribeSecurityGroups", subject=", ".join(ids), GroupIds=list(ids))
    return {
        each["GroupId"]: GroupRules(
            id=each["GroupId"],
            lets_in=_all_traffic(each.get("IpPermissions", ())),
            lets_out=_all_traffic(each.get("IpPermissionsEgress", ())),
        )
        for each in told["SecurityGroups"]
    }


def placement_group(aws: Aws, region: str, name: str) -> PlacementGroup | None:
    """The placement group of this name, None if there is none (ec2:DescribePlacementGroups)."""
    try:
        told = aws.ask("ec2", region, "DescribePlacementGroups", subject=name, GroupNames=[name])
    except BadConfiguration as error:
        if error.code == "InvalidPlacementGroup.Unknown":
            return None
        raise
    found = (
        PlacementGroup(name=each["GroupName"], strategy=each["Strategy"], state=each["State"])
        for each in told["PlacementGroups"]
    )
    return next(found, None)


def _all_traffic(rules: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    return frozenset(
        pair["GroupId"]
        for rule in rules
        if rule["IpProtocol"] == _ALL
        for pair in rule.get("UserIdGroupPairs", ())
    )

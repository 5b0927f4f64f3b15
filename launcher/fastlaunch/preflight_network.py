"""Checks of the network in which machines on EC2 start, and in which several of them reach each other."""

from functools import partial

from fastlaunch.aws.network import group_rules
from fastlaunch.core.errors import BadConfiguration
from fastlaunch.network_exit import network_exit
from fastlaunch.placement.check import Result, Told
from fastlaunch.placement.network import (
    check_default_vpc,
    check_open_groups,
    check_placement_group,
    check_subnet,
    find_subnet,
    group_vpcs,
    placement_group_command,
)
from fastlaunch.preflight_wanted import Looking, ToMakeAll


def network_checks(look: Looking, region: str) -> ToMakeAll:
    """Those of a region's groups and subnets; for several nodes, what is between them."""
    here = look.here(region)
    yield {"name": "security group"}, partial(_groups, look, region)
    if not here.subnets:
        yield {"name": "subnet"}, partial(_no_subnet, look, region)
    for zone, subnet in here.subnets.items():
        yield {"name": "subnet", "zone": zone}, partial(_subnet, look, region, zone, subnet)
    if look.wanted.num_nodes == 1:
        return
    yield {"name": "between nodes"}, partial(_between_nodes, look, region)
    # A block's instances stand together by themselves.
    for zone in here.subnets if look.wanted.purchase != "capacity-block" else ():
        yield {"name": "placement group", "zone": zone}, partial(_placement_group, look, region, zone)


def _groups(look: Looking, region: str) -> str:
    groups = look.here(region).security_groups
    vpcs = group_vpcs(look.aws, look.ask, region, groups)
    if not groups:
        return "none is named: the VPC's default group, which lets everything out unless somebody changed it"
    return f"{', '.join(groups)} of {', '.join(sorted(set(vpcs.values())))}"


def _no_subnet(look: Looking, region: str) -> str | Told:
    write = f"write `subnets: {{{region}a: subnet-...}}` under `aws: {region}:` in the config file"
    if look.wanted.has_several_interfaces:
        raise BadConfiguration(
            "none is named, and machines with several network interfaces get no public address",
            f"{write}, of subnets with a NAT or endpoints for S3 and ECR",
        )
    groups = look.here(region).security_groups
    vpcs = group_vpcs(look.aws, look.ask, region, groups)
    default = check_default_vpc(look.aws, look.ask, region, vpcs)
    where = f"the default VPC, {default}," if default else "the default VPC, if there is one,"
    return Told(
        Result.WARNING,
        f"none is named: EC2 takes one of {where} in a zone of its choice",
        f"for the next zone to be tried, {write}",
    )


def _subnet(look: Looking, region: str, zone: str, subnet_id: str) -> str | Told:
    here = look.here(region)
    subnet = find_subnet(look.aws, look.ask, region, subnet_id, tuple(here.subnets.values()))
    vpcs = group_vpcs(look.aws, look.ask, region, here.security_groups)
    check_subnet(subnet, region=region, zone=zone, group_vpcs=vpcs)
    several = look.wanted.has_several_interfaces
    way = network_exit(region, subnet, look.aws, look.ask, several_interfaces=several)
    told = f"{subnet_id}: {way.told}"
    if way.is_shut and several:
        raise BadConfiguration(told, way.hint)
    return told if way.is_known else Told(Result.WARNING, told, way.hint)


def _between_nodes(look: Looking, region: str) -> str | Told:
    groups = look.here(region).security_groups
    if look.wanted.has_several_interfaces:
        check_open_groups(look.aws, look.ask, region, groups)
        return f"{', '.join(groups)} lets nodes reach each other by EFA"
    if not groups:
        return "none is named: the VPC's default group lets its own machines reach each other"
    rules = look.ask(group_rules, look.aws, region, groups)
    if any(rule.lets_in & rules.keys() for rule in rules.values()):
        return f"{', '.join(groups)} lets nodes reach each other"
    return Told(
        Result.WARNING,
        f"{', '.join(groups)} has no rule that lets in all traffic from itself: nodes may not reach each "
        "other",
        f"aws ec2 authorize-security-group-ingress --region {region} --group-id {groups[0]} --protocol -1 "
        f"--source-group {groups[0]}",
    )


def _placement_group(look: Looking, region: str, zone: str) -> str | Told:
    name = look.here(region).placement_groups.get(zone)
    if name is None:
        made = f"fastlaunch-{zone}"
        return Told(
            Result.WARNING,
            f"none is named for {zone}: the nodes may stand far apart, and all-reduce then takes longer",
            f"{placement_group_command(region, made)}, and write `placement_groups: {{{zone}: {made}}}` "
            f"under `aws: {region}:` in the config file",
        )
    check_placement_group(look.aws, look.ask, region, name)
    return f"{name} keeps nodes close together"

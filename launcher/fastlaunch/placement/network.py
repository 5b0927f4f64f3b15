"""Where a job's machines stand in the network: subnets, VPCs, security groups, placement groups."""

from collections.abc import Mapping, Sequence

from fastlaunch.aws.cache import AskOnce
from fastlaunch.aws.ec2 import Aws, Subnet
from fastlaunch.aws.network import GroupRules, group_rules, placement_group
from fastlaunch.core.errors import BadConfiguration, NotAuthorised
from fastlaunch.placement.config_checks import making


def group_vpcs(aws: Aws, ask: AskOnce, region: str, groups: tuple[str, ...]) -> dict[str, str]:
    """VPC by security group. Raises BadConfiguration if one does not exist, or they are of several VPCs."""
    vpcs = ask(aws.security_group_vpcs, region, groups) if groups else {}
    if len(set(vpcs.values())) > 1:
        told = ", ".join(f"{group} in {vpc}" for group, vpc in sorted(vpcs.items()))
        raise BadConfiguration(
            f"the security groups are of different VPCs: {told}",
            f"name groups of one: `aws.{region}.security_groups` in the config file",
        )
    return vpcs


def find_subnet(aws: Aws, ask: AskOnce, region: str, wanted: str, all_of_region: Sequence[str]) -> Subnet:
    """The subnet, asked for together with the region's others. Raises BadConfiguration without one."""
    together = tuple(sorted({*all_of_region, wanted}))
    try:
        found = ask(aws.subnets, region, together)
    except BadConfiguration:
        # One that does not exist fails the question for all of them.
        found = ask(aws.subnets, region, (wanted,))
    return next(subnet for subnet in found if subnet.id == wanted)


def check_subnet(subnet: Subnet, *, region: str, zone: str | None, group_vpcs: dict[str, str]) -> None:
    """Nothing, if the subnet is in the zone and in the groups' VPC; else BadConfiguration."""
    where = f"`aws.{region}.subnets` in the config file"
    if zone is not None and subnet.zone != zone:
        raise BadConfiguration(
            f"{subnet.id} is in {subnet.zone}, not in {zone}",
            f"write `{subnet.zone}: {subnet.id}`, or another subnet for {zone}: {where}",
        )
    for group, vpc in sorted(group_vpcs.items()):
        if vpc != subnet.vpc:
            raise BadConfiguration(
                f"security group {group} is of {vpc}, and {subnet.id} of {subnet.vpc}",
                f"name a group of {subnet.vpc}, or a subnet of {vpc}: {where}, and `security_groups` there",
            )


def check_default_vpc(aws: Aws, ask: AskOnce, region: str, group_vpcs: dict[str, str]) -> str | None:
    """The default VPC, where a machine without a subnet starts; None if it may not be looked at.

    Raises BadConfiguration if there is none, or a security group is of another.
    """
    give_subnets = (
        f"write `subnets: {{ZONE: ID}}` under `aws: {region}:` in the config file, or give --subnet"
    )
    try:
        default = ask(aws.default_vpc, region)
    except NotAuthorised:
        return None
    if default is None:
        raise BadConfiguration(f"{region} has no default VPC, and no subnet is named", give_subnets)
    for group, vpc in sorted(group_vpcs.items()):
        if vpc != default:
            raise BadConfiguration(
                f"security group {group} is of {vpc}, and without a subnet EC2 takes default {default}",
                f"{give_subnets}, of {vpc}",
            )
    return default


def check_open_groups(aws: Aws, ask: AskOnce, region: str, groups: tuple[str, ...]) -> None:
    """Nothing, if machines with these groups reach each other by EFA; else BadConfiguration.

    EFA goes by no address: a group has to name itself, or another that all machines have, for what comes in
    and for what goes out. 0.0.0.0/0 does not do.
    """
    if not groups:
        raise BadConfiguration(
            "no security group is named, and the VPC's default one lets nothing out by EFA",
            f"write one that names itself both ways into `aws.{region}.security_groups`; this makes one: "
            f"{making(region)}",
        )
    rules = ask(group_rules, aws, region, groups)
    lacking = [way for way in ("ingress", "egress") if not _is_open(rules, way)]
    if lacking:
        commands = " && ".join(_opening(region, groups[0], way) for way in lacking)
        raise BadConfiguration(
            f"{', '.join(groups)} has no {' and no '.join(lacking)} rule for all traffic to itself, which "
            "EFA needs",
            commands,
        )


def _is_open(rules: Mapping[str, GroupRules], way: str) -> bool:
    named = [rule.lets_in if way == "ingress" else rule.lets_out for rule in rules.values()]
    return any(own & rules.keys() for own in named)


def _opening(region: str, group: str, way: str) -> str:
    return (
        f"aws ec2 authorize-security-group-{way} --region {region} --group-id {group} "
        f"--ip-permissions 'IpProtocol=-1,UserIdGroupPairs=[{{GroupId={group}}}]'"
    )


def check_placement_group(aws: Aws, ask: AskOnce, region: str, name: str) -> None:
    """Nothing, if the placement group is there and keeps machines close; else BadConfiguration."""
    found = ask(placement_group, aws, region, name)
    if found is None or found.state in ("deleting", "deleted"):
        raise BadConfiguration(
            f"{region} has no placement group {name}", placement_group_command(region, name)
        )
    if found.strategy != "cluster":
        raise BadConfiguration(
            f"placement group {name} is of the strategy {found.strategy}, not cluster",
            placement_group_command(region, "OTHER_NAME"),
        )


def placement_group_command(region: str, name: str) -> str:
    """What to type for a placement group of this name."""
    return f"aws ec2 create-placement-group --region {region} --strategy cluster --group-name {name}"

"""Where a job's machines stand in the network: subnets, VPCs, security groups, placement groups."""

from collections.abc import Mapping, Sequence

from fastlaunch.aws.client import Aws
from fastlaunch.aws.ec2 import GroupRules
from fastlaunch.aws.types import Subnet
from fastlaunch.core.errors import BadConfiguration, CloudRefused, NotAuthorised
from fastlaunch.core.settings import RegionSettings
from fastlaunch.placement.check import Finding, Result
from fastlaunch.placement.config_checks import setup_command

#: What a machine talks to: the bucket and the layers of images, which lie in S3, and the registry.
_NEEDED = ("s3", "ecr.api", "ecr.dkr")
_HINT = (
    "let the subnet give public addresses (`aws ec2 modify-subnet-attribute --region {region} --subnet-id ID "
    "--map-public-ip-on-launch`), or route it through a NAT, or see that the VPC has endpoints for S3 and ECR"
)
_PRIVATE_HINT = (
    "route the subnet through a NAT (`aws ec2 create-nat-gateway --region {region} ...`), or make endpoints "
    "for S3 and ECR in its VPC: `fastlaunch iam print --cloudformation` has the one for S3"
)


def group_vpcs(aws: Aws, region: str, groups: tuple[str, ...]) -> dict[str, str]:
    """Return VPCs by group. Raises BadConfiguration if a group is missing or there are several VPCs."""
    vpcs = aws.security_group_vpcs(region, groups) if groups else {}
    if len(set(vpcs.values())) > 1:
        pairs = ", ".join(f"{group} in {vpc}" for group, vpc in sorted(vpcs.items()))
        raise BadConfiguration(
            f"the security groups are of different VPCs: {pairs}",
            f"name groups of one: `aws.{region}.security_groups` in the config file",
        )
    return vpcs


def find_subnet(aws: Aws, region: str, name: str, all_of_region: Sequence[str]) -> Subnet:
    """Return the subnet, asked for together with the region's others. Raises BadConfiguration without one."""
    together = tuple(sorted({*all_of_region, name}))
    try:
        subnets = aws.subnets(region, together)
    except BadConfiguration:
        # One that does not exist fails the question for all of them.
        subnets = aws.subnets(region, (name,))
    return next(subnet for subnet in subnets if subnet.id == name)


def check_subnet(subnet: Subnet, *, region: str, zone: str | None, group_vpcs: dict[str, str]) -> None:
    """Raise BadConfiguration if the subnet is not in the zone, or not in the groups' VPC."""
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


def check_default_vpc(aws: Aws, region: str, group_vpcs: dict[str, str]) -> str | None:
    """Return the default VPC, where a machine without a subnet starts; None if it may not be looked at.

    Raises BadConfiguration if there is none, or a security group is of another.
    """
    give_subnets = (
        f"write `subnets: {{ZONE: ID}}` under `aws: {region}:` in the config file, or give --subnet"
    )
    try:
        default = aws.default_vpc(region)
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


def check_open_groups(aws: Aws, region: str, groups: tuple[str, ...]) -> None:
    """Raise BadConfiguration if machines with these groups cannot reach each other by EFA.

    EFA goes by no address: a group has to name itself, or another that all machines have, for what comes in
    and for what goes out. 0.0.0.0/0 does not do.
    """
    if not groups:
        raise BadConfiguration(
            "no security group is named, and the VPC's default one lets nothing out by EFA",
            f"write one that names itself both ways into `aws.{region}.security_groups`; this makes one: "
            f"{setup_command(region)}",
        )
    rules = aws.group_rules(region, groups)
    lacking = [way for way in ("ingress", "egress") if not _is_open(rules, way)]
    if lacking:
        commands = " && ".join(_opening(region, groups[0], way) for way in lacking)
        raise BadConfiguration(
            f"{', '.join(groups)} has no {' and no '.join(lacking)} rule for all traffic to itself, which "
            "EFA needs",
            commands,
        )


def check_training_network(aws: Aws, region: str, here: RegionSettings, *, by_efa: bool) -> None:
    """Raise BadConfiguration if training jobs cannot stand where the config file says.

    by_efa: their nodes talk to each other so.
    """
    groups = here.sagemaker_security_groups
    if not groups:
        return
    subnet_vpcs = {subnet.vpc for subnet in aws.subnets(region, here.sagemaker_subnets)}
    vpcs = subnet_vpcs | set(aws.security_group_vpcs(region, groups).values())
    if len(vpcs) > 1:
        raise BadConfiguration(
            f"the subnets and security groups of training jobs are of {' and '.join(sorted(vpcs))}",
            "name those of one VPC: `sagemaker_subnets` and `sagemaker_security_groups` under "
            f"`aws: {region}:` in the config file",
        )
    if by_efa:
        check_open_groups(aws, region, groups)


def _is_open(rules: Mapping[str, GroupRules], way: str) -> bool:
    named = [rule.lets_in if way == "ingress" else rule.lets_out for rule in rules.values()]
    return any(groups & rules.keys() for groups in named)


def _opening(region: str, group: str, way: str) -> str:
    return (
        f"aws ec2 authorize-security-group-{way} --region {region} --group-id {group} "
        f"--ip-permissions 'IpProtocol=-1,UserIdGroupPairs=[{{GroupId={group}}}]'"
    )


def check_placement_group(aws: Aws, region: str, name: str) -> None:
    """Raise BadConfiguration if the placement group is missing or does not keep machines close."""
    group = aws.placement_group(region, name)
    if group is None or group.state in ("deleting", "deleted"):
        raise BadConfiguration(
            f"{region} has no placement group {name}", placement_group_command(region, name)
        )
    if group.strategy != "cluster":
        raise BadConfiguration(
            f"placement group {name} is of the strategy {group.strategy}, not cluster",
            placement_group_command(region, "OTHER_NAME"),
        )


def placement_group_command(region: str, name: str) -> str:
    """Return what to type for a placement group of this name."""
    return f"aws ec2 create-placement-group --region {region} --strategy cluster --group-name {name}"


def network_exit(region: str, subnet: Subnet, aws: Aws, *, several_interfaces: bool = False) -> str | Finding:
    """Return the way out of the subnet, or a warning if none is seen.

    A right that is missing only makes it less certain. several_interfaces: of each machine, which then gets
    no public address whatever the subnet says. Raises BadConfiguration if these surely have no way out.
    """
    target = _default_route(region, subnet, aws)
    public = subnet.maps_public_ip and not several_interfaces
    hint = (_PRIVATE_HINT if several_interfaces else _HINT).format(region=region)
    if target is None:
        if public:
            return f"{subnet.id}: its machines get a public address"
        message = f"{subnet.id}: its machines get no public address, and its routes may not be looked at"
        return Finding(Result.WARNING, message, hint)
    if target.startswith("igw-") and public:
        return f"{subnet.id}: public address, and out by {target}"
    if target and not target.startswith("igw-"):
        return f"{subnet.id}: out by {target}"
    machines = "machines with several network interfaces" if several_interfaces else "its machines"
    problem = (
        f"{subnet.id}: routes to {target}, but {machines} get no public address"
        if target
        else f"{subnet.id}: has no route to the internet"
    )
    try:
        endpoints = aws.endpoints(region, subnet.vpc)
    except CloudRefused:
        message = f"{problem}, and the endpoints of its VPC may not be looked at"
        return Finding(Result.WARNING, message, hint)
    missing = [service for service in _NEEDED if service not in endpoints]
    if not missing:
        return f"{subnet.id}: to S3 and ECR by the endpoints of {subnet.vpc}"
    if len(missing) < len(_NEEDED):
        message = f"{problem}, and {subnet.vpc} has no endpoint for {' and '.join(missing)}"
        names = (f"com.amazonaws.{region}.{service}" for service in missing)
        hint = f"make endpoints for {' and '.join(names)}"
    else:
        message = (
            f"{problem}: the machine would reach neither S3 nor ECR, and turn itself off after 5 minutes"
        )
    if several_interfaces:
        raise BadConfiguration(message, hint)
    return Finding(Result.WARNING, message, hint)


def _default_route(region: str, subnet: Subnet, aws: Aws) -> str | None:
    """Return where the subnet sends what leaves the VPC: empty for nowhere, None if AWS does not tell."""
    try:
        routes = aws.default_routes(region, subnet.vpc)
    except CloudRefused:
        return None
    return routes.get(subnet.id, routes.get(None, ""))

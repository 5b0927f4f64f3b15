"""Where machines stand: checks of subnets, VPCs and groups for a job; and which of them an account uses."""

from collections.abc import Collection, Mapping, Sequence

from fastlaunch.aws.ec2 import GroupRules
from fastlaunch.aws.types import RouteTable, Subnet, Vpc
from fastlaunch.core.errors import BadConfiguration, CloudRefused, NotAuthorised, UserError
from fastlaunch.placement.check import CheckContext, Finding, Result
from fastlaunch.placement.lookup import setup_command

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


def security_groups(job: CheckContext) -> str:
    """Check that the groups are there, and of one VPC."""
    groups = job.here.security_groups
    vpcs = _group_vpcs(job)
    if not groups:
        return "none is named: the VPC's default group, which lets everything out unless somebody changed it"
    return f"{', '.join(groups)} of {', '.join(sorted(set(vpcs.values())))}"


def _group_vpcs(job: CheckContext) -> dict[str, str]:
    """Return VPCs by group. Raises BadConfiguration if a group is missing or there are several VPCs."""
    groups = job.here.security_groups
    vpcs = job.aws.security_group_vpcs(job.region, groups) if groups else {}
    if len(set(vpcs.values())) > 1:
        pairs = ", ".join(f"{group} in {vpc}" for group, vpc in sorted(vpcs.items()))
        raise BadConfiguration(
            f"the security groups are in different VPCs: {pairs}",
            f"name groups of one: `aws.{job.region}.security_groups` in the config file",
        )
    return vpcs


def subnet(job: CheckContext, zone: str | None) -> str | Finding:
    """Check that the zone's subnet is there, in the groups' VPC, and has a way out. None: without a subnet.

    Raises BadConfiguration.
    """
    if zone is None:
        return _default_subnet(job)
    region, name = job.region, job.here.subnets[zone]
    try:
        subnets = job.aws.subnets(region, tuple(sorted(set(job.here.subnets.values()))))
    except BadConfiguration:
        # One that does not exist fails the question for all of them.
        subnets = job.aws.subnets(region, (name,))
    subnet = next(subnet for subnet in subnets if subnet.id == name)
    where = f"`aws.{region}.subnets` in the config file"
    if subnet.zone != zone:
        raise BadConfiguration(
            f"{subnet.id} is in {subnet.zone}, not in {zone}",
            f"write `{subnet.zone}: {subnet.id}`, or another subnet for {zone}: {where}",
        )
    for group, vpc in sorted(_group_vpcs(job).items()):
        if vpc != subnet.vpc:
            raise BadConfiguration(
                f"security group {group} is in {vpc}, and {subnet.id} in {subnet.vpc}",
                f"name a group of {subnet.vpc}, or a subnet of {vpc}: {where}, and `security_groups` there",
            )
    return _way_out(job, subnet)


def _default_subnet(job: CheckContext) -> Finding:
    """Check the default VPC, where a machine without a subnet starts.

    Raises BadConfiguration if there is none, or a security group is of another.
    """
    region = job.region
    write = f"write `subnets: {{{region}a: subnet-...}}` under `aws: {region}:` in the config file"
    if job.is_joined_by_efa:
        raise BadConfiguration(
            "no subnet is named, and machines with several network interfaces get no public address",
            f"{write}, of subnets with a NAT or endpoints for S3 and ECR",
        )
    group_vpcs = _group_vpcs(job)
    give_subnets = (
        f"write `subnets: {{ZONE: ID}}` under `aws: {region}:` in the config file, or give --subnet"
    )
    where = "the default VPC, if there is one,"
    try:
        default = job.aws.default_vpc(region)
    except NotAuthorised:
        pass
    else:
        if default is None:
            raise BadConfiguration(f"{region} has no default VPC, and no subnet is named", give_subnets)
        for group, vpc in sorted(group_vpcs.items()):
            if vpc != default:
                raise BadConfiguration(
                    f"security group {group} is in {vpc}, and without a subnet EC2 takes default {default}",
                    f"{give_subnets}, of {vpc}",
                )
        where = f"the default VPC, {default},"
    return Finding(
        Result.WARNING,
        f"none is named: EC2 takes one of {where} in a zone of its choice",
        f"for the next zone to be tried, {write}",
    )


def _way_out(job: CheckContext, subnet: Subnet) -> str | Finding:
    """Return the way out of the subnet, or a warning if none is seen.

    A right that is missing only makes it less certain. Raises BadConfiguration if machines with several
    network interfaces, which get no public address whatever the subnet says, surely have no way out.
    """
    region, several = job.region, job.is_joined_by_efa
    public = subnet.maps_public_ip and not several
    hint = (_PRIVATE_HINT if several else _HINT).format(region=region)
    try:
        routes = job.aws.default_routes(region, subnet.vpc)
    except CloudRefused:
        if public:
            return f"{subnet.id}: its machines get a public address"
        message = f"{subnet.id}: its machines get no public address, and its routes may not be looked at"
        return Finding(Result.WARNING, message, hint)
    target = routes.get(subnet.id, routes.get(None, ""))
    if target.startswith("igw-") and public:
        return f"{subnet.id}: public address, and out by {target}"
    if target and not target.startswith("igw-"):
        return f"{subnet.id}: out by {target}"
    machines = "machines with several network interfaces" if several else "its machines"
    problem = (
        f"{subnet.id}: routes to {target}, but {machines} get no public address"
        if target
        else f"{subnet.id}: has no route to the internet"
    )
    try:
        endpoints = job.aws.endpoints(region, subnet.vpc)
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
    if several:
        raise BadConfiguration(message, hint)
    return Finding(Result.WARNING, message, hint)


def between_nodes(job: CheckContext) -> str | Finding:
    """Check that the security groups let nodes reach each other. Raises BadConfiguration without EFA."""
    groups = job.here.security_groups
    if job.is_joined_by_efa:
        _check_open(job, groups)
        return f"{', '.join(groups)} lets nodes reach each other by EFA"
    if not groups:
        return "none is named: the VPC's default group lets its own machines reach each other"
    if _is_open(job.aws.group_rules(job.region, groups), "ingress"):
        return f"{', '.join(groups)} lets nodes reach each other"
    return Finding(
        Result.WARNING,
        f"{', '.join(groups)} has no rule that lets in all traffic from itself: nodes may not reach each "
        "other",
        f"aws ec2 authorize-security-group-ingress --region {job.region} --group-id {groups[0]} "
        f"--protocol -1 --source-group {groups[0]}",
    )


def _check_open(job: CheckContext, groups: tuple[str, ...]) -> None:
    """Raise BadConfiguration if machines with these groups cannot reach each other by EFA.

    EFA goes by no address: a group has to name itself, or another that all machines have, for what comes in
    and for what goes out. 0.0.0.0/0 does not do.
    """
    if not groups:
        raise BadConfiguration(
            "no security group is named, and the VPC's default one lets nothing out by EFA",
            f"write one that names itself both ways into `aws.{job.region}.security_groups`; this makes one: "
            f"{setup_command(job.region)}",
        )
    rules = job.aws.group_rules(job.region, groups)
    if lacking := [way for way in ("ingress", "egress") if not _is_open(rules, way)]:
        commands = (
            f"aws ec2 authorize-security-group-{way} --region {job.region} --group-id {groups[0]} "
            f"--ip-permissions 'IpProtocol=-1,UserIdGroupPairs=[{{GroupId={groups[0]}}}]'"
            for way in lacking
        )
        raise BadConfiguration(
            f"{', '.join(groups)} has no {' and no '.join(lacking)} rule for all traffic to itself, which "
            "EFA needs",
            " && ".join(commands),
        )


def _is_open(rules: Mapping[str, GroupRules], way: str) -> bool:
    named = [rule.lets_in if way == "ingress" else rule.lets_out for rule in rules.values()]
    return any(groups & rules.keys() for groups in named)


def placement_group(job: CheckContext, zone: str) -> str | Finding:
    """Check that the zone's placement group is there and keeps machines close. Raises BadConfiguration."""
    region, name = job.region, job.here.placement_groups.get(zone)
    command = f"aws ec2 create-placement-group --region {region} --strategy cluster --group-name "
    if name is None:
        made = f"fastlaunch-{zone}"
        return Finding(
            Result.WARNING,
            f"none is named for {zone}: the nodes may stand far apart, and all-reduce then takes longer",
            f"{command}{made}, and write `placement_groups: {{{zone}: {made}}}` under `aws: {region}:` in "
            "the config file",
        )
    group = job.aws.placement_group(region, name)
    if group is None or group.state in ("deleting", "deleted"):
        raise BadConfiguration(f"{region} has no placement group {name}", f"{command}{name}")
    if group.strategy != "cluster":
        raise BadConfiguration(
            f"placement group {name} has the strategy {group.strategy}, not cluster", f"{command}OTHER_NAME"
        )
    return f"{name} keeps nodes close together"


def training_network(job: CheckContext) -> str:
    """Check where training jobs stand. Raises BadConfiguration."""
    subnets, groups = job.here.sagemaker_subnets, job.here.sagemaker_security_groups
    vpcs = {subnet.vpc for subnet in job.aws.subnets(job.region, subnets)}
    vpcs |= set(job.aws.security_group_vpcs(job.region, groups).values())
    if len(vpcs) > 1:
        raise BadConfiguration(
            f"the subnets and security groups of training jobs are in {' and '.join(sorted(vpcs))}",
            "name those of one VPC: `sagemaker_subnets` and `sagemaker_security_groups` under "
            f"`aws: {job.region}:` in the config file",
        )
    if job.is_joined_by_efa:
        _check_open(job, groups)
    return f"{', '.join(subnets)} with {', '.join(groups)}"


# What `init` chooses for an account, of what is there


def only_vpc(vpcs: Sequence[Vpc], *, region: str, given: str | None = None) -> Vpc | None:
    """Return the VPC given, else the default one, else the only one; None if the user has to choose.

    Raises UserError if there is none, or none of the id given.
    """
    if not vpcs:
        raise UserError(
            f"{region} has no VPC, in which machines run",
            f"create the default one, which costs nothing: aws ec2 create-default-vpc --region {region}",
        )
    if given is not None:
        chosen = next((vpc for vpc in vpcs if vpc.id == given), None)
        if chosen is None:
            raise UserError(f"{region} has no VPC {given}", f"give one of these:\n{vpc_lines(vpcs)}")
        return chosen
    default = [vpc for vpc in vpcs if vpc.is_default]
    return default[0] if default else vpcs[0] if len(vpcs) == 1 else None


def several_vpcs(vpcs: Sequence[Vpc], region: str) -> UserError:
    """Return the error that nothing says which of the VPCs to take."""
    return UserError(
        f"{region} has {len(vpcs)} VPCs, and none is the default one",
        f"say which, with --vpc:\n{vpc_lines(vpcs)}",
    )


def vpc_lines(vpcs: Sequence[Vpc]) -> str:
    """Return a line per VPC: id, address range, name."""
    return "\n".join(
        f"  --vpc {vpc.id}  {vpc.cidr:<18}  {'the default VPC' if vpc.is_default else vpc.name}".rstrip()
        for vpc in vpcs
    )


def subnets_by_zone(
    subnets: Sequence[Subnet], tables: Sequence[RouteTable], *, vpc: str, given: Collection[str] = ()
) -> dict[str, Subnet]:
    """Return a subnet for each zone, sorted by zone: those given, else those with a way out.

    If a zone has several, take one that gives machines public addresses, then the first by id. subnets: all
    of the VPC. Raises UserError if one given is not there, or shares its zone, or if no subnet is left.
    """
    by_zone: dict[str, Subnet] = {}
    if given:
        by_id = {subnet.id: subnet for subnet in subnets}
        for id in given:
            if id not in by_id:
                raise UserError(f"{vpc} has no subnet {id}", f"give some of these:\n{_lines(subnets)}")
            if (other := by_zone.setdefault(by_id[id].zone, by_id[id])).id != id:
                raise UserError(f"{other.id} and {id} are both in {other.zone}", "give one subnet per zone")
        return dict(sorted(by_zone.items()))
    if not subnets:
        raise UserError(f"{vpc} has no subnet", f"create one: aws ec2 create-subnet --vpc-id {vpc} ...")
    for subnet in sorted(subnets, key=lambda known: (known.zone, not known.maps_public_ip, known.id)):
        if _gets_out(subnet, tables):
            by_zone.setdefault(subnet.zone, subnet)
    if not by_zone:
        raise UserError(
            f"no subnet of {vpc} has a way out: public addresses and an internet gateway, or a NAT",
            f"if its endpoints lead to S3 and ECR, say which, with --subnet:\n{_lines(subnets)}",
        )
    return by_zone


def tables_without_gateway(
    subnets: Collection[Subnet], tables: Sequence[RouteTable], served: Collection[str]
) -> tuple[str, ...]:
    """Return the ids of the subnets' route tables that no gateway to S3 serves yet, sorted.

    served: ids of those that one does.
    """
    used = {table.id for subnet in subnets if (table := _table_of(subnet, tables))}
    return tuple(sorted(used - set(served)))


def _table_of(subnet: Subnet, tables: Sequence[RouteTable]) -> RouteTable | None:
    explicit = (table for table in tables if subnet.id in table.subnets)
    return next(explicit, next((table for table in tables if table.is_main), None))


def _gets_out(subnet: Subnet, tables: Sequence[RouteTable]) -> bool:
    table = _table_of(subnet, tables)
    target = table.default_route if table else ""
    return bool(target) and (subnet.maps_public_ip or not target.startswith("igw-"))


def _lines(subnets: Sequence[Subnet]) -> str:
    return "\n".join(
        f"  --subnet {subnet.id}  {subnet.zone}{'  public addresses' if subnet.maps_public_ip else ''}"
        for subnet in subnets
    )

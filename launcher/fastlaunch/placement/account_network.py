"""Which VPC, subnets and route tables an account's jobs get, of those that are there. Pure."""

from collections.abc import Collection, Sequence

from fastlaunch.aws.types import RouteTable, Subnet, Vpc
from fastlaunch.core.errors import UserError


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
    """Return the error that nothing says which one of them."""
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
    """Return a subnet for each zone, sorted by zone: those given, else those from which a machine gets out.

    If a zone has several, take the one that gives machines public addresses, then the first by id. subnets:
    all of the VPC. Raises UserError if one given is not there, or shares its zone, or if no subnet is left.
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
    for subnet in sorted(subnets, key=lambda one: (one.zone, not one.maps_public_ip, one.id)):
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

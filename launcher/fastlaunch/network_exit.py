"""How a machine in a subnet would reach S3 and ECR: by a public address, a NAT, or endpoints in its VPC."""

from dataclasses import dataclass

from fastlaunch.aws.cache import AskOnce
from fastlaunch.aws.ec2 import Aws, Subnet
from fastlaunch.core.errors import CloudRefused


@dataclass(frozen=True, kw_only=True)
class NetworkExit:
    """The way out of a subnet, in words. is_known: whether one is seen; hint: what to do if it is not.

    is_shut: whether there is surely none.
    """

    is_known: bool
    told: str
    hint: str | None = None
    is_shut: bool = False


def network_exit(
    region: str, subnet: Subnet, aws: Aws, ask: AskOnce, *, several_interfaces: bool = False
) -> NetworkExit:
    """The way out of the subnet, as far as AWS tells: a right that is lacking only makes it less certain.

    several_interfaces: of each machine, which then gets no public address whatever the subnet says.
    """
    target = _default_route(region, subnet, aws, ask)
    public = subnet.maps_public_ip and not several_interfaces
    hint = (_PRIVATE_HINT if several_interfaces else _HINT).format(region=region)
    if target is None:
        if public:
            return NetworkExit(is_known=True, told="its machines get a public address")
        return NetworkExit(
            is_known=False,
            told="its machines get no public address, and its routes may not be looked at",
            hint=hint,
        )
    if target.startswith("igw-") and public:
        return NetworkExit(is_known=True, told=f"public address, and out by {target}")
    if target and not target.startswith("igw-"):
        return NetworkExit(is_known=True, told=f"out by {target}")
    machines = "machines with several network interfaces" if several_interfaces else "its machines"
    problem = (
        f"routes to {target}, but {machines} get no public address"
        if target
        else "has no route to the internet"
    )
    endpoints = _endpoints(region, subnet, aws, ask)
    if endpoints is None:
        return NetworkExit(
            is_known=False,
            told=f"{problem}, and the endpoints of its VPC may not be looked at",
            hint=hint,
        )
    missing = [service for service in _NEEDED if service not in endpoints]
    if not missing:
        return NetworkExit(is_known=True, told=f"to S3 and ECR by the endpoints of {subnet.vpc}")
    if len(missing) < len(_NEEDED):
        return NetworkExit(
            is_known=False,
            told=f"{problem}, and {subnet.vpc} has no endpoint for {' and '.join(missing)}",
            hint=f"make endpoints for {' and '.join(f'com.amazonaws.{region}.{one}' for one in missing)}",
            is_shut=True,
        )
    return NetworkExit(
        is_known=False,
        told=f"{problem}: the machine would reach neither S3 nor ECR, and turn itself off after 5 minutes",
        hint=hint,
        is_shut=True,
    )


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


def _default_route(region: str, subnet: Subnet, aws: Aws, ask: AskOnce) -> str | None:
    """Where the subnet sends what leaves the VPC: empty for nowhere, None if that may not be looked at."""
    try:
        routes = ask(aws.default_routes, region, subnet.vpc)
    except CloudRefused:
        return None
    return routes.get(subnet.id, routes.get(None, ""))


def _endpoints(region: str, subnet: Subnet, aws: Aws, ask: AskOnce) -> frozenset[str] | None:
    """Services that the VPC has endpoints for, None if they may not be looked at."""
    try:
        return ask(aws.endpoints, region, subnet.vpc)
    except CloudRefused:
        return None

"""An AWS that answers what is asked before money is spent, from plain data, and counts what it is asked."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ec2_builders import catalogue

from fastlaunch.aws.client import Aws
from fastlaunch.aws.types import Identity, MachineImage, Subnet
from fastlaunch.core.errors import BadConfiguration, NotAuthorised
from fastlaunch.core.settings import RegionSettings, Settings
from fastlaunch.jobs.options import CloudOptions
from fastlaunch.placement.aws_lookup import AwsLookup
from fastlaunch.placement.check import CheckContext

DIGEST = "sha256:" + "ab" * 32


#: The role of the config file, as IAM tells of it.
ROLE = "arn:aws:iam::123456789012:role/fastlaunch-training"


def trusting(service: str) -> dict[str, Any]:
    """What GetRole says of `ROLE` if it trusts this service."""
    statement = {"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}
    return {"Role": {"Arn": ROLE, "AssumeRolePolicyDocument": {"Statement": [statement]}}}


# Not compared: it is asked as itself, and remembered by that.
@dataclass(kw_only=True, eq=False)
class FakeAws(Aws):
    """Everything is there in every region, unless a test says otherwise.

    refused: what a method or call raises, by its name, or by name and region. zones: letters in which every
    type is offered. routes: of every VPC. answers: to calls of the services, by their names; several answers
    are pages. untrusted: services to which no role may be passed.
    """

    zones: str = "abc"
    subnet_zones: dict[str, str] = field(default_factory=dict)
    subnet_vpcs: dict[str, str] = field(default_factory=dict)
    group_vpcs: dict[str, str] = field(default_factory=dict)
    default_vpc_id: str | None = "vpc-1"
    public: bool = True
    routes: dict[str | None, str] = field(default_factory=lambda: {None: "igw-1"})
    services: frozenset[str] = frozenset()
    buckets: frozenset[str] = frozenset({"acme"})
    digest: str | None = DIGEST
    root_gib: int = 75
    applied: float | None = 384.0
    default: float | None = 0.0
    running: dict[tuple[str, str], int] = field(default_factory=dict)
    spot: tuple[float, str] | None = (18.73, "us-east-1a")
    unpassable: str | None = None
    lacking: tuple[str, ...] = ()
    untrusted: tuple[str, ...] = ()
    answers: dict[str, Any] = field(default_factory=dict)
    refused: dict[str | tuple[str, str], Exception] = field(default_factory=dict)
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    stored: list[tuple[str, str, str]] = field(default_factory=list)

    def _ask(self, name: str, region: str = "") -> None:
        self.asked[name, region] += 1
        error = self.refused.get((name, region)) or self.refused.get(name)
        if error is not None:
            raise error

    def call(self, service: str, region: str, action: str, *, subject: str = "", **given: Any) -> Any:
        self._ask(action, region)
        return self.answers[action]

    def paginate(
        self, service: str, region: str, action: str, *, subject: str = "", **given: Any
    ) -> Iterator[Any]:
        yield self.call(service, region, action, subject=subject, **given)

    def may_pass(self, role: str, service: str) -> str | None:
        self._ask("may_pass")
        return f"may not pass {role} to {service}" if service in self.untrusted else None

    def role_lacks(self, role: str, rights: Sequence[tuple[str, tuple[str, ...]]]) -> list[str]:
        self._ask("role_lacks")
        return [f"{what} on {to}" for to, actions in rights for what in actions if what in self.lacking]

    def identity(self) -> Identity:
        self._ask("identity")
        return Identity(account="123456789012", arn="arn:aws:iam::123456789012:user/ada")

    def regions(self) -> list[str]:
        self._ask("regions")
        return ["us-east-1", "us-west-2"]

    def may_pass_role(self, instance_profile: str) -> str | None:
        self._ask("may_pass_role")
        return self.unpassable

    def node_lacks(self, instance_profile: str, rights: Sequence[tuple[str, tuple[str, ...]]]) -> list[str]:
        self._ask("node_lacks")
        return [f"{what} on {to}" for to, actions in rights for what in actions if what in self.lacking]

    def zones_offering(self, region: str, instance_type: str) -> list[str]:
        self._ask("zones_offering", region)
        return [f"{region}{letter}" for letter in self.zones]

    def spot_price_usd(self, region: str, instance_type: str, zone: str | None) -> tuple[float, str] | None:
        self._ask("spot_price_usd", region)
        return self.spot

    def machine_image(self, region: str, ami: str) -> MachineImage:
        self._ask("machine_image", region)
        return MachineImage(id=ami, root_device="/dev/sda1", root_gib=self.root_gib)

    def subnets(self, region: str, ids: Sequence[str]) -> list[Subnet]:
        self._ask("subnets", region)
        unknown = [one for one in ids if one not in self.subnet_zones]
        if unknown:
            raise BadConfiguration(f"AWS refused: there is no subnet {unknown[0]}", "name one that exists")
        return [
            Subnet(
                id=one,
                zone=self.subnet_zones[one],
                vpc=self.subnet_vpcs.get(one, "vpc-1"),
                maps_public_ip=self.public,
            )
            for one in ids
        ]

    def security_group_vpcs(self, region: str, ids: Sequence[str]) -> dict[str, str]:
        self._ask("security_group_vpcs", region)
        return {one: self.group_vpcs.get(one, "vpc-1") for one in ids}

    def default_vpc(self, region: str) -> str | None:
        self._ask("default_vpc", region)
        return self.default_vpc_id

    def endpoints(self, region: str, vpc: str) -> frozenset[str]:
        self._ask("endpoints", region)
        return self.services

    def default_routes(self, region: str, vpc: str) -> dict[str | None, str]:
        self._ask("default_routes", region)
        return self.routes

    def parameter(self, region: str, name: str) -> str:
        self._ask("parameter", region)
        return "ami-1"

    def quota(self, region: str, service: str, code: str) -> float | None:
        self._ask("quota", region)
        return self.applied

    def default_quota(self, region: str, service: str, code: str) -> float | None:
        self._ask("default_quota", region)
        return self.default

    def running_vcpus(self, region: str) -> dict[tuple[str, str], int]:
        self._ask("running_vcpus", region)
        return self.running

    def bucket_exists(self, region: str, bucket: str) -> bool:
        self._ask("bucket_exists", region)
        return bucket in self.buckets

    def put_object(self, region: str, bucket: str, key: str, body: bytes, *, only_new: bool = False) -> bool:
        self._ask("put_object", region)
        self.stored.append((region, bucket, key))
        return True

    def image_digest(self, region: str, account: str, repository: str, tag: str) -> str | None:
        self._ask("image_digest", region)
        return self.digest


def denied(action: str) -> NotAuthorised:
    """What a right that is lacking raises."""
    return NotAuthorised(f"AWS refused {action}: AccessDenied", f"ask for {action} to be allowed")


def settings(**regions: RegionSettings) -> Settings:
    """Settings with these regions, `us_east_1` for us-east-1; us-east-1 with three zones if none is given."""
    from pathlib import Path

    given = regions or {"us_east_1": usual()}
    return Settings(home=Path("home"), aws={name.replace("_", "-"): one for name, one in given.items()})


def group(lets_in: bool = True, lets_out: bool = True) -> dict[str, Any]:
    """What DescribeSecurityGroups says of sg-1, which lets all traffic through from and to itself, or not."""
    itself = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "sg-1"}]}]
    anywhere = [{"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]
    return {
        "SecurityGroups": [
            {
                "GroupId": "sg-1",
                "IpPermissions": itself if lets_in else [],
                "IpPermissionsEgress": itself if lets_out else anywhere,
            }
        ]
    }


def block(**changes: Any) -> dict[str, Any]:
    """What DescribeCapacityReservations says of cr-0a1b2c3d: two p5.48xlarge in us-east-1b, for a day."""
    from datetime import UTC, datetime

    usually = {
        "CapacityReservationId": "cr-0a1b2c3d",
        "ReservationType": "capacity-block",
        "InstanceType": "p5.48xlarge",
        "AvailabilityZone": "us-east-1b",
        "State": "active",
        "TotalInstanceCount": 2,
        "AvailableInstanceCount": 2,
        "StartDate": datetime(2026, 11, 20, 11, 30, tzinfo=UTC),
        "EndDate": datetime(2026, 11, 21, 11, 30, tzinfo=UTC),
    }
    return {"CapacityReservations": [{**usually, **changes}]}


def usual(region: str = "us-east-1", letters: str = "abc") -> RegionSettings:
    """A region with everything in the config file."""
    return RegionSettings(
        bucket="acme",
        instance_profile="fastlaunch-node",
        security_groups=("sg-1",),
        subnets={f"{region}{letter}": f"subnet-{letter}" for letter in letters},
    )


def fake_aws(**changes: object) -> FakeAws:
    """One that has the usual subnets of us-east-1."""
    zones = {f"subnet-{letter}": f"us-east-1{letter}" for letter in "abc"}
    return FakeAws(**{"subnet_zones": zones, **changes})  # type: ignore[arg-type]


def check_context(lookup: AwsLookup, instances: Sequence[str], **changes: Any) -> CheckContext:
    """Return the context of checks for these instance types; `changes` are its fields and the options'."""
    cloud = {"instances": tuple(instances), "regions": ("us-east-1",)}
    names = {one.name for one in fields(CloudOptions)}
    return CheckContext(
        lookup=lookup,
        cloud=CloudOptions(**cloud | {name: value for name, value in changes.items() if name in names}),  # type: ignore[arg-type]
        instances=tuple(catalogue().instance(name) for name in instances),
        **{name: value for name, value in changes.items() if name not in names},
    )

"""The types that AWS's answers become."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

#: Names of sessions that programs make up: botocore's, SDKs', and those of EC2's instances.
_GENERATED_SESSION = re.compile(r"(botocore|aws)[\w-]*(session|sdk)[\w-]*|i-[0-9a-f]+|\d+", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Whose credentials are in use."""

    account: str
    # The ARN of the user or role.
    arn: str
    # Unique to the user; of a role's session `AROA...:NAME`. The policy variable `aws:userid`.
    user_id: str = ""

    @property
    def partition(self) -> str:
        """The partition of the account, such as `aws` or `aws-cn`."""
        return self.arn.split(":")[1]

    @property
    def is_shared(self) -> bool:
        """Whether `owner` may be several people: the root user, or a role with a generated session name."""
        kind, *names = self.arn.rpartition(":")[2].split("/")
        return not names or (kind == "assumed-role" and bool(_GENERATED_SESSION.fullmatch(names[-1])))

    @property
    def owner(self) -> str:
        """The value of the tag `Owner`: name of the user or session, or of the role if that is generated."""
        kind, *names = self.arn.rpartition(":")[2].split("/")
        name = (names[0] if self.is_shared else names[-1]) if names else kind
        # IAM's names may have a comma, which tags of SageMaker may not.
        return name.replace(",", "_")

    @property
    def owner_key(self) -> str:
        """The folder that the policy lets these credentials write runs to share in: `${aws:username}` of a
        user, `${aws:userid}` of anybody else.
        """
        kind, *names = self.arn.rpartition(":")[2].split("/")
        return names[-1] if kind == "user" and names else self.user_id


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One EC2 instance."""

    id: str
    region: str
    zone: str | None
    instance_type: str
    # pending, running, shutting-down, stopping, stopped or terminated.
    state: str
    is_spot: bool
    # When it last started, with time zone.
    launch_time: datetime
    token: str | None = None
    # Code and message joined by a colon, such as `Client.InternalError: ...`; None where EC2 gives none.
    state_reason: str | None = None
    # Such as `User initiated (2026-11-21 12:00:00 GMT)`.
    transition_reason: str | None = None
    # Among the instances of one request, from 0.
    launch_index: int = 0
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_live(self) -> bool:
        """Whether it costs money, or soon will."""
        return self.state in ("pending", "running", "stopping", "stopped")

    @property
    def has_ended(self) -> bool:
        """Whether it no longer runs. A stopped one keeps its disk, which costs money."""
        return self.state in ("terminated", "stopped")


@dataclass(frozen=True, kw_only=True)
class MachineImage:
    """An AMI."""

    id: str
    root_device: str
    # Size of the root volume.
    root_gib: int


@dataclass(frozen=True, kw_only=True)
class Subnet:
    id: str
    zone: str
    vpc: str
    # Whether its instances get a public address by themselves.
    maps_public_ip: bool


@dataclass(frozen=True, kw_only=True)
class Vpc:
    id: str
    # Its tag `Name`; empty without one.
    name: str
    # Such as 172.31.0.0/16.
    cidr: str
    is_default: bool


@dataclass(frozen=True, kw_only=True)
class RouteTable:
    id: str
    # Whether it serves the subnets that have no table of their own.
    is_main: bool
    # Ids of the subnets whose own it is.
    subnets: frozenset[str]
    # Target of the route to 0.0.0.0/0, such as `igw-0a1b` or `nat-0a1b`; "" without one.
    default_route: str


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """An object in S3."""

    # Whole, prefix included.
    key: str
    # In bytes.
    size: int
    # With its time zone.
    modified_at: datetime | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True)
class RegistryLogin:
    """What `docker login` needs for a registry host of ECR. Never printed."""

    host: str
    user: str
    password: str = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class BlockOffering:
    """A capacity block that EC2 sells now, or a training plan of SageMaker's."""

    id: str
    zone: str
    starts_at: datetime
    hours: float
    # For all its instances.
    fee_usd: float
    num_instances: int = 1

    @property
    def usd_per_hour(self) -> float:
        """The fee over instances and hours."""
        return self.fee_usd / self.hours / self.num_instances

"""Every call to AWS, typed, with its errors told apart. The only module that imports boto3.

Values come back as the dataclasses below; what goes wrong is one of `errors.CloudRefused`'s kinds. Clients
are made when first used, one per service and region, and `AWS_ENDPOINT_URL` is honoured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who the credentials are: account number, and ARN of the user or role."""

    account: str
    arn: str


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One EC2 instance as DescribeInstances tells it.

    state: pending, running, shutting-down, stopping, stopped or terminated. is_spot: bought as spot.
    launch_time: when it was last started, with its time zone. state_reason: code and message joined by a
    colon, such as `Client.InternalError: ...`; None where EC2 gives none. transition_reason: as
    `User initiated (2026-11-21 12:00:00 GMT)`.
    """

    id: str
    region: str
    zone: str | None
    instance_type: str
    state: str
    is_spot: bool
    launch_time: datetime
    token: str | None = None
    state_reason: str | None = None
    transition_reason: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_live(self) -> bool:
        """Whether it costs, or soon will: everything but terminated and shutting down."""
        return self.state in ("pending", "running", "stopping", "stopped")


@dataclass(frozen=True, kw_only=True)
class MachineImage:
    """An AMI: its id, its own root device's name, and the size of that volume in GiB."""

    id: str
    root_device: str
    root_gib: int


@dataclass(frozen=True, kw_only=True)
class Subnet:
    """A subnet: its zone and VPC, and whether its instances get a public address by themselves."""

    id: str
    zone: str
    vpc: str
    maps_public_ip: bool


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """An object in S3. key: whole, prefix included. size: bytes."""

    key: str
    size: int


@dataclass(frozen=True, kw_only=True)
class RegistryLogin:
    """What `docker login` needs for a registry host of ECR. Never printed."""

    host: str
    user: str
    password: str = field(repr=False)


class Aws:
    """AWS in every region, through boto3's usual chain of credentials.

    Every method raises CloudRefused's kinds. What does not exist is None or empty where the return type says
    so, and BadConfiguration elsewhere.
    """

    # Who

    def identity(self) -> Identity:
        """Who the credentials are (sts:GetCallerIdentity)."""
        raise NotImplementedError

    def may_pass_role(self, instance_profile: str) -> str | None:
        """Why an instance cannot get this profile, in words; None if it can, or where it cannot be told.

        iam:GetInstanceProfile for the role, iam:SimulatePrincipalPolicy for iam:PassRole on it.
        """
        raise NotImplementedError

    # EC2

    def run_instances(self, region: str, request: Mapping[str, Any]) -> list[Instance]:
        """Start instances: `request` goes out as it is, and again with the same token where no answer came.

        Raises QuotaExceeded, NoCapacity, ... where nothing was started; Unreachable where that is not known.
        """
        raise NotImplementedError

    def describe_instances(
        self,
        region: str,
        *,
        ids: Sequence[str] = (),
        tokens: Sequence[str] = (),
        tags: Mapping[str, Sequence[str]] | None = None,
    ) -> list[Instance]:
        """The instances with these ids, client tokens or tags; all pages, in as few requests as there can be.

        Ids that EC2 does not know (yet, or any more) are left out. Asked by filter, so that one unknown id
        does not fail the others. tags: the values that a tag may have; none for any value.
        """
        raise NotImplementedError

    def terminate(self, region: str, ids: Sequence[str]) -> None:
        """Terminate instances; it is no error if one is gone already."""
        raise NotImplementedError

    def console_output(self, region: str, instance_id: str) -> str:
        """What the instance wrote to its console, newest; empty if there is nothing (yet)."""
        raise NotImplementedError

    def zones_offering(self, region: str, instance_type: str) -> list[str]:
        """Zones of the region in which the instance type exists, sorted (DescribeInstanceTypeOfferings)."""
        raise NotImplementedError

    def spot_price_usd(self, region: str, instance_type: str, zone: str | None) -> tuple[float, str] | None:
        """Newest spot price per hour and its zone: the cheapest zone where none is given. None if unknown."""
        raise NotImplementedError

    def machine_image(self, region: str, ami: str) -> MachineImage:
        """The AMI. Raises BadConfiguration if it does not exist."""
        raise NotImplementedError

    def subnets(self, region: str, ids: Sequence[str]) -> list[Subnet]:
        """The subnets with these ids. Raises BadConfiguration if one does not exist."""
        raise NotImplementedError

    def security_group_vpcs(self, region: str, ids: Sequence[str]) -> dict[str, str]:
        """VPC by security group id. Raises BadConfiguration if one does not exist."""
        raise NotImplementedError

    def s3_gateways(self, region: str, vpc: str) -> bool:
        """Whether the VPC has a gateway endpoint for S3."""
        raise NotImplementedError

    def regions(self) -> list[str]:
        """The regions that the account may use, sorted (DescribeRegions)."""
        raise NotImplementedError

    # Systems Manager, Service Quotas

    def parameter(self, region: str, name: str) -> str:
        """The value of a parameter. Raises BadConfiguration if there is none of this name."""
        raise NotImplementedError

    def quota(self, region: str, service: str, code: str) -> float | None:
        """The account's quota (servicequotas:GetServiceQuota); None where AWS has none under this code."""
        raise NotImplementedError

    # S3

    def bucket_exists(self, region: str, bucket: str) -> bool:
        """Whether the bucket exists and may be used (HeadBucket)."""
        raise NotImplementedError

    def put_object(self, region: str, bucket: str, key: str, body: bytes, *, only_new: bool = False) -> bool:
        """Store an object; False, with nothing done, if `only_new` and there is one (If-None-Match)."""
        raise NotImplementedError

    def get_object(self, region: str, bucket: str, key: str) -> bytes | None:
        """The object, None if there is none."""
        raise NotImplementedError

    def list_objects(self, region: str, bucket: str, prefix: str) -> list[StoredObject]:
        """All objects under the prefix, sorted by key; all pages."""
        raise NotImplementedError

    # ECR

    def image_digest(self, region: str, account: str, repository: str, tag: str) -> str | None:
        """Digest (`sha256:...`) of a tag in an account's registry of the region; None if there is none.

        ecr:BatchGetImage, which AWS's own registries allow to everybody.
        """
        raise NotImplementedError

    def ensure_repository(self, region: str, repository: str) -> str:
        """URI of the account's own repository, made with immutable tags if it does not exist."""
        raise NotImplementedError

    def registry_login(self, region: str) -> RegistryLogin:
        """A login for the account's registry, which also opens AWS's own (GetAuthorizationToken)."""
        raise NotImplementedError

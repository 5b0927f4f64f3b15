"""Placements: where and how bought a job can run, with all that a request for it names.

A text such as `<ami-id>` stands for what is not known without asking AWS.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.core.errors import UserError
from fastlaunch.core.plan import CodeBundle


@dataclass(frozen=True, kw_only=True)
class CapacityBlock:
    """A capacity block that was bought before."""

    reservation: str
    # ISO 8601, UTC.
    ends_at: str
    # Paid up front, for all of it.
    fee_usd: float
    # From its start to its end.
    hours: float
    num_instances: int

    @property
    def usd_per_hour(self) -> float:
        """Effective price of an hour of one instance: the fee over all hours of all instances."""
        return self.fee_usd / self.hours / self.num_instances


@dataclass(frozen=True, kw_only=True)
class _Placement:
    """What placements of both backends have."""

    # As EC2 names it; SageMaker puts `ml.` before the name.
    instance: InstanceType
    region: str
    bucket: str
    prefix: str
    # By digest: `<registry host>/<repository>@sha256:...`.
    image: str
    # None if the image holds the training code.
    code: CodeBundle | None
    # At most, of one machine: the on-demand list price, the most paid for spot, or the effective price of a
    # capacity block.
    usd_per_hour: float
    price_as_of: str
    # Whether the price is derived from another one, as those of SageMaker often are.
    price_inferred: bool = False
    # What an hour of its volume costs on top, at most; 0 without one, and None if that is not known.
    volume_usd_per_hour: float | None = None
    # The user's, and the owner's; ours come on top.
    tags: Mapping[str, str] = field(default_factory=dict)
    # ARN of the key of the volumes; None for AWS's choice.
    volume_kms_key: str | None = None
    # ARNs, by the variable of a job's environment that gets the value.
    secrets: Mapping[str, str] = field(default_factory=dict)
    # Values of other variables of a job.
    variables: Mapping[str, str] = field(default_factory=dict)
    # URIs of folders in S3 that a job reads, by name.
    inputs: Mapping[str, str] = field(default_factory=dict)
    # What pip installs before the job; None for nothing.
    requirements: CodeBundle | None = None

    @property
    def placeholders(self) -> tuple[str, ...]:
        """Names of what is not known yet, without the brackets, sorted."""
        own = {**asdict(self), "variables": {}}
        names = {name for text in _texts(own) for name in re.findall(r"<([^>]+)>", text)}
        return tuple(sorted(names))

    @property
    def max_usd_per_hour(self) -> float:
        """The most that an hour of one machine costs, with its volume if the price of that is known."""
        return self.usd_per_hour + (self.volume_usd_per_hour or 0.0)

    @property
    def runs_uri(self) -> str:
        """`s3://bucket/prefix/runs`: what all runs of the region write lies under it."""
        return "s3://" + "/".join(filter(None, (self.bucket, self.prefix, "runs")))

    def unknown_names(self, run_ids: Iterable[str]) -> set[str]:
        """Return the names of what is not known yet, of the runs too, without the brackets."""
        return {*self.placeholders, *(run_id[1:-1] for run_id in run_ids if run_id.startswith("<"))}


@dataclass(frozen=True, kw_only=True)
class Ec2Placement(_Placement):
    """One instance type in one zone of one region."""

    backend: ClassVar[str] = "ec2"

    # None to leave both to EC2.
    zone: str | None
    subnet: str | None
    security_groups: tuple[str, ...]
    instance_profile: str
    ami: str
    root_device: str
    # Size of the root volume.
    root_gib: int
    # Of spot; None to pay up to the on-demand price.
    max_price_usd: float | None = None
    # For several nodes outside of a block.
    placement_group: str | None = None
    block: CapacityBlock | None = None

    @property
    def name(self) -> str:
        """`p5.48xlarge in us-east-1a`, or the region where EC2 chooses the zone."""
        return f"{self.instance.name} in {self.zone or self.region}"

    @property
    def own_names(self) -> tuple[str, ...]:
        """What belongs to this zone alone: an error that names it says nothing against the next placement."""
        block = self.block.reservation if self.block else None
        return tuple(filter(None, (self.subnet, self.zone, self.placement_group, block)))


@dataclass(frozen=True, kw_only=True)
class SageMakerPlacement(_Placement):
    """One instance type in one region."""

    backend: ClassVar[str] = "sagemaker"
    #: SageMaker chooses the zone, its spot has no limit of the user's, and a region has all in common.
    zone: ClassVar[str | None] = None
    max_price_usd: ClassVar[float | None] = None
    own_names: ClassVar[tuple[str, ...]] = ()

    # ARN of the execution role.
    role: str
    volume_gib: int
    # ARN.
    training_plan: str | None = None
    # Of a VPC; none for SageMaker's own network.
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    # ARN of the key of what SageMaker itself writes to the bucket; None for the bucket's own.
    output_kms_key: str | None = None
    # Whether SageMaker encrypts what the containers send to each other.
    encrypts_traffic: bool = False

    @property
    def name(self) -> str:
        """`ml.p5.48xlarge in us-east-1`."""
        return f"ml.{self.instance.name} in {self.region}"


Placement = Ec2Placement | SageMakerPlacement


def placement_to_json(placement: Placement) -> dict[str, Any]:
    """Return plain data that `placement_from_json` turns back into an equal placement."""
    return {"backend": placement.backend, **asdict(placement)}


def placement_from_json(data: Mapping[str, Any]) -> Placement:
    """Return the placement that `placement_to_json` wrote. Raises UserError for other data."""
    try:
        values = {**data}
        # Older submissions are all EC2's, and do not say so.
        backend = values.pop("backend", "ec2")
        instance = values["instance"]
        values["instance"] = InstanceType(
            **{**instance, "purchase_options": tuple(instance["purchase_options"])}
        )
        for name in ("code", "requirements"):
            values[name] = CodeBundle(**values[name]) if values.get(name) else None
        if backend == "sagemaker":
            # Older placements are in no VPC.
            for name in ("subnets", "security_groups"):
                values[name] = tuple(values.get(name, ()))
            return SageMakerPlacement(**values)
        values["security_groups"] = tuple(values["security_groups"])
        values["block"] = CapacityBlock(**values["block"]) if values.get("block") else None
        return Ec2Placement(**values)
    except (KeyError, TypeError) as error:
        raise UserError(f"the ledger holds no placement, but {data!r}: {error}") from None


def _texts(value: object) -> Iterator[str]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    for part in parts:
        yield from _texts(part)
    if isinstance(value, str):
        yield value

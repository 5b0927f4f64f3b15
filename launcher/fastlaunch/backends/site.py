"""`Site`: where a job can run and how that is bought, with all that a request for it names.

A text such as `<ami-id>` stands for what is not known without asking AWS.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime

from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.catalog.prices import Price
from fastlaunch.core.plan import CodeBundle


@dataclass(frozen=True, kw_only=True)
class CapacityBlock:
    """A capacity block that was bought before."""

    reservation: str
    #: ISO 8601, UTC.
    ends_at: str
    #: Paid up front, for all of it.
    fee_usd: float
    #: From its start to its end.
    hours: float
    num_instances: int
    #: ISO 8601, UTC; None where it is not known, as without asking AWS.
    starts_at: str | None = None

    def begins_after(self, now: datetime) -> datetime | None:
        """Return when the block begins, if that is after `now`."""
        starts_at = datetime.fromisoformat(self.starts_at) if self.starts_at else None
        return starts_at if starts_at and starts_at > now else None

    @property
    def usd_per_hour(self) -> float:
        """Effective price of an hour of one instance: the fee over all hours of all instances."""
        return self.fee_usd / self.hours / self.num_instances


@dataclass(frozen=True, kw_only=True)
class Queue:
    """A job queue of AWS Batch, and how a job stands in it."""

    name: str
    #: From 0 to 9999: higher goes first.
    priority: int | None = None
    #: Whose share of the queue's capacity it takes; None where the queue does not share.
    share: str | None = None
    #: How often AWS may start it again if SageMaker itself fails.
    retries: int = 0

    @property
    def num_starts(self) -> int:
        """How often AWS may start it in all."""
        return 1 + self.retries


@dataclass(frozen=True, kw_only=True)
class Site:
    """One instance type of a service, in one zone of a region or anywhere in it.

    A candidate knows only its type and place; `placement/lookup.py` looks up the rest.
    """

    #: `ec2` or `sagemaker`.
    backend: str
    #: As EC2 names it; SageMaker puts `ml.` before the name.
    instance: InstanceType
    region: str
    #: None to leave it to AWS, as SageMaker always does.
    zone: str | None = None
    #: The one of EC2's machines, or all that SageMaker may use; none for EC2's default, SageMaker's own.
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    #: The instance profile of EC2's machines, or the ARN of SageMaker's execution role.
    role: str = ""
    bucket: str = ""
    prefix: str = ""
    #: By digest: `<registry host>/<repository>@sha256:...`.
    image: str = ""
    #: None if the image holds the training code.
    code: CodeBundle | None = None
    #: The most that one machine costs: the on-demand list price, the most paid for spot, or the effective
    #: price of a capacity block. None where nothing is billed.
    price: Price | None = None
    #: What an hour of its volume costs on top, at most; 0 without one, and None if that is not known.
    volume_usd_per_hour: float | None = None
    volume_gib: int = 0
    #: ARN of the key of the volumes; None for AWS's choice.
    volume_kms_key: str | None = None
    #: The user's, and the owner's; ours come on top.
    tags: Mapping[str, str] = field(default_factory=dict)
    #: ARNs, by the variable of a job's environment that gets the value.
    secrets: Mapping[str, str] = field(default_factory=dict)
    #: Values of other variables of a job.
    variables: Mapping[str, str] = field(default_factory=dict)
    #: URIs of folders in S3 that a job reads, by name.
    inputs: Mapping[str, str] = field(default_factory=dict)
    #: What pip installs before the job; None for nothing.
    requirements: CodeBundle | None = None

    #: On EC2 alone:
    ami: str = ""
    root_device: str = ""
    #: For spot; None to pay up to the on-demand price.
    max_price_usd: float | None = None
    #: For several nodes outside of a block.
    placement_group: str | None = None
    block: CapacityBlock | None = None

    #: On SageMaker alone:
    #: ARN.
    training_plan: str | None = None
    #: None to hand jobs to SageMaker at once.
    queue: Queue | None = None
    #: ARN of the key of what SageMaker itself writes to the bucket; None for the bucket's own.
    output_kms_key: str | None = None
    #: Whether SageMaker encrypts what the containers send to each other.
    encrypts_traffic: bool = False

    @property
    def type_name(self) -> str:
        """The instance type as the service calls it: `p5.48xlarge`, `ml.p5.48xlarge`."""
        return f"ml.{self.instance.name}" if self.backend == "sagemaker" else self.instance.name

    @property
    def name(self) -> str:
        """`p5.48xlarge in us-east-1a`, or the region where AWS chooses the zone."""
        return f"{self.type_name} in {self.zone or self.region}"

    @property
    def num_starts(self) -> int:
        """How often AWS may start a job here by itself, each time for its whole time limit."""
        return self.queue.num_starts if self.queue else 1

    @property
    def subnet(self) -> str | None:
        """The subnet of EC2's machines; None for EC2's default."""
        return self.subnets[0] if self.subnets else None

    @property
    def own_names(self) -> tuple[str, ...]:
        """Names that belong to this zone alone: an error with one says nothing against the next site."""
        if self.backend == "sagemaker":
            return ()
        block = self.block.reservation if self.block else None
        return tuple(filter(None, (self.subnet, self.zone, self.placement_group, block)))

    @property
    def placeholders(self) -> tuple[str, ...]:
        """Names of what is not known yet, without the brackets, sorted."""
        known = {**asdict(self), "variables": {}, "price": None}
        names = {name for text in _texts(known) for name in re.findall(r"<([^>]+)>", text)}
        return tuple(sorted(names))

    @property
    def usd_per_hour(self) -> float:
        """The most that an hour of one machine costs without its volume; 0 where nothing is billed."""
        return self.price.usd_per_hour if self.price else 0.0

    @property
    def max_usd_per_hour(self) -> float:
        """The most that an hour of one machine costs, with its volume if the price of that is known."""
        return self.usd_per_hour + (self.volume_usd_per_hour or 0.0)

    @property
    def runs_uri(self) -> str:
        """`s3://bucket/prefix/runs`: what all runs of the region write lies under it."""
        return "s3://" + "/".join(filter(None, (self.bucket, self.prefix, "runs")))


def _texts(value: object) -> Iterator[str]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    for part in parts:
        yield from _texts(part)
    if isinstance(value, str):
        yield value

"""Where an EC2 job can run: everything that was looked up about one type in one zone, and by what name it
stands in a plan while it is not known.
"""

from dataclasses import dataclass, fields
from typing import Any

from fastlaunch.backends.stored_code import CodeBundle
from fastlaunch.catalog.hardware import InstanceType


@dataclass(frozen=True, kw_only=True)
class CapacityBlock:
    """A capacity block that was bought before: its reservation, its end (ISO 8601, UTC), its up-front fee.

    hours: from its start to its end. num_instances: that it holds.
    """

    reservation: str
    ends_at: str
    fee_usd: float
    hours: float
    num_instances: int

    @property
    def usd_per_hour(self) -> float:
        """What an hour of one instance costs effectively: the fee over all hours of all instances."""
        return self.fee_usd / self.hours / self.num_instances


@dataclass(frozen=True, kw_only=True)
class Site:
    """One instance type in one zone of one region, with all that a request for it names.

    zone, subnet: None to leave both to EC2. image: a container image by digest,
    `<registry host>/<repository>@sha256:...`. code: None if the image holds the training code.
    usd_per_hour: what the cost ceiling is made of: the on-demand list price, the most paid for spot, or what
    an hour of a capacity block costs effectively. placement_group: for several nodes outside of a block.
    max_price_usd: of spot, None to pay up to the on-demand price. root_gib: size of the root volume.
    A text such as `<ami-id>` stands for what is not known without asking AWS.
    """

    instance: InstanceType
    region: str
    zone: str | None
    subnet: str | None
    security_groups: tuple[str, ...]
    instance_profile: str
    bucket: str
    prefix: str
    ami: str
    root_device: str
    root_gib: int
    image: str
    code: CodeBundle | None
    usd_per_hour: float
    price_as_of: str
    max_price_usd: float | None = None
    placement_group: str | None = None
    block: CapacityBlock | None = None

    @property
    def backend(self) -> str:
        """The backend whose place this is."""
        return "ec2"

    @property
    def idle_minutes(self) -> int:
        """None: a machine ends itself."""
        return 0

    @property
    def own_names(self) -> tuple[str, ...]:
        """What is of this zone alone."""
        block = self.block.reservation if self.block else None
        return tuple(filter(None, (self.subnet, self.zone, self.placement_group, block)))

    @property
    def name(self) -> str:
        """`p5.48xlarge in us-east-1a`, or the region where EC2 chooses the zone."""
        return f"{self.instance.name} in {self.zone or self.region}"

    @property
    def placeholders(self) -> tuple[str, ...]:
        """Names of what is not known yet, without the brackets, sorted."""
        values: list[Any] = [getattr(self, entry.name) for entry in fields(self)]
        values += [part for value in values if isinstance(value, tuple) for part in value]
        values += [self.code.key, self.code.sha256] if self.code else []
        values += [self.block.ends_at] if self.block else []
        found = {part for value in values if isinstance(value, str) for part in _brackets(value)}
        return tuple(sorted(found))


def _brackets(text: str) -> list[str]:
    return [part.partition(">")[0] for part in text.split("<")[1:] if ">" in part]

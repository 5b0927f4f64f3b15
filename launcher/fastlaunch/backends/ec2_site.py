"""Where an EC2 job can run: everything that was looked up about one type in one zone, and by what name it
stands in a plan while it is not known.
"""

from dataclasses import dataclass, fields
from typing import Any

from fastlaunch.hardware import InstanceType


@dataclass(frozen=True, kw_only=True)
class CodeBundle:
    """The training code as an object in the run bucket. key: whole. sha256: of the object's bytes, in hex.

    commit: of the checkout it was made from, None if that is not known.
    """

    key: str
    sha256: str
    commit: str | None = None

    @classmethod
    def under(cls, prefix: str, *, sha256: str, commit: str | None) -> "CodeBundle":
        """The bundle at its place under a bucket's prefix, where it is stored once for all runs."""
        key = "/".join(filter(None, (prefix, "code", f"{sha256}.tar.gz")))
        return cls(key=key, sha256=sha256, commit=commit)


@dataclass(frozen=True, kw_only=True)
class Site:
    """One instance type in one zone of one region, with all that a request for it names.

    zone, subnet: None to leave both to EC2. image: a container image by digest,
    `<registry host>/<repository>@sha256:...`. code: None if the image holds the training code.
    usd_per_hour: what the cost ceiling is made of: the on-demand list price, or the most paid for spot.
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
        found = {part for value in values if isinstance(value, str) for part in _brackets(value)}
        return tuple(sorted(found))


def _brackets(text: str) -> list[str]:
    return [part.partition(">")[0] for part in text.split("<")[1:] if ">" in part]

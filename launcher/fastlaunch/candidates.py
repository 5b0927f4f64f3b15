"""Where a job may run, in the order in which it is tried. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastlaunch.hardware import InstanceType
from fastlaunch.settings import RegionSettings, Settings


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An instance type in a region, and in a zone by its subnet; None leaves both to EC2."""

    instance: InstanceType
    region: str
    zone: str | None
    subnet: str | None

    @property
    def name(self) -> str:
        """`p5.48xlarge in us-east-1a`, or the region where EC2 chooses the zone."""
        return f"{self.instance.name} in {self.zone or self.region}"


def candidates(
    instances: Sequence[InstanceType], regions: Sequence[str], settings: Settings
) -> tuple[Candidate, ...]:
    """Every zone of a region, then the next region, then the next instance type.

    Zones come in the order of the config's subnets. A region without any gives one candidate: EC2's default
    subnets, in a zone of its choice.
    """
    found = []
    for instance in instances:
        for region in regions:
            subnets = settings.aws.get(region, RegionSettings()).subnets
            places: Iterable[tuple[str | None, str | None]] = subnets.items() or [(None, None)]
            for zone, subnet in places:
                found.append(Candidate(instance=instance, region=region, zone=zone, subnet=subnet))
    return tuple(found)

"""Where a job may run, in the order in which it is tried. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.core.settings import RegionSettings, Settings

#: Stand for what has to be named, and is not.
UNKNOWN_SUBNET = "<subnet-id>"
UNKNOWN_GROUP = "<security-group-id>"
#: InstancePreferences of CreateTrainingJob: botocore's model, 1.44.5.
MAX_PREFERENCES = 5


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


@dataclass(frozen=True, kw_only=True)
class TrainingCandidate:
    """A region, and the instance types of which SageMaker may take the first that it has."""

    instances: tuple[InstanceType, ...]
    region: str


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


def unresolved(
    found: Sequence[Candidate], *, num_nodes: int, reservation: str | None
) -> tuple[Candidate, ...]:
    """The candidates as far as they are known without AWS.

    Only one subnet can be in a capacity block's zone, and only AWS tells which. Several network interfaces
    need one that is named.
    """
    if reservation is not None and len(found) > 1:
        return (replace(found[0], zone=None, subnet=UNKNOWN_SUBNET),)
    return tuple(
        replace(one, subnet=UNKNOWN_SUBNET)
        if one.subnet is None and (reservation or has_several_interfaces(one.instance, num_nodes))
        else one
        for one in found
    )


def has_several_interfaces(instance: InstanceType, num_nodes: int) -> bool:
    """Whether its machines have more network interfaces than one, and so get no public address.

    One node needs no EFA, and several have it wherever the type does.
    """
    return num_nodes > 1 and instance.num_efa_interfaces > 0


def training_candidates(
    instances: Sequence[InstanceType], regions: Sequence[str], *, purchase: str
) -> tuple[TrainingCandidate, ...]:
    """Types with as many GPUs together, in every region, then the next types.

    SageMaker takes the first type that it has, but not with managed spot: there they are tried one by one.
    """
    groups: list[list[InstanceType]] = []
    for instance in instances:
        fitting = (
            group
            for group in groups
            if purchase != "spot"
            and group[0].num_accelerators == instance.num_accelerators
            and len(group) < MAX_PREFERENCES
        )
        if (group := next(fitting, None)) is not None:
            group.append(instance)
        else:
            groups.append([instance])
    return tuple(
        TrainingCandidate(instances=tuple(group), region=region) for group in groups for region in regions
    )

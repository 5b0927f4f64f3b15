"""Where a job would run, as far as settings, options and the price list tell it. Nothing is asked of AWS."""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastlaunch.backends.ec2.plan import ROOT_GIB, plan_ec2
from fastlaunch.backends.ec2_rules import broken_rules
from fastlaunch.backends.placements import CapacityBlock, Site
from fastlaunch.backends.sagemaker.plan import plan_sagemaker
from fastlaunch.backends.sagemaker_rules import broken_training_rules
from fastlaunch.backends.sagemaker_site import TrainingSite
from fastlaunch.backends.stored_code import CodeBundle
from fastlaunch.candidates import (
    UNKNOWN_GROUP,
    Candidate,
    TrainingCandidate,
    candidates,
    has_several_interfaces,
    training_candidates,
    unresolved,
)
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.cloud_request import CloudRequest, rate_at
from fastlaunch.core.errors import UserError
from fastlaunch.core.settings import RegionSettings, Settings
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.placement.capacity_block import unknown_block
from fastlaunch.placement.cost_ceiling import HourlyRate

if TYPE_CHECKING:
    from fastlaunch.backends import Plan
    from fastlaunch.backends.protocol import Place

#: Asked for where SageMaker asks for a size: every type known here has local disks, which it takes instead.
TRAINING_VOLUME_GIB = 200


@dataclass(frozen=True, kw_only=True)
class OfflineSites:
    """sites: in the order in which they would be tried. skipped: the others, as (name, why)."""

    sites: "tuple[Place, ...]"
    skipped: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Offline:
    """What is known without AWS. image_at: the container image in a region, by digest or a placeholder."""

    request: CloudRequest
    settings: Settings
    catalogue: Catalogue
    today: datetime.date
    image_at: Callable[[str], str]
    commit: str | None = None

    def here(self, region: str) -> RegionSettings:
        """What the config file says of the region."""
        return self.settings.aws.get(region, RegionSettings())

    def code(self, region: str) -> CodeBundle | None:
        """The training code in the region's bucket; None if the image holds it."""
        if self.request.image:
            return None
        return CodeBundle.under(self.here(region).prefix, sha256="<code-sha256>", commit=self.commit)

    def rate(self, instance: InstanceType, region: str) -> HourlyRate:
        """The most that an hour costs there. Raises UserError where that is not known."""
        return rate_at(self.request, instance, region, catalogue=self.catalogue, today=self.today)


def offline_sites(known: Offline) -> OfflineSites:
    """Every candidate whose price is known. Raises UserError if there is none."""
    request = known.request
    sites: list[Place] = []
    skipped: list[tuple[str, UserError]] = []
    if request.backend == "sagemaker":
        for group in training_candidates(request.instances, request.regions, purchase=request.purchase):
            site, left_out = _training_site(known, group)
            skipped += left_out
            sites += [site] if site else []
    else:
        found = candidates(request.instances, request.regions, known.settings)
        for candidate in unresolved(found, num_nodes=request.num_nodes, reservation=request.reservation):
            try:
                sites.append(_site(known, candidate))
            except UserError as error:
                skipped.append((candidate.name, error))
    if not sites:
        raise skipped[0][1]
    return OfflineSites(sites=tuple(sites), skipped=tuple((name, error.message) for name, error in skipped))


def plan_at(
    jobs: dict[str, JobSpec], site: "Place", *, attempt: int, max_minutes: int, root: str | None = None
) -> "Plan":
    """The request that carries out the jobs, by run id, at the site; of its own backend."""
    if isinstance(site, TrainingSite):
        return plan_sagemaker(jobs, attempt=attempt, site=site, max_minutes=max_minutes, root=root)
    assert isinstance(site, Site)
    return plan_ec2(jobs, attempt=attempt, site=site, max_minutes=max_minutes)


def check_plan(site: "Place", jobs: Sequence[JobSpec], *, max_minutes: int) -> None:
    """Nothing, if AWS would take the request for these jobs, on any attempt; else UserError."""
    # Ids as long as real ones, which need not be of the same second: user data has a limit, and many runs
    # reach it, the sooner the less their ids share.
    by_id = {f"00000000-{number:06}-0000": job for number, job in enumerate(jobs)}
    plan = plan_at(by_id, site, attempt=99, max_minutes=max_minutes)
    if isinstance(site, Site):
        service, problems = "EC2", broken_rules(plan, root_device=site.root_device, instance=site.instance)
    else:
        service, problems = "SageMaker", broken_training_rules(plan)
    if problems:
        raise UserError(
            f"{service} would refuse the request at {site.name}: {'; '.join(problems)}",
            "change the option that this is about; fewer recipes or repeats make a smaller request",
        )


def _site(known: Offline, candidate: Candidate) -> Site:
    request, here = known.request, known.here(candidate.region)
    block = _block(known, candidate) if request.reservation else None
    if block is not None:
        rate = HourlyRate(usd_per_hour=block.usd_per_hour, as_of=known.today.isoformat())
    else:
        rate = known.rate(candidate.instance, candidate.region)
    return Site(
        instance=candidate.instance,
        region=candidate.region,
        zone=candidate.zone,
        subnet=candidate.subnet,
        security_groups=here.security_groups or _unknown_groups(candidate, request),
        instance_profile=here.instance_profile or "<instance-profile>",
        bucket=here.bucket or "<bucket>",
        prefix=here.prefix,
        ami="<ami-id>",
        root_device="<root-device>",
        root_gib=ROOT_GIB,
        image=known.image_at(candidate.region),
        code=known.code(candidate.region),
        usd_per_hour=rate.usd_per_hour,
        price_as_of=rate.as_of,
        max_price_usd=request.max_price_usd,
        placement_group=placement_group(here, candidate.zone, request),
        block=block,
    )


def _block(known: Offline, candidate: Candidate) -> CapacityBlock:
    assert known.request.reservation is not None
    return unknown_block(
        known.request.reservation,
        instance=candidate.instance,
        region=candidate.region,
        num_nodes=known.request.num_nodes,
        fee_usd=known.request.block_fee_usd,
        catalogue=known.catalogue,
        today=known.today,
    )


def _unknown_groups(candidate: Candidate, request: CloudRequest) -> tuple[str, ...]:
    """Nodes with EFA need a group of their own, which the VPC's default one is not."""
    return (UNKNOWN_GROUP,) if has_several_interfaces(candidate.instance, request.num_nodes) else ()


def placement_group(here: RegionSettings, zone: str | None, request: CloudRequest) -> str | None:
    """Name of the group in which several nodes stand together in the zone; None for one node or a block."""
    if request.num_nodes == 1 or request.reservation is not None or zone is None:
        return None
    return here.placement_groups.get(zone)


def _training_site(
    known: Offline, candidate: TrainingCandidate
) -> tuple[TrainingSite | None, list[tuple[str, UserError]]]:
    """The site with the types whose price is known, None if there is none; and the others with why."""
    request, here, region = known.request, known.here(candidate.region), candidate.region
    try:
        image = known.image_at(region)
    except UserError as error:
        return None, [(f"ml.{one.name} in {region}", error) for one in candidate.instances]
    types, left_out = priced(candidate, known.rate)
    if not types:
        return None, left_out
    dearest = max((rate for _, rate in types), key=lambda rate: rate.usd_per_hour)
    site = TrainingSite(
        instance=types[0][0],
        others=tuple(one for one, _ in types[1:]),
        region=region,
        role=here.role or "<role>",
        bucket=here.bucket or "<bucket>",
        prefix=here.prefix,
        image=image,
        code=known.code(region),
        usd_per_hour=dearest.usd_per_hour,
        price_as_of=dearest.as_of,
        volume_gib=TRAINING_VOLUME_GIB,
        keep_alive_minutes=request.keep_alive_minutes,
        training_plan=request.training_plan,
    )
    return site, left_out


def priced(
    candidate: TrainingCandidate, rate: Callable[[InstanceType, str], HourlyRate]
) -> tuple[list[tuple[InstanceType, HourlyRate]], list[tuple[str, UserError]]]:
    """The types whose price is known there, with it; and the others, with why."""
    known: list[tuple[InstanceType, HourlyRate]] = []
    left_out: list[tuple[str, UserError]] = []
    for one in candidate.instances:
        try:
            known.append((one, rate(one, candidate.region)))
        except UserError as error:
            left_out.append((f"ml.{one.name} in {candidate.region}", error))
    return known, left_out

"""Jobs -> the sites that can carry them out, and the plan at one of them.

A dry run and a submission take the same path with two lookups: `OfflineLookup` knows the settings, the
options and the price list, and writes named placeholders for the rest; `AwsLookup` (aws_lookup.py) asks AWS.
"""

import datetime
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from fastlaunch.aws.types import MachineImage
from fastlaunch.backends.ec2.plan import ROOT_GIB, ROOT_MIB_PER_S, plan_ec2
from fastlaunch.backends.protocol import SERVICES
from fastlaunch.backends.sagemaker.plan import plan_sagemaker
from fastlaunch.backends.site import CapacityBlock, Site
from fastlaunch.backends.validate import request_problems
from fastlaunch.catalog.container_images import BaseImage, image_uri, own_image
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.catalog.rates import dearest_rate
from fastlaunch.core.conventions import OWNER_TAG
from fastlaunch.core.errors import CloudRefused, UserError
from fastlaunch.core.plan import CodeBundle
from fastlaunch.core.settings import Settings
from fastlaunch.core.units import by_reason, utc_day
from fastlaunch.jobs.build import Jobs
from fastlaunch.jobs.job import Job
from fastlaunch.jobs.option_rules import given_inputs, given_pairs
from fastlaunch.jobs.options import Options
from fastlaunch.jobs.requirements import read_requirements
from fastlaunch.placement.capacity_block import (
    MIN_BLOCK_HOURS,
    UNKNOWN_END,
    block_price,
    block_usd_per_hour,
)
from fastlaunch.placement.cost_ceiling import CostCeiling, cost_ceiling

if TYPE_CHECKING:
    from fastlaunch.core.plan import Plan
    from fastlaunch.jobs.code_bundle import Bundle
    from fastlaunch.jobs.working_directory import WorkingDirectory
    from fastlaunch.placement.check import Check

#: Requested where SageMaker wants a size: every type in the catalogue has local disks, which it uses instead.
TRAINING_VOLUME_GIB = 200
#: Placeholders for what has to be named, and is not.
UNKNOWN_SUBNET = "<subnet-id>"
UNKNOWN_GROUP = "<security-group-id>"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Jobs, and the sites where AWS would run them, as far as that is known."""

    jobs: Jobs
    #: In the order in which they are tried; none on this machine.
    sites: tuple[Site, ...]
    #: The candidates that cannot be used, as (name, reason).
    skipped: tuple[tuple[str, str], ...]
    #: What travels with a script.
    directory: "WorkingDirectory | None" = None
    #: What was changed of the jobs to fit there, in words.
    changes: tuple[str, ...] = ()
    #: What AWS was asked; none offline.
    checks: "tuple[Check, ...]" = ()
    #: What is uploaded before a machine needs it: the code, unless the image holds it, and what pip installs.
    bundle: "Bundle | None" = None
    wheels: "Bundle | None" = None

    @property
    def options(self) -> Options:
        return self.jobs.options

    @property
    def ceiling(self) -> CostCeiling:
        """The most that the jobs can cost, wherever they run."""
        options = self.options
        return cost_ceiling(self.sites, num_nodes=options.num_nodes, max_minutes=options.max_minutes)

    @property
    def price_dates(self) -> list[datetime.date]:
        """The days of the prices that the ceiling is made of."""
        return [site.price.as_of for site in self.sites if site.price]

    def jobs_at(self, site: Site | None = None) -> tuple[Job, ...]:
        """Return the jobs as they are at a site, by default the first one; or on this machine."""
        site = site or next(iter(self.sites), None)
        return self.jobs.at(site.instance, site.region, image=site.image) if site else self.jobs.at()


@dataclass(frozen=True, kw_only=True)
class Lookup(ABC):
    """Answers what a placement names: all that differs between a dry run and a submission."""

    settings: Settings
    catalogue: Catalogue
    now: datetime.datetime
    #: AWS's own container image; None where the options name another.
    base: BaseImage | None

    @property
    def today(self) -> datetime.date:
        return utc_day(self.now)

    @abstractmethod
    def candidates(self, jobs: Jobs) -> tuple[Site, ...]:
        """Return where the jobs may run, in the order in which they are tried."""

    def block(self, options: Options, site: Site) -> CapacityBlock | None:
        """Return the capacity block of the options; None without one.

        Raises UserError where neither its fee nor its price is known.
        """
        if options.reservation is None:
            return None
        ends_at, hours, num_instances = self.block_size(options, site)
        fee_usd = options.block_fee_usd
        if fee_usd is None:
            usd_per_hour = block_usd_per_hour(site.instance, site.region, self.catalogue, self.today)
            fee_usd = usd_per_hour * hours * num_instances
        return CapacityBlock(
            reservation=options.reservation,
            ends_at=ends_at,
            fee_usd=fee_usd,
            hours=hours,
            num_instances=num_instances,
        )

    @abstractmethod
    def block_size(self, options: Options, site: Site) -> tuple[str, float, int]:
        """Return when the capacity block ends (ISO 8601), its hours, and its instances."""

    def tags(self, options: Options) -> dict[str, str]:
        """Return the tags of all that is started, less our own; `Owner` unless the user gives one."""
        given = {**self.settings.tags, **given_pairs(options, "tags")}
        if any(key.lower() == OWNER_TAG.lower() for key in given):
            return given
        return {OWNER_TAG: self.owner(), **given}

    @abstractmethod
    def owner(self) -> str:
        """Return whose credentials start it."""

    @abstractmethod
    def setting(self, region: str, name: str) -> str:
        """Return `bucket`, `instance_profile` or `role` of the region."""

    def security_groups(self, options: Options, site: Site) -> tuple[str, ...]:
        return self.settings.region_settings(site.region).security_groups

    @abstractmethod
    def machine_image(self, region: str) -> MachineImage: ...

    @abstractmethod
    def image(self, options: Options, region: str) -> str:
        """Return the container image as the region has it. Raise UserError if it does not."""

    @abstractmethod
    def code(self, region: str) -> CodeBundle | None:
        """Return the training code in the region's bucket; None if the image holds it."""

    @abstractmethod
    def requirements(self, options: Options, region: str) -> CodeBundle | None:
        """Return what pip installs, in the region's bucket; None for nothing. Raise BadFile."""


@dataclass(frozen=True, kw_only=True)
class OfflineLookup(Lookup):
    """Answers by the settings and the price list, and with placeholders. Asks AWS nothing."""

    #: Git commit of the code here, where it is known.
    commit: str | None = None
    #: Whether a script's files travel, with an image of its own too.
    is_script: bool = False

    def candidates(self, jobs: Jobs) -> tuple[Site, ...]:
        options = jobs.options
        known = candidates(jobs.instances, options, self.settings)
        if options.service == "sagemaker":
            return known
        in_block = options.reservation is not None
        if in_block and len(known) > 1:
            # Only one subnet can be in the block's zone, and only AWS can say which.
            return (replace(known[0], zone=None, subnets=(UNKNOWN_SUBNET,)),)
        return tuple(
            replace(site, subnets=(UNKNOWN_SUBNET,))
            if site.subnet is None and (in_block or has_several_interfaces(site.instance, options.num_nodes))
            else site
            for site in known
        )

    def block_size(self, options: Options, site: Site) -> tuple[str, float, int]:
        # The shortest there is, and so the dearest an hour.
        return UNKNOWN_END, MIN_BLOCK_HOURS, options.num_nodes

    def owner(self) -> str:
        return "<owner>"

    def setting(self, region: str, name: str) -> str:
        return getattr(self.settings.region_settings(region), name) or f"<{name.replace('_', '-')}>"

    def security_groups(self, options: Options, site: Site) -> tuple[str, ...]:
        # Nodes with EFA need a group of their own, which the VPC's default one is not.
        needs_own = has_several_interfaces(site.instance, options.num_nodes)
        return super().security_groups(options, site) or ((UNKNOWN_GROUP,) if needs_own else ())

    def machine_image(self, region: str) -> MachineImage:
        return MachineImage(id="<ami-id>", root_device="<root-device>", root_gib=ROOT_GIB)

    def image(self, options: Options, region: str) -> str:
        if options.image is not None:
            own_image(options.image, region)
            return options.image
        assert self.base is not None
        return image_uri(self.base, region, "<image-digest>")

    def code(self, region: str) -> CodeBundle | None:
        if self.base is None and not self.is_script:
            return None
        prefix = self.settings.region_settings(region).prefix
        return CodeBundle.under(prefix, sha256="<code-sha256>", commit=self.commit)

    def requirements(self, options: Options, region: str) -> CodeBundle | None:
        if options.requirements is None:
            return None
        # As far as that is seen without pip.
        read_requirements(Path(options.requirements), from_index=options.requirements_from_index)
        prefix = self.settings.region_settings(region).prefix
        return CodeBundle.under(prefix, sha256="<requirements-sha256>", commit=None)


def resolve(
    jobs: Jobs,
    lookup: Lookup,
    candidates: Sequence[Site] | None = None,
    refused: Sequence[tuple[str, UserError]] = (),
) -> Placement:
    """Look up all that a request names at each candidate, and keep the sites where all is known.

    candidates: if not all that the lookup has. refused: others that a check is against, by name. Raises the
    first error, with every reason, if no site is left.
    """
    sites: list[Site] = []
    skipped = list(refused)
    for candidate in lookup.candidates(jobs) if candidates is None else candidates:
        try:
            sites.append(_looked_up(jobs.options, candidate, lookup))
        except UserError as error:
            skipped.append((candidate.name, error))
    if not sites:
        raise nowhere(skipped)
    reasons = tuple((name, error.message) for name, error in skipped)
    return Placement(jobs=jobs, sites=tuple(sites), skipped=reasons)


def nowhere(skipped: Sequence[tuple[str, UserError]]) -> UserError:
    """Return the error of a job that fits in no place: the first one's kind and hint, with every reason."""
    first = skipped[0][1]
    if len({error.message for _, error in skipped}) == 1:
        return first
    reasons = "; ".join(by_reason((name, error.message) for name, error in skipped))
    kind = type(first) if isinstance(first, CloudRefused) else UserError
    return kind(f"none of {len(skipped)} places can be used: {reasons}", first.hint)


def candidates(instances: Sequence[InstanceType], options: Options, settings: Settings) -> tuple[Site, ...]:
    """Return every zone of a region, then the next region, then the next instance type.

    Zones come in the order of the config's subnets. A region without any gives one candidate: EC2's default
    subnets, in a zone of its choice. On SageMaker every region gives one.
    """
    result = []
    for instance, region in product(instances, options.regions):
        anywhere = Site(backend=options.service, instance=instance, region=region)
        subnets = settings.region_settings(region).subnets if options.service == "ec2" else {}
        in_zones = [replace(anywhere, zone=zone, subnets=(subnet,)) for zone, subnet in subnets.items()]
        result += in_zones or [anywhere]
    return tuple(result)


def has_several_interfaces(instance: InstanceType, num_nodes: int) -> bool:
    """Return whether its machines have several network interfaces, and so get no public address.

    One node needs no EFA; several have it wherever the type does.
    """
    return num_nodes > 1 and instance.num_efa_interfaces > 0


def plan_at(
    jobs: dict[str, Job],
    site: Site,
    *,
    attempt: int,
    max_minutes: int,
    root: str | None = None,
) -> "Plan":
    """Return the request that carries out the jobs, by run id, at the site."""
    if site.backend == "sagemaker":
        return plan_sagemaker(jobs, attempt=attempt, site=site, max_minutes=max_minutes, root=root)
    return plan_ec2(jobs, attempt=attempt, site=site, max_minutes=max_minutes)


def check_plan(site: Site, jobs: Sequence[Job], *, max_minutes: int) -> None:
    """Raise UserError if AWS would refuse the request for these jobs on any attempt."""
    # Ids as long as real ones.
    by_id = {f"00000000-{number:06}-0000": job for number, job in enumerate(jobs)}
    plan = plan_at(by_id, site, attempt=99, max_minutes=max_minutes)
    if problems := request_problems(plan):
        raise UserError(
            f"{SERVICES[plan.backend]} would refuse the request at {site.name}: {'; '.join(problems)}",
            "change the option that this is about",
        )


def _looked_up(options: Options, site: Site, lookup: Lookup) -> Site:
    """Return the site with all that a request there names. Raises UserError if it cannot be used."""
    instance, region = site.instance, site.region
    here, on_ec2 = lookup.settings.region_settings(region), site.backend == "ec2"
    block = lookup.block(options, site)
    if block is not None:
        price = block_price(block, instance, region, lookup.today)
    else:
        price = dearest_rate(
            instance,
            region,
            purchase=options.purchase,
            max_price_usd=options.max_price_usd,
            catalogue=lookup.catalogue,
            today=lookup.today,
            service=options.service,
        )
    bucket = lookup.setting(region, "bucket")
    role = lookup.setting(region, "instance_profile" if on_ec2 else "role")
    if on_ec2:
        site = _on_ec2(options, site, lookup)
    else:
        site = replace(
            site,
            # Local disks take the volume's place. No price of SageMaker's volumes is known.
            volume_usd_per_hour=0.0 if instance.local_nvme_gb else None,
            volume_gib=TRAINING_VOLUME_GIB,
            training_plan=options.training_plan,
            subnets=here.sagemaker_subnets,
            security_groups=here.sagemaker_security_groups,
            output_kms_key=here.output_kms_key,
            encrypts_traffic=here.encrypt_between_containers,
        )
    return replace(
        site,
        role=role,
        bucket=bucket,
        prefix=here.prefix,
        image=lookup.image(options, region),
        code=lookup.code(region),
        price=price,
        block=block,
        tags=lookup.tags(options),
        volume_kms_key=here.volume_kms_key,
        secrets=given_pairs(options, "secrets"),
        variables=given_pairs(options, "variables"),
        inputs=given_inputs(options),
        requirements=lookup.requirements(options, region),
    )


def _on_ec2(options: Options, site: Site, lookup: Lookup) -> Site:
    """Return the site with its machine image, volume, network and limit of spot's price."""
    machine = lookup.machine_image(site.region)
    root_gib = max(ROOT_GIB, machine.root_gib)
    volume = lookup.catalogue.find_volume_price(site.region, on=lookup.today)
    groups = lookup.settings.region_settings(site.region).placement_groups
    # A block's instances stand together by themselves.
    is_grouped = options.num_nodes > 1 and options.reservation is None
    return replace(
        site,
        ami=machine.id,
        root_device=machine.root_device,
        volume_gib=root_gib,
        volume_usd_per_hour=(
            volume.max_usd_per_hour(gib=root_gib, mib_per_s=ROOT_MIB_PER_S) if volume else None
        ),
        security_groups=lookup.security_groups(options, site),
        max_price_usd=options.max_price_usd,
        placement_group=groups.get(site.zone or "") if is_grouped else None,
    )

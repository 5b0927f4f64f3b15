"""`Lookup`: candidates, and all that a request at one of them names.

A dry run and a submission take the same path. With `aws` a lookup asks AWS each fact once a region; without,
it knows the settings, the options and the price list, and writes named placeholders for the rest. It changes
nothing and uploads nothing.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from fastlaunch.aws.types import MachineImage
from fastlaunch.backends.ec2.plan import ROOT_GIB, ROOT_MIB_PER_S
from fastlaunch.backends.site import CapacityBlock, Queue, Site
from fastlaunch.catalog.container_images import BaseImage, image_uri, own_image, registry
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.catalog.prices import Catalogue, dearest_rate
from fastlaunch.core.errors import BadConfiguration, NotAuthorised, UserError
from fastlaunch.core.ownership import OWNER_TAG, owner_in
from fastlaunch.core.settings import Settings
from fastlaunch.core.units import utc_day
from fastlaunch.jobs.build import Jobs
from fastlaunch.jobs.code_bundle import Bundle
from fastlaunch.jobs.data_sources import DataFile
from fastlaunch.jobs.option_rules import LOCAL_DATA, given_inputs, given_pairs
from fastlaunch.jobs.options import Options
from fastlaunch.placement.capacity_block import (
    MIN_BLOCK_HOURS,
    UNKNOWN_END,
    block_price,
    block_usd_per_hour,
    check_reservation,
    starts_at,
)

if TYPE_CHECKING:
    from fastlaunch.aws.client import Aws
    from fastlaunch.aws.ec2 import Reservation

#: Requested where SageMaker wants a size: every type in the catalogue has local disks, which it uses instead.
TRAINING_VOLUME_GIB = 200
#: Placeholders for what has to be named, and is not.
UNKNOWN_SUBNET = "<subnet-id>"
UNKNOWN_GROUP = "<security-group-id>"
#: What the config file has to name for a region: what it is for, and what its value is.
_PURPOSES = {
    "bucket": ("for code, records and checkpoints", "NAME"),
    "instance_profile": ("by which the machine may write to the bucket", "NAME"),
    "role": ("by which SageMaker runs the job", "ARN"),
}


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """Answers what a placement names."""

    settings: Settings
    catalogue: Catalogue
    now: datetime.datetime
    #: AWS's own container image; None where the options name another.
    base: BaseImage | None
    #: Asks each question once (`aws.client.cached`); None for placeholders.
    aws: "Aws | None" = None
    #: The code that is going to be uploaded, and what pip installs there; None for what does not travel.
    bundle: Bundle | None = None
    wheels: Bundle | None = None
    data_file: DataFile | None = None

    @property
    def today(self) -> datetime.date:
        return utc_day(self.now)

    def candidates(self, jobs: Jobs) -> tuple[Site, ...]:
        """Return where the jobs may run, in the order in which they are tried.

        Raises BadConfiguration if no subnet in the zone of their capacity block is named.
        """
        options = jobs.options
        sites = candidates(jobs.instances, options, self.settings)
        in_block = options.reservation is not None
        if self.aws is not None:
            return self._in_zone_of_block(options, sites) if in_block else sites
        if options.service == "sagemaker":
            return sites
        if in_block and len(sites) > 1:
            # Only one subnet can be in the block's zone, and only AWS can say which.
            return (replace(sites[0], zone=None, subnets=(UNKNOWN_SUBNET,)),)
        return tuple(
            replace(site, subnets=(UNKNOWN_SUBNET,))
            if site.subnet is None and (in_block or has_several_interfaces(site.instance, options.num_nodes))
            else site
            for site in sites
        )

    def _in_zone_of_block(self, options: Options, sites: Sequence[Site]) -> tuple[Site, ...]:
        first = sites[0]
        block = self.reservation(options, first.instance, first.region)
        if in_zone := tuple(site for site in sites if site.zone == block.zone):
            return in_zone
        if first.subnet is None and not has_several_interfaces(first.instance, options.num_nodes):
            # The default VPC has a subnet in every zone.
            return (replace(first, zone=block.zone),)
        raise BadConfiguration(
            f"{block.id} is in {block.zone}, and no subnet there is named",
            f"write `subnets: {{{block.zone}: subnet-...}}` under `aws: {first.region}:` in the config file, "
            f"or give --subnet {block.zone}=ID",
        )

    def reservation(self, options: Options, instance: InstanceType, region: str) -> "Reservation":
        """Return the capacity block, in which its nodes can run. Raise an error for each fault."""
        assert options.reservation is not None and self.aws is not None
        block = self.aws.reservation(region, options.reservation)
        return check_reservation(block, options=options, instance=instance, region=region, now=self.now)

    def setting(self, region: str, name: str) -> str:
        """Return the region's `bucket`, `instance_profile` or `role`. Raise UserError if none is named."""
        value: str | None = getattr(self.settings.region_settings(region), name)
        if value is not None:
            return value
        typed = name.replace("_", "-")
        if self.aws is None:
            return f"<{typed}>"
        purpose, kind = _PURPOSES[name]
        raise UserError(
            f"no {name.replace('_', ' ')} is named for {region}, {purpose}",
            f"write `{name}: {kind}` under `aws: {region}:` in the config file, or give "
            f"--{typed} {kind}; this makes one: {setup_command(region)}",
        )

    def machine_image(self, region: str) -> MachineImage:
        """Return the AMI that the region's parameter names, with its own root device."""
        if self.aws is None:
            return MachineImage(id="<ami-id>", root_device="<root-device>", root_gib=ROOT_GIB)
        name = self.settings.region_settings(region).ami_parameter
        return self.aws.machine_image(region, self.aws.parameter(region, name))

    def base_image(self, region: str) -> str:
        """Return AWS's own container image in the region, by the digest that its tag has now."""
        base = self.base
        assert base is not None, "a container image, or a base image to look one up by"
        if self.aws is None:
            return image_uri(base, region, "<image-digest>")
        account = registry(region).account
        digest = self.aws.image_digest(region, account, base.repository, base.tag)
        if digest is None:
            raise BadConfiguration(
                f"the registry of AWS in {region} ({account}) has no image {base.name}",
                "give another --base-image, or your own with --image",
            )
        return image_uri(base, region, digest)

    def is_image_visible(self, uri: str, region: str) -> bool:
        """Return whether the user's image is seen: False if only the machine's role may look at it.

        Raises BadConfiguration if it is not there, or not where a job in the region can name it.
        """
        image = own_image(uri, region)
        if self.aws is None:
            return False
        try:
            digest = self.aws.image_digest(region, image.account, image.repository, image.digest)
        except NotAuthorised:
            return False
        if digest is None:
            raise BadConfiguration(
                f"{region} has no image {uri}",
                f"fastlaunch build --push --region {region} ends with one that it has",
            )
        return True

    def site(self, options: Options, candidate: Site) -> Site:
        """Return the candidate with all that a request there names. Raise UserError if it cannot be used."""
        instance, region = candidate.instance, candidate.region
        here, on_ec2 = self.settings.region_settings(region), candidate.backend == "ec2"
        block = self._block(options, candidate) if options.reservation is not None else None
        if block is not None:
            price = block_price(block, instance, region, self.today)
        else:
            price = dearest_rate(
                instance,
                region,
                purchase=options.purchase,
                max_price_usd=options.max_price_usd,
                catalogue=self.catalogue,
                today=self.today,
                service=options.service,
            )
        bucket = self.setting(region, "bucket")
        role = self.setting(region, "instance_profile" if on_ec2 else "role")
        site = self._on_ec2(options, candidate) if on_ec2 else self._on_sagemaker(options, candidate)
        if options.image is not None:
            self.is_image_visible(options.image, region)
        return replace(
            site,
            role=role,
            bucket=bucket,
            prefix=here.prefix,
            image=options.image or self.base_image(region),
            code=self.bundle.stored(here.prefix) if self.bundle else None,
            price=price,
            block=block,
            tags=self._tags(options),
            volume_kms_key=here.volume_kms_key,
            secrets=given_pairs(options, "secrets"),
            variables=given_pairs(options, "variables"),
            inputs=given_inputs(options) | self._local_data(bucket, here.prefix),
            requirements=self.wheels.stored(here.prefix) if self.wheels else None,
        )

    def _local_data(self, bucket: str, prefix: str) -> dict[str, str]:
        data = self.data_file
        return {LOCAL_DATA: f"s3://{bucket}/{data.stored(prefix).key}"} if data else {}

    def _block(self, options: Options, site: Site) -> CapacityBlock:
        """Return the options' capacity block. Raises UserError where neither its fee nor price is known."""
        assert options.reservation is not None
        if self.aws is None:
            # The shortest block there is, and so the dearest by the hour.
            begins_at, ends_at = None, UNKNOWN_END
            hours, num_instances = float(MIN_BLOCK_HOURS), options.num_nodes
        else:
            block = self.reservation(options, site.instance, site.region)
            assert block.starts_at is not None and block.ends_at is not None
            begins_at = _iso(starts_at(block, self.now) or block.starts_at)
            ends_at = _iso(block.ends_at)
            hours = (block.ends_at - block.starts_at) / datetime.timedelta(hours=1)
            num_instances = block.num_instances
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
            starts_at=begins_at,
        )

    def _tags(self, options: Options) -> dict[str, str]:
        """Return the tags of all that is started, less our own; `Owner` unless the user gives one."""
        given = {**self.settings.tags, **given_pairs(options, "tags")}
        if owner_in(given) is not None:
            return given
        return {OWNER_TAG: self.aws.identity().owner if self.aws else "<owner>", **given}

    def _on_ec2(self, options: Options, site: Site) -> Site:
        """Return the site with its machine image, volume, network and limit of spot's price."""
        machine, here = self.machine_image(site.region), self.settings.region_settings(site.region)
        root_gib = max(ROOT_GIB, machine.root_gib)
        volume = self.catalogue.find_volume_price(site.region, on=self.today)
        groups = here.security_groups
        if not groups and self.aws is None and has_several_interfaces(site.instance, options.num_nodes):
            # Nodes with EFA need a group of their own, which the VPC's default one is not.
            groups = (UNKNOWN_GROUP,)
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
            security_groups=groups,
            max_price_usd=options.max_price_usd,
            placement_group=here.placement_groups.get(site.zone or "") if is_grouped else None,
        )

    def _on_sagemaker(self, options: Options, site: Site) -> Site:
        here = self.settings.region_settings(site.region)
        return replace(
            site,
            # Local disks take the volume's place. No price of SageMaker's volumes is known.
            volume_usd_per_hour=0.0 if site.instance.local_nvme_gb else None,
            volume_gib=TRAINING_VOLUME_GIB,
            training_plan=options.training_plan,
            queue=_queue(options),
            subnets=here.sagemaker_subnets,
            security_groups=here.sagemaker_security_groups,
            output_kms_key=here.output_kms_key,
            encrypts_traffic=here.encrypt_between_containers,
        )


def _iso(when: datetime.datetime) -> str:
    return when.astimezone(datetime.UTC).isoformat(timespec="seconds")


def _queue(options: Options) -> Queue | None:
    if options.queue is None:
        return None
    return Queue(
        name=options.queue, priority=options.priority, share=options.share, retries=options.retries or 0
    )


def candidates(instances: Sequence[InstanceType], options: Options, settings: Settings) -> tuple[Site, ...]:
    """Return every zone of a region, then the next region, then the next instance type.

    Zones come in the order of the config's subnets. A region without any gives one candidate: EC2's default
    subnets, in a zone of its choice. On SageMaker every region gives one.
    """
    sites = []
    for instance, region in product(instances, options.regions):
        anywhere = Site(backend=options.service, instance=instance, region=region)
        subnets = settings.region_settings(region).subnets if options.service == "ec2" else {}
        in_zones = [replace(anywhere, zone=zone, subnets=(subnet,)) for zone, subnet in subnets.items()]
        sites += in_zones or [anywhere]
    return tuple(sites)


def has_several_interfaces(instance: InstanceType, num_nodes: int) -> bool:
    """Return whether its machines have several network interfaces, and so get no public address.

    One node needs no EFA; several have it wherever the type does.
    """
    return num_nodes > 1 and instance.num_efa_interfaces > 0


def setup_command(region: str) -> str:
    """Return the command that makes all that jobs need in a region, after asking."""
    return f"fastlaunch init --region {region}"

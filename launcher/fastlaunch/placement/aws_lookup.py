"""`AwsLookup`: asks AWS what a placement names, each fact once a region. Changes nothing, uploads nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, timedelta

from fastlaunch.aws.client import Aws
from fastlaunch.aws.ec2 import Reservation
from fastlaunch.aws.types import MachineImage
from fastlaunch.backends.site import Site
from fastlaunch.catalog.container_images import image_uri, own_image, registry
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.core.errors import BadConfiguration, NotAuthorised
from fastlaunch.core.plan import CodeBundle
from fastlaunch.jobs.build import Jobs
from fastlaunch.jobs.code_bundle import Bundle
from fastlaunch.jobs.options import Options
from fastlaunch.placement.capacity_block import check_reservation, max_minutes_in
from fastlaunch.placement.config_checks import configured
from fastlaunch.placement.resolve import Lookup, candidates, has_several_interfaces


@dataclass(frozen=True, kw_only=True)
class AwsLookup(Lookup):
    """Answers by asking AWS. What the config file does not name is an error, with what to write."""

    #: Asks each question once; see `aws.client.cached`.
    aws: Aws
    #: The code that is going to be uploaded; None if the image holds it.
    bundle: Bundle | None = None
    #: What pip installs there, which is going to be uploaded as well.
    wheels: Bundle | None = None

    def candidates(self, jobs: Jobs) -> tuple[Site, ...]:
        options = jobs.options
        known = candidates(jobs.instances, options, self.settings)
        if options.reservation is None:
            return known
        (instance,), (region,) = jobs.instances, options.regions
        reservation = self.reservation(options, instance, region)
        return in_zone_of(reservation, known, num_nodes=options.num_nodes)

    def reservation(self, options: Options, instance: InstanceType, region: str) -> Reservation:
        """Return the capacity block, in which its nodes can run. Raise an error for each fault."""
        assert options.reservation is not None
        return check_reservation(
            self.aws.reservation(region, options.reservation),
            reservation_id=options.reservation,
            instance=instance,
            region=region,
            num_nodes=options.num_nodes,
            now=self.now,
        )

    def block_size(self, options: Options, site: Site) -> tuple[str, float, int]:
        block = self.reservation(options, site.instance, site.region)
        assert block.starts_at is not None and block.ends_at is not None
        ends_at = block.ends_at.astimezone(UTC).isoformat(timespec="seconds")
        return ends_at, (block.ends_at - block.starts_at) / timedelta(hours=1), block.num_instances

    def owner(self) -> str:
        return self.aws.identity().owner

    def setting(self, region: str, name: str) -> str:
        return configured(self.settings, region, name)

    def machine_image(self, region: str) -> MachineImage:
        """Return the AMI that the region's parameter names, with its own root device."""
        name = self.settings.region_settings(region).ami_parameter
        return self.aws.machine_image(region, self.aws.parameter(region, name))

    def image(self, options: Options, region: str) -> str:
        if options.image is None:
            return self.base_image(region)
        self.is_image_visible(options.image, region)
        return options.image

    def base_image(self, region: str) -> str:
        """Return AWS's own image in the region, by the digest that its tag has now."""
        base = self.base
        assert base is not None, "a container image, or a base image to look one up by"
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

    def code(self, region: str) -> CodeBundle | None:
        return self._address(region, self.bundle)

    def requirements(self, options: Options, region: str) -> CodeBundle | None:
        return self._address(region, self.wheels)

    def _address(self, region: str, bundle: Bundle | None) -> CodeBundle | None:
        if bundle is None:
            return None
        prefix = self.settings.region_settings(region).prefix
        return CodeBundle.under(prefix, sha256=bundle.sha256, commit=bundle.commit)


def fitted(jobs: Jobs, lookup: AwsLookup) -> tuple[Jobs, tuple[str, ...]]:
    """Return the jobs as they fit into their capacity block, if they are for one; and what was changed.

    Raises UserError's kinds where the block cannot carry them at all.
    """
    options = jobs.options
    if options.reservation is None:
        return jobs, ()
    (instance,), (region,) = jobs.instances, options.regions
    block = lookup.reservation(options, instance, region)
    longest = max_minutes_in(block, lookup.now)
    if options.max_minutes <= longest:
        return jobs, ()
    change = (
        f"--max-hours is cut from {options.max_minutes} to {longest} min: EC2 begins to end the "
        f"instances of {block.id} then"
    )
    return replace(jobs, options=replace(options, max_minutes=longest)), (change,)


def in_zone_of(block: Reservation, known: Sequence[Site], *, num_nodes: int) -> tuple[Site, ...]:
    """Return the candidates in the block's zone. Raises BadConfiguration if no subnet of it is named."""
    if in_zone := tuple(site for site in known if site.zone == block.zone):
        return in_zone
    first = known[0]
    if first.subnet is None and not has_several_interfaces(first.instance, num_nodes):
        # The default VPC has a subnet in every zone.
        return (replace(first, zone=block.zone),)
    raise BadConfiguration(
        f"{block.id} is in {block.zone}, and no subnet there is named",
        f"write `subnets: {{{block.zone}: subnet-...}}` under `aws: {first.region}:` in the config file, or "
        f"give --subnet {block.zone}=ID",
    )

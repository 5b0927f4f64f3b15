"""Candidates -> sites, by asking AWS what a request names: machine image, network, container image, bucket.

Nothing is changed and nothing uploaded. Every candidate is resolved before the first attempt; one that cannot
be is left out, by name and with the reason.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fastlaunch.ask_once import AskOnce
from fastlaunch.aws import Aws, MachineImage, Subnet
from fastlaunch.backends.ec2_plan import ROOT_GIB
from fastlaunch.backends.ec2_site import Site
from fastlaunch.backends.stored_code import CodeBundle
from fastlaunch.candidates import Candidate
from fastlaunch.cost_ceiling import dearest_rate
from fastlaunch.errors import BadConfiguration, CloudRefused, NoCapacity, NotAuthorised, UserError
from fastlaunch.prices import Catalogue
from fastlaunch.settings import RegionSettings, Settings

if TYPE_CHECKING:
    from fastlaunch.base_image_file import BaseImage


class Bundle(Protocol):
    """What a site says of the code bundle; see `fastlaunch.code_bundle`."""

    @property
    def sha256(self) -> str: ...
    @property
    def commit(self) -> str | None: ...


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """sites: in the order in which they are tried. skipped: the candidates left out, as (name, why)."""

    sites: tuple[Site, ...]
    skipped: tuple[tuple[str, str], ...]


def resolve(
    candidates: Sequence[Candidate],
    *,
    aws: Aws,
    settings: Settings,
    catalogue: Catalogue,
    purchase: str,
    max_price_usd: float | None,
    base: "BaseImage | None",
    bundle: Bundle | None,
    today: datetime.date,
    image: str | None = None,
    ask: AskOnce | None = None,
) -> Resolved:
    """A site for every candidate of which all is known; one request per fact and region.

    base: AWS's own container image, or else `image`: one of the user's, by digest. bundle: the code that is
    going to be uploaded, None if the image holds it. Raises the first candidate's error if no site is left.
    """
    looking = _Looking(aws=aws, ask=ask or AskOnce(), settings=settings, candidates=tuple(candidates))
    sites: list[Site] = []
    skipped: list[tuple[str, UserError]] = []
    for candidate in candidates:
        here = settings.aws.get(candidate.region, RegionSettings())
        try:
            rate = dearest_rate(
                candidate.instance,
                candidate.region,
                purchase=purchase,
                max_price_usd=max_price_usd,
                catalogue=catalogue,
                today=today,
            )
            bucket = configured_bucket(settings, candidate.region)
            profile = configured_profile(settings, candidate.region)
            looking.check_offered(candidate)
            looking.check_network(candidate)
            check_bucket(aws, looking.ask, candidate.region, bucket)
            machine = looking.machine_image(candidate.region)
            container = looking.container_image(candidate.region, base, image)
        except UserError as error:
            skipped.append((candidate.name, error))
            continue
        site = Site(
            instance=candidate.instance,
            region=candidate.region,
            zone=candidate.zone,
            subnet=candidate.subnet,
            security_groups=here.security_groups,
            instance_profile=profile,
            bucket=bucket,
            prefix=here.prefix,
            ami=machine.id,
            root_device=machine.root_device,
            root_gib=max(ROOT_GIB, machine.root_gib),
            image=container,
            code=CodeBundle.under(here.prefix, sha256=bundle.sha256, commit=bundle.commit)
            if bundle
            else None,
            usd_per_hour=rate.usd_per_hour,
            price_as_of=rate.as_of,
            max_price_usd=max_price_usd,
        )
        sites.append(site)
    if not sites:
        raise nowhere(skipped)
    return Resolved(sites=tuple(sites), skipped=tuple((name, error.message) for name, error in skipped))


def nowhere(skipped: Sequence[tuple[str, UserError]]) -> UserError:
    """The error of a job that fits in none of these places: the first one's kind and hint, all reasons."""
    first = skipped[0][1]
    if len({error.message for _, error in skipped}) == 1:
        return first
    told = "; ".join(f"{name}: {error.message}" for name, error in skipped)
    kind = type(first) if isinstance(first, CloudRefused) else UserError
    return kind(f"none of {len(skipped)} places can be used: {told}", first.hint)


def configured_bucket(settings: Settings, region: str) -> str:
    """The bucket of the region. Raises UserError if there is none in the config."""
    return _configured(settings, region, "bucket", "for code, records and checkpoints", "--bucket")


def configured_profile(settings: Settings, region: str) -> str:
    """The instance profile of the region. Raises UserError if there is none in the config."""
    what = "by which the machine may write to the bucket"
    return _configured(settings, region, "instance_profile", what, "--instance-profile")


@dataclass(frozen=True, kw_only=True)
class _Looking:
    """Looks things up. candidates: all of them, so that a region's subnets are one request."""

    aws: Aws
    ask: AskOnce
    settings: Settings
    candidates: tuple[Candidate, ...]

    def check_offered(self, candidate: Candidate) -> None:
        zones = self.ask(self.aws.zones_offering, candidate.region, candidate.instance.name)
        check_offered(candidate, zones)

    def check_network(self, candidate: Candidate) -> None:
        here = self.settings.aws.get(candidate.region, RegionSettings())
        vpcs = group_vpcs(self.aws, self.ask, candidate.region, here.security_groups)
        if candidate.subnet is not None:
            together = [
                one.subnet for one in self.candidates if one.region == candidate.region and one.subnet
            ]
            subnet = find_subnet(self.aws, self.ask, candidate.region, candidate.subnet, together)
            check_subnet(subnet, region=candidate.region, zone=candidate.zone, group_vpcs=vpcs)
        else:
            check_default_vpc(self.aws, self.ask, candidate.region, vpcs)

    def machine_image(self, region: str) -> MachineImage:
        return machine_image(self.aws, self.ask, self.settings, region)

    def container_image(self, region: str, base: "BaseImage | None", image: str | None) -> str:
        if image is not None:
            is_own_image_seen(self.aws, self.ask, image, region)
            return image
        assert base is not None, "a container image, or a base image to look one up by"
        return container_image(self.aws, self.ask, base, region)


def check_offered(candidate: Candidate, zones: Sequence[str]) -> None:
    """Nothing, if the zones that have the type serve the candidate; else NoCapacity."""
    name, region = candidate.instance.name, candidate.region
    if not zones:
        raise NoCapacity(f"{region} has no {name}", "allow another region or instance type")
    if candidate.zone is not None and candidate.zone not in zones:
        raise NoCapacity(
            f"{candidate.zone} has no {name}",
            f"name a subnet in {' or '.join(zones)}: `aws.{region}.subnets` in the config file",
        )


def group_vpcs(aws: Aws, ask: AskOnce, region: str, groups: tuple[str, ...]) -> dict[str, str]:
    """VPC by security group. Raises BadConfiguration if one does not exist, or they are of several VPCs."""
    vpcs = ask(aws.security_group_vpcs, region, groups) if groups else {}
    if len(set(vpcs.values())) > 1:
        told = ", ".join(f"{group} in {vpc}" for group, vpc in sorted(vpcs.items()))
        raise BadConfiguration(
            f"the security groups are of different VPCs: {told}",
            f"name groups of one: `aws.{region}.security_groups` in the config file",
        )
    return vpcs


def find_subnet(aws: Aws, ask: AskOnce, region: str, wanted: str, all_of_region: Sequence[str]) -> Subnet:
    """The subnet, asked for together with the region's others. Raises BadConfiguration without one."""
    together = tuple(sorted({*all_of_region, wanted}))
    try:
        found = ask(aws.subnets, region, together)
    except BadConfiguration:
        # One that does not exist fails the question for all of them.
        found = ask(aws.subnets, region, (wanted,))
    return next(subnet for subnet in found if subnet.id == wanted)


def check_subnet(subnet: Subnet, *, region: str, zone: str | None, group_vpcs: dict[str, str]) -> None:
    """Nothing, if the subnet is in the zone and in the groups' VPC; else BadConfiguration."""
    where = f"`aws.{region}.subnets` in the config file"
    if zone is not None and subnet.zone != zone:
        raise BadConfiguration(
            f"{subnet.id} is in {subnet.zone}, not in {zone}",
            f"write `{subnet.zone}: {subnet.id}`, or another subnet for {zone}: {where}",
        )
    for group, vpc in sorted(group_vpcs.items()):
        if vpc != subnet.vpc:
            raise BadConfiguration(
                f"security group {group} is of {vpc}, and {subnet.id} of {subnet.vpc}",
                f"name a group of {subnet.vpc}, or a subnet of {vpc}: {where}, and `security_groups` there",
            )


def check_default_vpc(aws: Aws, ask: AskOnce, region: str, group_vpcs: dict[str, str]) -> str | None:
    """The default VPC, where a machine without a subnet starts; None if it may not be looked at.

    Raises BadConfiguration if there is none, or a security group is of another.
    """
    give_subnets = (
        f"write `subnets: {{ZONE: ID}}` under `aws: {region}:` in the config file, or give --subnet"
    )
    try:
        default = ask(aws.default_vpc, region)
    except NotAuthorised:
        return None
    if default is None:
        raise BadConfiguration(f"{region} has no default VPC, and no subnet is named", give_subnets)
    for group, vpc in sorted(group_vpcs.items()):
        if vpc != default:
            raise BadConfiguration(
                f"security group {group} is of {vpc}, and without a subnet EC2 takes default {default}",
                f"{give_subnets}, of {vpc}",
            )
    return default


def machine_image(aws: Aws, ask: AskOnce, settings: Settings, region: str) -> MachineImage:
    """The AMI that the region's parameter names, with its own root device."""
    name = settings.aws.get(region, RegionSettings()).ami_parameter
    return ask(aws.machine_image, region, ask(aws.parameter, region, name))


def container_image(aws: Aws, ask: AskOnce, base: "BaseImage", region: str) -> str:
    """AWS's own image in the region, by the digest that its tag has now."""
    from fastlaunch.images import image_uri, registry_account

    account = registry_account(region)
    digest = ask(aws.image_digest, region, account, base.repository, base.tag)
    if digest is None:
        raise BadConfiguration(
            f"the registry of AWS in {region} ({account}) has no image {base.name}",
            "give another one to submit, such as --base-image 2.12",
        )
    return image_uri(base, region, digest)


def is_own_image_seen(aws: Aws, ask: AskOnce, uri: str, region: str) -> bool:
    """Whether the user's image is there: False if it may not be looked at, which the machine's role may.

    Raises BadConfiguration if it is not there, or not where a job in the region can name it.
    """
    from fastlaunch.images import own_image

    image = own_image(uri, region)
    try:
        digest = ask(aws.image_digest, region, image.account, image.repository, image.digest)
    except NotAuthorised:
        return False
    if digest is None:
        raise BadConfiguration(
            f"{region} has no image {uri}",
            f"fastlaunch build --push --region {region} ends with one that it has",
        )
    return True


def check_bucket(aws: Aws, ask: AskOnce, region: str, bucket: str) -> None:
    """Nothing, if the bucket exists and is in the region, as far as that may be known; else BadConfiguration.

    HeadBucket wants s3:ListBucket on all of the bucket; without, writing to it says more.
    """
    try:
        exists = ask(aws.bucket_exists, region, bucket)
    except NotAuthorised:
        return
    if not exists:
        raise BadConfiguration(
            f"there is no bucket {bucket}", f"create it: aws s3 mb s3://{bucket} --region {region}"
        )


def _configured(settings: Settings, region: str, name: str, purpose: str, option: str) -> str:
    value: str | None = getattr(settings.aws.get(region, RegionSettings()), name)
    if value is None:
        what = name.replace("_", " ")
        raise UserError(
            f"no {what} is named for {region}, {purpose}",
            f"write `{name}: NAME` under `aws: {region}:` in the config file, or give {option} NAME; "
            "`fastlaunch doctor --setup` says how to make one",
        )
    return value

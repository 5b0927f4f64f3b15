"""Candidates -> sites, by asking AWS what a request names: machine image, network, container image, bucket.

Nothing is changed and nothing uploaded. Every candidate is resolved before the first attempt; one that cannot
be is left out, by name and with the reason.
"""

from collections.abc import Sequence
from dataclasses import replace

from fastlaunch.aws.reservations import Reservation, reservation
from fastlaunch.backends.ec2.plan import ROOT_GIB
from fastlaunch.backends.placements import CapacityBlock, Site
from fastlaunch.candidates import Candidate, candidates, has_several_interfaces
from fastlaunch.cloud_request import CloudRequest
from fastlaunch.core.errors import BadConfiguration, NoCapacity, UserError
from fastlaunch.job_images import container_image, is_own_image_seen, machine_image
from fastlaunch.offline_sites import placement_group
from fastlaunch.placement.capacity_block import check_reservation, known_block, max_minutes_in
from fastlaunch.placement.config_checks import check_bucket, configured_bucket, configured_profile
from fastlaunch.placement.cost_ceiling import HourlyRate
from fastlaunch.placement.network import check_default_vpc, check_subnet, find_subnet, group_vpcs
from fastlaunch.resolved import Inquiry, Resolved, resolved


def resolve(inquiry: Inquiry) -> Resolved:
    """A site on EC2 for every candidate of which all is known; one request per fact and region.

    Raises the first candidate's error if no site is left.
    """
    request = inquiry.request
    found = candidates(request.instances, request.regions, inquiry.settings)
    block = None
    if request.reservation is not None:
        block = find_block(inquiry)
        found = in_zone_of(block, found, num_nodes=request.num_nodes)
    sites: list[Site] = []
    skipped: list[tuple[str, UserError]] = []
    for candidate in found:
        try:
            sites.append(_site(inquiry, candidate, found, block))
        except UserError as error:
            skipped.append((candidate.name, error))
    return resolved(sites, skipped)


def fitted(inquiry: Inquiry) -> tuple[CloudRequest, tuple[str, ...]]:
    """The request as it fits into its capacity block, if it is for one; and what of it was changed.

    Raises UserError's kinds where the block cannot carry the job at all.
    """
    request = inquiry.request
    if request.reservation is None:
        return request, ()
    block = find_block(inquiry)
    longest = max_minutes_in(block, inquiry.now)
    if request.max_minutes <= longest:
        return request, ()
    told = (
        f"--max-hours is cut from {request.max_minutes} to {longest} min: EC2 begins to end the instances of "
        f"{block.id} then"
    )
    return replace(request, max_minutes=longest), (told,)


def find_block(inquiry: Inquiry) -> Reservation:
    """The request's capacity block, in which its nodes can run; else an error for each fault."""
    request = inquiry.request
    assert request.reservation is not None
    (instance,), (region,) = request.instances, request.regions
    return check_reservation(
        inquiry.ask(reservation, inquiry.aws, region, request.reservation),
        wanted=request.reservation,
        instance=instance,
        region=region,
        num_nodes=request.num_nodes,
        now=inquiry.now,
    )


def in_zone_of(block: Reservation, found: Sequence[Candidate], *, num_nodes: int) -> tuple[Candidate, ...]:
    """The candidates in the block's zone. Raises BadConfiguration if no subnet of it is named."""
    here = tuple(one for one in found if one.zone == block.zone)
    if here:
        return here
    (first, *_) = found
    if first.subnet is None and not has_several_interfaces(first.instance, num_nodes):
        # The default VPC has a subnet in every zone.
        return (replace(first, zone=block.zone),)
    raise BadConfiguration(
        f"{block.id} is in {block.zone}, and no subnet there is named",
        f"write `subnets: {{{block.zone}: subnet-...}}` under `aws: {first.region}:` in the config file, or "
        f"give --subnet {block.zone}=ID",
    )


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


def _site(
    inquiry: Inquiry, candidate: Candidate, among: Sequence[Candidate], found: Reservation | None
) -> Site:
    """among: all candidates, so that a region's subnets are one request. found: the block's reservation."""
    aws, ask, settings, region = inquiry.aws, inquiry.ask, inquiry.settings, candidate.region
    here = inquiry.here(region)
    block = _block(inquiry, candidate, found) if found else None
    rate = _rate(inquiry, candidate, block)
    bucket = configured_bucket(settings, region)
    profile = configured_profile(settings, region)
    check_offered(candidate, ask(aws.zones_offering, region, candidate.instance.name))
    _check_network(inquiry, candidate, among)
    check_bucket(aws, ask, region, bucket)
    machine = machine_image(aws, ask, settings, region)
    return Site(
        instance=candidate.instance,
        region=region,
        zone=candidate.zone,
        subnet=candidate.subnet,
        security_groups=here.security_groups,
        instance_profile=profile,
        bucket=bucket,
        prefix=here.prefix,
        ami=machine.id,
        root_device=machine.root_device,
        root_gib=max(ROOT_GIB, machine.root_gib),
        image=image_in(inquiry, region),
        code=inquiry.code(region),
        usd_per_hour=rate.usd_per_hour,
        price_as_of=rate.as_of,
        max_price_usd=inquiry.request.max_price_usd,
        placement_group=placement_group(here, candidate.zone, inquiry.request),
        block=block,
    )


def image_in(inquiry: Inquiry, region: str) -> str:
    """The container image by digest, as the region has it. Raises UserError's kinds if it does not."""
    own = inquiry.request.image
    if own is not None:
        is_own_image_seen(inquiry.aws, inquiry.ask, own, region)
        return own
    assert inquiry.base is not None, "a container image, or a base image to look one up by"
    return container_image(inquiry.aws, inquiry.ask, inquiry.base, region)


def _block(inquiry: Inquiry, candidate: Candidate, found: Reservation) -> CapacityBlock:
    return known_block(
        found,
        instance=candidate.instance,
        region=candidate.region,
        fee_usd=inquiry.request.block_fee_usd,
        catalogue=inquiry.catalogue,
        today=inquiry.now.date(),
    )


def _rate(inquiry: Inquiry, candidate: Candidate, block: CapacityBlock | None) -> HourlyRate:
    if block is not None:
        return HourlyRate(usd_per_hour=block.usd_per_hour, as_of=inquiry.now.date().isoformat())
    return inquiry.rate(candidate.instance, candidate.region)


def _check_network(inquiry: Inquiry, candidate: Candidate, among: Sequence[Candidate]) -> None:
    aws, ask, region = inquiry.aws, inquiry.ask, candidate.region
    vpcs = group_vpcs(aws, ask, region, inquiry.here(region).security_groups)
    if candidate.subnet is not None:
        together = [one.subnet for one in among if one.region == region and one.subnet]
        subnet = find_subnet(aws, ask, region, candidate.subnet, together)
        check_subnet(subnet, region=region, zone=candidate.zone, group_vpcs=vpcs)
        return
    if has_several_interfaces(candidate.instance, inquiry.request.num_nodes):
        raise BadConfiguration(
            f"{candidate.instance.name} has several network interfaces on {inquiry.request.num_nodes} nodes, "
            "which get no public address, and no subnet is named",
            f"write `subnets: {{{region}a: subnet-...}}` under `aws: {region}:` in the config file, of "
            "subnets with a NAT or endpoints for S3 and ECR, or give --subnet ZONE=ID",
        )
    check_default_vpc(aws, ask, region, vpcs)

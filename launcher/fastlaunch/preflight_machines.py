"""Checks of what machines on EC2 need: image, profile, instance type, quota, spot price, capacity block."""

from functools import partial

from fastlaunch.aws.reservations import reservation
from fastlaunch.candidates import candidates
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.core.errors import CloudRefused, NoCapacity, NotAuthorised, UserError
from fastlaunch.job_images import machine_image
from fastlaunch.job_roles import SCHEDULER, check_role
from fastlaunch.node_rights import node_lacks
from fastlaunch.placement.capacity_block import check_reservation, minutes_left
from fastlaunch.placement.check import Result, Told
from fastlaunch.placement.config_checks import making
from fastlaunch.placement.quota_checks import quota_use
from fastlaunch.placement.resolve import check_offered
from fastlaunch.preflight_network import network_checks
from fastlaunch.preflight_region import bucket, container
from fastlaunch.preflight_wanted import Looking, ToMakeAll
from fastlaunch.resolved import nowhere


def machine_checks(look: Looking, region: str) -> ToMakeAll:
    """Those of a region, in the order in which a job needs them."""
    yield {"name": "machine image"}, partial(_image, look, region)
    yield {"name": "container image"}, partial(container, look, region)
    yield {"name": "instance profile"}, partial(_profile, look, region)
    if look.wanted.is_unfollowed:
        yield {"name": "scheduler role"}, partial(_scheduler_role, look, region)
    yield {"name": "bucket"}, partial(bucket, look, region)
    yield from network_checks(look, region)
    for one in look.wanted.instances:
        yield {"name": "offered", "instance": one.name}, partial(_offered, look, one, region)
        if look.wanted.purchase == "capacity-block":
            # No quota: a block's instances were granted when it was bought.
            yield {"name": "capacity block", "instance": one.name}, partial(_block, look, one, region)
            continue
        yield {"name": "quota", "instance": one.name}, partial(_quota, look, one, region)
        if look.wanted.purchase == "spot":
            yield {"name": "spot price", "instance": one.name}, partial(_spot_price, look, one, region)


def _image(look: Looking, region: str) -> str:
    image = machine_image(look.aws, look.ask, look.settings, region)
    return f"{image.id}, root device {image.root_device} of {image.root_gib} GiB"


def _profile(look: Looking, region: str) -> str | Told:
    profile = look.here(region).instance_profile
    if profile is None:
        return Told(Result.NOT_CHECKED, "none is named")
    try:
        problem = look.ask(look.aws.may_pass_role, profile)
    except NotAuthorised as error:
        return Told(Result.NOT_CHECKED, f"whether {profile} may be passed: {error.message}", error.hint)
    if problem is not None:
        raise NotAuthorised(
            problem,
            "`fastlaunch doctor --setup` has the role, the profile, and the policy that lets you pass it",
        )
    told = f"{profile} is there, and IAM says that its role may be passed"
    lacking = node_lacks(look.aws, look.ask, look.here(region))
    if not lacking:
        return told
    return Told(
        Result.WARNING,
        f"{told}; the role's own policies do not give {' nor '.join(lacking)}",
        "`fastlaunch doctor --setup` has the role's policy; a machine that cannot upload ends itself",
    )


def _scheduler_role(look: Looking, region: str) -> str | Told:
    """Never an error: without it the machine's own timer protects, and nothing else."""
    arn = look.here(region).scheduler_role
    alone = "of a detached job only its machines' own timers would end it"
    if arn is None:
        write = f"write `scheduler_role: ARN` under `aws: {region}:` in the config file"
        hint = f"{write}; this makes one: {making(region)}"
        return Told(Result.NOT_CHECKED, f"none is named: {alone}", hint)
    try:
        check_role(look.aws, look.ask, region, arn, SCHEDULER)
        problem = look.ask(look.aws.may_pass, arn, SCHEDULER)
    except NotAuthorised as error:
        return Told(Result.NOT_CHECKED, f"whether {arn} may be passed: {error.message}", error.hint)
    except CloudRefused as error:
        return Told(Result.WARNING, f"{error.message}: {alone}", error.hint)
    if problem is not None:
        hint = "`fastlaunch iam print` has the policy that lets you pass it"
        return Told(Result.WARNING, f"{problem}: {alone}", hint)
    return f"{arn} ends the machines of detached jobs"


def _offered(look: Looking, instance: InstanceType, region: str) -> str | Told:
    zones = look.ask(look.aws.zones_offering, region, instance.name)
    refused: list[tuple[str, UserError]] = []
    where = candidates([instance], [region], look.settings)
    for candidate in where:
        try:
            check_offered(candidate, zones)
        except NoCapacity as error:
            refused.append((candidate.name, error))
    if len(refused) == len(where):
        raise nowhere(refused)
    told = f"{instance.name} is in {', '.join(zones)}"
    if refused:
        left = ", ".join(candidate.zone or "" for candidate in where if candidate.zone not in zones)
        return Told(Result.WARNING, f"{told}; {left} will be left out")
    return told


def _block(look: Looking, instance: InstanceType, region: str) -> str:
    wanted = look.wanted
    assert wanted.reservation is not None
    found = check_reservation(
        look.ask(reservation, look.aws, region, wanted.reservation),
        wanted=wanted.reservation,
        instance=instance,
        region=region,
        num_nodes=wanted.num_nodes,
        now=look.now,
    )
    left = minutes_left(found, look.now)
    return (
        f"{found.id} in {found.zone}: {found.num_free} of {found.num_instances} instances free, "
        f"{left // 60} h {left % 60} min left"
    )


def _quota(look: Looking, instance: InstanceType, region: str) -> str | Told:
    wanted = look.wanted
    use = quota_use(
        instance,
        region=region,
        purchase=wanted.purchase,
        num_nodes=wanted.num_nodes,
        aws=look.aws,
        ask=look.ask,
    )
    if use is None:
        return Told(
            Result.NOT_CHECKED,
            f"which quota {wanted.purchase} {instance.name} counts against is not published",
            f"look for it under Service Quotas, Amazon EC2, in {region}",
        )
    if use.fits is False:
        raise use.refusal
    return str(use) if use.fits else Told(Result.NOT_CHECKED, str(use), f"look at it: {use.page}")


def _spot_price(look: Looking, instance: InstanceType, region: str) -> str | Told:
    newest = look.ask(look.aws.spot_price_usd, region, instance.name, None)
    if newest is None:
        return Told(Result.NOT_CHECKED, f"EC2 tells no spot price of {instance.name} in {region}")
    usd, zone = newest
    told = f"${usd:g}/h in {zone}, the cheapest zone now"
    limit = look.wanted.max_price_usd
    if limit is not None and usd > limit:
        return Told(
            Result.WARNING,
            f"{told}, above --max-price {limit:g}: EC2 would not start it",
            f"give --max-price {usd * 1.2:.2f}, or wait",
        )
    return told

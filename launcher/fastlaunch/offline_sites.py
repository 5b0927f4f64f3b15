"""Where a job would run, as far as settings, options and the price list tell it. Nothing is asked of AWS."""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastlaunch.backends.ec2_plan import ROOT_GIB, plan_ec2
from fastlaunch.backends.ec2_rules import broken_rules
from fastlaunch.backends.ec2_site import Site
from fastlaunch.backends.stored_code import CodeBundle
from fastlaunch.candidates import Candidate, candidates
from fastlaunch.cloud_request import CloudRequest
from fastlaunch.cost_ceiling import HourlyRate, dearest_rate
from fastlaunch.errors import UserError
from fastlaunch.job import JobSpec
from fastlaunch.prices import Catalogue
from fastlaunch.settings import RegionSettings, Settings


@dataclass(frozen=True, kw_only=True)
class OfflineSites:
    """sites: in the order in which they would be tried. skipped: the others, as (name, why)."""

    sites: tuple[Site, ...]
    skipped: tuple[tuple[str, str], ...]


def offline_sites(
    request: CloudRequest,
    *,
    settings: Settings,
    catalogue: Catalogue,
    today: datetime.date,
    image_at: Callable[[str], str],
    commit: str | None,
) -> OfflineSites:
    """Every candidate whose price is known. Raises UserError if there is none.

    image_at: the container image in a region, by digest or by the placeholder of one.
    """
    sites: list[Site] = []
    skipped: list[tuple[str, UserError]] = []
    for candidate in candidates(request.instances, request.regions, settings):
        try:
            rate = dearest_rate(
                candidate.instance,
                candidate.region,
                purchase=request.purchase,
                max_price_usd=request.max_price_usd,
                catalogue=catalogue,
                today=today,
            )
            image = image_at(candidate.region)
        except UserError as error:
            skipped.append((candidate.name, error))
            continue
        sites.append(
            offline_site(candidate, request=request, settings=settings, rate=rate, image=image, commit=commit)
        )
    if not sites:
        raise skipped[0][1]
    return OfflineSites(sites=tuple(sites), skipped=tuple((name, error.message) for name, error in skipped))


def check_plan(site: Site, jobs: Sequence[JobSpec], *, max_minutes: int) -> None:
    """Nothing, if EC2 would take the request for these jobs, on any attempt; else UserError."""
    # Ids as long as real ones, which need not be of the same second: user data has a limit, and many runs
    # reach it, the sooner the less their ids share.
    by_id = {f"00000000-{number:06}-0000": job for number, job in enumerate(jobs)}
    plan = plan_ec2(by_id, attempt=99, site=site, max_minutes=max_minutes)
    if problems := broken_rules(plan, root_device=site.root_device):
        raise UserError(f"EC2 would refuse the request at {site.name}: {'; '.join(problems)}")


def offline_site(
    candidate: Candidate,
    *,
    request: CloudRequest,
    settings: Settings,
    rate: HourlyRate,
    image: str,
    commit: str | None = None,
) -> Site:
    """The candidate with what settings and options tell of it, and a placeholder for all else.

    rate: the most that an hour costs there. commit: of the training code, None if it is not known.
    """
    here = settings.aws.get(candidate.region, RegionSettings())
    code = CodeBundle.under(here.prefix, sha256="<code-sha256>", commit=commit)
    return Site(
        instance=candidate.instance,
        region=candidate.region,
        zone=candidate.zone,
        subnet=candidate.subnet,
        security_groups=here.security_groups,
        instance_profile=here.instance_profile or "<instance-profile>",
        bucket=here.bucket or "<bucket>",
        prefix=here.prefix,
        ami="<ami-id>",
        root_device="<root-device>",
        root_gib=ROOT_GIB,
        image=image,
        code=None if request.image else code,
        usd_per_hour=rate.usd_per_hour,
        price_as_of=rate.as_of,
        max_price_usd=request.max_price_usd,
    )

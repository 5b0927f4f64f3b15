"""Jobs -> `Placement`: where they can run, offline or as AWS says; and, once agreed to, their code there.

Looking up changes nothing at AWS but a probe, which shows that the bucket can be written.
"""

import datetime
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fastlaunch.catalog.container_images import BaseImage, shipped_base_images, training_base
from fastlaunch.catalog.prices import Catalogue, check_age
from fastlaunch.core.activity import activity
from fastlaunch.core.settings import Settings
from fastlaunch.core.units import parse_duration_s, utc_day
from fastlaunch.jobs.build import Jobs
from fastlaunch.jobs.options import Options
from fastlaunch.jobs.variants import check_base
from fastlaunch.placement.cost_ceiling import check_budget
from fastlaunch.placement.resolve import OfflineLookup, Placement, check_plan, resolve

if TYPE_CHECKING:
    from fastlaunch.aws.client import Aws
    from fastlaunch.jobs.code_bundle import Bundle
    from fastlaunch.jobs.wheels import Pin
    from fastlaunch.jobs.working_directory import WorkingDirectory
    from fastlaunch.placement.aws_lookup import AwsLookup


def place_offline(
    jobs: Jobs,
    *,
    settings: Settings,
    catalogue: Catalogue,
    now: datetime.datetime,
    commit: str | None,
    directory: "WorkingDirectory | None" = None,
) -> Placement:
    """Return where the jobs may run, with names in place of what only AWS can say.

    commit: of the training code, or a name in its place. Raises UserError for what AWS would refuse.
    """
    today, base = utc_day(now), _base_image(jobs.options, utc_day(now))
    if base:
        accelerators = [catalogue.accelerators[instance.accelerator] for instance in jobs.instances]
        alike = [image for image in shipped_base_images().images if image.flavour == base.flavour]
        check_base(jobs.variants, base, alike, accelerators)
    lookup = OfflineLookup(
        settings=settings,
        catalogue=catalogue,
        now=now,
        base=base,
        # The code of a script has a commit of its own.
        commit=None if jobs.scripts else commit,
        is_script=bool(jobs.scripts),
    )
    placement = replace(resolve(jobs, lookup), directory=directory)
    _check_plans(placement)
    if settings.max_price_age is not None:
        max_age = datetime.timedelta(seconds=parse_duration_s(settings.max_price_age))
        check_age(placement.price_dates, today, max_age)
    return placement


def place_on_aws(
    jobs: Jobs,
    *,
    aws: "Aws",
    settings: Settings,
    catalogue: Catalogue,
    now: datetime.datetime,
    commit: str | None,
    max_cost_usd: float | None = None,
    directory: "WorkingDirectory | None" = None,
    pins: "Sequence[Pin] | None" = None,
) -> Placement:
    """Look up at AWS where the jobs can run.

    directory: what travels of a script's. pins: wheels of the bundle instead of the shipped ones.

    Raises UserError and CloudRefused's kinds, also where no candidate is left.
    """
    from fastlaunch.aws.client import cached
    from fastlaunch.jobs.code_bundle import make_bundle, script_bundle
    from fastlaunch.jobs.requirements import requirements_bundle
    from fastlaunch.jobs.wheels import wheel_folder
    from fastlaunch.placement.aws_lookup import AwsLookup, fitted

    with activity("looking up where this can run") as shown:
        options, lookup_aws = jobs.options, cached(aws)
        # First: without credentials nothing else can be known, and fetching wheels takes a while.
        lookup_aws.identity()
        base = _base_image(options, utc_day(now))
        shown.update("the code")
        bundle = None
        if directory is not None:
            bundle = script_bundle(directory)
        elif base is not None:
            bundle = make_bundle(
                base, user_file=jobs.user_file, commit=commit, wheels=wheel_folder(settings), pins=pins
            )
        wheels = None
        if options.requirements is not None:
            shown.update("what the requirements are")
            resolved_for = None if options.requirements_from_index else base
            wheels = requirements_bundle(Path(options.requirements), resolved_for)
        lookup = AwsLookup(
            settings=settings,
            catalogue=catalogue,
            now=now,
            base=base,
            aws=lookup_aws,
            bundle=bundle,
            wheels=wheels,
        )
        jobs, changes = fitted(jobs, lookup)
        shown.update("quota, image, network, bucket and price")
        placement = checked_sites(jobs, lookup, bundles=tuple(filter(None, (bundle, wheels))))
        placement = replace(placement, directory=directory, changes=changes, bundle=bundle, wheels=wheels)
        check_budget(placement.ceiling, max_cost_usd)
        _check_plans(placement)
        return placement


def checked_sites(jobs: Jobs, lookup: "AwsLookup", *, bundles: "tuple[Bundle, ...]" = ()) -> Placement:
    """Return the sites at which no check fails, with all that a request there names; and the checks.

    bundles: what is uploaded for it. Raises the first error, with every reason, if no site is left.
    """
    from fastlaunch.placement.checks import CheckContext, checks, usable

    candidates = lookup.candidates(jobs)
    job = CheckContext(lookup=lookup, options=jobs.options, instances=jobs.instances, bundles=bundles)
    results = checks(job)
    sites, refused = usable(candidates, results)
    return replace(resolve(jobs, lookup, sites, refused), checks=tuple(results))


def upload_code(placement: Placement, aws: "Aws") -> None:
    """Store the bundles in the bucket of every region where the job may run; nothing where they are there."""
    from fastlaunch.jobs.code_bundle import upload_bundle

    buckets = dict.fromkeys((site.region, site.bucket, site.prefix) for site in placement.sites)
    for bundle in filter(None, (placement.bundle, placement.wheels)):
        with activity("uploading the code", total=len(buckets)) as shown:
            for region, bucket, prefix in shown.over(buckets, lambda place: f"s3://{place[1]}"):
                upload_bundle(aws, region, bucket, prefix, bundle)


def _base_image(options: Options, today: datetime.date) -> BaseImage | None:
    """Return AWS's container image that the jobs start from; None if the options name another."""
    return None if options.image else training_base(options.base_image, today=today)


def _check_plans(placement: Placement) -> None:
    """Raise UserError if AWS would refuse the jobs at one of the sites."""
    for site in placement.sites:
        check_plan(site, placement.jobs_at(site), max_minutes=placement.options.max_minutes)

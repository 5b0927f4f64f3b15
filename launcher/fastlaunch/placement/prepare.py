"""A checked request for AWS -> all that its plans name, looked up; and, once agreed to, its code there.

Looking up changes nothing at AWS but a probe, which shows that the bucket can be written.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fastlaunch.aws.client import Aws, cached
from fastlaunch.catalog.container_images import training_base
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.activity import activity
from fastlaunch.core.settings import Settings
from fastlaunch.core.units import utc_day
from fastlaunch.jobs.build import CloudRequest
from fastlaunch.jobs.code_bundle import Bundle, make_bundle, script_bundle, upload_bundle
from fastlaunch.jobs.requirements import requirements_bundle
from fastlaunch.jobs.wheels import wheel_folder
from fastlaunch.placement.aws_lookup import AwsLookup, fitted
from fastlaunch.placement.check import Check
from fastlaunch.placement.checks import CheckContext, checks, usable
from fastlaunch.placement.cost_ceiling import check_budget, cost_ceiling
from fastlaunch.placement.resolve import Resolution, resolve

if TYPE_CHECKING:
    from fastlaunch.backends.site import Site
    from fastlaunch.jobs.wheels import Pin
    from fastlaunch.jobs.working_directory import WorkingDirectory


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A request that can be carried out, and how."""

    #: As it will be carried out, and what was changed of it, in words.
    request: CloudRequest
    changes: tuple[str, ...]
    #: In the order in which they are tried.
    placements: "tuple[Site, ...]"
    #: The candidates that cannot be used, as (name, reason).
    skipped: tuple[tuple[str, str], ...]
    checks: tuple[Check, ...]
    #: The code to upload before a machine needs it; None if the image holds it.
    bundle: Bundle | None
    #: What pip installs there, to upload as well; None for nothing.
    wheels: Bundle | None = None


def prepare(
    request: CloudRequest,
    *,
    aws: Aws,
    settings: Settings,
    catalogue: Catalogue,
    now: datetime.datetime,
    commit: str | None,
    max_cost_usd: float | None = None,
    directory: "WorkingDirectory | None" = None,
    pins: "Sequence[Pin] | None" = None,
) -> Prepared:
    """Look up where the request can be carried out.

    directory: what travels of a script's. pins: wheels of the bundle instead of the shipped ones.

    Raises UserError and CloudRefused's kinds, also where no candidate is left.
    """
    with activity("looking up where this can run") as shown:
        today = utc_day(now)
        lookup_aws = cached(aws)
        # First: without credentials nothing else can be known, and fetching wheels takes a while.
        lookup_aws.identity()
        base = None if request.options.image else training_base(request.options.base_image, today=today)
        shown.update("the code")
        bundle = None
        if directory is not None:
            bundle = script_bundle(directory)
        elif base is not None:
            bundle = make_bundle(
                base, user_file=request.user_file, commit=commit, wheels=wheel_folder(settings), pins=pins
            )
        wheels = None
        if request.options.requirements is not None:
            shown.update("what the requirements are")
            resolved_for = None if request.options.requirements_from_index else base
            wheels = requirements_bundle(Path(request.options.requirements), resolved_for)
        lookup = AwsLookup(
            settings=settings,
            catalogue=catalogue,
            now=now,
            base=base,
            aws=lookup_aws,
            bundle=bundle,
            wheels=wheels,
        )
        request, changes = fitted(request, lookup)
        shown.update("quota, image, network, bucket and price")
        resolution, results = place(request, lookup, bundles=tuple(filter(None, (bundle, wheels))))
        options = request.options
        ceiling = cost_ceiling(
            resolution.placements, num_nodes=options.num_nodes, max_minutes=options.max_minutes
        )
        check_budget(ceiling, max_cost_usd)
        return Prepared(
            request=request,
            changes=changes,
            placements=resolution.placements,
            skipped=resolution.skipped,
            checks=results,
            bundle=bundle,
            wheels=wheels,
        )


def place(
    request: CloudRequest, lookup: AwsLookup, *, bundles: tuple[Bundle, ...] = ()
) -> tuple[Resolution, tuple[Check, ...]]:
    """Return the sites at which no check fails, with all that a request there names; and the checks.

    bundles: what is uploaded for it. Raises the first error, with every reason, if no site is left.
    """
    candidates = lookup.candidates(request)
    job = CheckContext(lookup=lookup, options=request.options, instances=request.instances, bundles=bundles)
    results = checks(job)
    left = usable(candidates, results)
    resolution = resolve(request, lookup, left.placements)
    return replace(resolution, skipped=(*left.skipped, *resolution.skipped)), tuple(results)


def upload_code(prepared: Prepared, aws: Aws) -> None:
    """Store the bundles in the bucket of every region where the job may run; nothing where they are there."""
    buckets = dict.fromkeys((one.region, one.bucket, one.prefix) for one in prepared.placements)
    for bundle in filter(None, (prepared.bundle, prepared.wheels)):
        with activity("uploading the code", total=len(buckets)) as shown:
            for region, bucket, prefix in shown.over(buckets, lambda place: f"s3://{place[1]}"):
                upload_bundle(aws, region, bucket, prefix, bundle)

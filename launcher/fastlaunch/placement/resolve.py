"""Jobs -> `Placement`: the sites that can carry them out, offline or as AWS says; and the plan at a site.

Looking up changes nothing at AWS but a probe, which shows that the bucket can be written. The code is
uploaded once the user has agreed.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fastlaunch.backends.ec2.plan import plan_ec2
from fastlaunch.backends.sagemaker.plan import plan_sagemaker
from fastlaunch.backends.site import Site
from fastlaunch.backends.validate import request_problems
from fastlaunch.catalog.container_images import BaseImage, shipped_base_images, training_base
from fastlaunch.catalog.prices import Catalogue, check_age
from fastlaunch.core.activity import activity
from fastlaunch.core.errors import UserError
from fastlaunch.core.plan import Plan
from fastlaunch.core.settings import Settings
from fastlaunch.core.units import parse_duration_s, utc_day, utc_minute
from fastlaunch.jobs.build import Jobs
from fastlaunch.jobs.code_bundle import Bundle
from fastlaunch.jobs.data_sources import DataFile
from fastlaunch.jobs.job import Job
from fastlaunch.jobs.options import SERVICES, Options
from fastlaunch.jobs.requirements import read_requirements
from fastlaunch.jobs.variants import check_base
from fastlaunch.placement.capacity_block import TERMINATION_MINUTES, minutes_left, starts_at
from fastlaunch.placement.check import Check, CheckContext, nowhere
from fastlaunch.placement.cost_ceiling import CostCeiling, check_budget, cost_ceiling
from fastlaunch.placement.lookup import Lookup

if TYPE_CHECKING:
    from fastlaunch.aws.client import Aws
    from fastlaunch.jobs.code_bundle import Pin
    from fastlaunch.jobs.working_directory import WorkingDirectory


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
    checks: tuple[Check, ...] = ()
    #: What is uploaded before a machine needs it: the code, unless the image holds it, and what pip installs.
    bundle: Bundle | None = None
    wheels: Bundle | None = None

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
    options, base = jobs.options, _base_image(jobs.options, utc_day(now))
    if base:
        accelerators = [catalogue.accelerators[instance.accelerator] for instance in jobs.instances]
        alike = [image for image in shipped_base_images().images if image.flavour == base.flavour]
        check_base(jobs.variants, base, alike, accelerators)
    if options.requirements is not None:
        # As far as that is seen without pip.
        read_requirements(Path(options.requirements), from_index=options.requirements_from_index)
    # A script's files travel with an image of the user's own, too. Its code has a commit of its own.
    code = Bundle(data=b"", sha256="<code-sha256>", commit=None if jobs.scripts else commit)
    wheels = Bundle(data=b"", sha256="<requirements-sha256>")
    lookup = Lookup(
        settings=settings,
        catalogue=catalogue,
        now=now,
        base=base,
        bundle=code if base or jobs.scripts else None,
        wheels=wheels if options.requirements is not None else None,
        data_file=jobs.data_file,
    )
    placement = replace(resolve(jobs, lookup), directory=directory)
    _check_plans(placement)
    if settings.max_price_age is not None:
        max_age = datetime.timedelta(seconds=parse_duration_s(settings.max_price_age))
        check_age(placement.price_dates, lookup.today, max_age)
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

    directory: what travels of a script's. pins: wheels of the bundle instead of the shipped ones. Raises
    UserError and CloudRefused's kinds, also where no candidate is left.
    """
    from fastlaunch.aws.client import cached
    from fastlaunch.jobs.code_bundle import make_bundle, script_bundle, wheel_folder
    from fastlaunch.jobs.requirements import requirements_bundle

    with activity("looking up where this can run") as shown:
        options, lookup_aws = jobs.options, cached(aws)
        # First: without credentials nothing else can be known, and fetching wheels takes a while.
        lookup_aws.identity()
        base = _base_image(options, utc_day(now))
        shown.update("the code")
        bundle = wheels = None
        if directory is not None:
            bundle = script_bundle(directory)
        elif base is not None:
            bundle = make_bundle(
                base, user_file=jobs.user_file, commit=commit, wheels=wheel_folder(settings), pins=pins
            )
        if options.requirements is not None:
            shown.update("what the requirements are")
            resolved_for = None if options.requirements_from_index else base
            wheels = requirements_bundle(Path(options.requirements), resolved_for)
        lookup = Lookup(
            settings=settings,
            catalogue=catalogue,
            now=now,
            base=base,
            aws=lookup_aws,
            bundle=bundle,
            wheels=wheels,
            data_file=jobs.data_file,
        )
        jobs, changes = fitted(jobs, lookup)
        shown.update("quota, image, network, bucket and price")
        placement = replace(checked_sites(jobs, lookup), directory=directory, changes=changes)
        check_budget(placement.ceiling, max_cost_usd)
        _check_plans(placement)
        return placement


def fitted(jobs: Jobs, lookup: Lookup) -> tuple[Jobs, tuple[str, ...]]:
    """Return the jobs as they fit into their capacity block, if they are for one; what was changed, and when.

    Raises UserError's kinds where the block cannot carry them at all.
    """
    options = jobs.options
    if options.reservation is None:
        return jobs, ()
    (instance,), (region,) = jobs.instances, options.regions
    block = lookup.reservation(options, instance, region)
    changes = []
    if begins_at := starts_at(block, lookup.now):
        how = (
            "a schedule in the account starts it then, and nothing has to run here. Until a command looks "
            "after that, only its own timer and the end of the block end it"
            if options.detach
            else "this command waits until then (--detach leaves that to a schedule in the account)"
        )
        changes.append(f"{block.id} begins at {utc_minute(begins_at)}: {how}")
    longest = minutes_left(block, lookup.now) - TERMINATION_MINUTES
    if options.max_minutes > longest:
        changes.append(
            f"--max-hours is cut from {options.max_minutes} to {longest} min: EC2 begins to end the "
            f"instances of {block.id} then"
        )
        jobs = replace(jobs, options=replace(options, max_minutes=longest))
    return jobs, tuple(changes)


def checked_sites(jobs: Jobs, lookup: Lookup) -> Placement:
    """Return the sites at which no check fails, with all that a request there names; and the checks.

    Raises the first error, with every reason, if no site is left.
    """
    from fastlaunch.placement.checks import checks

    candidates = lookup.candidates(jobs)
    travels: tuple[Bundle | DataFile | None, ...] = (lookup.bundle, lookup.wheels, lookup.data_file)
    bundles = tuple(bundle for bundle in travels if bundle is not None)
    job = CheckContext(lookup=lookup, options=jobs.options, instances=jobs.instances, bundles=bundles)
    results = tuple(checks(job))
    sites, refused = usable(candidates, results)
    placement = resolve(jobs, lookup, sites, refused)
    return replace(placement, checks=results, bundle=lookup.bundle, wheels=lookup.wheels)


def usable(sites: Sequence[Site], results: Sequence[Check]) -> tuple[list[Site], list[tuple[str, UserError]]]:
    """Return the sites that no failed check is about, and the names of the others with why.

    Raises the first error of the checks if no site is left.
    """
    errors = [next(filter(None, (check.error_at(site) for check in results)), None) for site in sites]
    left = [site for site, error in zip(sites, errors, strict=True) if error is None]
    skipped = [(site.name, error) for site, error in zip(sites, errors, strict=True) if error]
    if not left:
        raise nowhere(skipped)
    return left, skipped


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
            sites.append(lookup.site(jobs.options, candidate))
        except UserError as error:
            skipped.append((candidate.name, error))
    if not sites:
        raise nowhere(skipped)
    reasons = tuple((name, error.message) for name, error in skipped)
    return Placement(jobs=jobs, sites=tuple(sites), skipped=reasons)


def upload_code(placement: Placement, aws: "Aws") -> None:
    """Store code and data in the bucket of every region where the job may run, where they are not there."""
    from fastlaunch.jobs.code_bundle import upload_bundle

    buckets = dict.fromkeys((site.region, site.bucket, site.prefix) for site in placement.sites)
    travels: tuple[Bundle | DataFile | None, ...] = (
        placement.bundle,
        placement.wheels,
        placement.jobs.data_file,
    )
    for bundle in travels:
        if bundle is None:
            continue
        what = "code" if isinstance(bundle, Bundle) else "data"
        with activity(f"uploading the {what}", total=len(buckets)) as shown:
            for region, bucket, prefix in shown.over(buckets, lambda place: f"s3://{place[1]}"):
                upload_bundle(aws, region, bucket, prefix, bundle)


def plan_at(
    jobs: dict[str, Job], site: Site, *, attempt: int, max_minutes: int, root: str | None = None
) -> Plan:
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


def _base_image(options: Options, today: datetime.date) -> BaseImage | None:
    """Return AWS's container image that the jobs start from; None if the options name another."""
    return None if options.image else training_base(options.base_image, today=today)


def _check_plans(placement: Placement) -> None:
    """Raise UserError if AWS would refuse the jobs at one of the sites."""
    for site in placement.sites:
        check_plan(site, placement.jobs_at(site), max_minutes=placement.options.max_minutes)

"""`submit` with instances: a request for AWS is resolved, planned, confirmed and submitted."""

import datetime
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fastlaunch.api.announcement import expected_text, in_words, needs_text, spot_text, travels_text
from fastlaunch.api.context import AppContext, check_add_to, open_launcher
from fastlaunch.api.results import CloudDryRun, Runs, Submitted
from fastlaunch.catalog.load import load_catalogue
from fastlaunch.catalog.prices import Catalogue, age_note, check_age
from fastlaunch.core.errors import UserError
from fastlaunch.core.units import by_reason, parse_duration_s, utc_day
from fastlaunch.jobs.build import CloudRequest, build_cloud_request, jobs_at
from fastlaunch.jobs.options import Options
from fastlaunch.jobs.scripts import check_travels_along
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.jobs.working_directory import WorkingDirectory, working_directory
from fastlaunch.placement.cost_ceiling import (
    BUDGET,
    NOT_COUNTED,
    CostCeiling,
    check_budget,
    cost_ceiling,
    is_known,
)
from fastlaunch.placement.resolve import OfflineLookup, Resolution, check_plan, plan_at, resolve

if TYPE_CHECKING:
    from fastlaunch.analysis.cost import Expected
    from fastlaunch.backends.site import Site
    from fastlaunch.catalog.container_images import BaseImage
    from fastlaunch.ledger.ledger import Ledger
    from fastlaunch.lifecycle.launcher import Submission
    from fastlaunch.placement.prepare import Prepared


def submit_to_cloud(
    context: AppContext,
    options: Options,
    *,
    dry_run: bool,
    yes: bool,
) -> CloudDryRun | Submitted:
    """Carry out a submission; or return what it would do, for which nothing is started, asked or looked up.

    Both are resolved and planned offline first. Raises UserError for what is wrong without asking AWS.
    """
    settings, now = context.settings, context.now()
    budget_usd = settings.budget_usd(options.max_cost_usd)
    catalogue = load_catalogue(*settings.price_files())
    request = build_cloud_request(options, catalogue=catalogue)
    directory = directory_of(request, settings.home) if request.scripts else None
    request = with_contents_of(request, directory, settings.home)
    resolution = resolve_offline(context, request, catalogue)
    check_add_to(context, options.add_to, jobs_of(request, resolution.placements[0]))
    ceiling = ceiling_of(request, resolution.placements)
    block = ceiling.dearest.block
    # What an hour of a block costs is known once AWS has said how long it is: `prepare` checks it.
    if block is None or is_known(block):
        check_budget(ceiling, options.max_cost_usd if dry_run else budget_usd)
    if dry_run and budget_usd is not None and ceiling.is_above(budget_usd):
        context.report(f"warning: {ceiling.usd:,.2f} USD is above {BUDGET} of ${budget_usd:,.2f}")
    for name, why in request.skipped:
        context.report(f"left out: {name}: {why}")
    for caveat in request.caveats:
        context.report(f"warning: {caveat}")
    if dry_run:
        dry = _dry_run(context, request, resolution, ceiling, catalogue, directory)
        return replace(dry, budget_usd=budget_usd)
    from fastlaunch.lifecycle.launcher import check_home
    from fastlaunch.placement.prepare import prepare

    context.check_can_ask(yes=yes)
    check_home(settings.home)
    if options.requirements:
        context.report(f"looking for what {options.requirements} requires")
    prepared = prepare(
        request,
        aws=context.aws,
        settings=settings,
        catalogue=catalogue,
        now=now,
        commit=context.commit,
        max_cost_usd=budget_usd,
        directory=directory,
    )
    check_plans(prepared.request, prepared.placements)
    return _submit(context, prepared, catalogue, yes=yes, directory=directory)


def directory_of(request: CloudRequest, home: Path) -> WorkingDirectory:
    """Return what travels of the current directory. Raises UserError if the script does not."""
    directory = working_directory(Path.cwd(), home=home)
    why_not, to_take = directory.why_not
    paths = {file.path for file in directory.files}
    check_travels_along(request.scripts, paths, why_not=why_not, to_take=to_take)
    return directory


def with_contents_of(request: CloudRequest, directory: WorkingDirectory | None, home: Path) -> CloudRequest:
    """Return the request whose scripts know which of their files travel, and what these are now."""
    if directory is None:
        return request
    from fastlaunch.lifecycle.contents import all_with_contents

    scripts = all_with_contents(request.scripts, home=home.absolute(), directory=directory)
    return replace(request, scripts=scripts)


def resolve_offline(context: AppContext, request: CloudRequest, catalogue: Catalogue) -> Resolution:
    """Return where the request may run, with names in place of what only AWS can say.

    Raises UserError for what AWS would refuse.
    """
    now = context.now()
    lookup = OfflineLookup(
        settings=context.settings,
        catalogue=catalogue,
        now=now,
        base=_base_image(request, utc_day(now), catalogue),
        # Only git can say, and a dry run does not run it. It says nothing about a script.
        commit="<commit>" if context.find_commit and not request.scripts else None,
        is_script=bool(request.scripts),
    )
    resolution = resolve(request, lookup)
    check_plans(request, resolution.placements)
    if (max_age := context.settings.max_price_age) is not None:
        max_age_s = parse_duration_s(max_age)
        check_age(price_dates(resolution), utc_day(now), datetime.timedelta(seconds=max_age_s))
    return resolution


def price_dates(resolution: Resolution) -> list[datetime.date]:
    return [place.price.as_of for place in resolution.placements if place.price]


def jobs_of(request: CloudRequest, site: "Site") -> tuple[JobSpec, ...]:
    """Return the request's jobs as they are at the site."""
    return jobs_at(request, site.instance, site.region, image=site.image)


def ceiling_of(request: CloudRequest, placements: "Sequence[Site]") -> CostCeiling:
    options = request.options
    return cost_ceiling(placements, num_nodes=options.num_nodes, max_minutes=options.max_minutes)


def check_plans(request: CloudRequest, placements: "Sequence[Site]") -> None:
    """Raise UserError if AWS would refuse the request at one of the placements."""
    for site in placements:
        check_plan(site, jobs_of(request, site), max_minutes=request.options.max_minutes)


def _dry_run(
    context: AppContext,
    request: CloudRequest,
    resolution: Resolution,
    ceiling: CostCeiling,
    catalogue: Catalogue,
    directory: WorkingDirectory | None,
) -> CloudDryRun:
    """Return the plan at the first site, with what the dearest site may cost."""
    site = resolution.placements[0]
    jobs = jobs_of(request, site)
    names = ["<run-id>", *(f"<run-id-{number}>" for number in range(2, len(jobs) + 1))]
    by_id = dict(zip(names, jobs, strict=True))
    plan = plan_at(by_id, site, attempt=1, max_minutes=request.options.max_minutes)
    is_named = context.settings.region_settings(site.region).scheduler_role is not None
    return CloudDryRun(
        # A fee made of a price per hour is known once AWS has said how many hours the block has.
        plans=(replace(plan, max_cost_usd=ceiling.usd, sunk_usd=request.options.block_fee_usd),),
        jobs=jobs,
        sites=resolution.placements,
        skipped=resolution.skipped,
        ceiling=ceiling,
        old_prices=age_note(price_dates(resolution), context.today),
        expected=expected_at(context, jobs, site, catalogue),
        options=request.options,
        lacks_scheduler=site.backend == "ec2" and request.options.account_timer and not is_named,
        directory=directory,
    )


def expected_at(
    context: AppContext, jobs: Sequence[JobSpec], site: "Site", catalogue: Catalogue
) -> "Expected | str":
    """Return what the jobs will probably take at the site; in words why that is not known."""
    from fastlaunch.api.expected import expected

    with context.advice.guard("the expected cost"):
        try:
            return expected(context, jobs, site, catalogue)
        except UserError as error:
            return error.message
    return "as it could not be computed"


def _base_image(request: CloudRequest, today: datetime.date, catalogue: Catalogue) -> "BaseImage | None":
    """Return AWS's container image that the job starts from; None if the request names its own.

    Raises UserError if a recipe needs what that image does not have.
    """
    from fastlaunch.catalog.container_images import shipped_base_images, training_base
    from fastlaunch.jobs.variants import check_base

    if request.options.image:
        return None
    base = training_base(request.options.base_image, today=today)
    check_base(
        request.variants,
        base,
        [image for image in shipped_base_images().images if image.flavour == base.flavour],
        [catalogue.accelerators[instance.accelerator] for instance in request.instances],
    )
    return base


def _submit(
    context: AppContext,
    prepared: "Prepared",
    catalogue: Catalogue,
    *,
    yes: bool,
    directory: WorkingDirectory | None,
) -> Submitted:
    from fastlaunch.placement.prepare import upload_code

    submission = submission_of(context, prepared)
    jobs = jobs_of(prepared.request, prepared.placements[0])
    expected = expected_text(
        expected_at(context, jobs, prepared.placements[0], catalogue),
        jobs,
        max_minutes=prepared.request.options.max_minutes,
    )
    with open_launcher(context, context.cloud_backends) as launcher:
        context.report("\n".join(_announcement(prepared, launcher.ledger, directory, expected)))
        context.confirm("Start it?", yes=yes)
        upload_code(prepared, context.aws)
        runs = launcher.submit(submission, command=shlex.join(["fastlaunch", *context.argv]))
    return Submitted(runs=Runs(runs), is_stopped=bool(launcher.stop.by))


def submission_of(context: AppContext, prepared: "Prepared") -> "Submission":
    """Return what is prepared as the launcher takes it."""
    from fastlaunch.api.comparison import looks_of
    from fastlaunch.lifecycle.launcher import Submission

    return Submission(
        placements=prepared.placements,
        jobs_at=lambda site: jobs_of(prepared.request, site),
        max_minutes=prepared.request.options.max_minutes,
        max_replacements=prepared.request.options.max_replacements,
        detach=prepared.request.options.detach,
        account_timer=prepared.request.options.account_timer,
        adds_to=prepared.request.options.add_to,
        verdicts=looks_of(context, prepared.request.options),
    )


def _announcement(
    prepared: "Prepared", ledger: "Ledger", directory: WorkingDirectory | None, expected: str
) -> list[str]:
    """Return lines on what is going to be done, what speaks against it, and last what it will cost."""
    from fastlaunch.lifecycle.resume import slow_checkpoint

    first, *others = prepared.placements
    jobs = jobs_of(prepared.request, first)
    lines = [in_words(jobs, first)]
    if directory:
        lines.append(f"travels: {' '.join(travels_text(directory))}")
    lines += needs_text(
        prepared.request.options, num_bytes=len(prepared.wheels.data) if prepared.wheels else None
    )
    lines += spot_text(jobs)
    if others:
        lines.append(f"without capacity there: {', then '.join(other.name for other in others)}")
    lines += [f"left out: {reason}" for reason in by_reason(prepared.skipped)]
    lines += prepared.changes
    lines += warnings_of(prepared)
    if slow := slow_checkpoint(ledger, jobs, backend=first.backend):
        lines.append(f"warning: {slow}")
    if prepared.request.options.detach and prepared.request.options.until_resolved:
        lines.append("--until-resolved looks while it follows: with --detach all rounds are run")
    if prepared.request.options.detach:
        lines.append(f"--detach: nobody will follow it; {_timers(prepared.request, first)}")
        if first.backend == "ec2" and any(job.terms.purchase == "spot" for job in jobs):
            lines.append(
                "if EC2 takes its machine, the next `fastlaunch status` starts another, within this ceiling"
            )
    return [*lines, expected, str(ceiling_of(prepared.request, prepared.placements)), NOT_COUNTED]


def warnings_of(prepared: "Prepared") -> list[str]:
    """Return what the checks warn of, once where it holds in several places."""
    warnings = dict.fromkeys(
        (check.message, check.hint) for check in prepared.checks if check.result == "warning"
    )
    return [f"warning: {message}" + (f"\n  {hint}" if hint else "") for message, hint in warnings]


def _timers(request: CloudRequest, site: "Site") -> str:
    """What ends a job at a place that nobody follows."""
    if site.backend == "sagemaker":
        return "SageMaker ends it at its limit"
    if request.options.account_timer:
        return "only its own timer, and one in the account, end what hangs or is forgotten"
    return "only its own timer ends what hangs or is forgotten"

"""`fastlaunch submit --instance`: a request for AWS is resolved, planned, confirmed and submitted."""

import datetime
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from fastlaunch.catalog.load import load_catalogue
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.cli.cloud_options import settings_with
from fastlaunch.cli.context import AppContext
from fastlaunch.cli.options import check_can_ask, confirm
from fastlaunch.cli.plan_text import in_words, plan_text
from fastlaunch.cli.render import exit_code_of, print_runs
from fastlaunch.core.errors import EXIT_DONE
from fastlaunch.core.settings import Settings
from fastlaunch.core.units import by_reason
from fastlaunch.jobs.build import CloudRequest, build_cloud_request, jobs_at
from fastlaunch.jobs.options import CloudOptions, SubmitOptions
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.placement.cost_ceiling import CostCeiling, block_of, check_budget, cost_ceiling, is_known
from fastlaunch.placement.resolve import OfflineLookup, Resolution, check_plan, plan_at, resolve

if TYPE_CHECKING:
    from fastlaunch.backends.placements import Placement
    from fastlaunch.catalog.container_images import BaseImage
    from fastlaunch.placement.check import Check
    from fastlaunch.placement.prepare import Prepared
    from fastlaunch.runs.launcher import Submission


def submit_to_cloud(
    context: AppContext,
    options: SubmitOptions,
    cloud: CloudOptions,
    typed: Mapping[str, Any],
    *,
    dry_run: bool,
    output: str,
    yes: bool,
) -> int:
    """Return the exit code of a submission, or of its dry run, which starts, asks and looks up nothing.

    Both are resolved and planned offline first. Raises UserError for what is wrong without asking AWS.
    """
    settings = settings_with(context.settings, typed, cloud.regions)
    catalogue = load_catalogue(settings.prices)
    request = build_cloud_request(options, cloud, catalogue=catalogue)
    now = context.now()
    lookup = OfflineLookup(
        settings=settings,
        catalogue=catalogue,
        now=now,
        base=_base_image(request, now.date(), catalogue),
        # Only git can say, and a dry run does not run it.
        commit="<commit>" if context.find_commit else None,
    )
    resolution = resolve(request, lookup)
    ceiling = cost_ceiling(
        resolution.placements, num_nodes=request.cloud.num_nodes, max_minutes=request.cloud.max_minutes
    )
    block = block_of(ceiling.dearest)
    # What an hour of a block costs is known once AWS has said how long it is: `prepare` checks it.
    if block is None or is_known(block):
        check_budget(ceiling, typed["max_cost"])
    for name, why in request.skipped:
        click.echo(f"left out: {name}: {why}", err=True)
    for caveat in request.caveats:
        click.echo(f"warning: {caveat}", err=True)
    for site in resolution.placements:
        check_plan(site, jobs_of(request, site), max_minutes=request.cloud.max_minutes)
    if dry_run:
        click.echo(dry_run_text(request, resolution, ceiling, output=output))
        return EXIT_DONE
    from fastlaunch.placement.prepare import prepare
    from fastlaunch.runs.launcher import check_home

    check_can_ask(yes=yes)
    check_home(settings.home)
    prepared = prepare(
        request,
        aws=context.aws,
        settings=settings,
        catalogue=catalogue,
        now=context.now(),
        commit=context.commit,
        max_cost_usd=typed["max_cost"],
        detach=typed["detach"],
    )
    return _submit(context, prepared, settings, detach=typed["detach"], output=output, yes=yes)


def jobs_of(request: CloudRequest, site: "Placement") -> tuple[JobSpec, ...]:
    """Return the request's jobs as they are at the site."""
    return jobs_at(request, site.instance, site.region, image=site.image)


def dry_run_text(request: CloudRequest, resolution: Resolution, ceiling: CostCeiling, *, output: str) -> str:
    """Return the plan at the first site, as text or JSON, with what the dearest site may cost."""
    site = resolution.placements[0]
    jobs = jobs_of(request, site)
    names = ["<run-id>", *(f"<run-id-{number}>" for number in range(2, len(jobs) + 1))]
    by_id = dict(zip(names, jobs, strict=True))
    planned = plan_at(by_id, site, attempt=1, max_minutes=request.cloud.max_minutes)
    # A fee made of a price per hour is known once AWS has said how many hours the block has.
    plan = replace(planned, max_cost_usd=ceiling.usd, sunk_usd=request.cloud.block_fee_usd)
    if output == "json":
        for reason in by_reason(resolution.skipped):
            click.echo(f"left out: {reason}", err=True)
        return json.dumps(plan.to_json(), indent=2)
    return plan_text(plan, jobs, sites=resolution.placements, skipped=resolution.skipped, ceiling=ceiling)


def _base_image(request: CloudRequest, today: datetime.date, catalogue: Catalogue) -> "BaseImage | None":
    """Return AWS's container image that the job starts from; None if the request names its own.

    Raises UserError if a recipe needs what that image does not have.
    """
    from fastlaunch.catalog.container_images import shipped_base_images, training_base
    from fastlaunch.jobs.variants import check_base

    if request.cloud.image:
        return None
    base = training_base(request.cloud.base_image, today=today)
    check_base(
        request.variants,
        base,
        [image for image in shipped_base_images().images if image.flavour == base.flavour],
        [catalogue.accelerators[instance.accelerator] for instance in request.instances],
    )
    return base


def _submit(
    context: AppContext, prepared: "Prepared", settings: Settings, *, detach: bool, output: str, yes: bool
) -> int:
    from fastlaunch.ledger.ledger import open_ledger
    from fastlaunch.placement.prepare import upload_code
    from fastlaunch.runs.display import make_display
    from fastlaunch.runs.launcher import Launcher, Submission
    from fastlaunch.runs.resume import slow_checkpoint
    from fastlaunch.runs.stop_request import StopRequest

    submission = Submission(
        placements=prepared.placements,
        jobs_at=lambda site: jobs_of(prepared.request, site),
        max_minutes=prepared.request.cloud.max_minutes,
        detach=detach,
    )
    for site in prepared.placements:
        check_plan(site, submission.jobs_at(site), max_minutes=submission.max_minutes)
    with open_ledger(settings) as ledger, StopRequest() as stop:
        first = prepared.placements[0]
        slow = slow_checkpoint(ledger, submission.jobs_at(first), backend=first.backend)
        _ask(prepared, submission, slow, settings, yes=yes)
        upload_code(prepared, context.aws)
        launcher = Launcher(
            backends=context.cloud_backends,
            ledger=ledger,
            settings=settings,
            display=make_display(sys.stderr, context.monotonic_s),
            stop=stop,
        )
        runs = launcher.submit(submission, command=shlex.join(["fastlaunch", *context.argv]))
    print_runs(runs, output=output)
    return exit_code_of(runs, stopped=bool(stop.by))


def doubts_of(checks: "Sequence[Check]") -> list[str]:
    """Return the warnings before money is spent, once where one holds in several places."""
    doubts = dict.fromkeys((check.message, check.hint) for check in checks if check.result == "warning")
    return [f"warning: {message}" + (f"\n  {hint}" if hint else "") for message, hint in doubts]


def _ask(
    prepared: "Prepared",
    submission: "Submission",
    slow_checkpoint: str | None,
    settings: Settings,
    *,
    yes: bool,
) -> None:
    """Tell what is going to be done and what it may cost, then ask. Raises UserError if that is refused."""
    first, *others = prepared.placements
    lines = [in_words(submission.jobs_at(first), first)]
    if others:
        lines.append(f"without capacity there: {', then '.join(other.name for other in others)}")
    lines += [f"left out: {reason}" for reason in by_reason(prepared.skipped)]
    lines += prepared.changes
    lines += doubts_of(prepared.checks)
    if slow_checkpoint:
        lines.append(f"warning: {slow_checkpoint}")
    if submission.detach:
        lines.append(f"--detach: nobody will follow it; {_timers(first, settings)}")
    ceiling = cost_ceiling(
        prepared.placements, num_nodes=prepared.request.cloud.num_nodes, max_minutes=submission.max_minutes
    )
    lines.append(str(ceiling))
    click.echo("\n".join(lines), err=True)
    confirm("Start it?", yes=yes)


def _timers(site: "Placement", settings: Settings) -> str:
    """What ends a job at a place that nobody follows."""
    if site.backend == "sagemaker":
        return "SageMaker ends it at its limit"
    here = settings.aws.get(site.region)
    if here is not None and here.scheduler_role:
        return "only its own timer, and one in the account, end what hangs or is forgotten"
    return (
        "only its own timer ends what hangs or is forgotten: no `scheduler_role` is in the config file "
        f"for {site.region}, for a second one in the account"
    )

"""`fastlaunch submit --instance`: a request for AWS to sites and plans, asked about, and submitted."""

import datetime
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from fastlaunch.backends import Plan
from fastlaunch.catalog.prices import Catalogue, load_catalogue
from fastlaunch.cli.cloud_options import Where, settings_with, terms_of
from fastlaunch.cli.context import Surroundings
from fastlaunch.cli.options import check_can_ask, confirm
from fastlaunch.cli.plan_text import in_words, plan_text
from fastlaunch.cli.submitted import exit_code_of, tell_runs
from fastlaunch.cloud_request import CloudRequest, build_cloud_request, jobs_at
from fastlaunch.core.errors import EXIT_DONE
from fastlaunch.core.settings import Settings
from fastlaunch.jobs.build import Request
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.left_out import by_reason
from fastlaunch.offline_sites import Offline, OfflineSites, check_plan, offline_sites, plan_at
from fastlaunch.placement.cost_ceiling import CostCeiling, block_of, check_budget, cost_ceiling, is_known

if TYPE_CHECKING:
    from fastlaunch.backends.protocol import Place
    from fastlaunch.placement.check import Check
    from fastlaunch.placement.prepare import Prepared
    from fastlaunch.runs.launcher import CloudSubmission


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request for AWS with all that is known of it offline. Its checks have passed, its budget holds."""

    request: CloudRequest
    settings: Settings
    catalogue: Catalogue
    offline: OfflineSites
    ceiling: CostCeiling
    today: datetime.date


def submit_to_cloud(
    around: Surroundings,
    request: Request,
    typed: Mapping[str, Any],
    where: Where,
    *,
    dry_run: bool,
    output: str,
    yes: bool,
) -> int:
    """Exit code of a submission, or of its dry run, which starts, asks and looks up nothing."""
    asked = ask_offline(around, request, typed, where)
    for name, why in asked.request.left_out:
        click.echo(f"left out: {name}: {why}", err=True)
    for caveat in asked.request.caveats:
        click.echo(f"warning: {caveat}", err=True)
    for site in asked.offline.sites:
        check_plan(site, jobs_of(asked.request, site), max_minutes=asked.request.max_minutes)
    if dry_run:
        click.echo(dry_run_text(asked, output=output))
        return EXIT_DONE
    return _submit(around, asked, detach=typed["detach"], max_cost=typed["max_cost"], output=output, yes=yes)


def ask_offline(around: Surroundings, request: Request, typed: Mapping[str, Any], where: Where) -> Asked:
    """The request, checked as far as that needs no AWS. Raises UserError, also for one above its budget."""
    terms = terms_of(typed, where)
    settings = settings_with(around.settings, typed, where.regions)
    catalogue = load_catalogue(settings.prices)
    cloud = build_cloud_request(request, terms, catalogue=catalogue)
    today = around.now().date()
    offline = offline_sites(
        Offline(
            request=cloud,
            settings=settings,
            catalogue=catalogue,
            today=today,
            image_at=_images(cloud, today, catalogue),
            commit=around.commit,
        )
    )
    ceiling = cost_ceiling(offline.sites, num_nodes=cloud.num_nodes, max_minutes=cloud.max_minutes)
    block = block_of(ceiling.dearest)
    # What a block's hour costs is not known before AWS told its hours: the budget is held against that.
    if block is None or is_known(block):
        check_budget(ceiling, typed["max_cost"])
    return Asked(
        request=cloud,
        settings=settings,
        catalogue=catalogue,
        offline=offline,
        ceiling=ceiling,
        today=today,
    )


def jobs_of(request: CloudRequest, site: "Place") -> tuple[JobSpec, ...]:
    """The request's jobs as they are at the site."""
    return jobs_at(request, site.instance, site.region, image=site.image)


def offline_plan(asked: Asked) -> tuple[Plan, tuple[JobSpec, ...]]:
    """The plan at the first site with its jobs."""
    site = asked.offline.sites[0]
    jobs = jobs_of(asked.request, site)
    names = ["<run-id>", *(f"<run-id-{number}>" for number in range(2, len(jobs) + 1))]
    by_id = dict(zip(names, jobs, strict=True))
    return plan_at(by_id, site, attempt=1, max_minutes=asked.request.max_minutes), jobs


def dry_run_text(asked: Asked, *, output: str) -> str:
    """The plan at the first site, for people or as a JSON object; what it may cost is the dearest site's."""
    planned, jobs = offline_plan(asked)
    # A fee that is made of a price per hour is known with the block's hours, which AWS tells.
    fee = asked.request.block_fee_usd
    plan = replace(planned, max_cost_usd=asked.ceiling.usd, sunk_usd=fee)
    if output == "json":
        for told in by_reason(asked.offline.skipped):
            click.echo(f"left out: {told}", err=True)
        return json.dumps(plan.to_json(), indent=2)
    return plan_text(
        plan, jobs, sites=asked.offline.sites, skipped=asked.offline.skipped, ceiling=asked.ceiling
    )


def _images(request: CloudRequest, today: datetime.date, catalogue: Catalogue) -> Callable[[str], str]:
    """The container image in a region: the one that was named, else AWS's own, by a digest to look up."""
    from fastlaunch.base_image_file import shipped_base_images
    from fastlaunch.catalog.container_images import image_uri, own_image, training_base
    from fastlaunch.cloud_arms import check_base

    given = request.image
    if given:

        def given_image(region: str) -> str:
            own_image(given, region)
            return given

        return given_image

    base = training_base(request.base_image, today=today)
    known = shipped_base_images().images
    check_base(
        request.arms,
        base,
        [one for one in known if one.flavour == base.flavour],
        [catalogue.accelerators[instance.accelerator] for instance in request.instances],
    )
    return lambda region: image_uri(base, region, "<image-digest>")


def _submit(
    around: Surroundings, asked: Asked, *, detach: bool, max_cost: float | None, output: str, yes: bool
) -> int:
    from fastlaunch.ledger.ledger import open_ledger
    from fastlaunch.placement.prepare import upload_code
    from fastlaunch.runs.display import make_display
    from fastlaunch.runs.launcher import CloudLauncher
    from fastlaunch.runs.spot_checkpoints import slow_checkpoint
    from fastlaunch.runs.stop_request import StopRequest
    from fastlaunch.submission import check_home

    check_can_ask(yes=yes)
    check_home(asked.settings.home)
    prepared, submission = _prepared(around, asked, detach=detach, max_cost=max_cost)
    with open_ledger(asked.settings) as ledger, StopRequest() as stop:
        first = prepared.sites[0]
        slow = slow_checkpoint(ledger, submission.jobs_at(first), backend=first.backend)
        _ask(prepared, submission, slow, asked.settings, yes=yes)
        upload_code(prepared, around.aws)
        launcher = CloudLauncher(
            backends=around.cloud_backends,
            aws=around.aws,
            ledger=ledger,
            home=asked.settings.home,
            settings=asked.settings,
            display=make_display(sys.stderr, around.monotonic_s),
            stop=stop,
            now=around.now,
        )
        runs = launcher.submit(submission, command=shlex.join(["fastlaunch", *around.argv]))
    tell_runs(runs, output=output)
    return exit_code_of(runs, stopped=bool(stop.by))


def _prepared(
    around: Surroundings, asked: Asked, *, detach: bool, max_cost: float | None
) -> "tuple[Prepared, CloudSubmission]":
    """All that AWS was asked for, and the submission made of it, whose plans AWS would take."""
    from fastlaunch.placement.prepare import prepare
    from fastlaunch.runs.launcher import CloudSubmission

    prepared = prepare(
        asked.request,
        aws=around.aws,
        settings=asked.settings,
        catalogue=asked.catalogue,
        now=around.now(),
        commit=around.commit,
        max_cost_usd=max_cost,
        detach=detach,
    )
    submission = CloudSubmission(
        sites=prepared.sites,
        jobs_at=lambda site: jobs_of(prepared.request, site),
        max_minutes=prepared.request.max_minutes,
        num_nodes=prepared.request.num_nodes,
        detach=detach,
    )
    for site in prepared.sites:
        check_plan(site, submission.jobs_at(site), max_minutes=submission.max_minutes)
    return prepared, submission


def doubts_of(checks: "Sequence[Check]") -> list[str]:
    """What is warned of before money is spent, once where it holds in several places."""
    doubts = dict.fromkeys((check.told, check.hint) for check in checks if check.result == "warning")
    return [f"warning: {told}" + (f"\n  {hint}" if hint else "") for told, hint in doubts]


def _ask(
    prepared: "Prepared",
    submission: "CloudSubmission",
    slow_checkpoint: str | None,
    settings: Settings,
    *,
    yes: bool,
) -> None:
    """Tell what is going to be done and what it may cost, then ask. Raises UserError if that is refused."""
    first, *others = prepared.sites
    lines = [in_words(submission.jobs_at(first), first)]
    if others:
        lines.append(f"without capacity there: {', then '.join(other.name for other in others)}")
    lines += [f"left out: {told}" for told in by_reason(prepared.skipped)]
    lines += prepared.told
    lines += doubts_of(prepared.found)
    if slow_checkpoint:
        lines.append(f"warning: {slow_checkpoint}")
    if submission.detach:
        lines.append(f"--detach: nobody will follow it; {_timers(first, settings)}")
    ceiling = cost_ceiling(prepared.sites, num_nodes=submission.num_nodes, max_minutes=submission.max_minutes)
    lines.append(str(ceiling))
    click.echo("\n".join(lines), err=True)
    confirm("Start it?", yes=yes)


def _timers(site: "Place", settings: Settings) -> str:
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

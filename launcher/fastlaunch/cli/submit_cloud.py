"""`fastlaunch submit --instance`: a request for AWS to sites and plans, asked about, and submitted."""

import datetime
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from fastlaunch.backends import Plan
from fastlaunch.backends.ec2_plan import plan_ec2
from fastlaunch.cli.cloud_options import settings_with, split_names, terms_of
from fastlaunch.cli.options import check_can_ask, confirm
from fastlaunch.cli.plan_text import in_words, plan_text
from fastlaunch.cli.submitted import exit_code_of, tell_runs
from fastlaunch.cli.surroundings import Surroundings
from fastlaunch.cloud_request import CloudRequest, build_cloud_request, jobs_at
from fastlaunch.cost_ceiling import CostCeiling, check_budget, cost_ceiling
from fastlaunch.errors import EXIT_DONE
from fastlaunch.job import JobSpec
from fastlaunch.offline_sites import OfflineSites, check_plan, offline_sites
from fastlaunch.prices import Catalogue, load_catalogue
from fastlaunch.request import Request
from fastlaunch.settings import Settings

if TYPE_CHECKING:
    from fastlaunch.cloud import CloudSubmission
    from fastlaunch.cloud_prepare import Prepared


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request for AWS with all that is known of it offline. Its checks have passed, its budget holds."""

    request: CloudRequest
    settings: Settings
    catalogue: Catalogue
    offline: OfflineSites
    ceiling: CostCeiling
    today: datetime.date


def submit_to_ec2(
    around: Surroundings,
    request: Request,
    typed: Mapping[str, Any],
    *,
    instance: str,
    region: str,
    dry_run: bool,
    output: str,
    yes: bool,
) -> int:
    """Exit code of a submission, or of its dry run, which starts, asks and looks up nothing."""
    asked = ask_offline(around, request, typed, instance=instance, region=region)
    for site in asked.offline.sites:
        check_plan(
            site, jobs_at(asked.request, site.instance, site.region), max_minutes=asked.request.max_minutes
        )
    if dry_run:
        click.echo(dry_run_text(asked, output=output))
        return EXIT_DONE
    return _submit(around, asked, detach=typed["detach"], max_cost=typed["max_cost"], output=output, yes=yes)


def ask_offline(
    around: Surroundings, request: Request, typed: Mapping[str, Any], *, instance: str, region: str
) -> Asked:
    """The request, checked as far as that needs no AWS. Raises UserError, also for one above its budget."""
    terms = terms_of(typed, instance=instance, region=region)
    settings = settings_with(around.settings, typed, split_names(region))
    catalogue = load_catalogue(settings.prices)
    cloud = build_cloud_request(request, terms, catalogue=catalogue)
    today = around.now().date()
    offline = offline_sites(
        cloud,
        settings=settings,
        catalogue=catalogue,
        today=today,
        image_at=_images(cloud, today),
        commit=around.commit,
    )
    ceiling = cost_ceiling(offline.sites, num_nodes=1, max_minutes=cloud.max_minutes)
    check_budget(ceiling, typed["max_cost"])
    return Asked(
        request=cloud,
        settings=settings,
        catalogue=catalogue,
        offline=offline,
        ceiling=ceiling,
        today=today,
    )


def offline_plan(asked: Asked) -> tuple[Plan, tuple[JobSpec, ...]]:
    """The plan at the first site with its jobs."""
    site = asked.offline.sites[0]
    jobs = jobs_at(asked.request, site.instance, site.region, image=site.image)
    names = ["<run-id>", *(f"<run-id-{number}>" for number in range(2, len(jobs) + 1))]
    plan = plan_ec2(
        dict(zip(names, jobs, strict=True)), attempt=1, site=site, max_minutes=asked.request.max_minutes
    )
    return plan, jobs


def dry_run_text(asked: Asked, *, output: str) -> str:
    """The plan at the first site, for people or as a JSON object; what it may cost is the dearest site's."""
    planned, jobs = offline_plan(asked)
    plan = replace(planned, max_cost_usd=asked.ceiling.usd)
    if output == "json":
        for name, why in asked.offline.skipped:
            click.echo(f"left out: {name}: {why}", err=True)
        return json.dumps(plan.to_json(), indent=2)
    return plan_text(
        plan, jobs, sites=asked.offline.sites, skipped=asked.offline.skipped, ceiling=asked.ceiling
    )


def _images(request: CloudRequest, today: datetime.date) -> Callable[[str], str]:
    """The container image in a region: the one that was named, else AWS's own, by a digest to look up."""
    from fastlaunch.images import find_base_image, image_uri, own_image

    given = request.image
    if given:

        def given_image(region: str) -> str:
            own_image(given, region)
            return given

        return given_image

    base = find_base_image(request.base_image, flavour="ec2", today=today)
    return lambda region: image_uri(base, region, "<image-digest>")


def _submit(
    around: Surroundings, asked: Asked, *, detach: bool, max_cost: float | None, output: str, yes: bool
) -> int:
    from fastlaunch.cloud import CloudLauncher, CloudSubmission
    from fastlaunch.cloud_prepare import prepare, upload_code
    from fastlaunch.follow import make_display
    from fastlaunch.runs import open_ledger
    from fastlaunch.spot_checkpoints import slow_checkpoint
    from fastlaunch.stop_request import StopRequest
    from fastlaunch.submission import check_home

    check_can_ask(yes=yes)
    check_home(asked.settings.home)
    prepared = prepare(
        asked.request,
        aws=around.aws,
        settings=asked.settings,
        catalogue=asked.catalogue,
        today=asked.today,
        commit=around.commit,
        max_cost_usd=max_cost,
    )
    submission = CloudSubmission(
        sites=prepared.sites,
        jobs_at=lambda site: jobs_at(asked.request, site.instance, site.region, image=site.image),
        max_minutes=asked.request.max_minutes,
        detach=detach,
    )
    for site in prepared.sites:
        check_plan(site, submission.jobs_at(site), max_minutes=submission.max_minutes)
    with open_ledger(asked.settings) as ledger, StopRequest() as stop:
        _ask(prepared, submission, slow_checkpoint(ledger, submission.jobs_at(prepared.sites[0])), yes=yes)
        upload_code(prepared, around.aws)
        launcher = CloudLauncher(
            aws=around.aws,
            ledger=ledger,
            home=asked.settings.home,
            settings=asked.settings,
            display=make_display(sys.stderr, around.monotonic_s),
            stop=stop,
            sleep=around.sleep,
            now=around.now,
        )
        runs = launcher.submit(submission, command=shlex.join(["fastlaunch", *around.argv]))
    tell_runs(runs, output=output)
    return exit_code_of(runs, stopped=bool(stop.by))


def _ask(
    prepared: "Prepared", submission: "CloudSubmission", slow_checkpoint: str | None, *, yes: bool
) -> None:
    """Tell what is going to be done and what it may cost, then ask. Raises UserError if that is refused."""
    first, *others = prepared.sites
    lines = [in_words(submission.jobs_at(first), first)]
    if others:
        lines.append(f"without capacity there: {', then '.join(other.name for other in others)}")
    lines += [f"left out: {name}: {why}" for name, why in prepared.skipped]
    for check in prepared.found:
        if check.result == "warning":
            lines.append(f"warning: {check.told}" + (f"\n  {check.hint}" if check.hint else ""))
    if slow_checkpoint:
        lines.append(f"warning: {slow_checkpoint}")
    if submission.detach:
        lines.append(
            "--detach: nobody will follow it; only the machine's own timer then ends what hangs or is "
            "forgotten"
        )
    lines.append(str(cost_ceiling(prepared.sites, num_nodes=1, max_minutes=submission.max_minutes)))
    click.echo("\n".join(lines), err=True)
    confirm("Start it?", yes=yes)

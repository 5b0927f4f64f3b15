"""`fastlaunch doctor`: what a job on AWS would meet, before it costs anything."""

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from fastlaunch.cli.cloud_options import split_names
from fastlaunch.cli.context import AppContext, app_context
from fastlaunch.cli.options import (
    POSITIVE_COUNT,
    USD,
    next_command,
    table_or_json_option,
)
from fastlaunch.cli.render import table
from fastlaunch.core.errors import EXIT_CLOUD_REFUSED, EXIT_DONE, NotAuthorised
from fastlaunch.core.paths import shipped
from fastlaunch.jobs.options import CloudOptions, backend_of, check_cloud_options

if TYPE_CHECKING:
    from fastlaunch.catalog.prices import Catalogue
    from fastlaunch.placement.check import Check, CheckContext

_HEADERS = {"result": "result", "check": "check", "where": "where", "told": ""}


@click.command(short_help="What a job on AWS would meet: login, quota, image, network, bucket, price.")
@click.option(
    "--instance", metavar="TYPE[,TYPE]", help="Check what a job on this type needs, quota and price too."
)
@click.option("--backend", metavar="NAME", help="Check ec2 or sagemaker.  [default: as --instance says]")
@click.option(
    "--region", metavar="REGION[,REGION]", help="Check these regions.  [default: yours, or us-east-1]"
)
@click.option(
    "--purchase",
    default="on-demand",
    show_default=True,
    metavar="OPTION",
    help="Buy on-demand, spot or capacity-block.",
)
@click.option("--max-price", type=USD, metavar="USD", help="Pay at most this for an hour of EC2 spot.")
@click.option("--reservation", metavar="cr-ID", help="Run in this capacity block.")
@click.option("--block-fee", type=USD, metavar="USD", help="Say what that block cost up front.")
@click.option(
    "--num-nodes",
    type=POSITIVE_COUNT,
    default=1,
    show_default=True,
    help="Train one job on this many machines.",
)
@click.option("--allow-tcp", is_flag=True, help="Let several nodes talk without EFA.")
@click.option("--training-plan", metavar="ARN", help="Run in this reserved capacity of SageMaker.")
@click.option("--setup", is_flag=True, help="Print what an account needs, with the commands; ask nothing.")
@table_or_json_option("the checks are")
def doctor(
    instance: str | None, backend: str | None, region: str | None, setup: bool, output: str, **cloud: Any
) -> int:
    """What a job on AWS would meet: login, quota, image, network, bucket, price.

    Starts nothing. It asks, and writes one small object to the bucket. Ends with 0 if nothing failed, with 3
    if AWS would refuse, with 2 if the config file or the command would have to change.

    \b
      fastlaunch doctor --instance p5.48xlarge,p5en.48xlarge --region us-east-1,us-west-2
      fastlaunch doctor --instance ml.p5.48xlarge --num-nodes 2
      fastlaunch doctor --setup | less
    """
    from fastlaunch.catalog.load import load_catalogue
    from fastlaunch.placement.checks import checks

    if setup:
        click.echo(shipped("docs/setup.md").read_text(encoding="utf-8"), nl=False)
        return EXIT_DONE
    context = app_context()
    catalogue = load_catalogue(context.settings.prices)
    job = _check_context(context, catalogue, _terms(context, instance, backend, region, cloud))
    results = [_config_file(), *checks(job)]
    (_print_json if output == "json" else _print)(results)
    next_command(_next(context, results, job))
    return _exit_code(results)


def _terms(
    context: AppContext, instance: str | None, backend: str | None, region: str | None, typed: dict[str, Any]
) -> CloudOptions:
    """Return what is to be checked, as typed. Raises UserError for what cannot be had together."""
    instances = split_names(instance or "")
    cloud = CloudOptions(
        instances=instances,
        regions=split_names(region or context.settings.region),
        backend=backend_of(instances, backend),
        num_nodes=typed["num_nodes"],
        allow_tcp=typed["allow_tcp"],
        purchase=typed["purchase"],
        max_price_usd=typed["max_price"],
        reservation=typed["reservation"],
        block_fee_usd=typed["block_fee"],
        training_plan=typed["training_plan"],
    )
    check_cloud_options(cloud)
    return cloud


def _check_context(context: AppContext, catalogue: "Catalogue", cloud: CloudOptions) -> "CheckContext":
    from fastlaunch.aws.cache import CachedCalls
    from fastlaunch.catalog.container_images import training_base
    from fastlaunch.jobs.build import instances_of
    from fastlaunch.placement.aws_lookup import AwsLookup
    from fastlaunch.placement.check import CheckContext

    now = context.now()
    return CheckContext(
        lookup=AwsLookup(
            settings=context.settings,
            catalogue=catalogue,
            now=now,
            base=training_base(None, today=now.date()),
            aws=context.aws,
            ask=CachedCalls(),
        ),
        cloud=cloud,
        instances=instances_of(cloud, catalogue) if cloud.instances else (),
        is_unfollowed=True,
    )


def _config_file() -> "Check":
    from fastlaunch.core.settings import config_path
    from fastlaunch.placement.check import Check, Result

    path = config_path()
    absence = "" if path.exists() else ", which does not exist yet"
    return Check(name="config file", result=Result.OK, message=f"{path}{absence}")


def _exit_code(results: Sequence["Check"]) -> int:
    """3 if AWS refused anything, else 2 for what is wrong here, 0 if nothing is."""
    codes = {check.error.exit_code for check in results if check.error is not None}
    return EXIT_CLOUD_REFUSED if EXIT_CLOUD_REFUSED in codes else max(codes, default=EXIT_DONE)


def _where(check: "Check") -> str:
    """`p5.48xlarge in us-east-1`, `us-east-1a`, or nothing for what concerns all."""
    place = check.zone or check.region
    return " in ".join(filter(None, (check.instance, place)))


def _print(results: Sequence["Check"]) -> None:
    rows = []
    lines = []
    for check in results:
        # What asks for something to be done stands in full below the table.
        is_brief = check.result == "ok" or (check.result == "not checked" and not check.hint)
        rows.append(
            {
                "result": str(check.result),
                "check": check.name,
                "where": _where(check),
                "told": check.message if is_brief else None,
            }
        )
        if not is_brief:
            about = f"{check.name} ({_where(check)})" if _where(check) else check.name
            lines += [
                f"{check.result}: {about}: {check.message}",
                *([f"  {check.hint}"] if check.hint else []),
            ]
    counts = Counter(str(check.result) for check in results)
    counted = ", ".join(f"{number} {result}" for result, number in counts.items())
    click.echo("\n".join([table(rows, _HEADERS), "", *lines, f"{len(results)} checks: {counted}."]))


def _print_json(results: Sequence["Check"]) -> None:
    shown = [
        {
            "name": check.name,
            "result": str(check.result),
            "region": check.region,
            "zone": check.zone,
            "instance": check.instance,
            "told": check.message,
            "hint": check.hint,
            "error": type(check.error).__name__ if check.error else None,
        }
        for check in results
    ]
    click.echo(json.dumps({"ok": _exit_code(results) == EXIT_DONE, "checks": shown}, indent=2))


def _next(context: AppContext, results: Sequence["Check"], job: "CheckContext") -> str:
    if any(check.name == "login" and isinstance(check.error, NotAuthorised) for check in results):
        return "aws configure   (or `aws sso login`), then fastlaunch doctor"
    if any(check.error is not None for check in results):
        return f"mend the first that failed, then {shlex.join(['fastlaunch', *context.argv])}"
    if not job.instances:
        return f"fastlaunch doctor --instance {'ml.' if job.cloud.backend == 'sagemaker' else ''}p5.48xlarge"
    # What was checked: every option of the check is one of the job's.
    typed = context.argv[context.argv.index("doctor") + 1 :]
    saving = ["--checkpoint-every", "50"] if job.cloud.purchase == "spot" else []
    return shlex.join(["fastlaunch", "submit", *typed, "--recipe", "bf16", *saving, "--dry-run"])

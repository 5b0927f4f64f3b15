"""`fastlaunch doctor`: what a job on AWS would meet, before it costs anything."""

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from fastlaunch.cli.cloud_options import split_names
from fastlaunch.cli.context import Surroundings, surroundings
from fastlaunch.cli.listing import table
from fastlaunch.cli.options import (
    MINUTES_ALONE,
    POSITIVE_COUNT,
    USD,
    next_command,
    table_or_json_option,
)
from fastlaunch.core.errors import EXIT_CLOUD_REFUSED, EXIT_DONE, NotAuthorised
from fastlaunch.core.paths import shipped
from fastlaunch.jobs.options import CloudTerms, backend_of, check_terms

if TYPE_CHECKING:
    from fastlaunch.catalog.prices import Catalogue
    from fastlaunch.placement.check import Check
    from fastlaunch.preflight_wanted import Wanted

_HEADERS = {"result": "result", "check": "check", "where": "where", "told": ""}


@click.command(short_help="What a job on AWS would meet: login, quota, image, network, bucket, price.")
@click.option("--instance", metavar="TYPE[,TYPE]", help="Check what a job on it needs, quota and price too.")
@click.option("--backend", metavar="NAME", help="ec2 or sagemaker.  [default: as --instance says]")
@click.option("--region", metavar="REGION[,REGION]", help="Where to buy it.  [default: yours, or us-east-1]")
@click.option(
    "--purchase",
    default="on-demand",
    show_default=True,
    metavar="OPTION",
    help="on-demand, spot or capacity-block.",
)
@click.option("--max-price", type=USD, metavar="USD", help="Most paid for an hour of EC2's spot.")
@click.option("--reservation", metavar="cr-ID", help="The capacity block to run in.")
@click.option("--block-fee", type=USD, metavar="USD", help="What that block cost up front.")
@click.option(
    "--num-nodes", type=POSITIVE_COUNT, default=1, show_default=True, help="Machines that train together."
)
@click.option("--allow-tcp", is_flag=True, help="Let several nodes do without EFA.")
@click.option(
    "--keep-alive", type=MINUTES_ALONE, default=0, metavar="MIN", help="Keep SageMaker's machines so long."
)
@click.option("--training-plan", metavar="ARN", help="SageMaker's reserved capacity to run in.")
@click.option("--setup", is_flag=True, help="Print what an account needs, with the commands; ask nothing.")
@table_or_json_option("the checks are")
def doctor(
    instance: str | None, backend: str | None, region: str | None, setup: bool, output: str, **terms: Any
) -> int:
    """What a job on AWS would meet: login, quota, image, network, bucket, price.

    Starts nothing. It asks, and writes one small object to the bucket. Ends with 0 if nothing failed, with 3
    if AWS would refuse, with 2 if the config file or the command would have to change.

    \b
      fastlaunch doctor --instance p5.48xlarge,p5en.48xlarge --region us-east-1,us-west-2
      fastlaunch doctor --instance ml.p5.48xlarge --num-nodes 2
      fastlaunch doctor --setup | less
    """
    from fastlaunch.catalog.prices import load_catalogue
    from fastlaunch.placement.checks import checks

    if setup:
        click.echo(shipped("docs/aws-setup.md").read_text(encoding="utf-8"), nl=False)
        return EXIT_DONE
    around = surroundings()
    catalogue = load_catalogue(around.settings.prices)
    wanted = _wanted(around, catalogue, _terms(around, instance, backend, region, terms))
    found = [_config_file()]
    found += checks(wanted, aws=around.aws, settings=around.settings, catalogue=catalogue, now=around.now())
    (_tell_json if output == "json" else _tell)(found)
    next_command(_next(around, found, wanted))
    return _exit_code(found)


def _terms(
    around: Surroundings, instance: str | None, backend: str | None, region: str | None, typed: dict[str, Any]
) -> CloudTerms:
    """What is to be checked, as typed. Raises UserError for what cannot be had together."""
    instances = split_names(instance or "")
    terms = CloudTerms(
        instances=instances,
        regions=split_names(region or around.settings.region),
        backend=backend_of(instances, backend),
        num_nodes=typed["num_nodes"],
        allow_tcp=typed["allow_tcp"],
        purchase=typed["purchase"],
        max_price_usd=typed["max_price"],
        reservation=typed["reservation"],
        block_fee_usd=typed["block_fee"],
        keep_alive_minutes=typed["keep_alive"],
        training_plan=typed["training_plan"],
    )
    check_terms(terms)
    return terms


def _wanted(around: Surroundings, catalogue: "Catalogue", terms: CloudTerms) -> "Wanted":
    from fastlaunch.catalog.container_images import training_base
    from fastlaunch.cloud_request import instances_of
    from fastlaunch.preflight_wanted import Wanted

    return Wanted(
        instances=instances_of(terms, catalogue) if terms.instances else (),
        regions=terms.regions,
        backend=terms.backend,
        purchase=terms.purchase,
        max_price_usd=terms.max_price_usd,
        num_nodes=terms.num_nodes,
        base=training_base(None, today=around.now().date()),
        reservation=terms.reservation,
        block_fee_usd=terms.block_fee_usd,
        keep_alive_minutes=terms.keep_alive_minutes,
        has_plan=terms.training_plan is not None,
        is_unfollowed=True,
    )


def _config_file() -> "Check":
    from fastlaunch.core.settings import config_path
    from fastlaunch.placement.check import Check, Result

    path = config_path()
    there = "" if path.exists() else ", which does not exist yet"
    return Check(name="config file", result=Result.OK, told=f"{path}{there}")


def _exit_code(found: Sequence["Check"]) -> int:
    """3 if AWS refused anything, else 2 for what is wrong here, 0 if nothing is."""
    codes = {check.error.exit_code for check in found if check.error is not None}
    return EXIT_CLOUD_REFUSED if EXIT_CLOUD_REFUSED in codes else max(codes, default=EXIT_DONE)


def _where(check: "Check") -> str:
    """`p5.48xlarge in us-east-1`, `us-east-1a`, or nothing for what concerns all."""
    place = check.zone or check.region
    return " in ".join(filter(None, (check.instance, place)))


def _tell(found: Sequence["Check"]) -> None:
    rows = []
    lines = []
    for check in found:
        # What asks for something to be done is told in full below the table.
        is_brief = check.result == "ok" or (check.result == "not checked" and not check.hint)
        told = check.told if is_brief else None
        rows.append({"result": str(check.result), "check": check.name, "where": _where(check), "told": told})
        if not is_brief:
            about = f"{check.name} ({_where(check)})" if _where(check) else check.name
            lines += [f"{check.result}: {about}: {check.told}", *([f"  {check.hint}"] if check.hint else [])]
    counts = Counter(str(check.result) for check in found)
    counted = ", ".join(f"{number} {result}" for result, number in counts.items())
    click.echo("\n".join([table(rows, _HEADERS), "", *lines, f"{len(found)} checks: {counted}."]))


def _tell_json(found: Sequence["Check"]) -> None:
    told = [
        {
            "name": check.name,
            "result": str(check.result),
            "region": check.region,
            "zone": check.zone,
            "instance": check.instance,
            "told": check.told,
            "hint": check.hint,
            "error": type(check.error).__name__ if check.error else None,
        }
        for check in found
    ]
    click.echo(json.dumps({"ok": _exit_code(found) == EXIT_DONE, "checks": told}, indent=2))


def _next(around: Surroundings, found: Sequence["Check"], wanted: "Wanted") -> str:
    if any(check.name == "login" and isinstance(check.error, NotAuthorised) for check in found):
        return "aws configure   (or `aws sso login`), then fastlaunch doctor"
    if any(check.error is not None for check in found):
        return f"mend the first that failed, then {shlex.join(['fastlaunch', *around.argv])}"
    if not wanted.instances:
        return f"fastlaunch doctor --instance {'ml.' if wanted.backend == 'sagemaker' else ''}p5.48xlarge"
    # What was checked: every option of the check is one of the job's.
    typed = around.argv[around.argv.index("doctor") + 1 :]
    saving = ["--checkpoint-every", "50"] if wanted.purchase == "spot" else []
    return shlex.join(["fastlaunch", "submit", *typed, "--recipe", "bf16", *saving, "--dry-run"])

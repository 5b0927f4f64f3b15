"""`fastlaunch doctor`: what a job on AWS would meet, before it costs anything."""

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from fastlaunch.cli.cloud_options import split_names
from fastlaunch.cli.listing import table
from fastlaunch.cli.options import USD, next_command, table_or_json_option
from fastlaunch.cli.surroundings import Surroundings, surroundings
from fastlaunch.errors import EXIT_CLOUD_REFUSED, EXIT_DONE, NotAuthorised, UnknownName
from fastlaunch.shipped import shipped

if TYPE_CHECKING:
    from fastlaunch.preflight import Wanted
    from fastlaunch.preflight_check import Check

_HEADERS = {"result": "result", "check": "check", "where": "where", "told": ""}
_PURCHASES = ("on-demand", "spot")


@click.command(short_help="What a job on AWS would meet: login, quota, image, network, bucket, price.")
@click.option("--instance", metavar="TYPE[,TYPE]", help="Check what a job on it needs, quota and price too.")
@click.option("--region", metavar="REGION[,REGION]", help="Where to buy it.  [default: yours, or us-east-1]")
@click.option(
    "--purchase", default="on-demand", show_default=True, metavar="OPTION", help="on-demand or spot."
)
@click.option("--max-price", type=USD, metavar="USD", help="Most paid for an hour of spot.")
@click.option("--setup", is_flag=True, help="Print what an account needs, with the commands; ask nothing.")
@table_or_json_option("the checks are")
def doctor(
    instance: str | None, region: str | None, purchase: str, max_price: float | None, setup: bool, output: str
) -> int:
    """What a job on AWS would meet: login, quota, image, network, bucket, price.

    Starts nothing. It asks, and writes one small object to the bucket. Ends with 0 if nothing failed, with 3
    if AWS would refuse, with 2 if the config file or the command would have to change.

    \b
      fastlaunch doctor --instance p5.48xlarge,p5en.48xlarge --region us-east-1,us-west-2
      fastlaunch doctor --setup | less
    """
    from fastlaunch.preflight import checks
    from fastlaunch.prices import load_catalogue

    if setup:
        click.echo(shipped("docs/aws-setup.md").read_text(encoding="utf-8"), nl=False)
        return EXIT_DONE
    around = surroundings()
    catalogue = load_catalogue(around.settings.prices)
    wanted = _wanted(around, catalogue.instance, instance, region, purchase, max_price)
    today = around.now().date()
    found = [_config_file()]
    found += checks(wanted, aws=around.aws, settings=around.settings, catalogue=catalogue, today=today)
    (_tell_json if output == "json" else _tell)(found)
    next_command(_next(around, found, instance))
    return _exit_code(found)


def _wanted(
    around: Surroundings,
    instance_named: Any,
    instance: str | None,
    region: str | None,
    purchase: str,
    max_price: float | None,
) -> "Wanted":
    from fastlaunch.images import find_base_image
    from fastlaunch.preflight import Wanted

    if purchase not in _PURCHASES:
        raise UnknownName("purchase option", purchase, _PURCHASES)
    return Wanted(
        instances=tuple(instance_named(name) for name in split_names(instance or "")),
        regions=split_names(region or around.settings.region),
        purchase=purchase,
        max_price_usd=max_price,
        base=find_base_image(None, flavour="ec2", today=around.now().date()),
    )


def _config_file() -> "Check":
    from fastlaunch.preflight_check import Check, Result
    from fastlaunch.settings import config_path

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


def _next(around: Surroundings, found: Sequence["Check"], instance: str | None) -> str:
    if any(check.name == "login" and isinstance(check.error, NotAuthorised) for check in found):
        return "aws configure   (or `aws sso login`), then fastlaunch doctor"
    if any(check.error is not None for check in found):
        return f"mend the first that failed, then {shlex.join(['fastlaunch', *around.argv])}"
    if instance is None:
        return "fastlaunch doctor --instance p5.48xlarge"
    return f"fastlaunch submit --instance {instance} --recipe bf16 --dry-run"

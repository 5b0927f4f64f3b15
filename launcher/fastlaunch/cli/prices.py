"""`fastlaunch prices`: what instances cost, and who says so."""

import datetime
import json
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from fastlaunch.api import listing as api
from fastlaunch.api.results import Prices
from fastlaunch.catalog.hardware import PURCHASE_OPTIONS
from fastlaunch.catalog.prices import SERVICES, UPDATE_COMMAND, age_note
from fastlaunch.cli.context import app_context
from fastlaunch.cli.options import DATE, examples, next_command, output_option, output_width, profile_option
from fastlaunch.cli.render import print_rows
from fastlaunch.core.errors import EXIT_CLOUD_REFUSED
from fastlaunch.core.terminal import as_warning, report_line
from fastlaunch.core.units import first_names, split_names

#: Longer lines of sources are hard to read.
_COLUMNS = 100
#: `--sort` -> the sort key of its rows.
_SORTED_BY: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "gpu": lambda row: float(row["paid_usd_per_hour"]) / int(row["num_accelerators"]),
    "machine": lambda row: float(row["paid_usd_per_hour"]),
}


@click.group(
    invoke_without_command=True,
    short_help="What instances cost, by whom and since when; update it.",
    epilog=examples(
        ("what p5 costs now", "fastlaunch prices --instance 'p5*'"),
        (
            "everywhere, on another day",
            "fastlaunch prices --instance p5.48xlarge --region '*' --as-of 2025-06-01",
        ),
        (
            "eight H100 on spot, the cheapest first",
            "fastlaunch prices --gpu H100:8 --purchase spot --region '*' --sort gpu",
        ),
        ("ask AWS for new ones", "fastlaunch prices update"),
    ),
)
@click.option(
    "--instance", "instance_glob", default="*", metavar="GLOB", help="Such as 'p5*'.  [default: all]"
)
@click.option("--gpu", metavar="NAME[:N]", help="Such as H100, or H100:8 for types with eight.")
@click.option("--region", "region_glob", metavar="GLOB", help="'*' for all.  [default: yours, or us-east-1]")
@click.option("--service", type=click.Choice(SERVICES), help="EC2, or SageMaker training.  [default: both]")
@click.option("--purchase", type=click.Choice(PURCHASE_OPTIONS), help="Bought how.  [default: any way]")
@click.option("--as-of", type=DATE, metavar="DATE", help="The prices in force on this day.  [default: today]")
@click.option(
    "--prices", "price_file", type=click.Path(path_type=Path), metavar="FILE", help="Your own prices."
)
@click.option("--all", "history", is_flag=True, help="Also the prices that were in force before.")
@click.option(
    "--sort", type=click.Choice(list(_SORTED_BY)), help="The cheapest first, per GPU or per machine."
)
@click.option("--quotas", is_flag=True, help="Ask AWS how many of each your quotas allow.")
@output_option
@profile_option
@click.pass_context
def prices(
    ctx: click.Context,
    instance_glob: str,
    gpu: str | None,
    region_glob: str | None,
    service: str | None,
    purchase: str | None,
    as_of: datetime.date | None,
    price_file: Path | None,
    history: bool,
    sort: str | None,
    quotas: bool,
    output: str,
) -> None:
    """What instances cost, with dates and sources.

    USD per hour of the whole instance: on demand, on EC2 and for SageMaker training, by region; and, as of
    the last `prices update`, spot and capacity blocks by zone. A price holds from its date until the next
    one. FILE (or `prices` in the config file) has the layout of instance_prices.yaml and is put over it entry
    by entry.

    "you pay" is by the discount and rates of the config file. Interruption is the share of spot instances
    that AWS took back in a month, by Spot Advisor on 2025-06-28.
    """
    if ctx.invoked_subcommand is not None:
        return
    chosen = api.prices(
        instance_glob,
        gpu=gpu,
        region=region_glob,
        service=service,
        purchase=purchase,
        as_of=as_of,
        prices=price_file,
        history=history,
        quotas=quotas,
        context=app_context(),
    )
    rows = chosen.to_json()
    if sort:
        rows.sort(key=_SORTED_BY[sort])
    if output == "json":
        click.echo(json.dumps({"schema": 1, "as_of": chosen.as_of.isoformat(), "prices": rows}, indent=2))
    elif output == "csv":
        print_rows([{**row, "inferred": str(row["inferred"]).lower()} for row in rows], output="csv")
    else:
        _print_table(rows, has_quotas=quotas)
    _print_hints(chosen, history=history, is_dated=as_of is not None)


@prices.command(
    "check",
    short_help="What is old of the prices.",
    epilog=examples(
        ("how old the prices in force are", "fastlaunch prices check"),
    ),
)
@output_option
@profile_option
def check(output: str) -> None:
    """Show by service and region how old the prices in force are: old after 7 days, spot's after an hour."""
    ages = api.price_ages(context=app_context())
    rows = [
        {
            "service": age.service,
            "region": age.region,
            "prices": age.num_prices,
            "oldest": age.oldest,
            "age_hours": age.age_hours,
            "old": age.is_old,
        }
        for age in ages
    ]
    cells = [{**row, "old": "old" if row["old"] else ""} for row in rows]
    print_rows(cells if output == "table" else rows, output=output)
    num_old = sum(age.is_old for age in ages)
    click.echo(f"{num_old} of {len(ages)} are old.", err=True)
    next_command(UPDATE_COMMAND if num_old else "fastlaunch prices")


@prices.command(
    "update",
    short_help="Ask AWS what everything costs now.",
    epilog=examples(
        ("in your regions", "fastlaunch prices update"),
        ("in these", "fastlaunch prices update --region us-east-1,us-west-2"),
    ),
)
@click.option("--region", "regions", metavar="R,...", help="[default: yours, and those in the config file]")
@click.option("--accept", is_flag=True, help="Take also prices that changed more than tenfold.")
@output_option
@profile_option
def update(regions: str | None, accept: bool, output: str) -> int:
    """Ask AWS what the known instance types cost now, and keep it in FASTLAUNCH_HOME.

    On demand on EC2 and for SageMaker training, by the AWS Price List API; spot by zone; and capacity blocks
    of a day. Prints what changed. What AWS does not say stays as it was, with its old date, and so does what
    changed more than tenfold, unless --accept is given; the exit code is then 3. A price file of your own
    goes over it.
    """
    from fastlaunch.api.price_update import update_prices

    update = update_prices(split_names(regions or ""), accept=accept, context=app_context())
    rows = [
        {
            "change": change.kind,
            "instance": change.instance,
            "service": change.service,
            "region": change.region,
            "from": change.from_usd_per_hour,
            "to": change.to_usd_per_hour,
            "percent": None if change.percent is None else round(change.percent, 2),
        }
        for change in update.changes
    ]
    if output == "json":
        fields = {"unchanged": update.num_unchanged, "market": update.num_market, "failures": update.failures}
        click.echo(json.dumps({"schema": 1, "changes": rows, **fields}, indent=2))
    elif rows or output == "csv":
        cells = [
            {
                **row,
                "from": "" if row["from"] is None else f"{row['from']:g}",
                "to": "" if row["to"] is None else f"{row['to']:g}",
                "percent": "" if row["percent"] is None else f"{row['percent']:+.1f}%",
            }
            for row in rows
        ]
        headers = {name: name for name in cells[0]} | {"from": "from $/h", "to": "to $/h"} if cells else None
        print_rows(cells if output == "table" else rows, output=output, headers=headers)
    kinds = Counter[str](change.kind for change in update.changes)
    told_kinds = (kind for kind in ("changed", "added", "gone") if kinds[kind] or kind == "changed")
    same = ", ".join([*(f"{kinds[kind]} {kind}" for kind in told_kinds), f"{update.num_unchanged} the same"])
    looked = rows or update.num_unchanged or update.num_market or not update.failures
    line = (
        f"{same}; {update.num_market} prices of spot and capacity blocks."
        if looked
        else "nothing was updated"
    )
    click.echo(line, err=True)
    for failure in update.failures:
        click.echo(f"not updated: {failure}", err=True)
    # Fails here if the user is not logged in or may not ask.
    next_command("fastlaunch doctor" if update.failures else "fastlaunch prices")
    return EXIT_CLOUD_REFUSED if update.failures else 0


def _print_table(rows: Sequence[Mapping[str, Any]], *, has_quotas: bool) -> None:
    """Print a row per price. The few long sources are numbered below the table."""
    notes = [f"~ inferred: {row['source']}" if row["inferred"] else row["source"] for row in rows]
    numbers = {note: number for number, note in enumerate(dict.fromkeys(notes), start=1)}
    headers = {
        "instance": "instance",
        "accelerators": "accelerators",
        "service": "service",
        "place": "region",
        "usd": "$/h",
        "usd_per_gpu": "$/GPU-h",
        **(
            {"paid": "you pay"}
            if any(row["paid_usd_per_hour"] != row["usd_per_hour"] for row in rows)
            else {}
        ),
        "as_of": "as of",
        **({"quota": "quota"} if has_quotas else {}),
        **({"interruption": "interruption"} if any(row["interruption"] for row in rows) else {}),
        "source": "source",
    }
    is_mixed = any(row["purchase"] != "on-demand" for row in rows)
    cells = [
        {
            **row,
            "accelerators": f"{row['num_accelerators']}x {row['accelerator']}",
            "service": f"{row['service']} {row['purchase']}" if is_mixed else row["service"],
            "place": row["zone"] or row["region"],
            "usd": f"{'~' if row['inferred'] else ''}{row['usd_per_hour']:.4f}",
            "usd_per_gpu": f"{row['usd_per_accelerator_hour']:.4f}",
            "paid": f"{row['paid_usd_per_hour']:.4f}",
            "quota": _quota_text(row),
            "source": f"[{numbers[note]}]",
        }
        for row, note in zip(rows, notes, strict=True)
    ]
    print_rows(cells, output="table", headers=headers, spare=("usd_per_gpu", "accelerators"))
    click.echo()
    width = min(_COLUMNS, shutil.get_terminal_size(fallback=(_COLUMNS, 1)).columns)
    for note, number in numbers.items():
        click.echo(textwrap.fill(f"[{number}] {note}", width, subsequent_indent="    "))


def _quota_text(row: Mapping[str, Any]) -> str:
    """Return how many instances the quota allows."""
    if row["purchase"] == "capacity-block":
        return "none needed"
    return "not known" if row["quota"] is None else f"for {row['quota']}"


def _print_hints(chosen: Prices, *, history: bool, is_dated: bool) -> None:
    """Print what the prices leave out and what to type next, on stderr."""
    in_force = {price.key[:4]: price.as_of for price in chosen}
    if note := None if is_dated else age_note(in_force.values(), chosen.as_of):
        report_line(as_warning(note))
    if chosen.unpriced:
        names = first_names(chosen.unpriced, 5)
        text = f"no price known in {chosen.region} on {chosen.as_of}: {names}"
        click.echo(textwrap.fill(text, output_width(), break_on_hyphens=False), err=True)
    if history:
        following = f"fastlaunch compare --prices-as-of {min(price.as_of for price in chosen)}"
    else:
        following = f"fastlaunch prices --instance {chosen[0].instance} --all"
    next_command(following)

"""`fastlaunch prices`: what instances cost, and who says so."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import click

from fastlaunch.api import listing as api
from fastlaunch.catalog.hardware import OFFERS
from fastlaunch.catalog.prices import SERVICES, UPDATE_COMMAND, age_note
from fastlaunch.cli.context import answer_first, app_context
from fastlaunch.cli.options import (
    DATE,
    NAMES,
    examples,
    next_command,
    output_option,
    price_file_option,
    print_json,
    profile_option,
    terminal_width,
    wrapped,
)
from fastlaunch.cli.render import print_rows
from fastlaunch.core.errors import EXIT_CLOUD_REFUSED
from fastlaunch.core.tables import SPARE, Column, keyed, table
from fastlaunch.core.terminal import as_warning, report_line
from fastlaunch.core.units import first_names

Row = Mapping[str, Any]
#: Longer lines of sources are hard to read.
_COLUMNS = 100


@click.group(
    invoke_without_command=True,
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
    "--instance",
    default="*",
    metavar="GLOB",
    help="Show instance types with such names, as in 'p5*'.  [default: all]",
)
@click.option(
    "--gpu", metavar="NAME[:N]", help="Show types with this GPU, such as H100, or H100:8 for eight of it."
)
@click.option(
    "--region",
    metavar="GLOB",
    help="Show prices in this region, '*' for all.  [default: yours, or us-east-1]",
)
@click.option(
    "--service", type=click.Choice(SERVICES), help="Show prices of EC2, or SageMaker.  [default: both]"
)
@click.option("--purchase", type=click.Choice(OFFERS), help="Show prices of this option.  [default: all]")
@click.option(
    "--as-of", type=DATE, metavar="DATE", help="Show the prices in force on this day.  [default: today]"
)
@price_file_option
@click.option("--all", "history", is_flag=True, help="Show earlier prices too.")
@click.option("--sort", type=click.Choice(["gpu", "machine"]), help="Sort by price, per GPU or per machine.")
@click.option("--quotas", is_flag=True, help="Ask AWS how many of each type your quotas allow.")
@output_option
@profile_option
@click.pass_context
def prices(ctx: click.Context, /, sort: str | None, output: str, **options: Any) -> None:
    """Show what instances cost, with dates and sources.

    Prices are USD per hour of the whole instance: on demand, on EC2 and for SageMaker training, by region;
    and, as of the last `prices update`, spot and capacity blocks by zone. A price holds from its date until
    the next one. FILE, like `prices` in the config file, has the layout of instance_prices.yaml and replaces
    shipped prices entry by entry.

    "you pay" counts the discount and rates of the config file. Interruption is the share of spot instances
    that AWS took back in a month, by Spot Advisor on 2025-06-28.
    """
    if ctx.invoked_subcommand is not None:
        return
    with answer_first() as context:
        chosen = api.prices(context=context, **options)
        rows = chosen.to_json()
        if sort:
            by_gpu = sort == "gpu"
            rows.sort(key=lambda row: row["paid_usd_per_hour"] / (row["num_accelerators"] if by_gpu else 1))
        if output == "json":
            print_json({"schema": 1, "as_of": chosen.as_of.isoformat(), "prices": rows})
        elif output == "csv":
            flags = ("inferred", "secondary")
            as_words = [{**row, **{name: str(row[name]).lower() for name in flags}} for row in rows]
            print_rows(as_words, output="csv")
        else:
            _print_table(rows, has_quotas=options["quotas"])
    in_force = {price.key[:4]: price.as_of for price in chosen}
    if options["as_of"] is None and (note := age_note(in_force.values(), chosen.as_of)):
        report_line(as_warning(note))
    if chosen.unpriced:
        names = first_names(chosen.unpriced, 5)
        click.echo(wrapped(f"no price known in {chosen.region} on {chosen.as_of}: {names}"), err=True)
    if options["history"]:
        next_command(f"fastlaunch compare --prices-as-of {min(price.as_of for price in chosen)}")
    else:
        next_command(f"fastlaunch prices --instance {chosen[0].instance} --all")


@prices.command(
    "check",
    short_help="Show how old the prices in force are.",
    epilog=examples(("by service and region", "fastlaunch prices check")),
)
@output_option
@profile_option
def check(output: str) -> None:
    """Show how old the prices in force are, by service and region.

    A listed price is old after 7 days, that of spot or a capacity block after an hour.
    """
    rows = api.price_ages(context=app_context())
    cells = [{**row, "old": "old" if row["old"] else ""} for row in rows]
    print_rows(cells if output == "table" else rows, output=output)
    num_old = sum(row["old"] for row in rows)
    click.echo(f"{num_old} of {len(rows)} are old.", err=True)
    next_command(UPDATE_COMMAND if num_old else "fastlaunch prices")


@prices.command(
    "update",
    short_help="Ask AWS what everything costs now.",
    epilog=examples(
        ("in your regions", "fastlaunch prices update"),
        ("in these", "fastlaunch prices update --region us-east-1,us-west-2"),
    ),
)
@click.option(
    "--region",
    "regions",
    type=NAMES,
    default="",
    metavar="R,...",
    help="Ask for prices in these regions.  [default: yours, and those in the config file]",
)
@click.option("--accept", is_flag=True, help="Take prices that changed more than tenfold too.")
@output_option
@profile_option
def update(regions: tuple[str, ...], accept: bool, output: str) -> int:
    """Ask AWS what the known instance types cost now, keep it in FASTLAUNCH_HOME, and print what changed.

    The AWS Price List API gives the prices on demand, of EC2 and SageMaker training; EC2 gives those of spot
    by zone, and of capacity blocks for a day. A price that AWS does not give stays as it was, with its old
    date; so does one that changed more than tenfold, unless --accept is given. The exit code is then 3. A
    price file of your own still counts before these prices.
    """
    from fastlaunch.lifecycle.price_update import update_prices

    update = update_prices(regions, accept=accept, context=app_context())
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
        print_json({"schema": 1, "changes": rows, **fields})
    elif output == "csv":
        print_rows(rows, output="csv")
    elif rows:
        columns: list[Column[Row]] = [
            *keyed({name: name for name in ("change", "instance", "service", "region")}),
            Column("from $/h", itemgetter("from"), format="{:g}".format),
            Column("to $/h", itemgetter("to"), format="{:g}".format),
            Column("percent", itemgetter("percent"), format="{:+.1f}%".format),
        ]
        click.echo(table(rows, columns, terminal_width()))
    kinds = Counter[str](change.kind for change in update.changes)
    shown = [kind for kind in ("changed", "added", "gone") if kinds[kind] or kind == "changed"]
    counts = [f"{kinds[kind]} {kind}" for kind in shown]
    counts.append(f"{update.num_unchanged} the same; {update.num_market} prices of spot and capacity blocks.")
    looked = rows or update.num_unchanged or update.num_market or not update.failures
    click.echo(", ".join(counts) if looked else "nothing was updated", err=True)
    for failure in update.failures:
        click.echo(f"not updated: {failure}", err=True)
    # `doctor` says if the user is not logged in or lacks a right.
    next_command("fastlaunch doctor" if update.failures else "fastlaunch prices")
    return EXIT_CLOUD_REFUSED if update.failures else 0


def _print_table(rows: Sequence[Row], *, has_quotas: bool) -> None:
    """Print a row per price. The few long sources are numbered below the table."""
    notes = [f"~ inferred: {row['source']}" if row["inferred"] else row["source"] for row in rows]
    numbers = {note: number for number, note in enumerate(dict.fromkeys(notes), start=1)}
    is_mixed = any(row["purchase"] != "on-demand" for row in rows)
    columns: list[Column[Row]] = [
        Column("instance", itemgetter("instance")),
        Column(
            "accelerators", lambda row: f"{row['num_accelerators']}x {row['accelerator']}", importance=SPARE
        ),
        Column("service", lambda row: f"{row['service']} {row['purchase']}" if is_mixed else row["service"]),
        Column("region", lambda row: row["zone"] or row["region"]),
        Column("$/h", lambda row: f"{'~' if row['inferred'] else ''}{row['usd_per_hour']:.4f}"),
        Column("$/GPU-h", lambda row: f"{row['usd_per_accelerator_hour']:.4f}", importance=SPARE - 1),
        Column("you pay", lambda row: f"{row['paid_usd_per_hour']:.4f}"),
        Column("as of", itemgetter("as_of")),
        Column("quota", _quota_text),
        Column("interruption", itemgetter("interruption")),
        Column("source", lambda row: f"[{numbers[row['note']]}]"),
    ]
    left_out = set() if has_quotas else {"quota"}
    if all(row["paid_usd_per_hour"] == row["usd_per_hour"] for row in rows):
        left_out |= {"you pay"}
    shown = [column for column in columns if column.name not in left_out]
    cells = [{**row, "note": note} for row, note in zip(rows, notes, strict=True)]
    click.echo(table(cells, shown, terminal_width()) + "\n")
    for note, number in numbers.items():
        text = f"[{number}] {note}"
        click.echo(textwrap.fill(text, min(_COLUMNS, terminal_width() or _COLUMNS), subsequent_indent="    "))
    if commands := [row["buying"] for row in rows if row["buying"]]:
        click.echo("\nfastlaunch buys nothing. AWS's commands for what is on offer:")
        for command in commands:
            click.echo(f"  {command}")


def _quota_text(row: Row) -> str:
    """Return how many instances the quota allows."""
    if row["purchase"] == "capacity-block":
        return "none needed"
    return "not known" if row["quota"] is None else f"for {row['quota']}"

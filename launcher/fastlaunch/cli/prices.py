"""`fastlaunch prices`: what instances cost, and who says so."""

import datetime
import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from fastlaunch.catalog.load import load_catalogue
from fastlaunch.catalog.prices import SERVICES, Catalogue, Price
from fastlaunch.cli.options import DATE, next_command, output_option
from fastlaunch.cli.render import print_rows
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.settings import load_settings

#: Sources are hard to read in longer lines.
_COLUMNS = 100


@click.command(short_help="Instance prices with their dates and sources.")
@click.option(
    "--instance", "instance_glob", default="*", metavar="GLOB", help="Such as 'p5*'.  [default: all]"
)
@click.option("--region", "region_glob", metavar="GLOB", help="'*' for all.  [default: yours, or us-east-1]")
@click.option("--service", type=click.Choice(SERVICES), help="EC2, or SageMaker training.  [default: both]")
@click.option("--as-of", type=DATE, metavar="DATE", help="The prices in force on this day.  [default: today]")
@click.option(
    "--prices", "price_file", type=click.Path(path_type=Path), metavar="FILE", help="Your own prices."
)
@click.option("--all", "history", is_flag=True, help="Also the prices that were in force before.")
@output_option
def prices(
    instance_glob: str,
    region_glob: str | None,
    service: str | None,
    as_of: datetime.date | None,
    price_file: Path | None,
    history: bool,
    output: str,
) -> None:
    """Instance prices with their dates and sources.

    USD per hour of the whole instance, on demand, on EC2 and for SageMaker training. A price holds from its
    date until the next one. FILE (or `prices` in the config file) has the layout of instance_prices.yaml and
    is put over it entry by entry.
    """
    settings = load_settings()
    day = as_of or datetime.date.today()
    catalogue = load_catalogue(price_file or settings.prices)
    instances = _matching(catalogue, instance_glob)
    region = region_glob or settings.region
    chosen = _select(catalogue, instances, region=region, service=service, day=day, history=history)
    if not chosen:
        raise _nothing_known(catalogue, instances, region=region, service=service, day=day)
    rows = [_row(catalogue, price) for price in chosen]
    if output == "json":
        click.echo(json.dumps({"schema": 1, "as_of": day.isoformat(), "prices": rows}, indent=2))
    elif output == "csv":
        print_rows([{**row, "inferred": str(row["inferred"]).lower()} for row in rows], output="csv")
    else:
        _print_table(rows)
    _print_hints(catalogue, instances, chosen, region=region, day=day, history=history)


def _matching(catalogue: Catalogue, glob: str) -> list[str]:
    matching = [name for name in catalogue.instances if fnmatchcase(name, glob.lower())]
    if not matching:
        raise UnknownName("instance", glob, catalogue.instances)
    return matching


def _select(
    catalogue: Catalogue,
    instances: Sequence[str],
    *,
    region: str,
    service: str | None,
    day: datetime.date,
    history: bool,
) -> list[Price]:
    """Return prices in the catalogue's order of instances: those in force on the day, or all up to it."""
    chosen: dict[tuple[Any, ...], Price] = {}
    for price in sorted(catalogue.prices, key=lambda price: price.as_of):
        matches = (
            price.as_of <= day and service in (None, price.service) and fnmatchcase(price.region, region)
        )
        if matches and price.instance in instances:
            # A later price takes the place of an earlier one, unless the history is wanted.
            chosen[price.key if history else price.key[:4]] = price
    place = {name: number for number, name in enumerate(instances)}
    return sorted(chosen.values(), key=lambda price: (place[price.instance], *price.key[1:]))


def _nothing_known(
    catalogue: Catalogue, instances: Sequence[str], *, region: str, service: str | None, day: datetime.date
) -> UserError:
    if len(instances) == 1 and not set("*?[") & set(region):
        try:
            catalogue.price(instances[0], service=service or "ec2", region=region, on=day)
        except UserError as error:
            return error
    known = sorted({price.region for price in catalogue.prices if price.instance in instances})
    what = f"{service} price" if service else "price"
    names = ", ".join(instances[:3]) + (", ..." if len(instances) > 3 else "")
    return UserError(
        f"no {what} of {names} in {region} is known for {day}",
        f"there are prices in {', '.join(known)}: see `fastlaunch prices --region '*' --all`"
        if known
        else "none is known in any region",
    )


def _row(catalogue: Catalogue, price: Price) -> dict[str, Any]:
    instance = catalogue.instances[price.instance]
    return {
        "instance": price.instance,
        "num_accelerators": instance.num_accelerators,
        "accelerator": instance.accelerator,
        "service": price.service,
        "region": price.region,
        "purchase": price.purchase,
        "usd_per_hour": price.usd_per_hour,
        "usd_per_accelerator_hour": round(price.usd_per_hour / instance.num_accelerators, 6),
        "as_of": price.as_of.isoformat(),
        "inferred": price.inferred,
        "source": price.source,
    }


def _print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a row per price; the sources, which are long and few, are numbered and stand underneath."""
    notes = [f"~ inferred: {row['source']}" if row["inferred"] else row["source"] for row in rows]
    numbers = {note: number for number, note in enumerate(dict.fromkeys(notes), start=1)}
    mixed = any(row["purchase"] != "on-demand" for row in rows)
    cells = [
        {
            "instance": row["instance"],
            "accelerators": f"{row['num_accelerators']}x {row['accelerator']}",
            "service": f"{row['service']} {row['purchase']}" if mixed else row["service"],
            "region": row["region"],
            "$/h": f"{'~' if row['inferred'] else ''}{row['usd_per_hour']:.4f}",
            "$/GPU-h": f"{row['usd_per_accelerator_hour']:.4f}",
            "as of": row["as_of"],
            "source": f"[{numbers[note]}]",
        }
        for row, note in zip(rows, notes, strict=True)
    ]
    print_rows(cells, output="table", droppable=("$/GPU-h", "accelerators"))
    click.echo()
    width = min(_COLUMNS, shutil.get_terminal_size(fallback=(_COLUMNS, 1)).columns)
    for note, number in numbers.items():
        click.echo(textwrap.fill(f"[{number}] {note}", width, subsequent_indent="    "))


def _print_hints(
    catalogue: Catalogue,
    instances: Sequence[str],
    chosen: Sequence[Price],
    *,
    region: str,
    day: datetime.date,
    history: bool,
) -> None:
    """Print what the prices leave out and what to type next, on stderr."""
    priced = {price.instance for price in chosen}
    unpriced = [name for name in instances if name not in priced]
    if unpriced:
        listing = ", ".join(unpriced[:5]) + (f" and {len(unpriced) - 5} more" if len(unpriced) > 5 else "")
        click.echo(f"no price known in {region} on {day}: {listing}", err=True)
    if history:
        following = f"fastlaunch compare --prices-as-of {min(price.as_of for price in chosen)}"
    else:
        following = f"fastlaunch prices --instance {chosen[0].instance} --all"
    next_command(following)

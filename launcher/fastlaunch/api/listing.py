"""`runs` and `prices`: what the ledger and the price file hold."""

import datetime
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlaunch.api.context import AppContext, default_context, reconcile_here
from fastlaunch.api.results import Prices, Runs
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.units import parse_date

if TYPE_CHECKING:
    from fastlaunch.catalog.prices import Catalogue, Price


def runs(*selectors: str, context: AppContext | None = None) -> Runs:
    """Return the runs in the ledger, the newest last.

    selectors: ids of runs, or `field=glob` on workload, recipe, instance, state, submission, backend or
    commit; all runs without any. Raises UserError for a selector that cannot be understood.
    """
    from fastlaunch.ledger.ledger import open_ledger

    context = context or default_context()
    with open_ledger(context.settings, clock=context.now) as ledger:
        reconcile_here(ledger, context)
        return Runs(ledger.fetch_comparable(selectors, all_runs=True))


def prices(
    instance: str = "*",
    *,
    region: str | None = None,
    service: str | None = None,
    as_of: datetime.date | str | None = None,
    prices: Path | str | None = None,
    history: bool = False,
    context: AppContext | None = None,
) -> Prices:
    """Return instance prices in USD per hour, on demand, with their dates and sources.

    instance, region: globs, such as `p5*`; the region is the user's own by default. service: `ec2` or
    `sagemaker`. as_of: the prices in force on this day, today by default. prices: a file over the shipped
    prices. history: also the prices that were in force before.

    Raises UserError if no price is known.
    """
    from fastlaunch.catalog.load import load_catalogue

    context = context or default_context()
    settings = context.settings
    day = (parse_date(as_of) if isinstance(as_of, str) else as_of) or context.now().date()
    catalogue = load_catalogue(*settings.price_files(Path(prices) if prices else None))
    instances = _matching(catalogue, instance)
    where = region or settings.region
    chosen = _select(catalogue, instances, region=where, service=service, day=day, history=history)
    if not chosen:
        raise _nothing_known(catalogue, instances, region=where, service=service, day=day)
    priced = {price.instance for price in chosen}
    unpriced = tuple(name for name in instances if name not in priced)
    return Prices(chosen, catalogue=catalogue, region=where, as_of=day, unpriced=unpriced)


def _matching(catalogue: "Catalogue", glob: str) -> list[str]:
    matching = [name for name in catalogue.instances if fnmatchcase(name, glob.lower())]
    if not matching:
        raise UnknownName("instance", glob, catalogue.instances)
    return matching


def _select(
    catalogue: "Catalogue",
    instances: Sequence[str],
    *,
    region: str,
    service: str | None,
    day: datetime.date,
    history: bool,
) -> "list[Price]":
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
    catalogue: "Catalogue", instances: Sequence[str], *, region: str, service: str | None, day: datetime.date
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

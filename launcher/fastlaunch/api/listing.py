"""`runs`, `prices` and `offers`: what the ledger and the price files hold."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlaunch.api.context import AppContext, default_context, reconcile_here
from fastlaunch.api.results import Prices, Runs
from fastlaunch.core.errors import CloudRefused, UnknownName, UserError
from fastlaunch.core.units import parse_date, utc_day

if TYPE_CHECKING:
    from fastlaunch.catalog.prices import Catalogue, Price

#: Spot prices and capacity blocks change by the hour.
MAX_MARKET_AGE = datetime.timedelta(hours=1)


def runs(*selectors: str, context: AppContext | None = None) -> Runs:
    """Return the runs in the ledger, the newest last.

    selectors: ids of runs, or `field=glob` on workload, recipe, instance, state, submission, backend, commit
    or version; all runs without any. Raises UserError for a selector that cannot be understood.
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
    day = (parse_date(as_of) if isinstance(as_of, str) else as_of) or context.today
    catalogue = load_catalogue(*settings.price_files(Path(prices) if prices else None))
    instances = _matching(catalogue, instance)
    where = region or context.own_region()
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


@dataclass(frozen=True, kw_only=True)
class PriceAge:
    """How old the prices of a service, or of a market, in a region are."""

    #: `ec2`, `sagemaker`, `spot`, `capacity-block`
    service: str
    region: str
    num_prices: int
    #: When the oldest was given: a day, or of a market price the time.
    oldest: str
    age_hours: float
    is_old: bool


def price_ages(*, context: AppContext | None = None) -> list[PriceAge]:
    """Return how old the prices in force are, those of AWS's markets after the listed ones."""
    from fastlaunch.catalog.load import load_catalogue
    from fastlaunch.catalog.prices import OLD_PRICE_DAYS, SERVICES
    from fastlaunch.catalog.updates import MARKET_PRICES, read_market

    context = context or default_context()
    settings, now = context.settings, context.now()
    dates: dict[tuple[str, str], dict[str, datetime.datetime]] = {}
    for price in sorted(load_catalogue(*settings.price_files()).prices, key=lambda price: price.as_of):
        if price.as_of <= utc_day(now):
            day = datetime.datetime.combine(price.as_of, datetime.time(), now.tzinfo)
            offer = f"{price.instance} {price.purchase}"
            dates.setdefault((price.service, price.region), {})[offer] = day
    for each in read_market(settings.home / MARKET_PRICES):
        dates.setdefault((each.purchase, each.region), {})[f"{each.instance} {each.zone}"] = each.given_at
    ages = []
    for (service, region), given in dates.items():
        oldest, is_listed = min(given.values()), service in SERVICES
        age = now - oldest
        limit = datetime.timedelta(days=OLD_PRICE_DAYS + 1) if is_listed else MAX_MARKET_AGE
        ages.append(
            PriceAge(
                service=service,
                region=region,
                num_prices=len(given),
                oldest=utc_day(oldest).isoformat() if is_listed else oldest.isoformat(timespec="minutes"),
                age_hours=round(age / datetime.timedelta(hours=1), 1),
                is_old=age >= limit if is_listed else age > limit,
            )
        )
    return ages


@dataclass(frozen=True, kw_only=True)
class Offer:
    """An instance type as AWS sells it in a place."""

    instance: str
    gpus: str
    purchase: str
    #: A region, or a zone of it.
    place: str
    #: On demand at the `discount` and `rates` of the config file.
    usd_per_hour: float
    usd_per_gpu: float
    #: A day, or of a market price the time.
    as_of: str
    #: For spot: the share of instances that AWS takes back in a month.
    interruption: str | None
    #: How many the account's quota allows at a time; None where it is not known, and of capacity blocks.
    quota: int | None = None


def offers(
    gpu: str | None = None,
    *,
    spot: bool = False,
    region: str | None = None,
    all_regions: bool = False,
    quotas: bool = False,
    context: AppContext | None = None,
) -> list[Offer]:
    """Return what EC2 sells where, by the prices that are known here, in the order of the catalogue.

    gpu: such as `H100` or `H100:8`. spot: nothing else. region: the user's own by default. quotas: ask AWS
    for them; what it refuses is reported, and stays unknown. Raises UnknownName for a GPU that the catalogue
    lacks, and UserError where no price is known.
    """
    from fastlaunch.aws.quota_codes import quota_code
    from fastlaunch.catalog.load import load_catalogue
    from fastlaunch.catalog.prices import UPDATE_COMMAND
    from fastlaunch.catalog.updates import MARKET_PRICES, interruption, read_market

    context = context or default_context()
    settings, today = context.settings, context.today
    catalogue = load_catalogue(*settings.price_files())
    name, _, count = (gpu or "").partition(":")
    # `A100` is each of its sizes, and `L4` is no L40S.
    start = f"{name} ".lstrip().lower()
    models = [each for each in catalogue.accelerators if f"{each} ".lower().startswith(start)]
    if not models or (count and not count.isdecimal()):
        raise UnknownName("GPU", gpu or "", catalogue.accelerators)
    chosen = {
        key: each
        for key, each in catalogue.instances.items()
        if each.accelerator in models and (not count or each.num_accelerators == int(count))
    }
    known = sorted({price.region for price in catalogue.prices})
    listed = (catalogue.find_price(key, region=place, on=today) for key in chosen for place in known)
    prices: list[tuple[str, str, str, str, float, str]] = [
        (
            *(each.instance, each.purchase, each.region, each.region),
            settings.paid_usd_per_hour(each.instance, each.usd_per_hour),
            each.as_of.isoformat(),
        )
        for each in listed
        if each is not None
    ] + [
        (each.instance, each.purchase, each.region, each.zone, each.usd_per_hour, each.at)
        for each in read_market(settings.home / MARKET_PRICES)
        if each.instance in chosen
    ]
    wanted = region or context.own_region()
    quota = cache(partial(_quota_vcpus, context))
    found = [
        Offer(
            instance=instance,
            gpus=f"{chosen[instance].num_accelerators}x {chosen[instance].accelerator}",
            purchase=purchase,
            place=place,
            usd_per_hour=usd,
            usd_per_gpu=round(usd / chosen[instance].num_accelerators, 6),
            as_of=as_of,
            interruption=interruption(instance, within) if purchase == "spot" else None,
            quota=int(vcpus // chosen[instance].vcpus)
            if quotas
            and (code := quota_code(instance, purchase))
            and (vcpus := quota(within, code.code)) is not None
            else None,
        )
        for instance, purchase, within, place, usd, as_of in prices
        if (all_regions or within == wanted) and (not spot or purchase == "spot")
    ]
    if not found:
        where = "any region" if all_regions else wanted
        what = "spot price" if spot else "price"
        raise UserError(
            f"no {what} of these is known in {where}", f"type: {UPDATE_COMMAND} --region {wanted}"
        )
    return found


def _quota_vcpus(context: AppContext, region: str, code: str) -> float | None:
    """Return the account's quota, or AWS's default; None, with a report, where AWS refuses to say."""
    try:
        own = context.aws.quota(region, "ec2", code)
        return own if own is not None else context.aws.default_quota(region, "ec2", code)
    except CloudRefused as error:
        context.report(f"warning: the quota {code} in {region} is not known: {error.message}")
        return None

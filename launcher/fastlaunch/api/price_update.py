"""`prices update`: the price lists of AWS, laid over the shipped prices."""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fastlaunch.api.context import AppContext, default_context
from fastlaunch.aws.client import Aws
from fastlaunch.aws.pricing import Product
from fastlaunch.catalog.load import load_catalogue, read_catalogue
from fastlaunch.catalog.prices import OLD_PRICE_DAYS, SERVICES, UPDATE_COMMAND, Catalogue, Price
from fastlaunch.catalog.updates import (
    MARKET_PRICES,
    MarketPrice,
    PriceChange,
    by_time,
    interruption,
    price_changes,
    read_market,
    with_newer,
    write_market,
    write_prices,
)
from fastlaunch.core.errors import CloudRefused, UnknownName, UserError
from fastlaunch.core.home import make_folder
from fastlaunch.core.locks import held
from fastlaunch.core.settings import UPDATED_PRICES
from fastlaunch.core.units import is_region

#: Over which spot's median and 90th percentile are taken.
SPOT_DAYS = 7
#: Of the capacity blocks that are asked for.
BLOCK_HOURS = 24
#: Spot prices and capacity blocks change by the hour.
MAX_MARKET_AGE = datetime.timedelta(hours=1)

T = TypeVar("T")


@dataclass(kw_only=True)
class PriceUpdate:
    """What an update found. What it could not find out stays as it was, with its old date."""

    changes: list[PriceChange] = field(default_factory=list)
    #: On demand; and of spot and capacity blocks, which are new each time.
    num_unchanged: int = 0
    num_market: int = 0
    #: What was not updated, and why.
    failures: list[str] = field(default_factory=list)


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
    context = context or default_context()
    settings, now = context.settings, context.now()
    dates: dict[tuple[str, str], dict[str, datetime.datetime]] = {}
    for price in sorted(load_catalogue(*settings.price_files()).prices, key=lambda price: price.as_of):
        if price.as_of <= now.date():
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
                oldest=oldest.date().isoformat() if is_listed else oldest.isoformat(timespec="minutes"),
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
    usd_per_hour: float
    usd_per_gpu: float
    #: A day, or of a market price the time.
    as_of: str
    #: Of spot: the share of instances that AWS takes back in a month.
    interruption: str | None


def offers(
    gpu: str | None = None,
    *,
    spot: bool = False,
    region: str | None = None,
    all_regions: bool = False,
    context: AppContext | None = None,
) -> list[Offer]:
    """Return what EC2 sells where, by the prices that are known here, in the order of the catalogue.

    gpu: such as `H100` or `H100:8`. spot: nothing else. region: the user's own by default. Raises UnknownName
    for a GPU that the catalogue lacks, and UserError where no price is known.
    """
    context = context or default_context()
    settings, today = context.settings, context.now().date()
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
        (each.instance, each.purchase, each.region, each.region, each.usd_per_hour, each.as_of.isoformat())
        for each in listed
        if each is not None
    ] + [
        (each.instance, each.purchase, each.region, each.zone, each.usd_per_hour, each.at)
        for each in read_market(settings.home / MARKET_PRICES)
        if each.instance in chosen
    ]
    wanted = region or settings.region
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


def update_prices(regions: Sequence[str] = (), *, context: AppContext | None = None) -> PriceUpdate:
    """Bring the prices of the regions up to date: on demand, SageMaker training, spot, capacity blocks.

    regions: the user's own by default, and those that the config file names under `aws`. Raises UserError for
    a name that is none. What AWS refuses is among the failures.
    """
    context = context or default_context()
    settings = context.settings
    chosen = tuple(dict.fromkeys(regions or (settings.region, *settings.aws)))
    for region in chosen:
        if not is_region(region):
            raise UserError(f"{region!r} is not the name of a region", "give one such as us-east-1")
    make_folder(settings.home)
    with held(settings.home / f"{UPDATED_PRICES}.lock"):
        return _update(context, chosen)


def _update(context: AppContext, regions: Sequence[str]) -> PriceUpdate:
    path, market_path = (context.settings.home / name for name in (UPDATED_PRICES, MARKET_PRICES))
    # Without the user's own prices, which are not AWS's.
    known = load_catalogue(*((path,) if path.exists() else ()))
    before = read_catalogue(path, known).prices if path.exists() else ()
    market = read_market(market_path)
    update, now = PriceUpdate(), context.now()
    listed: list[Price] = []
    for region in regions:
        for service in SERVICES:
            listed += _on_demand(context.aws, known, service, region, now.date(), update)
        for purchase, look in (("spot", _spot), ("capacity-block", _blocks)):
            prices = _tried(f"{purchase} in {region}", update, lambda: look(context.aws, known, region, now))  # noqa: B023
            if prices is not None:
                market = [each for each in market if (each.region, each.purchase) != (region, purchase)]
                market += prices
                update.num_market += len(prices)
    # Nothing is written before all has been asked for: an update that is killed changes nothing.
    if listed:
        write_prices(path, with_newer(before, listed))
    if update.num_market:
        write_market(market_path, market)
    return update


def _tried(what: str, update: PriceUpdate, look: Callable[[], T]) -> T | None:
    try:
        return look()
    except CloudRefused as error:
        update.failures.append(f"{what}: {error.message}")
        return None


def _on_demand(
    aws: Aws, known: Catalogue, service: str, region: str, today: datetime.date, update: PriceUpdate
) -> list[Price]:
    products = _tried(f"{service} in {region}", update, lambda: aws.products(service, region))
    if products is None:
        return []
    by_instance: dict[str, list[Product]] = {}
    for product in products:
        if product.instance in known.instances:
            by_instance.setdefault(product.instance, []).append(product)
    if not by_instance:
        update.failures.append(f"{service} in {region}: the price list has none of the instance types")
        return []
    prices: list[Price] = []
    unknown: dict[str, str] = {}
    for instance, (product, *more) in by_instance.items():
        skus = ", ".join(each.sku for each in (product, *more))
        if more:
            unknown[instance] = f"the price list has {1 + len(more)} prices, and one is expected: {skus}"
        elif not product.usd_per_hour:
            unknown[instance] = f"the price list has no price in USD per hour: {skus}"
        else:
            prices.append(
                Price(
                    instance=instance,
                    service=service,
                    region=region,
                    usd_per_hour=product.usd_per_hour,
                    as_of=today,
                    source=f"AWS Price List API, {region}, SKU {product.sku}",
                )
            )
    update.failures += [f"{service} {name} in {region}: {why}" for name, why in unknown.items()]
    changes = list(price_changes(known, prices, service=service, region=region, unknown=unknown, today=today))
    update.changes += changes
    update.num_unchanged += len(prices) - sum(change.kind != "gone" for change in changes)
    return prices


def _sold(known: Catalogue, purchase: str) -> list[str]:
    return [name for name, instance in known.instances.items() if purchase in instance.purchase_options]


def _spot(aws: Aws, known: Catalogue, region: str, now: datetime.datetime) -> list[MarketPrice]:
    since = now - datetime.timedelta(days=SPOT_DAYS)
    changes = aws.spot_changes(region, _sold(known, "spot"), since)
    return [
        MarketPrice(
            instance=instance,
            region=region,
            zone=zone,
            purchase="spot",
            usd_per_hour=prices[-1][1],
            median_usd_per_hour=by_time(prices, since=since, now=now, share=0.5),
            p90_usd_per_hour=by_time(prices, since=since, now=now, share=0.9),
            at=now.isoformat(timespec="seconds"),
        )
        for (instance, zone), prices in sorted(changes.items())
    ]


def _blocks(aws: Aws, known: Catalogue, region: str, now: datetime.datetime) -> list[MarketPrice]:
    """Return the cheapest capacity block of each instance type and zone."""
    cheapest: dict[tuple[str, str], float] = {}
    for instance in _sold(known, "capacity-block"):
        # EC2 refuses a type that the region does not have.
        offerings = (
            aws.block_offerings(region, instance, BLOCK_HOURS) if aws.zones_offering(region, instance) else ()
        )
        for each in offerings:
            offer = instance, each.zone
            cheapest[offer] = min(each.usd_per_hour, cheapest.get(offer, each.usd_per_hour))
    return [
        MarketPrice(
            instance=instance,
            region=region,
            zone=zone,
            purchase="capacity-block",
            usd_per_hour=usd,
            at=now.isoformat(timespec="seconds"),
        )
        for (instance, zone), usd in sorted(cheapest.items())
    ]

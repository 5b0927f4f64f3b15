"""`prices update`: read AWS's price lists and put them over the shipped prices."""

import datetime
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from fastlaunch.aws.client import Aws
from fastlaunch.aws.pricing import Product
from fastlaunch.aws.types import BlockOffering
from fastlaunch.catalog.hardware import TRAINING_PLAN
from fastlaunch.catalog.load import load_catalogue, read_catalogue
from fastlaunch.catalog.prices import SERVICES, Catalogue, Price
from fastlaunch.catalog.updates import (
    MARKET_PRICES,
    MarketPrice,
    PriceChange,
    by_time,
    is_believable,
    price_changes,
    read_market,
    with_newer,
    write_market,
    write_prices,
)
from fastlaunch.core.activity import activity
from fastlaunch.core.errors import BadFile, CloudRefused, UserError
from fastlaunch.core.home import make_folder, writing
from fastlaunch.core.locks import held
from fastlaunch.core.settings import UPDATED_PRICES
from fastlaunch.core.units import is_region, utc_day
from fastlaunch.jobs.options import ML
from fastlaunch.lifecycle.world import World, default_context

#: The days for the median and 90th percentile of spot prices.
SPOT_DAYS = 7
#: The length of capacity blocks and training plans to query.
BLOCK_HOURS = 24

T = TypeVar("T")


@dataclass(kw_only=True)
class PriceUpdate:
    """The changes of an update. A price that it could not read keeps its value and date."""

    changes: list[PriceChange] = field(default_factory=list)
    #: Unchanged on-demand prices; and prices of spot and capacity blocks, which are new each time.
    num_unchanged: int = 0
    num_market: int = 0
    #: The reasons for prices that were not updated.
    failures: list[str] = field(default_factory=list)


def update_prices(
    regions: Sequence[str] = (), *, accept: bool = False, context: World | None = None
) -> PriceUpdate:
    """Update the prices of the regions: on demand, SageMaker training, spot, capacity blocks, training plans.

    regions: by default the user's, and those under `aws` in the config file. accept: also take prices above
    ten times the last one, or below a tenth. Refused queries and rejected prices are in `failures`. Raises
    UserError for an invalid region.
    """
    context = context or default_context()
    settings = context.settings
    chosen = tuple(dict.fromkeys(regions or (context.own_region(), *settings.aws)))
    for region in chosen:
        if not is_region(region):
            raise UserError(f"{region!r} is not the name of a region", "give one such as us-east-1")
    with writing(settings.home):
        make_folder(settings.home)
    with held(settings.home / f"{UPDATED_PRICES}.lock"):
        return _update(context, chosen, accept=accept)


def _update(context: World, regions: Sequence[str], *, accept: bool) -> PriceUpdate:
    path, market_path = (context.settings.home / name for name in (UPDATED_PRICES, MARKET_PRICES))
    try:
        # Leave out the user's own prices, which are not AWS's.
        known = load_catalogue(*((path,) if path.exists() else ()))
        before = read_catalogue(path, known).prices if path.exists() else ()
        market = read_market(market_path)
    except BadFile as error:
        raise UserError(
            error.message, f"remove it and update again: rm {shlex.quote(str(error.path))}"
        ) from None
    update, now = PriceUpdate(), context.now()
    listed: list[Price] = []
    with activity("asking AWS for prices", total=len(regions) * (len(SERVICES) + 3)) as shown:
        for region in regions:
            for service in SERVICES:
                shown.begin(f"{service} in {region}")
                listed += _on_demand(context.aws, known, service, region, utc_day(now), update, accept=accept)
            for purchase, look in (("spot", _spot), ("capacity-block", _blocks), (TRAINING_PLAN, _plans)):
                shown.begin(f"{purchase} in {region}")
                ask = partial(look, context.aws, known, region, now)
                prices = _tried(f"{purchase} in {region}", update, ask)
                if prices is not None:
                    if not accept:
                        prices = _believed(prices, market, known, utc_day(now), update)
                    market = [
                        price for price in market if (price.region, price.purchase) != (region, purchase)
                    ]
                    market += prices
                    update.num_market += len(prices)
    # Write only after all answers: an update that is killed changes nothing.
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
    aws: Aws,
    known: Catalogue,
    service: str,
    region: str,
    today: datetime.date,
    update: PriceUpdate,
    *,
    accept: bool,
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
        skus = ", ".join(product.sku for product in (product, *more))
        if more:
            unknown[instance] = f"the price list has {1 + len(more)} prices, and one is expected: {skus}"
        elif not product.usd_per_hour:
            unknown[instance] = f"the price list has no price in USD per hour: {skus}"
        elif not accept and (doubt := _doubt(known, instance, service, region, today, product.usd_per_hour)):
            unknown[instance] = doubt
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


def _doubt(
    known: Catalogue, instance: str, service: str, region: str, today: datetime.date, usd: float
) -> str | None:
    """Return the reason why a price needs --accept, or None.

    If the region has no price yet, compare with the highest and lowest elsewhere.
    """
    here = known.find_price(instance, service=service, region=region, on=today)
    elsewhere = [
        price.usd_per_hour
        for price in known.prices
        if (price.instance, price.service, price.purchase) == (instance, service, "on-demand")
    ]
    before = [here.usd_per_hour] if here else [min(elsewhere), max(elsewhere)] if elsewhere else []
    if not before or any(is_believable(usd, usd_before) for usd_before in before):
        return None
    return _too_far(usd, before[-1], where="" if here else " in other regions")


def _too_far(usd: float, before_usd: float, where: str = "") -> str:
    return (
        f"${usd:,.4f} an hour is more than tenfold, or less than a tenth, of ${before_usd:,.2f}{where}: "
        "if it is right, fastlaunch prices update --accept"
    )


def _believed(
    prices: Sequence[MarketPrice],
    before: Sequence[MarketPrice],
    known: Catalogue,
    today: datetime.date,
    update: PriceUpdate,
) -> list[MarketPrice]:
    """Return the prices within ten times of their zone's last price, else of the on-demand price."""
    last = {(price.instance, price.zone, price.purchase): price.usd_per_hour for price in before}
    kept = []
    for price in prices:
        usd = last.get((price.instance, price.zone, price.purchase))
        on_demand = known.find_price(price.instance, service="ec2", region=price.region, on=today)
        usd = usd or (on_demand.usd_per_hour if on_demand else None)
        given = (price.usd_per_hour, price.median_usd_per_hour, price.p90_usd_per_hour)
        doubtful = [one for one in given if usd and one and not is_believable(one, usd)]
        if usd is None or not doubtful:
            kept.append(price)
        else:
            why = _too_far(doubtful[0], usd)
            update.failures.append(f"{price.purchase} {price.instance} in {price.zone}: {why}")
    return kept


def _sold(known: Catalogue, purchase: str) -> list[str]:
    return [name for name, instance in known.instances.items() if instance.is_sold(purchase)]


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

    def ask(instance: str) -> Sequence[BlockOffering]:
        # EC2 refuses a type that the region lacks.
        has_it = aws.zones_offering(region, instance)
        return aws.block_offerings(region, instance, BLOCK_HOURS) if has_it else ()

    return _cheapest("capacity-block", known, region, now, ask)


def _plans(aws: Aws, known: Catalogue, region: str, now: datetime.datetime) -> list[MarketPrice]:
    """Return the cheapest training plan of each instance type and zone."""

    def ask(instance: str) -> Sequence[BlockOffering]:
        return aws.plan_offerings(region, f"{ML}{instance}", BLOCK_HOURS)

    return _cheapest(TRAINING_PLAN, known, region, now, ask)


def _cheapest(
    purchase: str,
    known: Catalogue,
    region: str,
    now: datetime.datetime,
    ask: Callable[[str], Sequence[BlockOffering]],
) -> list[MarketPrice]:
    cheapest: dict[tuple[str, str], BlockOffering] = {}
    for instance in _sold(known, purchase):
        for block in sorted(ask(instance), key=lambda block: block.usd_per_hour):
            cheapest.setdefault((instance, block.zone), block)
    return [
        MarketPrice(
            instance=instance,
            region=region,
            zone=zone,
            purchase=purchase,
            usd_per_hour=block.usd_per_hour,
            at=now.isoformat(timespec="seconds"),
            starts_at=block.starts_at.isoformat(timespec="minutes"),
            hours=BLOCK_HOURS,
            offering=block.id,
        )
        for (instance, zone), block in sorted(cheapest.items(), key=lambda item: item[0])
    ]

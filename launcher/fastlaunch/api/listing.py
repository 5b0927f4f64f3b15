"""`runs` and `prices`: what the ledger and the price files hold."""

import datetime
import shlex
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlaunch.api.results import Prices, Runs
from fastlaunch.core.errors import CloudRefused, UnknownName, UserError
from fastlaunch.core.terminal import as_warning
from fastlaunch.core.units import parse_date, utc_day
from fastlaunch.lifecycle.reconcile import reconcile
from fastlaunch.lifecycle.world import World, default_context

if TYPE_CHECKING:
    from fastlaunch.catalog.prices import Catalogue, Price
    from fastlaunch.core.settings import Settings

#: Spot prices and capacity blocks change by the hour.
MAX_MARKET_AGE = datetime.timedelta(hours=1)


def runs(*selectors: str, context: World | None = None) -> Runs:
    """Return the runs in the ledger, the newest last.

    selectors: run ids, or `field=glob` on workload, recipe, instance, state, submission, backend, commit or
    version; all runs by default. Raises UserError for an invalid selector.
    """
    from fastlaunch.ledger.ledger import open_ledger

    context = context or default_context()
    with open_ledger(context.settings, clock=context.now) as ledger:
        reconcile(ledger, context.backends, context.settings)
        return Runs(ledger.fetch_comparable(selectors, all_runs=True))


def no_run_fits(selectors: Sequence[str]) -> UserError:
    """Return the error that selectors pick no run."""
    return UserError(f"no run fits {shlex.join(selectors)}", "`fastlaunch runs list` shows what there is")


def prices(
    instance: str = "*",
    *,
    gpu: str | None = None,
    region: str | None = None,
    service: str | None = None,
    purchase: str | None = None,
    as_of: datetime.date | str | None = None,
    prices: Path | str | None = None,
    history: bool = False,
    quotas: bool = False,
    context: World | None = None,
) -> Prices:
    """Return instance prices in USD per hour with their dates and sources, in the catalogue's order.

    They are on-demand prices and, for today, also the spot and capacity-block prices of `prices update`.

    instance, region: globs, such as `p5*`; the region is the user's own by default. gpu: such as `H100`, or
    `H100:8`. service: `ec2` or `sagemaker`. purchase: `on-demand`, `spot` or `capacity-block`. as_of: the
    prices in force on this day, today by default. prices: a file over the shipped prices. history: include
    earlier prices. quotas: query the account's quotas from AWS; a refusal is reported and the quota unknown.

    Raises UnknownName for an instance or a GPU that the catalogue lacks, and UserError if no price is known.
    """
    from fastlaunch.catalog.load import load_catalogue

    context = context or default_context()
    settings = context.settings
    day = (parse_date(as_of) if isinstance(as_of, str) else as_of) or context.today
    catalogue = load_catalogue(*settings.price_files(Path(prices) if prices else None))
    instances = _matching(catalogue, instance, gpu)
    where = region or context.own_region()
    # A third party's old spot prices are shown only to somebody who asks for spot and has not asked AWS.
    listed = [price for price in catalogue.prices if price.purchase != "spot" or purchase == "spot"]
    known = listed if history else _in_force(listed, day)
    if day == context.today:
        from fastlaunch.catalog.updates import MARKET_PRICES, read_market

        market = [offer.price_now for offer in read_market(settings.home / MARKET_PRICES)]
        spot_places = {(price.instance, price.region) for price in market if price.purchase == "spot"}
        known = [
            *(
                price
                for price in known
                if price.purchase != "spot" or (price.instance, price.region) not in spot_places
            ),
            *(price for price in market if price.instance in catalogue.instances),
        ]
    place = {name: number for number, name in enumerate(instances)}
    chosen = sorted(
        (
            price
            for price in known
            if price.instance in place
            and price.as_of <= day
            and service in (None, price.service)
            and purchase in (None, price.purchase)
            and fnmatchcase(price.region, where)
        ),
        key=lambda price: (place[price.instance], *price.key[1:], price.zone or ""),
    )
    if not chosen:
        raise _nothing_known(catalogue, instances, region=where, service=service, purchase=purchase, day=day)
    priced = {price.instance for price in chosen}
    known_quotas = _quotas(chosen, catalogue, context) if quotas else {}
    return Prices(
        chosen,
        rows=[_row(price, catalogue, settings, known_quotas.get(price)) for price in chosen],
        region=where,
        as_of=day,
        unpriced=tuple(name for name in instances if name not in priced),
    )


def _row(price: "Price", catalogue: "Catalogue", settings: "Settings", quota: int | None) -> dict[str, Any]:
    from fastlaunch.catalog.prices import paid_usd_per_hour
    from fastlaunch.catalog.updates import interruption

    instance = catalogue.instances[price.instance]
    return {
        "instance": price.instance,
        "num_accelerators": instance.num_accelerators,
        "accelerator": instance.accelerator,
        "service": price.service,
        "region": price.region,
        "zone": price.zone,
        "purchase": price.purchase,
        "usd_per_hour": price.usd_per_hour,
        "usd_per_accelerator_hour": round(price.usd_per_hour / instance.num_accelerators, 6),
        "paid_usd_per_hour": paid_usd_per_hour(price, settings),
        "as_of": price.as_of.isoformat(),
        "interruption": interruption(price.instance, price.region) if price.purchase == "spot" else None,
        "quota": quota,
        "inferred": price.inferred,
        "secondary": price.secondary,
        "source": price.source,
        "buying": price.buying,
    }


def _matching(catalogue: "Catalogue", glob: str, gpu: str | None) -> list[str]:
    """Return the names of matching instance types. gpu: `H100`, `H100:8`; None for all."""
    matching = [name for name in catalogue.instances if fnmatchcase(name, glob.lower())]
    if not matching:
        raise catalogue.unknown_instance(glob)
    if gpu is None:
        return matching
    model, _, count = gpu.partition(":")
    if not catalogue.models_of(model) or (count and not count.isdecimal()):
        raise UnknownName("GPU", gpu, catalogue.accelerators)
    types = {name: catalogue.instances[name] for name in matching}
    having = {of.name for of in catalogue.types_with(gpu) if count in ("", str(of.num_accelerators))}
    fitting = [name for name in types if name in having]
    if not fitting:
        known = ", ".join(dict.fromkeys(f"{of.accelerator}:{of.num_accelerators}" for of in types.values()))
        raise UserError(f"no instance type has {gpu}", f"there are {known}")
    return fitting


def _in_force(prices: "Iterable[Price]", day: datetime.date) -> "Collection[Price]":
    """Return the latest price up to the day for each instance, service, region and purchase option."""
    by_date = sorted(prices, key=lambda price: price.as_of)
    return {price.key[:4]: price for price in by_date if price.as_of <= day}.values()


def _quotas(prices: "Sequence[Price]", catalogue: "Catalogue", context: World) -> "dict[Price, int]":
    """Return how many instances at a time the account's known quotas allow."""
    from fastlaunch.aws.quota_codes import quota_code

    quota_vcpus = cache(partial(_quota_vcpus, context))
    quotas = {}
    for price in prices:
        code = quota_code(price.instance, price.purchase) if price.service == "ec2" else None
        if code and (vcpus := quota_vcpus(price.region, code.code)) is not None:
            quotas[price] = int(vcpus // catalogue.instances[price.instance].vcpus)
    return quotas


def _quota_vcpus(context: World, region: str, code: str) -> float | None:
    """Return the account's quota, else AWS's default; report a refusal and return None."""
    try:
        applied = context.aws.quota(region, "ec2", code)
        return applied if applied is not None else context.aws.default_quota(region, "ec2", code)
    except CloudRefused as error:
        context.report(as_warning(f"the quota {code} in {region} is not known: {error.message}"))
        return None


def _nothing_known(
    catalogue: "Catalogue",
    instances: Sequence[str],
    *,
    region: str,
    service: str | None,
    purchase: str | None,
    day: datetime.date,
) -> UserError:
    if purchase not in (None, "on-demand"):
        from fastlaunch.catalog.prices import UPDATE_COMMAND

        place = "" if set("*?[") & set(region) else f" --region {region}"
        return UserError(
            f"no price of {purchase} is known in {region} for {day}", f"type: {UPDATE_COMMAND}{place}"
        )
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


def price_ages(*, context: World) -> list[dict[str, Any]]:
    """Return a row per service or market and region: how old the prices in force are, listed prices first."""
    from fastlaunch.catalog.load import load_catalogue
    from fastlaunch.catalog.prices import OLD_PRICE_DAYS, SERVICES
    from fastlaunch.catalog.updates import MARKET_PRICES, read_market

    settings, now = context.settings, context.now()
    dates: dict[tuple[str, str], dict[str, datetime.datetime]] = {}
    for price in sorted(load_catalogue(*settings.price_files()).prices, key=lambda price: price.as_of):
        # `prices update` replaces no price that a third party quotes.
        if price.as_of <= utc_day(now) and not price.secondary:
            day = datetime.datetime.combine(price.as_of, datetime.time(), now.tzinfo)
            offer = f"{price.instance} {price.purchase}"
            dates.setdefault((price.service, price.region), {})[offer] = day
    for market_price in read_market(settings.home / MARKET_PRICES):
        offer = f"{market_price.instance} {market_price.zone}"
        dates.setdefault((market_price.purchase, market_price.region), {})[offer] = market_price.given_at
    ages = []
    for (service, region), given in dates.items():
        oldest, is_listed = min(given.values()), service in SERVICES
        age = now - oldest
        limit = datetime.timedelta(days=OLD_PRICE_DAYS + 1) if is_listed else MAX_MARKET_AGE
        ages.append(
            {
                "service": service,  # `ec2` or `sagemaker`; for a market, `spot` or `capacity-block`
                "region": region,
                "prices": len(given),
                "oldest": utc_day(oldest).isoformat() if is_listed else oldest.isoformat(timespec="minutes"),
                "age_hours": round(age / datetime.timedelta(hours=1), 1),
                "old": age >= limit if is_listed else age > limit,
            }
        )
    return ages

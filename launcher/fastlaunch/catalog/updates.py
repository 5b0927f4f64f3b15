"""Keep in the home what `fastlaunch prices update` reads from AWS, and list the changes.

prices.yaml   on-demand prices in the layout of instance_prices.yaml, dated with the day of the look
market.yaml   what changes by the hour: spot prices by zone, and capacity blocks on offer
"""

import datetime
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from fastlaunch.catalog.hardware import TRAINING_PLAN, check_positive
from fastlaunch.catalog.load import check_schema
from fastlaunch.catalog.prices import Catalogue, Price
from fastlaunch.core.errors import UserError
from fastlaunch.core.home import replace_file, writing
from fastlaunch.core.units import utc_day
from fastlaunch.core.yaml_file import YamlFile

MARKET_PRICES = "market.yaml"
#: Prices that differ by less are the same, given with more or fewer digits.
_SAME = 1e-5
#: A price that differs from the last one by more than this factor is taken only if the user accepts it.
MOST_TIMES = 10


@dataclass(frozen=True, kw_only=True)
class MarketPrice:
    """What an hour of an instance costs in a zone now, on spot, or in a block or training plan on offer."""

    instance: str
    region: str
    zone: str
    purchase: str
    usd_per_hour: float
    # For spot, over the days before `at`, by time; None for a block.
    median_usd_per_hour: float | None = None
    p90_usd_per_hour: float | None = None
    # When AWS gave it: ISO 8601 with a time zone.
    at: str
    # When a block or a plan starts, and for how many hours of one instance; None for spot.
    starts_at: str | None = None
    hours: float | None = None
    # AWS's id of what is on offer; None for spot.
    offering: str | None = None

    def __post_init__(self) -> None:
        check_positive(f"usd_per_hour of {self.instance}", self.usd_per_hour)
        try:
            is_dated = self.given_at.tzinfo is not None
        except ValueError:
            is_dated = False
        if not is_dated:
            raise UserError(f"at is {self.at!r}", "give a time such as 2026-11-24T09:30:00+00:00")

    @property
    def given_at(self) -> datetime.datetime:
        return datetime.datetime.fromisoformat(self.at)

    @property
    def price_now(self) -> Price:
        """The price that AWS asks now."""
        return Price(
            instance=self.instance,
            service="sagemaker" if self.purchase == TRAINING_PLAN else "ec2",
            region=self.region,
            zone=self.zone,
            purchase=self.purchase,
            usd_per_hour=self.usd_per_hour,
            as_of=utc_day(self.given_at),
            source=f"{self._terms}offered in {self.zone}, {self.at}",
            buying=self._buying,
        )

    @property
    def _buying(self) -> str | None:
        if self.offering is None or self.hours is None:
            return None
        command = buying_command(
            self.purchase, region=self.region, offering=self.offering, instance=self.instance
        )
        return f"{command}   # ${self.usd_per_hour * self.hours:,.2f}"

    @property
    def _terms(self) -> str:
        return f"{self.hours:g} h of one instance from {self.starts_at}, " if self.starts_at else ""

    @property
    def price(self) -> Price:
        """The price that a training pays: on spot the median, since it changes while one lasts."""
        if not self.median_usd_per_hour:
            return self.price_now
        source = f"median in {self.zone}, {self.at}"
        return replace(self.price_now, usd_per_hour=self.median_usd_per_hour, source=source)


def buying_command(purchase: str, *, region: str, offering: str, instance: str) -> str:
    """Return AWS's command that buys a capacity block or a training plan, which fastlaunch never runs."""
    if purchase == TRAINING_PLAN:
        name = f"fastlaunch-{instance.replace('.', '-')}"
        return (
            f"aws sagemaker create-training-plan --region {region} --training-plan-name {name} "
            f"--training-plan-offering-id {offering}"
        )
    return (
        f"aws ec2 purchase-capacity-block --region {region} --capacity-block-offering-id {offering} "
        "--instance-platform Linux/UNIX"
    )


def cheapest_zones(market: Iterable[MarketPrice]) -> dict[tuple[str, str, str], MarketPrice]:
    """Return the cheapest zone's price by instance, region and purchase option."""
    dearest_first = sorted(market, key=lambda offer: -offer.price.usd_per_hour)
    return {(offer.instance, offer.region, offer.purchase): offer for offer in dearest_first}


@dataclass(frozen=True, kw_only=True)
class PriceChange:
    """How a price differs from the one in force before. None: there was, or is, none."""

    kind: Literal["added", "changed", "gone"]
    instance: str
    service: str
    region: str
    from_usd_per_hour: float | None
    to_usd_per_hour: float | None

    @property
    def percent(self) -> float | None:
        if not self.from_usd_per_hour or self.to_usd_per_hour is None:
            return None
        return 100 * (self.to_usd_per_hour / self.from_usd_per_hour - 1)


def is_believable(usd_per_hour: float, before: float) -> bool:
    """Return whether a price is within MOST_TIMES of an earlier one."""
    return before / MOST_TIMES <= usd_per_hour <= before * MOST_TIMES


def price_changes(
    known: Catalogue,
    prices: Sequence[Price],
    *,
    service: str,
    region: str,
    unknown: Collection[str],
    today: datetime.date,
) -> Iterator[PriceChange]:
    """Yield what an update changes for one service in one region.

    known: the prices before. prices: on demand, at most one per instance. unknown: instances whose price the
    update could not find.
    """
    now = {price.instance: price.usd_per_hour for price in prices}
    for instance in known.instances:
        price = known.find_price(instance, service=service, region=region, on=today)
        before, after = price.usd_per_hour if price else None, now.get(instance)
        if instance in unknown or (before is None and after is None):
            continue
        if before is not None and after is not None and abs(after - before) <= _SAME * before:
            continue
        yield PriceChange(
            kind="added" if before is None else "gone" if after is None else "changed",
            instance=instance,
            service=service,
            region=region,
            from_usd_per_hour=before,
            to_usd_per_hour=after,
        )


def with_newer(before: Sequence[Price], newer: Sequence[Price]) -> list[Price]:
    """Return the prices with newer ones added; a series of equal prices keeps its first and last."""
    offers: dict[tuple[Any, ...], list[Price]] = {}
    prices = {price.key: price for price in (*before, *newer)}
    for price in sorted(prices.values(), key=lambda price: price.as_of):
        kept = offers.setdefault(price.key[:4], [])
        if len(kept) > 1 and kept[-2].usd_per_hour == kept[-1].usd_per_hour == price.usd_per_hour:
            kept.pop()
        kept.append(price)
    return [price for _, kept in sorted(offers.items()) for price in kept]


def write_prices(path: Path, prices: Sequence[Price]) -> None:
    """Replace the file of updated prices at once. Raises UserError if it cannot be written."""
    entries = [
        {**{key: value for key, value in price.to_json().items() if key != "inferred"}, "as_of": price.as_of}
        for price in prices
    ]
    _write(path, "prices", entries)


def read_market(path: Path) -> list[MarketPrice]:
    """Return the market prices in the file, none if there is no file. Raises BadFile for one with a fault."""
    if not path.exists():
        return []
    file = YamlFile(path)
    file.refuse_unknown(known=["schema", "market"])
    check_schema(file, 1)
    return [file.record(MarketPrice, "market", index) for index, _ in enumerate(file.items("market"))]


def write_market(path: Path, prices: Sequence[MarketPrice]) -> None:
    """Replace the file of market prices at once. Raises UserError if it cannot be written."""
    entries = [{key: value for key, value in asdict(price).items() if value is not None} for price in prices]
    _write(path, "market", entries)


@functools.cache
def _interruptions() -> Mapping[str, Mapping[str, str]]:
    return YamlFile(Path(__file__).with_name("spot_interruption.yaml")).mapping("instances")


def interruption(instance: str, region: str) -> str | None:
    """Return AWS's bucket of how often spot is taken back there in a month, such as `5-10%`, if known."""
    buckets = _interruptions().get(instance, {})
    return next((bucket for bucket, regions in buckets.items() if region in regions.split()), None)


def _write(path: Path, section: str, entries: Sequence[Mapping[str, Any]]) -> None:
    import yaml

    text = "# Written by `fastlaunch prices update`; a price file of your own goes over it.\n"
    text += f"schema: 1\n{section}:\n"
    for entry in entries:
        text += f"  - {yaml.safe_dump(dict(entry), default_flow_style=True, sort_keys=False, width=10**6)}"
    with writing(path, "; the old prices stay"):
        replace_file(path, text.encode())


def by_time(
    changes: Sequence[tuple[datetime.datetime, float]],
    *,
    since: datetime.datetime,
    now: datetime.datetime,
    share: float,
) -> float:
    """Return the price that was not exceeded for this share of the time from `since` to `now`.

    changes: (time, new price), the oldest first, at least one.
    """
    times = [*(max(at, since) for at, _ in changes), now]
    lasted = [
        (usd, max(0.0, (end - start).total_seconds()))
        for (_, usd), (start, end) in zip(changes, pairwise(times), strict=True)
    ]
    left_s = share * sum(seconds for _, seconds in lasted)
    for usd, seconds in sorted(lasted):
        left_s -= seconds
        if left_s <= 0 < seconds:
            return usd
    return changes[-1][1]

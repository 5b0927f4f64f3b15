"""Purchases of machines: the price, the account's share of it, and the loss rate of spot.

The loss rate comes from a capacity trace or the user's runs, never from Spot Advisor: its monthly share of
interrupted instances ignores how long they ran, and a bucket such as `>20%` has no upper end.
"""

import datetime
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlaunch.analysis.cost import SPOT, Assumptions, Purchase, parse_assumptions
from fastlaunch.analysis.pooling import Offer
from fastlaunch.api.listing import MAX_MARKET_AGE
from fastlaunch.catalog.hardware import TRAINING_PLAN
from fastlaunch.catalog.prices import UPDATE_COMMAND, Catalogue, Price, age_note, paid_usd_per_hour
from fastlaunch.catalog.updates import MARKET_PRICES, cheapest_zones, read_market
from fastlaunch.core.errors import UserError
from fastlaunch.core.home import LEDGER_NAME
from fastlaunch.core.paths import read_text
from fastlaunch.core.plan import Ending
from fastlaunch.lifecycle.world import World

if TYPE_CHECKING:
    from fastlaunch.analysis.spot import SpotMarket
    from fastlaunch.ledger.rows import Attempt

#: A job that gets its machines within this time, even in another zone, got them at once.
_AT_ONCE = datetime.timedelta(minutes=5)


def read_assumptions(assume: Mapping[str, Any] | Sequence[str]) -> Assumptions:
    """Read assumptions from texts such as `boot=300s`, or from a mapping. Raises UserError."""
    if isinstance(assume, Mapping):
        assume = [f"{name}={value}" for name, value in assume.items()]
    return parse_assumptions(assume)


class Market:
    """The offers on a day, in the cheapest zone if zones have their own prices."""

    def __init__(
        self,
        context: World,
        catalogue: Catalogue,
        assumptions: Assumptions,
        *,
        as_of: datetime.date | None = None,
        trace: Path | str | None = None,
    ) -> None:
        """as_of: the day, today by default. trace: a CSV of spot capacity.

        Raises UserError if both a trace and an assumption give spot's availability.
        """
        self._context, self._catalogue, self._assumptions = context, catalogue, assumptions
        self._trace, self._as_of = trace, as_of
        self.day = as_of or context.today
        twice = assumptions.given & {"spot_losses_per_hour", "spot_available"}
        if trace is not None and twice:
            raise UserError(
                f"--spot-trace and --assume {min(twice)} both give spot's availability", "give one of them"
            )
        # Market prices of past days are unknown.
        path = context.settings.home / MARKET_PRICES
        self._zones = cheapest_zones(read_market(path) if self.day == context.today else [])

    def price(self, instance: str, offer: Offer) -> Price | None:
        """Return the price of a machine; None if none is known."""
        is_in_zones = offer.service == "ec2" or offer.purchase == TRAINING_PLAN
        zone = self._zones.get((instance, offer.region, offer.purchase)) if is_in_zones else None
        if zone:
            return zone.price
        return self._catalogue.find_price(instance, **offer._asdict(), on=self.day, old_spot=True)

    def purchase(self, price: Price, *, with_losses: bool = True) -> Purchase:
        """Return the purchase of a machine at the price. with_losses: include spot's loss rate."""
        settings, service, region = self._context.settings, price.service, price.region
        is_given, is_spot = price.basis == "given", price.purchase == SPOT
        on_demand = self._catalogue.find_price(price.instance, service=service, region=region, on=self.day)
        return Purchase(
            price=price,
            usd_per_hour=price.usd_per_hour if is_given else paid_usd_per_hour(price, settings),
            volume=self._catalogue.find_volume_price(region, on=self.day) if service == "ec2" else None,
            market=self._losses(price.instance, region) if is_spot and with_losses else None,
            on_demand_usd_per_hour=paid_usd_per_hour(on_demand, settings) if is_spot else None,
        )

    def age_notes(self, prices: Iterable[Price]) -> Iterator[str]:
        """Yield a note if prices are old, with what to type; nothing if the user gave a day."""
        if self._as_of is not None:
            return
        paid = [*prices]
        zones = [self._zones.get((price.instance, price.region, price.purchase)) for price in paid]
        if any(zone and self._context.now() - zone.given_at > MAX_MARKET_AGE for zone in zones):
            how = f"{UPDATE_COMMAND} --region {paid[0].region}"
            yield f"prices of spot or capacity blocks are older than an hour: type `{how}`"
        if old := age_note([price.as_of for price in paid], self.day):
            yield old

    def _losses(self, instance: str, region: str) -> "SpotMarket | None":
        """Return spot's loss rate, by the trace, as given, or by the user's runs; None if unknown."""
        from fastlaunch.analysis.spot import market_of_rates, read_trace

        assumptions = self._assumptions
        if self._trace is not None:
            text = read_text(Path(self._trace))
            return read_trace(io.StringIO(text, newline=""), source=str(self._trace))
        if assumptions.spot_losses_per_hour is not None:
            return market_of_rates(
                assumptions.spot_losses_per_hour, assumptions.spot_available, source="--assume"
            )
        if not (self._context.settings.home / LEDGER_NAME).exists():
            return None
        return market_of_own_runs(self._context, instance, region)


def market_of_own_runs(context: World, instance: str, region: str) -> "SpotMarket | None":
    """Return the loss rate and availability of EC2 spot of this type from the user's runs, or None."""
    from fastlaunch.ledger.ledger import open_ledger

    with open_ledger(context.settings, clock=context.now) as ledger:
        return _of_attempts(ledger.spot_attempts(instance, region), f"your runs on {instance} in {region}")


def _of_attempts(attempts: Sequence["Attempt"], source: str) -> "SpotMarket | None":
    """Return the market that the attempts show, the oldest first."""
    from fastlaunch.analysis.spot import HOUR_S, market_of_runs

    first_requests: dict[str, Attempt] = {}  # by run, the attempt that first requested machines
    at_once: set[int] = set()
    for attempt in attempts:
        lacks = attempt.ending is Ending.NO_CAPACITY
        if not attempt.handle and not lacks:
            continue
        first = next((first_requests[id] for id in attempt.run_ids if id in first_requests), attempt)
        first_requests |= dict.fromkeys(attempt.run_ids, first)
        started, requested = map(datetime.datetime.fromisoformat, (attempt.started_at, first.started_at))
        if not lacks and started - requested <= _AT_ONCE:
            at_once.add(first.id)
    instance_hours = (
        sum((attempt.billing.lived_s or 0.0) * attempt.num_nodes for attempt in attempts) / HOUR_S
    )
    if not instance_hours or not at_once:
        return None
    return market_of_runs(
        instance_hours=instance_hours,
        num_losses=sum(attempt.ending is Ending.RECLAIMED for attempt in attempts),
        num_asked=len({first.id for first in first_requests.values()}),
        num_granted=len(at_once),
        source=source,
    )

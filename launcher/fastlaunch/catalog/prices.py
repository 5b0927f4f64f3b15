"""What an instance costs: prices with their dates and sources, and the catalogue that holds them.

A price holds from its `as_of` until the next one of the same instance, service, region and purchase option.
An unknown price is an error: never 0, and never that of another region. Spot prices are queried, not kept.
`dearest_rate` and `max_cost_usd` say the most that an hour, and a job, can cost.
"""

import datetime
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from fastlaunch.catalog.hardware import Accelerator, InstanceType, check_positive, identify
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.ownership import MARGIN_MINUTES
from fastlaunch.core.settings import Settings

SERVICES = ("ec2", "sagemaker")
#: Prices change rarely and much, so the age of an older one is shown wherever money is.
OLD_PRICE_DAYS = 7
UPDATE_COMMAND = "fastlaunch prices update"

#: Where a price comes from: a price list, the bill of the run, an instance that the user named for it
#: (--price-as), or the user (--usd-per-hour).
Basis = Literal["listed", "billed", "named", "given"]
#: What the ledger keeps of a price.
_STORED = ("instance", "service", "region", "purchase", "usd_per_hour", "as_of", "source", "inferred")


@dataclass(frozen=True, kw_only=True)
class Price:
    """USD per hour of one instance, from the price file to the cell of a table."""

    instance: str  # the type as EC2 calls it, on SageMaker too
    service: str
    region: str
    zone: str | None = None  # of spot, and of a capacity block on offer, if known
    purchase: str = "on-demand"
    usd_per_hour: float
    as_of: datetime.date  # the day on which the source gave it
    source: str
    inferred: bool = False  # derived from another price; `source` says how
    secondary: bool = False  # quoted of AWS by a third party: shown, but no ceiling goes by it
    basis: Basis = "listed"  # where it comes from
    buying: str | None = None  # AWS's command that buys a block or plan on offer, and what it costs
    hypothetical: str | None = None  # what it is the price of if nobody sells that: `1/8 of p5en.48xlarge`
    other_gpu: str | None = None  # the priced instance's GPU if the run used another one

    def __post_init__(self) -> None:
        check_positive(f"usd_per_hour of {self.instance}", self.usd_per_hour)
        if self.service not in SERVICES:
            raise UserError(f"service is {self.service!r}", f"it is one of {', '.join(SERVICES)}")

    @property
    def key(self) -> tuple[str, str, str, str, datetime.date]:
        """What identifies a price: instance, service, region, purchase option, date."""
        return self.instance, self.service, self.region, self.purchase, self.as_of

    def to_json(self) -> dict[str, Any]:
        """Return the fields that the ledger keeps, with the date as YYYY-MM-DD."""
        return {name: getattr(self, name) for name in _STORED} | {"as_of": self.as_of.isoformat()}


#: What every gp3 volume has at no extra charge. aws.amazon.com/ebs/pricing, read 2026-11.
_FREE_MIB_PER_S = 125
#: A month's price buys fewer hours in February than in any other month.
_FEWEST_HOURS_PER_MONTH = 28 * 24
#: With 365 days in 12 months.
_MEAN_HOURS_PER_MONTH = 730


@dataclass(frozen=True, kw_only=True)
class VolumePrice:
    """What a gp3 volume of EBS costs in a region, in USD per month of its size and of its throughput."""

    region: str
    usd_per_gib_month: float
    usd_per_mib_per_s_month: float  # beyond what is free
    as_of: datetime.date
    source: str

    def __post_init__(self) -> None:
        for name in ("usd_per_gib_month", "usd_per_mib_per_s_month"):
            check_positive(f"{name} in {self.region}", getattr(self, name))

    def max_usd_per_hour(self, *, gib: float, mib_per_s: float) -> float:
        """Return the most that an hour of such a volume costs, with no more operations than are free."""
        return self._usd_per_month(gib, mib_per_s) / _FEWEST_HOURS_PER_MONTH

    def usd_per_hour(self, *, gib: float, mib_per_s: float) -> float:
        """Return what an hour of such a volume costs in a month of mean length."""
        return self._usd_per_month(gib, mib_per_s) / _MEAN_HOURS_PER_MONTH

    def _usd_per_month(self, gib: float, mib_per_s: float) -> float:
        extra_mib_per_s = max(0.0, mib_per_s - _FREE_MIB_PER_S)
        return gib * self.usd_per_gib_month + extra_mib_per_s * self.usd_per_mib_per_s_month


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """Accelerators and instances by name, and prices, of which many may share all but the date."""

    accelerators: Mapping[str, Accelerator]
    instances: Mapping[str, InstanceType]
    prices: tuple[Price, ...]
    volume_prices: tuple[VolumePrice, ...] = ()
    # Why types of EC2 are no `instances`.
    skipped: Mapping[str, str] = field(default_factory=dict[str, str])

    def price(
        self,
        instance: str,
        *,
        service: str = "ec2",
        region: str = "us-east-1",
        purchase: str = "on-demand",
        on: datetime.date,
    ) -> Price:
        """Return the price in force on the day `on`: the latest with `as_of` on or before it.

        Raises UnknownName for an instance that the catalogue lacks, and UserError, which says what is known
        instead, for a price that it lacks.
        """
        self.instance(instance)
        price = self.find_price(instance, service=service, region=region, purchase=purchase, on=on)
        if price is not None:
            return price
        offers = self._offers(instance, service, region, purchase) if purchase != "spot" else ()
        what = f"{service} {purchase} price of {instance} in {region}"
        if offers:
            raise UserError(
                f"no {what} is known for {on}",
                f"the earliest known is of {offers[0].as_of}: ${offers[0].usd_per_hour:g} per hour",
            )
        raise UserError(f"no {what} is known", self._what_is_known(instance, service, region, purchase))

    def find_price(
        self,
        instance: str,
        *,
        service: str = "ec2",
        region: str,
        purchase: str = "on-demand",
        on: datetime.date,
        old_spot: bool = False,
    ) -> Price | None:
        """Return the price in force on the day `on`, or None if there is none.

        old_spot: also a third party's spot price, which was never in force; for forecasts alone.
        """
        offers = self._offers(instance, service, region, purchase)
        allowed = (price for price in reversed(offers) if old_spot or price.purchase != "spot")
        return next((price for price in allowed if price.as_of <= on), None)

    def find_volume_price(self, region: str, *, on: datetime.date) -> VolumePrice | None:
        """Return the price of gp3 volumes in force on the day `on`, or None if none is known."""
        known = [price for price in self.volume_prices if price.region == region and price.as_of <= on]
        return max(known, key=lambda price: price.as_of, default=None)

    def instance(self, name: str) -> InstanceType:
        """Return the instance type of this name. Raises UnknownName."""
        if name not in self.instances:
            raise self.unknown_instance(name)
        return self.instances[name]

    def unknown_instance(self, name: str) -> UnknownName:
        """Return the error for the name of no instance type: one of a family or a GPU leads to its types."""
        hint = None
        if sizes := [known for known in self.instances if known.startswith(f"{name.lower()}.")]:
            hint = f"its sizes are {' and '.join(sizes)}"
        elif types := self.types_with(name):
            having = ", ".join(f"{known.name} ({known.num_accelerators})" for known in types)
            hint = f"{name.partition(':')[0]} is a GPU; name an instance type that has it: {having}"
        elif gpu := identify(name):
            models = ", ".join(self.accelerators)
            hint = f"{name} is a GPU ({gpu.name}) that no known instance type has; there are {models}"
        return UnknownName("instance", name, self.instances, hint, listed_by="fastlaunch prices")

    def models_of(self, gpu: str) -> list[str]:
        """Return the accelerators that `gpu` means: `A100` any memory size, and `L4` not L40S."""
        text = " ".join(re.split(r"[\s_-]+", gpu.lower().removeprefix("nvidia").strip(" _-")))
        models = [name for name in self.accelerators if text and f"{name} ".lower().startswith(f"{text} ")]
        meant = identify(gpu)
        return models or [name for name in self.accelerators if meant and identify(name) == meant]

    def types_with(self, gpu: str) -> list[InstanceType]:
        """Return the instance types with the GPU, the fewest first.

        gpu: such as `H100`, or `H100:8`, which leaves out others if there are any with so many.
        """
        model, _, count = gpu.partition(":")
        models = self.models_of(model)
        types = [known for known in self.instances.values() if known.accelerator in models]
        fitting = [known for known in types if count == str(known.num_accelerators)] or types
        return sorted(fitting, key=lambda known: known.num_accelerators)

    def lack_of_gpus(self, instance: str | None, *, num_gpus: int, num_nodes: int) -> str | None:
        """Return in words that the instances lack GPUs; None if they have them, or it is not known."""
        # SageMaker's name of it has the same machine.
        known = self.instances.get((instance or "").removeprefix("ml."))
        if known is None or num_gpus <= num_nodes * known.num_accelerators:
            return None
        if self.accelerators[known.accelerator].compute_capability is None:
            return None  # not a GPU: frameworks count a chip's cores
        nodes = "1 node" if num_nodes == 1 else f"{num_nodes} nodes"
        gpus = "1 GPU" if known.num_accelerators == 1 else f"{known.num_accelerators} GPUs"
        return f"{num_gpus} on {nodes} of {instance}, which has {gpus}"

    def accelerator_of(self, instance: str) -> Accelerator:
        """Return the accelerator that the instance carries. Raises UnknownName."""
        return self.accelerators[self.instance(instance).accelerator]

    def accelerator_of_device(self, device_name: str) -> Accelerator | None:
        """Return the accelerator that torch calls `device_name`, or None if the catalogue lacks it.

        Only whole names match: an H100 PCIe or a MIG slice has other peaks than the H100 SXM.
        """
        return self._by_device.get(_folded(device_name))

    def _offers(self, instance: str, service: str, region: str, purchase: str) -> tuple[Price, ...]:
        """Return the prices that differ in their date alone, the oldest first."""
        return self._by_offer.get((instance, service, region, purchase), ())

    @cached_property
    def _by_offer(self) -> dict[tuple[str, str, str, str], tuple[Price, ...]]:
        offers: dict[tuple[str, str, str, str], list[Price]] = {}
        for price in sorted(self.prices, key=lambda price: price.as_of):
            offers.setdefault(price.key[:4], []).append(price)
        return {key: tuple(prices) for key, prices in offers.items()}

    @cached_property
    def _by_device(self) -> dict[str, Accelerator]:
        return {_folded(name): item for item in self.accelerators.values() for name in item.device_names}

    def _what_is_known(self, instance: str, service: str, region: str, purchase: str) -> str:
        sold = self.instances[instance].purchase_options
        if purchase not in sold:
            other = " or ".join(option for option in sold if option != purchase)
            return f"AWS does not sell {instance} {purchase}, but as {other}, whose price is asked for at AWS"
        if purchase == "spot":
            return "spot prices change by the hour and are asked for at AWS, not kept in the price file"
        known = sorted({price.key[1:4] for price in self.prices if price.instance == instance})
        listing = ", ".join(" ".join(offer) for offer in known) or "none of this instance"
        return f"known: {listing}; add it to a price file of your own: `prices: FILE` in the config file"


def paid_usd_per_hour(price: Price | None, settings: Settings) -> float | None:
    """Return what an hour is billed: the account's rates are on demand, not of spot or a block's fee."""
    if price is None:
        return None
    if price.purchase != "on-demand":
        return price.usd_per_hour
    name = f"ml.{price.instance}" if price.service == "sagemaker" else price.instance
    return settings.paid_usd_per_hour(name, price.usd_per_hour)


def age_note(dates: Iterable[datetime.date], today: datetime.date) -> str | None:
    """Return how old the prices used are, and what to type; None where none is old.

    dates: `as_of` of the prices.
    """
    used = [*dates]
    oldest, newest = min(used, default=today), max(used, default=today)
    age_days = (today - oldest).days
    if age_days <= OLD_PRICE_DAYS:
        return None
    ages = (
        f"{age_days} days old ({oldest})"
        if oldest == newest
        else f"{(today - newest).days} to {age_days} days old"
    )
    return f"prices are {ages}: `{UPDATE_COMMAND}`"


def check_age(dates: Iterable[datetime.date], today: datetime.date, max_age: datetime.timedelta) -> None:
    """Raise UserError if the oldest of the prices used is older than the config file allows."""
    oldest = min(dates, default=today)
    if today - oldest > max_age:
        raise UserError(
            f"the oldest price used is of {oldest}, older than `max_price_age` in the config file allows",
            f"type: {UPDATE_COMMAND}; a price in a file of your own gets a new `as_of`",
        )


def _folded(device_name: str) -> str:
    return " ".join(device_name.split()).lower()


def max_cost_usd(
    *,
    num_nodes: int,
    max_minutes: int,
    usd_per_hour: float,
    volume_usd_per_hour: float | None = None,
    fee_usd: float | None = None,
) -> float:
    """Return the most that instances and their volumes can cost, in USD: nodes x (limit + margin) x price.

    volume_usd_per_hour: None if not known; then volumes do not count. fee_usd: a capacity block's, which
    bounds the cost. NAT gateways and data transfer do not count.
    """
    hours = num_nodes * (max_minutes + MARGIN_MINUTES) / 60
    usd = hours * usd_per_hour
    return (usd if fee_usd is None else min(usd, fee_usd)) + hours * (volume_usd_per_hour or 0.0)


def check_sold(instance: InstanceType, purchase: str, max_price_usd: float | None) -> None:
    """Raise UserError unless AWS sells the type this way and its cost has a bound."""
    if purchase not in instance.purchase_options:
        if "on-demand" in instance.purchase_options:
            hint = "give --purchase on-demand, or another instance type"
        elif "spot" in instance.purchase_options:
            hint = "give --purchase spot --max-price USD, the most you would pay for an hour"
        else:
            hint = "choose another instance type"
        sold = " or ".join(instance.purchase_options)
        raise UserError(f"{instance.name} has no {purchase} price: AWS sells it as {sold}", hint)
    if purchase == "spot" and max_price_usd is None and "on-demand" not in instance.purchase_options:
        raise UserError(
            f"{instance.name} has no on-demand price that would bound what spot costs",
            "give --max-price USD, the most you would pay for an hour",
        )


def dearest_rate(
    instance: InstanceType,
    region: str,
    *,
    purchase: str,
    max_price_usd: float | None,
    catalogue: Catalogue,
    today: datetime.date,
    service: str = "ec2",
) -> Price:
    """Return the most that an hour can cost: the limit for spot, if given, or the on-demand price.

    Spot is never dearer than on demand. service: ec2 or sagemaker. For capacity blocks see `capacity_block`.
    Raises UserError if AWS does not sell the type this way, or if no price is known that bounds the cost.
    """
    if service == "sagemaker":
        try:
            return catalogue.price(instance.name, service="sagemaker", region=region, on=today)
        except UserError as error:
            raise UserError(
                error.message,
                "aws.amazon.com/sagemaker/ai/pricing has it; write it into a price file of your own, as "
                "service sagemaker and without ml. (`prices: FILE` in the config file)",
            ) from None
    check_sold(instance, purchase, max_price_usd)
    if purchase == "spot" and max_price_usd is not None:
        return Price(
            instance=instance.name,
            service="ec2",
            region=region,
            purchase="spot",
            usd_per_hour=max_price_usd,
            as_of=today,
            source="--max-price",
            basis="given",
        )
    try:
        return catalogue.price(instance.name, region=region, on=today)
    except UserError as error:
        if purchase == "spot":
            raise UserError(
                error.message, "give --max-price USD, the most you would pay for an hour"
            ) from None
        raise

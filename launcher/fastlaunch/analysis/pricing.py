"""What an hour of a row costs: as billed, as listed on a day, as another instance, or as given."""

import datetime
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from fastlaunch.analysis.pooling import Pool
from fastlaunch.catalog.hardware import Accelerator, check_positive
from fastlaunch.core.errors import UserError
from fastlaunch.measure.summarize import RunSummary

if TYPE_CHECKING:
    from fastlaunch.catalog.hardware import InstanceType
    from fastlaunch.catalog.prices import Catalogue, Price


@dataclass(frozen=True, kw_only=True)
class ChargedAs:
    """An instance type that a run is charged as; share: of it, which makes the price hypothetical."""

    instance: str
    share: Fraction | None = None

    def __post_init__(self) -> None:
        if self.share is not None and not 0 < self.share <= 1:
            raise UserError(
                f"{self.share} of {self.instance} is no share", "give more than 0 and at most 1, such as 1/8"
            )

    def __str__(self) -> str:
        return self.instance if self.share is None else f"{self.instance}:{self.share}"


@dataclass(frozen=True, kw_only=True)
class PriceRequest:
    """How to price. today: the day whose prices hold where no other is asked for.

    as_of: price every row as of this day, also runs that know what they were billed.
    usd_per_hour: of a node, for every row. price_as: charge every row as this instance, in `region`; of
    several, as the smallest with the row's GPUs.
    """

    today: datetime.date
    as_of: datetime.date | None = None
    usd_per_hour: float | None = None
    price_as: tuple[ChargedAs, ...] = ()
    region: str = "us-east-1"

    def __post_init__(self) -> None:
        if self.usd_per_hour is not None:
            check_positive("--usd-per-hour", self.usd_per_hour)
        if self.usd_per_hour is not None and (self.price_as or self.as_of is not None):
            raise UserError(
                "--usd-per-hour says the price itself", "leave out --price-as and --prices-as-of, or it"
            )


@dataclass(frozen=True, kw_only=True)
class RowPrice:
    """USD per hour of one node. as_of: None for a price that the user gave.

    stored: what the runs were billed, not looked up. charged_as: the instance type whose price it is, where
    the user chose that. hypothetical: what is charged, where nobody sells it so.
    """

    usd_per_hour: float
    as_of: datetime.date | None
    source: str
    inferred: bool = False
    stored: bool = False
    charged_as: str | None = None
    hypothetical: str | None = None


def price_row(
    pool: Pool, request: PriceRequest, catalogue: "Catalogue"
) -> tuple[RowPrice | None, str | None]:
    """The price of a row, and what there is to warn of. No price where the row has no instance, or none is
    known: unknown is never 0.

    Raises UserError for a row that cannot be charged as the request says.
    """
    if request.usd_per_hour is not None:
        return RowPrice(usd_per_hour=request.usd_per_hour, as_of=None, source="given"), None
    if request.price_as:
        return _priced_as(pool, request, _charge_of(pool, request, catalogue), catalogue), None
    stored = {c.price for c in pool.all_runs if c.price is not None}
    if stored and request.as_of is None:
        latest = max(stored, key=lambda price: price.as_of)
        told = None
        if len({price.usd_per_hour for price in stored}) > 1:
            told = (
                f"{pool.first.recipe}: the runs were billed at {len(stored)} prices; the one of"
                f" {latest.as_of} is used for all (--prices-as-of DATE picks another)"
            )
        return _as_listed(latest, stored=True), told
    instance = pool.first.instance or next((price.instance for price in stored), None)
    if instance is None:
        return None, None
    service, region, purchase = pool.all_runs[0].offer
    try:
        price = catalogue.price(
            instance, service=service, region=region, purchase=purchase, on=request.as_of or request.today
        )
    except UserError as error:
        return None, f"{pool.first.recipe} on {instance} has no price: {error.message}"
    return _as_listed(price), None


def accelerator_of(summary: RunSummary, catalogue: "Catalogue") -> Accelerator | None:
    """The accelerator a run used: by its device name, else by its instance; None if it is not known."""
    if summary.device_name is not None:
        return catalogue.accelerator_of_device(summary.device_name)
    instance = catalogue.instances.get(summary.instance or "")
    return catalogue.accelerators[instance.accelerator] if instance else None


def _as_listed(price: "Price", *, stored: bool = False) -> RowPrice:
    return RowPrice(
        usd_per_hour=price.usd_per_hour,
        as_of=price.as_of,
        source=price.source,
        inferred=price.inferred,
        stored=stored,
    )


def _share(num_gpus: int, instance: "InstanceType") -> Fraction:
    return min(Fraction(num_gpus, instance.num_accelerators), Fraction(1))


def _charge_of(pool: Pool, request: PriceRequest, catalogue: "Catalogue") -> ChargedAs:
    """What of `request` a row is charged as."""
    charges = request.price_as
    if len(charges) == 1:
        return charges[0]
    num_gpus, used = _ran_on(pool, catalogue)
    instances = [catalogue.instance(charge.instance) for charge in charges]
    numbers = [
        (charge.share or 1) * instance.num_accelerators
        for charge, instance in zip(charges, instances, strict=True)
    ]
    fitting = [
        (number, index)
        for index, (number, instance) in enumerate(zip(numbers, instances, strict=True))
        if catalogue.accelerators[instance.accelerator].name == used
        and (number == num_gpus or (charges[index].share is not None and number > num_gpus))
    ]
    if not fitting:
        raise UserError(
            f"{pool.first.recipe} ran on {num_gpus} x {used}, which none of"
            f" {', '.join(map(str, charges))} has",
            "name one that has, too: --price-as INSTANCE, or a part of it, --price-as INSTANCE:1/8",
        )
    return charges[min(fitting)[1]]


def _ran_on(pool: Pool, catalogue: "Catalogue") -> tuple[int, str]:
    """GPUs of a node, and their name."""
    found = accelerator_of(pool.first, catalogue)
    used = found.name if found else pool.first.device_name or "an unknown device"
    return pool.first.num_gpus // pool.first.num_nodes, used


def _priced_as(pool: Pool, request: PriceRequest, charge: ChargedAs, catalogue: "Catalogue") -> RowPrice:
    name = charge.instance
    instance = catalogue.instance(name)
    price = _as_listed(catalogue.price(name, region=request.region, on=request.as_of or request.today))
    charged = catalogue.accelerators[instance.accelerator].name
    num_gpus, used = _ran_on(pool, catalogue)
    if charge.share is None:
        if used != charged or num_gpus != instance.num_accelerators:
            share = _share(num_gpus, instance)
            raise UserError(
                f"{pool.first.recipe} ran on {num_gpus} x {used}; {name} is {instance.num_accelerators} x"
                f" {charged}",
                f"choose other runs, or charge a part of it, hypothetically: --price-share {share}",
            )
        return replace(price, charged_as=name)
    whole = charge.share * instance.num_accelerators
    if used == charged and num_gpus > whole:
        raise UserError(
            f"{pool.first.recipe} ran on {num_gpus} x {used}; {charge.share} of {name} is {float(whole):g}",
            f"choose other runs, or charge what they used: --price-share {_share(num_gpus, instance)}",
        )
    of = f" ({charged}), though it ran on {used}" if used != charged else ""
    return replace(
        price,
        usd_per_hour=price.usd_per_hour * float(charge.share),
        charged_as=name,
        hypothetical=f"{charge.share} of {name}{of}",
    )

"""What an instance costs: prices with their dates and sources, and the catalogue that holds them.

A price holds from its `as_of` until the next one of the same instance, service, region and purchase option.
Unknown is an error: never 0, and never the price of another region. Spot is queried, never kept here.
"""

import datetime
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fastlaunch.catalog.hardware import Accelerator, InstanceType, check_positive
from fastlaunch.core.errors import UnknownName, UserError

SERVICES = ("ec2", "sagemaker")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


@dataclass(frozen=True, kw_only=True)
class Price:
    """USD per hour of a whole instance, for a service, a region and a purchase option.

    as_of: the day on which the source gave it. inferred: derived from another price, `source` says how.
    """

    instance: str
    service: str
    region: str
    purchase: str
    usd_per_hour: float
    as_of: datetime.date
    source: str
    inferred: bool = False

    def __post_init__(self) -> None:
        check_positive(f"price of {self.instance}", self.usd_per_hour)
        if self.service not in SERVICES:
            raise UserError(f"service is {self.service!r}", f"it is one of {', '.join(SERVICES)}")

    @property
    def key(self) -> tuple[str, str, str, str, datetime.date]:
        """What tells one price from another: instance, service, region, purchase option, date."""
        return self.instance, self.service, self.region, self.purchase, self.as_of

    def to_json(self) -> dict[str, Any]:
        """The fields, with the date as YYYY-MM-DD."""
        return asdict(self) | {"as_of": self.as_of.isoformat()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Price":
        """The price that `to_json` wrote. Raises UserError where it is no such thing."""
        try:
            return cls(
                **{
                    **value,
                    "as_of": parse_date(value["as_of"]),
                    "usd_per_hour": float(value["usd_per_hour"]),
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"not a price: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """Accelerators and instances by name, and the prices, of which any number can share all but the date."""

    accelerators: Mapping[str, Accelerator]
    instances: Mapping[str, InstanceType]
    prices: tuple[Price, ...]

    def price(
        self,
        instance: str,
        *,
        service: str = "ec2",
        region: str = "us-east-1",
        purchase: str = "on-demand",
        on: datetime.date,
    ) -> Price:
        """The price in force on the day `on`: the latest with `as_of` on or before it.

        Raises UnknownName for an instance that the catalogue does not have, and UserError, saying what is
        known instead, where it has no such price.
        """
        self.instance(instance)
        offers = self._by_offer.get((instance, service, region, purchase), ())
        in_force = [price for price in offers if price.as_of <= on]
        if in_force:
            return in_force[-1]
        what = f"{service} {purchase} price of {instance} in {region}"
        if offers:
            raise UserError(
                f"no {what} is known for {on}",
                f"the earliest known is of {offers[0].as_of}: ${offers[0].usd_per_hour:g} per hour",
            )
        raise UserError(f"no {what} is known", self._what_is_known(instance, service, region, purchase))

    def instance(self, name: str) -> InstanceType:
        """The instance type of this name. Raises UnknownName."""
        if name not in self.instances:
            raise UnknownName("instance", name, self.instances)
        return self.instances[name]

    def accelerator_of(self, instance: str) -> Accelerator:
        """The accelerator that the instance carries. Raises UnknownName."""
        return self.accelerators[self.instance(instance).accelerator]

    def accelerator_of_device(self, device_name: str) -> Accelerator | None:
        """The accelerator that torch calls `device_name`, or None for one that is not in the catalogue.

        Only whole names match: an H100 PCIe or a MIG slice has other peaks than the H100 SXM.
        """
        return self._by_device.get(_folded(device_name))

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


def load_catalogue(user_file: Path | None = None) -> Catalogue:
    """The shipped catalogue, with the entries of the user's file put over it one by one.

    An entry with the same name (for a price: instance, service, region, purchase option and date) replaces
    the shipped one, any other is added. Raises BadFile, with the line, for a file with a fault.
    """
    # Imported late: it brings YAML, and it imports this module.
    from fastlaunch.catalog.load import read_catalogue
    from fastlaunch.core.paths import shipped

    catalogue = read_catalogue(shipped("instance_prices.yaml"))
    if user_file is None:
        return catalogue
    return _merged(catalogue, read_catalogue(user_file, known=catalogue))


def parse_date(text: str) -> datetime.date:
    """The day written as YYYY-MM-DD. Raises UserError for other text or a day that never was."""
    try:
        if _DATE.fullmatch(text):
            return datetime.date.fromisoformat(text)
    except ValueError:
        pass
    raise UserError(f"{text!r} is not a date", "give one as YYYY-MM-DD, such as 2023-11-15")


def _merged(shipped: Catalogue, user: Catalogue) -> Catalogue:
    return Catalogue(
        accelerators={**shipped.accelerators, **user.accelerators},
        instances={**shipped.instances, **user.instances},
        prices=tuple({price.key: price for price in (*shipped.prices, *user.prices)}.values()),
    )


def _folded(device_name: str) -> str:
    return " ".join(device_name.split()).lower()

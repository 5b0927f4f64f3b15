"""The most that an attempt can cost: instance time, before anything is started. Pure."""

import datetime
from dataclasses import dataclass

from fastlaunch.errors import UserError
from fastlaunch.hardware import InstanceType
from fastlaunch.prices import Catalogue

#: Billed on top of the time limit: EC2's time from starting to booting, and from shutdown to terminated.
MARGIN_MINUTES = 10


@dataclass(frozen=True, kw_only=True)
class HourlyRate:
    """USD per hour of one instance, at most. as_of: day of the price, or on which a limit was given."""

    usd_per_hour: float
    as_of: str


def max_cost_usd(*, num_nodes: int, max_minutes: int, usd_per_hour: float) -> float:
    """USD of instance time, at most: nodes x (limit + margin) x rate. Volumes and traffic are not in it."""
    return num_nodes * (max_minutes + MARGIN_MINUTES) / 60 * usd_per_hour


def dearest_rate(
    instance: InstanceType,
    region: str,
    *,
    purchase: str,
    max_price_usd: float | None,
    catalogue: Catalogue,
    today: datetime.date,
) -> HourlyRate:
    """The most an hour can cost: the limit for spot where one is given, else the on-demand price.

    Spot is never dearer than on demand. Raises UserError where AWS does not sell the type this way, and where
    no price is known that could serve as a ceiling.
    """
    if purchase not in instance.purchase_options:
        sold = " or ".join(instance.purchase_options)
        asked = " --purchase spot --max-price USD" if "spot" in instance.purchase_options else ""
        raise UserError(
            f"AWS does not sell {instance.name} {purchase}, only as {sold}",
            f"give{asked}, the most you would pay for an hour" if asked else "choose another instance type",
        )
    if purchase == "spot" and max_price_usd is not None:
        return HourlyRate(usd_per_hour=max_price_usd, as_of=today.isoformat())
    if purchase == "spot" and "on-demand" not in instance.purchase_options:
        raise UserError(
            f"{instance.name} has no on-demand price that would bound what spot costs",
            "give --max-price USD, the most you would pay for an hour",
        )
    price = catalogue.price(instance.name, region=region, on=today)
    return HourlyRate(usd_per_hour=price.usd_per_hour, as_of=price.as_of.isoformat())

"""The most that an attempt can cost: instance time, before anything is started. Pure."""

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastlaunch.backends.ec2_site import Site
from fastlaunch.errors import UserError
from fastlaunch.hardware import InstanceType
from fastlaunch.prices import Catalogue

#: Billed on top of the time limit: EC2's time from starting to booting, and from shutdown to terminated.
MARGIN_MINUTES = 10
#: Less is not worth a machine: booting, pulling the image, and what the node keeps for saving and uploading.
MIN_MINUTES = 15


@dataclass(frozen=True, kw_only=True)
class HourlyRate:
    """USD per hour of one instance, at most. as_of: day of the price, or on which a limit was given."""

    usd_per_hour: float
    as_of: str


def max_cost_usd(*, num_nodes: int, max_minutes: int, usd_per_hour: float) -> float:
    """USD of instance time, at most: nodes x (limit + margin) x rate. Volumes and traffic are not in it."""
    return num_nodes * (max_minutes + MARGIN_MINUTES) / 60 * usd_per_hour


@dataclass(frozen=True, kw_only=True)
class CostCeiling:
    """The most that a job can cost, wherever of `instances` it runs; `dearest` is the one it is made of."""

    usd: float
    num_nodes: int
    max_minutes: int
    dearest: Site
    instances: tuple[str, ...]

    def __str__(self) -> str:
        """`at most $119.25 of instance time: (2 h + 10 min) x $55.04/h, p5.48xlarge; price as of DATE`."""
        nodes = f"{self.num_nodes} x " if self.num_nodes > 1 else ""
        limit = _duration(self.max_minutes)
        name = self.dearest.instance.name
        which = f"the dearest of {', '.join(self.instances)}" if len(self.instances) > 1 else name
        limited = self.dearest.max_price_usd == self.dearest.usd_per_hour
        what = "your limit for spot" if limited else f"price as of {self.dearest.price_as_of}"
        return (
            f"at most ${self.usd:,.2f} of instance time: {nodes}({limit} + {MARGIN_MINUTES} min) x "
            f"${self.dearest.usd_per_hour:g}/h, {which}; {what}"
        )


def cost_ceiling(sites: Sequence[Site], *, num_nodes: int, max_minutes: int) -> CostCeiling:
    """The ceiling over all sites where a job may run: the dearest one's."""
    dearest = max(sites, key=lambda site: site.usd_per_hour)
    return CostCeiling(
        usd=max_cost_usd(num_nodes=num_nodes, max_minutes=max_minutes, usd_per_hour=dearest.usd_per_hour),
        num_nodes=num_nodes,
        max_minutes=max_minutes,
        dearest=dearest,
        instances=tuple(dict.fromkeys(site.instance.name for site in sites)),
    )


def check_budget(ceiling: CostCeiling, budget_usd: float | None) -> None:
    """Nothing, if the ceiling is within the budget or there is none; else UserError."""
    if budget_usd is None or ceiling.usd <= budget_usd:
        return
    minutes = int(budget_usd / ceiling.dearest.usd_per_hour * 60 / ceiling.num_nodes) - MARGIN_MINUTES
    fits = f", or --max-hours {minutes}min" if minutes >= MIN_MINUTES else ""
    raise UserError(
        f"this may cost {str(ceiling).removeprefix('at most ')}, above --max-cost {budget_usd:g}",
        f"give --max-cost {math.ceil(ceiling.usd)}{fits}",
    )


def _duration(minutes: int) -> str:
    hours, rest = divmod(minutes, 60)
    return " ".join([*([f"{hours} h"] if hours else []), *([f"{rest} min"] if rest else [])])


def check_sold(instance: InstanceType, purchase: str, max_price_usd: float | None) -> None:
    """Nothing, if AWS sells the type this way and its cost has a bound; else UserError."""
    if purchase not in instance.purchase_options:
        spot, sold = "spot" in instance.purchase_options, " or ".join(instance.purchase_options)
        raise UserError(
            f"{instance.name} has no {purchase} price: AWS sells it as {sold}",
            "give --purchase spot --max-price USD, the most you would pay for an hour"
            if spot
            else "choose another instance type",
        )
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
) -> HourlyRate:
    """The most an hour can cost: the limit for spot where one is given, else the on-demand price.

    Spot is never dearer than on demand. Raises UserError where AWS does not sell the type this way, and where
    no price is known that could serve as a ceiling.
    """
    check_sold(instance, purchase, max_price_usd)
    if purchase == "spot" and max_price_usd is not None:
        return HourlyRate(usd_per_hour=max_price_usd, as_of=today.isoformat())
    try:
        price = catalogue.price(instance.name, region=region, on=today)
    except UserError as error:
        if purchase == "spot":
            raise UserError(
                error.message, "give --max-price USD, the most you would pay for an hour"
            ) from None
        raise
    return HourlyRate(usd_per_hour=price.usd_per_hour, as_of=price.as_of.isoformat())

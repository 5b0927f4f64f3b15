"""The most that an attempt can cost: instance time, before anything is started. Pure."""

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastlaunch.backends.placements import CapacityBlock, Site
from fastlaunch.backends.sagemaker_site import TrainingSite
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.errors import UserError

if TYPE_CHECKING:
    from fastlaunch.backends.protocol import Place

#: Billed on top of the time limit. EC2: from starting to booting, and from shutdown to terminated. SageMaker:
#: stopping, and uploading what the job wrote.
MARGIN_MINUTES = 10
#: Less is not worth a machine: booting, pulling the image, and what the node keeps for saving and uploading.
MIN_MINUTES = 15


@dataclass(frozen=True, kw_only=True)
class HourlyRate:
    """USD per hour of one instance, at most. as_of: day of the price, or on which a limit was given."""

    usd_per_hour: float
    as_of: str


def max_cost_usd(*, num_nodes: int, max_minutes: int, usd_per_hour: float, idle_minutes: int = 0) -> float:
    """USD of instance time, at most: nodes x (limit + margin + idle) x rate.

    Volumes and traffic are not in it. idle_minutes: for which machines are kept, billed, after the job.
    """
    return num_nodes * (max_minutes + MARGIN_MINUTES + idle_minutes) / 60 * usd_per_hour


@dataclass(frozen=True, kw_only=True)
class CostCeiling:
    """The most that a job can cost, wherever of `instances` it runs; `dearest` is the one it is made of.

    In a capacity block it is what the job uses of the fee that was paid before.
    """

    usd: float
    num_nodes: int
    max_minutes: int
    dearest: "Place"
    instances: tuple[str, ...]

    def __str__(self) -> str:
        """`at most $119.25 of instance time: (2 h + 10 min) x $55.04/h, p5.48xlarge; price as of DATE`."""
        block = block_of(self.dearest)
        if block is not None:
            return self._of_block(block)
        which = (
            f"the dearest of {', '.join(self.instances)}" if len(self.instances) > 1 else self.instances[0]
        )
        limited = self.dearest.max_price_usd == self.dearest.usd_per_hour
        what = "your limit for spot" if limited else f"price as of {self.dearest.price_as_of}"
        if isinstance(self.dearest, TrainingSite) and self.dearest.training_plan:
            what = f"on-demand {what}, though the training plan was paid for before"
        time = "SageMaker instance time" if self.dearest.backend == "sagemaker" else "instance time"
        return f"at most ${self.usd:,.2f} of {time}: {self._product()}, {which}; {what}"

    def _product(self) -> str:
        nodes = f"{self.num_nodes} x " if self.num_nodes > 1 else ""
        idle = self.dearest.idle_minutes
        kept = f" + {_duration(idle)} kept alive" if idle else ""
        time = f"{_duration(self.max_minutes)} + {MARGIN_MINUTES} min{kept}"
        return f"{nodes}({time}) x ${self.dearest.usd_per_hour:g}/h"

    def _of_block(self, block: CapacityBlock) -> str:
        if is_known(block):
            return (
                f"effectively at most ${self.usd:,.2f}: {self._product()}, {self.instances[0]}, of the "
                f"capacity block's fee of ${block.fee_usd:,.2f}, which is spent already "
                f"({block.num_instances} for {block.hours:g} h)"
            )
        return (
            f"nothing on top of the capacity block's fee, which is spent already; which part of it the job "
            f"uses, at most ${self.usd:,.2f}, is told when it is submitted"
        )


def block_of(place: "Place") -> CapacityBlock | None:
    """The capacity block that the place is in, if it is in one."""
    return place.block if isinstance(place, Site) else None


def is_known(block: CapacityBlock) -> bool:
    """Whether AWS told when it ends."""
    return not block.ends_at.startswith("<")


def type_names(place: "Place") -> tuple[str, ...]:
    """The instance types that a job may get there, as the service calls them, in order."""
    if isinstance(place, TrainingSite):
        return tuple(f"ml.{one.name}" for one in (place.instance, *place.others))
    return (place.instance.name,)


def cost_ceiling(sites: "Sequence[Place]", *, num_nodes: int, max_minutes: int) -> CostCeiling:
    """The ceiling over all sites where a job may run: the dearest one's."""
    dearest = max(sites, key=lambda site: site.usd_per_hour)
    usd = max_cost_usd(
        num_nodes=num_nodes,
        max_minutes=max_minutes,
        usd_per_hour=dearest.usd_per_hour,
        idle_minutes=dearest.idle_minutes,
    )
    block = block_of(dearest)
    return CostCeiling(
        # A job that has the whole of a block uses its fee and no more.
        usd=usd if block is None else min(usd, block.fee_usd),
        num_nodes=num_nodes,
        max_minutes=max_minutes,
        dearest=dearest,
        instances=tuple(dict.fromkeys(name for site in sites for name in type_names(site))),
    )


def check_budget(ceiling: CostCeiling, budget_usd: float | None) -> None:
    """Nothing, if the ceiling is within the budget or there is none; else UserError."""
    if budget_usd is None or ceiling.usd <= budget_usd:
        return
    idle = ceiling.dearest.idle_minutes
    affordable = int(budget_usd / ceiling.dearest.usd_per_hour * 60 / ceiling.num_nodes)
    minutes = affordable - MARGIN_MINUTES - idle
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
        sold = " or ".join(instance.purchase_options)
        raise UserError(
            f"{instance.name} has no {purchase} price: AWS sells it as {sold}", _otherwise(instance)
        )
    if purchase == "spot" and max_price_usd is None and "on-demand" not in instance.purchase_options:
        raise UserError(
            f"{instance.name} has no on-demand price that would bound what spot costs",
            "give --max-price USD, the most you would pay for an hour",
        )


def _otherwise(instance: InstanceType) -> str:
    """How else to buy the type, in words."""
    if "on-demand" in instance.purchase_options:
        return "give --purchase on-demand, or another instance type"
    if "spot" in instance.purchase_options:
        return "give --purchase spot --max-price USD, the most you would pay for an hour"
    return "choose another instance type"


def dearest_rate(
    instance: InstanceType,
    region: str,
    *,
    purchase: str,
    max_price_usd: float | None,
    catalogue: Catalogue,
    today: datetime.date,
    service: str = "ec2",
) -> HourlyRate:
    """The most an hour can cost: the limit for spot where one is given, else the on-demand price.

    Spot is never dearer than on demand. service: ec2 or sagemaker. Not for capacity blocks, see
    `capacity_block`. Raises UserError where AWS does not sell the type this way, and where no price is known
    that could serve as a ceiling.
    """
    if service == "sagemaker":
        return _training_rate(instance, region, catalogue=catalogue, today=today)
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


def _training_rate(
    instance: InstanceType, region: str, *, catalogue: Catalogue, today: datetime.date
) -> HourlyRate:
    try:
        price = catalogue.price(instance.name, service="sagemaker", region=region, on=today)
    except UserError as error:
        raise UserError(
            error.message,
            "aws.amazon.com/sagemaker/ai/pricing has it; write it into a price file of your own, as service "
            "sagemaker and without ml. (`prices: FILE` in the config file)",
        ) from None
    return HourlyRate(usd_per_hour=price.usd_per_hour, as_of=price.as_of.isoformat())

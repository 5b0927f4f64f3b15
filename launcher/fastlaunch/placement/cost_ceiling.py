"""The most that an attempt can cost: instance time and volumes, before anything is started. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastlaunch.backends.site import CapacityBlock, Site
from fastlaunch.catalog.prices import max_cost_usd
from fastlaunch.core.errors import UserError
from fastlaunch.core.ownership import MARGIN_MINUTES, MIN_MINUTES

#: Shown with every ceiling.
NOT_COUNTED = "Not counted: NAT gateways and data transfer."


@dataclass(frozen=True, kw_only=True)
class CostCeiling:
    """The most that a job can cost, on whichever of `instances` it runs: what it costs at the `dearest` site.

    In a capacity block it is what the job uses of the fee that was paid before, and its volumes.
    """

    usd: float
    #: The part for volumes; 0 without any, or if their price is not known.
    volumes_usd: float
    num_nodes: int
    max_minutes: int
    dearest: Site
    instances: tuple[str, ...]
    #: Where the price of volumes is not known.
    uncounted_regions: tuple[str, ...] = ()

    def __str__(self) -> str:
        """`at most $119.35 of instance time and volumes: (2 h + 10 min) x ($55.04 + $0.046)/h, p5...`."""
        block = self.dearest.block
        text = self._of_instances() if block is None else self._of_block(block)
        if self.uncounted_regions:
            regions = " and ".join(self.uncounted_regions)
            text += f"; volumes in {regions} are not counted: their price is not known"
        return text

    def is_above(self, budget_usd: float | None) -> bool:
        """Return whether there is a budget, and it is less than this in whole cents, as shown and billed."""
        return budget_usd is not None and round(self.usd, 2) > budget_usd

    def _of_instances(self) -> str:
        which = (
            f"the dearest of {', '.join(self.instances)}" if len(self.instances) > 1 else self.instances[0]
        )
        limited = self.dearest.max_price_usd == self.dearest.usd_per_hour
        price = self.dearest.price
        assert price is not None
        inferred = "inferred " if price.inferred else ""
        what = "your limit for spot" if limited else f"{inferred}price as of {price.as_of}"
        if self.dearest.training_plan:
            what = f"on-demand {what}, though the training plan was paid for before"
        time = "SageMaker instance time" if self.dearest.backend == "sagemaker" else "instance time"
        rate = f"${self.dearest.usd_per_hour:g}"
        if self.volumes_usd:
            time += " and volumes"
            rate = f"({rate} + ${self.dearest.volume_usd_per_hour:.2g})"
        return f"at most ${self.usd:,.2f} of {time}: {self._time()} x {rate}/h, {which}; {what}"

    def _time(self) -> str:
        nodes = f"{self.num_nodes} x " if self.num_nodes > 1 else ""
        starts = self.dearest.num_starts
        nodes = f"{starts} starts x {nodes}" if starts > 1 else nodes
        return f"{nodes}({hours_text(self.max_minutes)} + {MARGIN_MINUTES} min)"

    def _of_block(self, block: CapacityBlock) -> str:
        used_usd = self.usd - self.volumes_usd
        volumes = f"; volumes on top, at most ${self.volumes_usd:,.2f}" if self.volumes_usd else ""
        if is_known(block):
            return (
                f"effectively at most ${used_usd:,.2f}: {self._time()} x ${self.dearest.usd_per_hour:g}/h, "
                f"{self.instances[0]}, of the capacity block's fee of ${block.fee_usd:,.2f}, which is spent "
                f"already ({block.num_instances} for {block.hours:g} h){volumes}"
            )
        return (
            f"no instance time on top of the capacity block's fee, which is spent already; which part of it "
            f"the job uses, at most ${used_usd:,.2f}, is told when it is submitted{volumes}"
        )


def is_known(block: CapacityBlock) -> bool:
    """Return whether we know from AWS when the block ends."""
    return not block.ends_at.startswith("<")


def cost_ceiling(sites: Sequence[Site], *, num_nodes: int, max_minutes: int) -> CostCeiling:
    """Return the ceiling of a job that may run at any of the sites: that of the dearest."""
    dearest = max(sites, key=lambda site: site.max_usd_per_hour)
    block = dearest.block

    def at_most(volume_usd_per_hour: float | None) -> float:
        return dearest.num_starts * max_cost_usd(
            num_nodes=num_nodes,
            max_minutes=max_minutes,
            usd_per_hour=dearest.usd_per_hour,
            volume_usd_per_hour=volume_usd_per_hour,
            fee_usd=block.fee_usd if block else None,
        )

    usd = at_most(dearest.volume_usd_per_hour)
    uncounted = (site.region for site in sites if site.volume_usd_per_hour is None)
    return CostCeiling(
        usd=usd,
        volumes_usd=usd - at_most(None),
        num_nodes=num_nodes,
        max_minutes=max_minutes,
        dearest=dearest,
        instances=tuple(dict.fromkeys(site.type_name for site in sites)),
        uncounted_regions=tuple(dict.fromkeys(uncounted)),
    )


#: How a message names the budget.
BUDGET = "the budget (--max-cost, else `max_cost` in the config file)"


def check_budget(ceiling: CostCeiling, budget_usd: float | None) -> None:
    """Raise UserError if there is a budget and the ceiling is above it."""
    if budget_usd is None or not ceiling.is_above(budget_usd):
        return
    num_machines = ceiling.num_nodes * ceiling.dearest.num_starts
    affordable = int(budget_usd / ceiling.dearest.max_usd_per_hour * 60 / num_machines)
    minutes = affordable - MARGIN_MINUTES
    fits = f", or --max-hours {minutes}min" if minutes >= MIN_MINUTES else ""
    raise UserError(
        f"this may cost {str(ceiling).removeprefix('at most ')}, above {BUDGET} of ${budget_usd:,.2f}",
        f"give --max-cost {math.ceil(ceiling.usd)}{fits}",
    )


def hours_text(minutes: int) -> str:
    """Return `2 h`, `1 h 38 min`."""
    hours, rest = divmod(minutes, 60)
    return " ".join([*([f"{hours} h"] if hours else []), *([f"{rest} min"] if rest else [])])

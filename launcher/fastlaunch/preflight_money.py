"""Checks of what a job costs, which need no AWS: prices and their age, checkpoints, the budget."""

import datetime
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.core.errors import UserError
from fastlaunch.placement.capacity_block import unknown_block
from fastlaunch.placement.check import Check, Result, Told, made
from fastlaunch.placement.cost_ceiling import check_budget, cost_ceiling, dearest_rate
from fastlaunch.preflight_wanted import Looking

if TYPE_CHECKING:
    from fastlaunch.backends.protocol import Place

#: A list price older than this is worth a look: AWS changed those of its GPUs about once a year.
OLD_PRICE_DAYS = 180


def money_checks(look: Looking, sites: "Sequence[Place]") -> Iterator[Check]:
    """Those of all regions and instance types. sites: where the job may run, none if that is not known."""
    wanted = look.wanted
    yield made("price file", partial(_price_file, look))
    for region in wanted.regions:
        for instance in wanted.instances:
            call = partial(_price, look, instance, region)
            yield made("price", call, region=region, instance=wanted.name_of(instance))
    if wanted.purchase == "spot" and wanted.checkpoint_every is not None:
        yield made("checkpoints", partial(_checkpoints, look))
    if sites and wanted.max_minutes is not None:
        yield made("cost", partial(_cost, look, sites))


def _price_file(look: Looking) -> str | Told:
    service = look.wanted.backend
    newest = max(price.as_of for price in look.catalogue.prices if price.service == service)
    return _dated(look, f"the newest price is of {newest}", newest)


def _price(look: Looking, instance: InstanceType, region: str) -> str | Told:
    wanted = look.wanted
    if wanted.reservation is not None:
        return _block_price(look, instance, region, wanted.reservation)
    rate = dearest_rate(
        instance,
        region,
        purchase=wanted.purchase,
        max_price_usd=wanted.max_price_usd,
        catalogue=look.catalogue,
        today=look.today,
        service=wanted.backend,
    )
    told = f"at most ${rate.usd_per_hour:g}/h, as of {rate.as_of}"
    return _dated(look, told, datetime.date.fromisoformat(rate.as_of))


def _block_price(look: Looking, instance: InstanceType, region: str, reservation: str) -> str:
    """That what the block cost is known. Raises UserError if it is not."""
    fee = look.wanted.block_fee_usd
    block = unknown_block(
        reservation,
        instance=instance,
        region=region,
        num_nodes=look.wanted.num_nodes,
        fee_usd=fee,
        catalogue=look.catalogue,
        today=look.today,
    )
    return f"${fee:,.2f} paid up front" if fee is not None else f"${block.usd_per_hour:g}/h paid up front"


def _dated(look: Looking, told: str, as_of: datetime.date) -> str | Told:
    age_days = (look.today - as_of).days
    if age_days <= OLD_PRICE_DAYS:
        return told
    where = "sagemaker/ai" if look.wanted.backend == "sagemaker" else "ec2"
    return Told(
        Result.WARNING,
        f"{told}, {age_days} days ago",
        f"look at aws.amazon.com/{where}/pricing, and put what changed into a price file of your own "
        "(`prices: FILE` in the config file)",
    )


def _checkpoints(look: Looking) -> str:
    if not look.wanted.checkpoint_every:
        raise UserError(
            "spot without checkpoints: an interruption would lose everything",
            "add --checkpoint-every 50, or another number of steps",
        )
    return f"every {look.wanted.checkpoint_every} steps"


def _cost(look: Looking, sites: "Sequence[Place]") -> str:
    wanted = look.wanted
    assert wanted.max_minutes is not None
    ceiling = cost_ceiling(sites, num_nodes=wanted.num_nodes, max_minutes=wanted.max_minutes)
    check_budget(ceiling, wanted.max_cost_usd)
    return str(ceiling)

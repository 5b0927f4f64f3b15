"""Compute the most that an hour of an instance, or a job, can cost."""

import datetime

from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.catalog.prices import Catalogue, Price
from fastlaunch.core.errors import UserError
from fastlaunch.core.ownership import MARGIN_MINUTES


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

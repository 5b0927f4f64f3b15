"""A capacity block that was bought before: what it costs a job, and whether the job fits into it. Pure."""

import datetime
from datetime import timedelta

from fastlaunch.aws.ec2 import Reservation
from fastlaunch.backends.site import CapacityBlock
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.catalog.prices import Catalogue, Price
from fastlaunch.core.errors import BadConfiguration, NoCapacity, UserError
from fastlaunch.core.ownership import MIN_MINUTES
from fastlaunch.core.units import utc_minute
from fastlaunch.jobs.options import Options

#: Blocks are sold from a day on. docs.aws.amazon.com/AWSEC2, "Capacity Blocks for ML", read 2026-11.
MIN_BLOCK_HOURS = 24
#: EC2 begins to terminate a block's instances so long before its end; training is stopped a while earlier.
TERMINATION_MINUTES = 30
STOP_MINUTES = 45
#: States of a block that was bought and has not begun. docs.aws.amazon.com/AWSEC2, CapacityReservation.
_TO_COME = ("scheduled", "payment-pending", "pending", "assessing", "delayed")
_SOON = timedelta(minutes=2)
#: When a block ends, before AWS has said so.
UNKNOWN_END = "<block-end>"


def check_reservation(
    reservation: Reservation | None,
    *,
    options: Options,
    instance: InstanceType,
    region: str,
    now: datetime.datetime,
) -> Reservation:
    """Return the reservation if the job's nodes can run in it, now or once it begins.

    Raises an error for each fault.
    """
    if reservation is None:
        raise BadConfiguration(
            f"there is no reservation {options.reservation} in {region}",
            f"`aws ec2 describe-capacity-blocks --region {region}` lists the blocks of your account",
        )
    if reservation.kind != "capacity-block":
        raise BadConfiguration(
            f"{reservation.id} is no capacity block but a reservation by the hour",
            "name a capacity block, or give --purchase on-demand, which uses open reservations by itself",
        )
    if reservation.instance_type != instance.name:
        raise BadConfiguration(
            f"{reservation.id} is of {reservation.instance_type}, not of {instance.name}",
            f"give --instance {reservation.instance_type}",
        )
    to_come = starts_at(reservation, now)
    if (reservation.state != "active" and to_come is None) or reservation.ends_at is None:
        raise BadConfiguration(
            f"{reservation.id} is {reservation.state}",
            "name one that is active or scheduled, or give --purchase on-demand or spot",
        )
    left = minutes_left(reservation, now)
    if left < STOP_MINUTES + MIN_MINUTES:
        raise NoCapacity(
            f"{reservation.id} ends at {utc_minute(reservation.ends_at)}, in {max(left, 0)} min: EC2 ends "
            f"its instances {TERMINATION_MINUTES} min before, and training has to stop {STOP_MINUTES} min "
            "before",
            "take another block, or --purchase on-demand or spot",
        )
    # Nothing runs in it before it begins.
    if (num_free := reservation.num_instances if to_come else reservation.num_free) < options.num_nodes:
        fewer = f"give --num-nodes {num_free}" if num_free else "wait until it has ended"
        raise NoCapacity(
            f"{reservation.id} has {num_free} of {reservation.num_instances} instances free, and the job "
            f"needs {options.num_nodes}",
            f"end what runs in it (`fastlaunch status`), or {fewer}",
        )
    return reservation


def starts_at(reservation: Reservation, now: datetime.datetime) -> datetime.datetime | None:
    """Return when a block that is to come begins; None for any other.

    One whose time has come is active within minutes.
    """
    if reservation.state not in _TO_COME or reservation.starts_at is None:
        return None
    return max(reservation.starts_at, now + _SOON)


def is_over(reservation: Reservation | None) -> bool:
    """Return whether nothing starts in it any more, such as for want of payment."""
    return reservation is None or reservation.state not in (*_TO_COME, "active")


def minutes_left(reservation: Reservation, now: datetime.datetime) -> int:
    """Return whole minutes until the block's end, from now on or from its start."""
    assert reservation.ends_at is not None
    return int((reservation.ends_at - (starts_at(reservation, now) or now)) / timedelta(minutes=1))


def block_usd_per_hour(
    instance: InstanceType, region: str, catalogue: Catalogue, today: datetime.date
) -> float:
    """Return the price file's price of an hour of an instance. Raises UserError if it has none."""
    price = catalogue.find_price(instance.name, region=region, purchase="capacity-block", on=today)
    if price is None or price.secondary:
        raise UserError(
            f"what the capacity block of {instance.name} cost is not known",
            "give --block-fee USD, all that AWS charged for it up front: the offering's UpfrontFee when it "
            "was bought, and in the bill (console: Billing, Bills); or a price of an instance and hour in a "
            "price file of your own, with `purchase: capacity-block` (`prices: FILE` in the config file)",
        )
    return price.usd_per_hour


def block_price(block: CapacityBlock, instance: InstanceType, region: str, today: datetime.date) -> Price:
    """Return what an hour of one of its instances comes to, by the fee that was paid for the block."""
    return Price(
        instance=instance.name,
        service="ec2",
        region=region,
        purchase="capacity-block",
        usd_per_hour=block.usd_per_hour,
        as_of=today,
        source=(
            f"effective: ${block.fee_usd:,.2f} paid before for {block.num_instances} x {block.hours:g} h "
            f"of {block.reservation}"
        ),
    )

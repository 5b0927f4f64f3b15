"""A capacity block that was bought before: what it costs a job, and whether the job fits into it. Pure."""

import datetime
from datetime import timedelta

from fastlaunch.aws.reservations import Reservation
from fastlaunch.backends.placements import CapacityBlock
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.errors import BadConfiguration, NoCapacity, UserError
from fastlaunch.placement.cost_ceiling import MIN_MINUTES

#: Blocks are sold from a day on. docs.aws.amazon.com/AWSEC2, "Capacity Blocks for ML", read 2026-11.
MIN_BLOCK_HOURS = 24
#: EC2 begins to terminate a block's instances so long before its end; training is stopped a while earlier.
TERMINATION_MINUTES = 30
STOP_MINUTES = 45
#: Ends of a block that is not known yet.
UNKNOWN_END = "<block-end>"


def check_reservation(
    found: Reservation | None,
    *,
    wanted: str,
    instance: InstanceType,
    region: str,
    num_nodes: int,
    now: datetime.datetime,
) -> Reservation:
    """The reservation, if so many nodes can run in it from now on; else an error for each fault."""
    if found is None:
        raise BadConfiguration(
            f"there is no reservation {wanted} in {region}",
            f"`aws ec2 describe-capacity-blocks --region {region}` lists those of who is logged in",
        )
    if found.kind != "capacity-block":
        raise BadConfiguration(
            f"{found.id} is no capacity block but a reservation by the hour",
            "name a capacity block, or give --purchase on-demand, which uses open reservations by itself",
        )
    if found.instance_type != instance.name:
        raise BadConfiguration(
            f"{found.id} is of {found.instance_type}, not of {instance.name}",
            f"give --instance {found.instance_type}",
        )
    if found.state != "active" or found.ends_at is None:
        raise _not_active(found)
    left = minutes_left(found, now)
    if left < STOP_MINUTES + MIN_MINUTES:
        raise NoCapacity(
            f"{found.id} ends at {_told(found.ends_at)}, in {max(left, 0)} min: EC2 ends its instances "
            f"{TERMINATION_MINUTES} min before, and training has to stop {STOP_MINUTES} min before",
            "take another block, or --purchase on-demand or spot",
        )
    if found.num_free < num_nodes:
        raise NoCapacity(
            f"{found.id} has {found.num_free} of {found.num_instances} instances free, and {num_nodes} are "
            "wanted",
            f"end what runs in it (`fastlaunch status`), or give --num-nodes {found.num_free}"
            if found.num_free
            else "end what runs in it (`fastlaunch status`), or wait until it has ended",
        )
    return found


def minutes_left(found: Reservation, now: datetime.datetime) -> int:
    """Whole minutes until the block's end."""
    assert found.ends_at is not None
    return int((found.ends_at - now) / timedelta(minutes=1))


def max_minutes_in(found: Reservation, now: datetime.datetime) -> int:
    """For how long machines may be asked for, before EC2 would end them by itself."""
    return minutes_left(found, now) - TERMINATION_MINUTES


def known_block(
    found: Reservation,
    *,
    instance: InstanceType,
    region: str,
    fee_usd: float | None,
    catalogue: Catalogue,
    today: datetime.date,
) -> CapacityBlock:
    """The block with its cost. fee_usd: of all of it; None to make it of the price file's price per hour."""
    assert found.starts_at is not None and found.ends_at is not None
    hours = (found.ends_at - found.starts_at) / timedelta(hours=1)
    if fee_usd is None:
        fee_usd = _usd_per_hour(instance, region, catalogue, today) * hours * found.num_instances
    return CapacityBlock(
        reservation=found.id,
        ends_at=found.ends_at.astimezone(datetime.UTC).isoformat(timespec="seconds"),
        fee_usd=fee_usd,
        hours=hours,
        num_instances=found.num_instances,
    )


def unknown_block(
    reservation: str,
    *,
    instance: InstanceType,
    region: str,
    num_nodes: int,
    fee_usd: float | None,
    catalogue: Catalogue,
    today: datetime.date,
) -> CapacityBlock:
    """The block as far as it is known without AWS: of the shortest time, and so the dearest for each hour.

    Raises UserError where neither its fee nor its price is known.
    """
    if fee_usd is None:
        fee_usd = _usd_per_hour(instance, region, catalogue, today) * MIN_BLOCK_HOURS * num_nodes
    return CapacityBlock(
        reservation=reservation,
        ends_at=UNKNOWN_END,
        fee_usd=fee_usd,
        hours=MIN_BLOCK_HOURS,
        num_instances=num_nodes,
    )


def _usd_per_hour(instance: InstanceType, region: str, catalogue: Catalogue, today: datetime.date) -> float:
    try:
        price = catalogue.price(instance.name, region=region, purchase="capacity-block", on=today)
    except UserError:
        raise UserError(
            f"what the capacity block of {instance.name} cost is not known",
            "give --block-fee USD, all that AWS charged for it up front: the offering's UpfrontFee when it "
            "was bought, and in the bill (console: Billing, Bills); or a price of an instance and hour in a "
            "price file of your own, with `purchase: capacity-block` (`prices: FILE` in the config file)",
        ) from None
    return price.usd_per_hour


def _not_active(found: Reservation) -> UserError:
    if found.state in ("scheduled", "payment-pending", "pending") and found.starts_at is not None:
        return NoCapacity(
            f"{found.id} is {found.state}: it starts at {_told(found.starts_at)}",
            "type the same again then, or take --purchase on-demand or spot",
        )
    return BadConfiguration(
        f"{found.id} is {found.state}", "name one that is active, or give --purchase on-demand or spot"
    )


def _told(when: datetime.datetime) -> str:
    return f"{when.astimezone(datetime.UTC):%Y-%m-%d %H:%M} UTC"

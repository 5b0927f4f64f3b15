"""Capacity reservations and blocks, as EC2 tells them. Nothing here buys one."""

import datetime
from dataclasses import dataclass

from fastlaunch.aws.ec2 import Aws
from fastlaunch.core.errors import BadConfiguration


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """A capacity reservation as EC2 tells it. kind: `capacity-block`, or `default` for one paid by the hour.

    state: active, scheduled, payment-pending, expired, ... num_free: of its num_instances. Times have zones.
    """

    id: str
    kind: str
    instance_type: str
    zone: str
    state: str
    num_instances: int
    num_free: int
    starts_at: datetime.datetime | None
    ends_at: datetime.datetime | None


def reservation(aws: Aws, region: str, id: str) -> Reservation | None:
    """The reservation of this id, None if there is none in the region (ec2:DescribeCapacityReservations)."""
    try:
        told = aws.ask("ec2", region, "DescribeCapacityReservations", subject=id, CapacityReservationIds=[id])
    except BadConfiguration as error:
        if error.code in ("InvalidCapacityReservationId.NotFound", "InvalidCapacityReservationId.Malformed"):
            return None
        raise
    for each in told["CapacityReservations"]:
        return Reservation(
            id=each["CapacityReservationId"],
            kind=each.get("ReservationType", "default"),
            instance_type=each["InstanceType"],
            zone=each["AvailabilityZone"],
            state=each["State"],
            num_instances=each["TotalInstanceCount"],
            num_free=each["AvailableInstanceCount"],
            starts_at=each.get("StartDate"),
            ends_at=each.get("EndDate"),
        )
    return None

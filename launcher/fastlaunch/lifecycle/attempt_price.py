"""The hourly price of an attempt's machine: the list price before it starts, the billed price afterwards.

EC2 has a separate spot price. SageMaker bills spot as fewer seconds at the on-demand price, so before the
start its price is always the on-demand one.
"""

import datetime
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from fastlaunch.aws.client import Aws
from fastlaunch.backends.protocol import AttemptStatus, CloudBackend
from fastlaunch.catalog.prices import Price
from fastlaunch.core.errors import CloudRefused
from fastlaunch.core.units import utc_day
from fastlaunch.ledger.ledger import Ledger
from fastlaunch.ledger.rows import Attempt


def managed_spot_price(listed: Price, aws_status: AttemptStatus) -> Price | None:
    """Return the hourly price of managed spot: the list price times billed over trained seconds.

    listed: the on-demand price, at which SageMaker bills seconds. None if SageMaker does not report the
    seconds, or gave no discount.
    """
    if not aws_status.is_spot or not aws_status.billable_s or not aws_status.training_s:
        return None
    if (listed.service, listed.purchase) != ("sagemaker", "on-demand"):
        return None
    if aws_status.billable_s >= aws_status.training_s:
        return None
    share = aws_status.billable_s / aws_status.training_s
    return replace(
        listed,
        purchase="spot",
        usd_per_hour=listed.usd_per_hour * share,
        source=f"{share:.1%} of {listed.usd_per_hour:g} ({listed.source}), by sagemaker:DescribeTrainingJob",
    )


def note_machines(
    ledger: Ledger, backend: CloudBackend, seen: Sequence[tuple[Attempt, AttemptStatus]]
) -> None:
    """Store zone, start and price of machines when they are first seen started.

    Also store what runs on SageMaker wait for, while they wait.

    seen: attempts in the ledger, with their status at AWS. AWS is asked for a spot price once per type and
    zone.
    """
    for attempt, aws_status in seen:
        if attempt.backend == "sagemaker":
            _explain_wait(ledger, attempt, aws_status)
    new = [(attempt, status) for attempt, status in seen if not attempt.launched_at and status.launched_at]
    if not new:
        return
    today = utc_day(backend.now())
    offers = {offer for attempt, status in new if (offer := _spot_offer(attempt, status))}
    prices = {offer: _spot_price(backend.aws, *offer, today=today) for offer in offers}
    with ledger.transaction():
        for attempt, status in new:
            assert status.launched_at is not None
            offer = _spot_offer(attempt, status)
            price = prices[offer] if offer else None
            if price is not None:
                for run_id in ledger.existing(attempt.run_ids):
                    ledger.set_price(run_id, price)
            ledger.set_machine(
                attempt.id,
                zone=status.zone,
                launched_at=status.launched_at,
                usd_per_hour=price.usd_per_hour if price else None,
            )


def _explain_wait(ledger: Ledger, attempt: Attempt, aws_status: AttemptStatus) -> None:
    """Note what the attempt's runs wait for, such as `waiting for capacity`, while they wait."""
    if not aws_status.is_live:
        return
    reason = None if aws_status.is_up else aws_status.detail
    changed = [run_id for run_id in ledger.existing(attempt.run_ids) if ledger.get(run_id).reason != reason]
    if changed:
        with ledger.transaction():
            for run_id in changed:
                ledger.explain(run_id, reason)


def _spot_offer(attempt: Attempt, aws_status: AttemptStatus) -> tuple[str, str, str | None] | None:
    """Return region, type and zone of a spot machine of EC2; None for any other machine."""
    if attempt.backend != "ec2" or not aws_status.is_spot or attempt.region is None:
        return None
    return (attempt.region, aws_status.instance_type, aws_status.zone) if aws_status.instance_type else None


def _spot_price(
    aws: Aws, region: str, instance: str, zone: str | None, *, today: datetime.date
) -> Price | None:
    """Return the newest EC2 spot price of the type in the zone; None if AWS reports none."""
    quote = None
    with suppress(CloudRefused):
        quote = aws.spot_price_usd(region, instance, zone)
    if quote is None:
        return None
    usd_per_hour, origin = quote
    return Price(
        instance=instance,
        service="ec2",
        region=region,
        purchase="spot",
        usd_per_hour=usd_per_hour,
        as_of=today,
        source=f"ec2:DescribeSpotPriceHistory, {origin}",
    )

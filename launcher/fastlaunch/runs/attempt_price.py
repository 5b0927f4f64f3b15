"""What an hour of an attempt's machine costs: the list price before it starts, what it turns out to be after.

On EC2 spot has a price of its own. SageMaker bills spot by fewer seconds at the on-demand price, so that its
price is the on-demand one whatever is bought.
"""

import datetime
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from fastlaunch.aws.ec2 import Aws
from fastlaunch.backends.placements import Site
from fastlaunch.backends.protocol import Place, Sight
from fastlaunch.catalog.prices import Price, load_catalogue
from fastlaunch.core.errors import CloudRefused, UserError
from fastlaunch.core.settings import Settings

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Ledger
    from fastlaunch.run_attempts import Attempt

#: Brings a run to the instance type that its job got, where that is not the one it was placed on: called with
#: run id and type (without `ml.`), stores both spec and price, returns what an hour costs, None if unknown.
Respec = Callable[[str, str], float | None]


def list_price(site: Place, purchase: str, *, settings: Settings, today: datetime.date) -> Price | None:
    """The price of one of the site's machines, by its service's catalogue; of a block, the effective one.

    None where the catalogue has none, and for spot on EC2, which is asked for when the machine is there.
    """
    if isinstance(site, Site) and site.block is not None:
        block = site.block
        return Price(
            instance=site.instance.name,
            service="ec2",
            region=site.region,
            purchase="capacity-block",
            usd_per_hour=block.usd_per_hour,
            as_of=today,
            source=(
                f"effective: ${block.fee_usd:,.2f} paid before for {block.num_instances} x {block.hours:g} h "
                f"of {block.reservation}"
            ),
        )
    if site.backend == "sagemaker":
        return training_price(site.instance.name, site.region, settings=settings, today=today)
    if purchase == "spot":
        return None
    with suppress(UserError):
        return load_catalogue(settings.prices).price(
            site.instance.name, region=site.region, purchase=purchase, on=today
        )
    return None


def training_price(instance: str, region: str, *, settings: Settings, today: datetime.date) -> Price | None:
    """SageMaker's on-demand price of a training machine; None where the catalogue has none."""
    with suppress(UserError):
        return load_catalogue(settings.prices).price(
            instance, service="sagemaker", region=region, purchase="on-demand", on=today
        )
    return None


def paid_usd_per_hour(price: Price | None, discount: float) -> float | None:
    """What an hour is billed: a discount is one on list prices, and spot and a block's fee are none."""
    if price is None:
        return None
    return price.usd_per_hour * (1 - discount if price.purchase == "on-demand" else 1)


def spot_price(
    aws: Aws, *, region: str, instance: str, zone: str | None, today: datetime.date
) -> Price | None:
    """The newest spot price of a machine's zone on EC2; None where AWS does not tell it."""
    found = None
    with suppress(CloudRefused):
        found = aws.spot_price_usd(region, instance, zone)
    if found is None:
        return None
    usd_per_hour, where = found
    return Price(
        instance=instance,
        service="ec2",
        region=region,
        purchase="spot",
        usd_per_hour=usd_per_hour,
        as_of=today,
        source=f"ec2:DescribeSpotPriceHistory, {where}",
    )


def managed_spot_price(listed: Price, sight: Sight) -> Price | None:
    """What an hour of managed spot came to, by the seconds that SageMaker billed for those that it trained.

    listed: the on-demand price, at which they are billed. None where SageMaker does not tell, or gave nothing
    off.
    """
    if not sight.is_spot or not sight.billable_s or not sight.training_s:
        return None
    if (listed.service, listed.purchase) != ("sagemaker", "on-demand"):
        return None
    if sight.billable_s >= sight.training_s:
        return None
    share = sight.billable_s / sight.training_s
    return replace(
        listed,
        purchase="spot",
        usd_per_hour=listed.usd_per_hour * share,
        source=f"{share:.1%} of {listed.usd_per_hour:g} ({listed.source}), by sagemaker:DescribeTrainingJob",
    )


def respec_in(ledger: "Ledger", settings: Settings, today: datetime.date) -> Respec:
    """The `Respec` that stores in `ledger`, with prices of the catalogue as of `today`."""

    def respec(run_id: str, instance: str) -> float | None:
        run = ledger.get(run_id)
        spec = {**(run.spec or {}), "instance": instance}
        price = training_price(instance, spec["region"], settings=settings, today=today)
        ledger.place(run_id, spec=spec, instance=instance, price=price)
        return paid_usd_per_hour(price, settings.discount)

    return respec


def note_machines(
    ledger: "Ledger",
    aws: Aws,
    seen: "Sequence[tuple[Attempt, Sight]]",
    today: datetime.date,
    respec: Respec,
) -> None:
    """Store zone, start, type and price of machines that are seen started for the first time.

    And, for as long as it lasts, what runs on SageMaker wait for.

    seen: attempts as they stand in the ledger, with what AWS shows. AWS is asked once for machines of one
    type and zone. respec: see `Respec`; `respec_in` makes one.
    """
    for attempt, sight in seen:
        if attempt.backend == "sagemaker":
            _explain_wait(ledger, attempt, sight)
    new = [(one, sight) for one, sight in seen if one.launched_at is None and sight.launched_at]
    if not new:
        return
    offers = {offer for attempt, sight in new if (offer := _spot_offer(attempt, sight))}
    prices = {
        offer: spot_price(aws, region=offer[0], instance=offer[1], zone=offer[2], today=today)
        for offer in offers
    }
    with ledger.transaction():
        for attempt, sight in new:
            assert sight.launched_at is not None
            offer = _spot_offer(attempt, sight)
            price = prices[offer] if offer else None
            run_ids = ledger.existing(attempt.run_ids)
            usd_per_hour = price.usd_per_hour if price else None
            for run_id in run_ids if price else ():
                assert price is not None
                ledger.set_price(run_id, price)
            other = sight.instance_type if sight.instance_type != attempt.instance else None
            if other is not None:
                # The runs are on the same machines, at one price.
                for run_id in sorted(run_ids):
                    usd_per_hour = respec(run_id, other)
            ledger.set_machine(
                attempt.id,
                zone=sight.zone,
                launched_at=sight.launched_at,
                usd_per_hour=usd_per_hour,
                instance=other,
            )


def _explain_wait(ledger: "Ledger", attempt: "Attempt", sight: Sight) -> None:
    """Note what the attempt's runs wait for as long as they do, such as `waiting for capacity`."""
    if not sight.is_live:
        return
    told = None if sight.is_up else sight.told
    changed = [one for one in ledger.existing(attempt.run_ids) if ledger.get(one).reason != told]
    if changed:
        with ledger.transaction():
            for run_id in changed:
                ledger.explain(run_id, told)


def _spot_offer(attempt: "Attempt", sight: Sight) -> tuple[str, str, str | None] | None:
    """Region, type and zone of a spot machine of EC2, whose price is asked for; None for any other."""
    if attempt.backend != "ec2" or not sight.is_spot or attempt.region is None:
        return None
    return (attempt.region, sight.instance_type, sight.zone) if sight.instance_type else None

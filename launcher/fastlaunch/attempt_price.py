"""What an hour of an attempt's machine costs: the list price before it starts, spot's when it has."""

import datetime
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from fastlaunch.aws import Aws, Instance
from fastlaunch.backends.ec2_site import Site
from fastlaunch.errors import CloudRefused, UserError
from fastlaunch.prices import Price, load_catalogue
from fastlaunch.settings import Settings

if TYPE_CHECKING:
    from fastlaunch.run_attempts import Attempt
    from fastlaunch.runs import Ledger


def list_price(site: Site, purchase: str, *, settings: Settings, today: datetime.date) -> Price | None:
    """The catalogue's price of the site's machine; None where it has none, and for spot."""
    if purchase == "spot":
        return None
    with suppress(UserError):
        return load_catalogue(settings.prices).price(
            site.instance.name, region=site.region, purchase=purchase, on=today
        )
    return None


def spot_price(aws: Aws, instance: Instance, today: datetime.date) -> Price | None:
    """The newest spot price of the machine's zone; None where AWS does not tell it."""
    found = None
    with suppress(CloudRefused):
        found = aws.spot_price_usd(instance.region, instance.instance_type, instance.zone)
    if found is None:
        return None
    usd_per_hour, zone = found
    return Price(
        instance=instance.instance_type,
        service="ec2",
        region=instance.region,
        purchase="spot",
        usd_per_hour=usd_per_hour,
        as_of=today,
        source=f"ec2:DescribeSpotPriceHistory, {zone}",
    )


def note_machines(
    ledger: "Ledger", aws: Aws, seen: "Sequence[tuple[Attempt, Instance | None]]", today: datetime.date
) -> None:
    """Store zone, start and, for spot, the price of machines that are seen for the first time.

    seen: attempts as they stand in the ledger, with what EC2 shows. A discount is one on list prices; spot
    has none. AWS is asked once for machines of one type and zone.
    """
    new = [(attempt, one) for attempt, one in seen if one is not None and attempt.launched_at is None]
    if not new:
        return
    offers = {(one.region, one.instance_type, one.zone): one for _, one in new if one.is_spot}
    prices = {offer: spot_price(aws, one, today) for offer, one in offers.items()}
    with ledger.transaction():
        for attempt, one in new:
            price = prices.get((one.region, one.instance_type, one.zone)) if one.is_spot else None
            ledger.set_machine(
                attempt.id,
                zone=one.zone,
                launched_at=one.launch_time,
                usd_per_hour=price.usd_per_hour if price else None,
            )
            for run_id in ledger.existing(attempt.run_ids) if price else ():
                assert price is not None
                ledger.set_price(run_id, price)

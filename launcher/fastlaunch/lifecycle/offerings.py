"""What AWS sells to a job that names no capacity block: the command, its price, and what would stay unused.

fastlaunch buys nothing: a block or a plan is paid as a whole, and cannot be given back.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from fastlaunch.analysis.cost import BLOCK_END_HOURS, block_days
from fastlaunch.aws.types import BlockOffering
from fastlaunch.catalog.hardware import TRAINING_PLAN
from fastlaunch.catalog.updates import buying_command
from fastlaunch.core.errors import UserError
from fastlaunch.core.units import utc_minute
from fastlaunch.jobs.option_rules import backend_of
from fastlaunch.jobs.options import Options

if TYPE_CHECKING:
    from fastlaunch.aws.client import Aws

#: The most offerings to show.
_MOST = 3


def lacks_block(options: Options) -> bool:
    """Return whether a job is to run in a block or a plan, and names none."""
    return options.purchase == "capacity-block" and not (options.reservation or options.training_plan)


def _is_on_sagemaker(options: Options) -> bool:
    return backend_of(options.instances, options.service) == "sagemaker"


def as_if_in_block(options: Options) -> Options:
    """Return options by which the job can be planned before there is a block."""
    if _is_on_sagemaker(options):
        # A plan's machines are as fast as others.
        return replace(options, purchase="on-demand")
    return replace(options, reservation="cr-00000000", block_fee_usd=1.0)


def no_block(options: Options, aws: "Aws", *, hours: float | None) -> UserError:
    """Return the error that no block is named, with what AWS offers for the job now.

    options: settled. hours: what the job will probably take, if that is known. Raises UserError's kinds where
    no block is long enough, and where AWS does not tell.
    """
    on_sagemaker = _is_on_sagemaker(options)
    purchase = TRAINING_PLAN if on_sagemaker else "capacity-block"
    (name, *others) = options.instances
    if others:
        return UserError(f"a {purchase.replace('-', ' ')} has one instance type", "name one")
    region = options.regions[0]
    paid_hours = block_days((hours or options.max_minutes / 60) + BLOCK_END_HOURS) * 24
    ask = aws.plan_offerings if on_sagemaker else aws.block_offerings
    offers = ask(region, name, paid_hours, options.num_nodes)
    lines = [
        f"`aws sagemaker list-training-plans --region {region}` lists yours: add --training-plan ARN"
        if on_sagemaker
        else f"`aws ec2 describe-capacity-blocks --region {region}` lists yours: add --reservation cr-..."
    ]
    what = f"{options.num_nodes} x {name} for {paid_hours} h"
    if not offers:
        lines.append(f"AWS offers no other now in {region}, of {what}")
    else:
        lines.append(f"AWS sells, and fastlaunch does not buy, {what}:")
    for offer in sorted(offers, key=lambda offer: (offer.fee_usd, offer.starts_at))[:_MOST]:
        lines += _lines(offer, purchase, region, name, hours, options.max_minutes)
    return UserError(f"no {purchase.replace('-', ' ')} is named", "\n  ".join(lines))


def _lines(
    offer: BlockOffering, purchase: str, region: str, name: str, hours: float | None, max_minutes: int
) -> Iterator[str]:
    left = max(0.0, offer.hours - (max_minutes / 60 if hours is None else hours))
    how = "would probably not" if hours is not None else "with this --max-hours cannot"
    unused = f"this training {how} use {left:.1f} h of it, ${offer.fee_usd * left / offer.hours:,.2f}"
    yield f"${offer.fee_usd:,.2f} in {offer.zone} from {utc_minute(offer.starts_at)}: {unused}"
    instance = name.removeprefix("ml.")
    yield f"  {buying_command(purchase, region=region, offering=offer.id, instance=instance)}"

"""Candidates -> training sites, by asking AWS what a job names: role, container image, bucket.

Nothing is changed and nothing uploaded. A region that cannot be used is left out, by name and with why.
"""

from dataclasses import replace

from fastlaunch.backends.sagemaker_site import TrainingSite
from fastlaunch.candidates import TrainingCandidate, training_candidates
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.core.errors import UserError
from fastlaunch.job_roles import SAGEMAKER, check_role
from fastlaunch.offline_sites import TRAINING_VOLUME_GIB, priced
from fastlaunch.placement.config_checks import check_bucket, configured_bucket, configured_role
from fastlaunch.placement.cost_ceiling import HourlyRate
from fastlaunch.placement.resolve import image_in
from fastlaunch.resolved import Inquiry, Resolved, resolved


def resolve_training(inquiry: Inquiry) -> Resolved:
    """A site on SageMaker for every region of which all is known, with the types whose price is known.

    Raises the first candidate's error if no site is left.
    """
    request = inquiry.request
    sites: list[TrainingSite] = []
    skipped: list[tuple[str, UserError]] = []
    for group in training_candidates(request.instances, request.regions, purchase=request.purchase):
        types, unpriced = priced(group, inquiry.rate)
        skipped += unpriced
        if not types:
            continue
        try:
            sites.append(_site(inquiry, group, types))
        except UserError as error:
            skipped += [(f"ml.{one.name} in {group.region}", error) for one, _ in types]
    return resolved(sites, skipped)


def repriced(inquiry: Inquiry, site: TrainingSite) -> TrainingSite:
    """The site at the price of the dearest type that is left of it."""
    rates = [inquiry.rate(one, site.region) for one in (site.instance, *site.others)]
    dearest = max(rates, key=lambda rate: rate.usd_per_hour)
    return replace(site, usd_per_hour=dearest.usd_per_hour, price_as_of=dearest.as_of)


def _site(
    inquiry: Inquiry, group: TrainingCandidate, types: list[tuple[InstanceType, HourlyRate]]
) -> TrainingSite:
    aws, ask, region = inquiry.aws, inquiry.ask, group.region
    bucket = configured_bucket(inquiry.settings, region)
    arn = configured_role(inquiry.settings, region)
    check_role(aws, ask, region, arn, SAGEMAKER)
    check_bucket(aws, ask, region, bucket)
    dearest = max((rate for _, rate in types), key=lambda rate: rate.usd_per_hour)
    return TrainingSite(
        instance=types[0][0],
        others=tuple(one for one, _ in types[1:]),
        region=region,
        role=arn,
        bucket=bucket,
        prefix=inquiry.here(region).prefix,
        image=image_in(inquiry, region),
        code=inquiry.code(region),
        usd_per_hour=dearest.usd_per_hour,
        price_as_of=dearest.as_of,
        volume_gib=TRAINING_VOLUME_GIB,
        keep_alive_minutes=inquiry.request.keep_alive_minutes,
        training_plan=inquiry.request.training_plan,
    )

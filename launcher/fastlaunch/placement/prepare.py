"""A checked request for AWS -> all that its plans name, looked up; and, once agreed to, its code there.

Looking up changes nothing at AWS but a probe, which shows that the bucket can be written.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastlaunch.aws.cache import AskOnce
from fastlaunch.aws.ec2 import Aws
from fastlaunch.backends.sagemaker_site import TrainingSite
from fastlaunch.catalog.container_images import training_base
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.cloud_request import CloudRequest
from fastlaunch.core.settings import Settings
from fastlaunch.images.code_bundle import Bundle, make_bundle, upload_bundle
from fastlaunch.images.wheels import wheel_folder
from fastlaunch.placement.check import Check
from fastlaunch.placement.checks import checks, usable
from fastlaunch.placement.resolve import fitted, resolve
from fastlaunch.preflight_wanted import Wanted
from fastlaunch.resolve_training import repriced, resolve_training
from fastlaunch.resolved import Inquiry

if TYPE_CHECKING:
    from fastlaunch.backends.protocol import Place
    from fastlaunch.base_image_file import BaseImage
    from fastlaunch.images.wheels import Pin


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """sites: in the order in which they are tried. skipped: the candidates left out, as (name, why).

    request: as it will be carried out; told: what was changed of it, in words. found: what was checked.
    bundle: the code to upload before a machine needs it, None if the image holds it.
    """

    request: CloudRequest
    told: tuple[str, ...]
    sites: "tuple[Place, ...]"
    skipped: tuple[tuple[str, str], ...]
    found: tuple[Check, ...]
    bundle: Bundle | None


def prepare(
    request: CloudRequest,
    *,
    aws: Aws,
    settings: Settings,
    catalogue: Catalogue,
    now: datetime.datetime,
    commit: str | None,
    max_cost_usd: float | None = None,
    detach: bool = False,
    pins: "Sequence[Pin] | None" = None,
) -> Prepared:
    """Where the request can be carried out. pins: wheels of the bundle instead of the shipped ones.

    detach: nobody will follow it.

    Raises UserError and CloudRefused's kinds, also where no candidate is left.
    """
    ask, today = AskOnce(), now.date()
    # First: without credentials nothing else can be told, and fetching wheels takes a while.
    ask(aws.identity)
    base = None if request.image else training_base(request.base_image, today=today)
    bundle = None
    if base is not None:
        bundle = make_bundle(
            base, user_file=request.user_file, commit=commit, wheels=wheel_folder(settings), pins=pins
        )
    inquiry = Inquiry(
        request=request,
        aws=aws,
        settings=settings,
        catalogue=catalogue,
        now=now,
        base=base,
        bundle=bundle,
        ask=ask,
    )
    request, told = fitted(inquiry)
    resolved = (resolve_training if request.backend == "sagemaker" else resolve)(inquiry)
    found = checks(
        wanted_by(request, base=base, max_cost_usd=max_cost_usd, detach=detach),
        aws=aws,
        settings=settings,
        catalogue=catalogue,
        now=now,
        sites=resolved.sites,
        ask=ask,
    )
    left = usable(resolved.sites, found)
    return Prepared(
        request=request,
        told=told,
        sites=tuple(repriced(inquiry, one) if isinstance(one, TrainingSite) else one for one in left.sites),
        skipped=(*resolved.skipped, *left.skipped),
        found=tuple(found),
        bundle=bundle,
    )


def wanted_by(
    request: CloudRequest, *, base: "BaseImage | None", max_cost_usd: float | None, detach: bool
) -> Wanted:
    """What the checks are made for. base: AWS's container image, None for the request's own."""
    return Wanted(
        instances=request.instances,
        regions=request.regions,
        backend=request.backend,
        purchase=request.purchase,
        max_price_usd=request.max_price_usd,
        num_nodes=request.num_nodes,
        checkpoint_every=request.checkpoint_every,
        base=base,
        image=request.image,
        max_minutes=request.max_minutes,
        max_cost_usd=max_cost_usd,
        reservation=request.reservation,
        block_fee_usd=request.block_fee_usd,
        keep_alive_minutes=request.keep_alive_minutes,
        has_plan=request.training_plan is not None,
        is_unfollowed=detach,
    )


def upload_code(prepared: Prepared, aws: Aws) -> None:
    """Store the bundle in the bucket of every region where the job may run; nothing where it is there."""
    if prepared.bundle is None:
        return
    places = dict.fromkeys((site.region, site.bucket, site.prefix) for site in prepared.sites)
    for region, bucket, prefix in places:
        upload_bundle(aws, region, bucket, prefix, prepared.bundle)

"""What is looked up for sites with which means, and what comes of it."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fastlaunch.aws.cache import AskOnce
from fastlaunch.aws.ec2 import Aws
from fastlaunch.backends.stored_code import CodeBundle
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.cloud_request import CloudRequest, rate_at
from fastlaunch.core.errors import CloudRefused, UserError
from fastlaunch.core.settings import RegionSettings, Settings
from fastlaunch.left_out import by_reason
from fastlaunch.placement.cost_ceiling import HourlyRate

if TYPE_CHECKING:
    from fastlaunch.backends.protocol import Place
    from fastlaunch.base_image_file import BaseImage


class Bundle(Protocol):
    """What a site says of the code bundle; see `fastlaunch.images.code_bundle`."""

    @property
    def sha256(self) -> str: ...
    @property
    def commit(self) -> str | None: ...


@dataclass(frozen=True, kw_only=True)
class Inquiry:
    """A request, and what its sites are looked up with. base: AWS's own container image, None for the
    request's own by digest. bundle: the code that is going to be uploaded, None if the image holds it.
    """

    request: CloudRequest
    aws: Aws
    settings: Settings
    catalogue: Catalogue
    now: datetime.datetime
    base: "BaseImage | None"
    bundle: Bundle | None
    ask: AskOnce

    def here(self, region: str) -> RegionSettings:
        """What the config file says of the region."""
        return self.settings.aws.get(region, RegionSettings())

    def code(self, region: str) -> CodeBundle | None:
        """The training code in the region's bucket, None if the image holds it."""
        if self.bundle is None:
            return None
        prefix = self.here(region).prefix
        return CodeBundle.under(prefix, sha256=self.bundle.sha256, commit=self.bundle.commit)

    def rate(self, instance: InstanceType, region: str) -> HourlyRate:
        """The most that an hour costs there. Raises UserError where that is not known."""
        return rate_at(self.request, instance, region, catalogue=self.catalogue, today=self.now.date())


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """sites: in the order in which they are tried. skipped: the candidates left out, as (name, why)."""

    sites: "tuple[Place, ...]"
    skipped: tuple[tuple[str, str], ...]


def resolved(sites: "Sequence[Place]", skipped: Sequence[tuple[str, UserError]]) -> Resolved:
    """Both, in order. Raises the first candidate's error, with all reasons, if no site is left."""
    if not sites:
        raise nowhere(skipped)
    return Resolved(sites=tuple(sites), skipped=tuple((name, error.message) for name, error in skipped))


def nowhere(skipped: Sequence[tuple[str, UserError]]) -> UserError:
    """The error of a job that fits in none of these places: the first one's kind and hint, all reasons."""
    first = skipped[0][1]
    if len({error.message for _, error in skipped}) == 1:
        return first
    told = "; ".join(by_reason((name, error.message) for name, error in skipped))
    kind = type(first) if isinstance(first, CloudRefused) else UserError
    return kind(f"none of {len(skipped)} places can be used: {told}", first.hint)

"""One check before money is spent: what it is for, what came of it, and what to do about it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.core.errors import CloudRefused, UserError
from fastlaunch.core.settings import RegionSettings
from fastlaunch.core.units import by_reason
from fastlaunch.jobs.options import Options

if TYPE_CHECKING:
    from fastlaunch.aws.client import Aws
    from fastlaunch.backends.site import Site
    from fastlaunch.jobs.code_bundle import Bundle
    from fastlaunch.jobs.data_sources import DataFile
    from fastlaunch.placement.lookup import Lookup


class Result(StrEnum):
    """What came of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Finding:
    """What a check has to say."""

    result: Result
    message: str
    hint: str | None = None
    #: Why sites in these zones, and in these alone, cannot be used.
    errors_by_zone: Mapping[str, UserError] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Check(Finding):
    """What was looked at, what came of it, and what to do about it."""

    name: str
    #: What it is about; None for all of them. The instance type is named as its service names it.
    region: str | None = None
    instance: str | None = None
    zone: str | None = None
    #: What `submit` ends with if the check failed, None otherwise.
    error: UserError | None = None

    def error_at(self, site: "Site") -> UserError | None:
        """Return why the site cannot be used; None if the check has nothing against it."""
        if self.region not in (None, site.region) or self.instance not in (None, site.type_name):
            return None
        at_zone = self.error if self.zone in (None, site.zone) else None
        return at_zone or self.errors_by_zone.get(site.zone or "")


@dataclass(frozen=True, kw_only=True)
class CheckContext:
    """The job that the checks are for, and what they look it up with."""

    lookup: "Lookup"
    options: Options
    #: Those of the options; none to check the account alone.
    instances: tuple[InstanceType, ...]
    #: What is uploaded for it: its code, as far as that is known here, what pip installs, and data.
    bundles: "tuple[Bundle | DataFile, ...]" = ()
    #: Where a check looks; empty for checks of all regions.
    region: str = ""

    @property
    def aws(self) -> "Aws":
        assert self.lookup.aws is not None
        return self.lookup.aws

    @property
    def here(self) -> RegionSettings:
        """The region's part of the config file."""
        return self.lookup.settings.region_settings(self.region)

    @property
    def trains(self) -> bool:
        """Whether it runs on SageMaker."""
        return self.options.service == "sagemaker"

    @property
    def is_joined_by_efa(self) -> bool:
        """Whether nodes of any of its types talk by EFA, and so have several network interfaces."""
        return self.options.num_nodes > 1 and any(instance.num_efa_interfaces for instance in self.instances)

    def name_of(self, instance: InstanceType) -> str:
        """Return the type as the service calls it."""
        return f"ml.{instance.name}" if self.trains else instance.name


def nowhere(skipped: Sequence[tuple[str, UserError]]) -> UserError:
    """Return the error of a job that fits in no place: the first one's kind and hint, with every reason."""
    first = skipped[0][1]
    if len({error.message for _, error in skipped}) == 1:
        return first
    reasons = "; ".join(by_reason((name, error.message) for name, error in skipped))
    kind = type(first) if isinstance(first, CloudRefused) else UserError
    return kind(f"none of {len(skipped)} places can be used: {reasons}", first.hint)

"""One check before money is spent: what it looks at, what came of it, and what to do about it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from fastlaunch.core.errors import NotAuthorised, Throttled, Unreachable, UserError

if TYPE_CHECKING:
    from fastlaunch.backends.site import Site


class Result(StrEnum):
    """What came of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Finding:
    """What a check has to say that is neither simply right nor wrong."""

    result: Result
    message: str
    hint: str | None = None
    #: Why sites in these zones, and in these alone, cannot be used.
    errors_by_zone: Mapping[str, UserError] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Check:
    """What was looked at, what came of it, and what to do about it."""

    name: str
    result: Result
    message: str
    hint: str | None = None
    #: What it is about; None for all of them. The instance type is named as its service names it.
    region: str | None = None
    instance: str | None = None
    zone: str | None = None
    #: What `submit` ends with if the check failed, None otherwise.
    error: UserError | None = None
    errors_by_zone: Mapping[str, UserError] = field(default_factory=dict)

    def error_at(self, site: "Site") -> UserError | None:
        """Return why the site cannot be used; None if the check has nothing against it."""
        if self.region not in (None, site.region) or self.instance not in (None, site.type_name):
            return None
        at_zone = self.error if self.zone in (None, site.zone) else None
        return at_zone or self.errors_by_zone.get(site.zone or "")


def run_check(
    name: str,
    call: Callable[[], str | Finding],
    *,
    region: str | None = None,
    instance: str | None = None,
    zone: str | None = None,
    needed: bool = True,
    obstacle: str | None = None,
) -> Check:
    """Run `call`, and return what it says, or the error that it raises, as a check.

    needed: a job cannot do without what is looked at, so the check fails where AWS does not answer.
    obstacle: why it is not run at all.
    """

    def check(finding: Finding, error: UserError | None = None) -> Check:
        return Check(
            name=name,
            result=finding.result,
            message=finding.message,
            hint=finding.hint,
            region=region,
            instance=instance,
            zone=zone,
            error=error,
            errors_by_zone=finding.errors_by_zone,
        )

    if obstacle is not None:
        return check(Finding(Result.NOT_CHECKED, obstacle))
    try:
        answer = call()
    except UserError as error:
        if isinstance(error, NotAuthorised | Throttled | Unreachable) and not needed:
            return check(Finding(Result.NOT_CHECKED, error.message, error.hint))
        return check(Finding(Result.FAILED, error.message, error.hint), error)
    return check(answer if isinstance(answer, Finding) else Finding(Result.OK, answer))

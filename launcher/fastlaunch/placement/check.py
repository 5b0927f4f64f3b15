"""One check before money is spent: what was looked at, what came of it, and what to do about it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from fastlaunch.core.errors import NotAuthorised, Throttled, Unreachable, UserError
from fastlaunch.placement.cost_ceiling import type_names

if TYPE_CHECKING:
    from fastlaunch.backends.protocol import Place


class Result(StrEnum):
    """What came of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at, what came of it, what to say of it, and what to do about it.

    region, instance (as its service calls it), zone: what it is about; None for all of them. error: what
    `submit` ends with if it failed, None otherwise.
    """

    name: str
    result: Result
    told: str
    hint: str | None = None
    region: str | None = None
    instance: str | None = None
    zone: str | None = None
    error: UserError | None = None

    @property
    def ok(self) -> bool | None:
        """Whether nothing stands in the way; None if that is not known."""
        return None if self.result is Result.NOT_CHECKED else self.result is not Result.FAILED

    def concerns(self, site: "Place") -> bool:
        """Whether it is about this site."""
        return (
            self.region in (None, site.region)
            and self.instance in (None, *type_names(site))
            and self.zone in (None, site.zone)
        )


@dataclass(frozen=True)
class Told:
    """What a check says that is neither simply right nor wrong."""

    result: Result
    told: str
    hint: str | None = None


def made(
    name: str,
    call: Callable[[], str | Told],
    *,
    region: str | None = None,
    instance: str | None = None,
    zone: str | None = None,
    needed: bool = True,
    shut: str | None = None,
) -> Check:
    """The check that `call` makes: what it returns to say, or the error that it raises.

    needed: a job cannot do without what it asks, so that it fails where AWS does not answer. shut: why it is
    not made at all.
    """

    def check(result: Result, told: str, hint: str | None, error: UserError | None = None) -> Check:
        return Check(
            name=name,
            result=result,
            told=told,
            hint=hint,
            region=region,
            instance=instance,
            zone=zone,
            error=error,
        )

    if shut is not None:
        return check(Result.NOT_CHECKED, shut, None)
    try:
        said = call()
    except UserError as error:
        if isinstance(error, NotAuthorised | Throttled | Unreachable) and not needed:
            return check(Result.NOT_CHECKED, error.message, error.hint)
        return check(Result.FAILED, error.message, error.hint, error)
    told = said if isinstance(said, Told) else Told(Result.OK, said)
    return check(told.result, told.told, told.hint)

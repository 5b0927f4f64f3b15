"""What can be known before money is spent: whether AWS would let a job start, and what it would cost.

`doctor` shows every check, `submit` goes on where none failed. A check that may not be made, for want of a
right that the job itself does not need, says so and holds up nothing.
"""

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from fastlaunch.aws.cache import AskOnce
from fastlaunch.aws.ec2 import Aws
from fastlaunch.backends.sagemaker_site import TrainingSite
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.errors import CloudRefused, UserError
from fastlaunch.core.settings import Settings
from fastlaunch.placement.check import Check, made
from fastlaunch.preflight_machines import machine_checks
from fastlaunch.preflight_money import money_checks
from fastlaunch.preflight_region import config, is_on
from fastlaunch.preflight_training import training_checks
from fastlaunch.preflight_wanted import Looking, Wanted
from fastlaunch.resolved import Resolved, resolved

if TYPE_CHECKING:
    from fastlaunch.backends.protocol import Place

#: What a job does without: where it may not be looked at, that is told and nothing more.
_NOT_NEEDED = ("quota", "warm pool quota", "spot price", "between nodes", "placement group")


def checks(
    wanted: Wanted,
    *,
    aws: Aws,
    settings: Settings,
    catalogue: Catalogue,
    now: datetime.datetime,
    sites: "Sequence[Place]" = (),
    ask: AskOnce | None = None,
) -> list[Check]:
    """Every check, in the order in which a job needs it. Raises nothing that AWS or the config says.

    sites: where the job may run, for its cost. ask: what was asked already is not asked again.
    """
    job = _Checks(
        Looking(wanted=wanted, aws=aws, settings=settings, catalogue=catalogue, now=now, ask=ask or AskOnce())
    )
    return [*job.account(), *job.regions(), *money_checks(job.look, sites)]


def usable(sites: "Sequence[Place]", found: Sequence[Check]) -> Resolved:
    """The sites that no failed check is about, and the others with why.

    Of the types that SageMaker may choose among those that failed are left out. Raises the first error of
    the checks if no site is left.
    """
    failed = [check for check in found if check.error is not None]
    skipped: list[tuple[str, UserError]] = []
    left: list[Place] = []
    for site in sites:
        if isinstance(site, TrainingSite):
            kept, refused = _types_left(site, failed)
            skipped += refused
            left += [kept] if kept else []
            continue
        error = next((check.error for check in failed if check.concerns(site)), None)
        if error is None:
            left.append(site)
        else:
            skipped.append((site.name, error))
    return resolved(left, skipped)


def _types_left(
    site: TrainingSite, failed: Sequence[Check]
) -> tuple[TrainingSite | None, list[tuple[str, UserError]]]:
    """The site with the types that no failed check is about, at its price; and the others with why."""
    types = []
    refused: list[tuple[str, UserError]] = []
    for one in (site.instance, *site.others):
        alone = replace(site, instance=one, others=())
        error = next((check.error for check in failed if check.concerns(alone)), None)
        if error is None:
            types.append(one)
        else:
            refused.append((alone.name, error))
    return (replace(site, instance=types[0], others=tuple(types[1:])) if types else None), refused


@dataclass(frozen=True)
class _Checks:
    look: Looking

    def account(self) -> Iterator[Check]:
        yield made("login", self._identity)

    def regions(self) -> Iterator[Check]:
        of_region = training_checks if self.look.wanted.backend == "sagemaker" else machine_checks
        no_login = None if self._has_login() else "not asked, for want of a login"
        for region in self.look.wanted.regions:
            yield made("config", partial(config, self.look, region), region=region)
            shut = no_login
            if shut is None:
                check = made("region", partial(is_on, self.look, region), region=region, needed=False)
                yield check
                shut = f"{region} cannot be used" if check.error else None
            for about, call in of_region(self.look, region):
                # What a job needs fails where it may not be looked at; the rest is then not known.
                needed = about["name"] not in _NOT_NEEDED
                yield made(**about, call=call, region=region, needed=needed, shut=shut)

    def _has_login(self) -> bool:
        try:
            self.look.ask(self.look.aws.identity)
        except CloudRefused:
            return False
        return True

    def _identity(self) -> str:
        who = self.look.ask(self.look.aws.identity)
        return f"{who.arn} (account {who.account})"

"""Tries one place after another until AWS starts a machine for the runs, or has refused them all.

Only a definite refusal permits the next place. Where no answer came, the same request is sent again; where it
stays unknown whether a machine runs, nothing else is tried, and the ledger and the user are told so.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from fastlaunch.attempt_price import list_price
from fastlaunch.backends import Plan, RunState
from fastlaunch.backends.ec2 import Ec2Backend
from fastlaunch.backends.ec2_site import Site
from fastlaunch.errors import (
    BadConfiguration,
    CloudRefused,
    NoCapacity,
    NotAuthorised,
    QuotaExceeded,
    Throttled,
    Unreachable,
    UserError,
)
from fastlaunch.job import JobSpec
from fastlaunch.settings import Settings
from fastlaunch.stop_request import StopRequest

if TYPE_CHECKING:
    from fastlaunch.run_attempts import Attempt
    from fastlaunch.runs import Ledger

#: How long the same request is sent again where no answer came, and where there were too many requests.
UNKNOWN_LIMIT = timedelta(minutes=5)
_FIRST_WAIT_S = 2.0
_LONGEST_WAIT_S = 30.0
#: AWS's name of the error for a token whose instance was started, and has ended since.
_STARTED_BEFORE = "IdempotentInstanceTerminated"
#: What the ledger says of an attempt, and its runs, as long as nobody knows.
UNKNOWN = "no answer to RunInstances: whether a machine was started is not known"


@dataclass(frozen=True, kw_only=True)
class Placing:
    """What it takes to start machines. tell: a line for the user."""

    backend: Ec2Backend
    ledger: "Ledger"
    settings: Settings
    stop: StopRequest
    tell: Callable[[str], None]
    _refused: dict[str, str] = field(default_factory=dict)
    _over_quota: list[Site] = field(default_factory=list)

    def place(
        self, sites: Sequence[Site], jobs_at: Callable[[Site], Mapping[str, JobSpec]], *, max_minutes: int
    ) -> "Attempt | None":
        """The attempt whose request was accepted, at the first of `sites` that takes it.

        None if the user asked to stop, or cancelled all the runs, before any did. jobs_at: the jobs by run
        id, as they are at a site. Raises CloudRefused's kinds if there is none, and Unreachable if it is not
        known.
        """
        errors: list[CloudRefused] = []
        for site in sites:
            if self.stop.by:
                return None
            if any(_shares_quota(site, refused) for refused in self._over_quota):
                self._refused[site.name] = "the quota does not allow it"
                continue
            try:
                return self._try(site, jobs_at(site), max_minutes)
            except (QuotaExceeded, NoCapacity, BadConfiguration) as error:
                if isinstance(error, BadConfiguration) and not _is_of_place(error, site):
                    raise
                if isinstance(error, QuotaExceeded):
                    self._over_quota.append(site)
                errors.append(error)
                self._refused[site.name] = error.message
                self.tell(f"{site.name}: {error.message}")
        raise self._nowhere(errors)

    def _try(self, site: Site, jobs: Mapping[str, JobSpec], max_minutes: int) -> "Attempt | None":
        """The attempt, once its request was accepted; None if all its runs were cancelled meanwhile."""
        backend = self.backend.at(site, max_minutes)
        job = next(iter(jobs.values()))
        today = self.backend.now().date()
        price = list_price(site, job.purchase, settings=self.settings, today=today)
        # In one transaction: the runs stand where the attempt that is about to be sent would put them.
        with self.ledger.transaction():
            # Another command may have cancelled them since: for what has ended nothing is started.
            jobs = {run_id: spec for run_id, spec in jobs.items() if self._is_open(run_id)}
            if not jobs:
                return None
            for run_id, spec in jobs.items():
                self.ledger.place(run_id, spec=spec.to_json(), instance=site.instance.name, price=price)
            attempt_id, _ = self.ledger.add_attempt(
                list(jobs),
                max_minutes=max_minutes,
                usd_per_hour=price.usd_per_hour * (1 - self.settings.discount) if price else None,
                make_plan=lambda n: backend.plan(jobs, attempt=n),
            )
        plan = self.ledger.plan_of(attempt_id)
        assert plan is not None
        try:
            self._note_start(attempt_id, jobs, self._send(attempt_id, plan))
            return self.ledger.attempt(attempt_id)
        except Unreachable:
            raise self._unknown(attempt_id, plan, UNKNOWN) from None
        except CloudRefused as error:
            self.ledger.end_attempt(attempt_id, RunState.FAILED, reason=error.message)
            raise
        except BaseException:
            # A second Ctrl-C, a ledger that cannot be written, or a bug, while the request was on its way.
            unknown = self._unknown(attempt_id, plan, "its launcher ended while it was being started")
            self.tell(f"{unknown.message}; {unknown.hint}")
            raise

    def _is_open(self, run_id: str) -> bool:
        return bool(self.ledger.existing([run_id])) and not self.ledger.get(run_id).state.is_final

    def _note_start(self, attempt_id: int, run_ids: Iterable[str], handle: Mapping[str, Any]) -> None:
        with self.ledger.transaction():
            self.ledger.set_handle(attempt_id, handle)
            self.ledger.explain_attempt(attempt_id, None)
            for run_id in run_ids:
                self.ledger.explain(run_id, None)
                self.ledger.set_state(run_id, RunState.RUNNING)

    def _send(self, attempt_id: int, plan: Plan) -> Mapping[str, Any]:
        deadline = self.backend.now() + UNKNOWN_LIMIT
        wait_s, unknown = _FIRST_WAIT_S, False
        while True:
            try:
                return self.backend.execute(plan)
            except (Throttled, Unreachable) as error:
                if isinstance(error, Unreachable):
                    unknown = True
                    self.ledger.explain_attempt(attempt_id, UNKNOWN)
                if self.stop.by or self.backend.now() >= deadline:
                    found = self._find(plan) if unknown else None
                    if found is not None:
                        return found
                    raise Unreachable(error.message) if unknown else error from None
                self.tell(f"{error.message}; the same request is sent again")
            except CloudRefused as error:
                # It refuses this one; one that was not answered may have been carried out before.
                if not unknown and error.code != _STARTED_BEFORE:
                    raise
                found = self._find(plan)
                if found is not None:
                    return found
                if isinstance(error, NotAuthorised):
                    raise Unreachable(error.message) from None
                raise
            self.backend.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _find(self, plan: Plan) -> Mapping[str, Any] | None:
        with suppress(Throttled, Unreachable, NotAuthorised):
            return self.backend.find(plan)
        return None

    def _unknown(self, attempt_id: int, plan: Plan, why: str) -> Unreachable:
        """The error that says what may be running, with the ledger brought to say the same."""
        attempt = self.ledger.attempt(attempt_id)
        # What cannot be noted, on a full disk, is told all the same.
        with suppress(UserError), self.ledger.transaction():
            self.ledger.explain_attempt(attempt_id, why)
            for run_id in attempt.run_ids:
                self.ledger.set_state(run_id, RunState.RUNNING, why)
                self.ledger.explain(run_id, why)
        kind, first = plan.request["InstanceType"], attempt.run_ids[0]
        return Unreachable(
            f"{why}: one {kind} may be running in {plan.region}, with client token {attempt.token} and tag "
            f"fastlaunch:run={first}; if so, it ends by itself within {attempt.max_minutes} min",
            f"to find and stop it: fastlaunch cancel {first}   (or, from anywhere: fastlaunch reap "
            f"--region {plan.region})",
        )

    def _nowhere(self, errors: Sequence[CloudRefused]) -> CloudRefused:
        assert errors
        if len(self._refused) == 1:
            return errors[0]
        kinds = {type(error) for error in errors}
        kind = kinds.pop() if len(kinds) == 1 else NoCapacity
        told = "; ".join(f"{name}: {why}" for name, why in self._refused.items())
        hint = errors[-1].hint or "try again later, or name more regions or instance types"
        return kind(f"none of {len(self._refused)} places took it: {told}", hint)


def _shares_quota(site: Site, refused: Site) -> bool:
    """Whether the quota that refused one machine refuses this as well: its family's, of the same region."""
    return (
        site.region == refused.region
        and _family(site) == _family(refused)
        and site.instance.vcpus >= refused.instance.vcpus
    )


def _family(site: Site) -> str:
    """`p5` for p5, p5e and p5en: at the finest, quotas are of these."""
    found = re.match(r"[a-z]+\d*", site.instance.name)
    return found[0] if found else site.instance.name


def _is_of_place(error: BadConfiguration, site: Site) -> bool:
    """Whether what is wrong is the place's own, so that another may be right."""
    own = (site.subnet, site.zone, site.placement_group)
    return any(name is not None and name in error.message for name in own)

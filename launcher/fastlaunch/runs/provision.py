"""Tries one place after another until AWS starts machines for the runs, or has refused them all.

Only a definite refusal permits the next place. Where no answer came, the same request is sent again; where it
stays unknown whether a machine runs, nothing else is tried, and the ledger and the user are told so.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from fastlaunch.backends import Plan, RunState
from fastlaunch.backends.protocol import CloudBackend, Place
from fastlaunch.core.errors import (
    BadConfiguration,
    CloudRefused,
    NoCapacity,
    NotAuthorised,
    QuotaExceeded,
    Throttled,
    Unreachable,
    UserError,
)
from fastlaunch.core.settings import Settings
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.runs.attempt_price import list_price, paid_usd_per_hour
from fastlaunch.runs.stop_request import StopRequest

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Ledger
    from fastlaunch.run_attempts import Attempt

#: How long the same request is sent again where no answer came, and where there were too many requests.
UNKNOWN_LIMIT = timedelta(minutes=5)
_FIRST_WAIT_S = 2.0
_LONGEST_WAIT_S = 30.0
#: AWS's name of the error for a token whose instance was started, and has ended since.
_STARTED_BEFORE = "IdempotentInstanceTerminated"
#: And of the one for a training job's name that another request has used: what is found by it is not ours.
_NAME_IN_USE = "ResourceInUse"
#: What the ledger says of an attempt whose launcher has not come to making a schedule for it.
NO_SCHEDULE = "nobody follows it, and no schedule in the account was made: only its own timer ends it"


@dataclass(frozen=True, kw_only=True)
class Placed:
    """An attempt whose request was accepted, and where."""

    attempt: "Attempt"
    site: Place


@dataclass(frozen=True, kw_only=True)
class Placing:
    """What it takes to start machines. tell: a line for the user. detach: nobody will follow them.

    It remembers what refused: a place is asked once.
    """

    backends: Mapping[str, CloudBackend]
    ledger: "Ledger"
    settings: Settings
    stop: StopRequest
    tell: Callable[[str], None]
    detach: bool = False
    _refused: dict[str, CloudRefused] = field(default_factory=dict)
    _over_quota: list[Place] = field(default_factory=list)

    def place(
        self,
        sites: Sequence[Place],
        jobs_at: Callable[[Place], Mapping[str, JobSpec]],
        *,
        max_minutes: int,
        root: str | None = None,
    ) -> Placed | None:
        """The attempt whose request was accepted, at the first of `sites` that takes it.

        None if the user asked to stop, or cancelled all the runs, before any did. jobs_at: the jobs by run
        id, as they are at a site. root: see `CloudBackend.at`. Raises CloudRefused's kinds if there is none,
        and Unreachable if it is not known.
        """
        for site in sites:
            if self.stop.by:
                return None
            if site.name in self._refused:
                continue
            if any(_shares_quota(site, refused) for refused in self._over_quota):
                self._refused[site.name] = QuotaExceeded("the quota does not allow it")
                continue
            try:
                attempt = self._try(site, jobs_at(site), max_minutes, root)
                return Placed(attempt=attempt, site=site) if attempt else None
            except (QuotaExceeded, NoCapacity, BadConfiguration) as error:
                if isinstance(error, BadConfiguration) and not _is_of_place(error, site):
                    raise
                if isinstance(error, QuotaExceeded):
                    self._over_quota.append(site)
                self.refuse(site, error)
        raise self._nowhere()

    def refuse(self, site: Place, error: CloudRefused) -> None:
        """Note, and tell, that the site does not have it; another one may be tried."""
        self._refused[site.name] = error
        self.tell(f"{site.name}: {error.message}")

    def _try(
        self, site: Place, jobs: Mapping[str, JobSpec], max_minutes: int, root: str | None
    ) -> "Attempt | None":
        """The attempt, once its request was accepted; None if all its runs were cancelled meanwhile."""
        backend = self.backends[site.backend].at(site, max_minutes, root=root)
        job = next(iter(jobs.values()))
        price = list_price(site, job.purchase, settings=self.settings, today=backend.now().date())
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
                usd_per_hour=paid_usd_per_hour(price, self.settings.discount),
                make_plan=lambda n: backend.plan(jobs, attempt=n),
            )
        plan = self.ledger.plan_of(attempt_id)
        assert plan is not None
        try:
            self._note_start(attempt_id, jobs, self._send(attempt_id, plan, backend))
            return self.ledger.attempt(attempt_id)
        except Unreachable:
            raise self._unknown(attempt_id, plan, unanswered(plan)) from None
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
            # Taken back when the schedule is made: a launcher may die before it comes to that.
            needs_one = self.detach and "instance_ids" in handle
            self.ledger.explain_attempt(attempt_id, NO_SCHEDULE if needs_one else None)
            for run_id in run_ids:
                self.ledger.explain(run_id, None)
                self.ledger.set_state(run_id, RunState.RUNNING)

    def _send(self, attempt_id: int, plan: Plan, backend: CloudBackend) -> Mapping[str, Any]:
        deadline = backend.now() + UNKNOWN_LIMIT
        wait_s, unknown = _FIRST_WAIT_S, False
        while True:
            try:
                return backend.execute(plan)
            except (Throttled, Unreachable) as error:
                if isinstance(error, Unreachable):
                    unknown = True
                    self.ledger.explain_attempt(attempt_id, unanswered(plan))
                if self.stop.by or backend.now() >= deadline:
                    found = _find(plan, backend) if unknown else None
                    if found is not None:
                        return found
                    raise Unreachable(error.message) if unknown else error from None
                self.tell(f"{error.message}; the same request is sent again")
            except CloudRefused as error:
                # It refuses this one; one that was not answered may have been carried out before.
                if error.code == _NAME_IN_USE or (not unknown and error.code != _STARTED_BEFORE):
                    raise
                found = _find(plan, backend)
                if found is not None:
                    return found
                if isinstance(error, NotAuthorised):
                    raise Unreachable(error.message) from None
                raise
            backend.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _unknown(self, attempt_id: int, plan: Plan, why: str) -> Unreachable:
        """The error that says what may be running, with the ledger brought to say the same."""
        attempt = self.ledger.attempt(attempt_id)
        # What cannot be noted, on a full disk, is told all the same.
        with suppress(UserError), self.ledger.transaction():
            self.ledger.explain_attempt(attempt_id, why)
            for run_id in attempt.run_ids:
                self.ledger.set_state(run_id, RunState.RUNNING, why)
                self.ledger.explain(run_id, why)
        first, is_one = attempt.run_ids[0], attempt.num_nodes == 1
        machines = f"one {attempt.instance}" if is_one else f"{attempt.num_nodes} {attempt.instance}"
        named = "client token" if "ClientToken" in plan.request else "name"
        return Unreachable(
            f"{why}: {machines} may be running in {plan.region}, with {named} {attempt.token} and tag "
            f"fastlaunch:run={first}; if so, {'it ends by itself' if is_one else 'they end by themselves'} "
            f"within {attempt.max_minutes} min",
            f"to find and stop it: fastlaunch cancel {first}   (or, from anywhere: fastlaunch reap "
            f"--region {plan.region})",
        )

    def _nowhere(self) -> CloudRefused:
        errors = list(self._refused.values())
        assert errors
        if len(errors) == 1:
            return errors[0]
        kinds = {type(error) for error in errors}
        kind = kinds.pop() if len(kinds) == 1 else NoCapacity
        told = "; ".join(f"{name}: {error.message}" for name, error in self._refused.items())
        hint = next((error.hint for error in reversed(errors) if error.hint), None)
        return kind(
            f"none of {len(errors)} places took it: {told}",
            hint or "try again later, or name more regions or instance types",
        )


def unanswered(plan: Plan) -> str:
    """What the ledger says of an attempt, and its runs, as long as nobody knows."""
    return f"no answer to {plan.operation}: whether a machine was started is not known"


def _find(plan: Plan, backend: CloudBackend) -> Mapping[str, Any] | None:
    with suppress(Throttled, Unreachable, NotAuthorised):
        return backend.find(plan)
    return None


def _shares_quota(site: Place, refused: Place) -> bool:
    """Whether the quota that refused one request refuses this as well.

    EC2 has one for a family in a region, counted in vCPUs; SageMaker one for a type in a region.
    """
    if (site.backend, site.region) != (refused.backend, refused.region):
        return False
    if site.backend != "ec2":
        return site.instance.name == refused.instance.name
    return _family(site) == _family(refused) and site.instance.vcpus >= refused.instance.vcpus


def _family(site: Place) -> str:
    """`p5` for p5, p5e and p5en: at the finest, quotas are of these."""
    found = re.match(r"[a-z]+\d*", site.instance.name)
    return found[0] if found else site.instance.name


def _is_of_place(error: BadConfiguration, site: Place) -> bool:
    """Whether what is wrong is the place's own, so that another may be right."""
    return any(name in error.message for name in site.own_names)

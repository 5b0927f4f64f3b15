"""Try one site after another until AWS starts machines for the runs or all sites have refused.

Only a definite refusal permits the next site. Without an answer the same request is sent again. While it is
unknown whether a machine runs, nothing else is tried, and both the ledger and the user are informed.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

from fastlaunch.backends.protocol import CloudBackend
from fastlaunch.backends.site import Site
from fastlaunch.catalog.prices import paid_usd_per_hour
from fastlaunch.core.errors import (
    BadConfiguration,
    CloudRefused,
    NoCapacity,
    NotAuthorised,
    QuotaExceeded,
    Throttled,
    TlsFailed,
    Unreachable,
    UserError,
)
from fastlaunch.core.plan import Ending, Plan, RunState
from fastlaunch.core.units import utc_minute
from fastlaunch.jobs.job import Job
from fastlaunch.ledger.rows import Attempt
from fastlaunch.lifecycle.budgets import OtherMachine, check_budgets, others_of
from fastlaunch.lifecycle.schedules import (
    LaterStart,
    make_start,
    note_lacking_timer,
    note_start,
    starts_at,
    unmake_start,
    waits,
)
from fastlaunch.lifecycle.world import LaunchContext

#: How long a request is repeated after no answer or throttling.
UNKNOWN_LIMIT = timedelta(minutes=5)
_FIRST_WAIT_S = 2.0
_LONGEST_WAIT_S = 30.0
#: AWS's error for a token whose instance was started and has ended since.
_STARTED_BEFORE = "IdempotentInstanceTerminated"
#: AWS's error for a training job's name that another request has used: that job is not ours.
_NAME_IN_USE = "ResourceInUse"


@dataclass(frozen=True, kw_only=True)
class Provisioner:
    """Starts machines. Remembers the sites that refused, so that each is asked once."""

    launch: LaunchContext
    _refused: dict[str, CloudRefused] = field(default_factory=dict)
    _over_quota: list[Site] = field(default_factory=list)

    def place(
        self,
        placements: Sequence[Site],
        jobs_at: Callable[[Site], Mapping[str, Job]],
        *,
        max_minutes: int,
        root: str | None = None,
        later: LaterStart | None = None,
    ) -> tuple[Attempt, Site] | None:
        """Return the attempt at the first of `placements` that accepts its request, and that site.

        None if the user stopped or cancelled all the runs before any site accepted. jobs_at: the jobs by run
        id, as they are at a site. root: see `CloudBackend.at`. later: to have schedules start it. Raises
        CloudRefused's kinds if all refuse, and Unreachable if it is not known whether one accepted.
        """
        for site in placements:
            if self.launch.stop.by:
                return None
            if site.name in self._refused:
                continue
            if any(_shares_quota(site, refused) for refused in self._over_quota):
                self._refused[site.name] = QuotaExceeded("the quota does not allow it")
                continue
            try:
                attempt = self._try(site, jobs_at(site), max_minutes, root, later)
                return (attempt, site) if attempt else None
            except (QuotaExceeded, NoCapacity, BadConfiguration) as error:
                # If the fault lies in this site's names, another site may work.
                is_of_site = any(name in error.message for name in site.own_names)
                if isinstance(error, BadConfiguration) and not is_of_site:
                    raise
                if isinstance(error, QuotaExceeded):
                    self._over_quota.append(site)
                self.refuse(site, error)
        raise self._nowhere()

    def refuse(self, site: Site, error: CloudRefused) -> None:
        """Note and report that the site refused; another one may be tried."""
        self._refused[site.name] = error
        self.launch.report(f"{site.name}: {error.message}")

    def _try(
        self,
        site: Site,
        jobs: Mapping[str, Job],
        max_minutes: int,
        root: str | None,
        later: LaterStart | None,
    ) -> Attempt | None:
        """Return the attempt once its request is accepted; None if all its runs were cancelled meanwhile."""
        ledger = self.launch.ledger
        backend = self.launch.cloud_backends[site.backend].at(site, max_minutes, root=root)
        identity = backend.aws.identity()
        job = next(iter(jobs.values()))
        # EC2's spot price is looked up once the machine exists.
        price = None if site.backend == "ec2" and job.terms.purchase == "spot" else site.price
        others = self._others
        # In one transaction: the rows name the site of the attempt that is about to be sent.
        with ledger.transaction():
            # Another command may have cancelled them since, and a run that has ended must not start anything.
            known = ledger.existing(list(jobs))
            jobs = {
                id: spec for id, spec in jobs.items() if id in known and not ledger.get(id).state.is_final
            }
            if not jobs:
                return None
            for run_id, spec in jobs.items():
                ledger.place(run_id, spec=spec.to_json(), instance=site.instance.name, price=price)
            attempt_id, _ = ledger.add_attempt(
                list(jobs),
                max_minutes=max_minutes,
                usd_per_hour=paid_usd_per_hour(price, self.launch.settings),
                account=identity.account,
                partition=identity.partition,
                make_plan=lambda n: backend.plan(jobs, attempt=n),
            )
            # Another launcher that begins now waits, and then counts this attempt.
            usd = ledger.attempt(attempt_id).max_cost_usd or 0.0
            check_budgets(self.launch, usd, others=others, without=attempt_id)

            if later:
                note_start(ledger, attempt_id, later)
        plan = ledger.plan_of(attempt_id)
        assert plan is not None
        try:
            handle = self._send(attempt_id, plan, backend, later)
            if handle is not None:
                self._note_start(attempt_id, jobs, handle)
            return ledger.attempt(attempt_id)
        except Unreachable:
            raise self._unknown(attempt_id, plan, unanswered(plan, later)) from None
        except CloudRefused as error:
            self._take_back(attempt_id, plan, backend)
            ending = Ending.NO_CAPACITY if isinstance(error, NoCapacity) else None
            ledger.end_attempt(attempt_id, RunState.FAILED, ending=ending, reason=error.message)
            raise
        except BaseException:
            # A second Ctrl-C, an unwritable ledger or a bug while the request was under way.
            unknown = self._unknown(attempt_id, plan, "its launcher ended while it was being started")
            self.launch.report(f"{unknown.message}; {unknown.hint}")
            raise

    @cached_property
    def _others(self) -> list[OtherMachine] | None:
        """What AWS shows of other ledgers, if there are budgets in which it counts."""
        return others_of(self.launch)

    def _note_start(self, attempt_id: int, run_ids: Iterable[str], handle: Mapping[str, Any]) -> None:
        with self.launch.ledger.transaction():
            self.launch.ledger.set_handle(attempt_id, handle)
            note_lacking_timer(self.launch.ledger, self.launch.ledger.attempt(attempt_id))
            for run_id in run_ids:
                self.launch.ledger.explain(run_id, None)
                self.launch.ledger.set_state(run_id, RunState.RUNNING)

    def _take_back(self, attempt_id: int, plan: Plan, backend: CloudBackend) -> None:
        """Delete the schedules of a start that was refused in part. Raises Unreachable if one may be left."""
        if not waits(attempt := self.launch.ledger.attempt(attempt_id)):
            return
        try:
            unmake_start(self.launch.ledger, backend.aws, attempt, now=backend.now())
        except CloudRefused as error:
            raise self._unknown(attempt_id, plan, f"a schedule may be left ({error.message})") from None

    def _send(
        self, attempt_id: int, plan: Plan, backend: CloudBackend, later: LaterStart | None
    ) -> Mapping[str, Any] | None:
        """Return the handle; None if schedules will start it."""
        deadline = backend.now() + UNKNOWN_LIMIT
        wait_s, unknown = _FIRST_WAIT_S, False
        while True:
            try:
                if later is None:
                    return backend.execute(plan)
                ledger, now = self.launch.ledger, backend.now()
                make_start(ledger, backend.aws, ledger.attempt(attempt_id), plan, role=later.role, now=now)
                return None
            except (Throttled, Unreachable) as error:
                if isinstance(error, Unreachable):
                    unknown = True
                    self.launch.ledger.explain_attempt(attempt_id, unanswered(plan, later))
                if self.launch.stop.by or backend.now() >= deadline or isinstance(error, TlsFailed):
                    handle = _find(plan, backend) if unknown else None
                    if handle is not None:
                        return handle
                    raise Unreachable(error.message) if unknown else error from None
                self.launch.report(f"{error.message}; the same request is sent again")
            except CloudRefused as error:
                # This request is refused, but an earlier one without an answer may have been carried out.
                if error.code == _NAME_IN_USE or (not unknown and error.code != _STARTED_BEFORE):
                    raise
                handle = _find(plan, backend)
                if handle is not None:
                    return handle
                # Started machines that AWS shows only later cost money.
                if isinstance(error, NotAuthorised) or error.code == _STARTED_BEFORE:
                    raise Unreachable(error.message) from None
                raise
            backend.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _unknown(self, attempt_id: int, plan: Plan, why: str) -> Unreachable:
        """Return the error that says what may be running, and note the same in the ledger."""
        attempt = self.launch.ledger.attempt(attempt_id)
        if waits(attempt):
            return self._perhaps_scheduled(attempt, why)
        # On a full disk this cannot be noted, but the user must be told.
        with suppress(UserError), self.launch.ledger.transaction():
            for run_id in attempt.run_ids:
                self.launch.ledger.set_state(run_id, RunState.RUNNING, why)
            self.launch.ledger.explain_with_runs(attempt_id, why)
        first, is_single = attempt.run_ids[0], attempt.num_nodes == 1
        machines = f"one {attempt.instance}" if is_single else f"{attempt.num_nodes} {attempt.instance}"
        ends = "it ends by itself" if is_single else "they end by themselves"
        identity = "client token" if "ClientToken" in plan.request else "name"
        state, begin = ("queued or running", " of its start") if plan.is_queued else ("running", "")
        return Unreachable(
            f"{why}: {machines} may be {state} in {plan.region}, with {identity} {attempt.token} and tag "
            f"fastlaunch:run={first}; if so, {ends} within {attempt.max_minutes} min{begin}",
            f"to find and stop it: fastlaunch cancel {first}   (or, from anywhere: fastlaunch reap "
            f"--region {plan.region})",
        )

    def _perhaps_scheduled(self, attempt: Attempt, why: str) -> Unreachable:
        first = attempt.run_ids[0]
        with suppress(UserError):
            self.launch.ledger.explain_with_runs(attempt.id, why)
        return Unreachable(
            f"{why}: if so, {attempt.token} starts in {attempt.region} at {utc_minute(starts_at(attempt))}",
            f"to see to it: fastlaunch status; to give it up: fastlaunch cancel {first}",
        )

    def _nowhere(self) -> CloudRefused:
        errors = list(self._refused.values())
        assert errors
        if len(errors) == 1:
            return errors[0]
        kinds = {type(error) for error in errors}
        kind = kinds.pop() if len(kinds) == 1 else NoCapacity
        refusals = "; ".join(f"{name}: {error.message}" for name, error in self._refused.items())
        hint = next((error.hint for error in reversed(errors) if error.hint), None)
        return kind(
            f"none of {len(errors)} places took it: {refusals}",
            hint or "try again later, or name more regions or instance types",
        )


def unanswered(plan: Plan, later: LaterStart | None = None) -> str:
    """Return the ledger's reason while it is unknown whether the request was carried out."""
    if later:
        return "no answer to CreateSchedule: whether a schedule was made is not known"
    return f"no answer to {plan.operation}: whether a machine was started is not known"


def _find(plan: Plan, backend: CloudBackend) -> Mapping[str, Any] | None:
    with suppress(Throttled, Unreachable, NotAuthorised):
        return backend.find(plan)
    return None


def _shares_quota(site: Site, refused: Site) -> bool:
    """Return whether the quota that refused one site also refuses this one.

    EC2 has a quota in vCPUs per family and region; SageMaker has one per type and region.
    """
    if (site.backend, site.region) != (refused.backend, refused.region):
        return False
    if site.backend != "ec2":
        return site.instance.name == refused.instance.name
    # `p5` for p5, p5e and p5en, as no quota covers less.
    first, second = (re.match(r"[a-z]+\d*", it.instance.name) for it in (site, refused))
    is_of_family = first and second and first[0] == second[0]
    return bool(is_of_family) and site.instance.vcpus >= refused.instance.vcpus

"""Carries out runs: rows in the ledger first, then attempts, each started, followed and finished.

The runs are new ones of a submission, or earlier ones that go on; `_carry_out` does the same with both. The
backends differ: on this machine an attempt does one run, and starts at once. On AWS it does all the runs, on
machines that must first be obtained; another attempt goes on if AWS takes them away or one is faulty.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, cast

from fastlaunch.backends import s3_sync
from fastlaunch.backends.protocol import Backend, CloudBackend
from fastlaunch.backends.site import CapacityBlock, Site
from fastlaunch.core import locks
from fastlaunch.core.data import read, to_data
from fastlaunch.core.errors import CloudRefused, NoCapacity, Throttled, Unreachable, UserError
from fastlaunch.core.home import make_folder
from fastlaunch.core.ownership import MIN_MINUTES
from fastlaunch.core.plan import Ending, RunState
from fastlaunch.core.terminal import as_warning
from fastlaunch.core.units import utc_minute
from fastlaunch.jobs.job import Job, names_apart
from fastlaunch.jobs.options import Options
from fastlaunch.ledger.attempt_cost import minutes_used
from fastlaunch.ledger.ledger import Run, open_ledger
from fastlaunch.ledger.rows import Attempt
from fastlaunch.lifecycle.describe import ends_by_itself, machine_of, machines_of
from fastlaunch.lifecycle.display import make_display
from fastlaunch.lifecycle.finish import held_runs, settle_run
from fastlaunch.lifecycle.local import LOOK_INTERVAL_S, run_here
from fastlaunch.lifecycle.monitor import AttemptDisplay, AttemptMonitor
from fastlaunch.lifecycle.provision import Provisioner
from fastlaunch.lifecycle.reconcile import reconcile
from fastlaunch.lifecycle.resume import (
    Resumable,
    can_go_on,
    has_begun,
    is_too_soon,
    is_undone,
    jobs_of,
    left_runs,
    resumable,
    root_of,
)
from fastlaunch.lifecycle.rounds import Elimination, PlannedLooks, Verdicts
from fastlaunch.lifecycle.schedules import (
    LaterStart,
    arm,
    check_timers,
    decline,
    explain_wait,
    later_start,
    needs_timer,
    starts_at,
    waits,
)
from fastlaunch.lifecycle.sight import check_account
from fastlaunch.lifecycle.world import PROGRESS, LaunchContext, StopRequest, World

#: Between two looks at whether an unanswered request started a machine.
_SETTLE_INTERVAL_S = 30.0
#: Between two looks at whether a block has begun or the user stopped; and how late it may become active.
_BLOCK_PAUSE_S = 1.0
_LATE_BLOCK = timedelta(minutes=15)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Jobs to run, and where."""

    #: Returns the jobs as they are at a site, or on this machine for None.
    jobs_at: Callable[[Any], tuple[Job, ...]]
    #: Where on AWS, in the order to try, all of one backend; empty on this machine.
    placements: tuple[Site, ...] = ()
    #: How long all attempts may take, how often a machine is replaced, whether it is followed, and what it
    #: adds runs to. On this machine there is no limit.
    options: Options = field(default_factory=Options)
    #: Ends rows as soon as they are settled; None to run all jobs.
    verdicts: Verdicts | None = None
    #: Instead of verdicts: leaves out runs before they begin, the first ones too.
    elimination: Elimination | None = None


@dataclass(kw_only=True)
class _Leftover:
    """Why runs that no attempt holds when the launcher ends do not go on."""

    why: str = "its launcher could not go on"
    #: Attempts that have let go of their runs, though their machine may be shutting down.
    followed: set[int] = field(default_factory=set)


class Launcher(LaunchContext):
    """Carries out submissions, and resumes runs of earlier ones."""

    def submit(
        self, submission: Submission, *, command: str, sweep: str | None = None, part: str | None = None
    ) -> list[Run]:
        """Return the runs, ended, or under way if detached. Every row is committed before anything starts.

        sweep, part: see `Ledger.add_submission`.

        Raises UserError where a job cannot be started here, and CloudRefused's kinds where AWS started no
        machine, or where that is not known.
        """
        check_timers(self.settings, submission.placements, account_timer=submission.options.account_timer)
        for site in submission.placements[:1]:
            # An expired login is an error before anything is stored.
            self.cloud_backends[site.backend].aws.identity()
        submission_id = self.ledger.add_submission(
            command, adds_to=submission.options.add_to, sweep=sweep, part=part
        )

        def jobs_at(site: Site | None) -> tuple[Job, ...]:
            return tuple(replace(job, session=submission_id) for job in submission.jobs_at(site))

        with self._launching(submission_id):
            run_ids = self._add_rows(submission_id, replace(submission, jobs_at=jobs_at))
            self._carry_out(
                run_ids,
                submission.placements,
                lambda site: dict(zip(run_ids, jobs_at(site), strict=True)),
                submission.options,
                looks=self._looks(submission, run_ids),
            )
        return self.ledger.select(submission=submission_id)

    def complete(self, submission_id: str, submission: Submission) -> list[Run]:
        """Do what is left of a submission whose launcher was killed or stopped, and return its runs.

        An attempt under way is followed. Runs that ended before they were done go on, or begin again, at the
        sites and within the minutes in the ledger. submission: only its options and looks are used.
        """
        runs = self._wait_for_others(submission_id)
        run_ids, attempts = [run.id for run in runs], self._attempts_of(runs)
        sites = tuple(read(Site, site, "site") for site in self.ledger.sites_of(submission_id))
        options, looks = replace(submission.options, detach=False), self._looks(submission, run_ids)
        with self._launching(submission_id):
            # Without a handle, the user has stopped the wait for it.
            if sites and attempts and (last := attempts[-1]).ended_at is None and last.handle is not None:
                self._carry_out(last.run_ids, sites, jobs_of(runs), options, looks=looks, under_way=last)
            if not self.stop.by and (undone := self._reopen_undone(run_ids)):
                # On this machine the runs that are done still count where runs are numbered.
                self._carry_out(undone if sites else run_ids, sites, jobs_of(runs), options, looks=looks)
        return self.ledger.select(submission=submission_id)

    def _wait_for_others(self, submission_id: str) -> list[Run]:
        """Return the runs once it is known whether each of them lives; on this machine, once none lives."""
        reported: set[str] = set()
        while True:
            reconcile(self.ledger, cast(Mapping[str, Backend], self.backends), self.settings)
            runs = self.ledger.select(submission=submission_id)
            is_local = runs[0].backend == "local"
            if is_local:
                waits_for = {
                    run.id: f"run {run.id} ({run.recipe}) goes on here without its launcher; waiting for it"
                    for run in runs
                    if run.state is RunState.RUNNING
                }
            else:
                waits_for = {
                    attempt.run_ids[0]: (
                        f"attempt {attempt.token} in {attempt.region}: {attempt.reason}; waiting for that"
                    )
                    for attempt in self._attempts_of(runs)
                    if attempt.handle is None and attempt.ended_at is None
                }
            if not waits_for or self.stop.by:
                return runs
            for run_id, line in waits_for.items():
                if line not in reported:
                    self.report(f"{line}. To end it: fastlaunch cancel {run_id}")
                reported.add(line)
            if is_local:
                self.sleep(LOOK_INTERVAL_S)
            else:
                self.cloud_backends[runs[0].backend].sleep(_SETTLE_INTERVAL_S)

    def _attempts_of(self, runs: Sequence[Run]) -> list[Attempt]:
        """Return the attempts at any of the runs, oldest first."""
        attempts = {attempt.id: attempt for run in runs for attempt in self.ledger.attempts_of(run.id)}
        return [attempts[id] for id in sorted(attempts)]

    def _reopen_undone(self, run_ids: Sequence[str]) -> list[str]:
        """Reopen the runs that neither completed nor were ended by the user; return their ids."""
        undone = []
        with self.ledger.transaction():
            for run_id in run_ids:
                run, attempts = self.ledger.get(run_id), self.ledger.attempts_of(run_id)
                if is_undone(run, attempts) and self.ledger.reopen(
                    run_id, "it was not done: going on", even_cancelled=True
                ):
                    undone.append(run_id)
        return undone

    def resume(self, run: Run, *, detach: bool = False, account_timer: bool = True) -> Run:
        """Return the run after another attempt from its last checkpoint, in the minutes that are left.

        detach, account_timer: see `Options`. Raises UserError where that is impossible; see `resumable`.
        """
        plan = self._resumable(run, account_timer=account_timer)
        options = Options(max_minutes=plan.max_minutes, detach=detach, account_timer=account_timer)
        with self._launching(run.submission_id):
            with self.ledger.transaction():
                if not self.ledger.reopen(run.id, f"resumed from {plan.origin}"):
                    raise UserError(f"run {run.id} is {self.ledger.get(run.id).state} by now")
                # The user has taken over; other runs would spend the same minutes again.
                siblings = self.ledger.select(submission=run.submission_id)
                self.ledger.set_goes_on([sibling.id for sibling in siblings], None)
                self._agree(run.id, run.backend, options)
            self._carry_out([run.id], plan.placements, jobs_of([run]), options)
        return self.ledger.get(run.id)

    def go_on(self) -> bool:
        """Resume, detached, the detached runs whose machine EC2 took back, was lost or had a faulty GPU.

        They go on as the submission agreed: from the last checkpoint, in the minutes that are left. What
        cannot go on is reported. Returns whether any still waits.
        """
        is_waiting = False
        for runs in left_runs(self.ledger):
            first = runs[0]
            last, now = self.ledger.attempts_of(first.id)[-1], self.cloud_backends[first.backend].now()
            if is_too_soon(last, now):
                is_waiting = True
                continue
            try:
                self._go_on(runs)
            except (NoCapacity, Throttled, Unreachable) as error:
                is_waiting = True
                self.report(as_warning(f"run {first.id} waits to be resumed: {error.message}"))
            except UserError as error:
                hint = f"To leave it so: fastlaunch cancel {first.id}"
                self.report(as_warning(f"run {first.id} is not resumed: {error.message}. {hint}"))
            if self.stop.by:
                break
        return is_waiting

    def _go_on(self, runs: Sequence[Run]) -> None:
        """Resume the runs that one attempt left, unless another command does so meanwhile."""
        first, run_ids = runs[0], [run.id for run in runs]
        agreed = Options(**self.ledger.goes_on().get(first.id, {}), detach=True)
        attempts = [attempt for attempt in self.ledger.attempts_of(first.id) if attempt.handle]
        why, max_replacements = attempts[-1].reason, agreed.max_replacements
        replaced = [bool(attempt.ending and attempt.ending.is_replaced) for attempt in attempts]
        if replaced[-1] and sum(replaced) > max_replacements:
            raise UserError(f"{why}; --max-replacements {max_replacements} allows no other")
        plan = self._resumable(first, account_timer=agreed.account_timer)
        with self._launching(first.submission_id):
            with self.ledger.transaction():
                # Another command may have resumed or cancelled them before this one got the lock.
                if not self.ledger.goes_on().keys() >= set(run_ids):
                    return
                for run_id in run_ids:
                    self.ledger.reopen(run_id, f"resumed from {plan.origin}")
            self.report(
                f"{', '.join(run_ids)}: {why}: going on from {plan.origin}, with {plan.minutes_left} minutes "
                "left of what was submitted"
            )
            options = replace(agreed, max_minutes=plan.max_minutes)
            self._carry_out(run_ids, plan.placements, jobs_of(runs), options)

    def _resumable(self, run: Run, *, account_timer: bool) -> Resumable:
        """Return how the run would be resumed. Raises UserError's kinds if that is impossible."""
        plan = resumable(run, backends=self.cloud_backends, ledger=self.ledger)
        if plan.placements:
            check_timers(self.settings, plan.placements, account_timer=account_timer)
            attempt = self.ledger.attempts_of(run.id)[-1]
            check_account(attempt, self._backend(attempt).aws.identity())
        return plan

    def _agree(self, run_id: str, backend: str, options: Options) -> None:
        """Note on what terms `go_on` goes on with a run that nobody will follow."""
        if options.detach and backend == "ec2":
            terms = {"account_timer": options.account_timer, "max_replacements": options.max_replacements}
            self.ledger.set_goes_on([run_id], terms)

    @contextmanager
    def _launching(self, submission_id: str) -> Iterator[None]:
        """Hold the lock by which others see that this launcher lives, and show what it does."""
        lock = self.ledger.launcher_lock(submission_id)
        make_folder(lock.parent)
        if locks.is_held(lock):
            self.report(f"waiting for another fastlaunch, which follows runs of {submission_id}")
        with locks.held(lock):
            with self.advice.guard(PROGRESS):
                self.display.__enter__()
            try:
                yield
            finally:
                with self.advice.guard(PROGRESS):
                    self.display.__exit__(None, None, None)

    @contextmanager
    def _settling(self, run_ids: Sequence[str]) -> Iterator[_Leftover]:
        """Settle, at the end, the runs that no attempt holds: nobody would start them."""
        leftover = _Leftover()
        try:
            yield leftover
        except UserError as error:
            leftover.why = error.message
            raise
        finally:
            held = held_runs(self.ledger, self.backends, without=leftover.followed)
            why = f"stopped by {self.stop.by}" if self.stop.by else leftover.why
            # Runs that have ended may have been removed meanwhile.
            for run_id in self.ledger.existing(run_ids) - held:
                settle_run(self.ledger, run_id, why, Ending.STOPPED if self.stop.by else None)

    def _add_rows(self, submission_id: str, submission: Submission) -> list[str]:
        first = next(iter(submission.placements), None)
        run_ids = []
        with self.ledger.transaction():
            if submission.placements:
                self.ledger.set_sites(submission_id, [to_data(site) for site in submission.placements])
            for job in submission.jobs_at(first):
                run_id = self.ledger.new_run_id()
                run_ids.append(run_id)
                backend = first.backend if first else "local"
                # On AWS each attempt has a plan of its own.
                plan = None if first else self.backends[backend].plan({run_id: job})
                directory = plan.request["directory"] if plan else s3_sync.run_folder(self.home, run_id)
                self.ledger.add_run(
                    submission_id,
                    run_id,
                    spec=job.to_json(),
                    plan=to_data(plan) if plan else None,
                    workload=job.workload,
                    recipe=job.label,
                    instance=first.instance.name if first else job.instance,
                    backend=backend,
                    directory=Path(directory),
                )
                self._agree(run_id, backend, submission.options)
        return run_ids

    def _looks(self, submission: Submission, run_ids: Sequence[str]) -> PlannedLooks | None:
        if submission.verdicts is None and submission.elimination is None:
            return None
        return PlannedLooks(
            verdicts=submission.verdicts, elimination=submission.elimination, launch=self, run_ids=run_ids
        )

    def _run_here(self, run_ids: Sequence[str], looks: PlannedLooks | None) -> None:
        """Run the jobs one after another. Skip the repeats of a job that failed."""
        jobs = {run_id: self.ledger.get(run_id).job for run_id in run_ids}
        with self._settling(run_ids):
            for (run_id, job), label in zip(jobs.items(), _labels([*jobs.values()]), strict=True):
                if self.stop.by:
                    return
                self._cancel_unneeded(looks)
                # Another command may have cancelled and removed it while it waited for its turn.
                if not self.ledger.existing([run_id]) or self.ledger.get(run_id).state.is_final:
                    continue
                if run_here(self, run_id, label) in (RunState.FAILED, RunState.LOST):
                    why = f"an earlier run of this {'variant' if job.script else 'recipe'} failed"
                    alike = [id for id, other in jobs.items() if other.without_seed == job.without_seed]
                    for other_id in self.ledger.existing(alike):
                        self.ledger.set_state(other_id, RunState.CANCELLED, why, ending=Ending.EARLIER_FAILED)
            if looks:
                looks.unneeded()

    def _cancel_unneeded(self, looks: PlannedLooks | None) -> set[str]:
        """Cancel the runs that need not begin; return their ids."""
        unneeded = looks.unneeded() if looks else {}
        for run_id, why in unneeded.items():
            self.ledger.set_state(run_id, RunState.CANCELLED, why, ending=Ending.NOT_NEEDED)
        return {*unneeded}

    def _carry_out(
        self,
        run_ids: Sequence[str],
        sites: Sequence[Site],
        jobs_at: Callable[[Site], Mapping[str, Job]],
        options: Options,
        *,
        looks: PlannedLooks | None = None,
        under_way: Attempt | None = None,
    ) -> None:
        """Start the runs, and follow them unless they are detached. The caller holds the launcher's lock.

        On AWS start attempts until no run is left that another one could go on with. All share the minutes of
        the options, and so the ceiling.

        run_ids: just added to the ledger, or reopened. sites: on AWS, in the order to try; empty on this
        machine. jobs_at: returns the jobs at a site, by run id. looks: leaves out runs that are not needed.
        under_way: an attempt at the runs that lives, to be followed first.
        """
        if not sites:
            self._run_here(run_ids, looks)
            return
        if under_way is None and looks and looks.elimination:
            unneeded = self._cancel_unneeded(looks)
            run_ids = [run_id for run_id in run_ids if run_id not in unneeded]
        remaining, provisioner = tuple(run_ids), Provisioner(launch=self)
        result, num_replaced = None, 0
        with self._settling(run_ids) as leftover:
            while remaining:
                earlier = self.ledger.attempts_of(remaining[0])
                used = minutes_used(earlier, self.cloud_backends[sites[0].backend].now())
                if under_way is None and used and options.max_minutes - used < MIN_MINUTES:
                    minutes = f"{max(0, options.max_minutes - used):.0f} minutes"
                    ended = result.reason if result else earlier[-1].reason
                    leftover.why = f"{ended}, and {minutes} are too few"
                    self.report(f"{leftover.why}: not resumed")
                    return
                if under_way:
                    attempt, site, under_way = under_way, _site_of(under_way, sites), None
                else:
                    sites = self._sites_to_go_on(sites, earlier)
                    later = self._later_start(sites, options)
                    if later is None and not self._wait_for_block(sites):
                        return
                    started = provisioner.place(
                        sites,
                        lambda at, ids=remaining: {run_id: jobs_at(at)[run_id] for run_id in ids},  # type: ignore[misc]
                        max_minutes=int(options.max_minutes - used),
                        root=root_of(earlier),
                        later=later,
                    )
                    if started is None:
                        return
                    attempt, site = started
                    if waits(attempt):
                        self._report_waiting(attempt)
                        return
                    timer = self._protect(attempt, account_timer=options.account_timer)
                    # If the user asked to stop meanwhile, it is followed, and stopped.
                    if options.detach and not self.stop.by:
                        self._report_detached(attempt, timer)
                        return
                names = _labels([self.ledger.get(run_id).job for run_id in run_ids])
                labels = dict(zip(run_ids, names, strict=True))
                shown = AttemptDisplay(launch=self, attempt=attempt, labels=labels)
                result = AttemptMonitor(launch=self, attempt=attempt, shown=shown, looks=looks).follow()
                if looks:
                    looks.unneeded()
                remaining = result.left
                is_replaced = result.ending is not None and result.ending.is_replaced
                leftover.followed.add(attempt.id)
                if remaining and result.try_next:
                    provisioner.refuse(site, NoCapacity(result.reason or "it got no machines"))
                elif remaining and is_replaced and num_replaced == options.max_replacements:
                    most = f"--max-replacements {options.max_replacements}"
                    leftover.why = f"{result.reason}; {most} allows no other"
                    self.report(f"{leftover.why}: not resumed")
                    return
                elif remaining:
                    num_replaced += is_replaced
                    # From the first site again: there may be capacity by now.
                    provisioner = Provisioner(launch=self)
                    self.report(f"{result.reason}: going on, on another, from the last checkpoint")

    def _later_start(self, sites: Sequence[Site], options: Options) -> LaterStart | None:
        """Return how schedules start it, where nobody waits for its block."""
        if not options.detach:
            return None
        now = self.cloud_backends[sites[0].backend].now()
        return later_start(self.settings, sites, account_timer=options.account_timer, now=now)

    def _wait_for_block(self, sites: Sequence[Site]) -> bool:
        """Wait until the sites' capacity block has begun; return False if the user stops that."""
        site, backend = sites[0], self.cloud_backends[sites[0].backend]
        block = site.block
        begins_at = block.begins_after(backend.now()) if block else None
        if block is None or begins_at is None:
            return True
        self.display.wait(f"waiting here until {block.reservation} begins, {utc_minute(begins_at)}")
        while not self.stop.by and not self._has_begun(site, block, begins_at):
            backend.sleep(_BLOCK_PAUSE_S)
        self.display.finish("nothing was started" if self.stop.by else "it has begun")
        return not self.stop.by

    def _has_begun(self, site: Site, block: CapacityBlock, begins_at: datetime) -> bool:
        """Return whether EC2 takes machines in the block, or would have for some time."""
        backend = self.cloud_backends[site.backend]
        if backend.now() < begins_at:
            return False
        with suppress(CloudRefused):
            seen = backend.aws.reservation(site.region, block.reservation)
            if seen is not None and seen.state == "active":
                return True
        return backend.now() >= begins_at + _LATE_BLOCK

    def _sites_to_go_on(self, sites: Sequence[Site], attempts: Sequence[Attempt]) -> Sequence[Site]:
        """Return all sites; once a run has begun, only those with its checkpoints and instance type."""
        last = next((attempt for attempt in reversed(attempts) if attempt.handle), None)
        if last is None or not has_begun(last, self.settings.home):
            return sites
        return [site for site in sites if can_go_on(last, site)]

    def _backend(self, attempt: Attempt) -> CloudBackend:
        return self.cloud_backends[attempt.backend]

    def _protect(self, attempt: Attempt, *, account_timer: bool) -> str | None:
        """Make the timer in the account that ends the attempt's machines; return its state in words.

        Report what went wrong. The next command that looks tries again.
        """
        backend, timer = self._backend(attempt), None
        role = self.settings.region_settings(attempt.region or "").scheduler_role
        try:
            if not account_timer:
                decline(self.ledger, attempt)
            elif role and not self.stop.by and needs_timer(attempt):
                timer = arm(self.ledger, backend.aws, attempt, role=role, now=backend.now())
                if needs_timer(self.ledger.attempt(attempt.id)):
                    self.report(as_warning(timer))
        except UserError as error:
            timer = f"no timer in the account was noted ({error.message})"
        except KeyboardInterrupt:
            # The second request to stop: the attempt is followed to its end; a third signal ends it at once.
            timer = "a timer in the account may have been made"
        return timer

    def _report_waiting(self, attempt: Attempt) -> None:
        """Report what starts and ends an attempt in a block that is to come, and what does not yet."""
        backend, first, at = self._backend(attempt), attempt.run_ids[0], utc_minute(starts_at(attempt))
        explain_wait(self.ledger, attempt)
        self.report(
            f"a schedule in the account starts {machines_of(attempt)} in {attempt.region} at {at} "
            f"({(attempt.schedule or {})['name']}). Nothing has to run here: "
            f"{ends_by_itself(attempt, backend)}, and EC2 ends all that is in the block before its end. The "
            "first `fastlaunch status` after the start makes a timer in the account besides. To follow it "
            f"then: fastlaunch logs -f {first}. To give it up: fastlaunch cancel {first}"
        )

    def _report_detached(self, attempt: Attempt, timer: str | None) -> None:
        """Report what ends an attempt that nobody follows. timer: see `_protect`."""
        backend, first = self._backend(attempt), attempt.run_ids[0]
        protection = "; ".join(filter(None, [ends_by_itself(attempt, backend), timer]))
        self.report(
            f"started {machine_of(attempt, backend)} ({machines_of(attempt)}). Nobody follows it: "
            f"{protection}. To follow it: fastlaunch logs -f {first}. To stop it: fastlaunch cancel {first}"
        )


@contextmanager
def open_launcher(world: World, backends: Mapping[str, Backend | CloudBackend]) -> Iterator[Launcher]:
    """Yield a launcher over the open ledger. Its `stop` receives signals from now on."""
    with open_ledger(world.settings, clock=world.now) as ledger, StopRequest() as stop:
        yield Launcher(
            backends=backends,
            ledger=ledger,
            settings=world.settings,
            display=make_display(sys.stderr, world.monotonic_s),
            stop=stop,
            sleep=world.sleep,
        )


def _site_of(attempt: Attempt, sites: Sequence[Site]) -> Site:
    """Return the site that the attempt was started at."""
    where = (attempt.instance, attempt.region)
    alike = [site for site in sites if (site.instance.name, site.region) == where] or sites
    return next((site for site in alike if site.zone == attempt.zone), alike[0])


def _labels(jobs: Sequence[Job]) -> list[str]:
    """`[1/2] te-fp8`: how the jobs are shown, numbered where there are several."""
    names = names_apart(jobs)
    if len(names) == 1:
        return names
    return [f"[{number}/{len(names)}] {name}" for number, name in enumerate(names, start=1)]

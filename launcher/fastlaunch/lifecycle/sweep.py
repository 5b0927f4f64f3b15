"""Start a planned sweep and carry it out: a submission per instance type, within one budget.

The ledger keeps the progress: the same sweep, carried out again, completes the parts that have started and
starts only the others.
"""

import json
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from threading import Thread
from typing import Any

from fastlaunch.backends.s3_sync import record_paths
from fastlaunch.core import locks
from fastlaunch.core.errors import EXIT_DONE, UserError
from fastlaunch.core.home import make_folder
from fastlaunch.core.plan import RunState
from fastlaunch.core.terminal import as_warning, report_line
from fastlaunch.core.units import counted, duration_text
from fastlaunch.jobs.job import Job
from fastlaunch.ledger.attempt_cost import total_cost
from fastlaunch.ledger.ids import is_batch_search
from fastlaunch.ledger.ledger import Ledger, Run, open_ledger
from fastlaunch.ledger.rows import Sweep as StoredSweep
from fastlaunch.ledger.rows import dumps
from fastlaunch.lifecycle.budgets import check_budgets, others_of
from fastlaunch.lifecycle.display import PlainLines
from fastlaunch.lifecycle.launcher import Launcher, Submission
from fastlaunch.lifecycle.local import LOOK_INTERVAL_S
from fastlaunch.lifecycle.resume import is_undone
from fastlaunch.lifecycle.submit import report_edits
from fastlaunch.lifecycle.sweep_plan import Announce, Part, SweepPlan, make_parts, plan_lines
from fastlaunch.lifecycle.until_best import UntilBest, until_best
from fastlaunch.lifecycle.world import PROGRESS, StopRequest, World
from fastlaunch.measure.summary import RunSummary


class OverBudget(UserError):
    """A part does not fit into the rest of --max-cost. The user set that limit, so it is not a failure."""

    exit_code = EXIT_DONE


@dataclass(kw_only=True)
class Sweep:
    """Carries out its parts in order, as many in parallel as are allowed and fit into the budget together."""

    id: str
    launcher: Launcher
    command: str
    #: In order, with the searches for the batch size first.
    parts: Sequence[Part]
    #: For all parts together.
    max_cost_usd: float | None = None
    num_parallel: int = 1
    #: Opens a launcher with a separate ledger connection, for a part that runs in a parallel thread.
    open_beside: Callable[[str], AbstractContextManager[Launcher]] | None = None
    #: None to measure all parts.
    until_best: UntilBest | None = None
    #: By part that was not started or not completed, the reason.
    left_out: dict[str, UserError] = field(default_factory=dict)
    monotonic_s: Callable[[], float] = time.monotonic
    _threads: dict[str, Thread] = field(default_factory=dict)
    _errors: list[BaseException] = field(default_factory=list)

    def carry_out(self) -> None:
        """Carry out the parts that are left. Raises UserError if no batch size is found."""
        searches = [part for part in self.parts if is_batch_search(part.name)]
        self._carry_out_all(searches, None)
        if self.launcher.stop.by:
            return
        batch_size = self._common_batch_size(searches) if searches else None
        self._carry_out_all([part for part in self.parts if part not in searches], batch_size)

    def _carry_out_all(self, parts: Sequence[Part], batch_size: int | None) -> None:
        # When a sweep resumes, the parts that were done before do not show its pace.
        began_s = None if any(self._runs(part.name) for part in parts) else self.monotonic_s()
        try:
            for number, part in enumerate(self._in_turn(parts)):
                while self._threads and (len(self._threads) == self.num_parallel or not self._fits(part)):
                    self._wait_for_one()
                if self.launcher.stop.by or self._errors:
                    break
                with self.launcher.advice.guard(PROGRESS):
                    self._report_pace(part, number, len(parts), began_s)
                self._start(part, batch_size)
        finally:
            while self._threads:
                self._wait_for_one()
        if self._errors:
            raise self._errors[0]

    def _report_pace(self, part: Part, number: int, num_parts: int, began_s: float | None) -> None:
        """Report which part begins, and how long the rest takes at the pace of the parts before."""
        num_done, left = number - len(self._threads), ""
        if num_done and began_s is not None:
            left_s = (self.monotonic_s() - began_s) / num_done * (num_parts - num_done)
            left = f", about {duration_text(left_s)} left at this pace"
        if num_parts > 1:
            self.launcher.report(f"{part.name}: {number + 1} of {num_parts}{left}")

    def _in_turn(self, parts: Sequence[Part]) -> Iterator[Part]:
        """Yield the parts, first those that an earlier launcher left under way: they are committed."""
        left = sorted(parts, key=lambda part: not self._is_under_way(part.name))
        while left:
            at, names = 0, [part.name for part in left]
            if self.until_best and not is_batch_search(names[0]) and not self._is_under_way(names[0]):
                with self.launcher.advice.guard("the choice of the next part"):
                    at = names.index(self.until_best.next_part(self._cells(self.launcher.ledger), names))
            yield left.pop(at)

    def _cells(self, ledger: Ledger) -> list[Run]:
        return [run for runs in sweep_runs(ledger, self.id).values() for run in runs]

    def _wait_for_one(self) -> None:
        while all(thread.is_alive() for thread in self._threads.values()):
            self.launcher.sleep(LOOK_INTERVAL_S)
        self._threads = {name: thread for name, thread in self._threads.items() if thread.is_alive()}

    def _start(self, part: Part, batch_size: int | None) -> None:
        try:
            if not self._fits(part):
                raise OverBudget(
                    f"not started: it may cost ${self._needed_usd(part):,.2f}, and of --max-cost "
                    f"${max(0.0, self.left_usd or 0.0):,.2f} are left"
                )
            submission = part.submission(batch_size)
        except UserError as error:
            self._leave_out(part.name, error)
            return
        if self.open_beside is None:
            self._carry_out(self.launcher, part.name, submission)
            return
        thread = Thread(target=self._carry_out_beside, args=(part.name, submission), daemon=True)
        self._threads[part.name] = thread
        thread.start()
        # Keep the parts in order in the ledger, since the very first row is the baseline.
        while thread.is_alive() and not self._runs(part.name):
            self.launcher.sleep(LOOK_INTERVAL_S)

    def _carry_out_beside(self, name: str, submission: Submission) -> None:
        assert self.open_beside is not None
        try:
            with self.open_beside(name) as launcher:
                self._carry_out(launcher, name, submission)
        except BaseException as error:
            self._errors.append(error)

    def _carry_out(self, launcher: Launcher, name: str, submission: Submission) -> None:
        started = launcher.ledger.parts_of(self.id).get(name)
        if self.until_best and not is_batch_search(name):
            submission = replace(submission, verdicts=None, elimination=partial(self._eliminate, launcher))
        try:
            if started is None:
                launcher.submit(submission, command=self.command, sweep=self.id, part=name)
            else:
                launcher.complete(started, submission)
        except UserError as error:
            self._leave_out(name, error)

    def _eliminate(self, launcher: Launcher, runs: Sequence[Run]) -> Mapping[str, str]:
        """Return which of a part's runs need not begin, judged by all parts. runs: as recorded by now."""
        assert self.until_best is not None
        ids = {run.id for run in runs}
        others = [run for run in self._cells(launcher.ledger) if run.id not in ids]
        unneeded = self.until_best.elimination([*others, *runs])
        return {id: why for id, why in unneeded.items() if id in ids}

    def _leave_out(self, name: str, error: UserError) -> None:
        self.left_out[name] = error
        self.launcher.report(f"{name}: {error.message}")

    @property
    def left_usd(self) -> float | None:
        """The rest of --max-cost; None without it.

        A part under way counts with its ceiling, any other started part with its cost.
        """
        if self.max_cost_usd is None:
            return None
        return self.max_cost_usd - sum(map(self._committed_usd, self.parts))

    def _fits(self, part: Part) -> bool:
        """Return whether the part is done already, or fits into the rest of the budget."""
        left_usd, ledger = self.left_usd, self.launcher.ledger
        if left_usd is None:
            return True
        runs = self._runs(part.name)
        has_work = not runs or any(is_undone(run, ledger.attempts_of(run.id)) for run in runs)
        # Compare in cents, as both are printed.
        return not has_work or round(self._needed_usd(part), 2) <= round(max(0.0, left_usd), 2)

    def _needed_usd(self, part: Part) -> float:
        """Return what the part may cost in addition to what it takes of the budget now."""
        return part.ceiling_usd - self._committed_usd(part)

    def _committed_usd(self, part: Part) -> float:
        ledger, backends = self.launcher.ledger, self.launcher.cloud_backends
        is_under_way = self._is_under_way(part.name)
        attempts = {
            attempt.id: attempt for run in self._runs(part.name) for attempt in ledger.attempts_of(run.id)
        }
        if not attempts:
            return part.ceiling_usd if is_under_way else 0.0
        first = next(iter(attempts.values()))
        usd = total_cost(attempts.values(), backends[first.backend].now()).usd
        if usd is None:
            return part.ceiling_usd
        return max(usd, part.ceiling_usd) if is_under_way else usd

    def _is_under_way(self, name: str) -> bool:
        runs = self._runs(name)
        last = [attempt for run in runs for attempt in self.launcher.ledger.attempts_of(run.id)[-1:]]
        return (
            name in self._threads
            or any(not run.state.is_final for run in runs)
            or any(attempt.ended_at is None for attempt in last)
        )

    def _runs(self, name: str) -> list[Run]:
        submission_id = self.launcher.ledger.parts_of(self.id).get(name)
        return self.launcher.ledger.select(submission=submission_id) if submission_id else []

    def _common_batch_size(self, searches: Sequence[Part]) -> int:
        """Return the largest batch size that fits in all searches."""
        sizes = []
        for part in searches:
            runs = self._runs(part.name)
            done = [run.summary for run in runs if run.state is RunState.COMPLETED and run.summary]
            size = done[0].setup.batch_size_per_gpu if done else None
            if size is None:
                error = self.left_out.get(part.name)
                why = f"run {runs[-1].id} is {runs[-1].state}: {runs[-1].reason}" if runs else "nothing ran"
                why = error.message if error else why
                raise UserError(f"no batch size was found: {why}", "give one: --batch-size 64")
            sizes.append(size)
        return min(sizes)


def stored_sweep(world: World, name: str) -> StoredSweep:
    """Return the sweep to continue. Raises UserError if there is none, or it belongs to another folder."""
    with open_ledger(world.settings, clock=world.now) as ledger:
        stored = ledger.sweep(name or None)
    if Path.cwd() != stored.directory:
        raise UserError(f"{stored.id} was started in {stored.directory}", f"type: cd {stored.directory}")
    return stored


def under_way(ledger: Ledger, given: Mapping[str, Any]) -> str | None:
    """Return a sentence on a sweep with the same options if some of its runs have not ended."""
    arguments = json.loads(dumps(given))
    for sweep_id, num_left in ledger.open_sweeps().items():
        if ledger.sweep(sweep_id).arguments == arguments:
            return (
                f"this is another sweep than {sweep_id}, typed alike, of which {counted(num_left, 'run')} "
                f"may still cost. To go on with that one: fastlaunch sweep --resume {sweep_id}"
            )
    return None


def carry_out(
    launcher: Launcher,
    world: World,
    plan: SweepPlan,
    stored: StoredSweep | None,
    *,
    given: dict[str, Any],
    yes: bool,
    announce: Announce | None,
) -> Sweep:
    """Show the plan, ask, and carry out the sweep, or what is left of a stored one. given: its options."""
    ledger = launcher.ledger
    # Parts in a queue cost nothing until it gives them their turn.
    num_parallel = given.get("parallel") or (len(plan.parts) if plan.is_queued else 1)
    started = ledger.parts_of(stored.id) if stored else {}
    if announce is not None:
        announce(plan)
    for line in () if announce else plan_lines(plan):
        world.report(line)
    for line in plan.warnings:
        world.report(as_warning(line))
    if stored is None and (alike := under_way(ledger, given)):
        world.report(as_warning(alike))
    if stored:
        world.report(f"going on with {stored.id}; started: {', '.join(started) or 'nothing'}")
        for submission in started.values():
            report_edits(world, ledger.select(submission=submission), plan.scripts)
    parts, refused = make_parts(plan, started, world)
    for name, error in refused.items():
        world.report(f"left out: {name}: {error.message}")
    if new_usd := [part.ceiling_usd for part in parts if part.ceiling_usd and part.name not in started]:
        # A part is not started for which a budget of the config file has no room; the cheapest has to fit.
        check_budgets(launcher, min(new_usd), others=others_of(launcher))
    if plan.ceilings:
        world.confirm("Go on?" if stored else "Start it?", yes=yes)
    sweep_id = stored.id if stored else ledger.add_sweep(given, Path.cwd())
    world.report(f"{sweep_id}: to go on with it if it is stopped: fastlaunch sweep --resume")
    lock = ledger.launcher_lock(sweep_id)
    if locks.is_held(lock):
        raise UserError(f"another fastlaunch is running {sweep_id}", "look: fastlaunch status")
    make_folder(lock.parent)
    carried_out = Sweep(
        id=sweep_id,
        launcher=launcher,
        command=shlex.join(["fastlaunch", *world.argv]),
        parts=parts,
        max_cost_usd=plan.max_cost_usd,
        num_parallel=num_parallel,
        open_beside=partial(_open_beside, world, launcher.stop) if num_parallel > 1 else None,
        until_best=until_best(plan, world) if plan.is_until_best else None,
        left_out=refused,
    )
    with locks.held(lock):
        carried_out.carry_out()
    return carried_out


@contextmanager
def _open_beside(world: World, stop: StopRequest, name: str) -> Iterator[Launcher]:
    """Yield a launcher with its own ledger connection, whose lines begin with its part's name."""
    beside = replace(world, connect=lambda: world.aws, sleep=stop.sleeping(world.sleep))
    with open_ledger(world.settings, clock=world.now) as ledger:
        yield Launcher(
            backends=beside.cloud_backends,
            ledger=ledger,
            settings=world.settings,
            display=PlainLines(clock=world.monotonic_s, prefix=f"{name}: "),
            stop=stop,
            report=lambda line: report_line(f"{name}: {line}"),
        )


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The savings by stopping early, compared to all planned runs."""

    num_runs: int
    #: Machine time, from measured runs like those saved; None if one has no such run.
    machine_s: float | None
    #: At the billed hourly price; None if it is unknown, or nothing is billed.
    usd: float | None


def saved(ledger: Ledger, runs: Sequence[Run]) -> Saved:
    """Return the time and cost of the runs that were not needed. runs: of the sweep."""
    rows: dict[tuple[str, Job], list[Run]] = {}
    for run in runs:
        rows.setdefault((run.submission_id, run.job.without_seed), []).append(run)
    num_runs, machine_s, usd = 0, 0.0, 0.0
    is_timed, is_priced = True, True
    for like in rows.values():
        # A run under way when its row was settled was completed, so it saved nothing.
        unmade = [run for run in like if run.is_unneeded and not record_paths(ledger.path.parent, run.id)]
        if not unmade:
            continue
        times_s = [taken for run in like if run.summary and (taken := duration_s(run.summary))]
        num_runs += len(unmade)
        if not times_s:
            is_timed = False
            continue
        seconds = len(unmade) * fmean(times_s) * like[0].job.num_nodes
        machine_s += seconds
        rates = (attempt.billing.usd_per_hour for run in like for attempt in ledger.attempts_of(run.id))
        rate = next((rate for rate in rates if rate is not None), None)
        is_priced = is_priced and rate is not None
        usd += seconds / 3600 * (rate or 0.0)
    is_timed = is_timed and num_runs > 0
    return Saved(
        num_runs=num_runs,
        machine_s=machine_s if is_timed else None,
        usd=usd if is_timed and is_priced else None,
    )


def duration_s(summary: RunSummary) -> float | None:
    """Return a run's time on its machine: build, compile, warm-up and steps, or a script's wall time."""
    if summary.figures.total_time_s is not None:
        return summary.figures.total_time_s
    timing, startup = summary.timing, summary.startup
    if timing.step_time_s is None:
        return None
    num_timed = max(0, summary.num_steps - (timing.num_warmup_steps or 0))
    before_s = (
        (startup.fetch_s or 0.0)
        + (startup.build_s or 0.0)
        + (startup.compile_s or 0.0)
        + (timing.warmup_s or 0.0)
    )
    return before_s + num_timed * timing.step_time_s.value


def sweep_runs(ledger: Ledger, sweep_id: str) -> dict[str, list[Run]]:
    """Return the runs of the sweep's cells, by part."""
    return {
        name: ledger.select(submission=submission_id)
        for name, submission_id in ledger.parts_of(sweep_id).items()
        if not is_batch_search(name)
    }


def states(runs: Sequence[Run]) -> Mapping[str, int]:
    """Return the number of runs by state, with `not needed` for runs that a look left out."""
    return Counter("not needed" if run.is_unneeded else str(run.state) for run in runs)

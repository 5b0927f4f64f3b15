"""Carries out a sweep: a submission per instance type, one after another, within one budget.

What was done stands in the ledger: the same sweep, carried out again, starts only what has not started, and
completes what has.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from fastlaunch.backends.s3_sync import record_paths
from fastlaunch.core.errors import EXIT_DONE, UserError
from fastlaunch.core.plan import RunState
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.ledger.attempt_cost import total_cost
from fastlaunch.ledger.ids import BATCH_SEARCH
from fastlaunch.ledger.ledger import Ledger, Run
from fastlaunch.measure.summary import RunSummary
from fastlaunch.runs.launcher import Launcher, Submission


class OverBudget(UserError):
    """A part does not fit into what is left of --max-cost: what the user asked for, and no failure."""

    exit_code = EXIT_DONE


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a sweep does on one instance type, or on this machine; or the search for its batch size."""

    name: str
    #: 0 on this machine.
    ceiling_usd: float = 0.0
    #: Makes the submission, with the batch size that was searched for, when its turn has come; of one that
    #: has started, only how it is followed is read. None for none.
    submission: Callable[[int | None], Submission]


@dataclass(kw_only=True)
class Sweep:
    """Carries out its parts, in order."""

    id: str
    launcher: Launcher
    command: str
    #: In order, the search for the batch size first.
    parts: Sequence[Part]
    #: Of all parts together.
    max_cost_usd: float | None = None
    #: Parts that were not started, or not completed, and why.
    left_out: dict[str, UserError] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)

    def carry_out(self) -> None:
        """Carry out what is left. Raises UserError where no batch size is found."""
        batch_size, ledger = None, self.launcher.ledger
        for part in self.parts:
            if self.launcher.stop.by:
                return
            self._carry_out(part, batch_size)
            if part.name != BATCH_SEARCH or self.launcher.stop.by:
                continue
            batch_size = found_batch(ledger, self.id)
            if batch_size is None:
                error = self.left_out.get(BATCH_SEARCH)
                why = error.message if error else _why(ledger, self.id)
                raise UserError(f"no batch size was found: {why}", "give one: --batch-size 64")

    def _carry_out(self, part: Part, batch_size: int | None) -> None:
        launcher, left_usd = self.launcher, self.left_usd
        started = launcher.ledger.parts_of(self.id).get(part.name)
        try:
            if started is not None:
                launcher.complete(started, part.submission(batch_size))
            elif left_usd is not None and part.ceiling_usd > left_usd:
                raise OverBudget(
                    f"not started: it may cost ${part.ceiling_usd:,.2f}, and of --max-cost "
                    f"${max(0.0, left_usd):,.2f} are left"
                )
            else:
                submission = part.submission(batch_size)
                launcher.submit(submission, command=self.command, sweep=self.id, part=part.name)
        except UserError as error:
            self.left_out[part.name] = error
            launcher.report(f"{part.name}: {error.message}")
        self._done.add(part.name)

    @property
    def left_usd(self) -> float | None:
        """What is left of --max-cost for parts that have not started; None without it.

        A part that is done takes what it has cost, any other that has started its ceiling.
        """
        if self.max_cost_usd is None:
            return None
        ceilings = {part.name: part.ceiling_usd for part in self.parts}
        left_usd = self.max_cost_usd
        for name, submission_id in self.launcher.ledger.parts_of(self.id).items():
            left_usd -= self._committed_usd(name, submission_id, ceilings.get(name, 0.0))
        return left_usd

    def _committed_usd(self, name: str, submission_id: str, ceiling_usd: float) -> float:
        ledger, backends = self.launcher.ledger, self.launcher.cloud_backends
        runs = ledger.select(submission=submission_id)
        if runs[0].backend not in backends:
            return 0.0
        attempts = {each.id: each for run in runs for each in ledger.attempts_of(run.id)}
        cost = total_cost(attempts.values(), backends[runs[0].backend].now())
        is_done = name in self._done and all(run.state.is_final for run in runs)
        if cost.usd is None:
            return ceiling_usd
        return cost.usd if is_done else max(cost.usd, ceiling_usd)


def found_batch(ledger: Ledger, sweep_id: str) -> int | None:
    """Return the batch size that the sweep's search has found; None as long as it has not."""
    for run in _search_runs(ledger, sweep_id):
        if run.state is RunState.COMPLETED and run.summary:
            return run.summary.setup.batch_size_per_gpu
    return None


def _why(ledger: Ledger, sweep_id: str) -> str:
    runs = _search_runs(ledger, sweep_id)
    return f"run {runs[-1].id} is {runs[-1].state}: {runs[-1].reason}" if runs else "nothing was started"


def _search_runs(ledger: Ledger, sweep_id: str) -> list[Run]:
    submission_id = ledger.parts_of(sweep_id).get(BATCH_SEARCH)
    return ledger.select(submission=submission_id) if submission_id else []


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What stopping early saved against all runs that were planned."""

    num_runs: int
    #: Of machines, by the measured times of runs like them; None if no run like one of them was measured.
    machine_s: float | None
    #: At what an hour was billed; None where that is not known, or nothing is billed.
    usd: float | None


def saved(ledger: Ledger, runs: Sequence[Run]) -> Saved:
    """Return what the runs that were not needed would have taken. runs: of the sweep."""
    rows: dict[tuple[str, JobSpec], list[Run]] = {}
    for run in runs:
        key = (run.submission_id, JobSpec.from_json(run.spec or {}).without_seed)
        rows.setdefault(key, []).append(run)
    num_runs, machine_s, usd = 0, 0.0, 0.0
    is_timed, is_priced = True, True
    for like in rows.values():
        # One that was under way when its row was settled was made all the same.
        unmade = [run for run in like if run.is_unneeded and not record_paths(ledger.path.parent, run.id)]
        if not unmade:
            continue
        times_s = [taken for run in like if run.summary and (taken := duration_s(run.summary))]
        num_runs += len(unmade)
        if not times_s:
            is_timed = False
            continue
        spec = JobSpec.from_json(like[0].spec or {})
        seconds = len(unmade) * fmean(times_s) * spec.num_nodes
        machine_s += seconds
        rate = _usd_per_hour(ledger, like)
        is_priced = is_priced and rate is not None
        usd += seconds / 3600 * (rate or 0.0)
    is_known = is_timed and num_runs > 0
    return Saved(
        num_runs=num_runs,
        machine_s=machine_s if is_known else None,
        usd=usd if is_known and is_priced else None,
    )


def duration_s(summary: RunSummary) -> float | None:
    """Return what a run took of its machine: build, compile, warm-up and steps, or a script's wall time."""
    if summary.figures.total_time_s is not None:
        return summary.figures.total_time_s
    timing, startup = summary.timing, summary.startup
    if timing.step_time_s is None:
        return None
    num_timed = max(0, summary.num_steps - (timing.num_warmup_steps or 0))
    before_s = (startup.build_s or 0.0) + (startup.compile_s or 0.0) + (timing.warmup_s or 0.0)
    return before_s + num_timed * timing.step_time_s.value


def _usd_per_hour(ledger: Ledger, runs: Sequence[Run]) -> float | None:
    rates = (each.billing.usd_per_hour for run in runs for each in ledger.attempts_of(run.id))
    return next((rate for rate in rates if rate is not None), None)


def sweep_runs(ledger: Ledger, sweep_id: str) -> dict[str, list[Run]]:
    """Return the runs of the sweep's cells, by part."""
    return {
        name: ledger.select(submission=submission_id)
        for name, submission_id in ledger.parts_of(sweep_id).items()
        if name != BATCH_SEARCH
    }


def states(runs: Sequence[Run]) -> Mapping[str, int]:
    """Return how many of the runs are in which state, `not needed` for those that a look left out."""
    names = ["not needed" if run.is_unneeded else str(run.state) for run in runs]
    return {name: names.count(name) for name in dict.fromkeys(names)}

"""Ends a submission's rows as soon as their verdicts are settled: `submit --until-resolved`.

Or, in a sweep, as soon as they cannot be the best: `sweep --until-best`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from fastlaunch.backends.s3_sync import record_paths
from fastlaunch.core.ownership import FIRST_LOOK
from fastlaunch.core.plan import RunState
from fastlaunch.core.units import duration_text
from fastlaunch.jobs.job import Job, names_apart
from fastlaunch.jobs.options import Options
from fastlaunch.ledger.ledger import Run, open_ledger
from fastlaunch.lifecycle.collect import summarize_run
from fastlaunch.lifecycle.world import LaunchContext, World
from fastlaunch.measure.outcome import outcome_of, read_records
from fastlaunch.measure.record_files import RecordReader
from fastlaunch.measure.summary import Interval


@dataclass(frozen=True, kw_only=True)
class RowVerdict:
    """How a row stands to its baseline."""

    kind: str
    ratio: Interval | None = None  # of dollars, or of speed, with its interval if there is one
    is_baseline: bool = False
    is_open: bool = False  # more rounds may change it
    batch: tuple[int | None, int | None] | None = None  # of rows with one baseline: samples, tokens of each

    def __str__(self) -> str:
        """`1.15x (1.14 to 1.16), better`"""
        if self.ratio is None:
            return self.kind
        limits = self.ratio.range_text("{:.3g}".format)
        return f"{self.ratio.value:.3g}x{f' ({limits})' if limits else ''}, {self.kind}"


NOT_NEEDED = "not needed: "
#: Returns the verdict on each run's row, by the id of the run.
Verdicts = Callable[[Sequence[Run]], Mapping[str, RowVerdict]]
#: Returns why a run need not begin any more, by the id of the run. Some of the runs have ended.
Elimination = Callable[[Sequence[Run]], Mapping[str, str]]


def verdicts_of(world: World, options: Options) -> Verdicts | None:
    """Return a function that judges a submission's rows after each round; None if all rounds are run."""
    from fastlaunch.analysis.compare import compare
    from fastlaunch.analysis.pooling import newest_version
    from fastlaunch.analysis.pricing import PriceRequest
    from fastlaunch.analysis.statistics import UNRESOLVED
    from fastlaunch.analysis.verdicts import BASELINE, NO_INTERVAL
    from fastlaunch.lifecycle.evidence import measured_run

    if not options.until_resolved:
        return None
    settings = world.settings

    def verdicts(runs: Sequence[Run]) -> dict[str, RowVerdict]:
        if options.add_to:
            with open_ledger(settings, clock=world.now) as ledger:
                runs = [*ledger.fetch_comparable(submission=options.add_to), *runs]
        comparison = compare(
            [measured for run in runs if (measured := measured_run(run, settings.region))],
            catalogue=world.catalogue,
            prices=PriceRequest(today=world.today, region=settings.region),
        )
        # If the script was edited meanwhile, judge its newest version.
        now = {
            name: newest_version([run for row in rows for run in row.runs])
            for name, rows in comparison.by_workload.items()
        }
        judged = [
            (row, row.verdict.in_own_batch)
            for row in comparison.rows
            if row.setup.version == now[row.setup.workload]
        ]
        return {
            id: RowVerdict(
                kind=verdict.kind,
                ratio=verdict.ratio or verdict.speed_ratio,
                is_baseline=verdict.kind == BASELINE,
                is_open=verdict.kind in (UNRESOLVED, NO_INTERVAL),
                batch=(row.setup.global_batch, row.setup.sequence_length),
            )
            for row, verdict in judged
            for id in row.run_ids
        }

    return verdicts


@dataclass(kw_only=True)
class PlannedLooks:
    """Looks at a submission after each of its rounds from the third on; by `elimination` after each run.

    If all rows but one have failed, the first look is after the first round.
    """

    #: None with `elimination`.
    verdicts: Verdicts | None
    #: Instead of verdicts.
    elimination: Elimination | None = None
    launch: LaunchContext
    run_ids: Sequence[str]
    #: Whether every run has ended or is not needed.
    are_all_settled: bool = False
    _num_rounds: int = 0
    _is_pace_reported: bool = False
    _num_ended: int = -1
    _why: dict[str, str] = field(default_factory=dict)
    _ended: dict[str, Run] = field(default_factory=dict)
    #: By run on AWS whose records show no end yet, what reads them on.
    _readers: dict[str, dict[Path, RecordReader]] = field(default_factory=dict)

    def unneeded(self) -> dict[str, str]:
        """Return the reason for each run that has not ended and is not needed any more, by run id.

        Empty if that cannot be decided.
        """
        known = self.launch.ledger.existing(self.run_ids)
        runs = [self.launch.ledger.get(id) for id in self.run_ids if id in known]
        self.are_all_settled = False
        with self.launch.advice.guard("a look at what is settled"):
            recorded = list(map(self._as_recorded, runs))
            if self.elimination is not None:
                self._eliminate(recorded, self.elimination)
            else:
                self._look_at_rounds(recorded)
            open_runs = [run.id for run in recorded if not run.state.is_final]
            self.are_all_settled = self._why.keys() >= set(open_runs)
            return {id: self._why[id] for id in open_runs if id in self._why}
        return {}

    def _eliminate(self, runs: Sequence[Run], elimination: Elimination) -> None:
        """Note which runs are not needed by now; one that was not stays so."""
        num_ended = sum(run.state.is_final for run in runs)
        if num_ended > self._num_ended:
            self._num_ended = num_ended
            open_runs = {run.id: run for run in runs if not run.state.is_final}
            unneeded = elimination(runs)
            added = {id: why for id, why in unneeded.items() if id in open_runs and id not in self._why}
            specs = {id: open_runs[id].job for id in added}
            rows = {specs[id].without_seed: why for id, why in added.items()}
            names = zip(names_apart(list(rows)), rows.values(), strict=True)
            if added:
                reasons = "; ".join(f"{name}: {why}" for name, why in names)
                self.launch.report(f"left out from now on: {reasons}")
            self._why |= {id: f"{NOT_NEEDED}{why}" for id, why in added.items()}

    def _look_at_rounds(self, runs: Sequence[Run]) -> None:
        specs = {run.id: run.job for run in runs}
        undone = [specs[run.id].round or 0 for run in _not_ended(runs)]
        # A cancelled run never began: one like it failed.
        needed = [specs[run.id].round or 0 for run in runs if run.state is not RunState.CANCELLED]
        num_rounds = min(undone, default=1 + max(needed, default=0)) - 1
        if num_rounds >= 1 and not self._is_pace_reported:
            self._is_pace_reported = True
            self._report_pace([run for run in runs if specs[run.id].round == 1], _most_rounds(specs))
        rows = {specs[run.id].without_seed for run in runs}
        left = {specs[run.id].without_seed for run in runs if _may_count(run)}
        first_look = 1 if len(left) == 1 < len(rows) else FIRST_LOOK
        if num_rounds >= first_look and num_rounds > self._num_rounds:
            self._num_rounds = num_rounds
            self._look([run for run in runs if (specs[run.id].round or 0) <= num_rounds], specs)

    def _report_pace(self, first_round: Sequence[Run], most: int) -> None:
        """Report how long all rounds take on this machine at the pace of the first."""
        took_s = 0.0
        for run in (run for run in first_round if run.backend == "local"):
            for attempt in self.launch.ledger.attempts_of(run.id):
                ended_at = datetime.fromisoformat(attempt.ended_at or attempt.started_at)
                took_s += (ended_at - datetime.fromisoformat(attempt.started_at)).total_seconds()
        if took_s and most > 1:
            first, every = duration_text(took_s), duration_text(most * took_s)
            self.launch.report(
                f"round 1 took {first}: at this pace all {most} take {every}, and fewer may do"
            )

    def _look(self, done: Sequence[Run], specs: Mapping[str, Job]) -> None:
        """Look at the runs of complete rounds, and note which of the later ones are not needed."""
        assert self.verdicts is not None
        verdicts: dict[Job, RowVerdict] = {}
        for id, verdict in self.verdicts([run for run in done if run.summary]).items():
            # Runs of an earlier submission are no jobs of this one.
            if id in specs:
                row = specs[id].without_seed
                verdicts[row] = max(
                    verdicts.get(row, verdict), verdict, key=lambda row_verdict: row_verdict.is_open
                )
        groups = {row: (row.workload, verdict.batch) for row, verdict in verdicts.items()}
        open_groups = {groups[row] for row, verdict in verdicts.items() if verdict.is_open}
        compared = {groups[row] for row, verdict in verdicts.items() if not verdict.is_baseline}
        after = f"after round {self._num_rounds} of at most {_most_rounds(specs)}"
        unneeded: dict[str, str] = {}
        for id, spec in specs.items():
            settled = verdicts.get(spec.without_seed)
            if settled is None or settled.is_open:
                continue
            group = groups[spec.without_seed]
            if settled.is_baseline and group not in compared:
                unneeded[id] = f"{NOT_NEEDED}nothing is left to compare it with"
            elif settled.is_baseline and group not in open_groups:
                unneeded[id] = f"{NOT_NEEDED}{after} all others are settled"
            elif not settled.is_baseline:
                unneeded[id] = f"{NOT_NEEDED}{settled.kind} {after}"
        names = zip(verdicts.values(), names_apart(list(verdicts)), strict=True)
        parts = [f"{name} {verdict}" for verdict, name in names if not verdict.is_baseline]
        self.launch.report(f"{after}: {'; '.join(parts) or 'nothing is left to compare'}")
        # The first reason stays: by that one the run was left out.
        self._why = unneeded | self._why

    def _as_recorded(self, run: Run) -> Run:
        """Return the run; on AWS, with the state and summary by its records so far."""
        if run.state.is_final or run.backend == "local":
            return run
        if run.id not in self._ended:
            readers = self._readers.setdefault(run.id, {})
            records, _ = read_records(record_paths(self.launch.home, run.id), readers)
            state = outcome_of(records).state
            if state not in (RunState.COMPLETED, RunState.FAILED):
                return run
            summary, _ = summarize_run(run.spec, records)
            self._ended[run.id] = replace(run, state=state, summary=summary)
            del self._readers[run.id]
        return self._ended[run.id]


def _most_rounds(specs: Mapping[str, Job]) -> int:
    return max(spec.max_rounds or 0 for spec in specs.values())


def _may_count(run: Run) -> bool:
    """Return whether the run has a result, or may get one."""
    return not run.state.is_final or run.state is RunState.COMPLETED


def _not_ended(runs: Sequence[Run]) -> Iterator[Run]:
    """Yield the runs that have not ended. A run without a recorded end has ended if a later one has."""
    last = max((at for at, run in enumerate(runs) if run.summary), default=-1)
    return (run for at, run in enumerate(runs) if at > last and not run.state.is_final)

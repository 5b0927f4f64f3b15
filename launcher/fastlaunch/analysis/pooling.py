"""Pool runs into rows: only what was requested alike and ran alike is a repeat."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastlaunch.analysis.statistics import T_WITHIN_RUN, Sample, pooled_spread
from fastlaunch.catalog.prices import Price
from fastlaunch.measure.summary import RunSummary, Setup

#: What a run's log time is of. Times of different kinds have no ratio.
STEP, SAMPLE, TOTAL, RELATIVE = "step", "sample", "total", "relative"
#: `metric` of a published speed relative to another row's.
RELATIVE_THROUGHPUT = "relative_throughput"


class Offer(NamedTuple):
    """How AWS sells an instance."""

    service: str
    region: str
    purchase: str


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run to compare."""

    run_id: str
    summary: RunSummary
    price: Price | None = None  # what it was billed at; without one it is looked up by the fields below
    service: str = "ec2"
    region: str = "us-east-1"
    purchase: str = "on-demand"

    @property
    def offer(self) -> Offer:
        """How its machine was billed; without a price, how it was requested."""
        if self.price is not None:
            return Offer(self.price.service, self.price.region, self.price.purchase)
        return Offer(self.service, self.region, self.purchase)

    @property
    def requested_offer(self) -> Offer:
        """How its machine was requested: SageMaker may bill spot as on-demand."""
        offer = self.offer
        return offer._replace(purchase=self.purchase) if offer.purchase == "on-demand" else offer


@dataclass(frozen=True, kw_only=True)
class Group:
    """The runs of one row, in the order they came."""

    steady: list[MeasuredRun] = field(default_factory=list)
    unsteady: list[MeasuredRun] = field(default_factory=list)  # whose step time did not settle
    measure: str | None  # what was timed; None if the runs give no speed
    log_times: list[float] = field(default_factory=list)  # of the steady runs

    @property
    def shown_runs(self) -> list[MeasuredRun]:
        """The steady runs; the others if there is no steady one."""
        return self.steady or self.unsteady

    @property
    def all_runs(self) -> list[MeasuredRun]:
        """The steady runs, then the others: what comes before the steps is known of all."""
        return [*self.steady, *self.unsteady]

    @property
    def first(self) -> RunSummary:
        """The summary of its first run."""
        return self.shown_runs[0].summary

    @property
    def setup(self) -> Setup:
        """What all runs of the row share."""
        return self.first.setup

    @property
    def is_steady(self) -> bool:
        return bool(self.steady)


def pool(candidates: Sequence[MeasuredRun]) -> tuple[list[Group], list[MeasuredRun]]:
    """Return the rows, in order of their first run, and the runs that are unfit for their `problems`."""
    groups: dict[Hashable, Group] = {}
    unfit = []
    for candidate in candidates:
        if candidate.summary.problems:
            unfit.append(candidate)
            continue
        measure, log_time = log_time_of(candidate.summary)
        key = pooling_key(candidate, measure)
        row = groups.setdefault(key, Group(measure=measure))
        if candidate.summary.timing.steady is False:
            row.unsteady.append(candidate)
            continue
        row.steady.append(candidate)
        if log_time is not None:
            row.log_times.append(log_time)
    return list(groups.values()), unfit


def pooling_key(run: MeasuredRun, measure: str | None) -> Hashable:
    """Return what two runs must share to be repeats of each other."""
    setup = run.summary.setup
    return (
        setup.workload,
        setup.num_nodes,
        setup.num_gpus,
        setup.recipe,
        setup.batch_size_per_gpu,
        setup.data,
        setup.sequence_length,
        tuple(sorted(setup.fingerprint.items())),
        setup.instance,
        setup.device_name,
        run.offer,
        setup.kind,
        measure,
    )


def data_of(summary: RunSummary) -> str:
    """Return what a run trained on: `synthetic`, `file 0123456789abcdef`, or `file not identified`."""
    unknown = "not identified" if summary.setup.data in ("file", "folder") else ""
    return f"{summary.setup.data} {summary.setup.fingerprint.get('data', unknown)}".strip()


def log_time_of(summary: RunSummary) -> tuple[str | None, float | None]:
    """Return what was timed, and its logarithm; (None, None) for a run that gives no speed."""
    figures = summary.figures
    if summary.timing.step_time_s is not None:
        return STEP, math.log(summary.timing.step_time_s.value)
    if figures.total_time_s is not None and figures.num_samples:
        return SAMPLE, math.log(figures.total_time_s / figures.num_samples)
    if figures.total_time_s is not None:
        return TOTAL, math.log(figures.total_time_s)
    value = figures.metric_value
    if figures.metric == RELATIVE_THROUGHPUT and value is not None and value > 0:
        return RELATIVE, -math.log(value)
    return None, None


def samples_per_step(group: Group) -> float:
    """Return samples of a step over all ranks: what the runs recorded, else the global batch."""
    summaries = [candidate.summary for candidate in group.shown_runs]
    recorded = [s.timing.samples_per_step for s in summaries if s.timing.samples_per_step]
    return sum(recorded) / len(recorded) if recorded else float(group.setup.global_batch)


def sample_of(group: Group) -> Sample | None:
    """Return the row as the statistics see it; None if it has no interval.

    That is a row of unsteady runs, and a single run whose own interval is not known.
    """
    if not group.is_steady or not group.log_times:
        return None
    machines = len({run.summary.environment.host_id for run in group.steady} - {None, ""})
    num_runs = len(group.log_times)
    mean = sum(group.log_times) / num_runs
    if num_runs >= 2:
        own_spread = pooled_spread([group.log_times])
        return Sample(log_time=mean, num_runs=num_runs, num_machines=machines, own=own_spread)
    own = group.first.timing.step_time_s
    if own is None or own.low is None or own.high is None:
        return None
    within = (own.high - own.low) / 2 / T_WITHIN_RUN / own.value
    return Sample(log_time=mean, num_runs=1, within=within, num_machines=machines)


def log_time(group: Group) -> float | None:
    """Return the row's mean log time, of unsteady runs if there are no others; None if it gives no speed."""
    unsteady = (log_time_of(run.summary)[1] for run in group.unsteady)
    times = group.log_times or [time for time in unsteady if time is not None]
    return sum(times) / len(times) if times else None


def log_speed_ratio(group: Group, baseline: Group) -> float | None:
    """Return the log of samples/s over the baseline's, or of totals or relative figures if both are such."""
    ours, theirs = log_time(group), log_time(baseline)
    if ours is None or theirs is None:
        return None
    if {group.measure, baseline.measure} <= {STEP, SAMPLE}:
        return _log_rate(group, ours) - _log_rate(baseline, theirs)
    return theirs - ours if group.measure == baseline.measure else None


def _log_rate(group: Group, log_time: float) -> float:
    return (math.log(samples_per_step(group)) if group.measure == STEP else 0.0) - log_time


def first_runs(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Return the runs that compiled without a cache; all runs if every one found some work done."""
    return [run for run in runs if not run.startup.compile_cached] or list(runs)


def only_from_cache(runs: Sequence[RunSummary]) -> bool:
    """Return whether no run shows what a first run takes to compile."""
    return bool(runs) and all(run.startup.compile_cached for run in runs)

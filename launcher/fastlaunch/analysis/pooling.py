"""Pool runs into rows: runs are repeats if they were requested alike and ran alike."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fastlaunch.analysis.differences import RunTime
from fastlaunch.catalog.prices import Price
from fastlaunch.core.units import counted
from fastlaunch.measure.summary import VERSION, RunSummary, Setup

#: Kinds of measured time. Times of different kinds have no ratio.
STEP, SAMPLE, TOTAL, RELATIVE = "step", "sample", "total", "relative"
#: A script's step with unknown samples.
BARE_STEP = "bare step"
#: The `metric` of a published speed relative to another row's.
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
    session: str | None = None  # its submission, for records that do not name theirs
    price: Price | None = None  # as billed; None to look it up by the fields below
    service: str = "ec2"
    region: str = "us-east-1"
    purchase: str = "on-demand"
    owner: str | None = None  # who shared it; None for the user's own
    is_joined: bool = False  # whether it counts as the user's own, whoever shared it
    #: Words for `submit` to run the same script, with `{NAME}` in the command; empty if unknown.
    script: tuple[str, ...] = ()
    words: str | None = None  # a digest of that command

    @property
    def side(self) -> str | None:
        """The owner whose runs it pools with; None for the user's own."""
        return None if self.is_joined else self.owner

    @property
    def offer(self) -> Offer:
        """The offer that was billed; without a price, the requested one."""
        if self.price is not None:
            return Offer(self.price.service, self.price.region, self.price.purchase)
        return Offer(self.service, self.region, self.purchase)

    @property
    def requested_offer(self) -> Offer:
        """The requested offer: SageMaker may bill spot as on-demand."""
        offer = self.offer
        return offer._replace(purchase=self.purchase) if offer.purchase == "on-demand" else offer


@dataclass(frozen=True, kw_only=True)
class Group:
    """The runs of one row, in the order they came."""

    runs: list[MeasuredRun] = field(default_factory=list)
    measure: str | None  # kind of time; None if the runs give no speed

    @property
    def side(self) -> str | None:
        """The row's owner; None for the user's own."""
        return self.runs[0].side

    @property
    def first(self) -> RunSummary:
        """The summary of its first run."""
        return self.runs[0].summary

    @property
    def setup(self) -> Setup:
        """The setup that all runs of the row share."""
        return self.first.setup

    @property
    def summaries(self) -> list[RunSummary]:
        return [run.summary for run in self.runs]

    @property
    def log_times(self) -> list[float]:
        """Log times by run, of a step, a sample or the whole run (see `measure`); empty without times."""
        return [time for run in self.runs if (time := log_time_of(run.summary)[1]) is not None]

    @property
    def log_sample_times(self) -> list[float]:
        """Log times by run, of a sample if the samples of a step are known."""
        return [time for run in self.runs if (time := log_sample_time_of(run.summary)) is not None]


def pool(candidates: Sequence[MeasuredRun]) -> tuple[list[Group], list[MeasuredRun]]:
    """Return the rows, in order of their first run, and the runs that are unfit because of `problems`."""
    groups: dict[Hashable, Group] = {}
    unfit = []
    for candidate in candidates:
        if candidate.summary.problems:
            unfit.append(candidate)
            continue
        measure, _ = log_time_of(candidate.summary)
        key = pooling_key(candidate, measure)
        groups.setdefault(key, Group(measure=measure)).runs.append(candidate)
    return list(groups.values()), unfit


def without_version(run: MeasuredRun) -> MeasuredRun:
    """Return the run without its script's version, so that it pools with other versions."""
    setup = run.summary.setup
    known = {**setup.fingerprint, "data": setup.read_data}
    fingerprint = {name: value for name, value in known.items() if name != VERSION and value is not None}
    return replace(run, summary=replace(run.summary, setup=replace(setup, fingerprint=fingerprint)))


def newest_version(runs: Sequence[MeasuredRun]) -> str | None:
    """Return the version of a workload that ran last; None if unknown."""
    last = max(runs, key=lambda run: run.summary.environment.started_at or "", default=None)
    return last.summary.setup.version if last else None


def of_newest_version(runs: Sequence[MeasuredRun]) -> tuple[list[MeasuredRun], str | None]:
    """Return the runs of a workload's newest version, and a note on the runs left out."""
    newest = newest_version(runs)
    kept = [run for run in runs if run.summary.setup.version == newest]
    if len(kept) == len(runs):
        return kept, None
    number, workload = len(runs) - len(kept), runs[0].summary.setup.workload
    do = "does" if number == 1 else "do"
    return kept, f"{counted(number, 'run')} of earlier versions of {workload} {do} not count"


def pooling_key(run: MeasuredRun, measure: str | None) -> Hashable:
    """Return the key that two runs share if they are repeats."""
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
        tuple(sorted(setup.variant.items())),
        measure,
        run.side,
    )


def data_of(summary: RunSummary) -> str:
    """Return a run's data: `synthetic`, `file 0123456789abcdef`, or `file not identified`."""
    unknown = "not identified" if summary.setup.data in ("file", "folder") else ""
    return f"{summary.setup.data} {summary.setup.fingerprint.get('data', unknown)}".strip()


def log_time_of(summary: RunSummary) -> tuple[str | None, float | None]:
    """Return the kind of time and its logarithm; (None, None) for a run without a speed."""
    figures = summary.figures
    if summary.timing.step_time_s is not None:
        measure = STEP if summary.timing.samples_per_step else BARE_STEP
        return measure, math.log(summary.timing.step_time_s.value)
    if figures.total_time_s is not None and figures.num_samples:
        return SAMPLE, math.log(figures.total_time_s / figures.num_samples)
    if figures.total_time_s is not None:
        return TOTAL, math.log(figures.total_time_s)
    value = figures.metric_value
    if figures.metric == RELATIVE_THROUGHPUT and value is not None and value > 0:
        return RELATIVE, -math.log(value)
    return None, None


def log_sample_time_of(summary: RunSummary) -> float | None:
    """Return the log time per sample if the samples of a step are known, else `log_time_of`'s."""
    measure, log_time = log_time_of(summary)
    if log_time is None or measure != STEP:
        return log_time
    return log_time - math.log(summary.timing.samples_per_step or 1.0)


def samples_per_step(group: Group) -> float:
    """Return samples per step over all ranks, as the runs counted them; 1 without counts."""
    counted = [samples for run in group.summaries if (samples := run.timing.samples_per_step)]
    return sum(counted) / len(counted) if counted and group.measure == STEP else 1.0


def run_times(group: Group, row: int) -> list[RunTime]:
    """Return the runs for the statistics, as row number `row`.

    A round belongs to one session on one host. For older records, which name neither, the day stands for the
    session and the seed for the round, since each round had a seed of its own.
    """
    times = []
    for run in group.runs:
        log_time = log_sample_time_of(run.summary)
        if log_time is None:
            return []
        where = run.summary.environment
        named = where.session or run.session
        session = named or where.measured_on
        number = where.round if where.round is not None else run.summary.seed
        # A host without a name counts as different from every other row's.
        machine = (where.host_id or ("unknown", row), group.setup.instance or group.setup.device_name)
        host = (*machine, session)
        is_known = None not in (where.host_id, session, number)
        times.append(
            RunTime(
                row=row,
                log_time=log_time,
                host=host,
                machine=machine,
                block=(*host, number) if is_known else None,
                session=named,
                round=where.round,
                max_rounds=where.max_rounds,
                late=run.summary.timing.late,
            )
        )
    return times


def are_comparable(one: Group, other: Group) -> bool:
    """Return whether the times of two rows have a ratio: both steps or samples, or one kind."""
    measures = {one.measure, other.measure}
    return None not in measures and (len(measures) == 1 or measures <= {STEP, SAMPLE})


def first_runs(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Return the runs that compiled without a cache, or all runs if every one used a cache."""
    return [run for run in runs if not run.startup.compile_cached] or list(runs)

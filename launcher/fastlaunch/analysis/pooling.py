"""Runs into rows: what was asked for and ran the same, and nothing else, is a repeat of it."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastlaunch.analysis.statistics import T_WITHIN_RUN, Arm, pooled_spread
from fastlaunch.measure.summarize import RunSummary

if TYPE_CHECKING:
    from fastlaunch.catalog.prices import Price

#: What a run's log time is of. Times of different kinds have no ratio.
STEP, SAMPLE, TOTAL, RELATIVE = "step", "sample", "total", "relative"
#: `metric` of a published speed relative to another row's.
RELATIVE_THROUGHPUT = "relative_throughput"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A run to compare. price: what it was billed at; without one it is looked up by the other three."""

    run_id: str
    summary: RunSummary
    price: "Price | None" = None
    service: str = "ec2"
    region: str = "us-east-1"
    purchase: str = "on-demand"

    @property
    def offer(self) -> tuple[str, str, str]:
        """Service, region and purchase option."""
        if self.price is not None:
            return self.price.service, self.price.region, self.price.purchase
        return self.service, self.region, self.purchase

    @property
    def asked(self) -> tuple[str, str, str]:
        """Service, region and purchase option as it was asked for: SageMaker may bill spot as on-demand."""
        service, region, purchase = self.offer
        return service, region, self.purchase if purchase == "on-demand" else purchase


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The runs of one row, in the order they came. log_times: of the steady runs, as `measure` says."""

    candidates: list[Candidate]
    unsteady: list[Candidate] = field(default_factory=list)
    measure: str | None
    log_times: list[float] = field(default_factory=list)

    @property
    def all_runs(self) -> list[Candidate]:
        """The steady runs; the others where there is no steady one."""
        return self.candidates or self.unsteady

    @property
    def whole_runs(self) -> list[Candidate]:
        """The steady runs and the others: what comes before the steps is known of them all."""
        return [*self.candidates, *self.unsteady]

    @property
    def first(self) -> RunSummary:
        """A summary with what all runs of the row share."""
        return self.all_runs[0].summary

    @property
    def is_steady(self) -> bool:
        return bool(self.candidates)


def pool(candidates: Sequence[Candidate]) -> tuple[list[Pool], list[Candidate]]:
    """The rows, in order of their first run, and the candidates that cannot be used, for their `problems`."""
    pools: dict[Hashable, Pool] = {}
    unfit = []
    for candidate in candidates:
        if candidate.summary.problems:
            unfit.append(candidate)
            continue
        measure, log_time = log_time_of(candidate.summary)
        key = pooling_key(candidate, measure)
        row = pools.get(key)
        if row is None:
            row = pools[key] = Pool(candidates=[], measure=measure)
        if candidate.summary.steady is False:
            row.unsteady.append(candidate)
            continue
        row.candidates.append(candidate)
        if log_time is not None:
            row.log_times.append(log_time)
    return list(pools.values()), unfit


def pooling_key(candidate: Candidate, measure: str | None) -> Hashable:
    """What two runs must share to be repeats of each other."""
    summary = candidate.summary
    return (
        summary.workload,
        summary.num_nodes,
        summary.num_gpus,
        summary.recipe,
        summary.batch_size_per_gpu,
        summary.data,
        summary.sequence_length,
        tuple(sorted(summary.fingerprint.items())),
        summary.instance,
        summary.device_name,
        candidate.offer,
        summary.kind,
        measure,
    )


def data_of(summary: RunSummary) -> str:
    """What a run was trained on: `synthetic`, `file 0123456789abcdef`, or `file not identified`."""
    what = summary.fingerprint.get("data", "not identified" if summary.data in ("file", "folder") else "")
    return f"{summary.data} {what}".strip()


def log_time_of(summary: RunSummary) -> tuple[str | None, float | None]:
    """What was timed, and the logarithm of it; (None, None) for a run that gives no speed."""
    if summary.step_time_s is not None:
        return STEP, math.log(summary.step_time_s.value)
    if summary.total_time_s is not None and summary.num_samples:
        return SAMPLE, math.log(summary.total_time_s / summary.num_samples)
    if summary.total_time_s is not None:
        return TOTAL, math.log(summary.total_time_s)
    value = summary.metric_value
    if summary.metric == RELATIVE_THROUGHPUT and value is not None and value > 0:
        return RELATIVE, -math.log(value)
    return None, None


def samples_per_step(pool: Pool) -> float:
    """Samples of a step over all ranks: what the runs recorded, else the global batch."""
    summaries = [candidate.summary for candidate in pool.all_runs]
    recorded = [s.samples_per_step for s in summaries if s.samples_per_step]
    return sum(recorded) / len(recorded) if recorded else float(global_batch(pool.first))


def global_batch(summary: RunSummary) -> int:
    """Samples per optimizer step over all GPUs, as asked for."""
    return summary.batch_size_per_gpu * summary.num_gpus


def arm_of(pool: Pool) -> Arm | None:
    """The row as the statistics see it; None for one without an interval.

    That is a row of unsteady runs, and a single run whose own interval is not known.
    """
    if not pool.is_steady or not pool.log_times:
        return None
    machines = len({c.summary.host_id for c in pool.candidates if c.summary.host_id})
    mean = sum(pool.log_times) / len(pool.log_times)
    if len(pool.log_times) >= 2:
        return Arm(
            log_time=mean,
            num_runs=len(pool.log_times),
            num_machines=machines,
            own=pooled_spread([pool.log_times]),
        )
    own = pool.first.step_time_s
    if own is None or own.low is None or own.high is None:
        return None
    within = (own.high - own.low) / 2 / T_WITHIN_RUN / own.value
    return Arm(log_time=mean, num_runs=1, within=within, num_machines=machines)


def log_time(pool: Pool) -> float | None:
    """Mean log time of the row, of its unsteady runs if there are no others; None if it gives no speed."""
    times = pool.log_times or [time for c in pool.unsteady if (time := log_time_of(c.summary)[1]) is not None]
    return sum(times) / len(times) if times else None


def log_speed_ratio(pool: Pool, baseline: Pool) -> float | None:
    """Log of samples/s over the baseline's; of totals and relative figures, where both are such."""
    ours, theirs = log_time(pool), log_time(baseline)
    if ours is None or theirs is None:
        return None
    if {pool.measure, baseline.measure} <= {STEP, SAMPLE}:
        return _log_rate(pool, ours) - _log_rate(baseline, theirs)
    return theirs - ours if pool.measure == baseline.measure else None


def _log_rate(pool: Pool, log_time: float) -> float:
    return (math.log(samples_per_step(pool)) if pool.measure == STEP else 0.0) - log_time

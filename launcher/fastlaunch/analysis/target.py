"""What it takes to train to a target on held-out data: which seeds got there, when, and for how much.

A run has reached the target with the first evaluation at which it holds; its time until then is put together
as in `accounts`. Rows of different global batch may be compared: whatever a step does, the target is one.

A mean is given only where every seed got there, and there are three or more: a mean over those that did would
make a recipe look the better the more of its runs fail. Otherwise there is `k of n`, with the range of the k.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import TYPE_CHECKING

from fastlaunch.analysis.accounts import account_of_row, account_of_run, evaluations_until
from fastlaunch.analysis.compare import Comparison
from fastlaunch.analysis.cost import scaled, usd_per_second
from fastlaunch.analysis.pooling import Candidate
from fastlaunch.analysis.rows import Row
from fastlaunch.analysis.statistics import FLOOR, t_quantile
from fastlaunch.analysis.suggest import seeds
from fastlaunch.analysis.verdicts import NOT_STEADY
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.measure.summarize import Interval, RunSummary

if TYPE_CHECKING:
    from fastlaunch_train.records.records import Eval

LOSS = "loss"
MIN_SEEDS = 3
_TARGET = re.compile(r"\s*([A-Za-z_][\w.-]*?)\s*(=|<=|>=)\s*(\S+)\s*")
#: What a run shares with its repeats, whether it is fit to be timed or not.
_SHARED = (
    *("workload", "recipe", "batch_size_per_gpu", "num_gpus", "num_nodes", "data", "kind"),
    *("sequence_length", "instance", "device_name", "fingerprint"),
)
_EXPECTED = "give one such as accuracy=0.9 or loss=2.5"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A held-out loss to fall to `value`, or another metric to rise to it."""

    metric: str
    value: float

    @property
    def told(self) -> str:
        """`accuracy >= 0.9`."""
        return f"{self.metric} {'<=' if self.metric == LOSS else '>='} {self.value:g}"

    def value_of(self, line: "Eval") -> float | None:
        """What an evaluation says of the metric; None if nothing, or no number."""
        if self.metric == LOSS:
            value = line.loss
        else:
            value = line.metric_value if line.metric == self.metric else None
        return value if value is not None and math.isfinite(value) else None

    def holds(self, value: float | None) -> bool:
        """Whether a value is as good as the target."""
        if value is None:
            return False
        return value <= self.value if self.metric == LOSS else value >= self.value


def parse_target(text: str) -> Target:
    """`accuracy=0.9` or `accuracy>=0.9`, `loss=2.5` or `loss<=2.5`. Raises UserError for anything else."""
    match = _TARGET.fullmatch(text)
    try:
        value = float(match[3]) if match else math.nan
    except ValueError:
        value = math.nan
    if match is None or not math.isfinite(value):
        raise UserError(f"{text!r} is no target", _EXPECTED)
    metric, sign = match[1], match[2]
    if sign == (">=" if metric == LOSS else "<="):
        better = "lower" if metric == LOSS else "higher"
        raise UserError(f"{text!r} is no target: a {better} {metric} is better", _EXPECTED)
    return Target(metric=metric, value=value)


@dataclass(frozen=True, kw_only=True)
class RunToTarget:
    """One run. step: after which it had reached the target, None if it did not. best: of what it scored.

    time_s: until then, None where its step time is not known. waited_steps: since the evaluation before.
    last_step: of its last evaluation, 0 without one. unknown: parts that time_s leaves out.
    """

    run_id: str
    seed: int | None
    status: str
    best: float | None
    last_step: int
    step: int | None = None
    time_s: float | None = None
    waited_steps: int | None = None
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RowToTarget:
    """One row: its runs, those included that are left out of the comparison for having failed.

    A seed has reached the target if all its runs have; its time is their mean. times_s: of the seeds that
    did. time_s: the mean over the seeds, with the 95% interval of Student's t, where all of MIN_SEEDS or more
    reached it; else None, and `reason` says what is missing.
    """

    row: Row
    runs: tuple[RunToTarget, ...]
    num_seeds: int
    times_s: tuple[float, ...]
    num_reached: int
    time_s: Interval | None
    usd_per_s: float | None
    reason: str | None

    @property
    def usd(self) -> Interval | None:
        """What the time costs; None where that or the price is not known."""
        return scaled(self.time_s, self.usd_per_s) if self.time_s and self.usd_per_s else None

    @property
    def is_ranked(self) -> bool:
        """Whether it may be held against others: it has a mean, and the comparison bars nothing."""
        timed = self.time_s is not None and min(self.times_s) > 0
        return timed and not self.row.is_barred and self.row.verdict != NOT_STEADY


def usd_to_target(comparison: Comparison, target: Target) -> tuple[RowToTarget, ...]:
    """Every row of the comparison on its way to `target`.

    Raises UserError if no run was evaluated on held-out data, UnknownName if none knows the metric.
    """
    rows = [(row, _runs_of(row, comparison.unfit)) for row in comparison.rows]
    lines = [line for _, runs in rows for run in runs for line in _evals(run.summary)]
    if not lines:
        raise UserError(
            "no run was evaluated on held-out data", "evaluate while training: submit with --eval-every N"
        )
    known = {line.metric for line in lines if line.metric is not None} | {LOSS}
    if target.metric not in known:
        raise UnknownName("metric", target.metric, known)
    return tuple(_row(row, runs, target) for row, runs in rows)


def _runs_of(row: Row, unfit: Iterable[Candidate]) -> list[Candidate]:
    """The row's runs, and those like them that failed: they did not reach what they were to reach."""
    first = row.runs[0]
    failed = [run for run in unfit if _is_repeat(run, first) and _counts(run.summary)]
    return [*row.runs, *failed]


def _is_repeat(run: Candidate, of: Candidate) -> bool:
    ours, theirs = run.summary, of.summary
    return run.offer == of.offer and all(getattr(ours, name) == getattr(theirs, name) for name in _SHARED)


def _counts(summary: RunSummary) -> bool:
    """Whether a run that is unfit to be timed says something of how well its recipe trains."""
    return summary.status in ("nan_loss", "out_of_memory") or bool(_evals(summary))


def _evals(summary: RunSummary) -> "list[Eval]":
    """Evaluations on validation data of the weights as they were, by step."""
    found = [line for line in summary.evals if line.split == "validation" and line.weights == "current"]
    return sorted(found, key=lambda line: line.step)


def _row(row: Row, candidates: Sequence[Candidate], target: Target) -> RowToTarget:
    runs = [_run(run, row, target) for run in candidates]
    by_seed: dict[int | None, list[RunToTarget]] = {}
    for run in runs:
        by_seed.setdefault(run.seed, []).append(run)
    reached = [own for own in by_seed.values() if all(run.step is not None for run in own)]
    times = [_mean([run.time_s for run in own]) for own in reached]
    known = tuple(time for time in times if time is not None)
    reason = _why_no_mean(runs, len(by_seed), len(reached), len(known), target)
    price = row.price
    return RowToTarget(
        row=row,
        runs=tuple(runs),
        num_seeds=len(by_seed),
        num_reached=len(reached),
        times_s=known,
        time_s=None if reason else _mean_time(known),
        usd_per_s=usd_per_second(price.usd_per_hour, row.num_nodes) if price else None,
        reason=reason,
    )


def _run(candidate: Candidate, row: Row, target: Target) -> RunToTarget:
    summary = candidate.summary
    scored = [(line.step, target.value_of(line)) for line in _evals(summary)]
    values = [value for _, value in scored if value is not None]
    step = next((step for step, value in scored if target.holds(value)), None)
    before = max((other for other, _ in scored if step is not None and other < step), default=0)
    account = account_of_run(summary, row.step_time_s)
    time_s: float | None = None
    unknown: tuple[str, ...] = ()
    if step is not None and account is not None:
        parts = {**account.parts_s(step), "evaluations": evaluations_until(summary.evals, step)}
        if parts["warmup"] is not None and summary.num_warmup_steps:
            # A run that was there before it was warm had but a part of the warm-up.
            parts["warmup"] *= min(1.0, step / summary.num_warmup_steps)
        if summary.compile_cached and (of_row := account_of_row(row)) is not None:
            # A job on a machine of its own compiles as the first of the runs did.
            parts["compile"] = of_row.once_s["compile"]
        total_s, unknown = sum(part for part in parts.values() if part is not None), account.unknown
        time_s = total_s if math.isfinite(total_s) else None
    return RunToTarget(
        run_id=candidate.run_id,
        seed=summary.seed,
        status=summary.status,
        best=(min if target.metric == LOSS else max)(values, default=None),
        last_step=max((step for step, _ in scored), default=0),
        step=step,
        time_s=time_s,
        waited_steps=None if step is None else step - before,
        unknown=unknown,
    )


def _why_no_mean(
    runs: Sequence[RunToTarget], num_seeds: int, num_reached: int, num_timed: int, target: Target
) -> str | None:
    """Why the row has no mean time to the target, and what is missing; None if it has one."""
    if not any(run.best is not None for run in runs) and all(run.last_step == 0 for run in runs):
        return "none of its runs was evaluated on held-out data"
    if not any(run.best is not None for run in runs):
        if target.metric == LOSS:
            return "the loss of none of its runs is a number"
        return f"none of its runs has {target.metric}"
    if num_reached < num_seeds:
        return f"reached by {num_reached} of {num_seeds} seeds"
    if num_seeds < MIN_SEEDS:
        missing = MIN_SEEDS - num_seeds
        first = max((run.seed for run in runs if run.seed is not None), default=-1) + 1
        more = f"{missing} more run{'s' * (missing > 1)} of other seeds"
        return f"{num_seeds} of {MIN_SEEDS} seeds: {more} ({seeds(first, missing)})"
    return "a step time is not known" if num_timed < num_reached else None


def _mean_time(times_s: Sequence[float]) -> Interval:
    """The mean with its 95% interval; seeds are not taken to lie closer than repeats do."""
    mean = sum(times_s) / len(times_s)
    deviation = max(FLOOR * mean, stdev(times_s))
    half_width = t_quantile(0.975, len(times_s) - 1) * deviation / math.sqrt(len(times_s))
    return Interval(value=mean, low=max(0.0, mean - half_width), high=mean + half_width)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None

"""Time and cost to train to a target on held-out data, and the seeds that reach it.

A run reaches the target at the first evaluation that meets it; its account covers the time until then. Parts
that no run recorded take as long as `cost` assumes. The dollars are that time at the row's price. Rows with
different global batches are comparable, since the target is the same.

There is a mean only if all seeds, three or more, reach the target. A mean over successful seeds would flatter
a recipe whose runs fail.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from fastlaunch.analysis.account import ONCE, account_of_row, account_of_run, evaluations_until
from fastlaunch.analysis.compare import Comparison, Row
from fastlaunch.analysis.convergence import curve, mean_if_all
from fastlaunch.analysis.cost import assumptions_of_row, usd_per_s_of_row
from fastlaunch.analysis.differences import FLOOR, RunTime
from fastlaunch.analysis.looks import look_through
from fastlaunch.analysis.pooling import MeasuredRun, data_of, pooling_key, samples_per_step
from fastlaunch.analysis.pricing import scaled
from fastlaunch.analysis.rate import IN_RANGE
from fastlaunch.analysis.statistics import t_quantile
from fastlaunch.analysis.suggest import seeds
from fastlaunch.analysis.verdicts import exp
from fastlaunch.catalog.prices import VolumePrice
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.units import counted
from fastlaunch.measure.summary import Interval
from fastlaunch_train.records.records import Eval

LOSS = "loss"
MIN_SEEDS = 3
_TARGET = re.compile(r"\s*([A-Za-z_][\w.-]*?)\s*(=|<=|>=)\s*(\S+)\s*")
_EXPECTED = "give one such as accuracy=0.9 or loss=2.5"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A held-out loss to fall to `value`, or another metric to rise to it."""

    metric: str
    value: float

    @property
    def text(self) -> str:
        """`accuracy >= 0.9`."""
        return f"{self.metric} {'<=' if self.metric == LOSS else '>='} {self.value:g}"

    def value_of(self, line: Eval) -> float | None:
        """Return the metric's value in an evaluation; None if it is absent or not a number."""
        if self.metric == LOSS:
            value = line.loss
        else:
            value = line.metric_value if line.metric == self.metric else None
        return value if value is not None and math.isfinite(value) else None

    def holds(self, value: float | None) -> bool:
        """Return whether a value is as good as the target."""
        if value is None:
            return False
        return value <= self.value if self.metric == LOSS else value >= self.value


def parse_target(text: str) -> Target:
    """Read `accuracy=0.9` or `accuracy>=0.9`, `loss=2.5` or `loss<=2.5`. Raises UserError otherwise."""
    match = _TARGET.fullmatch(text)
    try:
        value = float(match[3]) if match else math.nan
    except ValueError:
        value = math.nan
    if match is None or not math.isfinite(value):
        raise UserError(f"{text!r} is not a target", _EXPECTED)
    metric, sign = match[1], match[2]
    if sign == (">=" if metric == LOSS else "<="):
        better = "lower" if metric == LOSS else "higher"
        raise UserError(f"{text!r} is not a target: a {better} {metric} is better", _EXPECTED)
    return Target(metric=metric, value=value)


@dataclass(frozen=True, kw_only=True)
class RunToTarget:
    """One run on its way to the target."""

    run_id: str
    seed: int | None  # for a script, its round
    status: str
    best: float | None  # its best score
    last_step: int  # of its last evaluation, 0 without one
    step: int | None = None  # of the first evaluation that meets the target; None if none does
    time_s: float | None = None  # until then; None if its step time is unknown
    waited_steps: int | None = None  # since the evaluation before
    unknown: tuple[str, ...] = ()  # parts that no run of the row recorded; time_s has what is assumed


@dataclass(frozen=True, kw_only=True)
class RowToTarget:
    """One row on its way to the target. A seed reached it if all its runs did; its time is their mean."""

    row: Row
    runs: tuple[RunToTarget, ...]  # including failed runs, which the comparison leaves out
    num_seeds: int
    times_s: Mapping[int | None, float]  # of the seeds that reached it
    num_reached: int
    #: Means over the seeds with Student's interval of 90%, if there are MIN_SEEDS and all reached it.
    time_s: Interval | None
    samples: Interval | None  # steps, if a step's samples are unknown
    reason: str | None  # why there is no mean time
    usd_per_s: float | None = None  # of all nodes, with their volumes; None without a price
    assumed_s: Mapping[str, float] = field(default_factory=dict)  # seconds by unknown part

    @property
    def usd(self) -> Interval | None:
        return scaled(self.time_s, self.usd_per_s) if self.time_s and self.usd_per_s else None

    @property
    def is_ranked(self) -> bool:
        """Whether it may be compared with others: it has a mean and is not barred."""
        timed = self.time_s is not None and min(self.times_s.values()) > 0
        return timed and not self.row.is_barred


def to_target(
    comparison: Comparison, target: Target, volume_of: Callable[[str], VolumePrice | None] = lambda _: None
) -> tuple[RowToTarget, ...]:
    """Return every row's way to `target`. volume_of: returns a region's volume price.

    Raises UserError if no run was evaluated on held-out data, UnknownName if no run has the metric.
    """
    rows = [(row, _runs_of(row, comparison.unfit)) for row in comparison.rows]
    lines = [line for _, runs in rows for run in runs for line in curve(run.summary).values()]
    if not lines:
        raise UserError(
            "no run was evaluated on held-out data", "evaluate while training: submit with --eval-every N"
        )
    known = {line.metric for line in lines if line.metric is not None} | {LOSS}
    if target.metric not in known:
        raise UnknownName("metric", target.metric, known)
    return tuple(_row(row, runs, target, usd_per_s_of_row(row, volume_of)) for row, runs in rows)


def _runs_of(row: Row, unfit: Iterable[MeasuredRun]) -> list[MeasuredRun]:
    """Return the row's runs, and failed runs of the same setup, which did not reach the target either."""
    key = pooling_key(row.runs[0], None)
    failed = [
        run
        for run in unfit
        if pooling_key(run, None) == key
        and (run.summary.status in ("nan_loss", "out_of_memory") or curve(run.summary))
    ]
    return [*row.runs, *failed]


def _row(row: Row, candidates: Sequence[MeasuredRun], target: Target, usd_per_s: float | None) -> RowToTarget:
    of_row, assumptions = account_of_row(row), assumptions_of_row(row)
    known_s = of_row.once_s if of_row else {}
    assumed_s = {
        part: seconds
        for part in ONCE
        if known_s.get(part) is None and (seconds := getattr(assumptions, f"{part}_s"))
    }
    runs = [_run(run, row, target, {**known_s, **assumed_s}, assumed_s) for run in candidates]
    by_seed: dict[int | None, list[RunToTarget]] = {}
    for run in runs:
        by_seed.setdefault(run.seed, []).append(run)
    reached = {
        seed: of_seed for seed, of_seed in by_seed.items() if all(run.step is not None for run in of_seed)
    }
    times_s = {seed: mean_if_all(run.time_s for run in of_seed) for seed, of_seed in reached.items()}
    known = {seed: time_s for seed, time_s in times_s.items() if time_s is not None}
    counts = (len(by_seed), len(reached), len(known))
    reason = _why_no_mean(runs, *counts, target, is_script=row.setup.is_script)
    steps = [mean_if_all(run.step for run in of_seed) for of_seed in reached.values()]
    samples = None
    if len(reached) == len(by_seed) >= MIN_SEEDS:
        samples = scaled(_mean_over_seeds([step or 0.0 for step in steps]), samples_per_step(row.group))
    return RowToTarget(
        row=row,
        runs=tuple(runs),
        num_seeds=len(by_seed),
        num_reached=len(reached),
        times_s=known,
        time_s=None if reason else _mean_over_seeds(list(known.values())),
        samples=samples,
        reason=reason,
        usd_per_s=usd_per_s,
        assumed_s=assumed_s,
    )


def _run(
    candidate: MeasuredRun,
    row: Row,
    target: Target,
    once_s: Mapping[str, float | None],
    assumed_s: Collection[str],
) -> RunToTarget:
    """Return a run's way to the target. once_s: seconds by part of ONCE, for parts that it did not record."""
    summary = candidate.summary
    scores = {step: target.value_of(line) for step, line in curve(summary).items()}
    values = [value for value in scores.values() if value is not None]
    step = next((step for step, value in scores.items() if target.holds(value)), None)
    before = max((other for other in scores if step is not None and other < step), default=0)
    account = account_of_run(summary, row.speed.step_time_s)
    time_s: float | None = None
    unknown: tuple[str, ...] = ()
    if step is not None and account is not None:
        parts = {**account.parts_s(step), "evaluations": evaluations_until(summary.quality.evals, step)}
        unknown = tuple(part for part in account.unknown if part in assumed_s or part not in ONCE)
        parts |= {part: once_s.get(part) for part in ONCE if parts[part] is None}
        if parts["warmup"] is not None and summary.timing.num_warmup_steps:
            # A run that reached the target during warm-up did only a part of the warm-up.
            parts["warmup"] *= min(1.0, step / summary.timing.num_warmup_steps)
        if summary.startup.compile_cached:
            # A job on a new machine compiles without a cache.
            parts["compile"] = once_s.get("compile", parts["compile"])
        total_s = sum(part for part in parts.values() if part is not None)
        time_s = total_s if math.isfinite(total_s) else None
    return RunToTarget(
        run_id=candidate.run_id,
        seed=summary.pair_number,
        status=summary.status,
        best=(min if target.metric == LOSS else max)(values, default=None),
        last_step=max(scores, default=0),
        step=step,
        time_s=time_s,
        waited_steps=None if step is None else step - before,
        unknown=unknown,
    )


def _why_no_mean(
    runs: Sequence[RunToTarget],
    num_seeds: int,
    num_reached: int,
    num_timed: int,
    target: Target,
    *,
    is_script: bool,
) -> str | None:
    """Return why the row has no mean time to the target, and what is missing; None if it has one."""
    if all(run.best is None for run in runs):
        if all(run.last_step == 0 for run in runs):
            return "none of its runs was evaluated on held-out data"
        if target.metric == LOSS:
            return "the loss of none of its runs is a number"
        return f"none of its runs has {target.metric}"
    noun = "rounds" if is_script else "seeds"
    if num_reached < num_seeds:
        return f"reached by {num_reached} of {num_seeds} {noun}"
    if num_seeds < MIN_SEEDS:
        missing = MIN_SEEDS - num_seeds
        first = max((run.seed for run in runs if run.seed is not None), default=-1) + 1
        more = f"{counted(missing, 'more run')} of other {noun}"
        how = f"--repeats {missing}" if is_script else seeds(first, missing)
        return f"{num_seeds} of {MIN_SEEDS} {noun}: {more} ({how})"
    return "a step time is not known" if num_timed < num_reached else None


def _mean_over_seeds(values: Sequence[float]) -> Interval:
    """Return the mean with a 90% interval, as for costs.

    Assume that seeds scatter at least as much as repeats.
    """
    mean = sum(values) / len(values)
    deviation = max(FLOOR * mean, stdev(values))
    half_width = t_quantile((1 + IN_RANGE) / 2, len(values) - 1) * deviation / math.sqrt(len(values))
    return Interval(value=mean, low=max(0.0, mean - half_width), high=mean + half_width)


@dataclass(frozen=True, kw_only=True)
class Margin:
    """Ratio of another row to the best, at Holm's level over all other rows and looks."""

    best: RowToTarget
    other: RowToTarget
    ratio: Interval

    @property
    def is_settled(self) -> bool:
        return self.ratio.low is not None and self.ratio.low > 1


def are_on_other_data(rows: Sequence[RowToTarget], target: Target) -> bool:
    """Return whether the rows were evaluated on different data, so that their targets are not comparable.

    Synthetic images have the same held-out data with and without a loader. A loss is per token, so another
    tokenizer or sample length gives the same text another loss.
    """
    kinds = set()
    for run in (row.row.runs[0].summary for row in rows):
        of_loss = (run.setup.fingerprint.get("tokenizer"), run.setup.sequence_length)
        data = data_of(run).replace("loader", "synthetic")
        kinds.add((data, of_loss if target.metric == LOSS else None))
    return len(kinds) > 1


def margins(rows: Sequence[RowToTarget], target: Target) -> tuple[Margin, ...]:
    """Return the margins of the other ranked rows behind the best, the smallest first.

    Compare the seeds' times at the rows' hourly prices if all rows have one, else the times. Return none for
    rows on different data.
    """
    ranked = [row for row in rows if row.is_ranked]
    if len(ranked) < 2 or are_on_other_data(ranked, target):
        return ()
    priced = all(row.usd_per_s for row in ranked)

    def log_mean(row: RowToTarget) -> float:
        unit = row.usd_per_s if priced and row.usd_per_s else 1.0
        return fmean(map(math.log, row.times_s.values())) + math.log(unit)

    ranked.sort(key=log_mean)
    # The seed is the round: it gives every row the same weights and data order.
    runs = [run for number, row in enumerate(ranked) for run in _seed_times(row, number)]
    usd = {at: row.usd_per_s for at, row in enumerate(ranked) if priced and row.usd_per_s}
    looked = look_through(runs, range(1, len(ranked)), 0, usd)
    margins = []
    for other, result in sorted(looked.items()):
        # The ratio of times is the inverse of the ratio of speeds.
        low, high = result.difference.limits(result.level)
        ratio = Interval(value=exp(-result.difference.value), low=exp(-high), high=exp(-low))
        margins.append(Margin(best=ranked[0], other=ranked[other], ratio=ratio))
    return tuple(margins)


def _seed_times(row: RowToTarget, number: int) -> Iterator[RunTime]:
    """Yield the row's time for each seed, as a run of row `number`."""
    of_seed = {run.summary.pair_number: run for run in row.row.runs}
    for seed, time_s in row.times_s.items():
        run = of_seed.get(seed, row.row.runs[0])
        where = run.summary.environment
        yield RunTime(
            row=number,
            log_time=math.log(time_s),
            host=None,
            block=seed,
            session=where.session or run.session,
            round=where.round,
            max_rounds=where.max_rounds,
        )

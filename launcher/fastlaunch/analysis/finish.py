"""What a job costs from start to end, and from how many steps on one row is cheaper than another.

`$ per million samples` leaves out what comes before the steps. A recipe that compiles for ten minutes to save
a second a step is the dearer one for a job of under 600 steps.

Rows of different global batch or sequence length are compared over as many samples, which is throughput and
no training progress.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from fastlaunch.analysis.compare import Comparison, Row, time_on_type_s
from fastlaunch.analysis.cost import scaled, usd_per_second
from fastlaunch.analysis.differences import Differences
from fastlaunch.analysis.pooling import BARE_STEP, STEP, first_runs, run_times, samples_per_step
from fastlaunch.analysis.statistics import LEVEL, Difference, mean_of
from fastlaunch.analysis.verdicts import TRAINING, exp
from fastlaunch.core.errors import UserError
from fastlaunch.measure.summary import Interval, RunSummary
from fastlaunch_train.records.records import Eval

#: The parts of a job in the order of time: those that come once, the steps, those that come between steps.
ONCE = ("boot", "pull", "build", "compile", "warmup")
BETWEEN = ("evaluations", "checkpoints")
PARTS = (*ONCE, "steps", *BETWEEN)
#: Parts whose name in words is another.
WORDS = {"warmup": "warm-up"}

USD, TIME = "usd", "time"
#: Two rows compile alike if their times differ by no more than this.
_COMPILES_ALIKE_S = 1.0
#: Two rows evaluate, or write checkpoints, equally often if their periods differ by no more than this part.
_SAME_PERIOD = 0.01


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """What recurs between the steps: evaluating, writing checkpoints."""

    s_per_step: float
    once_s: float = 0.0  # what any job takes for it, however short, such as scoring test data at the end
    every: float | None = None  # steps from one to the next, on average; None if it came at the end alone


@dataclass(frozen=True, kw_only=True)
class Account:
    """What a job takes, by one run or by the means over repeats.

    None is for what is not known: of a published figure, everything but its steps.
    """

    step_time_s: Interval
    once_s: dict[str, float | None]  # seconds by part of ONCE
    between: dict[str, Repeated | None]  # by part of BETWEEN

    @property
    def unknown(self) -> tuple[str, ...]:
        """The parts that are not included because they are unknown."""
        return tuple(name for name, seconds in self.parts_s(1).items() if seconds is None)

    def parts_s(self, steps: float) -> dict[str, float | None]:
        """Return seconds by part, in the order of PARTS, of a job of so many steps; None if unknown."""
        return {
            **self.once_s,
            "steps": steps * self.step_time_s.value,
            **{
                name: None if part is None else part.once_s + steps * part.s_per_step
                for name, part in self.between.items()
            },
        }

    def total_s(self, steps: float) -> Interval:
        """Return the seconds of a job of so many steps, without the parts that are unknown.

        The interval is that of the step time: the one-off parts have none.
        """
        parts_s = self.parts_s(steps)
        rest = sum(seconds for name, seconds in parts_s.items() if name != "steps" and seconds is not None)
        time = self.step_time_s
        return Interval(
            value=rest + steps * time.value,
            low=None if time.low is None else rest + steps * time.low,
            high=None if time.high is None else rest + steps * time.high,
        )


@dataclass(frozen=True, kw_only=True)
class Finish:
    """A job on one row, of as many samples as the baseline's steps have.

    total_s and usd do not include the parts named by `unknown`.
    """

    row: Row
    steps: float
    account: Account | None  # None if no step time is known
    usd_per_s: float | None  # of all nodes; None without a price

    @property
    def reason(self) -> str | None:
        """Why there is no total; None if there is one."""
        return None if self.account else "no step time is known"

    @property
    def parts_s(self) -> dict[str, float | None]:
        return self.account.parts_s(self.steps) if self.account else {}

    @property
    def total_s(self) -> Interval | None:
        return self.account.total_s(self.steps) if self.account else None

    @property
    def usd(self) -> Interval | None:
        total_s = self.total_s
        return scaled(total_s, self.usd_per_s) if total_s and self.usd_per_s else None

    @property
    def unknown(self) -> tuple[str, ...]:
        return self.account.unknown if self.account else ()


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """How the costs of a job on two rows compare, as it grows longer."""

    first: Row
    second: Row
    by: str  # `usd`, or `time`, in seconds, if a row has no price
    more_once: float  # what `second` costs more than `first`, whatever the length
    less_each: float  # what it costs less for each sample
    #: Ends of less_each; None if a step time has no interval.
    less_limits: tuple[float, float] | None
    #: Whether no compiling is part of more_once: builds and warm-ups differ by as much from run to run.
    compiles_alike: bool = False
    left_out: tuple[str, ...] = ()  # parts that are unknown of one row, or not equally frequent

    @property
    def short(self) -> Row:
        """The cheaper row of a job of few samples: of one, since equal times may differ in the last digit."""
        return self.first if (self.more_once - self.less_each, -self.less_each) >= (0, 0) else self.second

    @property
    def long(self) -> Row:
        """The cheaper row of a job of very many samples."""
        return self.first if (-self.less_each, self.more_once) >= (0, 0) else self.second

    @property
    def settled(self) -> bool | None:
        """Whether the step times tell which is cheaper for each sample; None where one has no interval."""
        if self.less_limits is None:
            return None
        low, high = self.less_limits
        return low > 0 or high < 0

    @property
    def samples(self) -> Interval | None:
        """Where the costs cross; None where one row is cheaper from the first sample on.

        The interval holds every number at which the step times do not tell the costs apart; `high` is None
        where that goes on for ever.
        """
        if self.short is self.long:
            return None
        once, each = abs(self.more_once), abs(self.less_each)
        if self.less_limits is None:
            return Interval(value=once / each)
        low, high = self.less_limits
        least, most = (low, high) if self.less_each > 0 else (-high, -low)
        return Interval(value=once / each, low=once / most, high=once / least if self.settled else None)

    @property
    def steps(self) -> Interval | None:
        """The same in steps; None for rows of different global batch, whose steps are not alike."""
        if self.samples is None or not self.trains_alike:
            return None
        return scaled(self.samples, 1 / _samples_of_step(self.first))

    @property
    def trains_alike(self) -> bool:
        """Whether both have one global batch and sequence length; else it is throughput that is compared."""
        first, second = self.first.setup, self.second.setup
        return (first.global_batch, first.sequence_length) == (second.global_batch, second.sequence_length)

    def difference(self, samples: float) -> Interval:
        """Return how much more a job of so many samples costs on `second` than on `first`."""
        value = self.more_once - samples * self.less_each
        if self.less_limits is None:
            return Interval(value=value)
        low, high = (self.more_once - samples * less for less in reversed(self.less_limits))
        return Interval(value=value, low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class ToFinish:
    """Jobs on the rows of one workload, each of as many samples."""

    workload: str
    steps: float  # of the baseline
    samples: float
    rows: tuple[Finish, ...]
    break_evens: tuple[BreakEven, ...] = ()  # of every two rows of which one can be worked out


def to_finish(comparison: Comparison, steps: float) -> tuple[ToFinish, ...]:
    """Return what jobs of `steps` steps of the baseline cost, workload by workload.

    Raises UserError for a number of steps that is not above 0.
    """
    if not (math.isfinite(steps) and steps > 0):
        raise UserError(f"{steps:g} steps are no job", "give a number of steps above 0")
    return tuple(_of_workload(rows, steps) for rows in comparison.by_workload.values())


def _of_workload(rows: Sequence[Row], steps: float) -> ToFinish:
    # If all rows are barred none is called the baseline, yet one is what the others are compared with.
    base = max(rows, key=lambda row: (row.is_baseline, row.verdict.comparable_as == TRAINING))
    samples = steps * _samples_of_step(base)
    finishes = [usd_to_finish(row, samples / _samples_of_step(row)) for row in rows]
    differences = Differences(
        run
        for at, row in enumerate(rows)
        if row.group.measure in (STEP, BARE_STEP)
        for run in run_times(row.group, at)
    )
    ranked = [
        (at, finish) for at, finish in enumerate(finishes) if finish.account and not finish.row.is_barred
    ]
    break_evens = (
        break_even(first, second, differences.between(of_second, of_first))
        for (of_first, first), (of_second, second) in combinations(ranked, 2)
    )
    return ToFinish(
        workload=rows[0].setup.workload,
        steps=steps,
        samples=samples,
        rows=tuple(finishes),
        break_evens=tuple(pair for pair in break_evens if pair is not None),
    )


def _samples_of_step(row: Row) -> float:
    """Return samples of a step, as counted or published. One whose samples are not known stands for one."""
    if row.group.measure in (STEP, BARE_STEP):
        return samples_per_step(row.group)
    return float(row.setup.global_batch or 1)


def usd_to_finish(row: Row, steps: float) -> Finish:
    """Return what a job of `steps` steps on this row takes and costs, part by part."""
    usd_per_s = usd_per_second(row.price, row.setup.num_nodes) if row.price else None
    return Finish(row=row, steps=steps, account=account_of_row(row), usd_per_s=usd_per_s)


def break_even(first: Finish, second: Finish, faster: Difference | None) -> BreakEven | None:
    """Compare the costs of two rows; None if a step time, or all that comes before the steps, is unknown.

    Both costs are straight lines in the number of samples. faster: how much faster the second row's steps
    are, if that has an interval.
    """
    if first.account is None or second.account is None:
        return None
    by = USD if first.usd_per_s and second.usd_per_s else TIME
    counted, left_out = _counted(first, second)
    if not any(name in ONCE for name in counted):
        return None
    ours, theirs = _line(first, by, counted), _line(second, by, counted)
    return BreakEven(
        first=first.row,
        second=second.row,
        by=by,
        more_once=theirs.once - ours.once,
        less_each=ours.each - theirs.each,
        less_limits=None if faster is None else _less_limits(ours.each - theirs.each, ours.each, faster),
        compiles_alike=_compile_alike(first.account, second.account),
        left_out=left_out,
    )


@dataclass(frozen=True, kw_only=True)
class _Line:
    """Cost of a job: `once`, and `each` a sample."""

    once: float
    each: float


def _less_limits(less: float, each: float, faster: Difference) -> tuple[float, float]:
    """Return the ends of `less`, by the interval of how much faster the steps are. each: of the first row."""
    low, high = (each * (exp(-faster.value) - exp(-limit)) for limit in faster.limits(LEVEL))
    return less + low, less + high


def _line(finish: Finish, by: str, counted: Sequence[str]) -> _Line:
    account, batch = finish.account, _samples_of_step(finish.row)
    assert account is not None
    unit = finish.usd_per_s if by == USD and finish.usd_per_s else 1.0
    repeated = [part for name, part in account.between.items() if part and name in counted]
    once_s = sum(account.once_s[name] or 0.0 for name in counted if name in ONCE)
    return _Line(
        once=unit * (once_s + sum(part.once_s for part in repeated)),
        each=unit * (account.step_time_s.value + sum(part.s_per_step for part in repeated)) / batch,
    )


def _counted(first: Finish, second: Finish) -> tuple[list[str], tuple[str, ...]]:
    """Return the parts that are known of both rows and done equally often, and those that are left out."""
    assert first.account is not None and second.account is not None
    ours, theirs = first.account, second.account
    counted = [name for name in ONCE if ours.once_s[name] is not None and theirs.once_s[name] is not None]
    batches = _samples_of_step(first.row), _samples_of_step(second.row)
    counted += [
        name for name in BETWEEN if _are_alike(ours.between[name], theirs.between[name], batches=batches)
    ]
    return counted, tuple(name for name in (*ONCE, *BETWEEN) if name not in counted)


def _compile_alike(first: Account, second: Account) -> bool:
    ours, theirs = first.once_s["compile"], second.once_s["compile"]
    return abs((ours or 0.0) - (theirs or 0.0)) <= _COMPILES_ALIKE_S


def _are_alike(first: Repeated | None, second: Repeated | None, *, batches: tuple[float, float]) -> bool:
    """Return whether both are done equally often. How often is an option of the run, not of its recipe."""
    if first is None or second is None:
        return False
    if first.every is None or second.every is None:
        return first.every == second.every and (first.once_s > 0) == (second.once_s > 0)
    return math.isclose(first.every * batches[0], second.every * batches[1], rel_tol=_SAME_PERIOD)


def cheapest(pairs: Sequence[BreakEven], samples: float) -> Row | None:
    """Return the row that costs least for a job of so many samples, or None if there are no two."""
    rows = {id(row): row for pair in pairs for row in (pair.first, pair.second)}
    for row in rows.values():
        own = [pair for pair in pairs if row is pair.first or row is pair.second]
        if all((pair.difference(samples).value >= 0) == (row is pair.first) for pair in own):
            return row
    return None


def cheapest_in_turn(pairs: Sequence[BreakEven]) -> Iterator[BreakEven]:
    """Yield those of `pairs` at which the cheapest of all their rows changes, as jobs grow longer."""
    row = cheapest(pairs, 0.0)
    crossings = [(samples.value, pair) for pair in pairs if (samples := pair.samples) is not None]
    while after := [crossing for crossing in crossings if crossing[1].short is row]:
        _, pair = min(after, key=lambda crossing: crossing[0])
        yield pair
        row = pair.long


NEVER = Repeated(s_per_step=0.0)


def account_of_row(row: Row) -> Account | None:
    """Return the account of a row by all its runs, or None if its step time is unknown."""
    if row.speed.step_time_s is None or (step_time_s := time_on_type_s(row.group)) is None:
        return None
    return _account(step_time_s, row.group.summaries)


def account_of_run(summary: RunSummary, step_time_s: Interval | None = None) -> Account | None:
    """Return the account of one run, or None if its step time is unknown. step_time_s: for a run without."""
    own = summary.timing.step_time_s or step_time_s
    return None if own is None else _account(own, [summary])


def _account(step_time_s: Interval, runs: Sequence[RunSummary]) -> Account:
    recorded = [run for run in runs if run.setup.kind == "records"]
    return Account(
        step_time_s=step_time_s,
        once_s={
            "boot": mean_of([run.startup.boot_s for run in recorded]),
            "pull": mean_of([run.startup.pull_s for run in recorded]),
            "build": mean_of([run.startup.build_s for run in recorded]),
            # A run without a phase of compiling did not compile before its steps.
            "compile": mean_of([run.startup.compile_s or 0.0 for run in first_runs(recorded)]),
            "warmup": mean_of([_warmup_excess_s(run) for run in recorded]),
        },
        between={
            "evaluations": _mean_repeated([_evaluations(run) for run in recorded]),
            "checkpoints": _mean_repeated([_checkpoints(run) for run in recorded]),
        },
    )


def _warmup_excess_s(run: RunSummary) -> float | None:
    """Return how much longer the warm-up steps took than as many later steps; 0 if they were faster.

    None for a summary of a version that did not count them.
    """
    if run.timing.warmup_s is None or run.timing.num_warmup_steps is None or run.timing.step_time_s is None:
        return None
    return max(0.0, run.timing.warmup_s - run.timing.num_warmup_steps * run.timing.step_time_s.value)


def _evaluations(run: RunSummary) -> Repeated:
    """Return what evaluations cost per step, at the run's own interval, and what comes on top at the end."""
    if not run.quality.evals:
        return NEVER
    last = max(line.step for line in run.quality.evals)
    by_step: dict[int, float] = {}
    for line in run.quality.evals:
        # Test data are scored at the end, also with the weights of an earlier step.
        step = line.step if line.split == "validation" else last
        by_step[step] = by_step.get(step, 0.0) + line.seconds
    at_end_s, before = by_step.pop(last), by_step
    # One before the first step is no period.
    before_start_s = before.pop(0, 0.0)
    if not before:
        return Repeated(s_per_step=0.0, once_s=before_start_s + at_end_s)
    every = max(before) / len(before)
    # A compiled model is compiled once more for the first evaluation, and for none after it.
    first_s, *others = (before[step] for step in sorted(before))
    others = others or [
        line.seconds for line in run.quality.evals if (line.step, line.split) == (last, "validation")
    ]
    first_more_s = max(0.0, first_s - sum(others) / len(others)) if others else 0.0
    each_s = (sum(before.values()) - first_more_s) / len(before)
    # At the end there is one anyhow; the rate has it already where the end is a multiple of the period.
    return Repeated(
        s_per_step=each_s / every,
        once_s=before_start_s + first_more_s + max(0.0, at_end_s - each_s),
        every=every,
    )


def evaluations_until(evals: Sequence[Eval], step: int) -> float:
    """Return seconds of the evaluations on validation data up to `step`, it included."""
    return sum(line.seconds for line in evals if line.split == "validation" and line.step <= step)


def _checkpoints(run: RunSummary) -> Repeated | None:
    """Checkpoints as the run wrote them; None for a summary of a version that did not count them."""
    if run.checkpoints.total_s is None or not run.checkpoints.last_step or not run.checkpoints.number:
        return NEVER if run.checkpoints.longest_s is None else None
    return Repeated(
        s_per_step=run.checkpoints.total_s / run.checkpoints.last_step,
        every=run.checkpoints.last_step / run.checkpoints.number,
    )


def _mean_repeated(parts: Sequence[Repeated | None]) -> Repeated | None:
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    periods = [part.every for part in known if part.every is not None]
    return Repeated(
        s_per_step=sum(part.s_per_step for part in known) / len(known),
        once_s=sum(part.once_s for part in known) / len(known),
        every=sum(periods) / len(periods) if len(periods) == len(known) else None,
    )

"""What a job costs from start to end, and from how many steps on one way to train is cheaper than another.

`$ per million samples` says nothing of what comes before the steps. A recipe that compiles for ten minutes to
save a second a step is the dearer one for a job of under 600 steps: here that is counted, and said.

Arms of different global batch or sequence length do not train alike in equally many steps. They are taken for
as many samples, which compares throughput and no training progress, and is headed so.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from fastlaunch.analysis.accounts import ONCE, Account, Repeated, account_of_row
from fastlaunch.analysis.compare import Comparison
from fastlaunch.analysis.cost import scaled, usd_per_second
from fastlaunch.analysis.rows import Row
from fastlaunch.analysis.verdicts import NOT_STEADY, TRAINING
from fastlaunch.core.errors import UserError
from fastlaunch.measure.summarize import Interval

USD, TIME = "usd", "time"
#: Times of compiling that are no further apart than this are alike.
_COMPILES_ALIKE_S = 1.0
#: Two arms evaluate, or write checkpoints, equally often if their periods differ by no more than this.
_SAME_PERIOD = 0.01
_NO_STEP_TIME = "no step time is known"


@dataclass(frozen=True, kw_only=True)
class Finish:
    """A job of `steps` steps on one row: as many samples as the baseline's steps have.

    total_s, usd: None where the step time, or the price, is not known; without the parts named by `unknown`.
    parts_s: seconds by part, in the order of `accounts.PARTS`. reason: why there is no total.
    """

    row: Row
    steps: float
    account: Account | None
    usd_per_s: float | None
    reason: str | None = None

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
    """How the costs of a job on two rows compare, as it grows longer.

    `other` costs `more_once` than `one` whatever the length, and for each sample `less_each`: in USD, or in
    seconds where `by` says `time`, as a row has no price. compiles_alike: whether no compiling is part of
    `more_once`: builds and warm-ups differ by as much from run to run. error: half-width of less_each, None
    where a step time has no interval. left_out: parts that are not known of both, or were not asked of both
    alike.
    """

    one: Row
    other: Row
    by: str
    more_once: float
    less_each: float
    error: float | None
    compiles_alike: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def short(self) -> Row:
        """The cheaper row of a job of few samples: of one, since equal times may differ in the last digit."""
        return self.one if (self.more_once - self.less_each, -self.less_each) >= (0, 0) else self.other

    @property
    def long(self) -> Row:
        """The cheaper row of a job of very many samples."""
        return self.one if (-self.less_each, self.more_once) >= (0, 0) else self.other

    @property
    def settled(self) -> bool | None:
        """Whether the step times tell which is cheaper for each sample; None where one has no interval."""
        return None if self.error is None else abs(self.less_each) > self.error

    @property
    def samples(self) -> Interval | None:
        """Where the costs cross; None where one row is cheaper from the first sample on.

        The interval holds every number at which the step times do not tell the costs apart; `high` is None
        where that goes on for ever.
        """
        if self.short is self.long:
            return None
        once, each = abs(self.more_once), abs(self.less_each)
        if self.error is None:
            return Interval(value=once / each)
        high = once / (each - self.error) if self.settled else None
        return Interval(value=once / each, low=once / (each + self.error), high=high)

    @property
    def steps(self) -> Interval | None:
        """The same in steps; None for rows of different global batch, whose steps are not alike."""
        if self.samples is None or not self.trains_alike:
            return None
        return scaled(self.samples, 1 / self.one.global_batch)

    @property
    def trains_alike(self) -> bool:
        """Whether both have one global batch and sequence length; else it is throughput that is compared."""
        one, other = self.one, self.other
        return (one.global_batch, one.sequence_length) == (other.global_batch, other.sequence_length)

    def difference(self, samples: float) -> Interval:
        """What a job of so many samples costs more on `other` than on `one`."""
        value = self.more_once - samples * self.less_each
        if self.error is None:
            return Interval(value=value)
        return Interval(value=value, low=value - samples * self.error, high=value + samples * self.error)


@dataclass(frozen=True, kw_only=True)
class ToFinish:
    """Of one workload. steps: of the baseline. break_evens: of every two rows of which they can be told."""

    workload: str
    steps: float
    samples: float
    rows: tuple[Finish, ...]
    break_evens: tuple[BreakEven, ...] = field(default=())


def to_finish(comparison: Comparison, steps: float) -> tuple[ToFinish, ...]:
    """What jobs of `steps` steps of the baseline cost, workload by workload.

    Raises UserError for a number of steps that is not above 0.
    """
    if not (math.isfinite(steps) and steps > 0):
        raise UserError(f"{steps:g} steps are no job", "give a number of steps above 0")
    workloads = dict.fromkeys(row.workload for row in comparison.rows)
    return tuple(
        _of_workload([row for row in comparison.rows if row.workload == workload], steps)
        for workload in workloads
    )


def _of_workload(rows: Sequence[Row], steps: float) -> ToFinish:
    # Where no row may be ranked none is the baseline; the first that the others are held against will do.
    base = max(rows, key=lambda row: (row.is_baseline, row.comparable_as == TRAINING))
    samples = steps * base.global_batch
    finishes = [usd_to_finish(row, samples / row.global_batch) for row in rows]
    arms = [finish for finish in finishes if _can_be_ranked(finish.row)]
    found = (break_even(one, other) for one, other in combinations(arms, 2))
    return ToFinish(
        workload=rows[0].workload,
        steps=steps,
        samples=samples,
        rows=tuple(finishes),
        break_evens=tuple(one for one in found if one is not None),
    )


def usd_to_finish(row: Row, steps: float) -> Finish:
    """What a job of `steps` steps on this row takes and costs, part by part."""
    account = account_of_row(row)
    price = row.price
    return Finish(
        row=row,
        steps=steps,
        account=account,
        usd_per_s=usd_per_second(price.usd_per_hour, row.num_nodes) if price else None,
        reason=None if account else _NO_STEP_TIME,
    )


def break_even(one: Finish, other: Finish) -> BreakEven | None:
    """How the costs of two rows compare; None if a step time, or all that comes before the steps, is unknown.

    Both costs are straight lines in the number of samples. The step times' half-widths add in quadrature.
    """
    if one.account is None or other.account is None:
        return None
    by = USD if one.usd_per_s and other.usd_per_s else TIME
    counted, left_out = _counted(one, other)
    if not any(name in ONCE for name in counted):
        return None
    ours, theirs = _line(one, by, counted), _line(other, by, counted)
    known = ours.error is not None and theirs.error is not None
    return BreakEven(
        one=one.row,
        other=other.row,
        by=by,
        more_once=theirs.once - ours.once,
        less_each=ours.each - theirs.each,
        error=math.hypot(ours.error or 0.0, theirs.error or 0.0) if known else None,
        compiles_alike=_compile_alike(one.account, other.account),
        left_out=left_out,
    )


@dataclass(frozen=True, kw_only=True)
class _Line:
    """Cost of a job: `once`, and `each` a sample. error: half-width of `each`, None if it has no interval."""

    once: float
    each: float
    error: float | None


def _line(finish: Finish, by: str, counted: Sequence[str]) -> _Line:
    account, batch = finish.account, finish.row.global_batch
    assert account is not None
    unit = finish.usd_per_s if by == USD and finish.usd_per_s else 1.0
    repeated = [part for name, part in _repeated(account).items() if part and name in counted]
    time = account.step_time_s
    once_s = sum(account.once_s[name] or 0.0 for name in counted if name in ONCE)
    wide = time.low is not None and time.high is not None
    return _Line(
        once=unit * (once_s + sum(part.once_s for part in repeated)),
        each=unit * (time.value + sum(part.s_per_step for part in repeated)) / batch,
        error=unit * ((time.high or 0.0) - (time.low or 0.0)) / 2 / batch if wide else None,
    )


def _counted(one: Finish, other: Finish) -> tuple[list[str], tuple[str, ...]]:
    """Parts that are known of both rows and were asked of both alike, and those that are left out."""
    assert one.account is not None and other.account is not None
    ours, theirs = one.account, other.account
    counted = [name for name in ONCE if ours.once_s[name] is not None and theirs.once_s[name] is not None]
    for name, part in _repeated(ours).items():
        if _are_alike(part, one.row.global_batch, _repeated(theirs)[name], other.row.global_batch):
            counted.append(name)
    left_out = (name for name in (*ONCE, *_repeated(ours)) if name not in counted)
    return counted, tuple(left_out)


def _compile_alike(one: Account, other: Account) -> bool:
    ours, theirs = one.once_s["compile"], other.once_s["compile"]
    return abs((ours or 0.0) - (theirs or 0.0)) <= _COMPILES_ALIKE_S


def _repeated(account: Account) -> dict[str, Repeated | None]:
    return {"evaluations": account.evaluations, "checkpoints": account.checkpoints}


def _are_alike(one: Repeated | None, batch: int, other: Repeated | None, other_batch: int) -> bool:
    """Whether both are done as often: how often is asked for, and says nothing of a way to train."""
    if one is None or other is None:
        return False
    if one.every is None or other.every is None:
        return one.every == other.every and (one.once_s > 0) == (other.once_s > 0)
    return math.isclose(one.every * batch, other.every * other_batch, rel_tol=_SAME_PERIOD)


def cheapest(pairs: Sequence[BreakEven], samples: float) -> Row | None:
    """The row that costs less than all others for a job of so many samples; None if there are no two."""
    for row in _rows(pairs):
        own = [pair for pair in pairs if row is pair.one or row is pair.other]
        if all((pair.difference(samples).value >= 0) == (row is pair.one) for pair in own):
            return row
    return None


def cheapest_in_turn(pairs: Sequence[BreakEven]) -> Iterator[BreakEven]:
    """Those of `pairs` at which the cheapest of all their rows changes, as jobs grow longer."""
    row = cheapest(pairs, 0.0)
    crossings = [(samples.value, pair) for pair in pairs if (samples := pair.samples) is not None]
    while row is not None:
        after = [(value, pair) for value, pair in crossings if pair.short is row]
        if not after:
            return
        _, pair = min(after, key=lambda item: item[0])
        yield pair
        row = pair.long


def _rows(pairs: Sequence[BreakEven]) -> list[Row]:
    return list({id(row): row for pair in pairs for row in (pair.one, pair.other)}.values())


def _can_be_ranked(row: Row) -> bool:
    return not row.is_barred and row.verdict != NOT_STEADY

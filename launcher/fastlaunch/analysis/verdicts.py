"""Compare the rows of a workload with its baseline: ratios, verdicts and their reasons."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from fastlaunch.analysis.differences import LEAVES, SETTLES, Differences, RunTime, rounds_to_settle
from fastlaunch.analysis.looks import Looked, look_through, share_of_both
from fastlaunch.analysis.notes import (
    Note,
    NoteKind,
    difference_notes,
    notes_on_figures,
    run_notes,
    uneven_note,
    version_notes,
)
from fastlaunch.analysis.pooling import Group, are_comparable, run_times
from fastlaunch.analysis.statistics import BETTER, LEVEL, TIE, UNRESOLVED, WORSE, Difference
from fastlaunch.analysis.validity import Validity
from fastlaunch.catalog.prices import Price
from fastlaunch.core.units import counted
from fastlaunch.measure.summary import Interval

BASELINE, NO_INTERVAL, NOT_RANKED, OTHER_BATCH = "baseline", "no interval", "not ranked", "other batch"
TRAINING, THROUGHPUT = "training", "throughput"
#: The rounds that give single runs a verdict.
_MORE_OF_ONE = 2
#: The verdicts of ranked rows.
RANKED = (BETTER, BASELINE, TIE, UNRESOLVED, WORSE)


@dataclass(frozen=True, kw_only=True)
class PricedGroup:
    """The runs of a row with their price."""

    group: Group
    price: Price | None  # of one node; None if unknown
    validity: Validity
    unverified: bool = False  # rank it even if its validity bars it

    @property
    def is_barred(self) -> bool:
        return bool(self.validity.failures) and not self.unverified

    @property
    def bars(self) -> list[Note]:
        """The notes on what bars it from ranking."""
        return [Note(text, NoteKind.BAR) for text in self.validity.failures] if self.is_barred else []


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a row compares with its baseline; the ratios' intervals are at Holm's level."""

    ratio: Interval | None  # of samples per dollar
    speed_ratio: Interval | None  # of samples/s
    kind: str  # better, worse, tie, unresolved, baseline, no interval, not ranked, other batch
    reasons: tuple[Note, ...]
    comparable_as: str
    decisive: tuple[Note, ...] = ()  # the reasons that matter for a decision
    more_rounds: int | None = None  # about as many would settle it, or give a first verdict
    #: The verdict beside a baseline of its own batch, if that is another one and other rows share it.
    in_batch: "Verdict | None" = None

    @property
    def is_ranked(self) -> bool:
        return self.kind in RANKED

    @property
    def in_own_batch(self) -> "Verdict":
        """The verdict beside the baseline that `words` are about: of the row's batch, if that has one."""
        return self.in_batch or self

    @property
    def words(self) -> str:
        """The kind as tables show it; for a row of another batch, its kind there if known."""
        return f"{self.in_batch.kind} in its batch" if self.in_batch else self.kind


#: The verdict on a row that nobody asked to judge.
UNJUDGED = Verdict(ratio=None, speed_ratio=None, kind=NOT_RANKED, reasons=(), comparable_as=TRAINING)


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A row and its baseline. Quantities are logarithms; more is better."""

    row: PricedGroup
    base: PricedGroup
    # The quantity of the verdict: dollars if both have a price, else speed; None without a ratio.
    gain: float | None
    by_price: float  # the part of `gain` that comes from the price
    difference: Difference | None
    # Deviations of its (or the baseline's) runs and of the others', if its runs vary more.
    noise: tuple[float, float] | None = None
    noise_of_base: tuple[float, float] | None = None
    looked: Looked | None = None  # None if there can be no verdict

    @property
    def is_priced(self) -> bool:
        return self.row.price is not None and self.base.price is not None

    @property
    def trains_alike(self) -> bool:
        row, base = self.row.group.setup, self.base.group.setup
        return (row.global_batch, row.sequence_length) == (base.global_batch, base.sequence_length)

    @property
    def is_tested(self) -> bool:
        return self.trains_alike and not self.row.is_barred


def judge(items: Sequence[PricedGroup], base: PricedGroup, *, sides: Collection[str | None]) -> list[Verdict]:
    """Return a verdict for each of `items`, of which `base` is one, Holm-corrected together.

    Barred rows and rows of another batch get no verdict and do not count in the correction; their intervals
    are at 95%. A settled verdict stays settled at later looks: see `looks`. sides: whose rows'
    verdicts are asked for; those of other rows may lack their looks.
    """
    runs = [run for number, item in enumerate(items) for run in run_times(item.group, number)]
    usd = {
        at: item.price.usd_per_hour * item.group.setup.num_nodes
        for at, item in enumerate(items)
        if item.price is not None
    }
    differences = Differences(runs, usd)
    number = next(number for number, item in enumerate(items) if item is base)
    pairs = {
        at: _pair(item, base, differences, at, number) for at, item in enumerate(items) if item is not base
    }
    tested = [at for at, pair in pairs.items() if pair.is_tested and pair.difference]
    has_tested = any(items[at].group.side in sides for at in tested)
    for at, looked in look_through(runs, tested if has_tested else (), number, usd).items():
        # Take value and interval from the same runs.
        difference = looked.difference
        pairs[at] = replace(pairs[at], looked=looked, difference=difference, gain=difference.value)
    return [_of_baseline(base) if item is base else _judge(pairs[at]) for at, item in enumerate(items)]


def _pair(row: PricedGroup, base: PricedGroup, differences: Differences, at: int, of_base: int) -> _Pair:
    by_price = differences.by_price(at, of_base)
    if not are_comparable(row.group, base.group):
        return _Pair(row=row, base=base, gain=None, by_price=by_price, difference=None)
    difference = differences.between(at, of_base)
    noise, noise_of_base = (
        differences.deviations(number) if differences.noise(number) > LEAVES else None
        for number in (at, of_base)
    )
    return _Pair(
        row=row,
        base=base,
        gain=difference.value if difference else differences.log_ratio(at, of_base),
        by_price=by_price,
        difference=difference,
        noise=noise,
        noise_of_base=noise_of_base,
    )


def _judge(pair: _Pair) -> Verdict:
    level = pair.looked.level if pair.looked else LEVEL
    limits = pair.difference.limits(level) if pair.difference else None
    by_speed = pair.gain is not None and not pair.is_priced
    kind, why, more = _classify(pair)
    method = tuple(_of_method(pair)) if pair.is_tested else ()
    versions = tuple(version_notes(pair.row.group, pair.base.group))
    uneven = uneven_note((pair.row.group, pair.base.group)) if kind == UNRESOLVED else None
    if uneven:
        method = (uneven, *method)
    return Verdict(
        ratio=_ratio(pair, limits, by_price=0.0) if pair.is_priced else None,
        speed_ratio=_ratio(pair, limits, by_price=pair.by_price),
        kind=kind,
        reasons=_notes(
            *why,
            *_of_plan(pair.looked),
            *method,
            *versions,
            *difference_notes(pair.row.group, pair.base.group, by_speed=by_speed),
            *run_notes(pair.row.group),
            *_of_validity(pair.row),
        ),
        comparable_as=TRAINING if pair.trains_alike else THROUGHPUT,
        decisive=_notes(
            *(why[:1] if kind != NO_INTERVAL else ()),
            *versions,
            *(method if kind != NO_INTERVAL else ()),
            *notes_on_figures(pair.row.group.summaries),
        ),
        more_rounds=more,
    )


def _of_baseline(base: PricedGroup) -> Verdict:
    """Return the baseline's own verdict: its ratios are exactly 1."""
    one = Interval(value=1.0, low=1.0, high=1.0)
    timed = base.group.measure is not None
    why = [] if len(base.group.runs) > 1 else [_why_no_interval(base.group)]
    return Verdict(
        ratio=one if timed and base.price is not None else None,
        speed_ratio=one if timed else None,
        kind=NOT_RANKED if base.is_barred else BASELINE,
        reasons=_notes(*base.bars, *why, *run_notes(base.group), *_of_validity(base)),
        comparable_as=TRAINING,
        decisive=tuple(notes_on_figures(base.group.summaries)),
    )


def _notes(*texts: str) -> tuple[Note, ...]:
    return tuple(map(Note.of, texts))


def _ratio(pair: _Pair, limits: tuple[float, float] | None, *, by_price: float) -> Interval | None:
    """Return the ratio of the verdict's quantity, less `by_price`."""
    if pair.gain is None:
        return None
    value = exp(pair.gain - by_price)
    if limits is None:
        return Interval(value=value)
    return Interval(value=value, low=exp(limits[0] - by_price), high=exp(limits[1] - by_price))


def ratio_between(differences: Differences, runs: Sequence[RunTime], row: int, base: int) -> Interval | None:
    """Return the ratio of `row` to `base` at 95%, or wider after several looks; None without an interval.

    runs: those of `differences`.
    """
    difference = differences.between(row, base)
    if difference is None:
        return None
    # Rows with earlier looks have less of the level to spend.
    low, high = difference.limits(LEVEL * share_of_both(runs, row, base))
    return Interval(value=exp(difference.value), low=exp(low), high=exp(high))


def exp(logarithm: float) -> float:
    """Return e to the power, clipped to e^700 and its inverse, since a file may hold absurd numbers."""
    return math.exp(max(-700.0, min(logarithm, 700.0)))


def _classify(pair: _Pair) -> tuple[str, Sequence[str], int | None]:
    """Return the verdict, the reasons, and how many more rounds would settle it."""
    if pair.row.is_barred:
        return NOT_RANKED, pair.row.bars, None
    if pair.gain is None:
        return NO_INTERVAL, ["no speed that compares with the baseline's is known"], None
    if not pair.trains_alike:
        return OTHER_BATCH, [], None
    looked = pair.looked
    if pair.difference is None or looked is None:
        is_of_base = len(pair.base.group.runs) < 2 <= len(pair.row.group.runs)
        why = _why_no_interval(pair.base.group if is_of_base else pair.row.group)
        number = _MORE_OF_ONE if _is_measured(pair.base.group) and _is_measured(pair.row.group) else None
        return NO_INTERVAL, [f"the baseline has no interval: {why}" if is_of_base else why], number
    if looked.kind != UNRESOLVED:
        return looked.kind, [], None
    proposal = rounds_to_settle(pair.difference, looked.next_level)
    if proposal is None:
        return UNRESOLVED, ["runs of both in one session tell more"], None
    number, share = proposal
    if share < SETTLES:
        chance = f"only a {round(share, 1):.0%} chance" if share >= 0.05 else "hardly a chance"
        why = f"even {number} more rounds have {chance} of settling this"
        on_one = pair.difference.num_hosts == 1
        what = "longer, or on a quieter machine" if on_one else "rounds on further machines"
        return UNRESOLVED, [f"{why}; run {what}"], None
    return UNRESOLVED, [f"about {counted(number, 'more round')} would settle it (4 chances in 5)"], number


def _of_plan(looked: Looked | None) -> Iterator[str]:
    """Yield the round of the plan that settled it."""
    if looked and looked.contradicted:
        yield f"its first runs had settled it as {looked.contradicted}, and all together say the opposite"
    if looked and looked.max_rounds is not None:
        settled = "not settled" if looked.kind == UNRESOLVED else "settled"
        yield f"{settled} after round {looked.round} of at most {looked.max_rounds}"


def _of_method(pair: _Pair) -> Iterator[str]:
    """Yield notes on what the interval allows for."""
    difference = pair.difference
    if difference is None:
        return
    if pair.noise_of_base:
        yield (
            f"the baseline's runs vary by {_percents(pair.noise_of_base)}: hence wide intervals; another"
            " baseline would be sharper"
        )
    if pair.noise:
        yield f"its runs vary by {_percents(pair.noise)}: hence its wide interval"
    if difference.carried:
        yield (
            f"noise carries over from one round to the next (correlation {difference.carried:.1f}): the"
            " interval is wider, and rounds of another session tell more"
        )
    if difference.is_across_hosts:
        what = "in another session" if _on_same_machines(pair) else "on another machine"
        yield f"ran {what} than the baseline, which alone may account for 2%"
    if difference.drift:
        yield (
            f"its steps or the baseline's were still changing: the interval is wider by "
            f"{100 * difference.drift:.1f}%, and longer runs will show"
        )
    if difference.num_hosts > 1:
        yield f"ran on {difference.num_hosts} machines: the interval allows for how ratios vary by machine"


def _on_same_machines(pair: _Pair) -> bool:
    row, base = (
        {(run.environment.host_id, run.setup.instance) for run in item.group.summaries}
        for item in (pair.row, pair.base)
    )
    return row == base and None not in {host for host, _ in row}


def _percents(deviations: tuple[float, float]) -> str:
    """`11% where the others' vary by 0.2%`"""
    of_row, others = (
        f"{100 * deviation:.2g}%" if deviation < 0.995 else f"{100 * deviation:,.0f}%"
        for deviation in deviations
    )
    return f"{of_row} where the others' vary by {others}"


def is_single(group: Group) -> bool:
    """Return whether the row is one run, whose time is known."""
    return len(group.runs) == 1 and _is_measured(group)


def _is_measured(group: Group) -> bool:
    return bool(group.log_times) and group.first.setup.kind == "records"


def _why_no_interval(group: Group) -> str:
    if not group.log_times:
        return "no time or speed is known"
    if group.first.setup.kind == "published":
        return "published, without repeats"
    if is_single(group):
        return "one run: a second and third give a verdict"
    return "its runs share no round with another row's that tells how they vary"


def _of_validity(item: PricedGroup) -> Iterator[str]:
    """Yield what is unknown about the row's numerics and convergence, and which failures are disregarded."""
    if item.unverified:
        for failure in item.validity.failures:
            yield Note(f"ranked all the same (--allow-unverified): {failure}", NoteKind.BAR)
    yield from item.validity.notes

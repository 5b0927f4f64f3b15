"""Find the best row: multiple comparisons with the best, in Bonferroni's form (Hsu 1996).

Every view of the answer (sentence, JSON, Markdown, page) shows the decision made here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fastlaunch.analysis.compare import Row
from fastlaunch.analysis.differences import Differences
from fastlaunch.analysis.looks import share_of_both
from fastlaunch.analysis.pooling import run_times
from fastlaunch.analysis.statistics import BETTER, LEVEL, TIE, UNRESOLVED, WORSE
from fastlaunch.analysis.verdicts import BASELINE, NO_INTERVAL, TRAINING, exp
from fastlaunch.measure.summary import Interval


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best row of a workload: by dollars if all rows have a price, else by speed.

    kind: `better` if the first row beats the baseline; `worse` if the first row is the baseline and the next
    is worse; `tie` or `unresolved`, the first row's verdict; `no interval` if only figures order the two;
    `baseline` if the first row stands alone.
    """

    kind: str
    is_priced: bool
    first: Row  # named first in the answer
    second: Row | None  # compared with the first
    row: Row | None  # the best; None if only figures without an interval would decide
    runner_up: Row | None
    ratio: Interval | None  # best over runner-up, at 95%, or wider after several looks
    # The rows that may be best, the best first; they include the true best in 95% of tables. A row without an
    # interval is included if its figure is no lower, or if no row has an interval.
    may_be_best: tuple[Row, ...]

    @property
    def is_settled(self) -> bool:
        return self.runner_up is not None and len(self.may_be_best) == 1


def ratio_of(row: Row, *, is_priced: bool) -> Interval | None:
    """Return the row's ratio to its baseline, by dollars or by speed."""
    return row.verdict.ratio if is_priced else row.verdict.speed_ratio


def all_priced(rows: Sequence[Row]) -> bool:
    """Return whether dollars compare all rows that speed compares."""
    return all(row.verdict.ratio is not None for row in rows if row.verdict.speed_ratio is not None)


def at_home(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the baseline's owner; all rows if none is a baseline."""
    home = next((row.side for row in rows if row.is_baseline), None)
    return [row for row in rows if row.side == home] or [*rows]


def best_of(rows: Sequence[Row]) -> Best | None:
    """Return the best of a workload's rows; None if none is ranked, or the baseline has no speed.

    Only rows of the baseline's owner count (see `at_home`), and only rows that train as the baseline does.
    Derived rows do not count if enough rows were measured or published as they are.
    """
    alike = [row for row in at_home(rows) if not row.is_barred and row.verdict.comparable_as == TRAINING]
    published = [row for row in alike if not row.derived]
    if len(published) > 1 and any(row.is_baseline for row in published):
        alike = published
    alike = [row for row in alike if row.verdict.speed_ratio is not None]
    base = next((row for row in alike if row.is_baseline), None)
    if base is None:
        return None
    is_priced = all(row.verdict.ratio is not None for row in alike)

    def figure(row: Row) -> float:
        ratio = ratio_of(row, is_priced=is_priced)
        assert ratio is not None
        return ratio.value

    order = _Order([row for row in alike if row.verdict.is_ranked], is_priced=is_priced)
    better = [row for row in order.rows if row.verdict.kind == BETTER]
    others = sorted((row for row in alike if row is not base), key=figure, reverse=True)
    if better:
        kind, first, second = BETTER, better[0], base
    elif not others:
        kind, first, second = BASELINE, base, None
    else:
        kind, first, second = others[0].verdict.kind, others[0], base
        if kind == WORSE or (kind == NO_INTERVAL and figure(first) < 1):
            first, second = base, first
    if kind == NO_INTERVAL:
        # A row worse than the baseline cannot be best; the other rows are unknown.
        may_be_best = [row for row in (base, *others) if row.verdict.kind != WORSE]
        return Best(
            kind=kind,
            is_priced=is_priced,
            first=first,
            second=second,
            row=None,
            runner_up=None,
            ratio=None,
            may_be_best=tuple(sorted(may_be_best, key=figure, reverse=True)),
        )
    best = base if kind in (TIE, UNRESOLVED) and figure(first) < 1 else first
    runner_up = next((row for row in order.rows if row is not best), None)
    unjudged = [row for row in others if row.verdict.kind == NO_INTERVAL and figure(row) >= figure(best)]
    return Best(
        kind=kind,
        is_priced=is_priced,
        first=first,
        second=second,
        row=best,
        runner_up=runner_up,
        ratio=order.ratio(best, runner_up) if runner_up else None,
        may_be_best=(best, *order.rivals(best), *unjudged),
    )


class _Order:
    """Rows with an interval, ordered by the number of rows that they beat."""

    def __init__(self, rows: Sequence[Row], *, is_priced: bool) -> None:
        self._number = {id(row): number for number, row in enumerate(rows)}
        self._is_priced = is_priced
        self._runs = [run for number, row in enumerate(rows) for run in run_times(row.group, number)]
        usd = {
            number: row.price.usd_per_hour * row.setup.num_nodes
            for number, row in enumerate(rows)
            if is_priced and row.price
        }
        self._differences = Differences(self._runs, usd)
        self.rows = sorted(rows, key=lambda row: -sum(self._ahead(row, other) > 0 for other in rows))

    def rivals(self, best: Row) -> list[Row]:
        """Return the other rows that may be best, by the verdict if one of the two is the baseline."""
        others = [row for row in self.rows if row is not best]
        level = LEVEL / max(1, len(others))

        def may_win(other: Row) -> bool:
            pair = {best.verdict.kind, other.verdict.kind}
            if BASELINE in pair:
                return not pair & {BETTER, WORSE}
            difference = self._differences.between(*self._numbers(best, other))
            return difference is None or difference.p_above(0.0) > level * self._share(best, other)

        return list(filter(may_win, others))

    def ratio(self, best: Row, other: Row) -> Interval:
        """Return the ratio of `best` to `other`, as in the verdict if one of the two is the baseline."""
        of_best, of_other = (ratio_of(row, is_priced=self._is_priced) for row in (best, other))
        if other.is_baseline and of_best is not None:
            return of_best
        if best.is_baseline and of_other is not None:
            return _inverse(of_other)
        difference = self._differences.between(*self._numbers(best, other))
        if difference is None:
            return Interval(value=exp(self._ahead(best, other)))
        low, high = difference.limits(LEVEL * self._share(best, other))
        return Interval(value=exp(difference.value), low=exp(low), high=exp(high))

    def _ahead(self, row: Row, other: Row) -> float:
        return self._differences.log_ratio(*self._numbers(row, other))

    def _share(self, row: Row, other: Row) -> float:
        """Return the share of the level to spend: less for rows with earlier looks."""
        return share_of_both(self._runs, *self._numbers(row, other))

    def _numbers(self, row: Row, other: Row) -> tuple[int, int]:
        return self._number[id(row)], self._number[id(other)]


def _inverse(ratio: Interval) -> Interval:
    low, high = ratio.low, ratio.high
    return Interval(value=1 / ratio.value, low=high and 1 / high, high=low and 1 / low)

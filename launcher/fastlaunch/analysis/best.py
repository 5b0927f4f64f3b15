"""Which row is best, and how surely: multiple comparisons with the best, in Bonferroni's form (Hsu 1996)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastlaunch.analysis.compare import Row
from fastlaunch.analysis.differences import Differences
from fastlaunch.analysis.looks import share_of_both
from fastlaunch.analysis.pooling import run_times
from fastlaunch.analysis.statistics import BETTER, LEVEL, TIE, UNRESOLVED, WORSE, Difference
from fastlaunch.analysis.verdicts import BASELINE, exp
from fastlaunch.measure.summary import Interval

#: Verdicts of rows that are in an order.
RANKED = (BASELINE, BETTER, TIE, UNRESOLVED, WORSE)


@dataclass(frozen=True, kw_only=True)
class Best:
    """The row that beats most others of its workload, by dollars where all have a price, else by speed."""

    row: Row
    runner_up: Row | None
    ratio: Interval | None  # of the best over the runner-up, at 95%, or wider after several looks
    # The rows that may be best, the best among them: the true one is here in 95% of tables.
    may_be_best: tuple[Row, ...]

    @property
    def is_settled(self) -> bool:
        return self.runner_up is not None and len(self.may_be_best) == 1


def best_of(rows: Sequence[Row]) -> Best | None:
    """Return the best of a workload's ranked rows; None if none is ranked."""
    ranked = [row for row in rows if row.verdict.kind in RANKED and row.group.measure is not None]
    if not ranked:
        return None
    is_priced = all(row.price is not None for row in ranked)
    runs = [run for at, row in enumerate(ranked) for run in run_times(row.group, at)]
    differences = Differences(runs)

    def offset(at: int, other: int) -> float:
        ours, theirs = ranked[at].price, ranked[other].price
        if not is_priced or ours is None or theirs is None:
            return 0.0
        nodes = ranked[other].setup.num_nodes / ranked[at].setup.num_nodes
        return math.log(theirs.usd_per_hour / ours.usd_per_hour * nodes)

    def ahead(at: int, other: int) -> float:
        return differences.log_ratio(at, other) + offset(at, other)

    def between(at: int, other: int) -> Difference | None:
        difference = differences.between(at, other)
        return difference.plus(offset(at, other)) if difference else None

    def ratio_to(other: int) -> Interval:
        """Return the ratio of the first to `other`: as in the verdict, if one of the two is the baseline."""
        own, of_other = (
            row.verdict.ratio if is_priced else row.verdict.speed_ratio
            for row in (ranked[first], ranked[other])
        )
        if ranked[other].is_baseline and own is not None:
            return own
        if ranked[first].is_baseline and of_other is not None:
            return _inverse(of_other)
        difference = between(first, other)
        if difference is None:
            return Interval(value=exp(ahead(first, other)))
        low, high = difference.limits(LEVEL * share[other])
        return Interval(value=exp(difference.value), low=exp(low), high=exp(high))

    order = sorted(
        range(len(ranked)), key=lambda at: -sum(ahead(at, other) > 0 for other in range(len(ranked)))
    )
    first, *others = order
    level = LEVEL / max(1, len(others))

    def may_win(other: int) -> bool:
        """Return whether `other` may be best. The verdict has decided against a baseline, and between one."""
        pair = {ranked[first].verdict.kind, ranked[other].verdict.kind}
        if BASELINE in pair:
            return not pair & {BETTER, WORSE}
        difference = between(first, other)
        return difference is None or difference.p_above(0.0) > level * share[other]

    # What has been looked at before is judged more strictly.
    share = {other: share_of_both(runs, first, other) for other in others}
    return Best(
        row=ranked[first],
        runner_up=ranked[others[0]] if others else None,
        ratio=ratio_to(others[0]) if others else None,
        may_be_best=tuple(ranked[at] for at in (first, *filter(may_win, others))),
    )


def _inverse(ratio: Interval) -> Interval:
    low, high = ratio.low, ratio.high
    return Interval(value=1 / ratio.value, low=high and 1 / high, high=low and 1 / low)

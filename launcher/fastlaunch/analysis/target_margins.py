"""How far apart rows are that all reached a target: ratios of what it took them, with their intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev

from fastlaunch.analysis.pooling import data_of
from fastlaunch.analysis.statistics import FLOOR, Uncertainty, holm_levels, p_value
from fastlaunch.analysis.target import LOSS, RowToTarget, Target
from fastlaunch.analysis.verdicts import exp
from fastlaunch.measure.summarize import Interval, RunSummary


@dataclass(frozen=True, kw_only=True)
class Margin:
    """How much more another row takes than the best: a ratio, at Holm's level over all the others."""

    best: RowToTarget
    other: RowToTarget
    ratio: Interval

    @property
    def is_settled(self) -> bool:
        return self.ratio.low is not None and self.ratio.low > 1


def are_on_other_data(rows: Sequence[RowToTarget], target: Target) -> bool:
    """Whether the rows were evaluated on different data: what is one's target is then no other's.

    What is held out of images that are made up is the same, whether they come through a loader or not. A
    loss is of tokens: cut otherwise, or into samples of other lengths, the same text has another.
    """
    return len({_evaluated_on(one.row.runs[0].summary, target) for one in rows}) > 1


def _evaluated_on(run: RunSummary, target: Target) -> tuple[object, ...]:
    data = data_of(run).replace("loader", "synthetic")
    return (data, run.fingerprint.get("tokenizer"), run.sequence_length) if target.metric == LOSS else (data,)


def margins(rows: Sequence[RowToTarget], target: Target) -> tuple[Margin, ...]:
    """How far the others that may be ranked are behind the best of them, the nearest first.

    By dollars where every one of them has a price, else by time. None where they are on other data.
    """
    ranked = [row for row in rows if row.is_ranked]
    if len(ranked) < 2 or are_on_other_data(ranked, target):
        return ()
    priced = all(row.usd_per_s for row in ranked)
    means = {id(row): _log_mean(row, priced) for row in ranked}
    ranked.sort(key=lambda row: means[id(row)])
    best, *others = ranked
    ratios = [means[id(other)] - means[id(best)] for other in others]
    errors = [_error(best, other) for other in others]
    levels = holm_levels([p_value(ratio, error) for ratio, error in zip(ratios, errors, strict=True)])
    return tuple(
        Margin(best=best, other=other, ratio=_ratio(ratio, error.half_width(level)))
        for other, ratio, error, level in zip(others, ratios, errors, levels, strict=True)
    )


def _ratio(log_ratio: float, half_width: float) -> Interval:
    return Interval(value=exp(log_ratio), low=exp(log_ratio - half_width), high=exp(log_ratio + half_width))


def _log_mean(row: RowToTarget, priced: bool) -> float:
    """Mean of the log times, or of the log costs."""
    unit = row.usd_per_s if priced and row.usd_per_s else 1.0
    return sum(math.log(time_s) for time_s in row.times_s) / len(row.times_s) + math.log(unit)


def _error(one: RowToTarget, other: RowToTarget) -> Uncertainty:
    """Of the difference of two mean log times, by Welch: how seeds scatter is each recipe's own."""
    parts = []
    for row in (one, other):
        deviation = max(FLOOR, stdev(math.log(time_s) for time_s in row.times_s))
        parts.append((deviation**2 / len(row.times_s), len(row.times_s) - 1))
    variance = sum(part for part, _ in parts)
    return Uncertainty(error=math.sqrt(variance), dof=variance**2 / sum(part**2 / dof for part, dof in parts))

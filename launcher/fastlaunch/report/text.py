"""A comparison in one sentence: what bought the most, by how much, and whether that is established."""

from collections.abc import Sequence

from fastlaunch.analysis.compare import Comparison, Row
from fastlaunch.analysis.statistics import BETTER, TIE, UNRESOLVED, WORSE
from fastlaunch.analysis.verdicts import NO_INTERVAL, NOT_STEADY, THROUGHPUT, TRAINING
from fastlaunch.measure.summarize import Interval
from fastlaunch.report.names import name_of
from fastlaunch.report.table import number


def answer(comparison: Comparison) -> str:
    """The answer, one clause for each workload."""
    workloads = list(dict.fromkeys(row.workload for row in comparison.rows))
    clauses = []
    for workload in workloads:
        rows = [row for row in comparison.rows if row.workload == workload]
        clause = _clause(rows)
        clauses.append(f"{workload}: {clause}" if len(workloads) > 1 else clause)
    return "; ".join(clauses) + "."


def _clause(rows: Sequence[Row]) -> str:
    """Only rows that train alike are ranked, and derived figures only where there are no others.

    Rows that are barred are neither ranked nor named beside those that are.
    """
    barred = [row for row in rows if row.is_barred]
    rows = [row for row in rows if not row.is_barred]
    if not rows:
        return f"nothing is ranked: {named(barred[0], barred)}, {barred[0].guard.failures[0]}"
    base = next(row for row in rows if row.is_baseline)
    trains = [row for row in rows if row.comparable_as == TRAINING and row.verdict != NOT_STEADY]
    published = [row for row in trains if not row.derived]
    # Dollars, unless some of what is compared has no price: then speed, of all of them.
    ranked = published if len(published) > 1 and base in published else trains
    priced = all(row.ratio_to_baseline is not None for row in ranked)
    ranked = [row for row in ranked if _ratio(row, priced) is not None]
    if base not in ranked:
        return f"{named(base, rows)} gives no speed that others can be compared with"
    others = sorted((row for row in ranked if row is not base), key=lambda row: -(_value(row, priced)))
    what = _what(base, priced)
    if not others:
        alone = f"{named(base, rows)}{_gives(base, priced)}"
        if not base.num_runs:
            alone += ", by a step time that did not settle"
        return alone + (_throughput(rows, base) if len(rows) > 1 else "")
    better = [row for row in others if row.verdict == BETTER]
    if better:
        best = better[0]
        return (
            f"{named(best, rows)}{_gives(best, priced)}, {_more(best, priced)} than"
            f" {named(base, rows, beside=best)}{_between(best, priced)}"
            f"{_ahead(others[0], best, rows, priced)}"
        )
    first = others[0]
    if first.verdict == WORSE:
        return (
            f"{named(base, rows)}{_gives(base, priced)}, {_percent(1 / _value(first, priced) - 1)} more"
            f" than {named(first, rows, beside=base)}, the next best"
        )
    if first.verdict == TIE:
        return f"{named(first, rows)} and {named(base, rows)} are within 2% of each other in {what}"
    if first.verdict == UNRESOLVED:
        why = first.reasons[0] if first.reasons else ""
        return (
            f"it is not settled whether {named(first, rows)} gives more {what} than {named(base, rows)}"
            f"{_between(first, priced)}"
            + (f"; {why} would tell" if why.startswith(("about", "more")) else "")
        )
    # No interval: the figures as they stand.
    best, next_best = sorted((base, first), key=lambda row: -_value(row, priced))
    more = _percent(_value(best, priced) / _value(next_best, priced) - 1)
    return (
        f"{named(best, rows)}{_gives(best, priced)}, {more} more than"
        f" {named(next_best, rows, beside=best)}, by figures without an interval"
    )


def _ahead(first: Row, best: Row, rows: Sequence[Row], priced: bool) -> str:
    """That the best by its figure is another than the best of which it is established, if it is."""
    if first is best:
        return ""
    why = "has no interval" if first.verdict == NO_INTERVAL else f"is {first.verdict}"
    return f"; {named(first, rows)} shows {_more(first, priced)}, but {why}"


def _throughput(rows: Sequence[Row], base: Row) -> str:
    num_others = sum(row.comparable_as == THROUGHPUT for row in rows)
    if not num_others:
        if any(row.verdict == NOT_STEADY for row in rows):
            return "; the step times of the others did not settle"
        return "; nothing else here has a speed to compare"
    return "; the other rows have another global batch, and are not ranked as training"


def named(row: Row, rows: Sequence[Row], *, beside: Row | None = None) -> str:
    """The row in words: its recipe, and what tells it from the others; less what it shares with `beside`."""
    if beside is not None and beside.recipe == row.recipe and beside.place != row.place:
        return name_of(row, rows).removeprefix(f"{row.recipe} ")
    return name_of(row, rows)


def _what(row: Row, priced: bool) -> str:
    return f"{row.sample_unit} per dollar" if priced else f"{row.sample_unit}/s"


def _gives(row: Row, priced: bool) -> str:
    quantity = row.samples_per_usd if priced else row.samples_per_s
    return f" gives {number(quantity.value)} {_what(row, priced)}" if quantity else " is the fastest"


def _ratio(row: Row, priced: bool) -> Interval | None:
    return row.ratio_to_baseline if priced else row.speed_ratio_to_baseline


def _value(row: Row, priced: bool) -> float:
    ratio = _ratio(row, priced)
    assert ratio is not None
    return ratio.value


def _more(row: Row, priced: bool) -> str:
    return f"{_percent(_value(row, priced) - 1)} more"


def _between(row: Row, priced: bool) -> str:
    ratio = _ratio(row, priced)
    if ratio is None or ratio.low is None or ratio.high is None:
        return ""
    return f" (between {100 * (ratio.low - 1):+.1f}% and {100 * (ratio.high - 1):+.1f}%)"


def _percent(part: float) -> str:
    return f"{100 * part:.1f}%"

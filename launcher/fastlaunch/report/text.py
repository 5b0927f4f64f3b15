"""A comparison in one sentence: what bought the most, by how much, and whether that is established."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from fastlaunch.analysis.best import Best, best_of
from fastlaunch.analysis.compare import Comparison, Row, batches_of
from fastlaunch.analysis.cost import reciprocal
from fastlaunch.analysis.pooling import BARE_STEP, TOTAL
from fastlaunch.analysis.statistics import BETTER, TIE, UNRESOLVED, WORSE
from fastlaunch.analysis.verdicts import NO_INTERVAL, NOT_RANKED, OTHER_BATCH, THROUGHPUT, TRAINING
from fastlaunch.measure.summary import Interval

NONE = "none"
_BY_FIGURES = "by figures without an interval"
#: Half an interval that reads as the same on both sides.
_EVEN = 0.25
#: Why a row with a higher figure than the best is not the answer.
_WHY_LEFT_OUT = {
    NO_INTERVAL: "has no interval",
    NOT_RANKED: "is not ranked",
    OTHER_BATCH: "trains with another batch",
}


def answer_to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the answer as plain data; of several workloads, an object from workload to answer."""
    answers = {workload: _answer_of(rows) for workload, rows in comparison.by_workload.items()}
    return next(iter(answers.values())) if len(answers) == 1 else answers


def _answer_of(rows: Sequence[Row]) -> dict[str, Any]:
    best = best_of(rows)
    ratio = best.ratio if best else None
    return {
        "sentence": sentence_of(rows),
        "best": name_of(best.row, rows) if best else None,
        "runner_up": name_of(best.runner_up, rows) if best and best.runner_up else None,
        "ratio": vars(ratio) if ratio else None,
        "settled": best.is_settled if best else False,
        "may_be_best": [name_of(row, rows) for row in best.may_be_best] if best else [],
    }


def sentence_of(rows: Sequence[Row]) -> str:
    """Return the answer for one workload."""
    return f"{_clause(rows)}."


def answer(comparison: Comparison) -> str:
    """Return the answer, a sentence and a line for each workload."""
    sentences = {workload: sentence_of(rows) for workload, rows in comparison.by_workload.items()}
    if len(sentences) == 1:
        return next(iter(sentences.values()))
    return "\n".join(f"{workload}: {sentence}" for workload, sentence in sentences.items())


def _clause(rows: Sequence[Row]) -> str:
    """Return the answer for one workload, with the cheapest row that it leaves out and why."""
    best = best_of(rows)
    clause = _of_ranked(rows)
    # By figures it has compared those without an interval, too.
    by_figures = clause.endswith(_BY_FIGURES)
    clause += _may_be_best(best, rows) + _left_out(best, rows, by_figures=by_figures) if best else ""
    of_batches = [f"; at global batch {batch}, {_of_ranked(own)}" for batch, own in batches_of(rows).items()]
    return clause + "".join(of_batches)


def _may_be_best(best: Best, rows: Sequence[Row]) -> str:
    """Return a clause on the rows that may be best, if they are several that beat the baseline."""
    if best.is_settled or any(row.verdict.kind != BETTER for row in best.may_be_best):
        return ""
    return f"; best is one of: {', '.join(name_of(row, rows) for row in best.may_be_best)}"


def _left_out(best: Best, rows: Sequence[Row], *, by_figures: bool) -> str:
    """Return a clause on the best figure of a row that is not ranked, if it is above the best one's."""
    priced = all(row.verdict.ratio is not None for row in rows if row.verdict.speed_ratio is not None)
    of_best = _ratio(best.row, priced)
    # Of a single ranked row the sentence itself goes on to those without an interval, and of other batches.
    kinds = {*_WHY_LEFT_OUT} if best.runner_up else {NOT_RANKED}
    kinds -= {NO_INTERVAL} if by_figures else set()
    others = [row for row in rows if row.verdict.kind in kinds and _ratio(row, priced)]
    if of_best is None or not others:
        return ""
    other = max(others, key=lambda row: _value(row, priced))
    more = _value(other, priced) / of_best.value - 1
    if more <= 0.005:
        return ""
    return f"; {named(other, rows)} shows {_percent(more)} more, but {_WHY_LEFT_OUT[other.verdict.kind]}"


def _of_ranked(rows: Sequence[Row]) -> str:
    """Return the answer for one workload. It ranks rows that train like the baseline and are not barred.

    Where enough rows were measured or published as they are, it leaves out those that were derived.
    """
    barred = [row for row in rows if row.is_barred]
    rows = [row for row in rows if not row.is_barred]
    if not rows:
        return f"nothing is ranked: {named(barred[0], barred)}, {barred[0].validity.failures[0]}"
    base = next(row for row in rows if row.is_baseline)
    trains = [row for row in rows if row.verdict.comparable_as == TRAINING]
    published = [row for row in trains if not row.derived]
    # By dollars if every row has a price, else by speed.
    ranked = published if len(published) > 1 and base in published else trains
    priced = all(row.verdict.ratio is not None for row in ranked)
    ranked = [row for row in ranked if _ratio(row, priced) is not None]
    if base not in ranked:
        return f"{named(base, rows)} gives no speed that others can be compared with"
    others = sorted((row for row in ranked if row is not base), key=lambda row: -(_value(row, priced)))
    what = what_counts(base, priced)
    if not others:
        alone = f"{named(base, rows)}{_gives(base, priced)}"
        return alone + (_throughput(rows, base) if len(rows) > 1 else "")
    better = [row for row in others if row.verdict.kind == BETTER]
    if better:
        best = better[0]
        return (
            f"{named(best, rows)}{_gives(best, priced)}, {_more(best, priced)} than"
            f" {named(base, rows, beside=best)}{between(_ratio(best, priced))}"
        )
    first = others[0]
    if first.verdict.kind == WORSE:
        ratio = _ratio(first, priced)
        assert ratio is not None
        return (
            f"{named(base, rows)}{_gives(base, priced)}, {_percent(1 / _value(first, priced) - 1)} more"
            f" than {named(first, rows, beside=base)}, the next best{between(reciprocal(ratio))}"
        )
    if first.verdict.kind == TIE:
        return f"{named(first, rows)} and {named(base, rows)} give the same {what} within 2%"
    if first.verdict.kind == UNRESOLVED:
        why = first.verdict.reasons[0] if first.verdict.reasons else ""
        return (
            f"it is not settled whether {named(first, rows)} gives more {what} than {named(base, rows)}"
            f"{between(_ratio(first, priced))}" + (f"; {why}" if "would settle" in why else "")
        )
    # Without an interval we can only give the figures.
    best, next_best = sorted((base, first), key=lambda row: -_value(row, priced))
    more = _percent(_value(best, priced) / _value(next_best, priced) - 1)
    return (
        f"{named(best, rows)}{_gives(best, priced)}, {more} more than"
        f" {named(next_best, rows, beside=best)}, {_BY_FIGURES}"
    )


def _throughput(rows: Sequence[Row], base: Row) -> str:
    num_others = sum(row.verdict.comparable_as == THROUGHPUT for row in rows)
    if not num_others:
        return "; nothing else here has a speed to compare"
    return "; the other rows have another global batch, and are not ranked as training"


def named(row: Row, rows: Sequence[Row], *, beside: Row | None = None) -> str:
    """Return the row's name. After the name of `beside`, a row of the same recipe, its place is enough."""
    if beside is not None and beside.setup.recipe == row.setup.recipe and beside.place != row.place:
        return name_of(row, rows).removeprefix(f"{row.setup.recipe} ")
    return name_of(row, rows)


def what_counts(row: Row, priced: bool) -> str:
    """Return `images per dollar`; where not all rows have a price `images/s`."""
    unit = rate_of(row)[1]
    return f"{unit.partition('/')[0]} per dollar" if priced else unit


def _gives(row: Row, priced: bool) -> str:
    quantity = row.cost.samples_per_usd.value if row.cost.samples_per_usd else None
    value = quantity if priced else rate_of(row)[0]
    if value is None:
        return " gives the most" if priced else " is the fastest"
    return f" gives {number(value)} {what_counts(row, priced)}"


def rate_of(row: Row) -> tuple[float | None, str]:
    """Return `625, "images/s"`; without samples that are known `"steps/s"`, and without steps `"runs/h"`."""
    speed = row.speed
    if row.group.measure == BARE_STEP and speed.step_time_s:
        return 1 / speed.step_time_s.value, "steps/s"
    if row.group.measure == TOTAL and speed.total_time_s:
        return 3600 / speed.total_time_s.value, "runs/h"
    return speed.samples_per_s.value if speed.samples_per_s else None, f"{row.setup.sample_unit}/s"


def rate_text(row: Row) -> str | None:
    """Return what `rate_of` counts, with its range; None if the row has no rate."""
    rate, _ = rate_of(row)
    return with_range(row.speed.samples_per_s) or (None if rate is None else f"{rate:.3g}")


def _ratio(row: Row, priced: bool) -> Interval | None:
    return row.verdict.ratio if priced else row.verdict.speed_ratio


def _value(row: Row, priced: bool) -> float:
    ratio = _ratio(row, priced)
    assert ratio is not None
    return ratio.value


def _more(row: Row, priced: bool) -> str:
    return f"{_percent(_value(row, priced) - 1)} more"


def between(ratio: Interval | None) -> str:
    """Return ` (between +1.2% and +3.4%)`; nothing without an interval."""
    if ratio is None or ratio.low is None or ratio.high is None:
        return ""
    if is_boundless(ratio):
        return " (so far anything is possible)"
    return f" (between {100 * (ratio.low - 1):+.1f}% and {100 * (ratio.high - 1):+.1f}%)"


def _percent(part: float) -> str:
    return f"{100 * part:.1f}%"


def name_of(row: Row, rows: Sequence[Row]) -> str:
    """Return the row's recipe, with as much more as tells it from the other rows."""
    name = row.setup.recipe
    if len({other.place for other in rows}) > 1:
        name += f" on {row.place}"
    alike = [other for other in rows if (other.setup.recipe, other.place) == (row.setup.recipe, row.place)]
    if len({other.setup.num_gpus for other in alike}) > 1:
        name += f" x {row.setup.num_gpus}"
    if len({other.setup.batch_size_per_gpu for other in alike} - {None}) > 1:
        name += f" at batch {row.setup.batch_size_per_gpu}"
    if len({other.setup.sequence_length for other in alike}) > 1:
        name += f" of {row.setup.sequence_length} tokens"
    of_a_kind = [other for other in alike if other.setup.data == row.setup.data]
    if len({other.setup.fingerprint.get("data") for other in of_a_kind}) > 1:
        name += f" from {row.setup.data} {row.setup.fingerprint.get('data', 'not identified')}"
    elif len(of_a_kind) < len(alike):
        name += f" from {row.setup.data}"
    same = [other for other in alike if _setup_of(other) == _setup_of(row)]
    if terms := _terms(row, same):
        name += f" ({', '.join(terms)})"
    if versions := _versions(row, same):
        name += f" with {', '.join(versions)}"
    return name


def which(row: Row, rows: Sequence[Row]) -> str:
    """Return `spot, torch 2.6.0`: what tells the row from others with the same columns."""
    same = [other for other in rows if _columns(other) == _columns(row)]
    return ", ".join([*_terms(row, same), *_versions(row, same)])


def _columns(row: Row) -> tuple[object, ...]:
    return row.setup.recipe, row.place, *_setup_of(row), row.setup.fingerprint.get("data")


def _setup_of(row: Row) -> tuple[object, ...]:
    return row.setup.num_gpus, row.setup.batch_size_per_gpu, row.setup.sequence_length, row.setup.data


def _terms(row: Row, same: Sequence[Row]) -> list[str]:
    """Return `sagemaker`, `us-west-2`, `spot`: how its machine was rented, as far as that differs."""
    offers = zip(row.offer, *(other.offer for other in same), strict=True)
    return [own for own, *others in offers if len(set(others)) > 1]


def _versions(row: Row, same: Sequence[Row]) -> list[str]:
    """Return `torch 2.6.0`: the versions by which the row differs from others of the same setup."""
    own, others = row.setup.fingerprint, [other.setup.fingerprint for other in same]
    names = dict.fromkeys(name for of in others for name in sorted(of) if name != "data")
    differing = [name for name in names if len({of.get(name) for of in others}) > 1]
    return [f"{name} {own.get(name, NONE)}" for name in differing]


def dollars(value: float) -> str:
    """Return `1,062`, `10.62`, `7.29`, `0.0123`."""
    return f"{value:,.2f}" if 0.9995 <= value < 999.5 else number(value)


def number(value: float) -> str:
    """Return three digits or more, thousands grouped: `1,249`, `156`, `41.6`, `7.29`, `0.0123`."""
    if value >= 99.95:
        return f"{value:,.0f}" if value < 1e12 else f"{value:.3g}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.9995 else f"{value:.3g}"


def about(value: float) -> str:
    """Return a count to three digits: `12,300`, `600`, `7`."""
    if not 0 < value < 1e15:
        return f"{value:.3g}"
    digits = 2 - math.floor(math.log10(value))
    return f"{round(value, min(digits, 0)):,.0f}" if value >= 9.95 else f"{value:.2g}"


def with_range(
    quantity: Interval | None, *, factor: float = 1.0, format_value: Callable[[float], str] = number
) -> str | None:
    """Return `1,234 ±0.8%`, the quantity x `factor`; None if it is unknown or not finite."""
    if quantity is None or not 0 < quantity.value * factor < math.inf:
        return None
    return f"{format_value(quantity.value * factor)}{limits(quantity, factor, format_value)}"


def limits(quantity: Interval, factor: float, format_value: Callable[[float], str]) -> str:
    """Return ` ±0.8%`, half the interval in percent of the value; nothing without an interval.

    A wide one is no longer the same on both sides: ` (1.02 to 1.89)`.
    """
    if quantity.low is None or quantity.high is None:
        return ""
    half = (quantity.high - quantity.low) / 2 / quantity.value
    if half <= _EVEN:
        return f" ±{100 * half:.1f}%"
    if is_boundless(quantity):
        return " (wider than 100x)"
    return f" ({format_value(quantity.low * factor)} to {format_value(quantity.high * factor)})"


def is_boundless(ratio: Interval) -> bool:
    """Return whether the interval is so wide that its limits say nothing."""
    return ratio.low is not None and ratio.high is not None and ratio.high > 100 * ratio.low


def span(values: Sequence[float], format_value: Callable[[float], str]) -> str | None:
    """Return `100 to 300`, the least and the greatest value; one of them if they read alike."""
    if not values:
        return None
    low, high = format_value(min(values)), format_value(max(values))
    return low if low == high else f"{low} to {high}"

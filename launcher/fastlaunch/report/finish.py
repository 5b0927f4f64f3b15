"""What jobs cost to their end, as a table for people and as plain data for programs."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from fastlaunch.analysis.compare import Comparison, Row
from fastlaunch.analysis.finish import (
    PARTS,
    USD,
    WORDS,
    BreakEven,
    Finish,
    ToFinish,
    cheapest,
    cheapest_in_turn,
    to_finish,
)
from fastlaunch.analysis.pooling import BARE_STEP
from fastlaunch.analysis.verdicts import THROUGHPUT, TRAINING
from fastlaunch.measure.summary import Interval
from fastlaunch.report.data import place_to_json, product, quantity_to_json
from fastlaunch.report.table import WIDTH, bulleted, grid
from fastlaunch.report.text import about, dollars, name_of, number, with_range


def finish_table(comparison: Comparison, steps: float, *, width: int = WIDTH) -> str:
    """Return time and cost of a job of `steps` steps of the baseline, and the break-even points.

    Raises UserError for a number of steps that is not above 0.
    """
    return "\n\n".join(_section(result, width) for result in to_finish(comparison, steps))


def finish_json(comparison: Comparison, steps: float) -> dict[str, Any]:
    """Return the same as plain data; docs/reference.md describes its shape."""
    return {"steps": steps, "workloads": [_to_json(result) for result in to_finish(comparison, steps)]}


def _section(result: ToFinish, width: int) -> str:
    """Return one workload: rows that train alike, those that do not, break-even points, what is left out."""
    rows = [finish.row for finish in result.rows]
    unit = rows[0].setup.sample_unit
    parts = [f"{result.workload}: to the end of {_steps(result)}"]
    if _counts_samples(result):
        parts[0] += f", {about(result.samples)} {unit}"
    trains = [finish for finish in result.rows if finish.row.verdict.comparable_as == TRAINING]
    others = [finish for finish in result.rows if finish.row.verdict.comparable_as == THROUGHPUT]
    if trains:
        parts.append(_table(trains, rows, width))
    if others:
        parts.append(f"throughput, not training progress (as many {unit}, in other batches or lengths):")
        parts.append(_table(others, rows, width))
    parts.append(bulleted([*sentences(result), *_left_out(result)], width))
    return "\n\n".join(part for part in parts if part)


def _counts_samples(result: ToFinish) -> bool:
    """Whether `samples` are not steps of a script whose samples are not known."""
    return all(finish.row.group.measure != BARE_STEP for finish in result.rows)


def _table(finishes: Sequence[Finish], rows: Sequence[Row], width: int) -> str:
    with_steps = any(finish.row.verdict.comparable_as != TRAINING for finish in finishes)
    shown = [name for name in PARTS if any(finish.parts_s.get(name) for finish in finishes)]
    return grid(
        [
            {
                "row": name_of(finish.row, rows),
                "steps": about(finish.steps) if with_steps else None,
                **{f"{WORDS.get(name, name)} s": _seconds(finish.parts_s.get(name)) for name in shown},
                "total s": with_range(finish.total_s),
                "total $": with_range(finish.usd, format_value=dollars),
            }
            for finish in finishes
        ],
        width=width,
    )


def _seconds(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return number(seconds) if seconds >= 99.95 else f"{round(seconds, 1) + 0.0:.1f}"


def sentences(result: ToFinish) -> Iterator[str]:
    """Yield what is cheapest for this job, where that changes, and each row beside the baseline."""
    rows = [finish.row for finish in result.rows]
    ranked = [pair for pair in result.break_evens if pair.trains_alike and _is_of_baseline_batch(pair)]
    if cheapest_sentence := _cheapest(result, ranked, rows):
        yield cheapest_sentence
    turns = list(cheapest_in_turn(ranked))
    for pair in turns:
        yield sentence(pair, rows)
    for pair in result.break_evens:
        if (pair.first.is_baseline or pair.second.is_baseline) and not any(pair is turn for turn in turns):
            yield sentence(pair, rows)


def _steps(result: ToFinish) -> str:
    return f"{about(result.steps)} step{'' if result.steps == 1 else 's'}"


def _is_of_baseline_batch(pair: BreakEven) -> bool:
    return pair.first.verdict.comparable_as == TRAINING


def _cheapest(result: ToFinish, pairs: Sequence[BreakEven], rows: Sequence[Row]) -> str | None:
    """Return `10,000 steps cost least with compile: $12.30`, and which rows are too close to tell.

    Where the totals hold what does not count here, those of two rows may be the other way round: then it is
    said, and no total given.
    """
    row = cheapest(pairs, result.samples)
    finish = next((entry for entry in result.rows if entry.row is row), None)
    if row is None or finish is None or finish.total_s is None:
        return None
    by_price = all(pair.by == USD for pair in pairs)
    own = [pair for pair in pairs if row is pair.first or row is pair.second]
    what = f"{'cost least' if by_price else 'are done first'} with {name_of(row, rows)}"
    if apart := _only_in_totals(result, own):
        what += f", {' and '.join(WORDS.get(part, part) for part in apart)} apart"
    elif by_price and finish.usd is not None:
        what += f": ${dollars(finish.usd.value)}"
    else:
        what += f": {number(finish.total_s.value)} s"
    differences = [(pair, pair.difference(result.samples)) for pair in own]
    close = [
        name_of(pair.second if pair.first is row else pair.first, rows)
        for pair, difference in differences
        if difference.low is not None and difference.high is not None
        if difference.low <= 0 <= difference.high
    ]
    if any(difference.low is None for _, difference in differences):
        what += ", by figures without an interval"
    return f"{_steps(result)} {what}" + (f"; too close to tell: {', '.join(close)}" if close else "")


def _only_in_totals(result: ToFinish, pairs: Sequence[BreakEven]) -> list[str]:
    """Return the parts that are in some row's total and do not count where rows are compared."""
    by_row = {id(finish.row): finish.parts_s for finish in result.rows}
    return [
        part
        for part in PARTS
        if any(
            part in pair.left_out and (by_row[id(pair.first)].get(part) or by_row[id(pair.second)].get(part))
            for pair in pairs
        )
    ]


def sentence(pair: BreakEven, rows: Sequence[Row]) -> str:
    """Return `compile-max-autotune is cheaper than compile only after about 12,300 steps (11,900 to
    12,700)`.
    """
    less = "cheaper" if pair.by == USD else "done sooner"
    loser = pair.first if pair.long is pair.second else pair.second
    claim = f"{name_of(pair.long, rows)} is {less} than {name_of(loser, rows)}"
    samples = (pair.samples, pair.first.setup.sample_unit)
    crossing, unit = (pair.steps, "steps") if pair.trains_alike else samples
    heading = "" if pair.trains_alike else "as throughput, not training progress: "
    if pair.settled is False and pair.compiles_alike:
        return f"{heading}{name_of(pair.first, rows)} and {name_of(pair.second, rows)} are too close to tell"
    bare = ", by figures without an interval" if pair.settled is None else ""
    if crossing is not None:
        return f"{heading}{claim} only after about {about(crossing.value)} {unit}{_between(crossing)}{bare}"
    if pair.settled is False:
        close = "for a long one their step times are too close to tell"
        return f"{heading}{claim} for a short job; {close}"
    return f"{heading}{claim} from the first {unit.removesuffix('s')} on{bare}"


def _between(crossing: Interval) -> str:
    if crossing.low is None:
        return ""
    if crossing.high is None:
        return f", if ever: their step times do not settle it (not before {about(crossing.low)})"
    return f" ({crossing.range_text(about)})"


def _left_out(result: ToFinish) -> Iterator[str]:
    """Yield why a row has no total, and what is in no total, or counts in totals only."""
    rows = [finish.row for finish in result.rows]
    for finish in result.rows:
        if finish.reason is not None:
            yield f"{name_of(finish.row, rows)}: n/a, {finish.reason}"
        elif finish.row.is_barred:
            yield f"{name_of(finish.row, rows)} is {finish.row.verdict.kind}, so it is not compared"
    known = [finish for finish in result.rows if finish.account is not None]
    by_parts: dict[tuple[str, ...], list[str]] = {}
    for finish in known:
        by_parts.setdefault(finish.unknown, []).append(name_of(finish.row, rows))
    for parts, names in by_parts.items():
        if parts:
            of = "" if len(names) == len(known) else f" for {', '.join(names)}"
            yield f"not included{of}, because unknown: {', '.join(WORDS.get(part, part) for part in parts)}"
    unlike = {part for pair in result.break_evens for part in pair.left_out} & {"evaluations", "checkpoints"}
    for part in sorted(unlike - {part for finish in known for part in finish.unknown}):
        yield f"{part} are not equally frequent: they count in the totals, but not where rows are compared"
    if any(finish.total_s and finish.total_s.low is not None for finish in known):
        yield (
            "± and ranges are 95% intervals of the step times, not corrected for several rows as verdicts"
            " are; one-off parts have none"
        )


def _to_json(result: ToFinish) -> dict[str, Any]:
    rows = [finish.row for finish in result.rows]
    return {
        "workload": result.workload,
        "steps": result.steps,
        "samples": product(result.samples) if _counts_samples(result) else None,
        "sample_unit": rows[0].setup.sample_unit,
        "rows": [_row_to_json(finish) for finish in result.rows],
        "break_evens": [_pair_to_json(pair, rows) for pair in result.break_evens],
        "notes": [*sentences(result), *_left_out(result)],
    }


def _row_to_json(finish: Finish) -> dict[str, Any]:
    row, usd_per_s = finish.row, finish.usd_per_s
    return {
        **place_to_json(row),
        "comparable_as": row.verdict.comparable_as,
        "run_ids": list(row.run_ids),
        "steps": finish.steps,
        "usd_per_hour": row.price.usd_per_hour if row.price else None,
        "usd_to_finish": quantity_to_json(finish.usd),
        "time_to_finish_s": quantity_to_json(finish.total_s),
        "parts": {name: _part(seconds, usd_per_s) for name, seconds in finish.parts_s.items()},
        "unknown": list(finish.unknown),
        "reason": finish.reason,
    }


def _part(seconds: float | None, usd_per_s: float | None) -> dict[str, float | None] | None:
    if seconds is None or not math.isfinite(seconds):
        return None
    return {"seconds": seconds, "usd": product(seconds, usd_per_s)}


def _pair_to_json(pair: BreakEven, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "first": place_to_json(pair.first),
        "second": place_to_json(pair.second),
        "by": pair.by,
        "comparable_as": TRAINING if pair.trains_alike else THROUGHPUT,
        "cheaper_short": "first" if pair.short is pair.first else "second",
        "cheaper_long": "first" if pair.long is pair.first else "second",
        "samples": quantity_to_json(pair.samples),
        "steps": quantity_to_json(pair.steps),
        "settled": pair.settled,
        "left_out": list(pair.left_out),
        "sentence": sentence(pair, rows),
    }

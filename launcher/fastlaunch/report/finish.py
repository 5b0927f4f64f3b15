"""What jobs cost to their end, as a table for people and as plain data for programs."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from fastlaunch.analysis.accounts import PARTS, WORDS
from fastlaunch.analysis.compare import Comparison
from fastlaunch.analysis.finish import USD, BreakEven, Finish, ToFinish, cheapest, cheapest_in_turn, to_finish
from fastlaunch.analysis.rows import Row
from fastlaunch.analysis.verdicts import NOT_STEADY, THROUGHPUT, TRAINING
from fastlaunch.measure.summarize import Interval
from fastlaunch.report.names import name_of
from fastlaunch.report.table import WIDTH, dollars, number
from fastlaunch.report.words import about, grid, place_to_json, product, quantity_to_json, with_range


def finish_table(comparison: Comparison, steps: float, *, width: int = WIDTH) -> str:
    """The time and the money to the end of a job of `steps` steps of the baseline, and the break-evens.

    Raises UserError for a number of steps that is not above 0.
    """
    return "\n\n".join(_section(found, width) for found in to_finish(comparison, steps))


def finish_json(comparison: Comparison, steps: float) -> dict[str, Any]:
    """The same as plain data; its shape is described in docs/compare-json.md."""
    return {"steps": steps, "workloads": [_to_json(found) for found in to_finish(comparison, steps)]}


def _section(found: ToFinish, width: int) -> str:
    """One workload: rows that train alike, those that do not, where costs cross, and what is left out."""
    rows = [finish.row for finish in found.rows]
    unit = rows[0].sample_unit
    head = f"{found.workload}: to the end of {_steps(found)}, {about(found.samples)} {unit}"
    parts = [head]
    trains = [one for one in found.rows if one.row.comparable_as == TRAINING]
    others = [one for one in found.rows if one.row.comparable_as == THROUGHPUT]
    if trains:
        parts.append(_table(trains, rows, width))
    if others:
        parts.append(f"throughput, not training progress (as many {unit}, batched or cut otherwise):")
        parts.append(_table(others, rows, width))
    notes = [f"* {note}" for note in (*sentences(found), *_left_out(found))]
    parts.append(
        "\n".join(
            textwrap.fill(note, width, subsequent_indent="  ", break_on_hyphens=False) for note in notes
        )
    )
    return "\n\n".join(part for part in parts if part)


def _table(finishes: Sequence[Finish], rows: Sequence[Row], width: int) -> str:
    with_steps = any(finish.row.comparable_as != TRAINING for finish in finishes)
    shown = [name for name in PARTS if any(finish.parts_s.get(name) for finish in finishes)]
    return grid(
        [
            {
                "row": name_of(finish.row, rows),
                "steps": about(finish.steps) if with_steps else None,
                **{f"{WORDS.get(name, name)} s": _seconds(finish.parts_s.get(name)) for name in shown},
                "total s": with_range(finish.total_s),
                "total $": _usd(finish),
            }
            for finish in finishes
        ],
        width=width,
    )


def _seconds(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return number(seconds) if seconds >= 99.95 else f"{round(seconds, 1) + 0.0:.1f}"


def _usd(finish: Finish) -> str | None:
    usd = finish.usd
    if usd is None:
        return None
    text = with_range(usd)
    return text and text.replace(number(usd.value), dollars(usd.value), 1)


def sentences(found: ToFinish) -> Iterator[str]:
    """What is cheapest for this job, where that changes with its length, and each row beside the baseline."""
    rows = [finish.row for finish in found.rows]
    ranked = [pair for pair in found.break_evens if pair.trains_alike and _is_of_baseline_batch(pair)]
    if told := _cheapest(found, ranked, rows):
        yield told
    turns = list(cheapest_in_turn(ranked))
    for pair in turns:
        yield sentence(pair, rows)
    for pair in found.break_evens:
        if (pair.one.is_baseline or pair.other.is_baseline) and not any(pair is turn for turn in turns):
            yield sentence(pair, rows)


def _steps(found: ToFinish) -> str:
    return f"{about(found.steps)} step{'' if found.steps == 1 else 's'}"


def _is_of_baseline_batch(pair: BreakEven) -> bool:
    return pair.one.comparable_as == TRAINING


def _cheapest(found: ToFinish, pairs: Sequence[BreakEven], rows: Sequence[Row]) -> str | None:
    """`10,000 steps cost least with compile: $12.30`, and against which rows that is not settled.

    Where the totals hold what does not count here, those of two rows may be the other way round: then it is
    said, and no total given.
    """
    row = cheapest(pairs, found.samples)
    finish = next((one for one in found.rows if one.row is row), None)
    if row is None or finish is None or finish.total_s is None:
        return None
    by_price = all(pair.by == USD for pair in pairs)
    own = [pair for pair in pairs if row is pair.one or row is pair.other]
    what = f"{'cost least' if by_price else 'are done first'} with {name_of(row, rows)}"
    if apart := _only_in_totals(found, own):
        what += f", {' and '.join(WORDS.get(part, part) for part in apart)} apart"
    elif by_price and finish.usd is not None:
        what += f": ${dollars(finish.usd.value)}"
    else:
        what += f": {number(finish.total_s.value)} s"
    differences = [(pair, pair.difference(found.samples)) for pair in own]
    close = [
        name_of(pair.other if pair.one is row else pair.one, rows)
        for pair, difference in differences
        if difference.low is not None and difference.high is not None
        if difference.low <= 0 <= difference.high
    ]
    if any(difference.low is None for _, difference in differences):
        what += ", by figures without an interval"
    return f"{_steps(found)} {what}" + (f"; too close to tell: {', '.join(close)}" if close else "")


def _only_in_totals(found: ToFinish, pairs: Sequence[BreakEven]) -> list[str]:
    """The parts that are in some row's total and do not count where rows are compared."""
    by_row = {id(finish.row): finish.parts_s for finish in found.rows}
    return [
        part
        for part in PARTS
        if any(
            part in pair.left_out and (by_row[id(pair.one)].get(part) or by_row[id(pair.other)].get(part))
            for pair in pairs
        )
    ]


def sentence(pair: BreakEven, rows: Sequence[Row]) -> str:
    """`compile-max-autotune is cheaper than compile only after about 12,300 steps (11,900 to 12,700)`."""
    less = "cheaper" if pair.by == USD else "done sooner"
    loser = pair.one if pair.long is pair.other else pair.other
    told = f"{name_of(pair.long, rows)} is {less} than {name_of(loser, rows)}"
    crossing, unit = (pair.steps, "steps") if pair.trains_alike else (pair.samples, pair.one.sample_unit)
    heading = "" if pair.trains_alike else "as throughput, not training progress: "
    if pair.settled is False and pair.compiles_alike:
        return f"{heading}{name_of(pair.one, rows)} and {name_of(pair.other, rows)} are too close to tell"
    bare = ", by figures without an interval" if pair.settled is None else ""
    if crossing is not None:
        return f"{heading}{told} only after about {about(crossing.value)} {unit}{_between(crossing)}{bare}"
    if pair.settled is False:
        close = "their step times are too close to tell it of a long one"
        return f"{heading}{told} for a short job; {close}"
    return f"{heading}{told} from the first {unit.removesuffix('s')} on{bare}"


def _between(crossing: Interval) -> str:
    if crossing.low is None:
        return ""
    if crossing.high is None:
        return f", if ever: their step times do not settle it (not before {about(crossing.low)})"
    return f" ({about(crossing.low)} to {about(crossing.high)})"


def _left_out(found: ToFinish) -> Iterator[str]:
    """Why a row has no total, and what is in none, or counts where rows are not compared."""
    rows = [finish.row for finish in found.rows]
    for finish in found.rows:
        if finish.reason is not None:
            yield f"{name_of(finish.row, rows)}: n/a, {finish.reason}"
        elif finish.row.is_barred or finish.row.verdict == NOT_STEADY:
            yield f"{name_of(finish.row, rows)} is {finish.row.verdict}: it is compared with none here"
    known = [finish for finish in found.rows if finish.account is not None]
    by_parts: dict[tuple[str, ...], list[str]] = {}
    for finish in known:
        by_parts.setdefault(finish.unknown, []).append(name_of(finish.row, rows))
    for parts, names in by_parts.items():
        if parts:
            of = "" if len(names) == len(known) else f" of {', '.join(names)}"
            yield f"not known{of}, and not counted: {', '.join(WORDS.get(part, part) for part in parts)}"
    unlike = {part for pair in found.break_evens for part in pair.left_out} & {"evaluations", "checkpoints"}
    for part in sorted(unlike - {part for finish in known for part in finish.unknown}):
        yield f"{part} were not made equally often: they count in the totals, and not where rows are compared"
    if any(finish.total_s and finish.total_s.low is not None for finish in known):
        yield (
            "± and ranges are those of the step times, 95% each, not corrected for several rows as verdicts"
            " are; what comes once is taken as it was measured"
        )


def _to_json(found: ToFinish) -> dict[str, Any]:
    rows = [finish.row for finish in found.rows]
    return {
        "workload": found.workload,
        "steps": found.steps,
        "samples": product(found.samples),
        "sample_unit": rows[0].sample_unit,
        "rows": [_row_to_json(finish) for finish in found.rows],
        "break_evens": [_pair_to_json(pair, rows) for pair in found.break_evens],
        "notes": [*sentences(found), *_left_out(found)],
    }


def _row_to_json(finish: Finish) -> dict[str, Any]:
    row, usd_per_s = finish.row, finish.usd_per_s
    return {
        **place_to_json(row),
        "comparable_as": row.comparable_as,
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
        "first": place_to_json(pair.one),
        "second": place_to_json(pair.other),
        "by": pair.by,
        "comparable_as": TRAINING if pair.trains_alike else THROUGHPUT,
        "cheaper_short": "first" if pair.short is pair.one else "second",
        "cheaper_long": "first" if pair.long is pair.one else "second",
        "samples": quantity_to_json(pair.samples),
        "steps": quantity_to_json(pair.steps),
        "settled": pair.settled,
        "left_out": list(pair.left_out),
        "sentence": sentence(pair, rows),
    }

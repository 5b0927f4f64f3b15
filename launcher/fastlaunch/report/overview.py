"""A comparison on a screen: rows by value with a bar, interval and verdict, and the notes that decide."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from fastlaunch.analysis.compare import Comparison, Row
from fastlaunch.analysis.statistics import BETTER, TIE, UNRESOLVED, WORSE
from fastlaunch.analysis.verdicts import BASELINE, NO_INTERVAL, NOT_RANKED, OTHER_BATCH, TRAINING
from fastlaunch.core.errors import UnknownName
from fastlaunch.core.units import counted
from fastlaunch.measure.summary import Interval
from fastlaunch.report.table import NOTHING, WIDTH, bulleted, heading, notes_of, price_notes
from fastlaunch.report.text import between, dollars, name_of, number, rate_of, what_counts

#: Verdicts by what they mean for the order, and what is said above such rows; nothing above the ranked.
_SECTIONS = {
    "": (BETTER, BASELINE, TIE, UNRESOLVED, WORSE),
    "no interval, so in no order with the others:": (NO_INTERVAL,),
    "not ranked, since they compute or train something else:": (NOT_RANKED,),
    "another batch: throughput, not training progress:": (OTHER_BATCH,),
}
_IN_WORDS = {TIE: "the same within 2%", UNRESOLVED: "not settled"}
#: Arguments of `click.style`: what is not settled yet looks as what is still running.
VERDICT_COLOURS: Mapping[str, Mapping[str, Any]] = {
    BETTER: {"fg": "green"},
    WORSE: {"fg": "red"},
    UNRESOLVED: {"fg": "magenta"},
    TIE: {"dim": True},
}
_BAR, _LEAST_BAR, _GAP = 16, 4, 2
_PARTS = " ▏▎▍▌▋▊▉█"
#: Rows of a section but the first, where there are many in all; notes; and names and lines of a note.
_MANY, _MOST_FURTHER, _MOST_NOTES, _MOST_NAMES, _MOST_LINES = 16, 4, 5, 2, 2


def as_overview(comparison: Comparison, *, width: int = WIDTH) -> str:
    """Return the comparison as text of up to `width` characters a line, without the answer."""
    return "\n\n".join(_section(rows, width) for rows in comparison.by_workload.values())


def why(comparison: Comparison, name: str, *, width: int = WIDTH) -> str:
    """Return all that is to be said of the rows whose name, recipe or run this is. Raises UnknownName."""
    names = {}
    for rows in comparison.by_workload.values():
        for row in rows:
            names[id(row)] = name_of(row, rows)
    chosen = [
        row
        for row in comparison.rows
        if name == names[id(row)] or row.setup.is_named(name) or name in row.run_ids
    ]
    if not chosen:
        raise UnknownName("row", name, {*names.values()})
    texts = []
    for row in chosen:
        ratio = row.verdict.ratio or row.verdict.speed_ratio
        kind = _IN_WORDS.get(row.verdict.kind, row.verdict.kind)
        head = f"{row.setup.workload}, {names[id(row)]}: {kind}, {counted(row.num_runs, 'run')}"
        if ratio and ratio.low != ratio.high:
            what = what_counts(row, priced=row.verdict.ratio is not None)
            head += f", {ratio.value:.3f}x {what} ({_interval(ratio)})"
        head = textwrap.fill(head, width, break_on_hyphens=False)
        reasons: list[str] = [*row.verdict.reasons]
        if own := row.verdict.in_batch:
            ratio = own.ratio or own.speed_ratio
            # The baseline's is 1 there.
            is_known = ratio is not None and ratio.low != ratio.high
            reasons.insert(0, f"{row.verdict.words}{between(ratio) if is_known else ''}")
        texts.append(f"{head}\n{bulleted(reasons or ('nothing more',), width)}")
    return "\n\n".join(texts)


def all_notes(comparison: Comparison, *, width: int = WIDTH) -> str:
    """Return all notes, workload by workload."""
    parts = []
    for workload, rows in comparison.by_workload.items():
        notes, _ = notes_of(rows, brief=False)
        parts.append(f"{workload}:\n{bulleted(notes, width)}" if notes else "")
    return "\n\n".join(part for part in parts if part)


def _section(rows: Sequence[Row], width: int) -> str:
    priced = all(row.verdict.ratio is not None for row in rows if row.verdict.speed_ratio is not None)
    shares = {id(row): ratio.value for row in rows if (ratio := _ratio_of(row, priced))}
    chosen: list[Row] = []
    titles: dict[int, str] = {}
    for title, kinds in _SECTIONS.items():
        alike = [row for row in rows if row.verdict.kind in kinds]
        alike.sort(key=lambda row: -shares.get(id(row), 0.0))
        shown = alike if not title or len(rows) <= _MANY else alike[:_MOST_FURTHER]
        if shown:
            num_hidden = len(alike) - len(shown)
            titles[len(chosen)] = f"{title} ({num_hidden} more with --all)" if num_hidden else title
            chosen += shown
    in_dollars = priced and any(row.cost.usd_per_million_samples for row in rows)
    unit = rate_of(rows[0])[1]
    headings = [
        "recipe",
        f"$/M {unit.partition('/')[0]}" if in_dollars else unit,
        "x base",
        "interval",
        "verdict",
    ]
    cells = [_cells(row, rows, priced, in_dollars) for row in chosen]
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    # A long name gives way, and the bar takes what is left.
    widths[0] = min(widths[0], width - sum(widths[1:]) - _GAP * (len(widths) - 1))
    room = min(_BAR, width - sum(widths) - _GAP * len(widths))
    best = max(shares.values(), default=1.0)
    lines = [
        _line(headings, widths, " " * room if room >= _LEAST_BAR else ""),
        "-" * min(width, sum(widths) + _GAP * 5 + room),
    ]
    for at, (row, texts) in enumerate(zip(chosen, cells, strict=True)):
        if titles.get(at):
            lines.append(textwrap.shorten(titles[at], width, placeholder="..."))
        lines.append(_line(texts, widths, _bar(shares.get(id(row), 0.0) / best, room)))
    parts = [heading(rows, width), "\n".join(line.rstrip() for line in lines)]
    if notes := decisive_notes(chosen, rows)[:_MOST_NOTES]:
        parts.append("\n".join(_short(note, width) for note in notes))
    return "\n\n".join(parts)


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with what is ranked first, and the cheapest of that, or without prices the fastest."""

    def key(row: Row) -> tuple[bool, bool, float, float]:
        usd, rate = row.cost.usd_per_million_samples, row.speed.samples_per_s
        cost = usd.value if usd else math.inf
        return row.is_barred, not is_comparable(row), cost, -rate.value if rate else 0.0

    return sorted(rows, key=key)


def is_comparable(row: Row) -> bool:
    """Return whether the row trains as the baseline does: only such rows are ranked against each other."""
    return row.verdict.comparable_as == TRAINING


def decisive_notes(chosen: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    """Return the notes on prices, and those that change a decision, of the rows in their order.

    A reason of all that are ranked against the baseline names none.
    """
    by_reason: dict[str, list[Row]] = {}
    for row in chosen:
        for note in row.verdict.decisive:
            by_reason.setdefault(note, []).append(row)
    compared = [row for row in chosen if row.verdict.kind in _SECTIONS[""] and not row.is_baseline]
    notes = price_notes(rows)
    for reason, concerned in by_reason.items():
        if len(compared) > 1 and concerned == compared:
            notes.append(reason)
            continue
        names = [name_of(row, rows) for row in concerned]
        num_more = len(names) - _MOST_NAMES if len(names) > _MOST_NAMES + 1 else 0
        more = f" and {num_more} more" if num_more else ""
        notes.append(f"{', '.join(names[: len(names) - num_more])}{more}: {reason}")
    return notes


def _line(texts: Sequence[str], widths: Sequence[int], bar: str) -> str:
    """Return a line of the table, with the bar after the amount."""
    name, amount, *others, verdict = texts
    if len(name) > widths[0]:
        name = f"{name[: widths[0] - 3]}..."
    cells = [name.ljust(widths[0]), amount.rjust(widths[1]), *([bar] if bar else [])]
    cells += [text.rjust(width) for text, width in zip(others, widths[2:-1], strict=True)]
    return (_GAP * " ").join([*cells, verdict])


def _short(note: str, width: int) -> str:
    """Return the note in at most two lines."""
    lines = bulleted([note], width).splitlines()
    if len(lines) <= _MOST_LINES:
        return "\n".join(lines)
    last = textwrap.shorten(" ".join(lines[1:]), width - 2, placeholder=" ...", break_on_hyphens=False)
    return f"{lines[0]}\n  {last}"


def _cells(row: Row, rows: Sequence[Row], priced: bool, in_dollars: bool) -> list[str]:
    ratio = _ratio_of(row, priced)
    cost = row.cost.usd_per_million_samples
    amount = number(rate) if (rate := rate_of(row)[0]) is not None and not in_dollars else None
    if in_dollars and cost is not None:
        amount = dollars(cost.value)
    has_interval = ratio and ratio.low != ratio.high
    return [
        name_of(row, rows),
        amount or NOTHING,
        f"{ratio.value:.3f}" if ratio else NOTHING,
        _interval(ratio) if ratio and has_interval else NOTHING,
        row.verdict.words,
    ]


def _interval(ratio: Interval) -> str:
    return ratio.range_text("{:.3f}".format) or NOTHING


def _ratio_of(row: Row, priced: bool) -> Interval | None:
    return row.verdict.ratio if priced else row.verdict.speed_ratio


def _bar(share: float, room: int) -> str:
    """Return a bar of `room` characters at most, filled up with blanks; empty where there is no room."""
    if room < _LEAST_BAR:
        return ""
    eighths = round(8 * room * max(0.0, min(1.0, share)))
    return (_PARTS[8] * (eighths // 8) + _PARTS[eighths % 8].strip()).ljust(room)

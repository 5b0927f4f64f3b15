"""A comparison for the terminal: rows by value with a bar, interval and verdict, and decisive notes."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from fastlaunch.analysis.compare import Comparison, Row
from fastlaunch.analysis.statistics import BETTER, TIE, UNRESOLVED, WORSE
from fastlaunch.analysis.verdicts import NO_INTERVAL, NOT_RANKED, OTHER_BATCH, RANKED, TRAINING
from fastlaunch.core.errors import UnknownName
from fastlaunch.core.tables import GAP, WIDTH, table
from fastlaunch.core.units import counted
from fastlaunch.report.columns import NOTHING, RATIO, RowColumn, columns_of, interval_text
from fastlaunch.report.notes import bulleted, decisive_notes
from fastlaunch.report.table import heading
from fastlaunch.report.text import between, name_of, what_counts

#: Verdicts by the title above their rows; ranked rows have none.
_SECTIONS = {
    "": RANKED,
    "no interval, so in no order with the others:": (NO_INTERVAL,),
    "not ranked, since they compute or train something else:": (NOT_RANKED,),
    "another batch: throughput, not training progress:": (OTHER_BATCH,),
}
_IN_WORDS = {TIE: "the same within 2%", UNRESOLVED: "not settled"}
#: Arguments of `click.style`: unsettled rows look like running runs.
VERDICT_COLOURS: Mapping[str, Mapping[str, Any]] = {
    BETTER: {"fg": "green"},
    WORSE: {"fg": "red"},
    UNRESOLVED: {"fg": "magenta"},
    TIE: {"dim": True},
}
_BAR, _LEAST_BAR = 16, 4
#: Longer names wrap to make room for the bar.
_LONG_NAME = 60
_PARTS = " ▏▎▍▌▋▊▉█"
#: The most rows of a further section if there are many rows; notes; lines of a note.
_MANY, _MOST_FURTHER, _MOST_NOTES, _MOST_LINES = 16, 4, 5, 2


def as_overview(comparison: Comparison, *, width: int = WIDTH) -> str:
    """Return the comparison as text of up to `width` characters a line, without the answer."""
    return "\n\n".join(_section(rows, width) for rows in comparison.by_workload.values())


def why(comparison: Comparison, name: str, *, width: int = WIDTH) -> str:
    """Return all notes on the rows with this name, recipe or run. Raises UnknownName."""
    names = {id(row): name_of(row, rows) for rows in comparison.by_workload.values() for row in rows}
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
            head += f", {ratio.value:.3f}x {what} ({interval_text(ratio) or NOTHING})"
        reasons: list[str] = [*row.verdict.reasons]
        if in_batch := row.verdict.in_batch:
            ratio = in_batch.ratio or in_batch.speed_ratio
            # The baseline's ratio to itself is exactly 1.
            is_known = ratio is not None and ratio.low != ratio.high
            reasons.insert(0, f"{row.verdict.words}{between(ratio) if is_known else ''}")
        head = textwrap.fill(head, width, break_on_hyphens=False)
        texts.append(f"{head}\n{bulleted(reasons or ('nothing more',), width)}")
    return "\n\n".join(texts)


def _section(rows: Sequence[Row], width: int) -> str:
    columns = [column for column in columns_of(rows) if column.in_overview]
    name, *others = columns
    ratio = next(column for column in columns if column.name == RATIO)
    shares = {id(row): value.value for row in rows if (value := ratio.value(row))}
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
    text = table(chosen, others, rule=True, missing=NOTHING)
    # The bar takes the room that is left.
    named = min(_LONG_NAME, max(len(name.text(row)) for row in chosen))
    room = min(_BAR, width - named - max(map(len, text.splitlines())) - 2 * GAP)
    if room >= _LEAST_BAR:
        best = max(shares.values(), default=1.0)
        bar = RowColumn("", lambda row: _bar(shares.get(id(row), 0.0) / best, room))
        columns.insert(columns.index(ratio), bar)
    parts = [
        heading(rows, width),
        table(chosen, columns, width, rule=True, missing=NOTHING, titles=titles),
        "\n".join(_short(note, width) for note in decisive_notes(chosen, rows)[:_MOST_NOTES]),
    ]
    return "\n\n".join(filter(None, parts))


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, ranked ones first, by dollars, or by speed without prices."""

    def key(row: Row) -> tuple[bool, bool, float, float]:
        usd, rate = row.cost.usd_per_million_samples, row.speed.samples_per_s
        cost = usd.value if usd else math.inf
        return row.is_barred, not is_comparable(row), cost, -rate.value if rate else 0.0

    return sorted(rows, key=key)


def is_comparable(row: Row) -> bool:
    """Return whether the row trains like the baseline; only such rows are ranked against each other."""
    return row.verdict.comparable_as == TRAINING


def _short(note: str, width: int) -> str:
    """Return the note in at most two lines."""
    lines = bulleted([note], width).splitlines()
    if len(lines) <= _MOST_LINES:
        return "\n".join(lines)
    last = textwrap.shorten(" ".join(lines[1:]), width - 2, placeholder=" ...", break_on_hyphens=False)
    return f"{lines[0]}\n  {last}"


def _bar(share: float, room: int) -> str:
    """Return a bar of at most `room` characters."""
    eighths = round(8 * room * max(0.0, min(1.0, share)))
    return _PARTS[8] * (eighths // 8) + _PARTS[eighths % 8].strip()

"""A comparison for people: tables of everything, an overview by value with a bar, and Markdown."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from fastlaunch.analysis.best import all_priced, ratio_of
from fastlaunch.analysis.compare import Comparison, Row
from fastlaunch.analysis.statistics import BETTER, TIE, UNRESOLVED, WORSE
from fastlaunch.analysis.verdicts import NO_INTERVAL, NOT_RANKED, OTHER_BATCH, RANKED, THROUGHPUT, TRAINING
from fastlaunch.core.errors import UnknownName
from fastlaunch.core.tables import FIXED, GAP, WIDTH, table
from fastlaunch.core.terminal import printable
from fastlaunch.core.units import counted
from fastlaunch.report.columns import RATIO, Part, RowColumn, columns_of, interval_text
from fastlaunch.report.text import (
    NOTHING,
    UNKNOWN,
    asides_of,
    between,
    bulleted,
    convergence_of,
    decisive_notes,
    letters_of,
    name_of,
    notes_of,
    second_of,
    sentence_of,
    shared_options,
    what_counts,
)

#: Columns that move into a workload's heading if they are the same in all rows.
_SHARED = ("instance", "batch", "GPUs", "tokens each", "data", "runs")
#: The parts of the table of speed and cost, and the headings of the tables under it.
_MAIN = (Part.SPEED, Part.COST)
_FURTHER = {
    Part.START: "time before the measured steps, not included above:",
    Part.STEP: "where the time of a profiled step goes:",
}


def as_table(
    comparison: Comparison, *, only: Sequence[str] = (), brief: bool = False, width: int = WIDTH
) -> str:
    """Return the comparison as text of up to `width` characters a line, without the answer.

    only: show only the columns with these headings, and columns that identify a row. brief: leave out times
    before the steps, kernels, and the notes that `notes_of` leaves out. Raises UnknownName for a heading that
    no workload has.
    """
    sections = comparison.by_workload.values()
    columns = [
        [column for column in columns_of(rows, only) if column.part and column.name] for rows in sections
    ]
    main = [column for of_rows in columns for column in of_rows if column.part in (Part.IDENTITY, *_MAIN)]
    known = dict.fromkeys(column.name for column in main)
    for name in only:
        if name not in known:
            raise UnknownName("column", name, known)
    parts = zip(sections, columns, strict=True)
    return "\n\n".join(_section(rows, of_rows, only, brief, width) for rows, of_rows in parts)


def _section(
    rows: Sequence[Row], columns: Sequence[RowColumn], only: Sequence[str], brief: bool, width: int
) -> str:
    """Return one workload: rows that train like the baseline, other rows, held-out losses, notes."""
    shared = shared_cells(rows)
    columns = [column for column in columns if column.name not in shared]

    def grid(of: Sequence[Row], *parts: Part, width: int | None = width) -> str:
        chosen = [column for column in columns if column.part in (Part.IDENTITY, *parts)]
        # Keep columns that tell rows apart or that the user named, and no others beside the latter.
        is_main = bool(only) and parts[0] in _MAIN
        chosen = [
            replace(column, importance=FIXED)
            if column.part == Part.IDENTITY or (is_main and column.name in only)
            else column
            for column in chosen
            if not is_main or column.part == Part.IDENTITY or column.name in only
        ]
        return table(of, chosen, width, rule=True, missing=UNKNOWN)

    def grids(of: Sequence[Row]) -> list[str]:
        """Return one table, or if it would be too wide, a table of the speed and one of the cost."""
        fits = max(map(len, grid(of, *_MAIN, width=None).splitlines())) <= width
        return [grid(of, *_MAIN)] if fits or only else [grid(of, part) for part in _MAIN]

    parts = [_heading(rows, shared, width)]
    trains = [row for row in in_order(rows) if is_comparable(row)]
    others = [row for row in rows if row.verdict.comparable_as == THROUGHPUT]
    if trains:
        parts += grids(trains)
    if others:
        lengths = len({row.setup.sequence_length for row in rows}) > 1
        title = f"{_OTHER_BATCHES}{' or sequence lengths' if lengths else ''}: {throughput_only(others)}:"
        parts += [textwrap.fill(title, width), *grids(others)]
    by_reference: dict[str | None, list[Row]] = {}
    for row in rows:
        if row.validity.held_out is not None:
            by_reference.setdefault(row.validity.convergence.reference, []).append(row)
    for reference, evaluated in by_reference.items():
        pairs = "in the same rounds" if rows[0].setup.is_script else "at the same seeds"
        against = (
            f", and its difference to that of {reference} {pairs}, as a share of what {reference} learnt"
            " and in steps that make up for it (one-sided 95% limits)"
        )
        title = f"held-out loss at the end{against if reference else ''}:"
        parts.append(f"{textwrap.fill(title, width)}\n{grid(evaluated, Part.LOSS)}")
    notes, num_hidden = notes_of(rows, brief)
    if not brief:
        for part, title in _FURTHER.items():
            of_part = [column for column in columns if column.part == part]
            if timed := [row for row in rows if any(column.text(row) for column in of_part)]:
                parts.append(f"{title}\n{grid(timed, part)}")
        parts += _kernels(rows, width)
    doubts = [] if brief else convergence_of(rows)
    parts.append(bulleted([*doubts, *asides_of(rows), *notes], width))
    if num_hidden:
        parts.append(f"({counted(num_hidden, 'note')} left out by --brief)")
    return "\n\n".join(part for part in parts if part)


def _kernels(rows: Sequence[Row], width: int) -> Iterator[str]:
    """Yield the recorded kernels of one forward pass, with the rows that ran them."""
    by_kernels: dict[str, list[str]] = {}
    for row in rows:
        for kernels in row.kernels:
            by_kernels.setdefault(kernels, []).append(name_of(row, rows))
    if by_kernels:
        notes = [f"{', '.join(names)}: {kernels}" for kernels, names in by_kernels.items()]
        yield f"kernels of one forward pass:\n{bulleted(notes, width)}"


def shared_cells(rows: Sequence[Row]) -> dict[str, str]:
    """Return the cells that are the same in every row, by column: they go into the heading."""
    columns = [column for column in columns_of(rows) if column.name in _SHARED]
    texts = {column.name: {column.text(row) for row in rows} for column in columns}
    return {name: next(iter(values)) for name, values in texts.items() if len(values) == 1}


def heading(rows: Sequence[Row], width: int) -> str:
    """Return what all rows of a workload share, the batch of those that are ranked, and the runs of a row."""
    options = ", ".join(f"{name}={text}" for name, text in shared_options(rows).items())
    fewest, most = (of(row.num_runs for row in rows) for of in (min, max))
    batch = shared_cells([row for row in rows if is_comparable(row)]).get("batch")
    shared = {"runs": f"{fewest} to {most}", "options": options, **shared_cells(rows)}
    return _heading(rows, {**shared, "batch": batch} if batch else shared, width)


def _heading(rows: Sequence[Row], shared: Mapping[str, str], width: int) -> str:
    setups = [row.setup for row in rows]
    one, several = ("process", "processes") if all(setup.is_on_cpu for setup in setups) else ("GPU", "GPUs")
    gpus, place, runs = (shared.get(name, "") for name in ("GPUs", "instance", "runs"))
    details = [
        f"{gpus} {one if gpus == '1' else several}" if gpus else "",
        f"batch {shared['batch']} each" if shared.get("batch") else "",
        f"{shared['tokens each']} tokens a sample" if shared.get("tokens each") else "",
        f"all with {shared['options']}" if shared.get("options") else "",
        # A script's data are unknown.
        f"data {shared['data']}" if "data" in shared and not setups[0].is_script else "",
        f"{runs} run{'' if runs == '1' else 's'} a row" if runs not in ("", "0") else "",
    ]
    known = ", ".join(filter(None, details))
    where = f" on {place}" if place not in ("", "unknown") else ""
    return textwrap.fill(
        f"{setups[0].workload}{where}{f': {known}' if known else ''}", width, break_on_hyphens=False
    )


#: Verdicts by the title above their rows; ranked rows have none.
_OTHER_BATCHES = "other batches"
_SECTIONS = {
    "": RANKED,
    "no interval, so in no order with the others:": (NO_INTERVAL,),
    "not ranked, since they compute or train something else:": (NOT_RANKED,),
    _OTHER_BATCHES: (OTHER_BATCH,),
}
_IN_WORDS = {TIE: "the same within 2%", UNRESOLVED: "not settled"}
#: Arguments of `click.style`: unsettled rows look like running runs.
VERDICT_COLOURS: Mapping[str, Mapping[str, Any]] = {
    BETTER: {"fg": "green"},
    WORSE: {"fg": "red"},
    UNRESOLVED: {"fg": "magenta"},
    TIE: {"dim": True},
}
_BAR, _LEAST_BAR = 16, 8
#: Longer names wrap to make room for the bar.
_LONG_NAME = 60
_PARTS = " ▏▎▍▌▋▊▉█"
#: Headings of bars, the longest first.
_BETTER = ("longer is better", "better →")
#: The most rows of a further section if there are many rows; notes; lines of a note.
_MANY, _MOST_FURTHER, _MOST_NOTES = 16, 4, 4


def as_overview(
    comparison: Comparison, *, brief: bool = False, width: int = WIDTH, most_notes: int = _MOST_NOTES
) -> str:
    """Return the comparison as text of up to `width` characters a line, without the answer.

    brief: leave out the notes that `notes_of` leaves out.
    """
    sections = comparison.by_workload.values()
    return "\n\n".join(_overview(rows, brief, width, most_notes) for rows in sections)


def why(comparison: Comparison, name: str, *, width: int = WIDTH) -> str:
    """Return all notes on the rows with this name, also as the overview has it, recipe or run. Raises
    UnknownName.
    """
    names: dict[int, str] = {}
    short: dict[int, str] = {}
    for rows in comparison.by_workload.values():
        letters = letters_of(rows, under_heading=True)
        names |= {id(row): name_of(row, rows) for row in rows}
        short |= {id(row): name_of(row, rows, letters=letters) for row in rows}
    chosen = [
        row
        for row in comparison.rows
        if name in (names[id(row)], short[id(row)], *row.run_ids) or row.setup.is_named(name)
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


def _overview(rows: Sequence[Row], brief: bool, width: int, most_notes: int) -> str:
    letters = letters_of(rows, under_heading=True)
    columns = [column for column in columns_of(rows, letters=letters) if column.in_overview]
    name, *others = columns
    ratio = next(column for column in columns if column.name == RATIO)
    priced = all_priced(rows)
    # Beside the overall baseline, while the cells of other batches are beside the baseline of their own.
    shares = {id(row): value.value for row in rows if (value := ratio_of(row, is_priced=priced))}
    chosen: list[Row] = []
    titles: dict[int, str] = {}
    for title, kinds in _SECTIONS.items():
        alike = [row for row in rows if row.verdict.kind in kinds]
        best_of_batch: dict[int | None, float] = {}
        for row in alike if kinds == (OTHER_BATCH,) else ():
            share, batch = shares.get(id(row), 0.0), row.setup.global_batch
            best_of_batch[batch] = max(share, best_of_batch.get(batch, 0.0))
        alike.sort(
            key=lambda row: (-best_of_batch.get(row.setup.global_batch, 0.0), -shares.get(id(row), 0.0))
        )
        shown = alike if not title or len(rows) <= _MANY else alike[:_MOST_FURTHER]
        if shown:
            judged = [row for row in shown if row.verdict.in_batch] or shown
            says = f": {throughput_only(judged)}:" if title == _OTHER_BATCHES else ""
            num_hidden = len(alike) - len(shown)
            more = f" ({num_hidden} more with --all)" if num_hidden else ""
            titles[len(chosen)] = f"{_batch_of(alike, rows) if says else title}{says}{more}"
            chosen += shown
    text = table(chosen, others, rule=True, missing=NOTHING)
    # The bar takes the room that is left.
    named = min(_LONG_NAME, max(len(name.text(row)) for row in chosen))
    room = min(_BAR, width - named - max(map(len, text.splitlines())) - 2 * GAP)
    if room >= _LEAST_BAR:
        # A row of another batch is not comparable with the others.
        alike = [row for row in chosen if is_comparable(row)]
        best = max((shares.get(id(row), 0.0) for row in alike), default=1.0) or 1.0
        bar = RowColumn(
            next(text for text in _BETTER if len(text) <= room),
            lambda row: _bar(shares.get(id(row), 0.0) / best, room) if is_comparable(row) else " ",
        )
        columns.insert(columns.index(ratio), bar)
    notes = decisive_notes(chosen, rows, letters, brief=brief)
    if not brief:
        asides = asides_of(rows, letters, with_batches=False)
        notes = [*convergence_of(rows, letters), *asides, *_of_pairs(chosen, others[0], shares), *notes]
    parts = [
        heading(rows, width),
        table(chosen, columns, width, rule=True, missing=NOTHING, titles=titles),
        letters.legend(width),
        bulleted(notes[:most_notes], width),
    ]
    return "\n\n".join(filter(None, parts))


def _batch_of(others: Sequence[Row], rows: Sequence[Row]) -> str:
    """Return `global batch 2` if it alone is what sets the others apart, since their names may lack it."""
    batches = {row.setup.global_batch for row in others}
    alone = len(batches) == 1 and len({row.setup.sequence_length for row in rows}) == 1
    return f"global batch {batches.pop()}" if alone else _OTHER_BATCHES


def _of_pairs(rows: Sequence[Row], amount: RowColumn, shares: Mapping[int, float]) -> Iterator[str]:
    """Yield a note if the ratios of ranked rows are not in the order of the amounts beside them."""
    ranked = [row for row in rows if row.verdict.is_ranked and amount.value(row) and id(row) in shares]
    for row, following in pairwise(ranked):
        is_apart = amount.text(row) != amount.text(following)
        is_apart &= f"{shares[id(row)]:.3f}" != f"{shares[id(following)]:.3f}"
        if is_apart and amount.value(row) < amount.value(following):
            yield f"{RATIO} and bar are paired by round, {amount.name} is not: their orders may differ"
            return


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, ranked ones first, by their ratios to the baseline, in dollars or else in speed."""
    is_priced = all_priced(rows)

    def key(row: Row) -> tuple[bool, bool, float]:
        ratio = ratio_of(row, is_priced=is_priced)
        return row.is_barred, not is_comparable(row), -ratio.value if ratio else 0.0

    return sorted(rows, key=key)


def is_comparable(row: Row) -> bool:
    """Return whether the row trains like the baseline; only such rows are ranked against each other."""
    return row.verdict.comparable_as == TRAINING


def throughput_only(rows: Sequence[Row]) -> str:
    """Return what the ratios of rows of other batches are beside: the baseline of their batch, if known."""
    judged = [row.verdict.in_batch is not None for row in rows]
    if not any(judged):
        return "throughput only"
    return f"throughput only, ratios within the batch{'' if all(judged) else ' where there is a verdict'}"


def _bar(share: float, room: int) -> str:
    """Return a bar of at most `room` characters."""
    eighths = round(8 * room * max(0.0, min(1.0, share)))
    return _PARTS[8] * (eighths // 8) + _PARTS[eighths % 8].strip()


#: Breaks up automatic links and mentions.
_COMMENT = "<!-- -->"
_ESCAPES = str.maketrans(
    {
        **{mark: f"\\{mark}" for mark in "\\`*_[]|~#!"},
        **{"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": f"@{_COMMENT}"},
    }
)
#: The beginning of a list at the start of a line, and the middle of an address.
_LIST = re.compile(r"^(\d*)([-+.)])(?= )")
_ADDRESS = re.compile(r"(?<=:)(?=//)|(?<=www)(?=\.)", re.IGNORECASE)


def as_markdown(comparison: Comparison) -> str:
    """Return the answer and a table for each workload; GitHub and notebooks render it."""
    sections = []
    for workload, rows in comparison.by_workload.items():
        columns = [column for column in columns_of(rows) if column.is_summary]
        columns = [column for column in columns if any(column.text(row) for row in rows)]
        lines = [
            f"**{_text(workload)}**: {_text(' '.join([sentence_of(rows), *second_of(rows)]))}",
            "",
            _line([column.name for column in columns]),
            f"|:--{'|--:' * (len(columns) - 2)}|:--|",
            *(_line([column.text(row) or UNKNOWN for column in columns]) for row in in_order(rows)),
            "",
            *(f"* {_text(note)}" for note in (*asides_of(rows), *decisive_notes(rows, rows))),
        ]
        sections.append("\n".join(lines).rstrip())
    return "\n\n".join(sections)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_text, cells))} |"


def _text(text: str) -> str:
    """Return the text with everything escaped that Markdown or HTML would interpret."""
    escaped = " ".join(printable(text).translate(_ESCAPES).split())
    return _ADDRESS.sub(_COMMENT, _LIST.sub(r"\1\\\2", escaped))

"""The notes under the tables of a comparison: prices with their dates, and remarks on rows."""

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence

from fastlaunch.analysis.compare import Comparison, Row
from fastlaunch.analysis.notes import Note, NoteKind
from fastlaunch.catalog.prices import Price
from fastlaunch.core.tables import WIDTH
from fastlaunch.core.units import first_names
from fastlaunch.report.text import name_of

#: The beginning of a command at the end of a note.
_COMMAND = re.compile(r"(?<=[;,]) run fastlaunch ")
#: The most row names in a decisive note.
_MOST_NAMES = 2
_BRIEF = (NoteKind.BAR, NoteKind.COMMITS_APART)


def all_notes(comparison: Comparison, *, width: int = WIDTH) -> str:
    """Return all notes, workload by workload."""
    notes = {workload: notes_of(rows, brief=False)[0] for workload, rows in comparison.by_workload.items()}
    return "\n\n".join(f"{workload}:\n{bulleted(texts, width)}" for workload, texts in notes.items() if texts)


def notes_of(rows: Sequence[Row], brief: bool) -> tuple[list[str], int]:
    """Return the notes on prices, then the reasons with their rows, and the number of notes left out.

    brief: keep only reasons that bar a row, or would without --allow-unverified, and notes on commits that
    differ in speed.
    """
    by_note = _by_note(rows, lambda row: row.verdict.reasons)
    by_note = {note: of for note, of in by_note.items() if note.kind != NoteKind.BATCH}
    shown = {note: of for note, of in by_note.items() if not brief or note.kind in _BRIEF}
    compared = [row for row in rows if not row.is_baseline]
    # The baseline may have these notes too. Omit row names only if it does.
    notes = [
        _named(note, of, rows, everyone=rows if note.is_of_runs and compared else compared)
        for note, of in shown.items()
    ]
    return [*price_notes(rows), *notes], len(by_note) - len(shown)


def decisive_notes(shown: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    """Return the notes on prices, then the notes that matter for a decision, in order of the rows.

    A note on all rows that are ranked against the baseline names no row.
    """
    by_note = _by_note(shown, lambda row: row.verdict.decisive)
    ranked = [row for row in shown if row.verdict.is_ranked and not row.is_baseline]
    everyone = ranked if len(ranked) > 1 else []
    return [
        *price_notes(rows),
        *(_named(note, of, rows, everyone=everyone, most=_MOST_NAMES) for note, of in by_note.items()),
    ]


def _by_note(rows: Sequence[Row], notes: Callable[[Row], Iterable[Note]]) -> dict[Note, list[Row]]:
    by_note: dict[Note, list[Row]] = {}
    for row in rows:
        for note in notes(row):
            by_note.setdefault(note, []).append(row)
    return by_note


def _named(
    note: Note,
    concerned: Sequence[Row],
    rows: Sequence[Row],
    *,
    everyone: Sequence[Row],
    most: int | None = None,
) -> str:
    """Return the note with the names of its rows, or without names if it is about `everyone`.

    most: the largest number of names, unless one more completes the list.
    """
    is_of_all = everyone and all(row in concerned for row in everyone)
    if is_of_all and (most is None or len(concerned) == len(everyone)):
        return note
    names = [*dict.fromkeys(name_of(row, rows) for row in concerned)]
    return f"{first_names(names, most)}: {note}"


def price_notes(rows: Sequence[Row]) -> list[str]:
    """Return the rows' prices with dates and sources."""
    notes: dict[str, None] = {}
    for row in rows:
        price = row.price
        if price is None:
            continue
        charged = f"charged as {price.instance}" if price.basis == "named" else None
        what = price.hypothetical or charged or row.setup.instance or "each row"
        hypothetical = "prorated price, not sold separately: " if price.hypothetical else ""
        notes[f"{hypothetical}{what}: ${price.usd_per_hour:g}/h {dated(price)}"] = None
    return list(notes)


def dated(price: Price) -> str:
    """Return `as of 2026-11-21 (SOURCE)`."""
    inferred = ", inferred" if price.inferred else ""
    return "as given" if price.basis == "given" else f"as of {price.as_of} ({price.source}){inferred}"


def bulleted(notes: Sequence[str], width: int) -> str:
    """Return the notes as a list. A command at the end gets its own line for copying."""
    lines = []
    for note in notes:
        text, *command = _COMMAND.split(note, maxsplit=1)
        words = f"{text} run" if command else text
        # Do not break an option at its hyphens.
        lines.append(
            textwrap.fill(words, width, initial_indent="* ", subsequent_indent="  ", break_on_hyphens=False)
        )
        lines += [f"    fastlaunch {words}" for words in command]
    return "\n".join(lines)

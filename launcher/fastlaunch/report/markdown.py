"""A comparison as Markdown, for pull requests and notebooks."""

import re
from collections.abc import Sequence

from fastlaunch.analysis.compare import Comparison, Row
from fastlaunch.core.terminal import printable
from fastlaunch.report.columns import columns_of
from fastlaunch.report.notes import decisive_notes
from fastlaunch.report.overview import in_order
from fastlaunch.report.text import UNKNOWN, sentence_of

#: Breaks up automatic links and mentions.
_NOTHING = "<!-- -->"
_ESCAPES = str.maketrans(
    {
        **{mark: f"\\{mark}" for mark in "\\`*_[]|~#!"},
        **{"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": f"@{_NOTHING}"},
    }
)
#: The beginning of a list at the start of a line, and the middle of an address.
_LIST = re.compile(r"^(\d*)([-+.)])(?= )")
_ADDRESS = re.compile(r"(?<=:)(?=//)|(?<=www)(?=\.)", re.IGNORECASE)


def as_markdown(comparison: Comparison) -> str:
    """Return the answer and a table for each workload; GitHub and notebooks render it."""
    return "\n\n".join(_section(workload, rows) for workload, rows in comparison.by_workload.items())


def _section(workload: str, rows: Sequence[Row]) -> str:
    columns = [column for column in columns_of(rows) if column.is_summary]
    columns = [column for column in columns if any(column.text(row) for row in rows)]
    lines = [
        f"**{_text(workload)}**: {_text(sentence_of(rows))}",
        "",
        _line([column.name for column in columns]),
        f"|:--{'|--:' * (len(columns) - 2)}|:--|",
        *(_line([column.text(row) or UNKNOWN for column in columns]) for row in in_order(rows)),
        "",
        *(f"* {_text(note)}" for note in decisive_notes(rows, rows)),
    ]
    return "\n".join(lines).rstrip()


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_text, cells))} |"


def _text(text: str) -> str:
    """Return the text with everything escaped that Markdown or HTML would interpret."""
    escaped = " ".join(printable(text).translate(_ESCAPES).split())
    return _ADDRESS.sub(_NOTHING, _LIST.sub(r"\1\\\2", escaped))

"""A comparison as Markdown, for pull requests and notebooks."""

import re
from collections.abc import Sequence

from fastlaunch.analysis.compare import Comparison, Row
from fastlaunch.core.terminal import printable
from fastlaunch.report.overview import decisive_notes, in_order
from fastlaunch.report.text import dollars, name_of, rate_of, rate_text, sentence_of, with_range

_HEADINGS = ("row", "runs", "step ms", "rate", "$/h", "$/M", "x base", "verdict")
#: Tears apart what becomes a link, or tells somebody, by itself.
_NOTHING = "<!-- -->"
_ESCAPES = str.maketrans(
    {
        **{mark: f"\\{mark}" for mark in "\\`*_[]|~#!"},
        **{"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": f"@{_NOTHING}"},
    }
)
#: What begins a list where it begins a line, and the middle of an address.
_LIST = re.compile(r"^(\d*)([-+.)])(?= )")
_ADDRESS = re.compile(r"(?<=:)(?=//)|(?<=www)(?=\.)", re.IGNORECASE)


def as_markdown(comparison: Comparison) -> str:
    """Return the answer and a table for each workload; GitHub and notebooks render it."""
    return "\n\n".join(_section(workload, rows) for workload, rows in comparison.by_workload.items())


def _section(workload: str, rows: Sequence[Row]) -> str:
    unit = rate_of(rows[0])[1]
    headings = [{"rate": unit, "$/M": f"$/M {unit.rpartition('/')[0]}"}.get(name, name) for name in _HEADINGS]
    lines = [
        f"**{_text(workload)}**: {_text(sentence_of(rows))}",
        "",
        f"| {' | '.join(map(_text, headings))} |",
        f"|:--{'|--:' * (len(headings) - 2)}|:--|",
        *(f"| {' | '.join(_cells(row, rows))} |" for row in in_order(rows)),
        "",
        *(f"* {_text(note)}" for note in decisive_notes(rows, rows)),
    ]
    return "\n".join(lines).rstrip()


def _cells(row: Row, rows: Sequence[Row]) -> list[str]:
    ratio = row.verdict.ratio or row.verdict.speed_ratio
    price, cost = row.price, row.cost.usd_per_million_samples
    cells = (
        name_of(row, rows),
        str(row.num_runs),
        with_range(row.speed.step_time_s, factor=1000),
        rate_text(row),
        dollars(price.usd_per_hour * row.setup.num_nodes) if price else None,
        with_range(cost, format_value=dollars),
        with_range(ratio, format_value="{:.3f}".format),
        row.verdict.words,
    )
    return [_text(cell or "n/a") for cell in cells]


def _text(text: str) -> str:
    """Return text in which Markdown and HTML find nothing of theirs."""
    escaped = " ".join(printable(text).translate(_ESCAPES).split())
    return _ADDRESS.sub(_NOTHING, _LIST.sub(r"\1\\\2", escaped))

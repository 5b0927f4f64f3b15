"""Rows of a listing as a table for people, or as JSON or CSV for programs."""

import csv
import io
import json
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

_GAP = "  "
_MIN_WIDTH = 100
#: What a column of words is not made narrower than.
_LEAST_WORDS = 30
#: A number, with a unit or without.
_NUMBER = re.compile(r"-?[0-9][0-9.,]*(e[+-]?[0-9]+)?( ?[a-zA-Z%]{1,3})?")


def print_rows(
    rows: Sequence[Mapping[str, Any]], *, output: str, headers: Mapping[str, str] | None = None
) -> None:
    """Print rows of equal keys on stdout. output: `table`, `json` (a list of objects) or `csv`.

    headers: of the table, key -> heading; only these columns are in the table, while JSON and CSV hold every
    key. None is an empty cell, and null in JSON.
    """
    if output == "json":
        click.echo(json.dumps(rows, indent=2, default=str))
    elif output == "csv":
        click.echo(_csv(rows), nl=False)
    else:
        click.echo(table(rows, headers or {key: key for key in (rows[0] if rows else {})}))


def fitted(
    rows: Sequence[Mapping[str, Any]],
    headers: Mapping[str, str],
    shrinkable: Sequence[str] = ("recipe", "workload", "instance"),
) -> list[dict[str, Any]]:
    """The rows with the widest of the `shrinkable` columns cut (…), as far as the table would be too wide.

    It may be as wide as the terminal, and 100 characters elsewhere.
    """
    allowed = max(_MIN_WIDTH, shutil.get_terminal_size(fallback=(_MIN_WIDTH, 1)).columns)
    widths = _widths(rows, headers)
    while sum(widths.values()) + len(_GAP) * (len(headers) - 1) > allowed:
        # The heading is not cut.
        keys = [key for key in shrinkable if widths.get(key, 0) > len(headers.get(key, ""))]
        if not keys:
            break
        widths[max(keys, key=lambda key: widths[key])] -= 1
    return [
        {**row, **{key: _cut(row[key], widths[key]) for key in shrinkable if key in widths}} for row in rows
    ]


def table(
    rows: Sequence[Mapping[str, Any]], headers: Mapping[str, str], *, terminal: int | None = None
) -> str:
    """A plain table with a row per line; columns of numbers are right-aligned.

    What is wider than the terminal has the words of its last column in as many lines as it takes.
    terminal: its columns, to be asked for; 0 where there is none.
    """
    widths = _widths(rows, headers)
    right = {key: _is_numeric([row[key] for row in rows]) for key in headers}
    lines = [dict(headers), *({key: _text(row[key]) for key in headers} for row in rows)]
    *_, last = headers
    if terminal is None:
        terminal = shutil.get_terminal_size(fallback=(0, 1)).columns
    before = sum(widths[key] + len(_GAP) for key in headers if key != last)
    if before + _LEAST_WORDS <= terminal < before + widths[last] and not right[last]:
        widths[last] = terminal - before
    return "\n".join(
        _GAP.join(
            cell.rjust(widths[key]) if right[key] else cell.ljust(widths[key]) for key, cell in line.items()
        ).rstrip()
        for whole in lines
        for line in _wrapped(whole, last, widths[last])
    )


def _wrapped(line: Mapping[str, str], last: str, width: int) -> Iterator[dict[str, str]]:
    """The line, with others below it for what the cell `last` has no room for."""
    first, others = line[last], list[str]()
    if len(first) > width:
        first, *others = textwrap.wrap(first, width, break_on_hyphens=False)
    yield {**line, last: first}
    yield from ({**dict.fromkeys(line, ""), last: other} for other in others)


def _widths(rows: Sequence[Mapping[str, Any]], headers: Mapping[str, str]) -> dict[str, int]:
    return {
        key: max(len(heading), *(len(_text(row[key])) for row in rows), 0) for key, heading in headers.items()
    }


def _is_numeric(values: Sequence[object]) -> bool:
    known = [_text(value) for value in values if value is not None]
    return bool(known) and all(_NUMBER.fullmatch(text) for text in known)


def _cut(value: str | None, width: int) -> str | None:
    return value if value is None or len(value) <= width else f"{value[: width - 1]}…"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()

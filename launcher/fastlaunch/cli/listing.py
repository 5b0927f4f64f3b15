"""Rows of a listing as a table for people, or as JSON or CSV for programs."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import click


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


def table(rows: Sequence[Mapping[str, Any]], headers: Mapping[str, str]) -> str:
    """A plain table with one line per row; text is left as it is, numbers are right-aligned."""
    from tabulate import tabulate

    numeric = [any(isinstance(row[key], int | float) for row in rows) for key in headers]
    # Numbers are text from here on: tabulate would otherwise read `1e5` in an id as a number.
    cells = [["" if row[key] is None else str(row[key]) for key in headers] for row in rows]
    return tabulate(
        cells,
        headers=list(headers.values()),
        tablefmt="plain",
        disable_numparse=True,
        colalign=["right" if number else "left" for number in numeric] if rows else None,
    )


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()

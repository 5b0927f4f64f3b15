"""A comparison as JSON and CSV. docs/reference.md describes the shape, which is an interface."""

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args

from fastlaunch.analysis.compare import Comparison, Overhead, Row, Speed, UnitCost
from fastlaunch.analysis.convergence import UNKNOWN, Convergence, HeldOut, LossDifference
from fastlaunch.core.terminal import printable
from fastlaunch.measure.summary import Interval
from fastlaunch.report.columns import columns_of
from fastlaunch.report.text import answer_to_json

#: The version of the shape: raise it when a field disappears or changes its meaning, not for additions.
SCHEMA = 3

#: The beginnings of spreadsheet formulas, and numbers that begin like one.
_FORMULA = ("=", "+", "-", "@")
_NUMBER = re.compile(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?")

_QUANTITY = ("value", "low", "high")
#: The quantities of a row, each `{"value", "low", "high"}` or null.
QUANTITIES = (
    *(
        of.name
        for topic in (Speed, UnitCost, Overhead)
        for of in fields(topic)
        if Interval in get_args(of.type)
    ),
    *("ratio_to_baseline", "ratio_to_same_loss", "speed_ratio_to_baseline", "ratio_in_batch"),
)


def as_json(comparison: Comparison, further: Mapping[str, Any] | None = None) -> str:
    """Return the comparison as one JSON object, indented. further: `finish` and `target`, if requested."""
    return json.dumps(to_json(comparison) | dict(further or {}), indent=2, allow_nan=False)


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as plain data. `baseline` is a recipe, or recipes by workload."""
    baselines = dict(comparison.baselines)
    as_of = comparison.prices_as_of
    return {
        "schema": SCHEMA,
        "prices_as_of": as_of.isoformat() if as_of else None,
        "baseline": baselines if len(baselines) > 1 else next(iter(baselines.values()), None),
        "answer": answer_to_json(comparison),
        "rows": rows_to_json(comparison.rows),
        "warnings": list(comparison.warnings),
        "allow_unverified": comparison.allow_unverified,
        "finish": None,
        "target": None,
    }


def rows_to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return rows as plain data, by the keys of their columns."""
    columns = [column for column in columns_of(rows) if column.key]
    return [{column.key or "": _plain(_positive(column.value(row))) for column in columns} for row in rows]


def _positive(value: object) -> object:
    """Return the value; None for a quantity that an absurd record made 0."""
    return None if isinstance(value, Interval) and value.value <= 0 else value


def _plain(value: object) -> object:
    if isinstance(value, Interval):
        return quantity_to_json(value)
    if isinstance(value, Convergence):
        return convergence_to_json(value)
    if isinstance(value, HeldOut):
        return dict(vars(value))
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def as_csv(comparison: Comparison) -> str:
    """Return the rows as CSV: a quantity x becomes x, x_low and x_high; blanks join the items of lists.

    A variant becomes a column per name.
    """
    rows = as_rows(comparison)
    # Rows may have different names of variants.
    widest = max(rows, key=len, default={})
    columns = dict.fromkeys(name for row in (widest, *rows) for name in row)
    return csv_text(rows, columns).rstrip("\n")


def csv_text(rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> str:
    """Return rows as CSV under their columns; empty without columns.

    An apostrophe protects text that a spreadsheet would run as a formula.
    """
    text = io.StringIO()
    if names := list(columns):
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(map(_csv_cell, names))
        writer.writerows([_csv_cell(row.get(name)) for name in names] for row in rows)
    return text.getvalue()


def _csv_cell(value: object) -> object:
    if not isinstance(value, str) or _NUMBER.fullmatch(value):
        return value
    return f"'{printable(value)}" if value.startswith(_FORMULA) else printable(value)


def as_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the rows for CSV, as cells by column."""
    return [
        {column: cell for name, value in row.items() for column, cell in _cells(name, value).items()}
        for row in rows_to_json(comparison.rows)
    ]


def _cells(name: str, value: Any) -> dict[str, Any]:
    """Return a value of a JSON row as cells by column, nested names joined by `_`."""
    is_quantity = isinstance(value, dict) and value.keys() == {*_QUANTITY}
    if is_quantity or name in (*QUANTITIES, "convergence_difference", "convergence_more_steps"):
        return flat_quantity(name, value)
    if name == "held_out":
        value = value or dict.fromkeys(HeldOut.__dataclass_fields__)
    if name in ("held_out", "convergence", "variant"):
        nested = (_cells(f"{name}_{key}", part) for key, part in value.items())
        return {column: cell for cells in nested for column, cell in cells.items()}
    if name == "convergence_checkpoints":
        known = (point for point in value if point["difference"])
        value = [f"{point['step']}={point['difference']['value']}" for point in known]
    if isinstance(value, dict):
        value = [f"{key}={text}" for key, text in value.items()]
    if isinstance(value, list):
        return {name: (" " if name == "run_ids" else "; ").join(map(str, value))}
    return {name: str(value).lower() if isinstance(value, bool) else value}


def quantity_to_json(quantity: Interval | None) -> dict[str, float | None] | None:
    """Return a quantity as plain data; None if it is unknown or not finite. A limit may be open."""
    if quantity is None or not math.isfinite(quantity.value):
        return None
    return {name: end if end is None or math.isfinite(end) else None for name, end in vars(quantity).items()}


def fields_to_json(item: object, *names: str) -> dict[str, Any]:
    """Return these attributes of an object as plain data."""
    return {name: _plain(getattr(item, name)) for name in names}


def place_to_json(row: Row) -> dict[str, Any]:
    """Return what distinguishes a row, as plain data."""
    return fields_to_json(
        row.setup,
        *("recipe", "instance", "device_name", "num_nodes", "num_gpus"),
        *("batch_size_per_gpu", "sequence_length", "data"),
    )


def convergence_to_json(convergence: Convergence) -> dict[str, Any]:
    """Return the verdict with its evidence.

    A difference is a share of what the reference learnt; `more_steps` is a share of the steps.
    """
    return {
        **fields_to_json(convergence, "verdict", "reference", "num_pairs", "seeds"),
        **_point(convergence.end),
        "checkpoints": [_point(checkpoint) for checkpoint in convergence.checkpoints],
        "diverged_seeds": list(convergence.diverged),
        "more_pairs": convergence.more_pairs if convergence.verdict == UNKNOWN else None,
        **fields_to_json(convergence, "missing", "caveats"),
    }


def _point(of: LossDifference | None) -> dict[str, Any]:
    if of is None:
        return dict.fromkeys(("step", "reference_loss", "learnt", "difference", "more_steps"))
    return {
        **fields_to_json(of, "step", "reference_loss"),
        "learnt": of.learnt and of.learnt.mean,
        "difference": _in_units(of, of.relative),
        "more_steps": _in_units(of, of.more_steps),
    }


def _in_units(of: LossDifference, share: Callable[[float | None], float | None]) -> dict[str, Any] | None:
    value, low, high = map(share, (of.mean, of.low, of.high))
    return quantity_to_json(None if value is None else Interval(value=value, low=low, high=high))


def flat_quantity(name: str, quantity: Mapping[str, float | None] | None) -> dict[str, float | None]:
    """Return the plain quantity as three columns."""
    quantity = quantity or dict.fromkeys(_QUANTITY)
    return {name: quantity["value"], f"{name}_low": quantity["low"], f"{name}_high": quantity["high"]}

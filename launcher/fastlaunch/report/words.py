"""Rows and numbers of a comparison in words, and cells as a table."""

import math
from collections.abc import Mapping, Sequence

from fastlaunch.analysis.rows import Row
from fastlaunch.measure.summarize import Interval
from fastlaunch.report.grids import tables
from fastlaunch.report.table import UNKNOWN, number


def about(value: float) -> str:
    """A count to three digits: `12,300`, `600`, `7`."""
    if not 0 < value < 1e15:
        return f"{value:.3g}"
    digits = 2 - math.floor(math.log10(value))
    return f"{round(value, min(digits, 0)):,.0f}" if value >= 9.95 else f"{value:.2g}"


def with_range(quantity: Interval | None) -> str | None:
    """`1,234 ±0.8%`, half the interval in percent; None where the quantity is unknown or beyond numbers."""
    if quantity is None or not 0 < quantity.value < math.inf:
        return None
    text = number(quantity.value)
    if quantity.low is None or quantity.high is None:
        return text
    return f"{text} ±{50 * (quantity.high - quantity.low) / quantity.value:.1f}%"


def product(*factors: float | None) -> float | None:
    """The factors' product; None where one is unknown, or where it is beyond numbers."""
    known = [factor for factor in factors if factor is not None]
    value = math.prod(known)
    return value if len(known) == len(factors) and math.isfinite(value) else None


def quantity_to_json(quantity: Interval | None) -> dict[str, float | None] | None:
    """A quantity as plain data, null where it is unknown or beyond numbers; a bound may be open."""
    if quantity is None or not math.isfinite(quantity.value):
        return None
    bounds = (quantity.low, quantity.high)
    low, high = (bound if bound is not None and math.isfinite(bound) else None for bound in bounds)
    return {"value": quantity.value, "low": low, "high": high}


def place_to_json(row: Row) -> dict[str, str | int | None]:
    """What tells a row from the others, as plain data."""
    return {
        "recipe": row.recipe,
        "instance": row.instance,
        "device_name": row.device_name,
        "num_nodes": row.num_nodes,
        "num_gpus": row.num_gpus,
        "batch_size_per_gpu": row.batch_size_per_gpu,
        "sequence_length": row.sequence_length,
        "data": row.data,
    }


def grid(rows: Sequence[Mapping[str, str | None]], *, width: int) -> str:
    """Cells by heading as a table, or several, without the columns in which no row knows anything.

    What the column `row` holds are words, and say which row it is.
    """
    headings = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    cells = [[row[name] or UNKNOWN for name in headings] for row in rows]
    return tables(headings, cells, left=("row",), kept=("row",), width=width)

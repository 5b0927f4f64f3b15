"""A comparison as JSON and CSV. The shape is an interface, described in docs/reference.md."""

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from fastlaunch.analysis.compare import Comparison, Row, Speed, UnitCost
from fastlaunch.analysis.convergence import UNKNOWN, Difference, HeldOut
from fastlaunch.core.terminal import printable
from fastlaunch.measure.summary import Interval
from fastlaunch.report.text import answer_to_json

#: Counts changes to the shape that a reader would notice: a field gone, or of another meaning. Not additions.
SCHEMA = 2

#: How a formula of a spreadsheet begins, and what begins so and is none.
_FORMULA = ("=", "+", "-", "@")
_NUMBER = re.compile(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?")

#: The measured quantities of a row, each `{"value", "low", "high"}` or null.
QUANTITIES = (
    *(of.name for of in (*fields(Speed), *fields(UnitCost))),
    *("ratio_to_baseline", "speed_ratio_to_baseline", "ratio_in_batch"),
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
        "rows": [row_to_json(row) for row in comparison.rows],
        "warnings": list(comparison.warnings),
        "allow_unverified": comparison.allow_unverified,
        "finish": None,
        "target": None,
    }


def row_to_json(row: Row) -> dict[str, Any]:
    """Return one row as plain data."""
    setup, overhead, price, verdict = row.setup, row.overhead, row.price, row.verdict
    own = verdict.in_batch
    return {
        "workload": setup.workload,
        "instance": setup.instance,
        "device_name": setup.device_name,
        "num_nodes": setup.num_nodes,
        "num_gpus": setup.num_gpus,
        "recipe": setup.recipe,
        "variant": dict(setup.variant),
        "version": setup.version,
        "precision": setup.precision,
        "batch_size_per_gpu": setup.batch_size_per_gpu,
        "data": setup.data,
        "sequence_length": setup.sequence_length,
        "padding_fraction": overhead.padding_fraction,
        "kind": setup.kind,
        "derived": row.derived,
        "num_runs": row.num_runs,
        "run_ids": list(row.run_ids),
        "shared_by": list(row.shared_by),
        "num_shared_runs": row.num_shared,
        **{name: _quantity(quantity) for name, quantity in vars(row.speed).items()},
        "build_s": overhead.build_s,
        "compile_s": overhead.compile_s,
        "warmup_s": overhead.warmup_s,
        "peak_memory_gib": overhead.peak_memory_gib,
        "data_wait_fraction": overhead.data_wait_fraction,
        "utilization": overhead.utilization,
        "kernels": list(row.kernels),
        **row.offer._asdict(),
        "usd_per_hour": price.usd_per_hour if price else None,
        "price_as_of": price.as_of.isoformat() if price and price.basis != "given" else None,
        "price_source": price.source if price else None,
        "price_inferred": price.inferred if price else None,
        "price_charged_as": price.instance if price and price.basis == "named" else None,
        "price_hypothetical": price.hypothetical if price else None,
        **{name: _quantity(quantity) for name, quantity in vars(row.cost).items()},
        "ratio_to_baseline": _quantity(verdict.ratio),
        "speed_ratio_to_baseline": _quantity(verdict.speed_ratio),
        "comparable_as": verdict.comparable_as,
        "verdict": verdict.kind,
        "verdict_in_batch": own.kind if own else None,
        "ratio_in_batch": _quantity(own.ratio or own.speed_ratio) if own else None,
        "reason": "; ".join(verdict.reasons) or None,
        "ranked": not row.is_barred,
        "guard_failures": list(row.validity.failures),
        "numerics": row.validity.numerics,
        "held_out": held_out_to_json(row),
        "convergence": convergence_to_json(row),
        "sources": list(row.sources),
        "fingerprint": dict(sorted(setup.fingerprint.items())),
    }


def as_csv(comparison: Comparison) -> str:
    """Return the rows as CSV: a quantity x becomes x, x_low and x_high; lists are joined by blanks.

    A variant becomes a column for each of its names.
    """
    rows = as_rows(comparison)
    # Not every row has the same columns of a variant.
    widest = max(rows, key=len, default={})
    columns = dict.fromkeys(name for row in (widest, *rows) for name in row)
    return csv_text(rows, columns).rstrip("\n")


def csv_text(rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> str:
    """Return rows as CSV under their columns; empty without columns.

    A text that a spreadsheet would run as a formula begins with an apostrophe.
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
    """Return the rows as CSV has them, each by the names of its columns."""
    return [_flat(row_to_json(row)) for row in comparison.rows]


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of JSON as columns: nested names are joined by `_`."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name == "held_out":
            figures = value or dict.fromkeys(HeldOut.__dataclass_fields__)
            flat |= {f"held_out_{figure}": number for figure, number in figures.items()}
        elif name == "convergence":
            flat |= _flat_convergence(value)
        elif name in QUANTITIES:
            flat |= _flat_quantity(name, value)
        elif isinstance(value, list):
            flat[name] = " ".join(value) if name == "run_ids" else "; ".join(value)
        elif name == "variant":
            flat |= {f"variant_{key}": text for key, text in value.items()}
        elif isinstance(value, dict):
            flat[name] = "; ".join(f"{key}={text}" for key, text in value.items())
        else:
            flat[name] = str(value).lower() if isinstance(value, bool) else value
    return flat


def _quantity(quantity: Interval | None) -> dict[str, float | None] | None:
    """Return a quantity of a row as plain data; an absurd record makes it 0 or infinite, which is None."""
    return quantity_to_json(quantity) if quantity and quantity.value > 0 else None


def product(*factors: float | None) -> float | None:
    """Return the product of the factors; None if one is unknown, or if it is not finite."""
    known = [factor for factor in factors if factor is not None]
    value = math.prod(known)
    return value if len(known) == len(factors) and math.isfinite(value) else None


def quantity_to_json(quantity: Interval | None) -> dict[str, float | None] | None:
    """Return a quantity as plain data; None if it is unknown or not finite. A bound may be open."""
    if quantity is None or not math.isfinite(quantity.value):
        return None
    bounds = {"low": quantity.low, "high": quantity.high}
    return {
        "value": quantity.value,
        **{name: bound if bound is None or math.isfinite(bound) else None for name, bound in bounds.items()},
    }


def place_to_json(row: Row) -> dict[str, str | int | None]:
    """Return what tells a row from the others, as plain data."""
    names = (
        *("recipe", "instance", "device_name", "num_nodes", "num_gpus"),
        *("batch_size_per_gpu", "sequence_length", "data"),
    )
    return {name: getattr(row.setup, name) for name in names}


def held_out_to_json(row: Row) -> dict[str, Any] | None:
    """Return the figures at the end on held-out data; None if the row was not evaluated."""
    return dict(vars(row.validity.held_out)) if row.validity.held_out else None


def convergence_to_json(row: Row) -> dict[str, Any]:
    """Return the verdict with its evidence. Differences are fractions of the reference's loss."""
    convergence = row.validity.convergence
    return {
        "verdict": convergence.verdict,
        "reference": convergence.reference,
        "num_pairs": convergence.num_pairs,
        "seeds": list(convergence.seeds),
        **_point(convergence.end),
        "checkpoints": [_point(checkpoint) for checkpoint in convergence.checkpoints],
        "diverged_seeds": list(convergence.diverged),
        "more_pairs": convergence.more_pairs if convergence.verdict == UNKNOWN else None,
        "missing": list(convergence.missing),
        "caveats": list(convergence.caveats),
    }


def _point(of: Difference | None) -> dict[str, Any]:
    if of is None:
        return {"step": None, "reference_loss": None, "difference": None}
    value, low, high = map(of.relative, (of.mean, of.low, of.high))
    difference = None if value is None else Interval(value=value, low=low, high=high)
    return {
        "step": of.step,
        "reference_loss": of.reference_loss,
        "difference": quantity_to_json(difference),
    }


def _flat_convergence(convergence: Mapping[str, Any]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, value in convergence.items():
        if name == "difference":
            columns |= _flat_quantity("convergence_difference", value)
        elif name == "checkpoints":
            points = [(point["step"], point["difference"]) for point in value]
            columns["convergence_checkpoints"] = "; ".join(
                f"{step}={difference['value']}" for step, difference in points if difference
            )
        else:
            columns[f"convergence_{name}"] = "; ".join(map(str, value)) if isinstance(value, list) else value
    return columns


def _flat_quantity(name: str, quantity: Mapping[str, float | None] | None) -> dict[str, float | None]:
    quantity = quantity or {"value": None, "low": None, "high": None}
    return {name: quantity["value"], f"{name}_low": quantity["low"], f"{name}_high": quantity["high"]}

"""Held-out loss at the end and the verdict on it, as columns for people and as plain data for programs."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fastlaunch.analysis.compare import Row
from fastlaunch.analysis.convergence import REFERENCE, UNKNOWN, Difference
from fastlaunch.analysis.held_out import HeldOut
from fastlaunch.analysis.validity import percent

#: What a row has no need of: the reference is not compared with itself.
NOTHING = "-"


def by_reference(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Heading -> the rows that were evaluated, those with one reference together, as they are compared."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.guard.held_out is not None:
            found.setdefault(_heading(row.guard.convergence.reference), []).append(row)
    return found


def _heading(reference: str | None) -> str:
    against = f", and its difference to that of {reference} at the same seeds (one-sided 95% limits)"
    return f"held-out loss at the end{against if reference else ''}:"


def convergence_columns(rows: Sequence[Row]) -> dict[str, Callable[[Row], str | None]]:
    """Heading -> cell of rows that were evaluated. `test` is the metric on test data, of the last weights.

    `test, best` is that of the weights that were best on validation data.
    """
    metric = next((of.metric for row in rows if (of := row.guard.held_out) and of.metric), None)
    told: dict[str, Callable[[HeldOut], float | None]] = {}
    if metric is not None:
        told = {
            metric: lambda of: of.metric_value,
            "test": lambda of: of.test_metric_value,
            "test, best": lambda of: of.best_test_metric_value,
        }
    return {
        "pairs": lambda row: _unless_reference(row, str(row.guard.convergence.num_pairs)),
        "loss": partial(_figure, value=lambda of: of.loss),
        "difference": lambda row: _unless_reference(row, _difference(row.guard.convergence.end)),
        **{name: partial(_figure, value=value) for name, value in told.items()},
        "convergence": lambda row: row.guard.convergence.verdict,
    }


def _unless_reference(row: Row, text: str | None) -> str | None:
    return NOTHING if row.guard.convergence.verdict == REFERENCE else text


def _figure(row: Row, value: Callable[[HeldOut], float | None]) -> str | None:
    found = row.guard.held_out and value(row.guard.held_out)
    return None if found is None else f"{found:.4g}"


def _difference(of: Difference | None) -> str | None:
    """`+0.4% (-0.1 to +0.9)`, of the reference's loss."""
    if of is None or (mean := percent(of, of.mean)) is None:
        return None
    low, high = (str(percent(of, limit)).rstrip("%") for limit in (of.low, of.high))
    return mean if of.low is None else f"{mean} ({low} to {high})"


def held_out_to_json(row: Row) -> dict[str, Any] | None:
    """Figures at the end on held-out data; null if the row was not evaluated."""
    return dict(vars(row.guard.held_out)) if row.guard.held_out else None


def convergence_to_json(row: Row) -> dict[str, Any]:
    """The verdict with its evidence. Differences are parts of the reference's loss."""
    found = row.guard.convergence
    return {
        "verdict": found.verdict,
        "reference": found.reference,
        "num_pairs": found.num_pairs,
        "seeds": list(found.seeds),
        **_point(found.end),
        "checkpoints": [_point(checkpoint) for checkpoint in found.checkpoints],
        "diverged_seeds": list(found.diverged),
        "more_pairs": found.more_pairs if found.verdict == UNKNOWN else None,
        "missing": list(found.missing),
        "caveats": list(found.caveats),
    }


def _point(of: Difference | None) -> dict[str, Any]:
    if of is None:
        return {"step": None, "reference_loss": None, "difference": None}
    difference = None
    value, low, high = map(of.relative, (of.mean, of.low, of.high))
    if value is not None and math.isfinite(value):
        bounds = (bound if bound is not None and math.isfinite(bound) else None for bound in (low, high))
        difference = {"value": value, **dict(zip(("low", "high"), bounds, strict=True))}
    return {"step": of.step, "reference_loss": of.reference_loss, "difference": difference}


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """`held_out` and `convergence` of a row of JSON as columns: nested names are joined by `_`."""
    figures = row["held_out"] or dict.fromkeys(HeldOut.__dataclass_fields__)
    columns = {f"held_out_{name}": value for name, value in figures.items()}
    for name, value in row["convergence"].items():
        if name == "difference":
            quantity = value or {"value": None, "low": None, "high": None}
            columns["convergence_difference"] = quantity["value"]
            columns["convergence_difference_low"] = quantity["low"]
            columns["convergence_difference_high"] = quantity["high"]
        elif name == "checkpoints":
            told = [(point["step"], point["difference"]) for point in value]
            columns["convergence_checkpoints"] = "; ".join(
                f"{step}={difference['value']}" for step, difference in told if difference
            )
        else:
            columns[f"convergence_{name}"] = "; ".join(map(str, value)) if isinstance(value, list) else value
    return columns

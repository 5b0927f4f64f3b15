"""A comparison as JSON and CSV. The shape is an interface, described in docs/compare-json.md."""

import csv
import io
import json
import math
from collections.abc import Mapping
from typing import Any

from fastlaunch.analysis.compare import Comparison, Row
from fastlaunch.measure.summarize import Interval
from fastlaunch.report.convergence import convergence_to_json, held_out_to_json
from fastlaunch.report.convergence import flat as flat_convergence

#: Counts changes to the shape that a reader would notice: a field gone, or of another meaning. Not additions.
SCHEMA = 1

#: The measured quantities of a row, each `{"value", "low", "high"}` or null.
QUANTITIES = (
    *("step_time_s", "samples_per_s", "tokens_per_s", "tflops_per_gpu"),
    *("percent_of_peak", "percent_of_bf16_peak", "percent_of_fp8_peak"),
    *("usd_per_million_samples", "usd_per_billion_tokens", "samples_per_usd"),
    *("ratio_to_baseline", "speed_ratio_to_baseline"),
)


def as_json(comparison: Comparison, further: Mapping[str, Any] | None = None) -> str:
    """The comparison as one JSON object, indented. further: `finish` and `target`, where asked for."""
    return json.dumps(to_json(comparison) | dict(further or {}), indent=2, allow_nan=False)


def to_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain data. `baseline` is a recipe, or recipes by workload if there are several."""
    baselines = dict(comparison.baselines)
    as_of = comparison.prices_as_of
    return {
        "schema": SCHEMA,
        "prices_as_of": as_of.isoformat() if as_of else None,
        "baseline": baselines if len(baselines) > 1 else next(iter(baselines.values()), None),
        "rows": [row_to_json(row) for row in comparison.rows],
        "spread_between_runs": comparison.spread.deviation if comparison.spread.dof else None,
        "warnings": list(comparison.warnings),
        "allow_unverified": comparison.allow_unverified,
        "finish": None,
        "target": None,
    }


def row_to_json(row: Row) -> dict[str, Any]:
    """One row as plain data."""
    price = row.price
    quantities = {name: _quantity(getattr(row, name)) for name in QUANTITIES}
    return {
        "workload": row.workload,
        "instance": row.instance,
        "device_name": row.device_name,
        "num_nodes": row.num_nodes,
        "num_gpus": row.num_gpus,
        "recipe": row.recipe,
        "precision": row.precision,
        "batch_size_per_gpu": row.batch_size_per_gpu,
        "data": row.data,
        "sequence_length": row.sequence_length,
        "padding_fraction": row.padding_fraction,
        "kind": row.kind,
        "derived": row.derived,
        "num_runs": row.num_runs,
        "num_unsteady_runs": row.num_unsteady,
        "run_ids": list(row.run_ids),
        **{name: quantities[name] for name in QUANTITIES[:7]},
        "build_s": row.build_s,
        "compile_s": row.compile_s,
        "warmup_s": row.warmup_s,
        "peak_memory_gib": row.peak_memory_gib,
        "data_wait_fraction": row.data_wait_fraction,
        "utilization": row.utilization,
        "kernels": list(row.kernels),
        "service": row.service,
        "region": row.region,
        "purchase": row.purchase,
        "usd_per_hour": price.usd_per_hour if price else None,
        "price_as_of": price.as_of.isoformat() if price and price.as_of else None,
        "price_source": price.source if price else None,
        "price_inferred": price.inferred if price else None,
        "price_charged_as": price.charged_as if price else None,
        "price_hypothetical": price.hypothetical if price else None,
        **{name: quantities[name] for name in QUANTITIES[7:]},
        "comparable_as": row.comparable_as,
        "verdict": row.verdict,
        "reason": "; ".join(row.reasons) or None,
        "ranked": not row.is_barred,
        "guard_failures": list(row.guard.failures),
        "numerics": row.guard.numerics,
        "held_out": held_out_to_json(row),
        "convergence": convergence_to_json(row),
        "sources": list(row.sources),
        "fingerprint": dict(row.fingerprint),
    }


def as_csv(comparison: Comparison) -> str:
    """The rows as CSV: a quantity x becomes the columns x, x_low and x_high; lists are joined by blanks."""
    text = io.StringIO()
    rows = [_flat(row_to_json(row)) for row in comparison.rows]
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name == "held_out":
            flat |= flat_convergence(row)
        elif name == "convergence":
            continue  # its columns came with those of `held_out`
        elif name in QUANTITIES:
            quantity = value or {"value": None, "low": None, "high": None}
            flat |= {
                name: quantity["value"],
                f"{name}_low": quantity["low"],
                f"{name}_high": quantity["high"],
            }
        elif isinstance(value, list):
            flat[name] = " ".join(value) if name == "run_ids" else "; ".join(value)
        elif isinstance(value, dict):
            flat[name] = "; ".join(f"{key}={text}" for key, text in value.items())
        else:
            flat[name] = str(value).lower() if isinstance(value, bool) else value
    return flat


def _quantity(quantity: Interval | None) -> dict[str, float | None] | None:
    """A quantity, null where it is unknown or, from an absurd record, beyond numbers."""
    if quantity is None or not 0 < quantity.value < math.inf:
        return None
    known = all(bound is not None and math.isfinite(bound) for bound in (quantity.low, quantity.high))
    return {
        "value": quantity.value,
        "low": quantity.low if known else None,
        "high": quantity.high if known else None,
    }

"""What it costs to train to a target, as a table for people and as plain data for programs."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fastlaunch.analysis.accounts import WORDS
from fastlaunch.analysis.compare import Comparison
from fastlaunch.analysis.rows import Row
from fastlaunch.analysis.target import (
    RowToTarget,
    RunToTarget,
    Target,
    parse_target,
    usd_to_target,
)
from fastlaunch.analysis.target_margins import Margin, are_on_other_data, margins
from fastlaunch.analysis.verdicts import NOT_STEADY
from fastlaunch.measure.summarize import Interval
from fastlaunch.report.names import name_of
from fastlaunch.report.table import WIDTH, dollars, number
from fastlaunch.report.words import about, grid, place_to_json, product, quantity_to_json, with_range


def target_table(comparison: Comparison, target: str, *, width: int = WIDTH) -> str:
    """Which seeds of each row reached `target` (`accuracy=0.9`, `loss=2.5`), when, and for how much.

    Raises UserError for a target that cannot be read, where no run was evaluated, and for an unknown metric.
    """
    wanted = parse_target(target)
    found = usd_to_target(comparison, wanted)
    workloads = dict.fromkeys(one.row.workload for one in found)
    return "\n\n".join(
        _section([one for one in found if one.row.workload == workload], wanted, width)
        for workload in workloads
    )


def target_json(comparison: Comparison, target: str) -> dict[str, Any]:
    """The same as plain data; its shape is described in docs/compare-json.md."""
    wanted = parse_target(target)
    found = usd_to_target(comparison, wanted)
    workloads = dict.fromkeys(one.row.workload for one in found)
    return {
        "metric": wanted.metric,
        "value": wanted.value,
        "workloads": [
            _to_json(workload, [one for one in found if one.row.workload == workload], wanted)
            for workload in workloads
        ],
    }


def _section(found: Sequence[RowToTarget], target: Target, width: int) -> str:
    rows = [one.row for one in found]
    told = [f"* {text}" for text in notes(found, target)]
    return "\n\n".join(
        [
            f"{rows[0].workload}: to {target.told} on held-out data",
            grid([_cells(one, rows) for one in found], width=width),
            "\n".join(
                textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False) for text in told
            ),
        ]
    ).rstrip()


def _cells(one: RowToTarget, rows: Sequence[Row]) -> dict[str, str | None]:
    reached = [run for run in one.runs if run.step is not None]
    usd = one.usd
    return {
        "row": name_of(one.row, rows),
        "batch": str(one.row.global_batch),
        "reached": f"{one.num_reached} of {one.num_seeds}",
        "best": _best(one),
        "steps": _spanned([float(run.step or 0) for run in reached], about),
        "seconds": _spanned(one.times_s, number),
        "mean s": with_range(one.time_s),
        "mean $": None if usd is None else f"{dollars(usd.value)}{_relative(usd)}",
    }


def _best(one: RowToTarget) -> str | None:
    """The worst and the best of what the runs scored at their best."""
    values = [run.best for run in one.runs if run.best is not None]
    if not values:
        return None
    low, high = f"{min(values):.4g}", f"{max(values):.4g}"
    return low if low == high else f"{low} to {high}"


def _spanned(values: Sequence[float], say: Callable[[float], str]) -> str | None:
    if not values:
        return None
    low, high = say(min(values)), say(max(values))
    return low if low == high else f"{low} to {high}"


def _relative(quantity: Interval) -> str:
    if quantity.low is None or quantity.high is None or not quantity.value:
        return ""
    return f" \u00b1{50 * (quantity.high - quantity.low) / quantity.value:.1f}%"


def notes(found: Sequence[RowToTarget], target: Target) -> Iterator[str]:
    """What gets there for the least, by how much, why others have no mean, and what the times leave out."""
    rows = [one.row for one in found]
    yield from _ranking(found, target, rows)
    for one in found:
        name = name_of(one.row, rows)
        if one.reason is not None:
            yield f"{name}: n/a, {one.reason}{_why_not(one)}"
        elif one.row.is_barred or one.row.verdict == NOT_STEADY:
            yield f"{name} is {one.row.verdict}: it is compared with none here"
    waits = [run.waited_steps for one in found for run in one.runs if run.waited_steps is not None]
    if waits:
        yield f"reached is told by the evaluation that finds it, up to {about(max(waits))} steps late"
    unknown = dict.fromkeys(part for one in found for run in one.runs for part in run.unknown)
    if unknown:
        yield f"not known of every run, and not counted there: {', '.join(WORDS.get(p, p) for p in unknown)}"


def _ranking(found: Sequence[RowToTarget], target: Target, rows: Sequence[Row]) -> Iterator[str]:
    ranked = [one for one in found if one.is_ranked]
    if not ranked:
        return
    if are_on_other_data(ranked, target):
        yield "the rows were evaluated on other data, or on other tokens: they are compared with none here"
        return
    behind = margins(found, target)
    priced = all(one.usd_per_s for one in ranked)
    best = behind[0].best if behind else ranked[0]
    name = name_of(best.row, rows)
    if priced and best.usd is not None:
        yield f"{target.told} costs least with {name}: ${dollars(best.usd.value)}"
    elif best.time_s is not None:
        yield f"{target.told} is reached first with {name}: after {number(best.time_s.value)} s"
    for margin in behind:
        yield _behind(margin, rows, "costs" if priced else "takes")


def _behind(margin: Margin, rows: Sequence[Row], verb: str) -> str:
    low, high = margin.ratio.low, margin.ratio.high
    assert low is not None and high is not None
    more = f"{100 * (margin.ratio.value - 1):+.1f}%"
    told = f"{name_of(margin.other.row, rows)} {verb} {more} (between {100 * (low - 1):+.1f}% and "
    told += f"{100 * (high - 1):+.1f}%)"
    return told if margin.is_settled else f"{told}: not settled"


def _why_not(one: RowToTarget) -> str:
    """How the runs ended that did not reach the target, where that was not at their last step."""
    ended = dict.fromkeys(run.status for run in one.runs if run.step is None and run.status != "completed")
    return f" (others ended as {', '.join(ended)})" if ended else ""


def _to_json(workload: str, found: Sequence[RowToTarget], target: Target) -> dict[str, Any]:
    return {
        "workload": workload,
        "rows": [_row_to_json(one) for one in found],
        "margins": [
            {
                "best": place_to_json(margin.best.row),
                "other": place_to_json(margin.other.row),
                "ratio": quantity_to_json(margin.ratio),
                "settled": margin.is_settled,
            }
            for margin in margins(found, target)
        ],
        "notes": list(notes(found, target)),
    }


def _row_to_json(one: RowToTarget) -> dict[str, Any]:
    row = one.row
    return {
        **place_to_json(row),
        "global_batch": row.global_batch,
        "num_seeds": one.num_seeds,
        "num_reached": one.num_reached,
        "time_to_target_s": quantity_to_json(one.time_s),
        "usd_to_target": quantity_to_json(one.usd),
        "usd_per_hour": row.price.usd_per_hour if row.price else None,
        "reason": one.reason,
        "ranked": one.is_ranked,
        "runs": [_run_to_json(run, one.usd_per_s) for run in one.runs],
    }


def _run_to_json(run: RunToTarget, usd_per_s: float | None) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "seed": run.seed,
        "status": run.status,
        "best": run.best,
        "last_evaluated_step": run.last_step,
        "step": run.step,
        "time_s": run.time_s,
        "usd": product(run.time_s, usd_per_s),
        "unknown": list(run.unknown),
    }

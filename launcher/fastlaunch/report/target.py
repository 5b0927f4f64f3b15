"""What it costs to train to a target, as a table for people and as plain data for programs."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from fastlaunch.analysis.account import WORDS
from fastlaunch.analysis.compare import Comparison, Row
from fastlaunch.analysis.target import (
    Margin,
    RowToTarget,
    RunToTarget,
    Target,
    are_on_other_data,
    margins,
    parse_target,
    usd_to_target,
)
from fastlaunch.core.tables import WIDTH, Column, table
from fastlaunch.report.data import place_to_json, product, quantity_to_json
from fastlaunch.report.notes import bulleted
from fastlaunch.report.text import (
    UNKNOWN,
    about,
    between,
    dollars,
    name_of,
    number,
    span,
    with_range,
)


def target_table(comparison: Comparison, target: str, *, width: int = WIDTH) -> str:
    """Return which seeds of each row reached `target`, such as `loss=2.5`, when, and at what cost.

    Raises UserError for a target that cannot be read, where no run was evaluated, and for an unknown metric.
    """
    goal = parse_target(target)
    results = _by_workload(comparison, goal)
    return "\n\n".join(_section(of_workload, goal, width) for of_workload in results.values())


def target_json(comparison: Comparison, target: str) -> dict[str, Any]:
    """Return the same as plain data; docs/reference.md describes its shape."""
    goal = parse_target(target)
    results = _by_workload(comparison, goal)
    return {
        "metric": goal.metric,
        "value": goal.value,
        "workloads": [_to_json(workload, of_workload, goal) for workload, of_workload in results.items()],
    }


def _by_workload(comparison: Comparison, target: Target) -> dict[str, list[RowToTarget]]:
    groups = groupby(usd_to_target(comparison, target), lambda result: result.row.setup.workload)
    return {workload: list(results) for workload, results in groups}


def _section(results: Sequence[RowToTarget], target: Target, width: int) -> str:
    rows = [result.row for result in results]
    return "\n\n".join(
        [
            f"{rows[0].setup.workload}: to {target.text} on held-out data",
            table(results, _columns(rows), width, rule=True, missing=UNKNOWN),
            bulleted(list(notes(results, target)), width),
        ]
    ).rstrip()


def _columns(rows: Sequence[Row]) -> list[Column[RowToTarget]]:
    def number_column(name: str, value: Callable[[RowToTarget], str | None]) -> Column[RowToTarget]:
        return Column(name, value, align="right")

    def steps(result: RowToTarget) -> list[float]:
        return [run.step or 0 for run in result.runs if run.step is not None]

    def best(result: RowToTarget) -> list[float]:
        return [run.best for run in result.runs if run.best is not None]

    return [
        Column("row", lambda result: name_of(result.row, rows)),
        number_column("batch", lambda result: str(result.row.setup.global_batch)),
        number_column("reached", lambda result: f"{result.num_reached} of {result.num_seeds}"),
        number_column("best", lambda result: span(best(result), "{:.4g}".format)),
        number_column("steps", lambda result: span(steps(result), about)),
        number_column("seconds", lambda result: span(list(result.times_s.values()), number)),
        number_column("mean s", lambda result: with_range(result.time_s)),
        number_column("mean $", lambda result: with_range(result.usd, format_value=dollars)),
    ]


def notes(results: Sequence[RowToTarget], target: Target) -> Iterator[str]:
    """Yield which row gets there for the least and by how much, why others have no mean, and what the times
    leave out.
    """
    rows = [result.row for result in results]
    yield from _ranking(results, target, rows)
    for result in results:
        name = name_of(result.row, rows)
        if result.reason is not None:
            yield f"{name}: n/a, {result.reason}{_why_not(result)}"
        elif result.row.is_barred:
            yield f"{name} is {result.row.verdict.kind}, so it is not compared"
    waits = [run.waited_steps for result in results for run in result.runs if run.waited_steps is not None]
    if waits:
        late = f"up to {about(max(waits))} steps late"
        yield f"a target counts as reached at the first evaluation that shows it, {late}"
    unknown = dict.fromkeys(part for result in results for run in result.runs for part in run.unknown)
    if unknown:
        yield f"not included where unknown: {', '.join(WORDS.get(p, p) for p in unknown)}"


def _ranking(results: Sequence[RowToTarget], target: Target, rows: Sequence[Row]) -> Iterator[str]:
    ranked = [result for result in results if result.is_ranked]
    if not ranked:
        return
    if are_on_other_data(ranked, target):
        yield "the rows were evaluated on different data or tokens, so they are not compared"
        return
    behind = margins(results, target)
    priced = all(result.usd_per_s for result in ranked)
    best = behind[0].best if behind else ranked[0]
    name = name_of(best.row, rows)
    if priced and best.usd is not None:
        yield f"{target.text} costs least with {name}: ${dollars(best.usd.value)}"
    elif best.time_s is not None:
        yield f"{target.text} is reached first with {name}: after {number(best.time_s.value)} s"
    for margin in behind:
        yield _behind(margin, rows, "costs" if priced else "takes")


def _behind(margin: Margin, rows: Sequence[Row], verb: str) -> str:
    more = f"{100 * (margin.ratio.value - 1):+.1f}%{between(margin.ratio)}"
    claim = f"{name_of(margin.other.row, rows)} {verb} {more}"
    return claim if margin.is_settled else f"{claim}: not settled"


def _why_not(result: RowToTarget) -> str:
    """Return how runs ended that stopped before their last step and before the target."""
    ended = dict.fromkeys(run.status for run in result.runs if run.step is None and run.status != "completed")
    return f" (others ended as {', '.join(ended)})" if ended else ""


def _to_json(workload: str, results: Sequence[RowToTarget], target: Target) -> dict[str, Any]:
    return {
        "workload": workload,
        "rows": [_row_to_json(result) for result in results],
        "margins": [
            {
                "best": place_to_json(margin.best.row),
                "other": place_to_json(margin.other.row),
                "ratio": quantity_to_json(margin.ratio),
                "settled": margin.is_settled,
            }
            for margin in margins(results, target)
        ],
        "notes": list(notes(results, target)),
    }


def _row_to_json(result: RowToTarget) -> dict[str, Any]:
    row = result.row
    return {
        **place_to_json(row),
        "global_batch": row.setup.global_batch,
        "num_seeds": result.num_seeds,
        "num_reached": result.num_reached,
        "time_to_target_s": quantity_to_json(result.time_s),
        "usd_to_target": quantity_to_json(result.usd),
        "usd_per_hour": row.price.usd_per_hour if row.price else None,
        "reason": result.reason,
        "ranked": result.is_ranked,
        "runs": [_run_to_json(run, result.usd_per_s) for run in result.runs],
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

"""The cost of training to a target, as a text table and plain data."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fastlaunch.analysis.account import WORDS
from fastlaunch.analysis.compare import Comparison, Row
from fastlaunch.analysis.cost import Cost, cost_of_row
from fastlaunch.analysis.rate import Rate
from fastlaunch.analysis.target import (
    RowToTarget,
    Target,
    are_on_other_data,
    margins,
    parse_target,
    to_target,
)
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.tables import WIDTH, Column, table
from fastlaunch.report.cost import HOW_COSTS_ARE_KNOWN, volume_prices
from fastlaunch.report.data import fields_to_json, place_to_json, quantity_to_json
from fastlaunch.report.text import (
    UNKNOWN,
    about,
    between,
    bulleted,
    dollars,
    name_of,
    number,
    span,
    with_range,
)


def target_table(comparison: Comparison, target: str, catalogue: Catalogue, *, width: int = WIDTH) -> str:
    """Return a table of the seeds that reached `target`, such as `loss=2.5`, with times and costs.

    Raises UserError for an invalid target, an unknown metric, or if no run was evaluated.
    """
    goal = parse_target(target)
    results = _by_workload(comparison, goal, catalogue)
    return "\n\n".join(_section(of_workload, goal, width) for of_workload in results.values())


def target_json(comparison: Comparison, target: str, catalogue: Catalogue) -> dict[str, Any]:
    """Return the content of the table as plain data; docs/reference.md describes its shape."""
    goal = parse_target(target)
    results = _by_workload(comparison, goal, catalogue)
    return {
        "metric": goal.metric,
        "value": goal.value,
        "workloads": [_to_json(workload, of_workload, goal) for workload, of_workload in results.items()],
    }


#: A row's way to the target, and the rate and cost of as many samples; None without a mean or a price.
_Priced = tuple[RowToTarget, tuple[Rate, Cost] | None]


def _by_workload(comparison: Comparison, target: Target, catalogue: Catalogue) -> dict[str, list[_Priced]]:
    volumes = volume_prices(comparison, catalogue)
    workloads: dict[str, list[_Priced]] = {}
    for result in to_target(comparison, target):
        cost = None
        if result.time_s and result.samples and result.row.price:
            cost = cost_of_row(result.row, result.samples, volumes)
        workloads.setdefault(result.row.setup.workload, []).append((result, cost))
    return workloads


def _section(results: Sequence[_Priced], target: Target, width: int) -> str:
    rows = [result.row for result, _ in results]
    return "\n\n".join(
        [
            f"{rows[0].setup.workload}: to {target.text} on held-out data",
            table(results, _columns(rows), width, rule=True, missing=UNKNOWN),
            bulleted(list(notes(results, target)), width),
        ]
    ).rstrip()


def _columns(rows: Sequence[Row]) -> list[Column[_Priced]]:
    def of_row(name: str, value: Callable[[RowToTarget], str | None]) -> Column[_Priced]:
        return Column(name, lambda priced: value(priced[0]), align="right")

    def steps(result: RowToTarget) -> list[float]:
        return [run.step or 0 for run in result.runs if run.step is not None]

    def best(result: RowToTarget) -> list[float]:
        return [run.best for run in result.runs if run.best is not None]

    def usd(priced: _Priced) -> str | None:
        return with_range(priced[1][1].usd, format_value=dollars) if priced[1] else None

    return [
        Column("row", lambda priced: name_of(priced[0].row, rows)),
        of_row("batch", lambda result: str(result.row.setup.global_batch)),
        of_row("reached", lambda result: f"{result.num_reached} of {result.num_seeds}"),
        of_row("best", lambda result: span(best(result), "{:.4g}".format)),
        of_row("steps", lambda result: span(steps(result), about)),
        of_row("seconds", lambda result: span(list(result.times_s.values()), number)),
        of_row("mean s", lambda result: with_range(result.time_s)),
        Column("$", usd, align="right"),
        Column("evidence", lambda priced: priced[1][0].evidence if priced[1] else None),
    ]


def notes(results: Sequence[_Priced], target: Target) -> Iterator[str]:
    """Yield the cheapest row and its margin, why other rows have no mean, and what the times leave out."""
    rows = [result.row for result, _ in results]
    yield from _ranking(results, target, rows)
    for result, _ in results:
        name = name_of(result.row, rows)
        if result.reason is not None:
            # The runs that stopped before both their last step and the target.
            statuses = (run.status for run in result.runs if run.step is None)
            others = [status for status in dict.fromkeys(statuses) if status != "completed"]
            ends = f" (others ended as {', '.join(others)})" if others else ""
            yield f"{name}: n/a, {result.reason}{ends}"
        elif result.row.is_barred:
            yield f"{name} is {result.row.verdict.kind}, so it is not compared"
    waits = [run.waited_steps for result, _ in results for run in result.runs if run.waited_steps is not None]
    if waits:
        late = f"up to {about(max(waits))} steps late"
        yield f"a target counts as reached at the first evaluation that shows it, {late}"
    unknown = dict.fromkeys(part for result, _ in results for run in result.runs for part in run.unknown)
    if unknown:
        yield f"not included in seconds where unknown: {', '.join(WORDS.get(p, p) for p in unknown)}"
    if any(known for _, known in results):
        yield from HOW_COSTS_ARE_KNOWN
    elif any(result.time_s for result, _ in results):
        yield "ranges and ± hold 90%, by the seeds"


def _ranking(results: Sequence[_Priced], target: Target, rows: Sequence[Row]) -> Iterator[str]:
    costs = {id(result): known[1] for result, known in results if known}
    ranked = [result for result, _ in results if result.is_ranked]
    if not ranked:
        return
    if are_on_other_data(ranked, target):
        yield "the rows were evaluated on different data or tokens, so they are not compared"
        return
    behind = margins(ranked, target)
    priced = all(result.usd_per_s for result in ranked)
    best = behind[0].best if behind else ranked[0]
    name = name_of(best.row, rows)
    if priced and id(best) in costs:
        yield f"{target.text} costs least with {name}: ${dollars(costs[id(best)].usd.value)}"
    elif best.time_s is not None:
        yield f"{target.text} is reached first with {name}: after {number(best.time_s.value)} s"
    for margin in behind:
        more = f"{100 * (margin.ratio.value - 1):+.1f}%{between(margin.ratio)}, by its seeds' times"
        open_end = "" if margin.is_settled else ": not settled"
        yield f"{name_of(margin.other.row, rows)} {'costs' if priced else 'takes'} {more}{open_end}"


def _to_json(workload: str, results: Sequence[_Priced], target: Target) -> dict[str, Any]:
    return {
        "workload": workload,
        "rows": [_row_to_json(*result) for result in results],
        "margins": [
            {
                "best": place_to_json(margin.best.row),
                "other": place_to_json(margin.other.row),
                "ratio": quantity_to_json(margin.ratio),
                "settled": margin.is_settled,
            }
            for margin in margins([result for result, _ in results], target)
        ],
        "notes": list(notes(results, target)),
    }


def _row_to_json(result: RowToTarget, known: tuple[Rate, Cost] | None) -> dict[str, Any]:
    row = result.row
    return {
        **place_to_json(row),
        "global_batch": row.setup.global_batch,
        **fields_to_json(result, "num_seeds", "num_reached"),
        "time_to_target_s": quantity_to_json(result.time_s),
        "samples_to_target": quantity_to_json(result.samples),
        "usd_to_target": quantity_to_json(known[1].usd) if known else None,
        "evidence": known[0].evidence if known else None,
        "source": known[0].source if known else None,
        "usd_per_hour": row.price.usd_per_hour if row.price else None,
        "reason": result.reason,
        "ranked": result.is_ranked,
        "runs": [
            {
                **fields_to_json(run, "run_id", "seed", "status", "best"),
                "last_evaluated_step": run.last_step,
                **fields_to_json(run, "step", "time_s", "unknown"),
            }
            for run in result.runs
        ],
    }

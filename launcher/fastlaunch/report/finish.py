"""The cost of a whole job on each row of a comparison, as a table and plain data."""

from collections.abc import Iterator
from typing import Any

from fastlaunch.analysis.compare import Comparison
from fastlaunch.analysis.cost import Finish, to_finish
from fastlaunch.analysis.pooling import BARE_STEP
from fastlaunch.analysis.verdicts import TRAINING
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.tables import WIDTH, Column, table
from fastlaunch.report.cost import cost_to_json, rate_to_json, volume_prices
from fastlaunch.report.data import place_to_json
from fastlaunch.report.notes import bulleted
from fastlaunch.report.text import UNKNOWN, about, dollars, name_of, number, with_range

#: Notes on dollars that nobody was billed.
HOW_COSTS_ARE_KNOWN = (
    "boot and other parts that no run of a row shows are assumed, as `fastlaunch estimate` lists them",
    "ranges and ± hold 90%, on any machine of the type; parts that come once have none",
)


def finish_table(comparison: Comparison, steps: float, catalogue: Catalogue, *, width: int = WIDTH) -> str:
    """Return the time and cost of jobs as long as `steps` steps of the baseline, by workload."""
    return "\n\n".join(
        _section(workload, finishes, width) for workload, finishes in _finishes(comparison, steps, catalogue)
    )


def finish_json(comparison: Comparison, steps: float, catalogue: Catalogue) -> dict[str, Any]:
    """Return the same as plain data; docs/reference.md describes it."""
    return {
        "steps": steps,
        "workloads": [
            {
                "workload": workload,
                "sample_unit": finishes[0].row.setup.sample_unit,
                "sentence": _cheapest(finishes),
                "rows": [_row_to_json(finish) for finish in finishes],
            }
            for workload, finishes in _finishes(comparison, steps, catalogue)
        ],
    }


def _finishes(
    comparison: Comparison, steps: float, catalogue: Catalogue
) -> Iterator[tuple[str, list[Finish]]]:
    volumes = volume_prices(comparison, catalogue)
    for workload, rows in comparison.by_workload.items():
        yield workload, to_finish(rows, steps, volumes)


def _section(workload: str, finishes: list[Finish], width: int) -> str:
    rows = [finish.row for finish in finishes]
    is_alike = len({finish.steps for finish in finishes}) == 1
    columns: list[Column[Finish]] = [
        Column("row", lambda finish: name_of(finish.row, rows)),
        Column("steps", lambda finish: None if is_alike else about(finish.steps), align="right"),
        Column("h", lambda finish: finish.cost and with_range(finish.cost.hours), align="right"),
        Column(
            "$",
            lambda finish: (
                finish.row.price and finish.cost and with_range(finish.cost.usd, format_value=dollars)
            ),
            align="right",
        ),
        Column("evidence", lambda finish: finish.rate and finish.rate.evidence),
    ]
    base = max(finishes, key=lambda finish: finish.row.is_baseline)
    samples = "" if base.row.group.measure == BARE_STEP else f" of {name_of(base.row, rows)}"
    notes = [*filter(None, [_cheapest(finishes)]), *HOW_COSTS_ARE_KNOWN]
    heading = f"{workload}: to the end of {about(base.steps)} steps{samples}"
    text = table(finishes, columns, width, rule=True, missing=UNKNOWN)
    return "\n\n".join([heading, text, bulleted(notes, width)])


def _cheapest(finishes: list[Finish]) -> str | None:
    """Return a sentence on the cheapest ranked row that trains like the baseline; None without prices.

    It names the rows whose ranges overlap with the cheapest's.
    """
    ranked = [
        (finish.cost.usd, finish)
        for finish in finishes
        if finish.cost
        and finish.row.price
        and not finish.row.is_barred
        and finish.row.verdict.comparable_as == TRAINING
    ]
    if not ranked:
        return None
    least, best = min(ranked, key=lambda priced: priced[0].value)
    assert best.cost is not None and best.rate is not None
    hours = number(best.cost.hours.value)
    rows = [finish.row for finish in finishes]
    near = [
        name_of(finish.row, rows)
        for usd, finish in ranked
        if finish is not best and (usd.low or usd.value) <= (least.high or least.value)
    ]
    unsettled = f"; too close to tell: {', '.join(near)}" if near else ""
    return (
        f"{about(best.steps)} steps cost least with {name_of(best.row, rows)}: "
        f"${with_range(least, format_value=dollars)} in {hours} h, {best.rate.evidence}{unsettled}"
    )


def _row_to_json(finish: Finish) -> dict[str, Any]:
    row, cost = finish.row, finish.cost
    data = {
        **place_to_json(row),
        "comparable_as": row.verdict.comparable_as,
        "run_ids": list(row.run_ids),
        "steps": finish.steps,
        "usd_per_hour": row.price.usd_per_hour if row.price else None,
        **(rate_to_json(finish.rate) if finish.rate else {}),
        **(cost_to_json(cost) if cost else {"hours": None, "usd": None, "parts": []}),
    }
    if row.price is None:
        data |= {"usd": None, "effective_usd": None}
        data["parts"] = [{**part, "usd": None} for part in data["parts"]]
    return data

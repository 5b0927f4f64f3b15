"""The time and cost of a training, and of the same job on each row: sentences, tables and plain data."""

import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from fastlaunch.analysis.account import WORDS
from fastlaunch.analysis.compare import Comparison
from fastlaunch.analysis.cost import Cost, Finish, to_finish
from fastlaunch.analysis.pooling import BARE_STEP
from fastlaunch.analysis.pricing import SECONDS_PER_HOUR, scaled
from fastlaunch.analysis.rate import Rate
from fastlaunch.analysis.verdicts import TRAINING
from fastlaunch.catalog.hardware import TRAINING_PLAN
from fastlaunch.catalog.prices import Catalogue, VolumePrice
from fastlaunch.core.tables import WIDTH, Column, table
from fastlaunch.core.units import duration_text
from fastlaunch.measure.summary import Interval
from fastlaunch.report.data import fields_to_json, flat_quantity, place_to_json, quantity_to_json
from fastlaunch.report.text import UNKNOWN, about, bulleted, dollars, limits, name_of, number, with_range

_BOUGHT = {
    "on-demand": "",
    "spot": " as spot",
    "capacity-block": " in a capacity block",
    TRAINING_PLAN: " in a training plan",
}


def sentence(cost: Cost, rate: Rate, *, what: str, purchase: str) -> str:
    """Return `bf16 on p5.48xlarge: $541.58 (539 to 544) in 9.84 h, measured.`"""
    text = f"{what}{_BOUGHT[purchase]}: {cost_text(cost)}"
    if cost.fee_usd is not None:
        text += f" of {cost.block_hours:g} h; the hours used come to {_usd(cost.effective_usd)}"
    return f"{text}, {rate.evidence_text}."


def cost_text(cost: Cost) -> str:
    """Return `$577 (540 to 615) in 5.9 h`; without a range, `$577 in 5.9 h`."""
    limits = "" if cost.usd.low is None else f" ({cost.usd.range_text(number) or 'no range'})"
    return f"${dollars(cost.usd.value)}{limits} in {hours_text(cost.hours.value)}"


def tokens_text(rate: Rate, usd: float, samples: float) -> str:
    """Return `, 13,300 tokens/s, $0.0912 per million tokens`; empty if the workload has no tokens."""
    per_s, per_million = rate.tokens_per_s, rate.usd_per_million_tokens(usd, samples)
    if per_s is None or per_million is None:
        return ""
    return f", {per_s.value:,.0f} tokens/s, ${number(per_million)} per million tokens"


def hours_text(hours: float) -> str:
    """Return `5.90 h`, or `24.0 min`."""
    return f"{number(hours)} h" if hours >= 0.995 else f"{number(hours * 60)} min"


def rate_to_json(rate: Rate) -> dict[str, Any]:
    """Return the rate and its evidence as plain data."""
    return fields_to_json(rate, "samples_per_s", "tokens_per_s", "evidence", "prediction_class", "source")


def volume_prices(comparison: Comparison, catalogue: Catalogue) -> Callable[[str], VolumePrice | None]:
    """Return a function from region to volume price, on the day of the rows' newest price."""
    day = max((row.price.as_of for row in comparison.rows if row.price), default=None)
    return lambda region: catalogue.find_volume_price(region, on=day) if day else None


def _usd(quantity: Interval) -> str:
    return f"${dollars(quantity.value)}{limits(quantity, 1.0, dollars) if quantity.value else ''}"


def part_rows(cost: Cost) -> list[dict[str, Any]]:
    """Return a row of numbers for each part and the total."""
    rows = [
        {
            "part": WORDS.get(part.name, part.name),
            **flat_quantity("seconds", quantity_to_json(part.seconds)),
            **flat_quantity("usd", quantity_to_json(part.usd)),
            "evidence": part.evidence,
            "source": part.source,
        }
        for part in cost.parts
    ]
    total = {
        "part": "total",
        **flat_quantity("seconds", quantity_to_json(scaled(cost.hours, SECONDS_PER_HOUR))),
        **flat_quantity("usd", quantity_to_json(cost.usd)),
        "evidence": None,
        "source": None,
    }
    return [*rows, total]


def cells(cost: Cost) -> list[dict[str, str]]:
    """Return the rows as text, without parts that take neither time nor money."""
    return [
        {
            "part": row["part"],
            "time": "" if row["seconds"] is None else duration_text(row["seconds"]),
            "$": dollars(row["usd"]) if row["usd"] else "0",
            "known": row["evidence"] or "",
            "source": row["source"] or "",
        }
        for row in part_rows(cost)
        if row["seconds"] or row["usd"]
    ]


def notes(cost: Cost) -> Iterator[str]:
    """Yield notes on what the table leaves out: parts assumed to be absent, and intervals."""
    if none := [row["part"] for row in part_rows(cost)[:-1] if not row["usd"] and not row["seconds"]]:
        yield f"nothing is counted for {', '.join(none)}; see `fastlaunch estimate --assume help`"
    if cost.hours.low is None and any(part.name == "restarts" for part in cost.parts):
        yield "hours and dollars vary by the luck on spot, and also by the speed, which has no interval"
    elif cost.hours.low is None:
        yield "there is no interval: the speed has none"
    else:
        yield "ranges and ± hold 90%, by the speed's; parts that come once have none"


def cost_to_json(cost: Cost) -> dict[str, Any]:
    """Return hours, dollars and parts, with their intervals, as plain data."""
    return {
        **fields_to_json(cost, "hours", "usd", "effective_usd", "block_hours"),
        "block_fee_usd": cost.fee_usd,
        "checkpoint_every_s": cost.checkpoint_every_s,
        "parts": [
            fields_to_json(part, "name", "seconds", "usd", "evidence", "source") for part in cost.parts
        ],
    }


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
    heading = textwrap.fill(f"{workload}: to the end of {base.steps:,.10g} steps{samples}", width)
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
        f"{best.steps:,.10g} steps cost least with {name_of(best.row, rows)}: "
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

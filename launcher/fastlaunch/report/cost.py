"""The time and cost of a training, and of the same job on each row: sentences, tables and plain data."""

import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from fastlaunch.core.terminal import filled
from fastlaunch.core.units import duration_text
from fastlaunch.measure.summary import Interval
from fastlaunch.report.data import fields_to_json, flat_quantity, place_to_json, quantity_to_json
from fastlaunch.report.text import (
    NO_LETTERS,
    UNKNOWN,
    Labels,
    about,
    at_a_glance,
    bulleted,
    dollars,
    letters_of,
    limits,
    name_of,
    number,
    where_of,
    with_range,
)

_BOUGHT = {
    "on-demand": "",
    "spot": " as spot",
    "capacity-block": " in a capacity block",
    TRAINING_PLAN: " in a training plan",
}


def sentence(cost: Cost, rate: Rate, *, what: str, purchase: str) -> str:
    """Return `bf16 on p5.48xlarge: $542 (90% range 539 to 544), 9.84 h, measured.`"""
    block = "" if cost.fee_usd is None else f" of {cost.block_hours:g} h"
    start, end = f"{what}{_BOUGHT[purchase]}: ", f"{block}, {rate.evidence_text}."
    return at_a_glance(f"{start}{cost_text(cost)}{end}", f"{start}{cost_text(cost, what='')}{end}")


def cost_text(cost: Cost, *, what: str = "90% range ") -> str:
    """Return `$577 (90% range 540 to 615), 5.90 h`. what: stands before the range, which may be missing."""
    return f"{usd_text(cost, what=what)}, {hours_text(cost.hours.value)}"


def usd_text(cost: Cost, *, what: str) -> str:
    """Return `cost_text` without the time."""
    usd = cost.usd
    limits = usd.range_text(number)
    return f"${number(usd.value)}" + (f" ({'' if usd.is_boundless else what}{limits})" if limits else "")


def tokens_text(rate: Rate, usd: float, samples: float) -> str:
    """Return `13,300 tokens/s, in all $0.0912 per million tokens`; empty if the workload has no tokens."""
    per_s, per_million = rate.tokens_per_s, rate.usd_per_million_tokens(usd, samples)
    if per_s is None or per_million is None:
        return ""
    return f"{per_s.value:,.0f} tokens/s, in all ${number(per_million)} per million tokens"


def hours_text(hours: float) -> str:
    """Return `5.90 h`, `24.0 min` or `11.1 s`."""
    unit, per_hour = _time_unit(hours)
    return f"{number(hours * per_hour)} {unit}"


def _time_unit(hours: float) -> tuple[str, float]:
    """Return the unit in which so many hours are readable, and how many of them an hour has."""
    if hours >= 0.995:
        return "h", 1.0
    return ("min", 60.0) if hours * 60 >= 0.995 else ("s", SECONDS_PER_HOUR)


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


def cells(cost: Cost, *, with_source: bool) -> list[dict[str, str]]:
    """Return the rows as text, without parts that take neither time nor money."""
    return [
        {
            "part": row["part"],
            "time": "" if row["seconds"] is None else duration_text(row["seconds"]),
            "$": number(row["usd"]) if row["usd"] else "0",
            "evidence": row["evidence"] or "",
            **({"source": row["source"] or ""} if with_source else {}),
        }
        for row in part_rows(cost)
        if row["seconds"] or row["usd"]
    ]


def notes(cost: Cost) -> Iterator[str]:
    """Yield notes on what the table leaves out: parts assumed to be absent, and intervals."""
    if none := [row["part"] for row in part_rows(cost)[:-1] if not row["usd"] and not row["seconds"]]:
        yield f"nothing is counted for {', '.join(none)}; see `fastlaunch estimate --assume help`"
    if cost.fee_usd is not None:
        yield f"the hours used come to {_usd(cost.effective_usd)} of the block's fee"
    if cost.hours.low is None and any(part.name == "restarts" for part in cost.parts):
        yield "hours and dollars vary by the luck on spot, and also by the speed, which has no interval"
    elif cost.hours.low is None:
        yield "there is no interval: the speed has none"
    else:
        yield "the range is one of 90%, from the speed alone; one-off parts carry none"


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


def evidence_text(evidence: str, assumed: Collection[str]) -> str:
    """Return `measured`, or `measured + assumed start` where parts of the sum are assumed."""
    return f"{evidence} + assumed start" if assumed else evidence


def assumed_note(assumed_s: Mapping[str, float]) -> Iterator[str]:
    """Yield a note on the parts that are assumed, with their seconds."""
    if assumed_s:
        parts = ", ".join(f"{duration_text(s)} of {WORDS.get(part, part)}" for part, s in assumed_s.items())
        yield f"assumed, not measured: {parts}; no range includes this, and a narrower one is left out"


def beside_assumed(quantity: Interval, assumed: float) -> Interval:
    """Return the quantity without its range if the assumed part of it is larger than the range."""
    is_narrow = quantity.high is not None and quantity.high - quantity.value < assumed
    return Interval(value=quantity.value) if is_narrow else quantity


def finish_table(comparison: Comparison, steps: float, catalogue: Catalogue, *, width: int = WIDTH) -> str:
    """Return, by workload, what a job as long as `steps` steps of the baseline takes on each row."""
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
                "sentence": _sentence(finishes),
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
    letters = letters_of(rows)
    known = {_evidence(finish) for finish in finishes if finish.cost}
    is_alike = len({finish.steps for finish in finishes}) == 1
    is_priced = any(row.price for row in rows)
    longest = max((finish.cost.hours.value for finish in finishes if finish.cost), default=1.0)
    unit, per_hour = _time_unit(longest)
    columns: list[Column[Finish]] = [
        Column("row", lambda finish: name_of(finish.row, rows, letters=letters)),
        Column("steps", lambda finish: None if is_alike else about(finish.steps), align="right"),
        Column(
            unit,
            lambda finish: finish.cost and with_range(_hours(finish.cost), factor=per_hour),
            align="right",
        ),
        Column(
            "$", lambda finish: finish.row.price and finish.cost and _usd_text(finish.cost), align="right"
        ),
        # If it is the same in all rows, the heading has it.
        Column("evidence", lambda finish: None if len(known) == 1 else _evidence(finish)),
    ]
    assumed_s = {name: s for finish in finishes if finish.cost for name, s in finish.cost.assumed_s.items()}
    has_range = any(_hours(finish.cost).low is not None for finish in finishes if finish.cost)
    notes = [*([_HOW_SURE] if has_range else []), *assumed_note(assumed_s)]
    evidence = f", {next(iter(known))}" if len(known) == 1 else ""
    heading = textwrap.fill(
        f"{workload}{where_of(rows)}: time{' and cost' if is_priced else ''} for"
        f" {_job(finishes, letters)}{evidence}",
        width,
        break_on_hyphens=False,
    )
    ordered = _ordered(finishes)
    num_ranked = sum(map(_is_ranked, ordered))
    titles = {num_ranked: "not ranked with these:"} if 0 < num_ranked < len(ordered) else None
    text = table(ordered, columns, width, rule=True, missing=UNKNOWN, titles=titles)
    sentence = filled(f"{_sentence(finishes, letters.in_words)}.", width)
    if not any(finish.cost for finish in finishes):
        return filled(f"{rows[0].setup.workload}: {_sentence(finishes, letters.in_words)}.", width)
    parts = [sentence, heading, text, letters.legend(width), bulleted(notes, width)]
    return "\n\n".join(filter(None, parts))


def _hours(cost: Cost) -> Interval:
    return beside_assumed(cost.hours, sum(cost.assumed_s.values()) / SECONDS_PER_HOUR)


def _usd_text(cost: Cost) -> str | None:
    # Dollars have the range of the hours.
    usd = cost.usd if _hours(cost).high is not None else Interval(value=cost.usd.value)
    return with_range(usd, format_value=dollars)


#: What the ranges of a finish are, beside verdicts at 95%.
_HOW_SURE = "ranges are of 90%, from the speed alone, on any machine of the type; one-off parts carry none"


def _evidence(finish: Finish) -> str | None:
    if finish.rate is None or finish.cost is None:
        return None
    return evidence_text(finish.rate.evidence, finish.cost.assumed_s)


def _is_in_steps(finishes: Sequence[Finish]) -> bool:
    """Return whether the job is as many steps of each row, and not as many samples."""
    base = max(finishes, key=lambda finish: finish.row.is_baseline)
    return len({finish.steps for finish in finishes}) == 1 or base.row.group.measure == BARE_STEP


def _job(finishes: Sequence[Finish], letters: Labels = NO_LETTERS) -> str:
    """Return `10,000 steps`; where steps differ, `as many images as 10,000 bf16 steps`."""
    rows = [finish.row for finish in finishes]
    base = max(finishes, key=lambda finish: finish.row.is_baseline)
    if _is_in_steps(finishes):
        return f"{base.steps:,.10g} steps"
    name = name_of(base.row, rows, letters=letters)
    of_base = f"steps of {name}" if " " in name else f"{name} steps"
    return f"as many {base.row.setup.sample_unit} as {base.steps:,.10g} {of_base}"


def _is_ranked(finish: Finish) -> bool:
    row = finish.row
    return finish.cost is not None and not row.is_barred and row.verdict.comparable_as == TRAINING


def _amount(finish: Finish, *, in_dollars: bool) -> Interval:
    assert finish.cost is not None
    return finish.cost.usd if in_dollars else finish.cost.hours


def _in_dollars(finishes: Sequence[Finish]) -> bool:
    """Return whether dollars order the ranked rows; else hours do."""
    return all(finish.row.price for finish in finishes if _is_ranked(finish))


def _ordered(finishes: Sequence[Finish]) -> list[Finish]:
    """Return the ranked rows, the cheapest or else the fastest first; then the others likewise."""
    in_dollars = _in_dollars(finishes)

    def key(finish: Finish) -> tuple[bool, bool, float]:
        is_known = finish.cost is not None and not (in_dollars and finish.row.price is None)
        amount = _amount(finish, in_dollars=in_dollars).value if is_known else 0.0
        return not _is_ranked(finish), not is_known, amount

    return sorted(finishes, key=key)


def _sentence(finishes: Sequence[Finish], letters: Labels = NO_LETTERS) -> str:
    """Return which ranked row, trained like the baseline, ends the job for least, or first without prices.

    It names the rows whose ranges overlap with the best row's, or else the runner-up.
    """
    ranked = [finish for finish in _ordered(finishes) if _is_ranked(finish)]
    if not ranked:
        return f"no row for {_job(finishes, letters)} is both ranked and timed"
    rows, in_dollars = [finish.row for finish in finishes], _in_dollars(finishes)
    # The heading of the table says as many samples as what.
    job = _job(finishes, letters) if _is_in_steps(finishes) else "the job"
    best, *others = ranked
    assert best.cost is not None
    hours = _hours(best.cost)
    time = f"in {hours_text(hours.value)}"
    # The table has the time.
    short = f"{job} for ${_usd_text(best.cost)}"
    took = f"{short} {time}"
    if not in_dollars:
        short = took = f"{job} {time}{limits(hours, _time_unit(hours.value)[1], number)}"
    least = _amount(best, in_dollars=in_dollars)
    near = []
    for finish in others:
        amount = _amount(finish, in_dollars=in_dollars)
        if (amount.low or amount.value) <= (least.high or least.value):
            near.append(finish)
    name = name_of(best.row, rows, letters=letters)
    if near:
        rivals = f"{len(near)} others"
        if len(near) == 1:
            rivals = name_of(near[0].row, rows, beside=best.row, letters=letters)
        answer = f"not settled between {name} and {rivals}"
        return at_a_glance(f"{answer}: {took}", f"{answer}: {short}", f"not settled: {name}: {short}")
    if not others:
        return f"{name}: {took}, {_evidence(best)}"
    second = _amount(others[0], in_dollars=in_dollars)
    percent = 100 * (1 - least.value / second.value)
    other = name_of(others[0].row, rows, beside=best.row, letters=letters)
    sure = "without a range" if least.high is None or second.low is None else _evidence(best)
    lead = f"{percent:.1f}% less than {other}, {sure}"
    return at_a_glance(f"{name}: {took}, {lead}", f"{name}: {short}, {lead}")


def _row_to_json(finish: Finish) -> dict[str, Any]:
    row, cost = finish.row, finish.cost
    data = {
        **place_to_json(row),
        "comparable_as": row.verdict.comparable_as,
        "run_ids": list(row.run_ids),
        "steps": finish.steps,
        "usd_per_hour": row.price.usd_per_hour if row.price else None,
        **(rate_to_json(finish.rate) | {"evidence": _evidence(finish)} if finish.rate else {}),
        **(cost_to_json(cost) if cost else {"hours": None, "usd": None, "parts": []}),
    }
    if row.price is None:
        data |= {"usd": None, "effective_usd": None}
        data["parts"] = [{**part, "usd": None} for part in data["parts"]]
    return data

"""The time and cost of a training as a sentence, table rows and plain data."""

from collections.abc import Callable, Iterator
from typing import Any

from fastlaunch.analysis.account import WORDS
from fastlaunch.analysis.compare import Comparison
from fastlaunch.analysis.cost import Cost
from fastlaunch.analysis.pricing import SECONDS_PER_HOUR, scaled
from fastlaunch.analysis.rate import Rate
from fastlaunch.catalog.prices import Catalogue, VolumePrice
from fastlaunch.core.units import duration_text
from fastlaunch.measure.summary import Interval
from fastlaunch.report.data import flat_quantity, quantity_to_json
from fastlaunch.report.text import about, dollars, limits, number

_BOUGHT = {"on-demand": "on demand", "spot": "on spot", "capacity-block": "in a capacity block"}


def sentence(
    cost: Cost, rate: Rate, *, what: str, where: str, samples: Interval, unit: str, purchase: str
) -> str:
    """Return `100,000,000 images of vit-huge with bf16 on p5.48xlarge take 9.84 h ±0.3% and cost ...`."""
    text = (
        f"{about(samples.value)} {unit} of {what} on {where} take {number(cost.hours.value)} h"
        f"{limits(cost.hours, 1.0, number) if cost.hours.value else ''} and cost {_usd(cost.usd)} "
        f"{_BOUGHT[purchase]}"
    )
    if cost.fee_usd is not None:
        text += f" of {cost.block_hours:g} h; the hours used come to {_usd(cost.effective_usd)}"
    return f"{text}, {rate.evidence_text}: {rate.source}."


def rate_to_json(rate: Rate) -> dict[str, Any]:
    """Return the rate and its evidence as plain data."""
    return {
        "samples_per_s": quantity_to_json(rate.samples_per_s),
        "evidence": rate.evidence,
        "prediction_class": rate.prediction_class,
        "source": rate.source,
    }


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
    if none := [row["part"] for row in part_rows(cost) if not row["usd"] and not row["seconds"]]:
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
        "hours": quantity_to_json(cost.hours),
        "usd": quantity_to_json(cost.usd),
        "effective_usd": quantity_to_json(cost.effective_usd),
        "block_hours": cost.block_hours,
        "block_fee_usd": cost.fee_usd,
        "checkpoint_every_s": cost.checkpoint_every_s,
        "parts": [
            {
                "name": part.name,
                "seconds": quantity_to_json(part.seconds),
                "usd": quantity_to_json(part.usd),
                "evidence": part.evidence,
                "source": part.source,
            }
            for part in cost.parts
        ],
    }

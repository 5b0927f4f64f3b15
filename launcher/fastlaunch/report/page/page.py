"""A comparison as one self-contained page of HTML: the charts' data, and the text around them."""

import base64
import datetime
import gzip
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from fastlaunch.analysis.best import Best, all_priced, at_home, best_of, ratio_of, script_command
from fastlaunch.analysis.compare import Comparison, Row, rate_on_type
from fastlaunch.analysis.convergence import MARGIN, curve, is_finite
from fastlaunch.analysis.pricing import reciprocal, scaled
from fastlaunch.analysis.statistics import TIE, UNRESOLVED
from fastlaunch.analysis.suggest import place_of, submit_command
from fastlaunch.analysis.verdicts import BASELINE, NO_INTERVAL, OTHER_BATCH
from fastlaunch.catalog.prices import Catalogue, Price
from fastlaunch.core.errors import UserError
from fastlaunch.measure.steptime import RankSeries
from fastlaunch.measure.summary import Interval
from fastlaunch.report.columns import Part, RowColumn, columns_of, step_parts_s
from fastlaunch.report.page import charts
from fastlaunch.report.table import heading, in_order, is_comparable, shared_cells, throughput_only
from fastlaunch.report.text import (
    UNKNOWN,
    Letters,
    amount_of,
    asides_of,
    convergence_of,
    dated,
    decisive_notes,
    dollars,
    letters_of,
    name_of,
    number,
    rate_of,
    second_of,
    sentence_of,
    shown_cost,
    shown_rate,
    shown_unit,
    times,
    with_range,
)
from fastlaunch_train.recipes.recipe import Recipe
from fastlaunch_train.records.records import STEP_PARTS

#: The page's files beside this one.
SHIPPED = ("report.html.j2", "report.css", "report.js")
#: The most ranks whose steps a page holds: more would make it larger than 2 MB.
MOST_RANKS = 300
#: The most rows with their names beside their points.
_MOST_LABELS = 14
#: A name with hyphens that fits a line of a phone.
_NAME = re.compile(r"(?=.{1,32}$)\S*\w-\w\S*")
#: The range of a number in a cell.
_RANGE = re.compile(r" (±\S+|\(.*\))$")
#: Characters of a line that the browser breaks.
_NO_LIMIT = 1000
#: Digits of numbers in charts.
_DIGITS = 4
_S_PER_HOUR = 3600.0
#: How a picture shows what its letters mean.
_LEGEND = {"fontSize": 11, "fontWeight": "normal", "offset": 12}


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A configuration that nobody measured, for the chart of cost against time of a million samples."""

    name: str
    recipe: Recipe | str
    instance: str
    usd_per_hour: float  # of all nodes
    hours: Interval
    global_batch: int | None


#: The heading of the column beside whose cells the reasons stand.
_VERDICT = "verdict"


@dataclass(frozen=True, kw_only=True)
class PageInput:
    """The content of a page."""

    comparison: Comparison
    catalogue: Catalogue
    today: datetime.date
    own_region: str
    series: Mapping[str, Sequence[RankSeries]]  # by run id; runs without records have none
    predicted: Mapping[str, Sequence[Predicted]]  # by workload


def as_html(given: PageInput, bundle: str) -> str:
    """Return the page. bundle: Vega's JavaScript. Raises UserError if altair is not installed."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    comparison = given.comparison
    sections = [_section(given, workload, rows) for workload, rows in comparison.by_workload.items()]
    environment = Environment(
        loader=PackageLoader("fastlaunch.report.page", "."),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"whole": _whole, "ranged": _ranged}
    page = environment.get_template("report.html.j2")
    style, script = shipped_text("report.css"), shipped_text("report.js")
    return page.render(
        margin=f"{MARGIN:.0%}",
        policy=_policy(style, [bundle, script]),
        title=_title(comparison.rows),
        sections=sections,
        warnings=comparison.warnings,
        today=given.today.isoformat(),
        num_runs=sum(row.num_runs for row in comparison.rows),
        colours=json.dumps(charts.COLOURS),
        style=style,
        script=script,
        bundle=bundle,
        data=_packed([section["data"] for section in sections]),
    )


def cost_chart(given: PageInput) -> tuple[charts.Spec, dict[str, charts.Rows]]:
    """Return the chart of cost against time with its data: the ranked rows and the predictions.

    Raises UserError for several workloads, or if no row has a price.
    """
    if len(given.comparison.by_workload) > 1:
        names = ", ".join(given.comparison.by_workload)
        raise UserError(f"these runs are of several workloads ({names})", "choose one: 'workload=NAME'")
    ((workload, rows),) = given.comparison.by_workload.items()
    ordered = in_order(rows)
    colours = _colours(ordered)
    ranked = [
        (row, usd, hours)
        for row in ordered
        if is_comparable(row) and not row.is_barred
        if (usd := shown_cost(row)) and (hours := _hours(row))
    ]
    if not ranked:
        raise UserError(
            f"no run of {workload} has a price",
            "give the hourly price of a machine with --usd-per-hour, or an instance type with --price-as",
        )
    drawn = [row for row, _, _ in ranked]
    letters = letters_of(drawn)
    points = []
    for row, usd, hours in ranked:
        name = _placed(name_of(row, drawn, letters=letters), row)
        points.append(
            _point(name, colours(row.setup.known_recipe or row.setup.recipe), "measured", hours, usd)
        )
    predicted = _predicted(given, workload, rows)
    for of in predicted:
        usd = scaled(of.hours, of.usd_per_hour)
        points.append(_point(of.name, colours(of.recipe), "predicted", of.hours, usd))
    front: list[dict[str, Any]] = []
    for point in sorted(points, key=lambda point: (point["hours"], point["usd"])):
        if not front or point["usd"] < front[-1]["usd"]:
            front.append(point)
    labelled = points if len(points) <= _MOST_LABELS else [front[0], front[-1], points[0]]
    all_hours = [point["hours"] for point in points]
    middle = math.sqrt(min(all_hours) * max(all_hours))
    rows_of_chart = [
        {
            **point,
            "label": point["name"] if point in labelled else None,
            "side": "left" if point["hours"] > middle else "right",
        }
        for point in points
    ]
    spec = charts.cost_against_time(shown_unit(rows[0]).name, _colour_names(drawn, predicted, colours))
    if legend := letters.legend():
        spec["title"] = {"text": legend, "anchor": "start", "orient": "bottom", **_LEGEND}
    return spec, {"rows": rows_of_chart, "front": front}


def _placed(name: str, row: Row) -> str:
    """Return the row's name with its instance type or GPU."""
    return name if row.place in name else f"{name} on {row.place}"


def _point(name: str, colour: str, kind: str, hours: Interval, usd: Interval) -> dict[str, Any]:
    point: dict[str, Any] = {"name": name, "colour": colour, "kind": kind}
    for quantity, interval in (("hours", hours), ("usd", usd)):
        value, low, high = _limited(interval)
        ends = {"": value, "_low": value if low is None else low, "_high": value if high is None else high}
        point |= {f"{quantity}{end}": _rounded(number) for end, number in ends.items()}
    return point


def shipped_text(name: str) -> str:
    """Return a file that lies beside this one."""
    return (files("fastlaunch.report.page") / name).read_text(encoding="utf-8")


def _policy(style: str, scripts: Sequence[str]) -> str:
    """Return a Content-Security-Policy that lets the page run only these scripts and load nothing.

    The policy names the scripts and the style by their hashes, so text in a run's records can be neither.
    Vega sets its styles through properties, which need no permission.
    """
    hashes = (hashlib.sha256(text.encode()).digest() for text in (style, *scripts))
    of_style, *of_scripts = (f"'sha256-{base64.b64encode(digest).decode()}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {' '.join(of_scripts)}; style-src {of_style}; "
        "base-uri 'none'; form-action 'none'"
    )


def _whole(text: str) -> str:
    """Return the text as HTML in which a short name, such as `fp8-frozen`, does not break at its hyphens."""
    from markupsafe import Markup

    span = Markup('<span class="whole">{}</span>')
    words = text.split(" ")
    return Markup(" ").join(span.format(word) if _NAME.fullmatch(word) else word for word in words)


def _ranged(text: str) -> str:
    """Return a cell's text as HTML in which the range may stand below the number."""
    from markupsafe import Markup

    number, *limits = _RANGE.split(text)[:2]
    return Markup("{} <span>{}</span>").format(number, limits[0]) if limits else text


def _packed(value: object) -> str:
    """Return plain data as gzipped JSON in base64: a third as long, and unable to end a script element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(errors="replace"), mtime=0)).decode()


def _title(rows: Sequence[Row]) -> str:
    if all_priced(rows) and any(row.verdict.ratio for row in rows):
        return "What a dollar of training bought"
    return "What trained fastest"


def _figure(best: Best | None) -> str | None:
    """Return the answer's number: `2.101x`, or the amount of a row that stands alone.

    None if no row is proven better than the next.
    """
    if best is None or best.kind in (TIE, UNRESOLVED, NO_INTERVAL):
        return None
    if best.second is None:
        return amount_of(best)
    first, second = (ratio_of(row, is_priced=best.is_priced) for row in (best.first, best.second))
    return f"{times(first.value / second.value)}x" if first and second else None


def _section(given: PageInput, workload: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Return a workload's section: `data` for the scripts, and the texts of the page."""
    rate_unit = rate_of(rows[0])[1]
    unit, _, period = rate_unit.partition("/")
    letters = letters_of(rows, under_heading=True)
    names = {id(row): name_of(row, rows, letters=letters) for row in rows}
    ordered, best = in_order(rows), best_of(at_home(rows))
    columns = [column for column in columns_of(rows, letters=letters) if column.is_summary]
    shared = shared_cells(rows)
    columns = [column for column in columns if column.name not in shared and any(map(column.text, rows))]
    # A narrow screen shows the name, what decides, and the verdict first.
    first, *others = columns
    columns = [first, *sorted(others, key=_place_on_page)]
    colours = _colours(ordered)
    predicted = _predicted(given, workload, rows)
    named = _colour_names(ordered, predicted, colours)
    # The chart's points have the letters of the rows, and further ones if need be.
    of_chart = Letters(
        [*(row.setup.known_recipe or row.setup.recipe for row in rows), *(of.recipe for of in predicted)]
    )
    prices = {_place_key(row): row for row in rows if row.speed.samples_per_s}
    numbers = {id(row): number for number, row in enumerate(ordered)}
    data: dict[str, Any] = {
        "workload": workload,
        "unit": unit,
        "rows": [
            _row_data(row, names[id(row)], colours)
            | {"base": next((numbers[id(base)] for base in ordered if _is_base(base, row)), None)}
            for row in ordered
        ],
        "predicted": [_predicted_data(of, of_chart, colours, prices) for of in predicted],
        "mostLabels": _MOST_LABELS,
        "prices": _price_history(rows, given.catalogue, given.today),
        "parts": list(_parts(ordered, names)),
        "runs": _runs_data(given, ordered, names),
        "curves": list(_curves(ordered, names)),
        "references": _references(ordered, names),
        "specs": {
            "cost": charts.cost_against_time(unit, named),
            "usd": charts.bars(f"USD for a million {unit}", named),
            "rate": charts.bars(f"{unit} {'an hour' if period == 'h' else 'a second'}", named),
            "steps": charts.step_times(),
            "parts": charts.step_parts(STEP_PARTS),
            "losses": charts.losses(),
            "prices": charts.price_history(),
        },
    }
    return {
        "workload": workload,
        "heading": heading(rows, _NO_LIMIT),
        "unit": unit,
        "columns": [(column.name, column.at_price) for column in columns],
        "answer": sentence_of(rows, letters.in_words),
        "second": " ".join(second_of(rows, letters.in_words)),
        "figure": _figure(best),
        "convergence": "".join(f"{doubt[0].upper()}{doubt[1:]}." for doubt in convergence_of(rows)),
        "cheaper": _cheaper(best, rows, predicted, unit),
        "verdict": _VERDICT,
        "legend": letters.legend(),
        "chart_legend": of_chart.legend(),
        "groups": [
            (heading, [_row_text(row, columns, numbers[id(row)]) for row in of_group])
            for heading, of_group in _groups(ordered).items()
        ],
        "predicted": [
            {
                "name": of.name,
                "usd_per_hour": dollars(of.usd_per_hour),
                "hours": with_range(of.hours) or UNKNOWN,
                "usd": with_range(scaled(of.hours, of.usd_per_hour), format_value=dollars) or UNKNOWN,
            }
            for of in predicted
        ],
        "boxes": [
            {
                "key": key,
                "usd_per_hour": f"{row.price.usd_per_hour:g}" if row.price else "",
                "source": _source(row.price) if row.price else "no price is known: type one",
            }
            for key, row in sorted(prices.items())
        ],
        "guards": _guards(ordered, names),
        "num_drawn": len(data["runs"]),
        "num_runs": sum(row.num_runs for row in rows),
        "details": [_detail(row, names[id(row)], given.own_region) for row in ordered],
        "notes": [*asides_of(rows, letters), *decisive_notes(ordered, rows, letters)],
        "data": data,
    }


def _place_on_page(column: RowColumn) -> int:
    """Return the place of a column beside the row's name: ratio, verdict, cost, then all others."""
    first = ("ratio", _VERDICT, "usd")
    name = column.at_price or column.name
    return first.index(name) if name in first else len(first)


def _cheaper(best: Best | None, rows: Sequence[Row], predicted: Sequence[Predicted], unit: str) -> str | None:
    """Return a sentence on the cheapest prediction, if it is below the cost of the best row."""
    usd = shown_cost(best.first) if best and best.is_priced else None
    costs = {id(of): scaled(of.hours, of.usd_per_hour) for of in predicted}
    cheapest = min(predicted, key=lambda of: costs[id(of)].value, default=None)
    if usd is None or cheapest is None or costs[id(cheapest)].value >= usd.value:
        return None
    cost = costs[id(cheapest)]
    limits = f", 90% range {of}" if (of := cost.range_text(dollars)) else ""
    amount = f"${dollars(cost.value)} for a million {unit}{limits}, against ${dollars(usd.value)}"
    what = f"Not measured, and may cost less: {_short(cheapest, predicted)}"
    for row in rows:
        is_same = (row.setup.known_recipe, row.price and row.price.instance) == (
            cheapest.recipe,
            cheapest.instance,
        )
        if is_same and (measured := shown_cost(row)):
            # Else the two would contradict each other.
            other = f"measured at a global batch of {row.setup.global_batch}: ${dollars(measured.value)}"
            return f"{what} at a global batch of {cheapest.global_batch}, {amount} ({other})."
    return f"{what}, {amount}."


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the ranked rows under an empty heading, and the others under the reason against ranking."""
    groups: dict[str, list[Row]] = {}
    others = [row for row in rows if not is_comparable(row) and not row.is_barred]
    for row in rows:
        other = "" if is_comparable(row) else f"Other batches: {throughput_only(others)}"
        groups.setdefault("Not ranked" if row.is_barred else other, []).append(row)
    return groups


def _colours(rows: Sequence[Row]) -> Callable[[Recipe | str], str]:
    """Return a function from recipe to the name of its colour, which is `others` once colours run out.

    The baseline and the recipes with the most runs have colours of their own.
    """
    # The baseline comes first, then the rows with the most runs.
    ordered = sorted(rows, key=lambda row: (not row.is_baseline, -row.num_runs))
    recipes = list(dict.fromkeys(_family(row.setup.known_recipe or row.setup.recipe) for row in ordered))
    coloured = recipes if len(recipes) <= len(charts.COLOURS) else recipes[: len(charts.COLOURS) - 1]
    return lambda recipe: _family(recipe) if _family(recipe) in coloured else "others"


def _colour_names(
    rows: Sequence[Row], predicted: Sequence[Predicted], colours: Callable[[Recipe | str], str]
) -> list[str]:
    """Return the names of the colours of rows and predictions, sorted."""
    recipes = [row.setup.known_recipe or row.setup.recipe for row in rows]
    return sorted({colours(recipe) for recipe in (*recipes, *(of.recipe for of in predicted))})


def _family(recipe: Recipe | str) -> str:
    return recipe if isinstance(recipe, str) else recipe.name


def _place_key(row: Row) -> str:
    """Return the key of rows that share a price on the page: instance and purchase, or devices of a node."""
    if row.setup.instance is not None:
        return " ".join([row.setup.instance, *row.offer])
    num_gpus = row.setup.num_gpus // row.setup.num_nodes
    return f"{num_gpus} x {row.place}"


def _rounded(value: float | None) -> float | None:
    """Return the number to a few digits; None if it is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_DIGITS}g}")


def _limited(quantity: Interval) -> tuple[float, float | None, float | None]:
    """Return value and limits for a chart, without limits that say nothing."""
    return quantity.value, *((None, None) if quantity.is_boundless else (quantity.low, quantity.high))


def _interval(quantity: Interval | None) -> list[float | None] | None:
    return None if quantity is None else [_rounded(end) for end in _limited(quantity)]


def _hours(row: Row) -> Interval | None:
    """Return the hours of a million samples, or of what the row counts in their place."""
    rate_per_s = rate_on_type(row.group)
    return rate_per_s and reciprocal(scaled(rate_per_s, _S_PER_HOUR * shown_unit(row).per_sample), 1e6)


def _predicted(given: PageInput, workload: str, rows: Sequence[Row]) -> list[Predicted]:
    """Return the workload's predictions, for a million of what the rows count."""
    per_sample = shown_unit(rows[0]).per_sample
    return [replace(of, hours=scaled(of.hours, 1 / per_sample)) for of in given.predicted.get(workload, ())]


def _row_data(row: Row, name: str, colours: Callable[[Recipe | str], str]) -> dict[str, Any]:
    setup, hours, (rate, _) = row.setup, _hours(row), rate_of(row)
    return {
        "name": name,
        "short": _placed(name, row),
        "colour": colours(setup.known_recipe or setup.recipe),
        "place": _place_key(row),
        "numNodes": setup.num_nodes,
        "usdPerHour": row.price.usd_per_hour if row.price else None,
        "hours": _interval(hours),
        "rate": _interval(shown_rate(row)) or (None if rate is None else [_rounded(rate), None, None]),
        "ranked": is_comparable(row) and not row.is_barred,
    }


def _is_base(base: Row, row: Row) -> bool:
    """Return whether the row's ratio on the page is to `base`."""
    if row.verdict.in_own_batch.kind == OTHER_BATCH:
        return False
    if row.verdict.in_batch is None:
        return base.is_baseline
    alike = (row.setup.global_batch, row.setup.sequence_length)
    is_alike = (base.setup.global_batch, base.setup.sequence_length) == alike
    return is_alike and base.verdict.in_own_batch.kind == BASELINE


def _short(of: Predicted, predicted: Sequence[Predicted]) -> str:
    """Return the prediction's name with the number of its options, which the list of predictions spells."""
    return f"{Letters(other.recipe for other in predicted).in_words(of.recipe)} on {of.instance}"


def _predicted_data(
    of: Predicted, letters: Letters, colours: Callable[[Recipe | str], str], prices: Mapping[str, Row]
) -> dict[str, Any]:
    # A price typed for a GPU that is charged as this instance type applies to the type.
    place = next(
        (
            {"place": key, "placeUsdPerHour": row.price.usd_per_hour}
            for key, row in prices.items()
            if row.price and row.price.instance == of.instance and not row.price.hypothetical
        ),
        {},
    )
    return {
        **place,
        "name": of.name,
        "short": f"{letters(of.recipe)} on {of.instance}",
        "colour": colours(of.recipe),
        "usdPerHour": of.usd_per_hour,
        "hours": _interval(of.hours),
    }


def _row_text(row: Row, columns: Sequence[RowColumn], number_in_data: int) -> dict[str, Any]:
    """Return the cells of the table; the script rewrites the cost and the order for other prices."""
    kind = "published" if row.setup.kind == "published" else "measured"
    return {
        "number": number_in_data,
        "kind": "derived" if row.derived else kind,
        "cells": [column.text(row) or UNKNOWN for column in columns],
        "reasons": row.verdict.reasons,
        "barred": row.is_barred,
    }


def _source(price: Price) -> str:
    charged = f"charged as {price.instance}, " if price.basis == "named" else ""
    return f"{price.hypothetical}, prorated: {dated(price)}" if price.hypothetical else charged + dated(price)


def _price_history(rows: Sequence[Row], catalogue: Catalogue, today: datetime.date) -> list[dict[str, Any]]:
    """Return the prices of the rows' instances by date, if any changed; the last one holds until today."""
    offers = {
        (row.price.instance, row.price.service, row.price.region, row.price.purchase)
        for row in rows
        if row.price and row.price.basis != "given"
    }
    points = []
    for offer in sorted(offers):
        known = sorted((price for price in catalogue.prices if price.key[:4] == offer), key=lambda p: p.as_of)
        name = " ".join(offer)
        dated = [(price.as_of, price.usd_per_hour) for price in known if price.as_of <= today]
        dated += [(today, dated[-1][1])] if dated and dated[-1][0] < today else []
        points += [{"date": day.isoformat(), "usd": usd, "offer": name} for day, usd in dated]
    return points if len({(of["offer"], of["usd"]) for of in points}) > len(offers) else []


def _parts(rows: Sequence[Row], names: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """Yield the parts of a step's time, as means over each row's profiled runs."""
    for row in rows:
        for part, seconds in step_parts_s(row).items():
            order = STEP_PARTS.index(part)
            yield {"name": names[id(row)], "part": part, "ms": _rounded(1000 * seconds), "order": order}


def _runs_data(given: PageInput, rows: Sequence[Row], names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the steps of as many runs as a page has room for, taken from the rows in turn."""
    total = len(given.comparison.rows)
    room = max(1, MOST_RANKS * len(rows) // max(1, total))
    turns = itertools.zip_longest(*(row.runs for row in rows))
    runs = [(row, run) for turn in turns for row, run in zip(rows, turn, strict=True) if run]
    data: list[dict[str, Any]] = []
    num_ranks = 0
    for row, run in runs:
        series = given.series.get(run.run_id)
        if not series or (data and num_ranks + len(series) > room):
            continue
        num_ranks += len(series)
        data.append(
            {
                "id": run.run_id,
                "name": names[id(row)],
                "warmup": run.summary.timing.num_warmup_steps or 0,
                "ranks": [
                    {
                        "rank": rank.rank,
                        "steps": _short_steps(rank.steps),
                        "ms": [_rounded(1000 * seconds) for seconds in rank.step_times_s],
                        "lossSteps": _short_steps(rank.loss_steps),
                        "losses": [_rounded(loss) for loss in rank.losses],
                    }
                    for rank in series
                ],
            }
        )
    return data


def _short_steps(steps: Sequence[int]) -> list[int]:
    """Return the first step and the distances between steps; the first step alone if all of them are 1."""
    distances = [after - before for before, after in itertools.pairwise(steps)]
    return [*steps[:1], *([] if set(distances) <= {1} else distances)]


def _curves(rows: Sequence[Row], names: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """Yield the held-out losses of every run that has some."""
    for row in rows:
        for run in row.runs:
            points = [(step, line.loss) for step, line in curve(run.summary).items() if is_finite(line.loss)]
            if points:
                yield {
                    "id": run.run_id,
                    "name": names[id(row)],
                    "steps": [step for step, _ in points],
                    "losses": [_rounded(loss) for _, loss in points],
                }


def _references(rows: Sequence[Row], names: Mapping[int, str]) -> dict[str, str]:
    """Return the name of the row that each row's loss is compared with, by the row's own name."""
    references = {}
    for row in rows:
        named = [other for other in rows if other.setup.recipe == row.validity.convergence.reference]
        if named:
            likeness = [
                (other.setup.global_batch == row.setup.global_batch, other.place == row.place)
                for other in named
            ]
            references[names[id(row)]] = names[id(named[likeness.index(max(likeness))])]
    return references


def _guards(rows: Sequence[Row], names: Mapping[int, str]) -> dict[str, Any]:
    """Return the convergence guard's verdicts on the evaluated rows; nothing if none was evaluated."""
    evaluated = [row for row in rows if row.validity.held_out]
    if not evaluated:
        return {}
    columns = [column for column in columns_of(rows) if column.part == Part.LOSS and column.name]
    columns = [column for column in columns if any(column.text(row) for row in evaluated)]
    return {
        "headings": [column.name for column in columns],
        "rows": [
            {
                "name": names[id(row)],
                "reference": row.validity.convergence.reference or "",
                "cells": [column.text(row) or UNKNOWN for column in columns],
                "notes": [*row.validity.convergence.missing, *row.validity.convergence.caveats],
            }
            for row in evaluated
        ],
    }


def _detail(row: Row, name: str, own_region: str) -> dict[str, Any]:
    """Return the fingerprint of a row's runs, and the command that repeats them."""
    setup = row.setup
    facts = {
        "recipe": setup.recipe,
        "precision": setup.precision,
        "batch size per GPU": setup.batch_size_per_gpu,
        "GPUs": setup.num_gpus,
        "nodes": setup.num_nodes,
        "sequence length": setup.sequence_length,
        "data": setup.data,
        "instance": setup.instance,
        **setup.fingerprint,
        "variant": ", ".join(f"{key}={text}" for key, text in setup.variant.items()),
        "build": _seconds(row.overhead.build_s),
        "compile": _seconds(row.overhead.compile_s),
        "peak memory": f"{row.overhead.peak_memory_gib:.1f} GiB" if row.overhead.peak_memory_gib else None,
        "source": "; ".join(row.sources),
    }
    return {
        "name": name,
        "facts": {key: str(value) for key, value in facts.items() if value not in (None, "")},
        "command": _command(row, own_region),
        "runs": [_run_text(run.run_id, run.summary) for run in row.runs],
    }


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{number(value)} s"


def _run_text(run_id: str, summary: Any) -> dict[str, str]:
    environment, timing = summary.environment, summary.timing
    step = timing.step_time_s
    return {
        "id": run_id,
        "seed": UNKNOWN if summary.seed is None else str(summary.seed),
        "round": UNKNOWN if environment.round is None else str(environment.round),
        "host": environment.host_id or UNKNOWN,
        "measured_on": environment.measured_on or UNKNOWN,
        "commit": (environment.commit or UNKNOWN)[:12],
        "step_ms": number(1000 * step.value) if step else UNKNOWN,
    }


def _command(row: Row, own_region: str) -> str | None:
    """Return the command that repeats the row's runs; None for published ones and unknown scripts."""
    run = row.runs[0]
    if row.setup.is_script:
        return script_command([row], row.num_runs) if run.script else None
    if row.setup.kind == "published" or row.setup.batch_size_per_gpu is None:
        return None
    seeds = [run.summary.seed for run in row.runs if run.summary.seed is not None]
    try:
        return submit_command(
            [run.summary for run in row.runs],
            [row.setup.known_recipe or row.setup.recipe],
            place=place_of(run, own_region=own_region),
            first_seed=min(seeds, default=0),
            repeats=len(set(seeds)) or row.num_runs,
        )
    except UserError:
        return None

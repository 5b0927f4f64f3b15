"""`fastlaunch demo`: what the shipped records say, and a published experiment at two days' prices."""

import datetime
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from fastlaunch.catalog.load import load_catalogue
from fastlaunch.cli.context import app_context
from fastlaunch.cli.options import all_option, examples, next_command, output_width, print_coloured, wrapped
from fastlaunch.core.tables import Column, table
from fastlaunch.measure.published import shipped_summaries

if TYPE_CHECKING:
    from fastlaunch.analysis.compare import Comparison, Row
    from fastlaunch.catalog.prices import Catalogue
    from fastlaunch.measure.summary import RunSummary

#: The date of the experiment's publication, and the file with its figures.
THEN = datetime.date(2023, 11, 15)
FIGURES = "fp8-experiment.csv"
#: The two rows that differ only in the instance.
OLD, NEW, RECIPE = "p4d.24xlarge", "p5.48xlarge", "bf16"
#: The demo shows the shipped records of this workload on one H100, charged as this instance, which has one.
WORKLOAD, DEVICE, CHARGED_AS = "vit-huge", "NVIDIA H100 80GB HBM3", "p5.4xlarge"
_PUBLISHED = (
    f"A published experiment of {THEN:%Y}, not to be compared with the rows above: {RECIPE} on eight A100"
    " (p4d) and on eight H100 (p5)"
)


@click.command(
    epilog=examples(
        ("the answer and a summary", "fastlaunch demo"),
        ("every row, column and note", "fastlaunch demo --all"),
    )
)
@all_option
def demo(in_full: bool) -> None:
    """Compare a published experiment with ours, in a second.

    First come measurements of a ViT-Huge on one H100 that ship with fastlaunch; then the published
    experiment, which trains it on eight A100 (p4d) and on eight H100 (p5), at the prices of November 2023 and
    of today.
    """
    from fastlaunch.report.table import VERDICT_COLOURS, as_overview, as_table
    from fastlaunch.report.text import answer, more_text

    context, width = app_context(config_may_lack=True), output_width()
    catalogue, today = load_catalogue(), context.today
    then, now = published(catalogue, THEN), published(catalogue, today)
    measured = compared_measurements(of_one_gpu(shipped_summaries()), catalogue, today)
    changes = wrapped(what_changed(then, now))
    charged = f"Measured by fastlaunch on one H100, charged as {CHARGED_AS}"
    if in_full:
        sections = [
            f"{charged}\n{wrapped(answer(measured))}",
            as_table(measured, width=width),
            f"A published experiment, at the prices of {then.prices_as_of}",
            as_table(then, width=width),
            f"The same measurements, at the prices of {now.prices_as_of}",
            as_table(now, width=width),
            changes,
        ]
    else:
        ranked = replace(measured, rows=best_of_each_recipe(measured))
        num_more = len(measured.rows) - len(ranked.rows) + len(then.rows) - len(_pair(then))
        sections = [
            "\n".join(map(wrapped, answer(measured, lettered=True, with_second=True).splitlines())),
            charged,
            as_overview(ranked, width=width, most_notes=1),
            f"{wrapped(_PUBLISHED)}\n{changes}",
            _prices_table(then, now, width),
            more_text(num_more, "fastlaunch demo --all"),
        ]
    print_coloured("\n\n".join(sections), VERDICT_COLOURS)
    next_command("fastlaunch runs import --published")


def _prices_table(then: "Comparison", now: "Comparison", width: int) -> str:
    """Return what a dollar bought on each of the two instances, on both days."""
    from fastlaunch.report.text import bought, shown_per_usd, what_counts

    unit = what_counts(then.rows[0], priced=True, short=True)
    columns: list[Column[tuple[Row, Row]]] = [
        Column("instance", lambda pair: pair[0].place),
        Column(f"{unit} in {THEN:%Y}", lambda pair: shown_per_usd(pair[0]), format=bought, align="right"),
        Column(f"{unit} today", lambda pair: shown_per_usd(pair[1]), format=bought, align="right"),
    ]
    return table([*zip(_pair(then), _pair(now), strict=True)], columns, width, rule=True)


def best_of_each_recipe(comparison: "Comparison") -> "tuple[Row, ...]":
    """Return the ranked rows, of those whose recipes differ by overrides the cheapest, the baseline, and the
    second best, which the answer names.
    """
    from fastlaunch.analysis.best import best_of

    best = best_of(comparison.rows)
    ranked = sorted(
        (row for row in comparison.rows if row.verdict.is_ranked),
        key=lambda row: (not row.is_baseline, _usd_per_million(row)),
    )
    by_recipe: dict[str, Row] = {}
    for row in ranked:
        recipe = row.setup.known_recipe
        by_recipe.setdefault(recipe.name if recipe else row.setup.recipe, row)
    shown = {*map(id, by_recipe.values()), id(best and best.runner_up)}
    return tuple(row for row in ranked if id(row) in shown)


def _usd_per_million(row: "Row") -> float:
    assert row.cost.usd_per_million_samples is not None
    return row.cost.usd_per_million_samples.value


def published(catalogue: "Catalogue", day: datetime.date) -> "Comparison":
    """Return the experiment's rows, priced as of `day`."""
    from fastlaunch.analysis.compare import MeasuredRun, PriceRequest, compare
    from fastlaunch.measure.published import read_published, shipped_figures

    (path,) = (path for path in shipped_figures() if path.name == FIGURES)
    candidates = [
        MeasuredRun(run_id=f"{path.stem}-{number}", summary=summary)
        for number, summary in enumerate(read_published(path), start=1)
    ]
    return compare(candidates, catalogue=catalogue, prices=PriceRequest(today=day, as_of=day))


def what_changed(then: "Comparison", now: "Comparison") -> str:
    """Return a sentence on how prices changed the comparison of the two instances."""
    (old, new), (old_now, new_now) = _pair(then), _pair(now)
    return (
        f"{RECIPE} on {NEW} bought {_fewer(new, old)} fewer images per dollar than on {OLD} in"
        f" {then.prices_as_of:%Y}, and buys {_fewer(new_now, old_now)} fewer at today's prices."
    )


def compared_measurements(
    summaries: "Mapping[str, RunSummary]", catalogue: "Catalogue", today: datetime.date
) -> "Comparison":
    """Compare measurements of one H100, by run id, charged as the instance with one."""
    from fastlaunch.analysis.compare import MeasuredRun, PriceRequest, compare
    from fastlaunch.analysis.pricing import ChargedAs

    return compare(
        [MeasuredRun(run_id=run_id, summary=summary) for run_id, summary in summaries.items()],
        catalogue=catalogue,
        prices=PriceRequest(today=today, price_as=(ChargedAs(instance=CHARGED_AS),)),
    )


def of_one_gpu(summaries: "Mapping[str, RunSummary]") -> "dict[str, RunSummary]":
    """Return the summaries of the experiment's workload on one H100."""
    return {
        run_id: summary
        for run_id, summary in summaries.items()
        if (summary.setup.workload, summary.setup.num_gpus, summary.setup.device_name)
        == (WORKLOAD, 1, DEVICE)
    }


def _pair(comparison: "Comparison") -> "tuple[Row, Row]":
    by_instance = {row.setup.instance: row for row in comparison.rows if row.setup.recipe == RECIPE}
    return by_instance[OLD], by_instance[NEW]


def _fewer(row: "Row", other: "Row") -> str:
    assert row.cost.samples_per_usd is not None and other.cost.samples_per_usd is not None
    return f"{100 * (1 - row.cost.samples_per_usd.value / other.cost.samples_per_usd.value):.0f}%"

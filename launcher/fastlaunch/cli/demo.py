"""`fastlaunch demo`: a published experiment at two days' prices, and what the shipped records say."""

import datetime
import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastlaunch.cli.options import next_command
from fastlaunch.core.errors import BadFile

if TYPE_CHECKING:
    from fastlaunch.analysis.compare import Comparison, Row
    from fastlaunch.catalog.prices import Catalogue
    from fastlaunch.measure.summary import RunSummary

#: The day that stands for the experiment's publication, and the file with its figures.
THEN = datetime.date(2023, 11, 15)
FIGURES = "fp8-experiment.csv"
#: The two rows that differ in nothing but the instance.
OLD, NEW, RECIPE = "p4d.24xlarge", "p5.48xlarge", "bf16"
#: Of the shipped records those of this workload on one H200 are shown, and charged as this.
WORKLOAD, DEVICE = "vit-huge", "NVIDIA H200"
CHARGED_AS, SHARE = "p5en.48xlarge", Fraction(1, 8)
SUMMARIES = "summaries.json"


@click.command(short_help="The published experiment and shipped measurements, compared in a second.")
@click.option(
    "--summarise",
    "folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    hidden=True,
    help="Instead: write FOLDER/summaries.json from the records in FOLDER, as it is shipped.",
)
def demo(folder: Path | None) -> None:
    """The published experiment and shipped measurements, compared in a second.

    Training a ViT-Huge on eight A100 (p4d) and eight H100 (p5) GPUs, at the prices of November 2023 and of
    today; then the measurements that come with fastlaunch.
    """
    if folder is not None:
        click.echo(f"Summarised {write_summaries(folder)} runs in {folder / SUMMARIES}.")
        return
    from fastlaunch.catalog.load import load_catalogue
    from fastlaunch.report.table import as_table
    from fastlaunch.report.text import answer

    catalogue, today = load_catalogue(), datetime.date.today()
    then, now = published(catalogue, THEN), published(catalogue, today)
    click.echo(f"A published experiment, at the prices of {THEN}\n\n{as_table(then)}\n")
    click.echo(f"The same measurements, at the prices of {today}\n\n{as_table(now)}\n")
    click.echo(f"{what_changed(then, now)}\n")
    click.echo(f"Measured on one H200, charged as a prorated {SHARE} of {CHARGED_AS}\n")
    measured = compared_measurements(of_one_gpu(shipped_summaries()), catalogue, today)
    click.echo(f"{as_table(measured)}\n\n{answer(measured)}")
    next_command("fastlaunch submit --local --recipe bf16 --repeats 3")


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
    """Return in a sentence what the prices did to the two rows that differ in the instance only."""
    (old, new), (old_now, new_now) = _pair(then), _pair(now)
    return (
        f"With {RECIPE} a dollar on {NEW} bought {_fewer(new, old)} fewer images than on {OLD} at the prices"
        f" of {then.prices_as_of} ({_per_usd(new)} against {_per_usd(old)}), and buys"
        f" {_fewer(new_now, old_now)} fewer at those of {now.prices_as_of} ({_per_usd(new_now)} against"
        f" {_per_usd(old_now)}): the order holds, the margin does not, so a price has a date."
    )


def compared_measurements(
    summaries: "Mapping[str, RunSummary]", catalogue: "Catalogue", today: datetime.date | None = None
) -> "Comparison":
    """Compare measurements of one H200, by run id, charged as an eighth of an instance."""
    from fastlaunch.analysis.compare import MeasuredRun, PriceRequest, compare
    from fastlaunch.analysis.cost import ChargedAs

    return compare(
        [MeasuredRun(run_id=run_id, summary=summary) for run_id, summary in summaries.items()],
        catalogue=catalogue,
        prices=PriceRequest(
            today=today or datetime.date.today(), price_as=(ChargedAs(instance=CHARGED_AS, share=SHARE),)
        ),
    )


def of_one_gpu(summaries: "Mapping[str, RunSummary]") -> "dict[str, RunSummary]":
    """Return those of the experiment's workload on one H200, whose price is an eighth of an instance's."""
    return {
        run_id: summary
        for run_id, summary in summaries.items()
        if (summary.setup.workload, summary.setup.num_gpus, summary.setup.device_name)
        == (WORKLOAD, 1, DEVICE)
    }


def shipped_summaries() -> "dict[str, RunSummary]":
    """Return the summaries that come with fastlaunch, by run id.

    They lie in measurements/summaries.json beside the records, since reading those takes seconds;
    `fastlaunch demo --summarise train/measurements` writes it anew.
    """
    from fastlaunch.core.paths import shipped

    return read_summaries(shipped("measurements") / SUMMARIES)


def write_summaries(folder: Path) -> int:
    """Write summaries.json for the records under `folder`; return the number of runs.

    Raises BadFile for a record that cannot be used, and for a run of the same id as another.
    """
    from fastlaunch.runs.importer import find_runs

    imports = find_runs([folder])
    if imports.skipped:
        raise imports.skipped[0]
    runs = imports.runs
    text = json.dumps({run_id: run.summary.to_json() for run_id, run in runs.items()}, indent=1)
    (folder / SUMMARIES).write_text(text + "\n", encoding="utf-8")
    return len(runs)


def read_summaries(path: Path) -> "dict[str, RunSummary]":
    """Read the JSON of `RunSummary.to_json()` by run id, in order.

    Raises BadFile if there is none, or it is something else.
    """
    from fastlaunch.measure.summary import RunSummary

    try:
        data = json.loads(path.read_bytes())
        return {run_id: RunSummary.from_json(summary) for run_id, summary in data.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise BadFile(path, f"cannot be read: {error}", hint="install fastlaunch again") from None


def _pair(comparison: "Comparison") -> "tuple[Row, Row]":
    by_instance = {row.setup.instance: row for row in comparison.rows if row.setup.recipe == RECIPE}
    return by_instance[OLD], by_instance[NEW]


def _per_usd(row: "Row") -> str:
    assert row.cost.samples_per_usd is not None
    return f"{row.cost.samples_per_usd.value:,.0f}"


def _fewer(row: "Row", other: "Row") -> str:
    assert row.cost.samples_per_usd is not None and other.cost.samples_per_usd is not None
    return f"{100 * (1 - row.cost.samples_per_usd.value / other.cost.samples_per_usd.value):.1f}%"

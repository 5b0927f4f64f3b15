"""`report`: a comparison to share, as a page, a chart, Markdown, CSV or JSON."""

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from fastlaunch.api.comparison import Comparison, compare
from fastlaunch.core.errors import UserError
from fastlaunch.lifecycle.world import World, default_context

if TYPE_CHECKING:
    from fastlaunch.analysis.pricing import ChargedAs
    from fastlaunch.report.page.page import PageInput, Predicted

#: The samples of a prediction, as in the charts.
_SAMPLES = 1_000_000
#: The most expensive prediction to draw, as a multiple of the cheapest row.
_DEAR = 3.0


class ReportOptions(TypedDict, total=False):
    """The options shared with `compare`."""

    baseline: str | None
    prices_as_of: datetime.date | str | None
    price_as: "str | ChargedAs | Sequence[str | ChargedAs]"
    price_share: Fraction | str | None
    usd_per_hour: float | None
    prices: Path | str | None
    allow_unverified: bool
    any_version: bool
    with_shared: bool


@dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """A comparison to share, in several formats. A notebook shows it as Markdown."""

    comparison: Comparison
    context: World
    predictions: bool
    with_shared: bool

    def page(self) -> str:
        """Return a self-contained HTML page. Raises UserError if altair is not installed."""
        from fastlaunch.report.page.charts import load_altair, vega_bundle
        from fastlaunch.report.page.page import as_html

        load_altair()
        with vega_bundle() as bundle:
            given = self.page_input()
            return as_html(given, bundle())

    def chart(self) -> bytes:
        """Return the chart of cost against time for a single workload, as a PNG.

        Raises UserError for several workloads, for runs without a price, and if altair is not installed.
        """
        from fastlaunch.report.page.charts import load_altair, picture
        from fastlaunch.report.page.page import cost_chart

        load_altair()
        return picture(*cost_chart(self.page_input()))

    def markdown(self) -> str:
        """Return the answer and a table for each workload."""
        from fastlaunch.report.table import as_markdown

        return as_markdown(self.comparison)

    _repr_markdown_ = markdown

    def csv(self) -> str:
        """Return the text of `fastlaunch compare --output csv`."""
        from fastlaunch.report.data import as_csv

        return as_csv(self.comparison)

    def json(self) -> str:
        """Return the text of `fastlaunch compare --output json`."""
        from fastlaunch.report.data import as_json

        return as_json(self.comparison)

    def page_input(self) -> "PageInput":
        """Return the input of the page and the chart."""
        from fastlaunch.lifecycle.export import series_of
        from fastlaunch.report.page.page import PageInput

        comparison = self.comparison
        measured = {run_id for row in comparison.rows for run_id in row.run_ids}
        return PageInput(
            comparison=comparison,
            catalogue=comparison.catalogue,
            today=comparison.request.today,
            own_region=comparison.request.region,
            series=series_of([run for run in comparison.runs if run.id in measured]),
            predicted=dict(self._predicted()) if self.predictions else {},
        )

    def _predicted(self) -> "Iterator[tuple[str, Sequence[Predicted]]]":
        """Yield predictions for unmeasured types, up to a multiple of the cheapest row's cost."""
        from fastlaunch.api.recommend import recommend
        from fastlaunch.report.page.page import Predicted

        for workload, rows in self.comparison.by_workload.items():
            costs = [usd.value for row in rows if (usd := row.cost.usd_per_million_samples)]
            # Runs of unknown cost get no predictions beside them.
            if not costs:
                continue
            try:
                result = recommend(
                    workload,
                    _SAMPLES,
                    steps_only=True,
                    prices_as_of=self.comparison.request.as_of,
                    with_shared=self.with_shared,
                    context=self.context,
                )
            except UserError:
                continue
            measured_on = {row.setup.instance for row in rows}
            yield (
                workload,
                [
                    Predicted(
                        name=f"{choice.configuration.recipe} on {choice.instance}",
                        recipe=choice.configuration.query.recipe,
                        instance=choice.instance,
                        usd_per_hour=choice.usd / choice.hours,
                        hours=choice.total.hours,
                        global_batch=choice.configuration.global_batch,
                    )
                    for choice in result.by_instance
                    if choice.configuration.rate.row is None
                    and choice.instance not in measured_on
                    and choice.usd <= _DEAR * min(costs)
                ],
            )


def report(
    *selectors: str,
    sweep: str | None = None,
    predictions: bool = True,
    context: World | None = None,
    **options: Unpack[ReportOptions],
) -> Report:
    """Return a report on runs.

    selectors: as for `compare`; every run if neither selectors nor a sweep are given. sweep: its id, or the
    beginning of it. predictions: also draw other instance types, as `recommend` predicts them. options: as
    for `compare`.

    Raises UserError if there is nothing to report on, or a named run does not exist.
    """
    context = context or default_context()
    chosen = (*selectors, *([f"sweep={sweep}*"] if sweep else []))
    comparison = compare(*chosen, every_run=not chosen, context=context, **options)
    with_shared = options.get("with_shared", False)
    return Report(comparison=comparison, context=context, predictions=predictions, with_shared=with_shared)

"""The known speeds of a workload, for estimates, recommendations and dry runs."""

import datetime
import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastlaunch.analysis.anchors import published_anchors
from fastlaunch.analysis.compare import Comparison, MeasuredRun, PriceRequest, Row, compare, rate_on_type
from fastlaunch.analysis.pooling import of_newest_version
from fastlaunch.analysis.pricing import accelerator_of
from fastlaunch.analysis.rate import Finder, Origin, Subject, subject_of
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.home import LEDGER_NAME
from fastlaunch.lifecycle.reconcile import reconcile
from fastlaunch.lifecycle.world import World
from fastlaunch.measure.published import shipped_runs

if TYPE_CHECKING:
    from collections.abc import Hashable

    from fastlaunch.measure.summary import RunSummary, Setup


@dataclass(frozen=True, kw_only=True)
class Known:
    """The rows of a workload, from the user's ledger and as shipped."""

    workload: str
    comparisons: Mapping[Origin, Comparison]
    catalogue: Catalogue
    warnings: tuple[str, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for comparison in self.comparisons.values() for row in comparison.rows)

    @property
    def on_gpus(self) -> tuple[tuple[Origin, Row], ...]:
        """The rows with a speed on a GPU, with their origin."""
        return tuple(
            (origin, row)
            for origin, comparison in self.comparisons.items()
            for row in comparison.rows
            if rate_on_type(row.group) and accelerator_of(row.setup, self.catalogue)
        )

    def subject(self, reference: "Setup | None") -> Subject:
        """Return the subject of predictions. reference: the setup that others must train like."""
        return subject_of(self.workload, self.rows, reference, self.catalogue)

    def finder(self, subject: Subject, *, scaling: float | None = None) -> Finder:
        """Return a finder of rates. scaling: as for `Finder`."""
        rows = {origin: comparison.rows for origin, comparison in self.comparisons.items()}
        return Finder(rows, subject, self.catalogue, published_anchors, scaling=scaling)


def known_rows(
    context: World,
    workload: str,
    catalogue: Catalogue,
    *,
    day: datetime.date | None = None,
    allow_unverified: bool = False,
    reconciles: bool = False,
    with_shared: bool = False,
    judges: bool = True,
) -> Known:
    """Return the workload's measured rows. reconciles: first bring the ledger's runs up to date.

    with_shared: include runs that others shared. judges: see `compare`.
    """
    day, settings = day or context.today, context.settings
    request = PriceRequest(today=day, as_of=day, region=settings.region)

    def compared(runs: Sequence[MeasuredRun]) -> Comparison:
        return compare(
            runs, catalogue=catalogue, prices=request, allow_unverified=allow_unverified, judges=judges
        )

    left_out: list[str] = []
    in_ledger: list[MeasuredRun] = []
    if (settings.home / LEDGER_NAME).exists():
        from fastlaunch.ledger.ledger import open_ledger
        from fastlaunch.lifecycle.measured import evidence_of

        with open_ledger(settings, clock=context.now) as ledger:
            if reconciles:
                reconcile(ledger, context.backends, context.settings)
            runs = ledger.fetch_comparable([f"workload={glob.escape(workload)}"])
        measured, left_out = evidence_of(runs, settings.region, with_shared=with_shared)
        in_ledger, older = of_newest_version(measured)
        left_out += [older] if older else []
    # Count runs that were imported from the shipped records once.
    imported = {_identity(run.summary) for run in in_ledger}
    shipped = [
        MeasuredRun(run_id=id, summary=summary)
        for id, summary in shipped_runs(workload).items()
        if _identity(summary) not in imported
    ]
    return Known(
        workload=workload,
        comparisons={Origin.LEDGER: compared(in_ledger), Origin.SHIPPED: compared(shipped)},
        catalogue=catalogue,
        warnings=tuple(left_out),
    )


def _identity(summary: "RunSummary") -> "Hashable":
    """Return a key that only a run and its copies share."""
    return summary.setup.recipe, summary.setup.num_gpus, summary.timing, summary.figures

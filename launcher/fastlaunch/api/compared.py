"""A comparison, and a sweep that ends with one, as the API returns them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastlaunch.analysis import compare
from fastlaunch.api.results import Runs, Submitted, data_frame
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.errors import UserError

if TYPE_CHECKING:
    import pandas

    from fastlaunch.analysis.pricing import PriceRequest
    from fastlaunch.ledger.ledger import Run
    from fastlaunch.lifecycle.sweep import Saved


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison(compare.Comparison):
    """Rows beside their baselines, as `fastlaunch compare` prints them: `print(comparison)`."""

    #: All that were to be compared, measured or not.
    runs: Runs = field(repr=False)
    request: "PriceRequest" = field(repr=False)
    catalogue: Catalogue = field(repr=False)

    @property
    def answer(self) -> str:
        """The answer in a sentence; a clause for each workload."""
        from fastlaunch.report.text import answer

        return answer(self)

    @property
    def unmeasured(self) -> list[str]:
        """The `RECIPE on WORKLOAD` that have runs and no row, unless they were settled without these runs."""
        measured = {id for row in self.rows for id in row.run_ids}
        # What others shared stands for nothing of the user's own.
        runs = [run for run in self.runs if run.owner is None] or self.runs

        def of_row(run: "Run") -> tuple[str, str]:
            return run.recipe, run.workload

        known = {(of_row(run), run.instance) for run in runs if run.id in measured or run.is_unneeded}
        # A run that never had a machine has no instance.
        anywhere = {row for row, _ in known}
        missing = [
            of_row(run)
            for run in runs
            if (
                of_row(run) not in anywhere
                if run.instance is None
                else (of_row(run), run.instance) not in known
            )
        ]
        return [f"{recipe} on {workload}" for recipe, workload in dict.fromkeys(missing)]

    def __repr__(self) -> str:
        from fastlaunch.core.tables import WIDTH
        from fastlaunch.report.overview import as_overview

        return f"{self.answer}\n\n{as_overview(self, width=WIDTH)}"

    def to_json(self) -> dict[str, Any]:
        """Return what `fastlaunch compare --output json` writes; docs/reference.md describes it."""
        from fastlaunch.report.data import to_json

        return to_json(self)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a data frame with a row per row, as `fastlaunch compare --output csv` writes them."""
        from fastlaunch.report.data import as_rows

        return data_frame(as_rows(self))


@dataclass(frozen=True, kw_only=True)
class Swept(Submitted):
    """What became of a sweep; `runs` are all of its cells'."""

    #: For `sweep(resume=id)`.
    id: str
    #: For each instance type, or for this machine.
    by_part: Mapping[str, Runs]
    #: Parts that were not started, or not completed, and why.
    left_out: Mapping[str, UserError]
    #: What stopping early saved against the full matrix; None if it could not be computed.
    saved: "Saved | None"
    #: None if nothing was measured, or it could not be compared.
    comparison: Comparison | None = field(repr=False)
    #: With `until_best`, for each global batch: the rows that may be best, by their figures the best first.
    best: Sequence[Sequence[compare.Row]] = field(default=(), repr=False)

    @property
    def exit_code(self) -> int:
        """As of a submission, and that of the first part which failed."""
        code = super().exit_code
        codes = () if self.is_stopped else (error.exit_code for error in self.left_out.values())
        return next(filter(None, codes), code)

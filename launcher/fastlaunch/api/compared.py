"""The API's results of `compare` and `sweep`."""

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

    #: All selected runs, measured or not.
    runs: Runs = field(repr=False)
    request: "PriceRequest" = field(repr=False)
    catalogue: Catalogue = field(repr=False)

    @property
    def answer(self) -> str:
        """The answer in a sentence, with a clause for each workload."""
        from fastlaunch.report.text import answer

        return answer(self)

    @property
    def unmeasured(self) -> list[str]:
        """Each `RECIPE on WORKLOAD` that has runs but no row, unless it was settled without these runs."""
        measured = {id for row in self.rows for id in row.run_ids}
        # Shared runs do not stand for the user's own.
        runs = [run for run in self.runs if run.owner is None] or self.runs

        def of_row(run: "Run") -> tuple[str, str]:
            return run.recipe, run.workload

        known = {(of_row(run), run.instance) for run in runs if run.id in measured or run.is_unneeded}
        # A run without a machine has no instance.
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
        """Return the data of `fastlaunch compare --output json`; docs/reference.md describes it."""
        from fastlaunch.report.data import to_json

        return to_json(self)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a data frame of the rows, as `fastlaunch compare --output csv` writes them."""
        from fastlaunch.report.data import as_rows

        return data_frame(as_rows(self))


@dataclass(frozen=True, kw_only=True)
class Swept(Submitted):
    """The result of a sweep; `runs` holds the runs of all cells."""

    #: The argument of `sweep(resume=id)`.
    id: str
    #: The runs by instance type, or of this machine.
    by_part: Mapping[str, Runs]
    #: The reasons by part that was not started or not completed.
    left_out: Mapping[str, UserError]
    #: The saving of stopping early against the full matrix; None if it could not be computed.
    saved: "Saved | None"
    #: None if nothing was measured or could be compared.
    comparison: Comparison | None = field(repr=False)
    #: With `until_best`, the rows that may be best for each global batch, ordered by their figures.
    best: Sequence[Sequence[compare.Row]] = field(default=(), repr=False)

    @property
    def exit_code(self) -> int:
        """The exit code of the first failed part, else as for a submission."""
        code = super().exit_code
        codes = () if self.is_stopped else (error.exit_code for error in self.left_out.values())
        return next(filter(None, codes), code)

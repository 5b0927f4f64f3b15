"""Return types of the API."""

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastlaunch.core.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_JOB_FAILED, UserError
from fastlaunch.core.plan import RunState

if TYPE_CHECKING:
    import pandas

    from fastlaunch.catalog.prices import Price
    from fastlaunch.ledger.rows import Run


def data_frame(rows: Sequence[Mapping[str, Any]]) -> "pandas.DataFrame":
    """Return rows with equal keys as a data frame. Raises UserError without pandas."""
    try:
        import pandas
    except ImportError:
        raise UserError("to_pandas() needs pandas, which is not installed", "pip install pandas") from None
    return pandas.DataFrame(list(rows))


class Runs(tuple["Run", ...]):
    """Runs, the newest last."""

    def __repr__(self) -> str:
        return f"<Runs: {len(self)}>"

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a data frame of the runs, as `fastlaunch runs list --output csv` writes them."""
        from fastlaunch.lifecycle.describe import run_to_dict

        return data_frame([run_to_dict(run) for run in self])


class Prices(tuple["Price", ...]):
    """Prices in USD per hour of a whole instance, with their dates and sources."""

    #: A glob for regions, and the day of the prices.
    region: str
    as_of: datetime.date
    #: Instance types without a known price in the region on that day.
    unpriced: tuple[str, ...]
    _rows: Sequence[dict[str, Any]]

    def __new__(
        cls,
        prices: "Iterable[Price]",
        *,
        rows: Sequence[dict[str, Any]],
        region: str,
        as_of: datetime.date,
        unpriced: tuple[str, ...],
    ) -> "Prices":
        self = super().__new__(cls, prices)
        self.region, self.as_of, self.unpriced, self._rows = region, as_of, unpriced, rows
        return self

    def __repr__(self) -> str:
        return f"<Prices: {len(self)}>"

    def to_json(self) -> list[dict[str, Any]]:
        """Return a row per price, with the price per accelerator too."""
        return [*self._rows]

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a data frame of the prices, as `fastlaunch prices --output csv` writes them."""
        return data_frame(self.to_json())


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """The result of a submission."""

    #: Ended, or running if the submission was detached.
    runs: Runs
    #: Whether the user stopped it, for example by Ctrl-C.
    is_stopped: bool

    @property
    def exit_code(self) -> int:
        """0 if every run completed, continues by itself or is not needed; 130 if it was stopped; else 1."""
        if self.is_stopped:
            return EXIT_INTERRUPTED
        good = all(
            run.state is RunState.COMPLETED or not run.state.is_final or run.is_unneeded for run in self.runs
        )
        return EXIT_DONE if good else EXIT_JOB_FAILED

"""Return types of the API."""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, overload

from fastlaunch.core.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_JOB_FAILED, UserError
from fastlaunch.core.plan import RunState

if TYPE_CHECKING:
    import pandas

    from fastlaunch.catalog.prices import Catalogue, Price
    from fastlaunch.core.settings import Settings
    from fastlaunch.ledger.rows import Run

Item = TypeVar("Item")


def data_frame(rows: Sequence[Mapping[str, Any]]) -> "pandas.DataFrame":
    """Return rows with equal keys as a data frame. Raises UserError without pandas."""
    try:
        import pandas
    except ImportError:
        raise UserError("to_pandas() needs pandas, which is not installed", "pip install pandas") from None
    return pandas.DataFrame(list(rows))


class _Rows(Sequence[Item], Generic[Item]):
    """A sequence that can become a data frame."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = tuple(items)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        return self._items[index]

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)}>"


# Importing these would slow down a dry run.
if TYPE_CHECKING:
    _RunRows: TypeAlias = _Rows[Run]
    _PriceRows: TypeAlias = _Rows[Price]
else:
    _RunRows = _PriceRows = _Rows


class Runs(_RunRows):
    """Runs, the newest last."""

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a data frame of the runs, as `fastlaunch runs list --output csv` writes them."""
        from fastlaunch.lifecycle.describe import run_to_dict

        return data_frame([run_to_dict(run) for run in self])


class Prices(_PriceRows):
    """Prices in USD per hour of a whole instance, with their dates and sources."""

    def __init__(
        self,
        prices: "Sequence[Price]",
        *,
        catalogue: "Catalogue",
        settings: "Settings",
        region: str,
        as_of: datetime.date,
        unpriced: tuple[str, ...],
        quotas: "Mapping[Price, int]",
    ) -> None:
        super().__init__(prices)
        self._catalogue, self._settings, self._quotas = catalogue, settings, quotas
        #: A glob for regions, and the day of the prices.
        self.region, self.as_of = region, as_of
        #: Instance types without a known price in the region on that day.
        self.unpriced = unpriced

    def to_json(self) -> list[dict[str, Any]]:
        """Return a row per price, with the price per accelerator too."""
        return [self._row(price) for price in self]

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a data frame of the prices, as `fastlaunch prices --output csv` writes them."""
        return data_frame(self.to_json())

    def _row(self, price: "Price") -> dict[str, Any]:
        from fastlaunch.catalog.prices import paid_usd_per_hour
        from fastlaunch.catalog.updates import interruption

        instance = self._catalogue.instances[price.instance]
        return {
            "instance": price.instance,
            "num_accelerators": instance.num_accelerators,
            "accelerator": instance.accelerator,
            "service": price.service,
            "region": price.region,
            "zone": price.zone,
            "purchase": price.purchase,
            "usd_per_hour": price.usd_per_hour,
            "usd_per_accelerator_hour": round(price.usd_per_hour / instance.num_accelerators, 6),
            "paid_usd_per_hour": paid_usd_per_hour(price, self._settings),
            "as_of": price.as_of.isoformat(),
            "interruption": interruption(price.instance, price.region) if price.purchase == "spot" else None,
            "quota": self._quotas.get(price),
            "inferred": price.inferred,
            "source": price.source,
        }


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

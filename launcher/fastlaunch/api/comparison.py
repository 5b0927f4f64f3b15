"""`compare`: samples per dollar of the runs in the ledger."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlaunch.analysis import compare as analysis
from fastlaunch.api.listing import no_run_fits
from fastlaunch.api.results import Runs, data_frame
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.errors import UserError
from fastlaunch.core.units import parse_date
from fastlaunch.lifecycle.reconcile import reconcile
from fastlaunch.lifecycle.world import World, default_context

if TYPE_CHECKING:
    import pandas

    from fastlaunch.analysis.pricing import ChargedAs, PriceRequest
    from fastlaunch.ledger.ledger import Run


#: The most warnings to show.
_MOST = 8


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison(analysis.Comparison):
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
        known: set[tuple[str, str, str | None]] = set()
        # Shared runs do not stand for the user's own.
        runs = [run for run in self.runs if run.owner is None] or self.runs
        for run in runs:
            if run.id in measured or run.is_unneeded:
                # A run without a machine has no instance, and any row of its recipe stands for it.
                known |= {(run.recipe, run.workload, run.instance), (run.recipe, run.workload, None)}
        missing = [run for run in runs if (run.recipe, run.workload, run.instance) not in known]
        return [*dict.fromkeys(f"{run.recipe} on {run.workload}" for run in missing)]

    def __repr__(self) -> str:
        from fastlaunch.core.tables import WIDTH
        from fastlaunch.report.table import as_overview

        return f"{self.answer}\n\n{as_overview(self, width=WIDTH)}"

    def to_json(self) -> dict[str, Any]:
        """Return the data of `fastlaunch compare --output json`; docs/reference.md describes it."""
        from fastlaunch.report.data import to_json

        return to_json(self)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a data frame of the rows, as `fastlaunch compare --output csv` writes them."""
        from fastlaunch.report.data import as_rows

        return data_frame(as_rows(self))


def compare(
    *selectors: str,
    baseline: str | None = None,
    prices_as_of: datetime.date | str | None = None,
    price_as: "str | ChargedAs | Sequence[str | ChargedAs]" = (),
    price_share: Fraction | str | None = None,
    usd_per_hour: float | None = None,
    prices: Path | str | None = None,
    every_run: bool = False,
    allow_unverified: bool = False,
    any_version: bool = False,
    with_shared: bool = False,
    context: World | None = None,
) -> Comparison:
    """Compare runs: step time, samples per dollar, and whether a difference is real.

    selectors: run ids, or `field=glob`; by default the runs of the last submission, sweep or import.
    baseline: a recipe, a run, or `NAME=TEXT` of a variant; bf16 by default, else the first row.
    prices_as_of: price every run as of this day. price_as: charge every run as these instance types, such as
    `p5en.48xlarge:1/8` (or `price_share` of a single type). usd_per_hour: charge this for every machine.
    prices: a file over the shipped prices. allow_unverified: also rank rows that fail a check. any_version:
    pool runs of all versions of a script. with_shared: pool runs that others shared with your own; otherwise
    they form separate rows, which do not change your verdicts.

    Raises UserError if there is nothing to compare, or a named run or field does not exist.
    """
    from fastlaunch.analysis.pricing import ChargedAs, PriceRequest, parse_share
    from fastlaunch.catalog.load import load_catalogue

    for selector in selectors:
        if not isinstance(selector, str):
            raise UserError(
                f"compare() takes runs and filters as text, and {selector!r} is not text",
                'give each by itself: compare("workload=vit-huge", "recipe=te-*")',
            )
    if usd_per_hour is not None and not isinstance(usd_per_hour, int | float):
        raise UserError(f"usd_per_hour is {usd_per_hour!r}", "give USD as a number, such as 55.04")
    context = context or default_context()
    settings = context.settings
    several = (price_as,) if isinstance(price_as, str | ChargedAs) else price_as
    charged = tuple(ChargedAs.parse(item) if isinstance(item, str) else item for item in several)
    if price_share is not None:
        if len(charged) != 1 or charged[0].share is not None:
            raise UserError(
                "--price-share needs exactly one instance type",
                "name it: --price-as INSTANCE; give several their shares: --price-as INSTANCE:1/8",
            )
        share = parse_share(price_share) if isinstance(price_share, str) else price_share
        charged = (replace(charged[0], share=share),)
    request = PriceRequest(
        today=context.today,
        as_of=parse_date(prices_as_of) if isinstance(prices_as_of, str) else prices_as_of,
        price_as=charged,
        usd_per_hour=usd_per_hour,
        region=context.own_region(of_prices=True),
    )
    runs = _stored_runs(context, selectors, every_run=every_run)
    catalogue = load_catalogue(*settings.price_files(Path(prices) if prices else None))
    return compared(
        runs,
        request,
        catalogue,
        baseline,
        allow_unverified=allow_unverified,
        any_version=any_version,
        with_shared=with_shared,
    )


def compare_at_own_prices(context: "World", runs: "Sequence[Run]", baseline: str | None = None) -> Comparison:
    """Return the runs compared at their own prices. Raises UserError if nothing was measured."""
    from fastlaunch.analysis.pricing import PriceRequest
    from fastlaunch.catalog.load import load_catalogue

    settings = context.settings
    request = PriceRequest(today=context.today, region=settings.region)
    return compared(runs, request, load_catalogue(*settings.price_files()), baseline)


def compared(
    runs: Sequence["Run"],
    request: "PriceRequest",
    catalogue: Catalogue,
    baseline: str | None = None,
    *,
    allow_unverified: bool = False,
    any_version: bool = False,
    with_shared: bool = False,
) -> Comparison:
    """Return the comparison of the measured runs; its warnings name the others.

    Raises UserError if there is nothing to compare.
    """
    from fastlaunch.lifecycle.evidence import measured_runs

    if not runs:
        raise UserError(
            "there are no runs to compare",
            "make some: fastlaunch submit --local --recipe fp32,bf16 --until-resolved",
        )
    measured, again = measured_runs(_as_made(runs), request.region, with_shared=with_shared)
    comparison = analysis.compare(
        measured,
        catalogue=catalogue,
        prices=request,
        baseline=baseline,
        allow_unverified=allow_unverified,
        any_version=any_version,
    )
    warnings = (
        *_unmeasured([run for run in runs if run.summary is None and not run.is_unneeded]),
        *again,
        *comparison.warnings,
    )
    if not comparison.rows:
        lines = ["there is nothing to compare: no run of these has a step time", *first_of(warnings)]
        raise UserError(
            "\n  ".join(lines),
            "`fastlaunch runs list` shows why; to compare all there are: fastlaunch compare --every-run",
        )
    fields = {**vars(comparison), "warnings": warnings}
    return Comparison(**fields, runs=Runs(runs), request=request, catalogue=catalogue)


def _stored_runs(context: World, selectors: Sequence[str], *, every_run: bool) -> list["Run"]:
    from fastlaunch.ledger.ledger import open_ledger

    if every_run and selectors:
        raise UserError(
            "--every-run selects all runs, and some are named", "leave out --every-run, or the names"
        )
    with open_ledger(context.settings, clock=context.now) as ledger:
        reconcile(ledger, context.backends, context.settings)
        runs = ledger.fetch_comparable(selectors, all_runs=every_run)
    if selectors and not runs:
        raise no_run_fits(selectors)
    return runs


def _as_made(runs: Sequence["Run"]) -> "list[Run]":
    """Return the runs, with a script's jointly imported runs in order of their start.

    An import orders them by file name, but a script's first row is the baseline.
    """
    from fastlaunch.ledger.ledger import IMPORT

    def started_at(run: "Run") -> str:
        return (run.summary and run.summary.environment.started_at) or ""

    places: dict[str, list[int]] = {}
    for at, run in enumerate(runs):
        if run.backend == IMPORT and run.summary and run.summary.setup.is_script:
            places.setdefault(run.submission_id, []).append(at)
    ordered = list(runs)
    for numbers in places.values():
        for at, run in zip(numbers, sorted((runs[at] for at in numbers), key=started_at), strict=True):
            ordered[at] = run
    return ordered


def first_of(lines: Sequence[str]) -> list[str]:
    """Return the first few warnings, and the number of the others."""
    return [*lines[:_MOST], *([f"and {len(lines) - _MOST} more of these"] if len(lines) > _MOST else [])]


def _unmeasured(runs: "Sequence[Run]") -> list[str]:
    """Return a line for each group of runs without a summary, since one interruption cancels many."""
    alike: dict[tuple[str, str | None], list[Run]] = {}
    for run in runs:
        alike.setdefault((str(run.state), run.reason), []).append(run)
    lines = []
    for (state, reason), group in alike.items():
        recipes = ", ".join(dict.fromkeys(run.recipe for run in group))
        has_ended = group[0].state.is_final
        if len(group) == 1:
            what = "has measured nothing" if has_ended else "counts once it has ended"
            text = f"{group[0].id} ({recipes}) is left out: it is {state} and {what}"
        else:
            what = "have measured nothing" if has_ended else "count once they have ended"
            text = f"{len(group)} runs ({recipes}) are left out: they are {state} and {what}"
        lines.append(f"{text}: {reason}" if reason else text)
    return lines

"""Runs side by side: what a step takes, what a dollar bought, and whether a difference is one.

Rows are compared within a workload, each workload with a baseline of its own. The rules are those of the
README's "how to read the numbers". What is not known is None, never guessed.
"""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastlaunch.analysis.judgement import PricedPool, judge
from fastlaunch.analysis.pooling import Candidate, Pool, log_time, pool
from fastlaunch.analysis.pricing import PriceRequest, price_row
from fastlaunch.analysis.rows import Row, make_row
from fastlaunch.analysis.statistics import Spread, pooled_spread
from fastlaunch.errors import UnknownName

if TYPE_CHECKING:
    from fastlaunch.prices import Catalogue

__all__ = ["Candidate", "Comparison", "PriceRequest", "Row", "compare"]

DEFAULT_BASELINE = "bf16"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """rows: workload by workload, in order of their first runs. baselines: recipe by workload.

    prices_as_of: the one day as of which prices were looked up; None where they were as billed or as given,
    or where there are none. spread: between runs, pooled. warnings: what was left out, and why.
    unfit: the runs that were left out for their problems.
    """

    rows: tuple[Row, ...]
    baselines: Mapping[str, str]
    prices_as_of: datetime.date | None
    spread: Spread
    warnings: tuple[str, ...] = ()
    unfit: tuple[Candidate, ...] = ()


def compare(
    candidates: Sequence[Candidate],
    *,
    catalogue: "Catalogue",
    prices: PriceRequest,
    baseline: str | None = None,
) -> Comparison:
    """The comparison of `candidates`. baseline: a recipe's label, or a run's id, a prefix or last part of it.

    Raises UnknownName for a baseline that is not among them, UserError for a price that cannot be charged.
    """
    pools, unfit = pool(candidates)
    warnings = [f"{c.run_id} ({c.summary.recipe}) is left out: {c.summary.problems[0]}" for c in unfit]
    workloads: dict[str, list[PricedPool]] = {}
    for row in pools:
        price, warning = price_row(row, prices, catalogue)
        warnings += [warning] if warning else []
        workloads.setdefault(row.first.workload, []).append(PricedPool(pool=row, price=price))
    if baseline is not None and pools and not any(_is_named(row, baseline) for row in pools):
        raise UnknownName("baseline", baseline, {row.first.recipe for row in pools})
    spread = pooled_spread([row.log_times for row in pools])

    rows: list[Row] = []
    baselines = {}
    for workload, items in workloads.items():
        base = _baseline(items, baseline)
        baselines[workload] = base.pool.first.recipe
        judgements = judge(items, base, spread)
        rows += [
            make_row(item, judgement, spread, catalogue)
            for item, judgement in zip(items, judgements, strict=True)
        ]
    return Comparison(
        rows=tuple(rows),
        baselines=baselines,
        prices_as_of=_prices_as_of(rows, prices),
        spread=spread,
        warnings=tuple(dict.fromkeys(warnings)),
        unfit=tuple(unfit),
    )


def _is_named(row: Pool, name: str) -> bool:
    return row.first.recipe == name or any(
        run.run_id.startswith(name) or run.run_id.endswith(f"-{name}")
        for run in (*row.candidates, *row.unsteady)
    )


def _baseline(items: Sequence[PricedPool], name: str | None) -> PricedPool:
    """The named row, else the first of recipe bf16, else the first; one with a speed before one without."""

    def preference(item: PricedPool) -> tuple[bool, ...]:
        recipe = item.pool.first.recipe
        return (
            recipe == name or (name is not None and _is_named(item.pool, name)),
            log_time(item.pool) is not None,
            recipe == DEFAULT_BASELINE,
            item.pool.is_steady,
        )

    return max(items, key=preference)


def _prices_as_of(rows: Sequence[Row], prices: PriceRequest) -> datetime.date | None:
    if prices.as_of is not None:
        return prices.as_of
    charged = [row.price for row in rows if row.price is not None]
    as_listed = bool(charged) and not any(price.stored or price.as_of is None for price in charged)
    return prices.today if as_listed else None

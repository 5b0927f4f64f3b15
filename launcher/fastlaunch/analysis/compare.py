"""Runs side by side: what a step takes, what a dollar bought, and whether a difference is one.

Rows are compared within a workload, each workload with a baseline of its own. The rules are those of the
README's "how to read the numbers". What is not known is None, never guessed.
"""

import datetime
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastlaunch.analysis.pooling import Candidate, Pool, global_batch, log_time, pool
from fastlaunch.analysis.pricing import PriceRequest, price_row
from fastlaunch.analysis.rows import Row, make_row
from fastlaunch.analysis.schemas import schema_warnings
from fastlaunch.analysis.statistics import LEAST_DOF, Spread, pooled_spread
from fastlaunch.analysis.uneven import told_apart, uneven_notes
from fastlaunch.analysis.validity import guards
from fastlaunch.analysis.verdicts import PricedPool, judge
from fastlaunch.core.errors import UnknownName, UserError

if TYPE_CHECKING:
    from fastlaunch.catalog.prices import Catalogue

__all__ = ["Candidate", "Comparison", "PriceRequest", "Row", "compare"]

DEFAULT_BASELINE = "bf16"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """rows: workload by workload, in order of their first runs. baselines: recipe by workload.

    prices_as_of: the one day as of which prices were looked up; None where they were as billed or as given,
    or where there are none. spread: between runs, pooled over all rows; a workload with enough repeats is
    judged by its own, and where its rows spread very unequally each of those that can by its own. warnings:
    what was left out, and why.
    allow_unverified: whether rows are ranked whatever their guards hold against them.
    unfit: the runs that were left out for their problems.
    """

    rows: tuple[Row, ...]
    baselines: Mapping[str, str]
    prices_as_of: datetime.date | None
    spread: Spread
    warnings: tuple[str, ...] = ()
    allow_unverified: bool = False
    unfit: tuple[Candidate, ...] = ()


def compare(
    candidates: Sequence[Candidate],
    *,
    catalogue: "Catalogue",
    prices: PriceRequest,
    baseline: str | None = None,
    allow_unverified: bool = False,
) -> Comparison:
    """The comparison of `candidates`. baseline: a recipe's label, or a run's id, a prefix or last part of it.

    allow_unverified: rank also what fails a check of its numerics, or trains to a worse loss.
    Raises UnknownName for a baseline that is not among them, UserError for one that is not ranked and for a
    price that cannot be charged.
    """
    pools, unfit = pool(candidates)
    warnings = [f"{c.run_id} ({c.summary.recipe}) is left out: {c.summary.problems[0]}" for c in unfit]
    if baseline is not None and pools and not any(_is_named(row, baseline) for row in pools):
        raise UnknownName("baseline", baseline, {row.first.recipe for row in pools})
    workloads: dict[str, list[Pool]] = {}
    for row in pools:
        workloads.setdefault(row.first.workload, []).append(row)
    spread = pooled_spread([row.log_times for row in pools])

    rows: list[Row] = []
    baselines = {}
    for workload, of_workload in workloads.items():
        items = []
        guarded = guards(of_workload, unfit, own_region=prices.region)
        for row, guard in zip(of_workload, guarded, strict=True):
            price, warning = price_row(row, prices, catalogue)
            warnings += [warning] if warning else []
            items.append(PricedPool(pool=row, price=price, guard=guard, unverified=allow_unverified))
        warnings += [*schema_warnings(of_workload), *_ranked_unverified(items)]
        base = _baseline(items, baseline)
        baselines[workload] = base.pool.first.recipe
        times = [row.log_times for row in of_workload]
        own = pooled_spread(times)
        own = told_apart(own if own.dof >= LEAST_DOF else spread, times)
        warnings += uneven_notes(workload, own, times)
        judgements = judge(items, base, own)
        rows += [
            make_row(item, judgement, own, catalogue)
            for item, judgement in zip(items, judgements, strict=True)
        ]
    return Comparison(
        rows=tuple(rows),
        baselines=baselines,
        prices_as_of=_prices_as_of(rows, prices),
        spread=spread,
        warnings=tuple(dict.fromkeys(warnings)),
        allow_unverified=allow_unverified,
        unfit=tuple(unfit),
    )


def _ranked_unverified(items: Sequence[PricedPool]) -> Iterator[str]:
    for item in items:
        if item.unverified and item.guard.failures:
            yield (
                f"{item.pool.first.recipe} is ranked as --allow-unverified asks, although"
                f" {'; '.join(item.guard.failures)}"
            )


def _is_named(row: Pool, name: str) -> bool:
    return row.first.recipe == name or any(
        run.run_id.startswith(name) or run.run_id.endswith(f"-{name}")
        for run in (*row.candidates, *row.unsteady)
    )


def _baseline(items: Sequence[PricedPool], name: str | None) -> PricedPool:
    """The named row, else the first of recipe bf16, as it is or with overrides, else the first of all.

    A row with a speed comes before one without, and of several batches the one at which there are the most
    rows, then the one of the most runs. A row that is barred is none unless all are, and then has no verdict
    either; named, it is a UserError.
    """
    num_rows_at = Counter(_batch(item) for item in items)

    def preference(item: PricedPool) -> tuple[int, ...]:
        recipe = item.pool.first.recipe
        is_named = name is not None and _is_named(item.pool, name)
        return (
            is_named and not item.is_barred,
            is_named,
            not item.is_barred,
            log_time(item.pool) is not None,
            recipe == DEFAULT_BASELINE,
            recipe.partition(" ")[0] == DEFAULT_BASELINE,
            item.pool.is_steady,
            num_rows_at[_batch(item)],
            len(item.pool.candidates),
        )

    base = max(items, key=preference)
    if name is not None and base.is_barred and _is_named(base.pool, name):
        raise UserError(
            f"{base.pool.first.recipe} is no baseline: it is not ranked, {base.guard.failures[0]}",
            "choose another, or rank it all the same: --allow-unverified",
        )
    return base


def _batch(item: PricedPool) -> tuple[int, int | None]:
    """What rows share that are compared as training, beside their workload."""
    return global_batch(item.pool.first), item.pool.first.sequence_length


def _prices_as_of(rows: Sequence[Row], prices: PriceRequest) -> datetime.date | None:
    if prices.as_of is not None:
        return prices.as_of
    charged = [row.price for row in rows if row.price is not None]
    as_listed = bool(charged) and not any(price.stored or price.as_of is None for price in charged)
    return prices.today if as_listed else None

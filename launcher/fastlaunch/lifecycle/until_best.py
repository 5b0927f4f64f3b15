"""`sweep --until-best`: cells for `analysis.elimination`, from the sweep's plan and the ledger."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from fastlaunch.catalog.hardware import identify
from fastlaunch.jobs.job import Job
from fastlaunch.jobs.options import ML
from fastlaunch.lifecycle.evidence import measured_run
from fastlaunch.lifecycle.rounds import Elimination
from fastlaunch.lifecycle.world import World

if TYPE_CHECKING:
    from fastlaunch.analysis.compare import Row
    from fastlaunch.analysis.elimination import SweptCell
    from fastlaunch.ledger.ledger import Run
    from fastlaunch.lifecycle.sweep_plan import SweepPlan


@dataclass(frozen=True, kw_only=True)
class UntilBest:
    """Skips cells that cannot be the best of all parts. Both functions take the sweep's runs so far."""

    elimination: Elimination
    #: Chooses the next part to start from those that are left.
    next_part: Callable[[Sequence["Run"], Sequence[str]], str]


def until_best(plan: "SweepPlan", world: World) -> UntilBest:
    """Return the functions that drop runs of the sweep and choose the next part."""
    from fastlaunch.analysis.elimination import eliminate, next_places, predict_cells

    def elimination(runs: Sequence["Run"]) -> dict[str, str]:
        cells = SweptCells(runs, world)
        unneeded = eliminate(predict_cells(cells.cells), max_rounds(plan)).unneeded
        return {id: why for at, why in unneeded.items() for id in cells.run_ids[at]}

    def next_part(runs: Sequence["Run"], names: Sequence[str]) -> str:
        if len(names) == 1:
            return names[0]
        cells = SweptCells(runs, world)
        waiting = [cell for name in names for cell in cells.on(name, plan)]
        predicted = predict_cells([*cells.cells, *waiting])[len(cells.cells) :]
        return str(next_places(predicted)[0])

    return UntilBest(elimination=elimination, next_part=next_part)


def best_rows(runs: Sequence["Run"], plan: "SweepPlan", world: World) -> list[list["Row"]]:
    """Return, for each global batch, the rows that may be best, ordered by their figures."""
    from fastlaunch.analysis.elimination import eliminate

    cells = SweptCells(runs, world)
    standings = eliminate(cells.cells, max_rounds(plan))
    return [
        [
            row
            for at in (leader, *sorted(standings.may_be_best - {leader}))
            if (row := cells.rows[at]) and cells.cells[at].batch == batch
        ]
        for batch, leader in standings.leaders.items()
    ]


def max_rounds(plan: "SweepPlan") -> int:
    """Return the most rounds that a cell runs."""
    return max(part.num_rounds for part in plan.types.values())


class SweptCells:
    """The cells with runs in the ledger, made or planned, for elimination."""

    def __init__(self, runs: Sequence["Run"], world: World) -> None:
        from fastlaunch.analysis.compare import PriceRequest, compare

        self._catalogue, self._today, self._region = world.catalogue, world.today, world.settings.region
        by_spec: dict[Job, list[Run]] = {}
        for run in runs:
            by_spec.setdefault(run.job.without_seed, []).append(run)
        #: An entry for each cell, like `rows` and `cells`.
        self.run_ids = [[run.id for run in alike] for alike in by_spec.values()]
        comparison = compare(
            [measured for run in runs if (measured := measured_run(run, self._region))],
            catalogue=self._catalogue,
            prices=PriceRequest(today=self._today, region=self._region),
        )
        rows = {id: row for row in comparison.rows if row.group.log_times for id in row.run_ids}
        #: None for a cell without measurements.
        self.rows = [
            max((rows[id] for id in ids if id in rows), key=lambda row: row.num_runs, default=None)
            for ids in self.run_ids
        ]
        # Without prices, compare by speed.
        self._is_priced = all(row.price is not None for row in self.rows if row)
        self._batch_sizes = {
            spec.batch_size: row.setup.batch_size_per_gpu
            for spec, row in zip(by_spec, self.rows, strict=True)
            if row
        }
        self.cells = [
            self._cell(spec, row, alike[0].backend)
            for (spec, alike), row in zip(by_spec.items(), self.rows, strict=True)
        ]
        self._templates = [(spec, alike[0].backend) for spec, alike in by_spec.items()]

    def on(self, name: str, plan: "SweepPlan") -> Iterator["SweptCell"]:
        """Yield the cells of a part without runs: another part's cells on its own instances.

        Until a part has runs, yield one cell with the hourly price.
        """
        from fastlaunch.analysis.elimination import SweptCell

        instance = self._catalogue.instance(name.removeprefix(ML))
        labels = {cell.label for cell in plan.types[name].cells if cell.skipped is None}
        alike = {
            (spec.label, spec.batch_size): (spec, at) for spec, at in self._templates if spec.label in labels
        }
        for spec, service in alike.values():
            here = replace(spec, instance=instance.name, num_gpus=instance.num_accelerators * spec.num_nodes)
            yield replace(self._cell(here, None, service), place=name)
        if not alike:
            service, options = "sagemaker" if name.startswith(ML) else "ec2", plan.types[name].options
            region = options.region if options else self._region
            price = self._catalogue.find_price(instance.name, service=service, region=region, on=self._today)
            log_usd_per_hour = math.log(price.usd_per_hour) if price else math.inf
            yield SweptCell(place=name, batch=None, log_usd_per_hour=log_usd_per_hour)

    def _cell(self, spec: Job, row: "Row | None", service: str) -> "SweptCell":
        from fastlaunch.analysis.anchors import config_of
        from fastlaunch.analysis.elimination import SweptCell
        from fastlaunch.analysis.pooling import run_times

        price = row.price if row else None
        if row is None and spec.instance and self._is_priced:
            price = self._catalogue.find_price(
                spec.instance,
                service=service,
                region=spec.region,
                purchase=spec.terms.purchase,
                on=self._today,
            )
        per_gpu = spec.batch_size or self._batch_sizes.get(spec.batch_size)
        global_batch = row.setup.global_batch if row else per_gpu and per_gpu * spec.num_gpus
        config = None
        if spec.instance and (price or not self._is_priced):
            config = config_of(
                model=f"{spec.workload} {spec.label}",
                unit="samples",
                precision=spec.recipe.precision,
                gpu=self._catalogue.accelerator_of(spec.instance).name,
                num_gpus=spec.num_gpus,
                batch=per_gpu,
                identify=partial(identify, accelerators=self._catalogue.accelerators),
            )
        return SweptCell(
            place=spec.instance,
            batch=(spec.workload, global_batch),
            log_usd_per_hour=math.log(price.usd_per_hour * spec.num_nodes)
            if price and self._is_priced
            else 0.0,
            runs=tuple(run_times(row.group, 0)) if row else (),
            config=config if config and config.gpu else None,
            barred=row.validity.failures[0] if row and row.is_barred else None,
        )

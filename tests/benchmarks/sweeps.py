"""What `sweep --until-best` saves, and how often it picks the best cell, by simulation.

    python -m benchmarks.sweeps [--draws 100] [FILE ...] (in tests/; about five minutes on two idle cores)

A draw is a matrix of instance types and recipes whose truth is known. The sweep is carried out on it by the
rules of `analysis/elimination.py`: type after type, each on one machine, which is told what to leave out
while its next run is under way. Costs are of machine time at list prices, boots included. The full matrix is
every cell with 8 rounds; its pick is the cheapest cell by them. docs/benchmarks.md quotes what this prints.

With FILE, the columns are those of the shipped runs, the truth is what was published there: of each model
that ran on several types of GPU that EC2 sells.
"""

import argparse
import datetime
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median

from tabulate import tabulate

from benchmarks.prediction import read_rows
from fastlaunch.analysis.anchors import Refusal, config_of, read
from fastlaunch.analysis.differences import RunTime
from fastlaunch.analysis.elimination import SweptCell, eliminate, next_places, predict_cells
from fastlaunch.catalog.hardware import Gpu, identify
from fastlaunch.catalog.load import load_catalogue
from fastlaunch.core.ownership import DEFAULT_MOST_ROUNDS

MAX_ROUNDS = DEFAULT_MOST_ROUNDS
#: Of the cost of the full matrix; of the draws in which the pick is the best, or within 1% of it.
GOALS = (0.80, 0.95)
NEAR = 1.01
PRICES_ON = datetime.date(2026, 7, 20)
#: Of a machine, and of a run before its steps; its steps, in the middle of the cells.
BOOT_S, START_S, STEPS_S = 300.0, 60.0, 180.0
#: Types with eight GPUs, so that all cells have one global batch.
TYPES = (
    *("g5.48xlarge", "g6.48xlarge", "g6e.48xlarge", "g7e.48xlarge", "p4d.24xlarge", "p4de.24xlarge"),
    *("p5.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge", "p6-b300.48xlarge"),
)
SIZES = ((3, 3), (5, 4), (8, 6))


@dataclass(frozen=True, kw_only=True)
class Noise:
    """By how much runs, machines of a type and rounds deviate."""

    name: str
    runs: float
    machines: float
    rounds: float


NOISES = (
    Noise(name="quiet: runs 0.2%, machines 0.5%", runs=0.002, machines=0.005, rounds=0.002),
    Noise(name="usual: runs 0.5%, machines 1.5%", runs=0.005, machines=0.015, rounds=0.01),
    Noise(name="noisy: runs 2%, machines 2%", runs=0.02, machines=0.02, rounds=0.02),
)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A matrix with its truth: cells as the product sees them, and the log of their seconds per sample."""

    cells: tuple[SweptCell, ...]
    log_times: tuple[float, ...]

    def log_usd(self, at: int) -> float:
        return self.log_times[at] + self.cells[at].log_usd_per_hour

    @property
    def num_samples(self) -> float:
        """Of a run, by which the median cell takes STEPS_S."""
        return STEPS_S / math.exp(median(self.log_times))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a sweep of a matrix came to, beside the full matrix. Ratios are to the best cell in truth."""

    cost: float  # of the full matrix's
    num_runs: int
    ratio: float
    ratio_of_full: float
    num_cells: int


@cache
def _types() -> Mapping[str, tuple[Gpu, float]]:
    """The GPU of each type, and dollars per hour."""
    catalogue = load_catalogue()
    found = {}
    for name in TYPES:
        price = catalogue.find_price(name, region="us-east-1", on=PRICES_ON)
        gpu = identify(catalogue.instance(name).accelerator)
        assert price is not None and gpu is not None
        found[name] = (gpu, price.usd_per_hour)
    return found


def low_rank(rng: random.Random, num_types: int, num_recipes: int) -> Matrix:
    """Draw throughput as physics, an effect of the type, one of the recipe, and what the two have together.

    Of a recipe in fp8 the cells on GPUs without it are missing, as in a sweep.
    """
    types = rng.sample(TYPES, num_types)
    recipes = [("bf16", "bf16")]
    recipes += [(f"recipe{n}", rng.choice(("bf16", "bf16", "fp8", "fp32"))) for n in range(1, num_recipes)]
    of_recipe = [rng.gauss(0, 0.25) for _ in recipes]
    of_recipe_here = [rng.gauss(0, 1) for _ in recipes]
    cells, log_times = [], []
    for name in types:
        gpu, usd_per_hour = _types()[name]
        of_type, of_type_here = rng.gauss(0, 0.2), rng.gauss(0, 0.08)
        for (label, precision), effect, here in zip(recipes, of_recipe, of_recipe_here, strict=True):
            peak = gpu.peak_tflops.get(precision)
            if peak is None:
                continue
            log_speed = 0.4 * math.log(peak / 312) + 0.5 * math.log(gpu.bandwidth_gb_per_s / 1555)
            log_speed += of_type + effect + here * of_type_here + rng.gauss(0, 0.04)
            log_times.append(-log_speed - math.log(8 * 500))
            cells.append(_cell(name, gpu.name, usd_per_hour, "net", label, precision, num_gpus=8))
    return Matrix(cells=tuple(cells), log_times=tuple(log_times))


def _cell(
    place: str, gpu: str, usd_per_hour: float, model: str, label: str, precision: str, *, num_gpus: int
) -> SweptCell:
    config = config_of(
        model=f"{model} {label}", unit="samples", precision=precision, gpu=gpu, num_gpus=num_gpus, batch=64
    )
    return SweptCell(place=place, batch=0, log_usd_per_hour=math.log(usd_per_hour), config=config)


def published(rows: Sequence[Mapping[str, str]]) -> list[Matrix]:
    """Return a matrix for each model that ran on two types of GPU that EC2 sells, four cells or more.

    A recipe is a precision and batch. A GPU costs what it does in the cheapest size that carries it; of
    several runs of a cell the median counts.
    """
    usd_per_gpu = _usd_per_gpu()
    models: dict[object, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        try:
            config, _ = read(row)
        except Refusal:
            continue
        if config.gpu_name in usd_per_gpu:
            recipe = f"{config.precision} {row['batch_per_gpu']} {row['seq_or_image']}"
            cell = (config.gpu_name, recipe)
            models[config.workload, int(config.num_gpus)][cell].append(float(row["throughput"]))
    matrices = []
    for (_, num_gpus), found in models.items():
        if len({gpu for gpu, _ in found}) < 2 or len(found) < 4:
            continue
        cells = [
            _cell(gpu, gpu, usd_per_gpu[gpu] * num_gpus, "net", recipe, recipe.split()[0], num_gpus=num_gpus)
            for gpu, recipe in found
        ]
        times = tuple(-math.log(median(throughput)) for throughput in found.values())
        matrices.append(Matrix(cells=tuple(cells), log_times=times))
    return matrices


def _usd_per_gpu() -> Mapping[str, float]:
    catalogue, found = load_catalogue(), dict[str, float]()
    for name, instance in catalogue.instances.items():
        gpu = identify(instance.accelerator)
        price = catalogue.find_price(name, region="us-east-1", on=PRICES_ON)
        if gpu and price:
            usd = price.usd_per_hour / instance.num_accelerators
            found[gpu.name] = min(found.get(gpu.name, math.inf), usd)
    return found


def swept(matrix: Matrix, noise: Noise, rng: random.Random) -> Outcome:
    """Carry out the sweep, and the full matrix on the same machines."""
    places = list(dict.fromkeys(cell.place for cell in matrix.cells))
    of_machine = {place: rng.gauss(0, noise.machines) for place in places}
    of_round = {(place, n): rng.gauss(0, noise.rounds) for place in places for n in range(1, MAX_ROUNDS + 1)}
    runs = [
        [
            RunTime(
                row=at,
                log_time=log_time
                + of_machine[cell.place]
                + of_round[cell.place, n]
                + rng.gauss(0, noise.runs),
                host=cell.place,
                block=(cell.place, n),
                round=n,
            )
            for n in range(1, MAX_ROUNDS + 1)
        ]
        for at, (cell, log_time) in enumerate(zip(matrix.cells, matrix.log_times, strict=True))
    ]

    def usd(at: int, run: RunTime) -> float:
        seconds = START_S + matrix.num_samples * math.exp(run.log_time)
        return seconds * math.exp(matrix.cells[at].log_usd_per_hour)

    def boot_usd(place: object) -> float:
        return BOOT_S * math.exp(next(c.log_usd_per_hour for c in matrix.cells if c.place == place))

    full_usd = sum(usd(at, run) for at, of in enumerate(runs) for run in of) + sum(map(boot_usd, places))
    cells, spent_usd, num_runs = list(matrix.cells), 0.0, 0
    left = set(places)
    while left:
        cells = predict_cells(cells)
        place = next(each for each in next_places(cells) if each in left)
        left.remove(place)
        own = [at for at, cell in enumerate(cells) if cell.place == place]
        # A B, then B A, as `interleaved` has it; told what to leave out while the next is under way.
        queue = [(at, n) for n in range(1, MAX_ROUNDS + 1) for at in (own if n % 2 else own[::-1])]
        queue = [(at, n) for at, n in queue if at not in eliminate(cells, MAX_ROUNDS).unneeded]
        spent_usd += boot_usd(place) if queue else 0.0
        while queue:
            at, n = queue.pop(0)
            run = runs[at][n - 1]
            spent_usd += usd(at, run)
            num_runs += 1
            cells[at] = replace(cells[at], runs=(*cells[at].runs, run), predicted=None)
            cells = predict_cells(cells)
            unneeded = eliminate(cells, MAX_ROUNDS).unneeded
            if queue and queue[0][0] in unneeded:
                # Made all the same, and not looked at.
                under_way, number = queue[0]
                spent_usd += usd(under_way, runs[under_way][number - 1])
                num_runs += 1
            queue = [(other, n) for other, n in queue if other not in unneeded]
    best = min(map(matrix.log_usd, range(len(cells))))
    picked = eliminate(cells, MAX_ROUNDS).leaders[0]
    of_full = min(
        range(len(cells)),
        key=lambda at: fmean(run.log_time for run in runs[at]) + matrix.cells[at].log_usd_per_hour,
    )
    return Outcome(
        cost=spent_usd / full_usd,
        num_runs=num_runs,
        ratio=math.exp(matrix.log_usd(picked) - best),
        ratio_of_full=math.exp(matrix.log_usd(of_full) - best),
        num_cells=len(cells),
    )


def simulate(size: tuple[int, int], noise: Noise, *, draws: int, seed: int = 0) -> list[Outcome]:
    """Return what `draws` sweeps of drawn matrices came to."""
    rng = random.Random(f"{seed} {size} {noise.name}")
    return [swept(low_rank(rng, *size), noise, rng) for _ in range(draws)]


def simulate_published(path: Path, noise: Noise, *, draws: int, seed: int = 0) -> list[Outcome]:
    """Return what about `draws` sweeps of the matrices of a file came to, each as often as the others."""
    rng = random.Random(f"{seed} {path.name} {noise.name}")
    rows = read_rows(path)
    matrices = published(rows)
    times = math.ceil(draws / len(matrices))
    return [swept(matrix, noise, rng) for matrix in matrices for _ in range(times)]


def line(name: str, outcomes: Sequence[Outcome]) -> Mapping[str, str]:
    """Return the table's line of some sweeps."""
    saved = 1 - fmean(each.cost for each in outcomes)
    near = fmean(each.ratio <= NEAR for each in outcomes)
    missed = [
        f"{100 * (goal - value):.1f} points of {what}"
        for what, value, goal in (("saved", saved, GOALS[0]), ("picked", near, GOALS[1]))
        if value < goal
    ]
    return {
        "matrix": name,
        "cells": f"{fmean(each.num_cells for each in outcomes):.0f}",
        "draws": str(len(outcomes)),
        "saved": f"{saved:.1%}",
        "runs a cell": f"{fmean(each.num_runs / each.num_cells for each in outcomes):.2f}",
        "within 1%": f"{near:.1%}",
        "of all runs": f"{fmean(each.ratio_of_full <= NEAR for each in outcomes):.1%}",
        "mean loss": f"{fmean(each.ratio for each in outcomes) - 1:.2%}",
        "worst": f"{max(each.ratio for each in outcomes) - 1:.1%}",
        "missed by": ", ".join(missed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--draws", type=int, default=100)
    options = parser.parse_args()
    kinds: list[tuple[str, Callable[..., list[Outcome]]]] = [
        (f"{size[0]} x {size[1]}, {noise.name}", partial(simulate, size, noise))
        for size in SIZES * (not options.files)
        for noise in NOISES
    ]
    kinds += [
        (f"{path.name}, {noise.name}", partial(simulate_published, path, noise))
        for path in options.files
        for noise in NOISES
    ]
    with ProcessPoolExecutor(2) as pool:
        results = [(name, pool.submit(kind, draws=options.draws)) for name, kind in kinds]
        lines = [line(name, result.result()) for name, result in results]
    print(f"{datetime.date.today()}\n")
    print(tabulate(lines, headers="keys", disable_numparse=True))


if __name__ == "__main__":
    main()

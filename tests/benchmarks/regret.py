"""What picking a GPU by prediction costs above the best pick, on runs that were made.

    python -m benchmarks.regret [FILE ...] (in tests/; about a minute for each file)

Takes the shipped runs without FILE. A case is a workload (model and precision) measured on at least three
GPUs that EC2 sells: with the same batch and sequence where three GPUs have that (the median of its runs),
else at its best on each.
All its runs are left out but one per generation of GPU (in every combination), or but one. The GPU picked has
the most throughput per dollar, as measured where it is known and as predicted elsewhere; its regret is what
it costs per sample above the cheapest. A second table sets the probability that the pick is the cheapest, as
`recommend` gives it, against how often it was. docs/benchmarks.md quotes both.
"""

import argparse
import datetime
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
from tabulate import tabulate

from benchmarks.prediction import bandwidth, baselines, read_rows
from fastlaunch.analysis.anchors import Config, read_anchors
from fastlaunch.analysis.differences import MACHINE
from fastlaunch.analysis.predict import Fit, Predictor, best_guess, features_of
from fastlaunch.analysis.recommend import chance_of_cheapest
from fastlaunch.catalog.hardware import TRAINING_THROUGHPUT, identify
from fastlaunch.catalog.load import load_catalogue

DAY = datetime.date(2026, 7, 20)
#: USD per hour of one GPU that EC2 sold on `DAY` and the price file lacks: p3.2xlarge, an eighth of
#: p3dn.24xlarge, g4dn.xlarge, p2.xlarge, on demand in us-east-1, from karpenter-provider-aws' price table.
OTHER_PRICES = {"V100 16GB": 3.06, "V100 32GB": 31.212 / 8, "T4": 0.526, "K80": 0.9}
METHODS = (
    *("fastlaunch", "additive", "known runs alone"),
    *("cheapest per hour", "peak per dollar", "bandwidth per dollar"),
)
KNOWN = ("one per generation", "one")
#: With one run per generation.
GOAL_MEAN, GOAL_WORST = 0.015, 0.10
#: Of the probabilities.
_BINS = (0.0, 0.5, 0.7, 0.9, 1.01)
#: Costs that differ by less are the same.
_SAME = 1e-9


@dataclass(frozen=True, kw_only=True)
class Pick:
    workload: tuple[str, str]
    # Of KNOWN, and of METHODS.
    known: str
    method: str
    regret: float
    chance: float | None = None  # said to be the cheapest


def usd_per_gpu_hour() -> Mapping[str, float]:
    """Return by GPU the price of its cheapest size, per GPU."""
    catalogue = load_catalogue()
    cheapest: dict[str, tuple[float, float]] = {}
    for instance in catalogue.instances.values():
        price = catalogue.find_price(instance.name, region="us-east-1", on=DAY)
        gpu = identify(instance.accelerator)
        if price and gpu:
            size = (price.usd_per_hour, price.usd_per_hour / instance.num_accelerators)
            cheapest[gpu.name] = min(size, cheapest.get(gpu.name, size))
    return OTHER_PRICES | {name: usd for name, (_, usd) in cheapest.items()}


def cases(predictor: Predictor, sold: Mapping[str, float]) -> Iterator[Mapping[str, int]]:
    """Yield for each workload, by GPU, the configurations to compare."""
    by_workload = defaultdict(list)
    for index, config in enumerate(predictor.configs):
        if config.gpu_name in sold:
            by_workload[config.workload, config.family].append(index)
    for rows in by_workload.values():
        rows.sort(key=lambda i: (predictor.configs[i].num_gpus, predictor.log_throughput[i]))
        same, any_batch = (defaultdict[object, dict[str, list[int]]](lambda: defaultdict(list)) for _ in "ab")
        for index in rows:
            config = predictor.configs[index]
            any_batch[config.num_gpus][config.gpu_name].append(index)
            if config.log_batch is not None:
                same[config.num_gpus, config.log_batch, config.sequence][config.gpu_name].append(index)
        widest = max(same.values(), key=len, default={})
        if len(widest) >= 3:
            yield {name: runs[(len(runs) - 1) // 2] for name, runs in widest.items()}
            continue
        widest = max(any_batch.values(), key=len)
        if len(widest) >= 3:
            yield {name: runs[-1] for name, runs in widest.items()}


def picks(rows: Sequence[Mapping[str, str]]) -> Iterator[Pick]:
    """Yield every method's pick of every case, for everything that may be known of it."""
    predictor, sold = Predictor(read_anchors(rows)[0]), usd_per_gpu_hour()
    features, likeness = features_of(predictor.configs)
    fit = Fit(features, predictor.log_throughput, predictor.num_runs, likeness)
    for case in cases(predictor, sold):
        configs = {name: predictor.configs[index] for name, index in case.items()}
        one = next(iter(configs.values()))
        logs = {name: float(predictor.log_throughput[index]) for name, index in case.items()}
        generations = defaultdict(list)
        for name, config in configs.items():
            generations[config.generation].append(name)
        scenarios = {
            KNOWN[0]: list(itertools.product(*generations.values())),
            KNOWN[1]: [(name,) for name in case],
        }
        for known, choices in scenarios.items():
            for names in choices:
                shown = {name: logs[name] for name in names}
                hidden = [
                    index
                    for index, config in enumerate(predictor.configs)
                    if config.workload == one.workload and index not in {case[name] for name in names}
                ]
                residuals, deviations = fit.left_out([np.array(hidden)])
                spread = {
                    name: MACHINE if name in shown else float(deviations[index])
                    for name, index in case.items()
                }
                predicted = {
                    name: float(best_guess(logs[name] - residuals[index], deviations[index]))
                    for name, index in case.items()
                    if name not in shown
                }
                rest = predictor.only(sorted(set(range(len(predictor.configs))) - set(hidden)))
                additive = baselines(rest)
                guesses: dict[str, Mapping[str, float]] = {
                    "fastlaunch": predicted | shown,
                    "additive": {
                        name: _additive(additive(config), config) for name, config in configs.items()
                    }
                    | shown,
                    "known runs alone": shown,
                    "cheapest per hour": dict.fromkeys(case, 0.0),
                    "peak per dollar": {
                        name: math.log(config.peak_tflops) for name, config in configs.items()
                    },
                    "bandwidth per dollar": {
                        name: math.log(bandwidth(config)) for name, config in configs.items()
                    },
                }
                best = max(logs[name] - math.log(sold[name]) for name in case)
                for method, guess in guesses.items():
                    pick = max(guess, key=lambda name: guess[name] - math.log(sold[name]))
                    regret = math.expm1(best - logs[pick] + math.log(sold[pick]))
                    chance = None
                    if method == METHODS[0]:
                        costs = {name: (sold[name] / math.exp(guess[name]), spread[name]) for name in case}
                        usd, deviation = costs.pop(pick)
                        others = [(*cost, math.inf) for cost in costs.values()]
                        chance = chance_of_cheapest(usd, deviation, others)
                    yield Pick(
                        workload=(one.workload, one.family),
                        known=known,
                        method=method,
                        regret=regret,
                        chance=chance,
                    )


def _additive(guesses: Mapping[str, float], config: Config) -> float:
    """Return the additive model's log throughput per GPU, or less than any where it has none."""
    return math.log(guesses["additive"] / config.num_gpus) if "additive" in guesses else -math.inf


def table(made: Sequence[Pick]) -> str:
    lines = []
    for known in KNOWN:
        for method in METHODS:
            own = defaultdict(list)
            for pick in made:
                if (pick.known, pick.method) == (known, method):
                    own[pick.workload].append(pick.regret)
            lines.append(
                {
                    "runs known": known,
                    "pick by": method,
                    "workloads": len(own),
                    "cases": sum(map(len, own.values())),
                    # Every workload counts alike.
                    "mean": f"{mean(map(mean, own.values())):.1%}",
                    "worst": f"{max(map(max, own.values())):.1%}",
                }
            )
    return tabulate(lines, headers="keys", disable_numparse=True)


def calibration(made: Sequence[Pick]) -> str:
    """Return how often picks were the cheapest, by the probability that they were said to be."""
    said = [pick for pick in made if pick.chance is not None]
    lines = []
    for low, high in itertools.pairwise(_BINS):
        of_bin = [pick for pick in said if low <= (pick.chance or 0) < high]
        if of_bin:
            lines.append(
                {
                    "probability": f"{low:.0%} to {min(high, 1):.0%}",
                    "picks": len(of_bin),
                    "mean": f"{mean(pick.chance or 0 for pick in of_bin):.0%}",
                    "were the cheapest": f"{mean(pick.regret < _SAME for pick in of_bin):.0%}",
                }
            )
    return tabulate(lines, headers="keys", disable_numparse=True)


def missed(made: Sequence[Pick]) -> list[str]:
    """Return a sentence per goal that is missed, with by how much."""
    own = defaultdict(list)
    for pick in made:
        if (pick.known, pick.method) == (KNOWN[0], METHODS[0]):
            own[pick.workload].append(pick.regret)
    found = {
        "mean": (mean(map(mean, own.values())), GOAL_MEAN),
        "worst": (max(map(max, own.values())), GOAL_WORST),
    }
    return [
        f"{name}: by {100 * (regret - goal):.1f} points"
        for name, (regret, goal) in found.items()
        if regret > goal
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, default=[TRAINING_THROUGHPUT])
    for path in parser.parse_args().files:
        rows = read_rows(path)
        made = list(picks(rows))
        print(f"{path.name}: {len(rows)} rows, {datetime.date.today()}\n")
        print(table(made), calibration(made), sep="\n\n", end="\n\n")
        print("Goals missed:", *(missed(made) or ["none"]), sep="\n  ", end="\n\n")
        for pick in sorted(made, key=lambda pick: -pick.regret):
            if pick.method == "fastlaunch" and pick.regret > GOAL_WORST:
                print(f"{pick.workload[0]}, {pick.workload[1]}, {pick.known}: {pick.regret:.0%}")


if __name__ == "__main__":
    main()

"""How far off predictions of throughput are, on rows that are left out.

    python -m benchmarks.prediction [FILE ...] [--folds 8] (in tests/; about a minute for each file)

Takes the shipped runs without FILE. Leaves out whole (model, GPU) pairs, whole (model, generation) pairs,
whole models and whole generations, predicts them from the rest, and prints by class of evidence the error:
first one at a time, then a part of them at a time (which leaves fewer anchors), with how many runs lie in
their range, how wide it is, and baselines. docs/method.md quotes it.
"""

import argparse
import csv
import datetime
import lzma
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np
from tabulate import tabulate

from fastlaunch.analysis.anchors import CLASSES, Config, Row, read, read_anchors
from fastlaunch.analysis.predict import (
    Array,
    Fit,
    Ids,
    Prediction,
    Predictor,
    best_guess,
    features_of,
)
from fastlaunch.catalog.hardware import TRAINING_THROUGHPUT

#: Mean absolute error by class, in percent.
GOALS = {"A": 6.0, "B": 9.0, "C, probe of this workload": 13.0, "C, probe of another": 13.0}
BASELINES = ("additive", "bandwidth", "peak")
#: What is left out: a part of the keys at a time.
LEFT_OUT: Mapping[str, Callable[[Config], object]] = {
    "model x GPU": lambda c: (c.workload, c.gpu_name),
    "model x generation": lambda c: (c.workload, c.generation),
    "model": lambda c: c.workload,
    "generation": lambda c: c.generation,
}


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file such as `TRAINING_THROUGHPUT`, as text."""
    with lzma.open(path, "rt", encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that was left out. errors: of the prediction and of the baselines, |predicted / true - 1|."""

    model: str
    evidence: str
    left_out: str
    errors: Mapping[str, float]
    covered: bool
    width: float


def cases(rows: Sequence[Row], num_folds: int, seed: int = 1) -> list[Case]:
    """Return every row that was left out and predicted."""
    made = []
    read_rows = [read(row) for row in rows]
    configs = [config for config, _ in read_rows]
    for name, key in LEFT_OUT.items():
        keys = sorted({repr(key(config)) for config in configs})
        random.Random(seed).shuffle(keys)
        num = len(keys) if name == "generation" else num_folds
        for fold in range(num):
            out = set(keys[fold::num])
            held = [repr(key(config)) in out for config in configs]
            anchors = [row for row, is_held in zip(rows, held, strict=True) if not is_held]
            queries = [at for at, is_held in enumerate(held) if is_held]
            predictor = Predictor(read_anchors(anchors)[0])
            answers = predictor.predict([configs[at] for at in queries])
            baseline = baselines(predictor)
            for at, answer in zip(queries, answers, strict=True):
                if isinstance(answer, Prediction):
                    row, (config, per_s) = rows[at], read_rows[at]
                    true = float(row["throughput"]) / per_s
                    guesses = {"fastlaunch": answer.predicted, **baseline(config)}
                    made.append(
                        Case(
                            model=row["model"],
                            evidence=answer.evidence,
                            left_out=name,
                            errors={method: abs(guess / true - 1) for method, guess in guesses.items()},
                            covered=answer.low <= true <= answer.high,
                            width=answer.high / answer.low,
                        )
                    )
    return made


def baselines(predictor: Predictor) -> Callable[[Config], Mapping[str, float]]:
    """Return a function that gives the baselines' predictions of a configuration, those that have one."""
    configs, logs = predictor.configs, predictor.log_throughput
    rows = defaultdict(list)
    for index, config in enumerate(configs):
        rows[config.workload, config.family].append(index)
    keys = {key: i for i, key in enumerate(rows)}
    gpus = {name: len(keys) + i for i, name in enumerate(dict.fromkeys(c.gpu_name for c in configs))}
    design = np.zeros((len(configs), len(keys) + len(gpus)))
    for index, config in enumerate(configs):
        design[index, [keys[config.workload, config.family], gpus[config.gpu_name]]] = 1
    ridge = design.T @ design + 1e-3 * np.eye(design.shape[1])
    effects = np.linalg.solve(ridge, design.T @ (logs - logs.mean()))

    def guess(config: Config) -> Mapping[str, float]:
        key = (config.workload, config.family)
        if key not in rows:
            return {}
        guesses = {}
        if config.gpu_name in gpus:
            guesses["additive"] = logs.mean() + effects[keys[key]] + effects[gpus[config.gpu_name]]
        others = [index for index in rows[key] if configs[index].gpu]
        if config.gpu and others:
            for name, of in (("bandwidth", bandwidth), ("peak", _peak)):
                guesses[name] = median(logs[i] + math.log(of(config) / of(configs[i])) for i in others)
        return {name: math.exp(value) * config.num_gpus for name, value in guesses.items()}

    return guess


def bandwidth(config: Config) -> float:
    assert config.gpu is not None
    return config.gpu.bandwidth_gb_per_s


def _peak(config: Config) -> float:
    assert config.gpu is not None
    return config.peak_tflops


def table(made: Sequence[Case]) -> str:
    """Return a line per class and kind of what is left out."""
    lines = []
    for evidence in CLASSES:
        for left_out in LEFT_OUT:
            own = [case for case in made if (case.evidence, case.left_out) == (evidence, left_out)]
            if own:
                errors = [case.errors["fastlaunch"] for case in own]
                low, high = _share(own)
                covered = mean(case.covered for case in own)
                lines.append(
                    {
                        "class": evidence,
                        "left out": left_out,
                        "rows": len(own),
                        "models": len({case.model for case in own}),
                        "MAPE": f"{mean(errors):.1%}",
                        "goal": f"{GOALS[evidence]:.0f}%" if evidence in GOALS else "",
                        "median": f"{median(errors):.1%}",
                        "in range": f"{covered:.0%} ({low:.0%} to {high:.0%})",
                        "high/low": f"{median(case.width for case in own):.2f}",
                        **{name: _baseline(own, name) for name in BASELINES},
                    }
                )
    return tabulate(lines, headers="keys", disable_numparse=True)


def _baseline(own: Sequence[Case], name: str) -> str:
    errors = [case.errors[name] for case in own if name in case.errors]
    return f"{mean(errors):.1%}" if 2 * len(errors) > len(own) else "-"


def one_at_a_time(rows: Sequence[Row]) -> str:
    """Return a line per class, and for C with one probe, of runs left out in closed form.

    A: without its (workload, GPU). B: without its (workload, generation). C: without its generation.
    With one probe: without its generation but for one run there, of the fewest GPUs: of this workload at
    another batch, number of GPUs or date, or of the workload most like it.
    """
    predictor = Predictor(read_anchors(rows)[0])
    features, likeness = features_of(predictor.configs)
    fit = Fit(features, predictor.log_throughput, predictor.num_runs, likeness)
    left_out = {name: own for name, own in predictor.left_out(fit).items() if name != "B0"}
    lines = [_line(name, predictor, *own) for name, own in left_out.items()]
    elsewhere = set(left_out["C"][0].tolist())
    generations, workloads = defaultdict(list), features["workload"]
    for index, config in enumerate(predictor.configs):
        generations[config.generation].append(index)
    for name in ("C, probe of this workload", "C, probe of another"):
        found = []
        for group in generations.values():
            for workload in np.unique(workloads[group]):
                own = [i for i in group if workloads[i] == workload and i in elsewhere]
                this = name.endswith("this workload")
                probes = [i for i in group if (workloads[i] == workload) == this]
                if not own or not probes or len(group) == 1:
                    continue
                probe = min(
                    probes, key=lambda i: (-likeness[workload, workloads[i]], predictor.configs[i].num_gpus)
                )
                hidden = np.array([i for i in group if i != probe])
                residuals, deviations = fit.left_out([hidden])
                kept = [i for i in own if i != probe]
                found += [(i, residuals[i], deviations[i]) for i in kept]
        if found:
            ids, residuals, deviations = map(np.array, zip(*found, strict=True))
            lines.append(_line(name, predictor, ids, residuals, deviations))
    return tabulate(lines, headers="keys", disable_numparse=True)


def _line(
    name: str, predictor: Predictor, ids: Ids, residuals: Array, deviations: Array
) -> Mapping[str, object]:
    errors = np.abs(np.expm1(best_guess(-residuals, deviations)))
    return {
        "class": name,
        "runs": len(ids),
        "models": len({predictor.configs[index].workload for index in ids}),
        "MAPE": f"{errors.mean():.1%}",
        "goal": f"{GOALS[name]:.0f}%" if name in GOALS else "",
        "median": f"{np.median(errors):.1%}",
        "90% within": f"a factor {math.exp(np.quantile(np.abs(residuals), 0.9)):.2f}",
    }


def _share(own: Sequence[Case], draws: int = 1000) -> tuple[float, float]:
    """Return the 95% interval of the share in range, resampled by model."""
    by_model = defaultdict(list)
    for case in own:
        by_model[case.model].append(case.covered)
    sums = np.array([(sum(covered), len(covered)) for covered in by_model.values()])
    picks = np.random.default_rng(1).integers(len(sums), size=(draws, len(sums)))
    shares = sums[picks].sum(axis=1)
    low, high = np.quantile(shares[:, 0] / shares[:, 1], [0.025, 0.975])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, default=[TRAINING_THROUGHPUT])
    parser.add_argument("--folds", type=int, default=8)
    options = parser.parse_args()
    for path in options.files:
        rows = read_rows(path)
        print(f"{path.name}: {len(rows)} rows, {options.folds} folds, {datetime.date.today()}\n")
        print(one_at_a_time(rows), end="\n\n", flush=True)
        print(table(cases(rows, options.folds)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()

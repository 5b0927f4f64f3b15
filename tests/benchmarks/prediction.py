"""How far off predictions of throughput are, on rows that are left out.

    python -m benchmarks.prediction [FILE ...] [--folds 8] (in tests/; about a minute for each file)

Takes the shipped runs without FILE. Leaves out whole (model, GPU) pairs, whole (model, generation) pairs,
whole models and whole generations, predicts them from the rest, and prints by class of evidence the error:
first one at a time, also without effects of the software's date, then a part of them at a time (which leaves
fewer anchors), beside baselines, with how many runs lie in their range, by class and by source. What is left
out tells neither the prediction nor the width of its range anything. Last come the goals that are missed.
docs/benchmarks.md quotes it.
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

from fastlaunch.analysis import predict
from fastlaunch.analysis.anchors import CLASSES, Config, Row, read, read_anchors
from fastlaunch.analysis.predict import (
    Array,
    Features,
    Fit,
    Ids,
    Prediction,
    Predictor,
    best_guess,
    features_of,
)
from fastlaunch.catalog.hardware import TRAINING_THROUGHPUT

#: Median absolute error by class, in percent.
GOALS = {"A": 6.0, "B": 9.0, "C, probe of this workload": 13.0, "C, probe of another": 13.0}
#: The share of runs in their range, of every source.
GOAL_COVERAGE = (0.88, 0.93)
BASELINES = ("additive", "low rank", "nearest GPU", "bandwidth", "peak")
#: The rank of the low-rank baseline, and its ridge.
_RANK, _RIDGE = 2, 0.3
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
    source: str
    evidence: str
    left_out: str
    errors: Mapping[str, float]
    covered: bool
    width: float
    is_past_peak: bool


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
                            source=config.source,
                            evidence=answer.evidence,
                            left_out=name,
                            errors={method: abs(guess / true - 1) for method, guess in guesses.items()},
                            covered=answer.low <= true <= answer.high,
                            width=answer.high / answer.low,
                            is_past_peak=math.log(answer.high / config.num_gpus) > config.log_ceiling + 1e-6,
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
    factors = _low_rank(design, logs - logs.mean() - design @ effects, len(keys))

    def guess(config: Config) -> Mapping[str, float]:
        key = (config.workload, config.family)
        if key not in rows:
            return {}
        guesses = {}
        if config.gpu_name in gpus:
            row, column = keys[key], gpus[config.gpu_name]
            guesses["additive"] = logs.mean() + effects[row] + effects[column]
            guesses["low rank"] = guesses["additive"] + factors[row] @ factors[column]
        others = [index for index in rows[key] if configs[index].gpu]
        if config.gpu and others:
            for name, of in (("bandwidth", bandwidth), ("peak", _peak)):
                guesses[name] = median(logs[i] + math.log(of(config) / of(configs[i])) for i in others)
            apart = {i: _apart(config, configs[i]) for i in others}
            guesses["nearest GPU"] = median(logs[i] for i in others if apart[i] == min(apart.values()))
        return {name: math.exp(value) * config.num_gpus for name, value in guesses.items()}

    return guess


def _low_rank(design: Array, residuals: Array, num_rows: int) -> Array:
    """Return factors, with `_RANK` numbers for each column of `design`, by alternating least squares.

    Their product is a run's residual: of its workload, of the first `num_rows` columns, and its GPU.
    """
    row_of, column_of = design[:, :num_rows].argmax(axis=1), num_rows + design[:, num_rows:].argmax(axis=1)
    factors = np.random.default_rng(0).normal(size=(design.shape[1], _RANK)) * 0.1
    for _ in range(20):
        for own, other in ((row_of, column_of), (column_of, row_of)):
            for key in np.unique(own):
                these = own == key
                known = factors[other[these]]
                factors[key] = np.linalg.solve(
                    known.T @ known + _RIDGE * np.eye(_RANK), known.T @ residuals[these]
                )
    return factors


def _apart(config: Config, other: Config) -> float:
    """Return how far apart two GPUs are, by the logarithms of their peak and bandwidth."""
    return math.hypot(math.log(_peak(config) / _peak(other)), math.log(bandwidth(config) / bandwidth(other)))


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
                lines.append(
                    {
                        "class": evidence,
                        "left out": left_out,
                        "rows": len(own),
                        "models": len({case.model for case in own}),
                        "fastlaunch": _errors([case.errors["fastlaunch"] for case in own]),
                        **{name: _baseline(own, name) for name in BASELINES},
                        "in range": _in_range(own),
                        "high/low": f"{median(case.width for case in own):.2f}",
                    }
                )
    return tabulate(lines, headers="keys", disable_numparse=True)


def by_source(made: Sequence[Case]) -> str:
    """Return a line per source: how many runs lie in their range."""
    sources = sorted({case.source for case in made})
    lines = []
    for source in sources:
        own = [case for case in made if case.source == source]
        lines.append(
            {
                "source": source or "-",
                "rows": len(own),
                "models": len({case.model for case in own}),
                **{
                    evidence: f"{mean(case.covered for case in these):.0%}" if these else "-"
                    for evidence in CLASSES
                    for these in [[case for case in own if case.evidence == evidence]]
                },
                "in range": _in_range(own),
            }
        )
    return tabulate(lines, headers="keys", disable_numparse=True)


def missed(made: Sequence[Case]) -> list[str]:
    """Return a sentence per goal that is missed, with by how much."""
    sentences = []
    for evidence, left_out in (("A", "model x GPU"), ("B", "model x generation")):
        own = [
            case.errors["fastlaunch"]
            for case in made
            if (case.evidence, case.left_out) == (evidence, left_out)
        ]
        if own and (points := 100 * median(own) - GOALS[evidence]) > 0:
            sentences.append(f"median of {evidence}: by {points:.1f} points")
    low, high = GOAL_COVERAGE
    for source in sorted({case.source for case in made}):
        covered = mean(case.covered for case in made if case.source == source)
        if not low <= covered <= high:
            off = covered - high if covered > high else covered - low
            sentences.append(f"in range, {source or 'no source'}: {covered:.0%}, by {100 * off:+.1f} points")
    if num_past := sum(case.is_past_peak for case in made):
        sentences.append(f"0.75 of the peak: {num_past} of {len(made)} ranges pass it")
    return sentences


def _in_range(own: Sequence[Case]) -> str:
    low, high = _share(own)
    return f"{mean(case.covered for case in own):.0%} ({low:.0%} to {high:.0%})"


def _errors(errors: Sequence[float]) -> str:
    """Return the median, and the mean without the tenth that is furthest off."""
    kept = sorted(errors)[: max(1, math.ceil(0.9 * len(errors)))]
    return f"{median(errors):.1%} / {mean(kept):.1%}"


def _baseline(own: Sequence[Case], name: str) -> str:
    errors = [case.errors[name] for case in own if name in case.errors]
    return _errors(errors) if 2 * len(errors) > len(own) else "-"


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
    for name, own in predictor.left_out(undated(predictor, features, likeness)).items():
        if name != "B0":
            lines.append(_line(f"{name}, no date", predictor, *own))
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


def undated(predictor: Predictor, features: Features, likeness: Array) -> Fit:
    """Return the fit without effects of the software's date."""
    effects = {name: size for name, size in predict.DEVIATIONS.items() if "years" not in name}
    return Fit(features, predictor.log_throughput, predictor.num_runs, likeness, effects)


def _line(
    name: str, predictor: Predictor, ids: Ids, residuals: Array, deviations: Array
) -> Mapping[str, object]:
    errors = np.abs(np.expm1(best_guess(-residuals, deviations)))
    return {
        "class": name,
        "runs": len(ids),
        "models": len({predictor.configs[index].workload for index in ids}),
        "median / trimmed mean": _errors(errors.tolist()),
        "goal": f"{GOALS[name]:.0f}%" if name in GOALS else "",
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
        made = cases(rows, options.folds)
        print(table(made), by_source(made), sep="\n\n", end="\n\n", flush=True)
        print("Goals missed:", *(missed(made) or ["none"]), sep="\n  ", end="\n\n")


if __name__ == "__main__":
    main()

"""Predict training throughput from published measurements, with a range and a class of evidence.

Predictions use only the given anchors and the tables of hardware. The model is Bayesian and of low rank, over
(workload x precision) x (GPU x software). Log throughput per GPU is a sum of effects: additive ones
(workload, precision, GPU), products of workload and GPU whose factors are physical (log of the peak for the
format, log of the memory bandwidth) or learnt (same GPU, same generation, like workloads), slopes over GPUs,
batch, sequence and date, and noise. Each effect has its own prior deviation, in `DEVIATIONS`: the model is a
Gaussian process whose covariance is the sum of the effects'. Without measurements, it falls back to physics
and similar workloads.
"""

import copy
import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlaunch.analysis.anchors import MOST_OF_PEAK, Anchor, Config

Array = NDArray[np.float64]
Ids = NDArray[np.int64]

_COVERAGE = 0.9
#: The normal quantile: 90% lie within this many deviations.
_NORMAL = 1.645
#: The most configurations: they take about 15 s and 1 GB. Time grows with the cube, memory with the square.
_MAX_CONFIGS = 3000
#: Refuse to predict if the range exceeds this factor each way.
_MAX_FACTOR = 10
#: With up to this many left-out rows, a class also uses those of the other classes for its range.
_FEW = 20
#: The models of all sources that count beside those of the query's source for its range.
_OTHERS = 2
#: The highest quantile that makes up for few models.
_MOST_COVERAGE = 0.93
#: Bytes a second that an all-reduce moves over PCIe, by the generation of the GPUs: half of one direction of
#: 16 lanes, as all GPUs of a host share switches. GB20x has PCIe 5, others PCIe 4.
_PCIE_BYTES_PER_S = {"GB20x": 32e9}
_USUAL_PCIE_BYTES_PER_S = 16e9
#: The share of a step that is the backward pass, beside which gradients travel.
_BACKWARD = 2 / 3
#: Deviation of the logarithm of the share that PCIe leaves.
_PCIE_DEVIATION = 0.15
#: The least share that PCIe leaves of a measured run.
_LEAST_SHARE = 0.05
#: Sizes of usual models, assumed if a model's size is unknown: 25M, 7B and 1B weights.
_USUAL_LOG_FLOPS = {"images": 23.9, "tokens": 24.5}
#: Assumed pixels a side or tokens if a row gives none; for other units, "not given" is its own value.
_USUAL_SEQUENCE = {"images": 224.0, "tokens": 2048.0}


#: Prior deviation of each effect on log throughput, a product of factors: `alike`, how alike the workloads
#: are; whether a feature is the same; the product of two numbers; `log_batch~2.5`, how near two numbers are
#: on a scale of 2.5. Chosen by leaving out models' runs on a GPU, on a generation, and generations, of two
#: collections of published runs.
DEVIATIONS: Mapping[str, float] = {
    "unit": 0.7, "alike": 0.95, "workload": 0.049, "workload loose": 2.4, "unit log_flops": 0.022,
    "unit family": 0.24, "workload family": 0.073, "alike precision": 0.1, "workload precision": 0.03,
    "peak alike": 0.17, "peak workload family": 0.027,
    "bandwidth": 0.018, "bandwidth workload family": 0.008,
    "gpu": 0.023, "gpu alike": 0.016, "gpu precision": 0.016, "gpu workload family": 0.019,
    "generation": 0.03, "generation precision": 0.051,
    "generation workload family": 0.027, "generation narrow": 0.35,
    "unit batch_offset": 0.091, "alike batch_offset": 0.08, "workload family batch_offset": 0.018,
    "gpu workload batch_offset": 0.011, "generation workload batch_offset": 0.014,
    "workload log_batch~2.5": 0.071, "gpu workload log_batch~1": 0.012,
    "workload room": 0.13, "workload log_sequence~1": 0.45,
    "log_gpus gpu": 0.013, "workload log_gpus~0.5": 0.021, "unlinked": 0.26,
    "several": 0.061, "workload several": 0.016,
    "gpu years": 0.02, "workload log_gpus years~0.7": 0.085, "generation workload years~0.7": 0.033,
    "gpu workload years~0.3": 0.011, "workload family years~0.3": 0.095,
}  # fmt: skip
#: The deviation of a measurement, and of a future run.
_NOISE, _RUN = 0.024, 0.055


class Features(dict[str, NDArray[Any]]):
    """Inputs of the effects by name, with an entry per configuration; equal ids mean equal things."""

    def rows(self, which: NDArray[np.bool_] | slice | Ids) -> "Features":
        return Features({name: values[which] for name, values in self.items()})


def physics(rows: Features) -> Array:
    """Return log throughput by peak, bandwidth and FLOPs alone, up to the unit's constant."""
    return np.asarray(0.4 * rows["peak"] + 0.5 * rows["bandwidth"] - 0.8 * rows["log_flops"])


def covariance(left: Features, right: Features, likeness: Array, effects: Mapping[str, float]) -> Array:
    """Return the prior covariance of two lists of configurations, without noise. effects: as `DEVIATIONS`."""

    # Each takes much memory, and neighbours in the table share them.
    @functools.lru_cache(maxsize=8)
    def factor(name: str) -> NDArray[Any]:
        if name == "alike":
            return np.asarray(
                likeness[left["workload"][:, None], right["workload"][None, :]] * factor("unit")
            )
        feature, _, scale = name.partition("~")
        ours, theirs = left[feature], right[feature]
        if scale:
            return np.asarray(np.exp(-0.5 * (np.subtract.outer(ours, theirs) / float(scale)) ** 2))
        return np.asarray((np.equal if ours.dtype == np.int64 else np.multiply).outer(ours, theirs))

    total = np.zeros((len(left["unit"]), len(right["unit"])))
    for effect, deviation in effects.items():
        total += deviation**2 * functools.reduce(np.multiply, map(factor, effect.split()))
    return total


class Fit:
    """The model, conditioned on measurements.

    log_throughput, num_runs: of each configuration (n,), per GPU.
    """

    def __init__(
        self,
        rows: Features,
        log_throughput: Array,
        num_runs: Array,
        likeness: Array,
        effects: Mapping[str, float] = DEVIATIONS,
    ) -> None:
        self._rows = rows
        self._covariance = functools.partial(covariance, likeness=likeness, effects=effects)
        residual = log_throughput - physics(rows)
        # By unit, so that it does not matter which unit is counted in.
        self._means = {
            unit: float(np.mean(residual[rows["unit"] == unit])) for unit in np.unique(rows["unit"])
        }
        self._residual = residual - self._mean(rows)
        prior = self._covariance(rows, rows)
        noise = _NOISE**2 * (0.5 + 0.5 / num_runs)
        extra = np.zeros_like(noise)
        self.inverse = equal = np.linalg.inv(prior + np.diag(noise))
        self.weights = equal @ self._residual
        # A run far from the others (another machine, a fault) loses weight, as under Student's t.
        for _ in range(2):
            variance = 1 / np.diag(self.inverse)
            off = np.abs(self.weights) * variance / np.sqrt(variance - extra) / 3
            extra = noise * np.where(off > 1, 20 * off**2 - 1, 0.0)
            # Few runs do: Woodbury's identity costs less than another inversion.
            far = np.flatnonzero(extra)
            block = equal[np.ix_(far, far)] + np.diag(1 / extra[far])
            self.inverse = equal - equal[:, far] @ np.linalg.solve(block, equal[far])
            self.weights = self.inverse @ self._residual
        # A future run scatters more than the noise that weighs past runs, but has lost no weight.
        self._run = _RUN**2
        self._beyond = noise + extra - self._run

    def _mean(self, rows: Features) -> Array:
        return np.array([self._means.get(unit, 0.0) for unit in rows["unit"]])

    def predict(self, rows: Features) -> tuple[Array, Array]:
        """Return log throughput per GPU and its deviation, of one run."""
        cross = self._covariance(rows, self._rows)
        parts = [rows.rows(slice(start, start + 50)) for start in range(0, len(rows["unit"]), 50)]
        prior = np.concatenate([np.diag(self._covariance(part, part)) for part in parts])
        variance = prior - np.einsum("ij,ji->i", cross, self.inverse @ cross.T)
        mean = physics(rows) + self._mean(rows) + cross @ self.weights
        return mean, np.sqrt(np.maximum(variance, 0) + self._run)

    def left_out(self, groups: Sequence[Ids]) -> tuple[Array, Array]:
        """Return residual and deviation of each configuration when its group is left out, in closed form."""
        residual = np.full(len(self.weights), np.nan)
        deviation = residual.copy()
        for group in groups:
            block = np.linalg.inv(self.inverse[np.ix_(group, group)])
            residual[group] = block @ self.weights[group]
            deviation[group] = np.sqrt(np.maximum(np.diag(block) - self._beyond[group], 1e-8))
        return residual, deviation


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Throughput per second, summed over the GPUs; `low` to `high` is a 90% range for one run."""

    predicted: float
    low: float
    high: float
    # One of `anchors.CLASSES`.
    evidence: str


class Predictor:
    """A predictor from measurements."""

    def __init__(self, anchors: Sequence[Anchor]) -> None:
        runs: dict[Config, list[float]] = defaultdict(list)
        for anchor in anchors:
            config, per_s = anchor.config, anchor.per_s / anchor.config.num_gpus
            if _over_pcie(config):
                config, per_s = replace(config, num_gpus=1), per_s / _share_kept(config, per_s)
            runs[config].append(math.log(per_s))
        self.configs = tuple(runs)
        self.log_throughput = np.array([np.median(values) for values in runs.values()])
        self.num_runs = np.array([len(values) for values in runs.values()], float)
        self._cells = {(c.workload, c.family, c.generation) for c in self.configs}
        self._workloads = {c.workload for c in self.configs}
        self._examples = {c.workload: c for c in reversed(self.configs)}
        self._generations = {c.generation for c in self.configs}
        self._gpus = {c.gpu_name for c in self.configs}
        # By how much runs pass the ceiling: some FLOPs are not done, as by Winograd's convolutions in fp32 or
        # by experts, if one is faster than the whole peak.
        self._excess: dict[tuple[str, str], float] = defaultdict(float)
        for c, value in zip(self.configs, self.log_throughput, strict=True):
            if value > c.log_ceiling - math.log(MOST_OF_PEAK):
                key = c.workload, c.family
                self._excess[key] = max(self._excess[key], value - c.log_ceiling)
        self._formats = {(c.gpu_name, c.family) for c in self.configs}
        self._narrow = {(c.family, c.generation) for c in self.configs}

    def predict(
        self, queries: Sequence[Config], log_ceilings: Sequence[float] | None = None
    ) -> list[Prediction | str]:
        """Return each query's prediction, or the reason why there is none.

        log_ceilings: for each query, the log of the most that one of its GPUs can do per second.
        """
        queries = [self._completed(query) for query in queries]
        refusals = [self._refusal(config) for config in queries]
        places = [place for place, refusal in enumerate(refusals) if refusal is None]
        wanted = [queries[place] for place in places]
        # GPUs without NVLink: predict one, and scale by what the exchange of gradients leaves.
        configs = [replace(query, num_gpus=1) if _over_pcie(query) else query for query in wanted]
        answers: list[Prediction | str] = [refusal or "" for refusal in refusals]
        if not configs:
            return answers
        near = self._near(configs)
        num = len(near.configs)
        features, likeness = features_of([*near.configs, *configs], num)
        fit = Fit(features.rows(slice(num)), near.log_throughput, near.num_runs, likeness)
        calibration = near.calibrate(fit)
        means, deviations = fit.predict(features.rows(slice(num, None)))
        for place, query, mean, deviation in zip(places, wanted, means, deviations, strict=True):
            evidence, share = self.evidence(query), pcie_share(query, math.exp(mean))
            half = calibration.factor(evidence, query.source) * math.hypot(
                deviation, _PCIE_DEVIATION if evidence == "D" else 0.0
            )
            if half > math.log(_MAX_FACTOR):
                answers[place] = (
                    f"nothing like it is measured: the range would exceed a factor {_MAX_FACTOR} each way"
                )
                continue
            ceiling = query.log_ceiling + self._excess.get((query.workload, query.family), 0.0)
            if log_ceilings is not None:
                ceiling = min(ceiling, log_ceilings[place])
            log_low, log_median, log_high = _below(mean, half, ceiling)
            # A class whose ranges are narrower than predicted has smaller deviations.
            log_guess = best_guess(log_median, min(deviation, (log_high - log_low) / 2 / _NORMAL))
            scale = query.num_gpus * share
            answers[place] = Prediction(
                predicted=math.exp(log_guess) * scale,
                low=math.exp(min(log_low, log_guess)) * scale,
                high=math.exp(log_high) * scale,
                evidence=evidence,
            )
        return answers

    def _completed(self, query: Config) -> Config:
        """Return the query with what it does not say of its model as the model's anchors say it."""
        like = self._examples.get(query.workload)
        if like is None:
            return query
        return replace(
            query,
            params=query.params or like.params,
            image_flops=query.image_flops or like.image_flops,
            sequence=query.sequence or like.sequence,
            task=query.task or like.task,
        )

    def _near(self, queries: Sequence[Config]) -> "Predictor":
        """Return a predictor from the most informative anchors, at most `_MAX_CONFIGS`."""
        if len(self.configs) <= _MAX_CONFIGS:
            return self
        workloads = {query.workload for query in queries}
        drawn = np.random.default_rng(0).permutation(len(self.configs)).tolist()
        kept = sorted(drawn, key=lambda index: self.configs[index].workload not in workloads)[:_MAX_CONFIGS]
        return self.only(kept)

    def only(self, kept: Sequence[int]) -> "Predictor":
        """Return a predictor from these configurations, with the same evidence."""
        predictor = copy.copy(self)
        predictor.configs = tuple(self.configs[index] for index in kept)
        predictor.log_throughput, predictor.num_runs = self.log_throughput[kept], self.num_runs[kept]
        return predictor

    def evidence(self, config: Config) -> str:
        """Return the class of evidence, one of `anchors.CLASSES`."""
        if _over_pcie(config):
            return "D"
        is_known = config.generation in self._generations
        if not is_known or (config.is_narrow and (config.family, config.generation) not in self._narrow):
            return "C"
        if config.workload not in self._workloads:
            return "B0"
        return "A" if (config.workload, config.family, config.generation) in self._cells else "B"

    def _refusal(self, config: Config) -> str | None:
        """Return why the configuration cannot be predicted; None if it can."""
        known = config.gpu_name in self._gpus
        if config.gpu is None and not known:
            return f"GPU {config.gpu_name!r} is in no table of hardware and not among the anchors"
        if config.workload not in self._workloads:
            if config.log_flops is None:
                return "no known run has this model, and its size is unknown"
            if not any(other.unit == config.unit and other.log_flops for other in self.configs):
                return f"no known run has this model, or {config.unit} of a model of known size"
        if config.gpu is None:
            return None
        formats = config.gpu.peak_tflops
        # A run shows that it works, unless the matrix units lack the format and it was emulated.
        if config.is_narrow and config.family not in formats:
            return f"{config.gpu_name} does not support {config.family.upper()}"
        wanted = re.sub(r"[^a-z0-9]", "", config.precision)
        if (config.gpu_name, config.family) not in self._formats and (
            ("bf16" in wanted and "bf16" not in formats) or (wanted == "tf32" and "tf32" not in formats)
        ):
            return f"{config.gpu_name} does not support {'BF16' if 'bf16' in wanted else 'TF32'}"
        if config.params is not None:
            need_gb = config.params * _bytes_per_weight(config) / 1e9
            have_gb = config.gpu.memory_gb * config.num_gpus
            if need_gb > have_gb:
                return f"does not fit in memory: weights and gradients take {need_gb:.0f} GB of {have_gb:.0f}"
        return None

    def calibrate(self, fit: Fit) -> "Calibration":
        """Return how many deviations 90% of left-out runs lie within, by class and source."""
        scores = {}
        for name, (rows, residuals, deviations) in self.left_out(fit).items():
            configs = [self.configs[row] for row in rows]
            num_rows = Counter(config.workload for config in configs)
            scores[name] = _Scores(
                scores=np.abs(residuals) / deviations,
                # Runs of a model err together.
                weights=np.array([num_rows[config.workload] ** -0.5 for config in configs]),
                sources=np.array([config.source for config in configs], str),
                num_models={
                    source: len({config.workload for config in configs if config.source == source})
                    for source in {config.source for config in configs}
                },
            )
        return Calibration(scores)

    def left_out(self, fit: Fit) -> dict[str, tuple[Ids, Array, Array]]:
        """Return, by class, its left-out anchors, their residuals, and predicted deviations.

        A: without its (workload, GPU). B: without its (workload, generation). B0: without its workload. C:
        without its generation.
        """
        gpus, generations = defaultdict(set), defaultdict(set)
        for c in self.configs:
            gpus[c.workload, c.family, c.generation].add(c.gpu_name)
            generations[c.workload].add(c.generation)
        elsewhere = np.array([len(generations[c.workload]) > 1 for c in self.configs], bool)
        neighbours = [len(gpus[c.workload, c.family, c.generation]) > 1 for c in self.configs]
        sized = [c.log_flops is not None for c in self.configs]
        out = {}
        for name, keys, kept in (
            ("A", [(c.workload, c.gpu_name) for c in self.configs], np.array(neighbours, bool)),
            ("B", [(c.workload, c.generation) for c in self.configs], elsewhere),
            ("B0", [c.workload for c in self.configs], np.array(sized, bool)),
            ("C", [c.generation for c in self.configs], elsewhere),
        ):
            groups = [group for group in _groups(keys) if kept[group].any() and len(group) < len(keys)]
            residuals, deviations = fit.left_out(groups)
            rows = np.flatnonzero(kept & np.isfinite(residuals))
            out[name] = (rows, residuals[rows], deviations[rows])
        return out


def _over_pcie(config: Config) -> bool:
    """Return whether several GPUs exchange gradients of known size without NVLink or a similar link."""
    is_known = config.exchanged_params is not None and config.log_batch is not None
    return is_known and config.num_gpus > 1 and config.gpu is not None and not config.gpu.linked


def pcie_share(config: Config, per_s: float) -> float:
    """Return the share of its throughput alone, `per_s`, that a GPU keeps beside others without NVLink.

    Each step the GPUs exchange fp32 gradients in a ring, beside the backward pass.
    """
    if not _over_pcie(config):
        return 1.0
    step_s = _units_per_step(config) / per_s
    return step_s / (step_s + max(0.0, _exchange_s(config) - _BACKWARD * step_s))


def _share_kept(config: Config, per_s: float) -> float:
    """Return the `pcie_share` of a GPU that does `per_s` beside the others."""
    together_s, exchange_s = _units_per_step(config) / per_s, _exchange_s(config)
    if exchange_s <= _BACKWARD * together_s:
        return 1.0
    # A step faster than the exchange shows that this takes less time than assumed.
    return max(_LEAST_SHARE, (together_s - exchange_s) / (1 - _BACKWARD) / together_s)


def _units_per_step(config: Config) -> float:
    assert config.log_batch is not None
    return math.exp(config.log_batch) * (config.sequence or 1.0 if config.unit == "tokens" else 1.0)


def _exchange_s(config: Config) -> float:
    assert config.gpu is not None and config.exchanged_params is not None
    sent_bytes = 2 * (config.num_gpus - 1) / config.num_gpus * 4 * config.exchanged_params
    return sent_bytes / _PCIE_BYTES_PER_S.get(config.gpu.generation, _USUAL_PCIE_BYTES_PER_S)


def _below(mean: float, half: float, ceiling: float) -> tuple[float, float, float]:
    """Return the 5%, 50% and 95% quantiles of a normal variable that is known to lie below `ceiling`.

    half: of the range that holds 90% of it without the ceiling.
    """
    deviation = half / _NORMAL
    if ceiling > mean + 4 * deviation:
        return mean - half, mean, mean + half
    # Far above, the quantiles hardly change, and the probability would vanish.
    normal = NormalDist(min(mean, ceiling + 5 * deviation), deviation)
    mass = normal.cdf(ceiling)
    low, median, high = (normal.inv_cdf(share * mass) for share in (0.05, 0.5, 0.95))
    return low, median, min(high, ceiling)


def best_guess(log_mean: Array | float, deviation: Array | float) -> Array | float:
    """Return the log throughput that minimises the expected relative error |guess / true - 1|.

    For a normal distribution it lies below the median by the variance. Left-out runs have a sharper peak, so
    use 0.7 of the variance.
    """
    return log_mean - 0.7 * deviation**2


@dataclass(frozen=True, kw_only=True)
class _Scores:
    """Errors of the left-out runs of a class, in units of their deviation (n,), with weights (n,)."""

    scores: Array
    weights: Array
    sources: NDArray[np.str_]
    num_models: Mapping[str, int]  # by source

    @functools.cached_property
    def shares(self) -> Array:
        """The weight of each run if every source has the same (n,), 1 together."""
        shares = np.zeros(len(self.scores))
        for source in self.num_models:
            shares += self.of(source) / len(self.num_models)
        return shares

    def of(self, source: str) -> Array:
        """Return the weight of each run if only this source counts (n,), 1 together."""
        weights = np.where(self.sources == source, self.weights, 0.0)
        return np.asarray(weights / (weights.sum() or 1.0))


class Calibration:
    """How many deviations hold 90% of runs, by class of evidence and by who measured.

    What a source measures errs alike, so the left-out models of the query's source count one each, beside
    `_OTHERS` models of all sources, each source alike.
    """

    def __init__(self, scores: Mapping[str, _Scores]) -> None:
        self._scores = scores
        self._factors: dict[tuple[str, str], float] = {}

    def factor(self, evidence: str, source: str) -> float:
        key = evidence, source
        if key not in self._factors:
            # No left-out run tells of D, and a wider class has no narrower range.
            names = ("A", "B", "C") if evidence in ("C", "D") else (evidence,)
            self._factors[key] = max(self._factor(name, source) for name in names)
        return self._factors[key]

    def _factor(self, name: str, source: str) -> float:
        """Return the class's factor, with few left-out runs near that of A and B together."""
        num_rows = len(self._scores[name].scores)
        share = num_rows / (num_rows + _FEW)
        usual = self._quantile(("A", "B"), source)
        return usual if not num_rows else share * self._quantile((name,), source) + (1 - share) * usual

    def _quantile(self, names: Sequence[str], source: str) -> float:
        parts = [self._scores[name] for name in names]
        num_own = [part.num_models.get(source, 0) for part in parts]
        weights = [
            _OTHERS * part.shares + num * part.of(source) for part, num in zip(parts, num_own, strict=True)
        ]
        scores = np.concatenate([part.scores for part in parts])
        if len(names) > 1 and len(scores) <= _FEW:
            return _NORMAL
        # The (n + 1)(1 - a)th smallest of n, as in conformal prediction.
        level = min(_MOST_COVERAGE, _COVERAGE * (1 + 1 / (sum(num_own) + _OTHERS)))
        return _quantile(scores, np.concatenate(weights), level)


def _quantile(values: Array, weights: Array, level: float) -> float:
    """Return the smallest value with at least `level` of the weight at or below it."""
    order = np.argsort(values)
    shares = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(int(np.searchsorted(shares, level)), len(values) - 1)])


def _groups(keys: Sequence[object]) -> list[Ids]:
    groups: dict[object, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        groups[key].append(index)
    return [np.array(group) for group in groups.values()]


def _bytes_per_weight(config: Config) -> float:
    text = f"{config.task} {config.precision} {config.model}"
    if re.search(r"nf4|int4|4bit|qlora", text):
        return 0.5
    if re.search(r"int8|8bit", text):
        return 1
    return 2 if re.search(r"lora|adapter|peft|prefix", text) else 4


def features_of(configs: Sequence[Config], num_anchors: int | None = None) -> tuple[Features, Array]:
    """Return the features of configurations, and the likeness of workloads by their ids in the features.

    num_anchors: the first so many are measured; None for all.
    """

    def ids(values: Sequence[object]) -> Ids:
        known = {value: index for index, value in enumerate(dict.fromkeys(values))}
        return np.array([known[value] for value in values], np.int64)

    log_flops = np.array(
        [0.0 if c.log_flops is None else c.log_flops - _USUAL_LOG_FLOPS.get(c.unit, 22.5) for c in configs]
    )
    workloads = ids([c.workload for c in configs])
    batches = defaultdict(list)
    for c in configs[:num_anchors]:
        if c.log_batch is not None:
            batches[c.workload].append(c.log_batch)
    usual = {workload: float(np.median(logs)) for workload, logs in batches.items()}

    def batch_offset(config: Config) -> float:
        log_batch = config.log_batch
        return 0.0 if log_batch is None else log_batch - usual.get(config.workload, log_batch)

    log_gpus = np.array([math.log(c.num_gpus) for c in configs])
    firsts = np.unique(workloads, return_index=True)[1]
    features = {
        "unit": ids([c.unit for c in configs]),
        "workload": workloads,
        "family": ids([c.family for c in configs]),
        "precision": ids([c.precision for c in configs]),
        "gpu": ids([c.gpu_name for c in configs]),
        "source": ids([c.source for c in configs]),
        "generation": ids([c.generation for c in configs]),
        # Logs relative to an A100; 0 for a GPU without figures.
        "peak": np.array([math.log(c.peak_tflops / 312) if c.gpu else 0.0 for c in configs]),
        "bandwidth": np.array([math.log(c.gpu.bandwidth_gb_per_s / 1555) if c.gpu else 0.0 for c in configs]),
        "log_flops": log_flops,  # of one unit, relative to the unit's usual; 0 if unknown
        # 1 if the unit has no usual size: a sample may be a click or a minute of speech.
        "loose": np.array([float(c.unit not in _USUAL_LOG_FLOPS) for c in configs]),
        "log_batch": np.array([-100.0 if c.log_batch is None else c.log_batch for c in configs]),
        # Relative to the workload's usual batch; 0 if not given.
        "batch_offset": np.array([batch_offset(c) for c in configs]),
        # The GPU's memory, relative to 40 GB, if the batch is not given: it is then the largest that fits.
        "room": np.array(
            [math.log(c.gpu.memory_gb / 40) if c.gpu and c.log_batch is None else 0.0 for c in configs]
        ),
        "log_sequence": np.array(
            [math.log(c.sequence or _USUAL_SEQUENCE.get(c.unit, 1e-40)) for c in configs]
        ),
        "log_gpus": log_gpus,
        "narrow": np.array([float(c.is_narrow) for c in configs]),
        "several": (log_gpus > 0).astype(float),
        # The GPUs in a host without NVLink or a similar link.
        "unlinked": np.minimum(log_gpus, math.log(8)) * [bool(c.gpu and not c.gpu.linked) for c in configs],
        "years": np.array([c.year for c in configs]),
    }
    return Features(features), _likeness([configs[first] for first in firsts], log_flops[firsts])


def _likeness(configs: Sequence[Config], log_flops: Array) -> Array:
    """Return the likeness of workloads, 0 to 1, by name (cosine of trigrams), size and task."""
    grams = [_grams(c.model) for c in configs]
    vocabulary = {gram: i for i, gram in enumerate(sorted(set().union(*grams)))}
    counts = np.zeros((len(configs), len(vocabulary)))
    for row, grams_of_name in enumerate(grams):
        counts[row, [vocabulary[gram] for gram in grams_of_name]] = 1
    counts /= np.sqrt(counts.sum(axis=1, keepdims=True))
    size = np.array([c.log_flops is not None for c in configs])
    near = np.exp(-0.5 * ((log_flops[:, None] - log_flops[None, :]) / 1.5) ** 2)
    tasks = np.array(["frozen" if c.is_frozen else c.task for c in configs])
    task = np.where(tasks[:, None] == tasks[None, :], 1.0, 0.4)
    return np.asarray((0.2 + 0.8 * (counts @ counts.T)) * near * task * np.equal.outer(size, size))


def _grams(name: str) -> set[str]:
    text = f" {re.sub(r'[^a-z0-9]+', ' ', name)} "
    return {text[i : i + 3] for i in range(len(text) - 2)}

"""A Bayesian low-rank model of log throughput over (workload x precision) x (GPU x software).

Log throughput per GPU is a sum of effects: additive ones (workload, precision, GPU), products of workload
and GPU whose factors are physical (log of the peak for the format, log of the memory bandwidth) or learnt
(same GPU, same generation, like workloads), slopes over GPUs, batch, sequence and date, and noise. Each
effect has its own prior deviation, in `DEVIATIONS`: the model is a Gaussian process whose covariance is the
sum of the effects'. Without measurements, it falls back to physics and similar workloads.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ids = NDArray[np.int64]

#: Prior deviation of each effect on log throughput, a product of factors: `alike`, how alike the workloads
#: are; whether a feature is the same; the product of two numbers; `log_batch~2.5`, how near two numbers are
#: on a scale of 2.5. Chosen by leaving out models' runs on a GPU, on a generation, and generations, of two
#: collections of published runs.
DEVIATIONS: Mapping[str, float] = {
    "unit": 0.7, "alike": 0.74, "workload": 0.11, "workload loose": 2.4, "unit log_flops": 0.022,
    "unit family": 0.24, "workload family": 0.11, "alike precision": 0.1, "workload precision": 0.03,
    "peak alike": 0.17, "peak workload family": 0.027,
    "bandwidth": 0.018, "bandwidth workload family": 0.012,
    "gpu": 0.023, "gpu alike": 0.037, "gpu precision": 0.024, "gpu workload family": 0.0086,
    "generation precision": 0.051, "generation workload family": 0.018,
    "unit batch_offset": 0.091, "alike batch_offset": 0.08, "workload family batch_offset": 0.018,
    "gpu workload batch_offset": 0.011, "generation workload batch_offset": 0.014,
    "workload log_batch~2.5": 0.071, "gpu workload log_batch~1": 0.012,
    "workload room": 0.19, "workload log_sequence~1": 0.62,
    "log_gpus gpu": 0.013, "workload log_gpus~0.5": 0.021, "unlinked": 0.26,
    "several": 0.061, "workload several": 0.016,
    "years": 0.018, "workload log_gpus years~0.7": 0.085, "generation workload years~0.7": 0.033,
    "gpu workload years~0.3": 0.016, "workload family years~0.3": 0.063,
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


def covariance(left: Features, right: Features, likeness: Array) -> Array:
    """Return the prior covariance of two lists of configurations, without noise."""

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
    for effect, deviation in DEVIATIONS.items():
        total += deviation**2 * functools.reduce(np.multiply, map(factor, effect.split()))
    return total


class Fit:
    """The model, conditioned on measurements.

    log_throughput, num_runs: of each configuration (n,), per GPU.
    """

    def __init__(self, rows: Features, log_throughput: Array, num_runs: Array, likeness: Array) -> None:
        self._rows, self._likeness = rows, likeness
        residual = log_throughput - physics(rows)
        # By unit, so that it does not matter which unit is counted in.
        self._means = {
            unit: float(np.mean(residual[rows["unit"] == unit])) for unit in np.unique(rows["unit"])
        }
        self._residual = residual - self._mean(rows)
        prior = covariance(rows, rows, likeness)
        noise = _NOISE**2 * (0.5 + 0.5 / num_runs)
        extra = np.zeros_like(noise)
        self._invert(prior, noise)
        # A run far from the others (another machine, a fault) loses weight, as under Student's t.
        for _ in range(2):
            variance = 1 / np.diag(self.inverse)
            off = np.abs(self.weights) * variance / np.sqrt(variance - extra) / 3
            extra = noise * np.where(off > 1, 20 * off**2 - 1, 0.0)
            self._invert(prior, noise + extra)
        # A future run scatters more than the noise that weighs past runs, but has lost no weight.
        self._run = _RUN**2
        self._beyond = noise + extra - self._run

    def _mean(self, rows: Features) -> Array:
        return np.array([self._means.get(unit, 0.0) for unit in rows["unit"]])

    def _invert(self, prior: Array, noise: Array) -> None:
        self.inverse = np.linalg.inv(prior + np.diag(noise))
        self.weights = self.inverse @ self._residual

    def predict(self, rows: Features) -> tuple[Array, Array]:
        """Return log throughput per GPU and its deviation, of one run."""
        cross = covariance(rows, self._rows, self._likeness)
        parts = [rows.rows(slice(start, start + 50)) for start in range(0, len(rows["unit"]), 50)]
        prior = np.concatenate([np.diag(covariance(part, part, self._likeness)) for part in parts])
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

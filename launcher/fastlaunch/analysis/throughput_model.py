"""A Bayesian low-rank model of log throughput over (workload x precision) x (GPU x software).

Log throughput per GPU is a sum of effects: additive ones (workload, precision, GPU), products of workload
and GPU whose factors are physical (log of the peak for the format, log of the memory bandwidth) or learnt
(same GPU, same generation, like workloads), slopes over GPUs, batch, sequence and date, and noise. Each
effect has its own prior deviation, in `DEVIATIONS`: the model is a Gaussian process whose covariance is the
sum of the effects'. Without measurements, it falls back to physics and similar workloads.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ids = NDArray[np.int64]

#: Prior deviation of each effect on log throughput; the letters are explained in `_effects`. Chosen by
#: leaving out models' runs on a GPU, on a generation, and generations, of two collections of published runs.
DEVIATIONS: Mapping[str, float] = {
    "U": 0.7, "M": 0.74, "W": 0.11, "V": 2.4, "UC": 0.022, "UF": 0.24, "WF": 0.11, "ME": 0.1, "WE": 0.03,
    "peakM": 0.17, "peakWF": 0.027, "band": 0.018, "bandWF": 0.012,
    "G": 0.023, "GM": 0.037, "GE": 0.024, "GWF": 0.0086, "DE": 0.051, "DWF": 0.018,
    "UB": 0.091, "MB": 0.08, "WFB": 0.018, "GWB": 0.011, "DWB": 0.014, "WBN": 0.071, "GWBN": 0.012,
    "WR": 0.19, "WQ": 0.62,
    "GN": 0.013, "WNN": 0.021, "L": 0.26, "S": 0.061, "WS": 0.016,
    "T": 0.018, "WTN": 0.085, "DWT": 0.033, "GWT": 0.016, "WFT": 0.063,
    "noise": 0.024, "run": 0.055,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Features:
    """Inputs of the effects, with an entry per configuration; equal ids mean equal things."""

    unit: Ids
    workload: Ids
    family: Ids
    precision: Ids
    gpu: Ids
    generation: Ids
    # Log of peak and of bandwidth, relative to an A100; 0 for a GPU without figures.
    peak: Array
    bandwidth: Array
    # Log FLOPs of one unit, relative to the unit's usual; 0 if unknown.
    log_flops: Array
    # 1 if the unit has no usual size: a sample may be a click or a minute of speech.
    loose: Array
    log_batch: Array
    # Log batch, relative to the workload's usual; 0 if not given.
    batch_offset: Array
    # Log of the GPU's memory, relative to 40 GB, if the batch is not given: it is then the largest that fits.
    room: Array
    log_sequence: Array
    log_gpus: Array
    # 1 with several GPUs.
    several: Array
    # Log of the GPUs in a host without NVLink or a similar link.
    unlinked: Array
    years: Array

    def __getitem__(self, rows: NDArray[np.bool_] | slice | Ids) -> "Features":
        return Features(**{name: values[rows] for name, values in vars(self).items()})


def physics(rows: Features) -> Array:
    """Return log throughput by peak, bandwidth and FLOPs alone, up to the unit's constant."""
    return 0.4 * rows.peak + 0.5 * rows.bandwidth - 0.8 * rows.log_flops


def covariance(
    left: Features, right: Features, likeness: Array, deviations: Mapping[str, float] = DEVIATIONS
) -> Array:
    """Return the prior covariance of two lists of configurations, without noise."""
    total = np.zeros((len(left.unit), len(right.unit)))
    for name, effect in _effects(left, right, likeness):
        if deviations[name]:
            total += deviations[name] ** 2 * effect
    return total


def _effects(left: Features, right: Features, likeness: Array) -> Iterator[tuple[str, Array]]:
    """Yield each effect's covariance, for a deviation of 1."""

    def same(name: str) -> Array:
        equal: Array = np.equal.outer(getattr(left, name), getattr(right, name)).astype(np.float64)
        return equal

    def product(name: str) -> Array:
        return np.outer(getattr(left, name), getattr(right, name))

    def near(name: str, scale: float) -> Array:
        distance: Array = np.subtract.outer(getattr(left, name), getattr(right, name)) / scale
        gauss: Array = np.exp(-0.5 * distance**2)
        return gauss

    # U: same unit; W: same workload; M: how alike the workloads are
    # F: same family of formats; E: precision spelt alike
    unit, workload = same("unit"), same("workload")
    family, spelling = same("family"), same("precision")
    alike = likeness[left.workload[:, None], right.workload[None, :]] * unit
    within = workload * family
    yield "U", unit
    yield "M", alike
    yield "W", workload
    yield "V", workload * product("loose")
    yield "UC", unit * product("log_flops")
    yield "UF", unit * family
    yield "WF", within
    yield "ME", alike * spelling
    yield "WE", workload * spelling
    # The physical factors of the matrix.
    peak, bandwidth = product("peak"), product("bandwidth")
    yield "peakM", peak * alike
    yield "peakWF", peak * within
    yield "band", bandwidth
    yield "bandWF", bandwidth * within
    # G: same GPU; D: same generation
    gpu, generation = same("gpu"), same("generation")
    yield "G", gpu
    yield "GM", gpu * alike
    yield "GE", gpu * spelling
    yield "GWF", gpu * within
    yield "DE", generation * spelling
    yield "DWF", generation * within
    # B: log batch; Q: like sequence length or image size
    batch, batch_offset = near("log_batch", 1.0), product("batch_offset")
    yield "UB", unit * batch_offset
    yield "MB", alike * batch_offset
    yield "WFB", within * batch_offset
    yield "GWB", gpu * workload * batch_offset
    yield "DWB", generation * workload * batch_offset
    yield "WBN", workload * near("log_batch", 2.5)
    yield "GWBN", gpu * workload * batch
    yield "WR", workload * product("room")
    yield "WQ", workload * near("log_sequence", 1.0)
    # N: log number of GPUs
    gpus = product("log_gpus")
    yield "GN", gpus * gpu
    yield "WNN", workload * near("log_gpus", 0.5)
    yield "L", product("unlinked")
    yield "S", product("several")
    yield "WS", workload * product("several")
    # T: years
    era, day = near("years", 0.7), near("years", 0.3)
    yield "T", product("years")
    yield "WTN", workload * gpus * era
    yield "DWT", generation * workload * era
    yield "GWT", gpu * workload * day
    yield "WFT", within * day


def _parts(rows: Features) -> Iterator[Features]:
    return (rows[start : start + 50] for start in range(0, len(rows.unit), 50))


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
        deviations: Mapping[str, float] = DEVIATIONS,
    ) -> None:
        self._rows, self._likeness, self._deviations = rows, likeness, deviations
        residual = log_throughput - physics(rows)
        # By unit, so that it does not matter which unit is counted in.
        self._means = {unit: float(np.mean(residual[rows.unit == unit])) for unit in np.unique(rows.unit)}
        self._residual = residual - self._mean(rows)
        prior = covariance(rows, rows, likeness, deviations)
        noise = deviations["noise"] ** 2 * (0.5 + 0.5 / num_runs)
        extra = np.zeros_like(noise)
        self._invert(prior, noise)
        # A run far from the others (another machine, a fault) loses weight, as under Student's t.
        for _ in range(2):
            variance = 1 / np.diag(self.inverse)
            off = np.abs(self.weights) * variance / np.sqrt(variance - extra) / 3
            extra = noise * np.where(off > 1, 20 * off**2 - 1, 0.0)
            self._invert(prior, noise + extra)
        # A future run scatters more than the noise that weighs past runs, but has lost no weight.
        self._run = deviations["run"] ** 2
        self._beyond = noise + extra - self._run

    def _mean(self, rows: Features) -> Array:
        return np.array([self._means.get(unit, 0.0) for unit in rows.unit])

    def _invert(self, prior: Array, noise: Array) -> None:
        self.inverse = np.linalg.inv(prior + np.diag(noise))
        self.weights = self.inverse @ self._residual

    def predict(self, rows: Features) -> tuple[Array, Array]:
        """Return log throughput per GPU and its deviation, of one run."""
        cross = covariance(rows, self._rows, self._likeness, self._deviations)
        prior = np.concatenate(
            [np.diag(covariance(part, part, self._likeness, self._deviations)) for part in _parts(rows)]
        )
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

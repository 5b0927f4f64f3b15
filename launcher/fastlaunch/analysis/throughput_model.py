"""A low-rank model of log throughput over (workload x precision) x (GPU x software), in its Bayesian form.

Log throughput per GPU is a sum of effects: additive ones (workload, precision, GPU), products of workload
and GPU whose factors are physical (log of the peak for the format, log of the memory bandwidth) or learnt
(same GPU, same generation, like workloads), slopes over GPUs, batch, sequence and date, and noise. Each
effect has a prior deviation of its own, in `DEVIATIONS`: a Gaussian process whose covariance is the sum of
the effects'. What the measurements do not say falls back to physics and to like workloads.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ids = NDArray[np.int64]

#: Prior deviation of each effect on log throughput; the letters are explained in `_effects`. Chosen by
#: leaving out (model, GPU) pairs, generations and models of two collections of published runs.
DEVIATIONS: Mapping[str, float] = {
    "U": 1.0, "M": 0.93, "UC": 0.047, "W": 0.16, "V": 2.5,
    "UF": 0.13, "MF": 0.11, "WF": 0.098, "WE": 0.042,
    "peak": 0.11, "band": 0.089, "peakF": 0.015, "bandF": 0.022, "peakM": 0.14, "bandM": 0.028,
    "peakWF": 0.012, "bandWF": 0.038,
    "G": 0.059, "GF": 0.014, "GM": 0.076, "GW": 0.014, "GWF": 0.024,
    "D": 0.054, "DF": 0.072, "DM": 0.063, "DW": 0.034, "DWF": 0.056,
    "SW": 0.03, "SG": 0.03, "SGW": 0.015,
    "UB": 0.017, "WB": 0.087, "GWB": 0.037, "WQ": 0.63,
    "N": 0.015, "NW": 0.013, "NG": 0.016, "GWN": 0.023,
    "T": 0.13, "TD": 0.0088, "TW": 0.033, "WTN": 0.067, "WTD": 0.045,
    "noise": 0.06,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Features:
    """What the effects depend on: one entry per configuration; ids are equal where the things are."""

    unit: Ids
    workload: Ids
    family: Ids
    precision: Ids
    gpu: Ids
    generation: Ids
    source: Ids
    # log of peak and of bandwidth, relative to an A100; 0 for a GPU without figures.
    peak: Array
    bandwidth: Array
    # log FLOPs of one unit, relative to the unit's usual; 0 where not known.
    log_flops: Array
    # 1 where what the unit counts has no usual size, as samples have not: a click, or a minute of speech.
    loose: Array
    log_batch: Array
    log_sequence: Array
    log_gpus: Array
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

    # U: same unit; W: same workload; M: how alike the workloads are; F: same precision family; E: spelt alike
    unit, workload = same("unit"), same("workload")
    alike = likeness[left.workload[:, None], right.workload[None, :]] * unit
    family, spelling = same("family"), same("precision")
    within = workload * family
    yield "U", unit
    yield "M", alike
    yield "UC", unit * product("log_flops")
    yield "W", workload
    yield "V", workload * product("loose")
    yield "UF", unit * family
    yield "MF", alike * family
    yield "WF", within
    yield "WE", workload * spelling
    # The physical factors of the matrix.
    for name, factor in (("peak", product("peak")), ("band", product("bandwidth"))):
        yield name, factor
        yield name + "F", factor * family
        yield name + "M", factor * alike
        yield name + "WF", factor * within
    # G: same GPU; D: same generation
    for name, place in (("G", same("gpu")), ("D", same("generation"))):
        yield name, place
        yield name + "F", place * family
        yield name + "M", place * alike
        yield name + "W", place * workload
        yield name + "WF", place * within
    # S: same source
    source, gpu, generation = same("source"), same("gpu"), same("generation")
    yield "SW", source * workload
    yield "SG", source * gpu
    yield "SGW", source * gpu * workload
    # B: like batch; Q: like sequence length or image size
    batch, sequence = near("log_batch", 1.5), near("log_sequence", 1.0)
    yield "UB", unit * batch
    yield "WB", workload * batch
    yield "GWB", gpu * workload * batch
    yield "WQ", workload * sequence
    # N: log number of GPUs; T: years
    gpus = product("log_gpus")
    yield "N", gpus
    yield "NW", gpus * workload
    yield "NG", gpus * gpu
    yield "GWN", gpu * workload * near("log_gpus", 0.3)
    years = product("years")
    yield "T", years
    yield "TD", years * generation
    yield "TW", years * workload
    era = near("years", 0.7)
    yield "WTN", gpus * workload * era
    yield "WTD", generation * workload * era


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
        # Of each unit, so that it does not matter which unit is counted in.
        self._means = {unit: float(np.mean(residual[rows.unit == unit])) for unit in np.unique(rows.unit)}
        self._residual = residual - self._mean(rows)
        prior = covariance(rows, rows, likeness, deviations)
        noise = deviations["noise"] ** 2 * (0.5 + 0.5 / num_runs)
        self._invert(prior, noise)
        # A run far off what the others say (another machine, a fault) loses weight, as under Student's t.
        for _ in range(2):
            variance = 1 / np.diag(self.inverse)
            off = np.abs(self.weights) * np.sqrt(variance) / 3
            self._invert(prior, noise * np.where(off > 1, 20 * off**2, 1.0))

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
        return mean, np.sqrt(np.maximum(variance, 0) + self._deviations["noise"] ** 2)

    def left_out(self, groups: Sequence[Ids]) -> tuple[Array, Array]:
        """Return residual and deviation of each configuration when its group is left out, in closed form."""
        residual = np.full(len(self.weights), np.nan)
        deviation = residual.copy()
        for group in groups:
            block = np.linalg.inv(self.inverse[np.ix_(group, group)])
            residual[group] = block @ self.weights[group]
            deviation[group] = np.sqrt(np.maximum(np.diag(block), 1e-8))
        return residual, deviation

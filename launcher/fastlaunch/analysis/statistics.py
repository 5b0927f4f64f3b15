"""Student's t, F, means, the pooled deviation between runs, Holm's correction and the verdict on a ratio.

The run is the unit: two runs of one recipe differ by about 1%, many times the interval within a run. All
sizes are of logarithms, so 0.01 is 1%. The constants were checked by simulation.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

#: The deviation between runs is not taken for smaller than this, however close a few runs happen to lie.
FLOOR = 0.005
#: The deviation between runs that is assumed for a row of one run.
ASSUMED = 0.01
#: The degrees of freedom from which on a deviation that was seen is worth more than one that is assumed, or
#: than that of other workloads: the points of Student's t with fewer are above 4.
LEAST_DOF = 3
#: The degrees of freedom from which on a row of an uneven workload is judged by its own deviation: with one,
#: Student's t is 12.7. By simulation of six rows of three to five runs, of deviations from 0.5% to 10%, some
#: row is falsely called another than the baseline in 2% to 6% of cases so, with one deviation in 9% to 17%.
LEAST_OWN_DOF = 2
#: Of rows of so many runs or more the deviations are held against each other, and used where they differ.
_LEAST_RUNS = LEAST_OWN_DOF + 1
#: What one machine of an instance type may differ from another.
MACHINE = 0.01
#: Two-sided level of all verdicts of a comparison together.
LEVEL = 0.05
TIE_LOW, TIE_HIGH = 0.98, 1.02
#: 97.5% point of Student's t with 5 degrees of freedom: what a run's own interval was made with.
T_WITHIN_RUN = 2.571
#: More runs than this are not worth proposing.
MOST_RUNS_PROPOSED = 100

BETTER, WORSE, TIE, UNRESOLVED = "better", "worse", "tie", "unresolved"


def t_survival(t: float, dof: float) -> float:
    """Return the probability that Student's t with `dof` degrees of freedom (inf: normal) exceeds t >= 0."""
    if math.isinf(dof):
        return NormalDist().cdf(-t)
    if t * t < dof:
        # The other side of the same function: dof / (dof + t * t) cannot tell a small t from 0.
        return 0.5 - 0.5 * regularised_beta(t * t / (dof + t * t), 0.5, dof / 2)
    return 0.5 * regularised_beta(dof / (dof + t * t), dof / 2, 0.5)


def f_survival(ratio: float, dof: float, dof_below: float) -> float:
    """Return the probability that F of `dof` and `dof_below` degrees of freedom exceeds ratio >= 0."""
    return regularised_beta(dof_below / (dof_below + dof * ratio), dof_below / 2, dof / 2)


@lru_cache(maxsize=1024)
def t_quantile(p: float, dof: float) -> float:
    """Return the point that Student's t stays below with probability p, 0.5 <= p < 1."""
    assert 0.5 <= p < 1 and dof > 0
    if math.isinf(dof):
        return NormalDist().inv_cdf(p)
    low, high = 0.0, 2.0
    while t_survival(high, dof) > 1 - p:
        low, high = high, 2 * high
    while high - low > 1e-13 * high:
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (middle, high) if t_survival(middle, dof) > 1 - p else (low, middle)
    return 0.5 * (low + high)


def regularised_beta(x: float, a: float, b: float) -> float:
    """Return I_x(a, b), the regularised incomplete beta function, by its continued fraction (Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    # The fraction converges quickly on this side only.
    if x > (a + 1) / (a + b + 2):
        return 1 - regularised_beta(1 - x, b, a)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    tiny = 1e-300
    c, d = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    value = d
    for m in range(1, 10_000):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / ((1 + numerator * d) or tiny)
            c = (1 + numerator / c) or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * value / a


@dataclass(frozen=True, kw_only=True)
class RunVariance:
    """Standard deviation of log run means between runs of one row, and its degrees of freedom.

    Without any row of two runs nothing is known: `deviation` is 0 and `dof` 0. is_uneven: it is pooled over
    rows whose deviations are not one, so a row with enough runs is judged by its own.
    """

    deviation: float
    dof: int
    is_uneven: bool = False


def pooled_spread(rows: Sequence[Sequence[float]]) -> RunVariance:
    """Return the deviation pooled over rows of two runs or more, at least FLOOR. rows: log times by row."""
    sum_of_squares, dof = 0.0, 0
    for row in rows:
        if len(row) >= 2:
            mean = sum(row) / len(row)
            sum_of_squares += sum((value - mean) ** 2 for value in row)
            dof += len(row) - 1
    if dof == 0:
        return RunVariance(deviation=0.0, dof=0)
    return RunVariance(deviation=max(FLOOR, math.sqrt(sum_of_squares / dof)), dof=dof)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The log time of one row. within: of a single run, the standard error of its own interval, relative.

    own: how its runs spread among themselves, if that is known.
    """

    log_time: float
    num_runs: int
    within: float = 0.0
    num_machines: int = 1
    own: RunVariance | None = None

    def spread(self, pooled: RunVariance) -> RunVariance:
        """Return the variance to judge it by: its own, or the pooled."""
        return self.own if pooled.is_uneven and self.own and self.own.dof >= LEAST_OWN_DOF else pooled


@dataclass(frozen=True, kw_only=True)
class Uncertainty:
    """Standard error of a log, with the degrees of freedom of Student's t for it."""

    error: float
    dof: float

    def half_width(self, level: float = LEVEL) -> float:
        """Return half of the two-sided interval at `level`."""
        return self.error * t_quantile(1 - level / 2, self.dof)


def uncertainty(
    samples: Sequence[Sample], spread: RunVariance, *, other_machines: bool = False
) -> Uncertainty:
    """Return that of one row's log time, or of the difference of two.

    Rows of several runs share the pooled deviation, unless it is uneven and they have enough runs for their
    own. A row of one run takes the pooled one too if it is larger than ASSUMED, else this, as known; and so
    the pooled one of fewer degrees of freedom than LEAST_DOF. Its own error within the run comes on top.
    other_machines: the rows are of different instance types, so each without two machines of its own may be
    off by MACHINE.
    """
    seen = spread.deviation > ASSUMED and spread.dof >= LEAST_DOF
    estimated = [sample for sample in samples if sample.num_runs >= 2 or seen]
    known = (
        max(ASSUMED, spread.deviation) ** 2 * (len(samples) - len(estimated))
        + sum(sample.within**2 for sample in samples if sample.num_runs == 1)
        + MACHINE**2 * sum(other_machines and sample.num_machines < 2 for sample in samples)
    )
    return _uncertainty([(sample.num_runs, sample.spread(spread)) for sample in estimated], known)


def _uncertainty(parts: Sequence[tuple[int, RunVariance]], known: float) -> Uncertainty:
    """Return that of the sum of the means of `parts` (number of runs, their variance), with `known` on
    top.

    Welch-Satterthwaite: parts of one and the same spread share its degrees of freedom, and what is known has
    infinitely many and adds nothing below the line.
    """
    # Two rows may have equal spreads of their own, which are two all the same.
    spreads = {id(spread): spread for _, spread in parts}.values()
    variances = [
        (sum(spread.deviation**2 / number for number, of in parts if of is spread), spread.dof)
        for spread in spreads
    ]
    total = known + sum(variance for variance, _ in variances)
    below = sum(variance**2 / dof for variance, dof in variances if variance)
    return Uncertainty(error=math.sqrt(total), dof=total**2 / below if below else math.inf)


def p_value(log_ratio: float, of: Uncertainty) -> float:
    """Return the two-sided probability of a log ratio this far from 0 if there were no difference."""
    return 2 * t_survival(abs(log_ratio) / of.error, of.dof)


def holm_levels(p_values: Sequence[float], level: float = LEVEL) -> list[float]:
    """Return the level of each of `p_values` in Holm's step-down: it is rejected if it is not above that.

    From the smallest on the levels are level/m, level/(m-1), ...; from the first that is not rejected on, all
    keep the level of that one.
    """
    levels = [level] * len(p_values)
    stopped_at = None
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        levels[index] = stopped_at or level / (len(p_values) - rank)
        if stopped_at is None and p_values[index] > levels[index]:
            stopped_at = levels[index]
    return levels


def classify(log_ratio: float, half_width: float) -> str:
    """Return what the interval of a ratio (more is better) says: better, worse, tie or unresolved."""
    low, high = log_ratio - half_width, log_ratio + half_width
    if low > 0:
        return BETTER
    if high < 0:
        return WORSE
    return TIE if low >= math.log(TIE_LOW) and high <= math.log(TIE_HIGH) else UNRESOLVED


def more_runs(
    log_ratio: float,
    samples: tuple[Sample, Sample],
    spread: RunVariance,
    *,
    level: float,
    other_machines: bool,
) -> int | None:
    """Return how many more runs of each row would settle this ratio if it stayed; None if too many.

    Runs of one row are taken to spread as those seen so far; ASSUMED before there are any.
    """
    spread = spread if spread.dof else RunVariance(deviation=ASSUMED, dof=0)
    machines = MACHINE**2 * sum(other_machines and sample.num_machines < 2 for sample in samples)
    for more in range(1, MOST_RUNS_PROPOSED + 1):
        pooled = replace(
            spread, dof=spread.dof + more * sum(sample.spread(spread) is spread for sample in samples)
        )
        parts = [
            (sample.num_runs + more, pooled if of is spread else replace(of, dof=of.dof + more))
            for sample in samples
            for of in (sample.spread(spread),)
        ]
        then = _uncertainty(parts, machines)
        if classify(log_ratio, then.half_width(level)) != UNRESOLVED:
            return more
    return None


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known `values`; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def mark_uneven(spread: RunVariance, rows: Sequence[Sequence[float]]) -> RunVariance:
    """Return `spread`, marked if the rows of a workload vary too unequally for it. rows: log times by row.

    The largest and the smallest deviation are compared by their F ratio, at a level that is shared out over
    all pairs of rows (Bonferroni). Those below FLOOR count as that.
    """
    deviations = [(max(FLOOR, deviation), dof) for deviation, dof in _deviations(rows)]
    if len(deviations) < 2:
        return spread
    (small, few), (large, many) = min(deviations), max(deviations)
    p = f_survival((large / small) ** 2, many, few) * len(deviations) * (len(deviations) - 1)
    return replace(spread, is_uneven=p <= LEVEL)


def uneven_notes(workload: str, spread: RunVariance, rows: Sequence[Sequence[float]]) -> Iterator[str]:
    """Yield a warning if the rows of a workload vary too unequally for one deviation."""
    if spread.is_uneven:
        seen = [deviation for deviation, _ in _deviations(rows)]
        yield (
            f"{workload}: the runs of its rows deviate by {min(seen):.1%} to {max(seen):.1%} from their"
            f" means; rows of {_LEAST_RUNS} runs or more are judged by their own deviations"
        )


def _deviations(rows: Sequence[Sequence[float]]) -> list[tuple[float, int]]:
    """Return deviation and degrees of freedom of the rows with enough runs."""
    return [(statistics.stdev(times), len(times) - 1) for times in rows if len(times) >= _LEAST_RUNS]

"""Student's t, Holm's correction, and verdicts on a difference.

All sizes are of logarithms, so 0.01 is 1%.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import NormalDist

#: Two-sided level for all verdicts of a comparison together.
LEVEL = 0.05
TIE_LOW, TIE_HIGH = 0.98, 1.02
BETTER, WORSE, TIE, UNRESOLVED = "better", "worse", "tie", "unresolved"


def bisect(is_within: Callable[[float], bool], low: float, high: float) -> float:
    """Return where `is_within`, False below some point of low..high, becomes True."""
    for _ in range(60):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (low, middle) if is_within(middle) else (middle, high)
    return 0.5 * (low + high)


def t_survival(t: float, dof: float) -> float:
    """Return the probability that Student's t with `dof` degrees of freedom (inf: normal) exceeds t."""
    if t < 0:
        return 1 - t_survival(-t, dof)
    if math.isinf(dof):
        return NormalDist().cdf(-t)
    if t * t < dof:
        # Use the complement: dof / (dof + t * t) cannot tell a small t from 0.
        return 0.5 - 0.5 * regularised_beta(t * t / (dof + t * t), 0.5, dof / 2)
    return 0.5 * regularised_beta(dof / (dof + t * t), dof / 2, 0.5)


@lru_cache(maxsize=1024)
def t_quantile(p: float, dof: float) -> float:
    """Return the point that Student's t stays below with probability p, 0.5 <= p < 1."""
    assert 0.5 <= p < 1 and dof > 0
    if math.isinf(dof):
        return NormalDist().inv_cdf(p)
    low, high = 0.0, 2.0
    while t_survival(high, dof) > 1 - p:
        low, high = high, 2 * high
    return bisect(lambda t: t_survival(t, dof) <= 1 - p, low, high)


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


def holm_levels(p_values: Sequence[float], level: float = LEVEL) -> list[float]:
    """Return Holm's step-down level of each p-value, which is rejected if it is not above its level.

    From the smallest p-value on, the levels are level/m, level/(m-1), ...; after the first p-value that is
    not rejected, all keep its level.
    """
    levels = [level] * len(p_values)
    stopped_at = None
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        levels[index] = stopped_at or level / (len(p_values) - rank)
        if stopped_at is None and p_values[index] > levels[index]:
            stopped_at = levels[index]
    return levels


@dataclass(frozen=True, kw_only=True)
class Variance:
    """A variance with its degrees of freedom."""

    value: float
    dof: float


def summed(parts: Sequence[Variance]) -> Variance:
    """Return the variance of a sum, with Satterthwaite's degrees of freedom."""
    total = sum(part.value for part in parts)
    return Variance(value=total, dof=total**2 / sum(part.value**2 / part.dof for part in parts))


def half_width(variances: Sequence[Variance], level: float) -> float:
    """Return half the width of the widest two-sided interval by `variances`."""
    return max(t_quantile(1 - level / 2, known.dof) * math.sqrt(known.value) for known in variances)


@dataclass(frozen=True, kw_only=True)
class OnHosts:
    """How a difference between two rows varies from host to host."""

    variance: Variance = Variance(value=0.0, dof=1.0)
    num_hosts: int = 1
    # The share of that variance in an estimate by these hosts: 1 / H with equal rounds on each of H.
    share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """An estimate of a difference, with its standard error, degrees of freedom and weight."""

    value: float
    error: float  # by the scatter of runs
    dof: float
    weight: float = 1.0
    # Its rounds, and the degrees of freedom that one more would add; 0 if more would not help.
    num_rounds: int = 0
    dof_per_round: int = 0
    # With one host, the estimate applies to that host only.
    hosts: OnHosts = OnHosts()
    # The correlation of noise between consecutive rounds; the error allows for it.
    carried: float = 0.0

    @cached_property
    def variances(self) -> tuple[Variance, ...]:
        """The variance by the scatter of runs, and for several hosts also with the variance between them.

        A part adds degrees of freedom, which lower Student's quantile, sometimes by more than the sum grows,
        so the wider interval counts.
        """
        of_runs, hosts = Variance(value=self.error**2, dof=self.dof), self.hosts
        if not hosts.variance.value:
            return (of_runs,)
        of_hosts = replace(hosts.variance, value=hosts.share * hosts.variance.value)
        return of_runs, summed([of_runs, of_hosts])

    def p_beyond(self, x: float) -> float:
        """Return the one-sided p-value for a value that exceeds a limit by x."""
        return max(t_survival(x / math.sqrt(known.value), known.dof) for known in self.variances)

    def reach(self, level: float) -> float:
        """Return half the width of the two-sided interval at `level`."""
        return half_width(self.variances, level)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How much faster a row is than another, in log speed, by one estimate or several with weights."""

    estimates: tuple[Contrast, ...]
    # Both limits widen by this because one of the two was still drifting.
    drift: float = 0.0
    # Whether the error includes differences between machines and sessions, since the rows share no round.
    is_across_hosts: bool = False

    @property
    def value(self) -> float:
        return sum(part.weight * part.value for part in self.estimates)

    @property
    def num_hosts(self) -> int:
        """The number of hosts with common or linking rounds; 1 without such rounds."""
        return max(part.hosts.num_hosts for part in self.estimates)

    @property
    def carried(self) -> float:
        """The correlation of noise between consecutive rounds; 0 if none was seen."""
        return max(part.carried for part in self.estimates)

    def plus(self, offset: float) -> "Difference":
        """Return the difference plus a constant, such as the log ratio of two prices."""
        parts = [replace(part, value=part.value + offset) for part in self.estimates]
        return replace(self, estimates=tuple(parts))

    def p_above(self, x: float) -> float:
        """Return the one-sided p-value of the difference being above x."""
        return self._p(x + self.drift, 1)

    def p_below(self, x: float) -> float:
        """Return the one-sided p-value of the difference being below x."""
        return self._p(x - self.drift, -1)

    def p_differs(self) -> float:
        """Return the two-sided p-value of a difference."""
        return min(1.0, 2 * min(self.p_above(0.0), self.p_below(0.0)))

    def limits(self, level: float) -> tuple[float, float]:
        """Return the two-sided interval at `level`."""
        reach = [part.reach(level) for part in self.estimates]
        lows = [part.value - by for part, by in zip(self.estimates, reach, strict=True)]
        highs = [part.value + by for part, by in zip(self.estimates, reach, strict=True)]
        low = bisect(lambda x: self._p(x, 1) > level / 2, min(lows), max(lows))
        high = bisect(lambda x: self._p(x, -1) <= level / 2, min(highs), max(highs))
        return low - self.drift, high + self.drift

    def verdict(self, level: float) -> str:
        """Return better, worse, a tie within 2%, or unresolved, at Holm's `level` of the row."""
        if self.p_differs() <= level:
            return BETTER if self.p_above(0.0) < 0.5 else WORSE
        return TIE if self.is_tie(level) else UNRESOLVED

    def is_tie(self, level: float) -> bool:
        """Return whether two one-sided tests place the difference within 2%."""
        return max(self.p_above(math.log(TIE_LOW)), self.p_below(math.log(TIE_HIGH))) <= level

    def _p(self, x: float, sign: int) -> float:
        return sum(part.weight * part.p_beyond(sign * (part.value - x)) for part in self.estimates)


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known `values`; None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None

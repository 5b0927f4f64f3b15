"""How much faster one row is than another, and how surely.

    1  Every completed run is one number, the log of its mean time per sample.
    2  Rows are compared within blocks, the rounds of one session on one host, by least squares: what a round
       does to all rows alike cancels, and the error is how much the differences vary from round to round.
    3  All rows share that scatter, but for a row whose own runs say that it is noisier: the row is judged by
       its own rounds, in proportion to how likely that is.
    4  Rows that share no round are compared by the means of their hosts, which differ by themselves.

All sizes are of logarithms, so 0.01 is 1%. tests/benchmarks/verdicts.py prints the error rates and the power
of these rules; docs/method.md says where the constants come from.
"""

import math
import random
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, stdev

from fastlaunch.analysis.statistics import (
    LEVEL,
    TIE_LOW,
    Difference,
    Estimate,
    t_quantile,
)

#: The least deviation between runs: a few may lie close by chance. 0.08% is the least of the shipped records.
FLOOR = 0.001
#: What machines of one type deviate by, and the degrees of freedom that this counts for beside what was seen.
MACHINE, MACHINE_DOF = 0.017, 5
#: A noisier row deviates by so many times what the others do, each as likely.
_TIMES_NOISIER = (2, 4, 8, 16)
#: How likely a row is noisier, before its runs are looked at. One of two runs hardly shows it.
_NOISIER, _NOISIER_OF_TWO = 0.3, 0.5
#: A row that is noisier with a greater probability leaves the common scatter.
LEAVES = 0.8
#: A row whose last half differs from the mean by so much more than the other's is still changing.
_DRIFT, _MIN_DRIFT_BLOCKS = 0.002, 3
#: Of simulated continuations, the share that has to settle, and the most rounds worth proposing.
SETTLES, MAX_ROUNDS = 0.8, 50
_NUM_DRAWS = 1000


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """A completed run, of a row that the caller numbers."""

    row: int
    log_time: float  # of the mean seconds per sample
    host: Hashable  # of several nodes, all of them
    block: Hashable | None = None  # the round, of one session on one host; None if it is not known
    session: str | None = None  # None if it is not known
    round: int | None = None  # of the session, from 1; None if it is not known
    max_rounds: int | None = None  # of a session that planned to look after each of its rounds
    late: float | None = None  # log_time of the last half of its steps alone, less log_time


class Differences:
    """The differences between rows, by all of their runs."""

    def __init__(self, runs: Iterable[RunTime]) -> None:
        self._of_row: dict[int, list[RunTime]] = defaultdict(list)
        blocks: dict[Hashable, list[RunTime]] = defaultdict(list)
        for run in runs:
            self._of_row[run.row].append(run)
            if run.block is not None:
                blocks[run.block].append(run)
        self._hosts_of_row: dict[int, _Hosts] = {}
        self._blocks = [block for block in blocks.values() if len({run.row for run in block}) > 1]
        scatters = [_Scatter(self._blocks, rows) for rows in _linked(self._blocks)]
        self._scatter = {row: scatter for scatter in scatters for row in scatter.rows}

    def log_ratio(self, row: int, base: int) -> float:
        """Return how much faster `row` is than `base`, whether or not anything is known of their scatter."""
        if self.is_linked(row, base):
            return self._scatter[row].everything.speed(row, base)
        return self._hosts(base).mean - self._hosts(row).mean

    def is_linked(self, row: int, base: int) -> bool:
        """Return whether the two ran in rounds together, or each with rows that did."""
        return row in self._scatter and self._scatter[row] is self._scatter.get(base)

    def noise(self, row: int) -> float:
        """Return how likely it is that the row's runs vary more than those of the rows linked to it."""
        return (self._scatter[row].noise[row] or 0.0) if row in self._scatter else 0.0

    def deviations(self, row: int) -> tuple[float, float]:
        """Return by how much the row's runs vary, and by how much those of the rows linked to it do.

        Only of a row whose `noise` is above 0.
        """
        return self._scatter[row].deviations[row]

    def between(self, row: int, base: int) -> Difference | None:
        """Return how much faster `row` is than `base`; None if the scatter of one of them is unknown."""
        return self._in_rounds(row, base) if self.is_linked(row, base) else self._across_hosts(row, base)

    def _in_rounds(self, row: int, base: int) -> Difference | None:
        scatter = self._scatter[row]
        ours, theirs = scatter.noise[row], scatter.noise[base]
        if ours is None or theirs is None:
            return None
        shared = [block for block in self._blocks if {row, base} <= {run.row for run in block}]
        own = _paired([_mean(block, base) - _mean(block, row) for block in shared])
        common = scatter.estimate(row, base)
        weight = (1 - ours) * (1 - theirs) if own and common else float(common is not None)
        parts = [(common, weight), (own, 1 - weight)]
        estimates = [replace(each, weight=share) for each, share in parts if each and share]
        if not estimates:
            return None
        lates = [_mean_late(block, row) - _mean_late(block, base) for block in shared]
        return Difference(estimates=tuple(estimates), drift=_drift(lates))

    def _across_hosts(self, row: int, base: int) -> Difference | None:
        sides = [self._hosts(row), self._hosts(base)]
        if any(side.num_runs < 2 for side in sides):
            return None
        is_apart = sides[0].names != sides[1].names
        # Variances, each with its degrees of freedom: Welch and Satterthwaite.
        parts: list[tuple[float, float]] = [side.within for side in sides if side.within]
        if is_apart:
            variance, dof = self._between_machines
            parts.append((variance * sum(1 / len(side.means) for side in sides), dof))
        total = sum(variance for variance, _ in parts)
        dof = total**2 / sum(variance**2 / dof for variance, dof in parts)
        estimate = Estimate(value=sides[1].mean - sides[0].mean, error=math.sqrt(total), dof=dof)
        return Difference(estimates=(estimate,), is_across_hosts=is_apart)

    def _hosts(self, row: int) -> "_Hosts":
        if row not in self._hosts_of_row:
            self._hosts_of_row[row] = _Hosts.of(self._of_row[row])
        return self._hosts_of_row[row]

    @cached_property
    def _between_machines(self) -> tuple[float, float]:
        """The variance between machines and its degrees of freedom, by what is known and was seen."""
        squares, dof = MACHINE_DOF * MACHINE**2, float(MACHINE_DOF)
        for row in self._of_row:
            hosts = self._hosts(row)
            squares += sum((mean - hosts.mean) ** 2 for mean in hosts.means)
            dof += len(hosts.means) - 1
        return squares / dof, dof


def rounds_to_settle(difference: Difference, level: float) -> tuple[int, float] | None:
    """Return how many more rounds settle the verdict in 80% of continuations, and the share that they do.

    MAX_ROUNDS and a smaller share where none does; None for rows that share no rounds. A continuation draws
    the true difference and scatter from what was seen, and then the rounds to come.
    """
    parts = difference.estimates
    if not all(part.dof_per_round for part in parts):
        return None
    draws = random.Random(0)
    truths = []
    for part in draws.choices(parts, weights=[part.weight for part in parts], k=_NUM_DRAWS):
        seen = part.error**2 * part.num_rounds
        variance = seen / _mean_square(draws, part.dof)
        truths.append((part, seen, variance, draws.gauss(part.value, math.sqrt(variance / part.num_rounds))))

    def share(more: int) -> float:
        num_settled = 0
        for part, seen, variance, value in truths:
            num_rounds, new = part.num_rounds + more, more * part.dof_per_round
            dof = part.dof + new
            mean = draws.gauss(value, math.sqrt(variance / more))
            mean = (part.num_rounds * part.value + more * mean) / num_rounds
            squares = seen * part.dof + variance * new * _mean_square(draws, new)
            error = max(FLOOR, math.sqrt(squares / dof)) / math.sqrt(num_rounds)
            beyond = abs(mean) - difference.drift - error * t_quantile(1 - level / 2, dof)
            within = abs(mean) + difference.drift + error * t_quantile(1 - level, dof)
            num_settled += beyond > 0 or within < -math.log(TIE_LOW)
        return num_settled / _NUM_DRAWS

    low, high = 0, MAX_ROUNDS
    if (of_most := share(high)) < SETTLES:
        return high, of_most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if share(middle) >= SETTLES else (middle, high)
    return high, SETTLES


def _mean_square(draws: random.Random, dof: float) -> float:
    """Draw a mean of so many squares of standard normal variables."""
    return draws.gammavariate(dof / 2, 2 / dof)


class _Scatter:
    """The scatter that linked rows share, and which of them vary more."""

    def __init__(self, blocks: Sequence[Sequence[RunTime]], rows: Collection[int]) -> None:
        self.rows = frozenset(rows)
        self.everything = _LeastSquares(blocks, self.rows)
        # None for a row whose runs add no degree of freedom, as a single one.
        self.noise: dict[int, float | None] = {}
        # Of the row's runs, and of the others' that the noise was judged by.
        self.deviations: dict[int, tuple[float, float]] = {}
        self._shared = shared = set(self.rows)
        while True:
            self._fit = fit = _LeastSquares(blocks, shared)
            others = {row: _LeastSquares(blocks, shared - {row}) for row in shared}
            noise = {row: _noise(fit, others[row]) for row in shared}
            self.noise |= noise
            self.deviations |= {row: _deviations(fit, others[row]) for row in shared if noise[row]}
            noisiest = max(shared, key=lambda row: noise[row] or 0.0)
            if len(shared) <= 2 or (noise[noisiest] or 0.0) <= LEAVES:
                break
            self.noise[noisiest] = 1.0
            shared.remove(noisiest)

    def estimate(self, row: int, base: int) -> Estimate | None:
        """Return the difference by the common scatter; None if one of the two has left it."""
        fit = self._fit
        if not fit.dof or not fit.links(row, base):
            return None
        deviation = max(FLOOR, math.sqrt(fit.squares / fit.dof))
        error = deviation * math.sqrt(fit.variance_factor(row, base))
        return Estimate(
            value=fit.speed(row, base),
            error=error,
            dof=fit.dof,
            # As many complete rounds have this error.
            num_rounds=max(1, round(2 / fit.variance_factor(row, base))),
            dof_per_round=len(self._shared) - 1,
        )


class _LeastSquares:
    """Log times as the sum of a row's and a block's effect, over the runs of some rows.

    squares: the residual sum of squares, with `dof` degrees of freedom.
    """

    def __init__(self, blocks: Sequence[Sequence[RunTime]], rows: Collection[int]) -> None:
        kept = [part for block in blocks if (part := [run for run in block if run.row in rows])]
        groups = _linked(kept)
        self._group = {row: number for number, group in enumerate(groups) for row in group}
        # Times count from one row of each group; blocks are taken out by their means.
        free = [row for group in groups for row in sorted(group)[1:]]
        self._place = {row: place for place, row in enumerate(free)}
        normal = [[0.0] * len(free) for _ in free]
        moments = [0.0] * len(free)
        squares = 0.0
        for block in kept:
            mean = fmean(run.log_time for run in block)
            places = [self._place.get(run.row) for run in block]
            for run, i in zip(block, places, strict=True):
                squares += (run.log_time - mean) ** 2
                if i is not None:
                    moments[i] += run.log_time - mean
                    normal[i][i] += 1
                    for j in places:
                        if j is not None:
                            normal[i][j] -= 1 / len(block)
        self._inverse = _inverse(normal)
        self._times = [_dot(line, moments) for line in self._inverse]
        self.squares = max(0.0, squares - _dot(self._times, moments))
        self.dof = sum(map(len, kept)) - len(kept) - len(free)

    def links(self, row: int, other: int) -> bool:
        return row in self._group and self._group[row] == self._group.get(other)

    def speed(self, row: int, base: int) -> float:
        """Return the log speed of `row` over that of `base`, which is linked to it."""
        ours, theirs = (self._times[at] if at is not None else 0.0 for at in self._at(row, base))
        return theirs - ours

    def variance_factor(self, row: int, base: int) -> float:
        """Return the variance of that in units of a run's: 2 / K for K complete blocks."""
        i, j = self._at(row, base)
        own = sum(self._inverse[at][at] for at in (i, j) if at is not None)
        return own - (2 * self._inverse[i][j] if i is not None and j is not None else 0.0)

    def _at(self, row: int, base: int) -> tuple[int | None, int | None]:
        return self._place.get(row), self._place.get(base)


def _noise(every: _LeastSquares, others: _LeastSquares) -> float | None:
    """Return how likely a row varies more than the others, by the fits with and without it.

    The ratio of its squares to theirs is F with as many degrees of freedom each where it varies alike, and
    k^2 times that where its deviation is k times theirs. 0 where no others are left to tell by.
    """
    dof, of_others = every.dof - others.dof, others.dof
    if not dof:
        return None
    if not of_others:
        return 0.0
    own_deviation, deviation = _deviations(every, others)
    ratio = (own_deviation / deviation) ** 2
    expected = 1 + dof * ratio / of_others
    likelihoods = [
        k**-dof * (expected / (1 + dof * ratio / (k * k * of_others))) ** ((dof + of_others) / 2)
        for k in _TIMES_NOISIER
    ]
    before = _NOISIER_OF_TWO if dof == 1 else _NOISIER
    now = before * fmean(likelihoods)
    return now / (1 - before + now)


def _deviations(every: _LeastSquares, others: _LeastSquares) -> tuple[float, float]:
    """Return by how much a row's runs vary, and the others', by the fits with and without it."""
    own = (every.squares - others.squares) / (every.dof - others.dof)
    return max(FLOOR, math.sqrt(max(0.0, own))), max(FLOOR, math.sqrt(others.squares / others.dof))


def _paired(speeds: Sequence[float]) -> Estimate | None:
    """Return the difference by two rows' own rounds; None for fewer than two."""
    if len(speeds) < 2:
        return None
    deviation = max(math.sqrt(2) * FLOOR, stdev(speeds))
    return Estimate(
        value=fmean(speeds),
        error=deviation / math.sqrt(len(speeds)),
        dof=len(speeds) - 1,
        num_rounds=len(speeds),
        dof_per_round=1,
    )


def _drift(lates: Sequence[float]) -> float:
    """Return how far limits move out where one row was still changing against the other; 0 if none was."""
    known = [late for late in lates if not math.isnan(late)]
    if len(known) < _MIN_DRIFT_BLOCKS or abs(fmean(known)) <= _DRIFT:
        return 0.0
    error = stdev(known) / math.sqrt(len(known))
    is_sure = abs(fmean(known)) > error * t_quantile(1 - LEVEL / 2, len(known) - 1)
    return 2 * abs(fmean(known)) if is_sure else 0.0


def _linked(blocks: Iterable[Iterable[RunTime]]) -> list[set[int]]:
    """Return the sets of rows that blocks link."""
    groups: list[set[int]] = []
    for block in blocks:
        rows = {run.row for run in block}
        for group in [group for group in groups if group & rows]:
            groups.remove(group)
            rows |= group
        groups.append(rows)
    return groups


def _inverse(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the inverse of a symmetric positive definite matrix, by Gauss and Jordan."""
    size = len(matrix)
    lines = [[*line, *(float(i == j) for j in range(size))] for i, line in enumerate(matrix)]
    for i in range(size):
        pivot = lines[i][i]
        lines[i] = [value / pivot for value in lines[i]]
        for k in range(size):
            if k != i and (factor := lines[k][i]):
                lines[k] = [value - factor * at for value, at in zip(lines[k], lines[i], strict=True)]
    return [line[size:] for line in lines]


def _dot(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return sum(one * other for one, other in zip(ours, theirs, strict=True))


def _mean(block: Iterable[RunTime], row: int) -> float:
    return fmean(run.log_time for run in block if run.row == row)


def _mean_late(block: Iterable[RunTime], row: int) -> float:
    """Return the mean of `late` over the row's runs in the block; NaN if one is not known."""
    lates = [run.late for run in block if run.row == row]
    return fmean(math.nan if late is None else late for late in lates)


@dataclass(frozen=True, kw_only=True)
class _Hosts:
    """The runs of a row by the host that they ran on."""

    names: frozenset[Hashable]
    means: tuple[float, ...]  # of the logarithms of their times, by host
    num_runs: int
    # The variance of `mean` by the scatter within hosts, and its degrees of freedom; None where each host has
    # one run: how the hosts differ tells of it then.
    within: tuple[float, int] | None

    @classmethod
    def of(cls, runs: Sequence[RunTime]) -> "_Hosts":
        hosts: dict[Hashable, list[float]] = defaultdict(list)
        for run in runs:
            hosts[run.host].append(run.log_time)
        means = {host: fmean(times) for host, times in hosts.items()}
        within, dof = None, len(runs) - len(hosts)
        if dof:
            squares = sum((time - means[host]) ** 2 for host, times in hosts.items() for time in times)
            variance = max(FLOOR**2, squares / dof)
            within = (variance * sum(1 / len(times) for times in hosts.values()) / len(hosts) ** 2, dof)
        return cls(names=frozenset(hosts), means=tuple(means.values()), num_runs=len(runs), within=within)

    @cached_property
    def mean(self) -> float:
        """The mean of the hosts' means."""
        return fmean(self.means)

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
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from fastlaunch.analysis.statistics import (
    LEVEL,
    TIE_LOW,
    Difference,
    Estimate,
    t_quantile,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

#: The runs of a block by their rows.
Block = Mapping[int, Sequence["RunTime"]]

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
        blocks: dict[Hashable, dict[int, list[RunTime]]] = defaultdict(lambda: defaultdict(list))
        for run in runs:
            self._of_row[run.row].append(run)
            if run.block is not None:
                blocks[run.block][run.row].append(run)
        self._hosts_of_row: dict[int, _Hosts] = {}
        self._blocks = [block for block in blocks.values() if len(block) > 1]
        groups = _linked(self._blocks)
        self._scatter: dict[int, _Scatter] = {}
        for rows in groups:
            scatter = _Scatter([block for block in self._blocks if rows & block.keys()])
            self._scatter |= dict.fromkeys(rows, scatter)

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
        shared = [block for block in self._blocks if row in block and base in block]
        own = _paired([_mean(block[base]) - _mean(block[row]) for block in shared])
        common = scatter.estimate(row, base)
        weight = (1 - ours) * (1 - theirs) if own and common else float(common is not None)
        parts = [(common, weight), (own, 1 - weight)]
        estimates = [replace(each, weight=share) for each, share in parts if each and share]
        if not estimates:
            return None
        lates = [_mean_late(block[row]) - _mean_late(block[base]) for block in shared]
        return Difference(estimates=tuple(estimates), drift=_drift(lates))

    def _across_hosts(self, row: int, base: int) -> Difference | None:
        sides = [self._hosts(row), self._hosts(base)]
        if any(side.num_runs < 2 for side in sides):
            return None
        is_apart = sides[0].means.keys() != sides[1].means.keys()
        if not is_apart and any(side.within is None for side in sides):
            own = _paired([sides[1].means[host] - mean for host, mean in sides[0].means.items()])
            return Difference(estimates=(own,)) if own else None
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
            squares += sum((mean - hosts.mean) ** 2 for mean in hosts.means.values())
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

    def __init__(self, blocks: Sequence[Block]) -> None:
        table = _Table(blocks)
        shared = set(table.rows)
        # None for a row whose runs add no degree of freedom, as a single one.
        self.noise: dict[int, float | None] = {}
        # Of the row's runs, and of the others' that the noise was judged by.
        self.deviations: dict[int, tuple[float, float]] = {}
        while True:
            every = table.residual(shared)
            others = {row: table.residual(shared - {row}) for row in shared}
            noise = {row: _noise(every, others[row]) for row in shared}
            self.noise |= noise
            self.deviations |= {row: _deviations(every, others[row]) for row in shared if noise[row]}
            noisiest = max(shared, key=lambda row: noise[row] or 0.0)
            if len(shared) <= 2 or (noise[noisiest] or 0.0) <= LEAVES:
                break
            self.noise[noisiest] = 1.0
            shared.remove(noisiest)
        self._residual = every
        self.everything = table.effects(table.rows)
        self._shared = table.effects(shared)

    def estimate(self, row: int, base: int) -> Estimate | None:
        """Return the difference by the common scatter; None if one of the two has left it."""
        residual, shared = self._residual, self._shared
        if not residual.dof or not shared.links(row, base):
            return None
        factor = shared.variance_factor(row, base)
        return Estimate(
            value=shared.speed(row, base),
            error=residual.deviation * math.sqrt(factor),
            dof=residual.dof,
            # As many complete rounds have this error.
            num_rounds=max(1, round(2 / factor)),
            dof_per_round=len(shared.places) - 1,
        )


@dataclass(frozen=True, kw_only=True)
class _Residual:
    """A residual sum of squares, and its degrees of freedom."""

    squares: float
    dof: int

    @property
    def deviation(self) -> float:
        """By how much runs vary."""
        return max(FLOOR, math.sqrt(max(0.0, self.squares) / self.dof))


class _Table:
    """Log times as the sum of a row's and a block's effect, over the runs of linked rows.

    counts, sums: (rows, blocks), the runs and the sum of their times, less the means of block and row: what
    is left is as small as the scatter, and keeps its digits.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        import numpy as np

        self.rows = sorted(set[int]().union(*blocks))
        places = {row: place for place, row in enumerate(self.rows)}
        runs = [
            (places[row], at, run.log_time)
            for at, block in enumerate(blocks)
            for row, own in block.items()
            for run in own
        ]
        of_row, of_block, times = (np.array(column) for column in zip(*runs, strict=True))
        times -= _means(of_block, times)[of_block]
        self._means = _means(of_row, times)
        times -= self._means[of_row]
        self._blocks = blocks
        self._squares = np.bincount(of_row, times**2)
        self._counts, self._sums = np.zeros((2, len(self.rows), len(blocks)))
        np.add.at(self._counts, (of_row, of_block), 1)
        np.add.at(self._sums, (of_row, of_block), times)

    def residual(self, rows: Collection[int]) -> _Residual:
        """Return what least squares leave of the times of some rows."""
        kept, counts, sums = self._of(rows)
        # Either way it is the same fit; the fewer lines there are, the sooner it is made.
        fit = _LeastSquares(counts, sums) if len(counts) < len(counts.T) else _LeastSquares(counts.T, sums.T)
        squares = self._squares[kept].sum() - fit.explained
        return _Residual(squares=float(squares), dof=round(counts.sum()) - fit.rank)

    def effects(self, rows: Collection[int]) -> "_Effects":
        """Return the effects of some rows, by least squares."""
        kept, counts, sums = self._of(rows)
        groups = _linked([row for row in block if row in rows] for block in self._blocks)
        return _Effects(
            places={row: place for place, row in enumerate(row for row in self.rows if row in rows)},
            group={row: number for number, group in enumerate(groups) for row in group},
            means=self._means[kept],
            fit=_LeastSquares(counts, sums),
        )

    def _of(self, rows: Collection[int]) -> tuple["NDArray[np.bool_]", "Array", "Array"]:
        """Return where the rows stand, and their counts and sums in the blocks that they ran in."""
        import numpy as np

        kept = np.array([row in rows for row in self.rows])
        counts = self._counts[kept]
        ran = counts.any(0)
        return kept, counts[:, ran], self._sums[kept][:, ran]


class _LeastSquares:
    """The effects of the lines of `counts` and `sums`, and of their columns, to which the sums add up.

    inverse: (lines, lines), of the normal matrix of the lines' effects, as far as it has one: the lines of
    each linked group have a constant to choose. explained: of the squares, by all of the effects. rank: their
    number, less those constants.
    """

    def __init__(self, counts: "Array", sums: "Array") -> None:
        import numpy as np

        sizes, totals = counts.sum(0), sums.sum(0)
        normal = np.diag(counts.sum(1)) - counts / sizes @ counts.T
        values, vectors = np.linalg.eigh(normal)
        free = values > 1e-9 * counts.sum(1).max()
        self.inverse = vectors[:, free] / values[free] @ vectors[:, free].T
        moments = sums.sum(1) - counts @ (totals / sizes)
        self.effects = self.inverse @ moments
        self.explained = float(totals**2 @ (1 / sizes) + self.effects @ moments)
        self.rank = len(sizes) + int(free.sum())


@dataclass(frozen=True, kw_only=True)
class _Effects:
    """The effects of rows on their log times."""

    places: Mapping[int, int]  # of the rows, in `fit`
    group: Mapping[int, int]  # of linked rows, by row
    means: "Array"  # of the rows, which the times of `fit` are less
    fit: _LeastSquares

    def links(self, row: int, other: int) -> bool:
        return row in self.group and self.group[row] == self.group.get(other)

    def speed(self, row: int, base: int) -> float:
        """Return the log speed of `row` over that of `base`, which is linked to it."""
        times, ours, theirs = self.means + self.fit.effects, self.places[row], self.places[base]
        return float(times[theirs] - times[ours])

    def variance_factor(self, row: int, base: int) -> float:
        """Return the variance of that in units of a run's: 2 / K for K complete blocks."""
        inverse, i, j = self.fit.inverse, self.places[row], self.places[base]
        return float(inverse[i, i] + inverse[j, j] - 2 * inverse[i, j])


def _means(numbers: "NDArray[np.int64]", values: "Array") -> "Array":
    """Return the mean of the values of each number 0, 1, ..."""
    import numpy as np

    return np.bincount(numbers, values) / np.bincount(numbers)


def _noise(every: _Residual, others: _Residual) -> float | None:
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
    ratio = dof * (own_deviation / deviation) ** 2 / of_others
    # In logarithms: the powers overflow at a few hundred degrees of freedom.
    likelihoods = [
        -dof * math.log(k) - (dof + of_others) / 2 * math.log1p(ratio / (k * k)) for k in (1, *_TIMES_NOISIER)
    ]
    before = _NOISIER_OF_TWO if dof == 1 else _NOISIER
    alike, *noisier = (math.exp(each - max(likelihoods)) for each in likelihoods)
    now = before * fmean(noisier)
    return now / ((1 - before) * alike + now)


def _deviations(every: _Residual, others: _Residual) -> tuple[float, float]:
    """Return by how much a row's runs vary, and the others', by the fits with and without it."""
    own = _Residual(squares=every.squares - others.squares, dof=every.dof - others.dof)
    return own.deviation, others.deviation


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


def _linked(blocks: Iterable[Iterable[int]]) -> list[set[int]]:
    """Return the sets of rows that blocks, each of some rows, link."""
    groups: list[set[int]] = []
    for block in blocks:
        rows = set(block)
        for group in [group for group in groups if group & rows]:
            groups.remove(group)
            rows |= group
        groups.append(rows)
    return groups


def _mean(runs: Iterable[RunTime]) -> float:
    return fmean(run.log_time for run in runs)


def _mean_late(runs: Iterable[RunTime]) -> float:
    """Return the mean of `late`; NaN if one is not known."""
    return fmean(math.nan if run.late is None else run.late for run in runs)


@dataclass(frozen=True, kw_only=True)
class _Hosts:
    """The runs of a row by the host that they ran on."""

    means: Mapping[Hashable, float]  # of the logarithms of their times, by host
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
        return cls(means=means, num_runs=len(runs), within=within)

    @cached_property
    def mean(self) -> float:
        """The mean of the hosts' means."""
        return fmean(self.means.values())

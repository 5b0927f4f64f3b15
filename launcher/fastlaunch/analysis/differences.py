"""Estimate how much faster one row is than another, with limits.

    1  Every completed run is one number, the log of its mean time per sample.
    2  Rows are compared within blocks (the rounds of one session on one host) by least squares: an effect
       of the round on all rows cancels, and the error is how much the differences vary between rounds.
    3  All rows share that scatter, except a row whose own runs show more noise: it is judged by its own
       rounds, weighted by the probability that it is noisier. If the other row is missing from such a round,
       its time follows from those of the rows that share the scatter.
    4  If a row's noise carries over from round to round, its rounds count as fewer.
    5  With rounds on several hosts, the error includes the difference's variation between hosts.
    6  Rows that share no round are compared by the means of their hosts; the error includes the variation
       between hosts.

All sizes are of logarithms, so 0.01 is 1%. tests/benchmarks/verdicts.py prints the error rates and the power
of these rules; docs/method.md says where the constants come from.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from fastlaunch.analysis.statistics import (
    LEVEL,
    TIE_LOW,
    Contrast,
    Difference,
    OnHosts,
    Variance,
    summed,
    t_quantile,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

#: The least deviation between runs, since a few may agree by chance. The shipped records have 0.08% or more.
FLOOR = 0.001
#: The deviation between machines of one type, and its weight in degrees of freedom beside observations.
MACHINE, MACHINE_DOF = 0.017, 5
#: The deviation between runs on a machine before any were repeated, and its weight.
SCATTER, SCATTER_DOF = 0.015, 10
#: The same for the ratio of two rows with common rounds. The shipped runs show 0.15%, at most 0.4%; with
#: 0.6%, few rows that vary by 0.5% from host to host are called different.
ROW_ON_HOST, ROW_ON_HOST_DOF = 0.006, 5
#: Possible ratios of a noisier row's deviation to the others', all equally likely.
_TIMES_NOISIER = (2, 4, 8, 16)
#: The prior probability that a row is noisier. With two runs, a row hardly shows it.
_NOISIER, _NOISIER_OF_TWO = 0.3, 0.5
#: Above this probability, a noisier row leaves the common scatter.
LEAVES = 0.8
#: A row is still changing if its last half departs from its mean by this much more than the other row's.
_DRIFT, _MIN_DRIFT_BLOCKS = 0.002, 3
#: Fewer rounds on a host do not show whether noise carries over from one to the next. It does if chance alone
#: would show such a correlation in at most one case in ten; the second number is the normal quantile.
_MIN_CARRIED, _CARRIED_QUANTILE, _MOST_CARRIED = 6, 1.28, 0.9
#: The share of simulated continuations that has to settle, and the most rounds worth proposing.
SETTLES, MAX_ROUNDS = 0.8, 50
_NUM_DRAWS = 1000


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """A completed run of a row; the caller numbers the rows."""

    row: int
    log_time: float  # of the mean seconds per sample
    host: Hashable  # of a session; all its hosts if it has several nodes
    machine: Hashable = None  # shared by the hosts of several sessions; None to use the host
    block: Hashable | None = None  # a round of one session on one host; None if unknown
    session: str | None = None  # None if unknown
    round: int | None = None  # of the session, from 1; None if unknown
    max_rounds: int | None = None  # of a session that planned to look after each of its rounds
    late: float | None = None  # log_time of the last half of its steps alone, less log_time


class Block(dict[int, list[RunTime]]):
    """The runs of a round of one session on one host, by row.

    It does not change any more once one of its figures was asked for, and every look at the runs uses them.
    """

    @cached_property
    def means(self) -> Mapping[int, float]:
        """The mean log time of each row."""
        return {row: fmean(run.log_time for run in runs) for row, runs in self.items()}

    @cached_property
    def lates(self) -> Mapping[int, float]:
        """The mean of each row's `late`; NaN if a value is unknown."""
        return {
            row: fmean(math.nan if run.late is None else run.late for run in runs)
            for row, runs in self.items()
        }

    @cached_property
    def columns(self) -> tuple["NDArray[np.int64]", "Array"]:
        """The row and the log time of each run."""
        import numpy as np

        rows = np.repeat(np.array([*self]), [*map(len, self.values())])
        return rows, np.array([run.log_time for runs in self.values() for run in runs])

    @cached_property
    def first(self) -> RunTime:
        return next(iter(self.values()))[0]

    @cached_property
    def host(self) -> Hashable:
        return self.first.host

    @cached_property
    def machine(self) -> Hashable:
        return self.host if self.first.machine is None else self.first.machine


def blocks_of(runs: Iterable[RunTime]) -> dict[Hashable, Block]:
    """Return the runs in their blocks, without those whose block is unknown."""
    blocks: dict[Hashable, Block] = defaultdict(Block)
    for run in runs:
        if run.block is not None:
            blocks[run.block].setdefault(run.row, []).append(run)
    return blocks


class Differences:
    """The differences between rows, from all their runs, in speed or in samples per dollar."""

    def __init__(
        self,
        runs: Sequence[RunTime],
        usd: Mapping[int, float] | None = None,
        blocks: Iterable[Block] | None = None,
    ) -> None:
        """usd: hourly cost of the machines, for rows with a price. blocks: of `runs`, if they are at hand."""
        self._usd = usd or {}
        self._of_row: dict[int, list[RunTime]] = defaultdict(list)
        for run in runs:
            self._of_row[run.row].append(run)
        self._hosts_of_row: dict[int, _Hosts] = {}
        linking = [block for block in blocks or blocks_of(runs).values() if len(block) > 1]
        self._blocks = sorted(linking, key=lambda block: block.first.round or 0)
        groups = _linked(self._blocks)
        self._scatter: dict[int, _Scatter] = {}
        for rows in groups:
            scatter = _Scatter([block for block in self._blocks if rows & block.keys()])
            self._scatter |= dict.fromkeys(rows, scatter)

    def log_ratio(self, row: int, base: int) -> float:
        """Return how far `row` is ahead of `base`, even if their scatter is unknown."""
        if self.is_linked(row, base):
            speed = self._scatter[row].everything.speed(row, base)
        else:
            speed = self._hosts(base).mean - self._hosts(row).mean
        return speed + self.by_price(row, base)

    def by_price(self, row: int, base: int) -> float:
        """Return the gain or loss of `row` by its price; 0 if either row has no price."""
        usd = self._usd
        return math.log(usd[base] / usd[row]) if row in usd and base in usd else 0.0

    def is_linked(self, row: int, base: int) -> bool:
        """Return whether the two shared rounds, directly or through other rows."""
        return row in self._scatter and self._scatter[row] is self._scatter.get(base)

    def noise(self, row: int) -> float:
        """Return the probability that the row's runs vary more than those of the rows linked to it."""
        return (self._scatter[row].noise[row] or 0.0) if row in self._scatter else 0.0

    def deviations(self, row: int) -> tuple[float, float]:
        """Return the deviation of the row's runs, and of the runs of the rows linked to it.

        Call it only for a row whose `noise` is above 0.
        """
        return self._scatter[row].deviations[row]

    def between(self, row: int, base: int) -> Difference | None:
        """Return how far `row` is ahead of `base`; None if the scatter of either is unknown."""
        is_linked = self.is_linked(row, base)
        difference = self._in_rounds(row, base) if is_linked else self._across_hosts(row, base)
        return difference and difference.plus(self.by_price(row, base))

    def on_type(self, row: int) -> Variance | None:
        """Return the variance of the row's mean over machines of its type; None for a single run."""
        hosts, machine = self._hosts(row), self._between_machines
        if hosts.num_runs < 2:
            return None
        of_machines = replace(machine, value=machine.value / len(hosts.means))
        return summed([hosts.within, of_machines] if hosts.within else [of_machines])

    def _in_rounds(self, row: int, base: int) -> Difference | None:
        scatter = self._scatter[row]
        ours, theirs = scatter.noise[row], scatter.noise[base]
        if ours is None or theirs is None:
            return None
        blocks, speeds = scatter.speeds(row, base)
        paired = _paired(speeds, _carried([_by((block.host for block in blocks), speeds)], 1))
        common = scatter.estimate(row, base)
        weight = (1 - ours) * (1 - theirs) if paired and common else float(common is not None)
        parts = [(common, weight), (paired, 1 - weight)]
        hosts = _on_hosts(_by((block.machine for block in blocks), speeds)) if blocks else scatter.apart
        estimates = [
            replace(estimate, weight=share, hosts=hosts) for estimate, share in parts if estimate and share
        ]
        if not estimates:
            return None
        shared = (block for block in blocks if row in block and base in block)
        lates = [block.lates[row] - block.lates[base] for block in shared]
        return Difference(estimates=tuple(estimates), drift=_drift(lates))

    def _across_hosts(self, row: int, base: int) -> Difference | None:
        sides = [self._hosts(row), self._hosts(base)]
        if any(side.num_runs < 2 for side in sides):
            return None
        is_apart = sides[0].means.keys() != sides[1].means.keys()
        speeds = {} if is_apart else {at: [sides[1].means[at] - mean] for at, mean in sides[0].means.items()}
        if not is_apart and any(side.within is None for side in sides):
            paired = _paired([speed for (speed,) in speeds.values()])
            return Difference(estimates=(paired,)) if paired else None
        # Welch's test plus the variance between machines, or between hosts of the same machines.
        parts = [side.within for side in sides if side.within]
        if is_apart:
            machine = self._between_machines
            parts.append(replace(machine, value=machine.value * sum(1 / len(side.means) for side in sides)))
        total = summed(parts)
        estimate = Contrast(
            value=sides[1].mean - sides[0].mean,
            error=math.sqrt(total.value),
            dof=total.dof,
            hosts=OnHosts() if is_apart else _on_hosts(speeds),
        )
        return Difference(estimates=(estimate,), is_across_hosts=is_apart)

    def _hosts(self, row: int) -> "_Hosts":
        if row not in self._hosts_of_row:
            self._hosts_of_row[row] = _Hosts.of(self._of_row[row])
        return self._hosts_of_row[row]

    @cached_property
    def _between_machines(self) -> Variance:
        """The variance between machines, by prior knowledge and observation."""
        squares, dof = MACHINE_DOF * MACHINE**2, float(MACHINE_DOF)
        for row in self._of_row:
            hosts = self._hosts(row)
            squares += sum((mean - hosts.mean) ** 2 for mean in hosts.means.values())
            dof += len(hosts.means) - 1
        return Variance(value=squares / dof, dof=dof)


def rounds_to_settle(difference: Difference, level: float) -> tuple[int, float] | None:
    """Return how many more rounds settle the verdict in 80% of continuations, and the exact share.

    If no number does, return MAX_ROUNDS and a smaller share; for rows without common rounds, None. A
    continuation draws the true difference and scatter given the observations, and then the coming rounds.
    """
    import numpy as np

    parts = difference.estimates
    if not all(part.dof_per_round for part in parts):
        return None
    draws = np.random.default_rng(0)
    drawn = draws.choice(len(parts), _NUM_DRAWS, p=np.array([part.weight for part in parts]))

    def mean_square(dof: "Array") -> "Array":
        """Draw means of so many squares of standard normal variables."""
        return draws.gamma(dof / 2, 2 / dof)

    of_runs = [[part.value, part.num_rounds, part.dof, part.dof_per_round] for part in parts]
    value, before, dof, per_round = np.array(of_runs, float)[drawn].T
    seen = np.array([part.error**2 * part.num_rounds for part in parts])[drawn]
    of_hosts = [
        [hosts.num_hosts, hosts.share, hosts.variance.value, hosts.variance.dof]
        for hosts in (part.hosts for part in parts)
    ]
    num_hosts, kept, on_host, host_dof = np.array(of_hosts, float)[drawn].T
    variance, of_host = seen / mean_square(dof), on_host / mean_square(host_dof)
    truth = draws.normal(value, np.sqrt(variance / before + of_host * kept))

    def share(more: int) -> float:
        # With several hosts, the next session adds another.
        num_rounds, new = before + more, more * per_round
        then = draws.normal(truth, np.sqrt(variance / more + of_host))
        mean = (before * value + more * then) / num_rounds
        squares = seen * dof + variance * new * mean_square(new)
        of_runs = np.maximum(FLOOR**2, squares / (dof + new)) / num_rounds
        squares = on_host * host_dof + (on_host > 0) * (then - value) ** 2 * num_hosts / (num_hosts + 1)
        of_hosts = squares / (host_dof + 1) * (kept * before**2 + more**2) / num_rounds**2
        total = of_runs + of_hosts
        new_dof = total**2 / (of_runs**2 / (dof + new) + of_hosts**2 / (host_dof + 1))

        def reach(p: float) -> "Array":
            alone = np.sqrt(of_runs) * _t_quantiles(p, dof + new)
            return np.asarray(np.maximum(alone, np.sqrt(total) * _t_quantiles(p, new_dof)))

        beyond = np.abs(mean) - difference.drift - reach(1 - level / 2)
        within = np.abs(mean) + difference.drift + reach(1 - level)
        return float(np.mean((beyond > 0) | (within < -math.log(TIE_LOW))))

    low, high = 0, MAX_ROUNDS
    if (of_most := share(high)) < SETTLES:
        return high, of_most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if share(middle) >= SETTLES else (middle, high)
    return high, SETTLES


def _t_quantiles(p: float, dof: "Array") -> "Array":
    """Return Student's quantiles, with `dof` rounded down to whole degrees of freedom."""
    import numpy as np

    whole, place = np.unique(np.floor(dof + 1e-6), return_inverse=True)
    return np.array([t_quantile(p, float(degrees)) for degrees in whole])[place]


class _Scatter:
    """The scatter that linked rows share, and the rows that vary more."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        table = _Table(blocks)
        shared = set(table.rows)
        # None for a row whose runs add no degree of freedom, such as a single run.
        self.noise: dict[int, float | None] = {}
        # The deviation of the row's runs, and of the other runs that its noise was judged by.
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
        self._carried = _carried(table.residuals(shared), len(shared) - 1)
        # Two rows that ran only beside other rows both include the variance between hosts.
        num_hosts = len({block.machine for block in blocks})
        prior = Variance(value=ROW_ON_HOST**2, dof=ROW_ON_HOST_DOF)
        self.apart = OnHosts(variance=prior, num_hosts=num_hosts, share=2.0) if num_hosts > 1 else OnHosts()

    def speeds(self, row: int, base: int) -> tuple[list[Block], list[float]]:
        """Return the rounds that tell how far `row` is ahead of `base`, and how far in each."""
        blocks, speeds = [], []
        for block in self._blocks:
            ours, theirs = self._time(block, row, base), self._time(block, base, row)
            if ours is not None and theirs is not None:
                blocks.append(block)
                speeds.append(theirs - ours)
        return blocks, speeds

    def _time(self, block: Block, row: int, beside: int) -> float | None:
        """Return the row's log time in a round; None if unknown.

        If it is missing there, but `beside` ran and has left the common scatter, its time follows from the
        other rows'.
        """
        if row in block:
            return block.means[row]
        shared = self._shared
        if beside not in block or beside in shared.places or row not in shared.places:
            return None
        others = [other for other in block if other in shared.places and shared.links(other, row)]
        return fmean(block.means[other] + shared.speed(other, row) for other in others) if others else None

    def estimate(self, row: int, base: int) -> Contrast | None:
        """Return the difference by the common scatter; None if either row has left it."""
        residual, shared = self._residual, self._shared
        if not residual.dof or not shared.links(row, base):
            return None
        factor = shared.variance_factor(row, base)
        carried = self._carried
        return Contrast(
            value=shared.speed(row, base),
            error=max(FLOOR, residual.deviation * math.sqrt(_rounds_in_one(carried))) * math.sqrt(factor),
            dof=residual.dof,
            carried=carried,
            # The number of complete rounds that would have this error.
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
        """The deviation of runs."""
        return max(FLOOR, math.sqrt(max(0.0, self.squares) / self.dof))


class _Table:
    """Log times of linked rows' runs, modelled as a row's effect plus a block's effect.

    counts, sums: (rows, blocks), the number of runs and the sum of their times less the means of block and
    row. The remainder is as small as the scatter, which preserves precision.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        import numpy as np

        self.rows = sorted(set[int]().union(*blocks))
        rows, block_times = zip(*(block.columns for block in blocks), strict=True)
        of_row, times = np.searchsorted(self.rows, np.concatenate(rows)), np.concatenate(block_times)
        of_block = np.repeat(np.arange(len(blocks)), [*map(len, block_times)])
        times -= _means(of_block, times)[of_block]
        self._means = _means(of_row, times)
        times -= self._means[of_row]
        self._blocks = blocks
        self._squares = np.bincount(of_row, times**2)
        self._counts, self._sums = np.zeros((2, len(self.rows), len(blocks)))
        np.add.at(self._counts, (of_row, of_block), 1)
        np.add.at(self._sums, (of_row, of_block), times)

    def residual(self, rows: Collection[int]) -> _Residual:
        """Return the residual of a least-squares fit to some rows."""
        kept, counts, sums = self._of(rows)
        # Both orientations give the same fit; fewer lines are faster.
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

    def residuals(self, rows: Collection[int]) -> Iterator[Mapping[Hashable, Sequence[float]]]:
        """Yield each row's least-squares residuals, round after round, by host."""
        _, counts, sums = self._of(rows)
        blocks = [block for block in self._blocks if not block.keys().isdisjoint(rows)]
        for line, sizes in zip(_LeastSquares(counts, sums).residuals, counts, strict=True):
            ran = sizes.nonzero()[0]
            yield _by((blocks[at].host for at in ran), line[ran])

    def _of(self, rows: Collection[int]) -> tuple["NDArray[np.bool_]", "Array", "Array"]:
        """Return the mask of the rows, and their counts and sums in the blocks that they ran in."""
        import numpy as np

        kept = np.array([row in rows for row in self.rows])
        counts = self._counts[kept]
        ran = counts.any(0)
        return kept, counts[:, ran], self._sums[kept][:, ran]


class _LeastSquares:
    """Least-squares effects of the lines and columns of `sums`, with `counts` runs in each cell.

    inverse: (lines, lines), the pseudo-inverse of the normal matrix of the lines' effects, since each linked
    group has a free constant. explained: the squares that all effects explain. rank: the number of effects
    less the free constants. residuals: (lines, columns), summed over a cell's runs.
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
        self.residuals = sums - counts * (self.effects[:, None] + (totals - self.effects @ counts) / sizes)


@dataclass(frozen=True, kw_only=True)
class _Effects:
    """The effects of rows on their log times."""

    places: Mapping[int, int]  # position in `fit`, by row
    group: Mapping[int, int]  # number of the linked group, by row
    means: "Array"  # of the rows, subtracted from the times of `fit`
    fit: _LeastSquares

    def links(self, row: int, other: int) -> bool:
        return row in self.group and self.group[row] == self.group.get(other)

    def speed(self, row: int, base: int) -> float:
        """Return the log speed of `row` over that of `base`, which is linked to it."""
        times, ours, theirs = self.means + self.fit.effects, self.places[row], self.places[base]
        return float(times[theirs] - times[ours])

    def variance_factor(self, row: int, base: int) -> float:
        """Return the variance of `speed` relative to a run's: 2 / K for K complete blocks."""
        inverse, i, j = self.fit.inverse, self.places[row], self.places[base]
        return float(inverse[i, i] + inverse[j, j] - 2 * inverse[i, j])


def _means(numbers: "NDArray[np.int64]", values: "Array") -> "Array":
    """Return the mean of the values by number, 0, 1, ..."""
    import numpy as np

    return np.bincount(numbers, values) / np.bincount(numbers)


def _noise(every: _Residual, others: _Residual) -> float | None:
    """Return the probability that a row varies more than the others, by the fits with and without it.

    The ratio of its mean squares to theirs follows F if it varies alike, and k^2 times F if its deviation is
    k times theirs. Return 0 if no other rows are left, and None if the row adds no degree of freedom.
    """
    dof, of_others = every.dof - others.dof, others.dof
    if not dof:
        return None
    if not of_others:
        return 0.0
    of_row, of_rest = _deviations(every, others)
    ratio = dof * (of_row / of_rest) ** 2 / of_others
    # In logarithms: the powers overflow at a few hundred degrees of freedom.
    likelihoods = [
        -dof * math.log(k) - (dof + of_others) / 2 * math.log1p(ratio / (k * k)) for k in (1, *_TIMES_NOISIER)
    ]
    before = _NOISIER_OF_TWO if dof == 1 else _NOISIER
    alike, *noisier = (math.exp(logarithm - max(likelihoods)) for logarithm in likelihoods)
    now = before * fmean(noisier)
    return now / ((1 - before) * alike + now)


def _deviations(every: _Residual, others: _Residual) -> tuple[float, float]:
    """Return the deviations of a row's runs and of the others', by the fits with and without it."""
    of_row = _Residual(squares=every.squares - others.squares, dof=every.dof - others.dof)
    return of_row.deviation, others.deviation


def _paired(speeds: Sequence[float], carried: float = 0.0) -> Contrast | None:
    """Return the difference by two rows' own rounds; None for fewer than two rounds."""
    if len(speeds) < 2:
        return None
    deviation = max(math.sqrt(2) * FLOOR, stdev(speeds) * math.sqrt(_rounds_in_one(carried)))
    return Contrast(
        value=fmean(speeds),
        error=deviation / math.sqrt(len(speeds)),
        dof=len(speeds) - 1,
        num_rounds=len(speeds),
        dof_per_round=1,
        carried=carried,
    )


def _carried(rows: Iterable[Mapping[Hashable, Sequence[float]]], num_contrasts: int) -> float:
    """Return the correlation of noise between consecutive rounds; 0 if chance may explain it.

    rows: noise by host, round after round. num_contrasts: independent contrasts between the rows. Without
    correlation, a contrast over n rounds has the mean -1/n and about Moran's (1948) variance; Kendall (1954)
    gives the bias of the estimate.
    """
    of_hosts: dict[Hashable, list[Sequence[float]]] = defaultdict(list)
    for row in rows:
        for host, noise in row.items():
            if len(noise) >= _MIN_CARRIED:
                of_hosts[host].append([value - fmean(noise) for value in noise])
    points, correlations = [], []
    for lines in of_hosts.values():
        num_rounds = max(map(len, lines))
        squares = sum(value * value for line in lines for value in line)
        products = sum(value * after for line in lines for value, after in pairwise(line))
        seen = products / squares if squares else 0.0
        deviation = (num_rounds - 2) / num_rounds / math.sqrt((num_rounds - 1) * num_contrasts)
        points.append((seen + 1 / num_rounds) / deviation)
        correlations.append(seen + (1 + 4 * seen) / num_rounds)
    if not points or sum(points) <= _CARRIED_QUANTILE * math.sqrt(len(points)):
        return 0.0
    return min(_MOST_CARRIED, max(0.0, fmean(correlations)))


def _rounds_in_one(carried: float) -> float:
    """Return how many correlated rounds are worth one uncorrelated round."""
    return (1 + carried) / (1 - carried)


def _on_hosts(speeds: Mapping[Hashable, Sequence[float]]) -> OnHosts:
    """Return how a difference varies from host to host, by prior knowledge and the rounds on each host."""
    if len(speeds) < 2:
        return OnHosts()
    means = [fmean(on_host) for on_host in speeds.values()]
    sizes = [len(on_host) for on_host in speeds.values()]
    squares = ROW_ON_HOST_DOF * ROW_ON_HOST**2 + sum((mean - fmean(means)) ** 2 for mean in means)
    dof = ROW_ON_HOST_DOF + len(means) - 1
    return OnHosts(
        variance=Variance(value=squares / dof, dof=dof),
        num_hosts=len(means),
        share=sum(size**2 for size in sizes) / sum(sizes) ** 2,
    )


def _drift(lates: Sequence[float]) -> float:
    """Return how far to widen the limits if one row was still changing relative to the other, else 0."""
    known = [late for late in lates if not math.isnan(late)]
    if len(known) < _MIN_DRIFT_BLOCKS or abs(fmean(known)) <= _DRIFT:
        return 0.0
    error = stdev(known) / math.sqrt(len(known))
    is_sure = abs(fmean(known)) > error * t_quantile(1 - LEVEL / 2, len(known) - 1)
    return 2 * abs(fmean(known)) if is_sure else 0.0


def _linked(blocks: Iterable[Iterable[int]]) -> list[set[int]]:
    """Return the sets of rows that common blocks link."""
    groups: list[set[int]] = []
    for block in blocks:
        rows = set(block)
        for group in [group for group in groups if group & rows]:
            groups.remove(group)
            rows |= group
        groups.append(rows)
    return groups


def _by(places: Iterable[Hashable], values: Iterable[float]) -> Mapping[Hashable, Sequence[float]]:
    """Return the values by place; `places` has the place of each."""
    by_place: dict[Hashable, list[float]] = defaultdict(list)
    for place, value in zip(places, values, strict=True):
        by_place[place].append(float(value))
    return by_place


@dataclass(frozen=True, kw_only=True)
class _Hosts:
    """The runs of a row by host."""

    means: Mapping[Hashable, float]  # of log times, by host
    num_runs: int
    # The variance of `mean` by the scatter within hosts; None if each host has one run, where the variation
    # between hosts includes it.
    within: Variance | None

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
            of_mean = sum(1 / len(times) for times in hosts.values()) / len(hosts) ** 2
            within = Variance(value=variance * of_mean, dof=dof)
        return cls(means=means, num_runs=len(runs), within=within)

    @cached_property
    def mean(self) -> float:
        """The mean of the hosts' means."""
        return fmean(self.means.values())

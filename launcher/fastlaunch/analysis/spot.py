"""Time of a job on spot: losses, rework, restarts, waiting for capacity, and a rest on demand.

`expected_spot` gives means in closed form for losses as a Poisson process: Daly's complete model (Future
Generation Computer Systems 22, 2006), and a variant for checkpoints written at the notice. `forecast_spot`
simulates ranges, the chance to meet a deadline, clustering in an observed market, and its uncertainty.

EC2 gives two minutes' notice, and does not bill a spot machine that it takes back in its first hour.
"""

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby, pairwise
from operator import itemgetter
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from fastlaunch.analysis.statistics import bisect, regularised_beta
from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.measure.summary import Interval

Array = NDArray[np.float64]

HOUR_S = 3600.0
#: Seconds from EC2's notice to the end of the machine.
NOTICE_S = 120.0
#: Seconds between two attempts to get capacity.
RETRY_S = 600.0
#: Use only the last part of a trace: capacity a month ago says little about today.
HISTORY_S = 7 * 24 * HOUR_S
#: Spells of the published traces of 2022 and 2023 that are worth one of exponential length for the mean: the
#: median of their coefficients of variation is 2.1 (github.com/skypilot-org/spot-traces).
CLUSTERED = 4
#: The share of jobs within a range.
IN_RANGE = 0.9
#: Stop simulating a job that takes this many times its work.
_GIVES_UP = 200.0
#: Stop simulating a job after this many spells with capacity: each takes about a millisecond.
_MOST_SPELLS = 5_000


@dataclass(frozen=True, kw_only=True)
class SpotMarket:
    """Spot of one instance type in one place: loss rate and availability.

    Intervals are 95%. spells: seconds with and then without capacity, in order; empty if only rates are
    known.
    """

    losses_per_hour: Interval  # of one instance
    available: Interval  # share of time with capacity
    evidence: str  # `trace`, `own runs` or `given`
    source: str
    num_losses: int | None = None  # observed; None if the rates were given
    spells: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        losses, share = self.losses_per_hour.value, self.available.value
        if not (math.isfinite(losses) and losses >= 0):
            raise UserError(f"{losses:g} losses per hour are no rate", "give 0 or more, such as 0.2")
        if not 0 < share <= 1:
            raise UserError(f"{share:g} is no share of time", "give more than 0 and at most 1, such as 0.8")
        if losses == 0 and share < 1:
            raise UserError(
                f"spot that is never lost is had all the time, not {share:.0%} of it",
                "give losses above 0 per hour, or an availability of 1",
            )

    @property
    def wait_s(self) -> float:
        return mean_wait_s(self.losses_per_hour.value, self.available.value)


def mean_wait_s(losses_per_hour: float, available: float) -> float:
    """Return the mean length of a spell without capacity, given one spell per loss."""
    return 0.0 if losses_per_hour == 0 else (1 - available) / (available * losses_per_hour) * HOUR_S


@dataclass(frozen=True, kw_only=True)
class SpotJob:
    """A job for the spot model, without its first start, which the caller knows."""

    work_s: float  # of steps and evaluations, without checkpoints
    restart_s: float  # from a new machine to its first new step: boot, pull, compile, loading
    checkpoint_s: float  # for which the steps stand still while one is saved
    every_s: float | None  # work between two checkpoints; None: none is written
    write_s: float = 0.0  # to write one after that, beside the steps
    num_nodes: int = 1
    notice_s: float = NOTICE_S  # that EC2 gives; 0 on SageMaker, which promises none
    free_within_s: float = HOUR_S  # a machine lost this early is not billed; 0 on SageMaker

    @property
    def saves_at_notice(self) -> bool:
        """Whether a checkpoint fits between notice and end, with half of the time for the upload."""
        saved_s = self.checkpoint_s + self.write_s
        return self.every_s is not None and self.notice_s > 0 and saved_s <= self.notice_s / 2

    @property
    def run_s(self) -> float:
        """Seconds of work and checkpoints without losses."""
        return self.work_s + (0.0 if self.every_s is None else self.work_s / self.every_s * self.checkpoint_s)

    @property
    def segment_s(self) -> float:
        """Seconds from one written checkpoint to the next; the whole job without checkpoints."""
        return self.run_s if self.every_s is None else self.every_s + self.checkpoint_s


@dataclass(frozen=True, kw_only=True)
class SpotTime:
    """Mean seconds of a job on spot, by part, without its first start."""

    work_s: float
    checkpoints_s: float
    rework_s: float  # repeated work
    restarts_s: float  # all starts but the first, and the minutes after notices
    waiting_s: float  # for a machine
    on_demand_s: float  # after spot was given up, including work and checkpoints
    free_s: float  # of machines that were taken back in their first hour
    num_losses: float

    @property
    def spot_s(self) -> float:
        """Seconds with a spot machine."""
        return self.work_s + self.checkpoints_s + self.rework_s + self.restarts_s

    @property
    def billed_s(self) -> float:
        """Return the billed seconds of spot machines."""
        return self.spot_s - self.free_s

    @property
    def total_s(self) -> float:
        return self.spot_s + self.waiting_s + self.on_demand_s


def young_interval_s(checkpoint_s: float, losses_per_hour: float, num_nodes: int = 1) -> float:
    """Return the work between checkpoints that minimises a job's time; infinity without losses.

    It is Young's square root (Communications of the ACM 17, 1974) with Daly's two terms (2006), which matter
    once writing a checkpoint is not short compared with the mean time between losses.
    """
    losses_per_s = losses_per_hour * num_nodes / HOUR_S
    if losses_per_s == 0:
        return math.inf
    mean_s = 1 / losses_per_s
    if checkpoint_s >= 2 * mean_s:
        return mean_s
    ratio = math.sqrt(checkpoint_s / (2 * mean_s))
    return math.sqrt(2 * checkpoint_s * mean_s) * (1 + ratio / 3 + ratio**2 / 9) - checkpoint_s


def steps_between(interval_s: float, step_time_s: float) -> int:
    """Return the value of --checkpoint-every: whole steps in the interval, at least 1."""
    return max(1, int(interval_s / step_time_s))


def check_checkpoints(job: SpotJob, market: SpotMarket, step_time_s: float) -> None:
    """Raise UserError for a job without checkpoints that is longer than the mean time to a loss."""
    losses_per_s = market.losses_per_hour.value * job.num_nodes / HOUR_S
    if job.every_s is not None or (job.restart_s + job.work_s) * losses_per_s <= 1:
        return
    interval_s = young_interval_s(job.checkpoint_s, market.losses_per_hour.value, job.num_nodes)
    raise UserError(
        f"a job of {(job.restart_s + job.work_s) / HOUR_S:.1f} h without checkpoints would hardly end on spot"
        f" that is lost every {1 / losses_per_s / HOUR_S:.1f} h",
        f"add --checkpoint-every {steps_between(interval_s, step_time_s)}, or take --purchase on-demand",
    )


def expected_spot(job: SpotJob, market: SpotMarket, *, retry_s: float = RETRY_S) -> SpotTime:
    """Return the job's mean time if losses are a Poisson process and nothing runs on demand.

    A lost node stops all nodes. After a loss comes a spell without capacity, of the market's mean length; the
    job looks for capacity at once and then every `retry_s`.
    """
    rate = market.losses_per_hour.value * job.num_nodes / HOUR_S
    segment_s, run_s = job.segment_s, job.run_s
    # The number of starts until one succeeds, and their time.
    starts, start_s = _exp(rate * job.restart_s), _lost_s(rate, job.restart_s)
    if job.saves_at_notice:
        lost_running, rework_s = rate * run_s, 0.0
    else:
        num_segments = run_s / segment_s
        lost_running = num_segments * (_exp(rate * segment_s) - 1)
        rework_s = num_segments * _lost_s(rate, segment_s) - run_s
    # Count only the first start's excess over an undisturbed start.
    num_losses = lost_running * starts + starts - 1
    restarts_s = (lost_running + 1) * start_s - job.restart_s + num_losses * job.notice_s
    machine_s = job.restart_s + run_s + rework_s + restarts_s
    wait_s = _looking_s(market, rate, retry_s)
    return SpotTime(
        work_s=job.work_s,
        checkpoints_s=run_s - job.work_s,
        rework_s=rework_s,
        restarts_s=restarts_s,
        waiting_s=(num_losses + 1 - market.available.value) * wait_s,
        on_demand_s=0.0,
        # With several nodes only the one that was taken is free: that is not counted.
        free_s=_free_s(rate, machine_s, job.free_within_s) if job.num_nodes == 1 else 0.0,
        num_losses=num_losses,
    )


def _exp(exponent: float) -> float:
    """Return e to the power; infinity for a job that would practically never end."""
    return math.exp(exponent) if exponent < 700 else math.inf


def _lost_s(rate: float, length_s: float) -> float:
    """Return the mean time until `length_s` pass without a loss, at `rate` losses per second."""
    return length_s if rate == 0 else (_exp(rate * length_s) - 1) / rate


def _looking_s(market: SpotMarket, rate: float, retry_s: float) -> float:
    """Return the mean time that a job looks for capacity; exact for exponential spells."""
    if market.wait_s == 0:
        return 0.0
    if retry_s == 0:
        return market.wait_s
    ends = 1 / market.wait_s
    has_it = ends / (ends + rate) * -math.expm1(-(ends + rate) * retry_s)
    return retry_s / has_it


def _free_s(rate: float, machine_s: float, within_s: float) -> float:
    """Return the part of `machine_s` on machines that are lost within `within_s` of their start.

    A machine's life begins at the loss before, or at the job's beginning.
    """
    if rate == 0 or not math.isfinite(machine_s):
        return 0.0
    begin_s = min(machine_s, within_s)
    at_begin_s = begin_s - -math.expm1(-rate * begin_s) / rate
    later_s = machine_s - begin_s
    return at_begin_s + later_s * (1 - (1 + rate * within_s) * math.exp(-rate * within_s))


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """A switch to on-demand, from the last checkpoint, in time for a deadline.

    A job without a spot machine switches once the remaining time equals the rest on demand, its start, and
    the cost of one more loss. It needs on-demand capacity and a user who does it, since a run that began on
    spot resumes on spot.
    """

    deadline_s: float  # from the request on, the first start included
    start_s: float  # of the machine on demand

    def latest_s(self, job: SpotJob, rest_s: Array) -> Array:
        """Return the latest time to look for spot, by the remaining work and checkpoints."""
        # A loss at the worst moment costs a start, the last minutes, and a segment.
        lost_s = job.restart_s + job.notice_s + (0.0 if job.saves_at_notice else job.segment_s)
        return self.deadline_s - self.start_s - lost_s - rest_s


@dataclass(frozen=True, kw_only=True)
class SpotForecast:
    """Simulated jobs: seconds from the request, including the first start."""

    mean: SpotTime
    total_s: Array  # infinity for a job that does not end in reasonable time
    billed_s: Array  # of spot
    on_demand_s: Array
    num_nodes: int
    num_spells: float  # observed independent spells; infinity for given rates
    fallback: Fallback | None

    def chance(self, deadline_s: float) -> float:
        """Return the probability that the job ends by the deadline."""
        share = float(np.mean(self.total_s <= deadline_s))
        if self.fallback and deadline_s >= self.fallback.deadline_s:
            return share
        # The next spell is longer than all n observed ones with probability 1 / (n + 1).
        return share / (1 + 1 / self.num_spells)

    def time_s(self) -> Interval:
        """Return the mean time to the end, with the range of nine of ten jobs."""
        return self._range(self.total_s)

    def usd(self, spot_usd_per_hour: float, on_demand_usd_per_hour: float) -> Interval:
        """Return the mean cost, with the range of nine of ten jobs. Prices are of one node."""
        spot, on_demand = self.billed_s * spot_usd_per_hour, self.on_demand_s * on_demand_usd_per_hour
        return self._range((spot + on_demand) * self.num_nodes / HOUR_S)

    def _range(self, values: Array) -> Interval:
        low, high = np.quantile(values, ((1 - IN_RANGE) / 2, (1 + IN_RANGE) / 2), method="inverted_cdf")
        return Interval(value=float(np.mean(values)), low=float(low), high=float(high))


def forecast_spot(
    job: SpotJob,
    market: SpotMarket,
    *,
    fallback: Fallback | None = None,
    retry_s: float = RETRY_S,
    num_jobs: int = 2000,
    seed: int = 0,
    most_spells: int = _MOST_SPELLS,
) -> SpotForecast:
    """Simulate jobs that begin at random moments of the market's history.

    Spells follow each other as observed, from a random moment on; without observations, their lengths are
    exponential. Each job draws the error of the observed means. A job stops after `most_spells` spells.
    Raises UserError for a deadline that cannot be met even on demand.
    """
    if fallback is not None and fallback.deadline_s < fallback.start_s + job.run_s:
        needs_h = (fallback.start_s + job.run_s) / HOUR_S
        raise UserError(
            f"the job takes {needs_h:.1f} h on demand, longer than its deadline of"
            f" {fallback.deadline_s / HOUR_S:.1f} h",
            "give a later one, or a faster instance or more nodes",
        )
    spells = _Spells(market, job.num_nodes, num_jobs, np.random.default_rng(seed))
    up_s, gap_s = spells.first()
    limit_s = _GIVES_UP * (job.restart_s + job.run_s)
    jobs, ended, num_rounds = np.zeros((8, num_jobs)), [], 0
    jobs[-1] = job.run_s
    while jobs.size:
        num_rounds += 1
        waiting_s, spot_s, starts_s, rework_s, free_s, on_demand_s, num_losses, rest_s = jobs
        # The job misses a spell that begins and ends between two attempts.
        look_s = gap_s if retry_s == 0 else np.ceil(gap_s / retry_s) * retry_s
        life_s = gap_s + up_s - look_s
        has_machine, is_done = life_s > 0, np.zeros(life_s.size, dtype=bool)
        missed_s = np.where(has_machine, 0.0, gap_s + up_s)
        if fallback is not None:
            left_s = fallback.latest_s(job, rest_s) - waiting_s - spot_s
            is_done = np.where(has_machine, look_s, missed_s) > left_s
            waiting_s += np.where(is_done, np.maximum(0.0, left_s), 0.0)
            on_demand_s += np.where(is_done, fallback.start_s + rest_s, 0.0)
            has_machine &= ~is_done
        # A machine starts and works until its job is done or the notice comes.
        work_s = np.clip(life_s - job.notice_s - job.restart_s, 0.0, rest_s)
        is_finished = has_machine & (work_s == rest_s)
        saved_s = work_s if job.saves_at_notice else np.floor(work_s / job.segment_s) * job.segment_s
        saved_s = np.where(is_finished, work_s, saved_s)
        used_s = np.where(is_finished, job.restart_s + work_s, life_s)
        is_lost = has_machine & ~is_finished
        # With several nodes only the one that was taken is free: that is not counted.
        is_free = is_lost & (life_s < job.free_within_s) & (job.num_nodes == 1)
        waiting_s += np.where(has_machine, look_s, 0.0)
        spot_s += np.where(has_machine, used_s, 0.0)
        starts_s += np.where(has_machine, used_s - work_s, 0.0)
        rework_s += np.where(has_machine, work_s - saved_s, 0.0)
        rest_s -= np.where(has_machine, saved_s, 0.0)
        free_s += np.where(is_free, life_s, 0.0)
        num_losses += is_lost
        is_done |= is_finished
        is_late = (waiting_s + spot_s + missed_s > limit_s) | (num_rounds == most_spells)
        waiting_s[is_late & ~is_done] = math.inf
        goes_on = ~is_done & ~is_late
        ended.append(jobs[:, ~goes_on])
        jobs = jobs[:, goes_on]
        up_s, gap_s = spells.after(goes_on)
        gap_s = gap_s + missed_s[goes_on]
    waiting_s, spot_s, starts_s, rework_s, free_s, on_demand_s, num_losses, rest_s = np.concatenate(ended, 1)
    has_started = spot_s > 0
    done_s = job.run_s - np.where(on_demand_s > 0, rest_s, 0.0)
    first_s = 0.0 if fallback is None else fallback.start_s
    mean = SpotTime(
        work_s=float(np.mean(done_s)) * job.work_s / job.run_s,
        checkpoints_s=float(np.mean(done_s)) * (1 - job.work_s / job.run_s),
        rework_s=float(np.mean(rework_s)),
        restarts_s=float(np.mean(starts_s - has_started * job.restart_s)),
        waiting_s=float(np.mean(waiting_s)),
        on_demand_s=float(np.mean(on_demand_s - ~has_started * first_s)),
        free_s=float(np.mean(free_s)),
        num_losses=float(np.mean(num_losses)),
    )
    return SpotForecast(
        mean=mean,
        total_s=waiting_s + spot_s + on_demand_s,
        billed_s=spot_s - free_s,
        on_demand_s=on_demand_s,
        num_nodes=job.num_nodes,
        num_spells=spells.number,
        fallback=fallback,
    )


class _Spells:
    """The spells with and without capacity that simulated jobs meet.

    A lost node stops the job, so several nodes have shorter spells. Observed spells are replayed: exponential
    ones of the same means make `benchmarks.spot --traces 60` err by up to 20% instead of 12%.
    """

    def __init__(self, market: SpotMarket, num_nodes: int, num_jobs: int, rng: np.random.Generator) -> None:
        self._rng = rng
        self._observed = np.array(market.spells) / (num_nodes, 1) if market.spells else None
        rate = market.losses_per_hour.value * num_nodes / HOUR_S
        self._means = (math.inf if rate == 0 else 1 / rate, market.wait_s)
        # The error of the observed means. Stretches of a history share its mean, so they vary less than the
        # future does, by that same error.
        self._factors = np.ones((2, num_jobs))
        self.number = math.inf
        if market.num_losses is not None and rate > 0:
            seen = max(market.num_losses, 0.5)
            # A short history may look regular by chance.
            self.number = seen / CLUSTERED
            for kind in (0, 1):
                shape = seen
                if market.spells:
                    number = effective_number([spell[kind] for spell in market.spells])
                    self.number, shape = min(self.number, number), number / 2
                self._factors[kind] = shape / rng.gamma(shape + 1, size=num_jobs)
        if self._observed is not None:
            self._means = tuple(np.mean(self._observed, axis=0))
        self._next = np.zeros(num_jobs, dtype=np.int64)

    def first(self) -> tuple[Array, Array]:
        """Return the first spell with capacity, and the time before it, from a random moment."""
        num_jobs = self._factors.shape[1]
        if math.isinf(self._means[0]):
            return np.full(num_jobs, math.inf), np.zeros(num_jobs)
        up, down = (self._factors.T * self._means).T
        is_up = self._rng.random(num_jobs) * (up + down) < up
        if self._observed is None:
            up_s, gap_s = self._rng.exponential((up, down))
            return up_s, np.where(is_up, 0.0, gap_s)
        up_s, gap_s = np.zeros((2, num_jobs))
        for kind, at in ((0, is_up), (1, ~is_up)):
            until = np.cumsum(self._observed[:, kind])
            moments = self._rng.random(np.count_nonzero(at)) * until[-1]
            index = np.minimum(np.searchsorted(until, moments, side="right"), until.size - 1)
            (up_s, gap_s)[kind][at] = (until[index] - moments) * self._factors[kind][at]
            self._next[at] = index
        up_s[~is_up] = self._advance(~is_up)
        return up_s, gap_s

    def after(self, goes_on: NDArray[np.bool_]) -> tuple[Array, Array]:
        """Keep some jobs; return their next spells with capacity, and the spells without it before those."""
        self._factors, self._next = self._factors[:, goes_on], self._next[goes_on]
        if self._observed is None:
            up_s, gap_s = self._rng.exponential((self._factors.T * self._means).T)
            return up_s, gap_s
        gap_s = self._observed[self._next, 1] * self._factors[1]
        return self._advance(np.ones(len(self._next), bool)), gap_s

    def _advance(self, jobs: NDArray[np.bool_]) -> Array:
        assert self._observed is not None
        self._next[jobs] = (self._next[jobs] + 1) % len(self._observed)
        lengths: Array = self._observed[self._next[jobs], 0] * self._factors[0][jobs]
        return lengths


def effective_number(lengths_s: Sequence[float]) -> float:
    """Return the number of independent exponential spells with the same information on the mean.

    It is smaller if long spells follow long ones, as the means of batches of sqrt(n) spells show.
    """
    lengths = np.array(lengths_s)
    number = float(lengths.size)
    if number < 2 or not lengths.any():
        return number
    size = int(math.sqrt(number))
    batches = lengths[: lengths.size // size * size].reshape(-1, size).mean(axis=1)
    variances = (float(np.var(lengths, ddof=1)), float(np.var(batches, ddof=1)) * size)
    return number / max(1.0, *(variance / float(np.mean(lengths)) ** 2 for variance in variances))


def market_of_rates(losses_per_hour: float, available: float, *, source: str) -> SpotMarket:
    """Return a market with the user's rates. Raises UserError for impossible numbers."""
    return SpotMarket(
        losses_per_hour=Interval(value=losses_per_hour),
        available=Interval(value=available),
        evidence="given",
        source=source,
    )


def market_of_runs(
    *, instance_hours: float, num_losses: int, num_asked: int, num_granted: int, source: str
) -> SpotMarket:
    """Return the market that the user's spot runs show.

    instance_hours: above 0. num_asked: jobs that requested their first machines; num_granted: those that got
    them at once, at least 1. Requests after a loss do not count, since capacity is then short more often than
    usual.
    """
    return SpotMarket(
        losses_per_hour=poisson_interval(num_losses, instance_hours),
        available=binomial_interval(num_granted, num_asked),
        evidence="own runs",
        source=source,
        num_losses=num_losses,
    )


def read_trace(lines: Iterable[str], *, source: str, history_s: float = HISTORY_S) -> SpotMarket:
    """Read the market from a capacity trace: CSV with columns `time`, `state` and, for several, `place`.

    A line says that from `time` (ISO 8601, UTC without a zone), `place` had an instance (`up`) or not
    (`down`); the last line of a place ends its observation. A change from up to down is a loss. history_s:
    use this much of the trace's end.

    Raises BadFile for other text, and for a trace that is never up.
    """
    reader = csv.DictReader(lines)
    missing = {"time", "state"} - set(reader.fieldnames or ())
    if missing:
        raise BadFile(source, f"no column {' or '.join(sorted(missing))}", hint=_TRACE_HINT)
    places: dict[str, list[tuple[datetime, bool]]] = {}
    for row in reader:
        try:
            time = datetime.fromisoformat(row["time"].strip())
            is_up = {"up": True, "down": False}[row["state"].strip().lower()]
        except (ValueError, KeyError, AttributeError):
            raise BadFile(source, "no time and state", line=reader.line_num, hint=_TRACE_HINT) from None
        time = time.replace(tzinfo=UTC) if time.tzinfo is None else time
        seen = places.setdefault(row.get("place") or "", [])
        if seen and time < seen[-1][0]:
            raise BadFile(source, "earlier than the line before", line=reader.line_num, hint=_TRACE_HINT)
        seen.append((time, is_up))
    since = max((seen[-1][0] for seen in places.values()), default=_NEVER) - timedelta(seconds=history_s)
    states = [
        [((end - max(start, since)).total_seconds(), is_up) for (start, is_up), (end, _) in pairwise(seen)]
        for seen in places.values()
    ]
    return market_of_states(states, source=source)


_NEVER = datetime(1970, 1, 1, tzinfo=UTC)
_TRACE_HINT = "give CSV with the columns time,state, such as 2026-11-24T08:00:00,up, in the order of time"


def market_of_states(places: Sequence[Sequence[tuple[float, bool]]], *, source: str) -> SpotMarket:
    """Return the market from observations by place: pairs of time in seconds and availability, in order."""
    spells: list[tuple[float, float]] = []
    up_s = down_s = 0.0
    for place in places:
        in_state = groupby((part for part in place if part[0] > 0), key=itemgetter(1))
        merged = [(sum(seconds for seconds, _ in parts), is_up) for is_up, parts in in_state]
        up_s += sum(seconds for seconds, is_up in merged if is_up)
        down_s += sum(seconds for seconds, is_up in merged if not is_up)
        # Join the end to the beginning, so that no spell is cut; a place in one state has no spells.
        if len(merged) % 2:
            *merged, (seconds, is_up) = merged
            merged = [(merged[0][0] + seconds, is_up), *merged[1:]] if merged else []
        if merged and not merged[0][1]:
            merged = [*merged[1:], merged[0]]
        lengths = [seconds for seconds, _ in merged]
        spells += zip(lengths[::2], lengths[1::2], strict=True)
    if not up_s:
        raise BadFile(source, "nothing was up", hint="give a longer trace, or rates")
    number, lacks = (effective_number([spell[kind] for spell in spells]) for kind in (0, 1))
    return SpotMarket(
        losses_per_hour=poisson_interval(len(spells), up_s / HOUR_S, number),
        available=_share_of(up_s, down_s, number, lacks),
        evidence="trace",
        source=source,
        num_losses=len(spells),
        spells=tuple(spells),
    )


def _share_of(up_s: float, down_s: float, number: float, lacks: float) -> Interval:
    """Return the share of time up. number, lacks: independent spells, for the logit's variance."""
    if not (down_s and number and lacks):
        return Interval(value=up_s / (up_s + down_s))
    half = NormalDist().inv_cdf(0.975) * math.sqrt(1 / number + 1 / lacks)
    shares = [1 / (1 + down_s / up_s * math.exp(shift)) for shift in (half, 0.0, -half)]
    return Interval(low=shares[0], value=shares[1], high=shares[2])


def poisson_interval(number: int, hours: float, effective: float | None = None) -> Interval:
    """Return events per hour with the exact interval of a Poisson process (Garwood, Biometrika 28, 1936).

    Count no events as 0.5. effective: the number of independent events, if they cluster.
    """
    counts = float(number) if effective is None else effective
    scale = number / counts if counts else 1.0
    return Interval(
        value=max(number, 0.5) / hours,
        low=gamma_quantile(0.025, counts) * scale / hours if counts else 0.0,
        high=gamma_quantile(0.975, counts + 1) * scale / hours,
    )


def binomial_interval(number: int, of: int) -> Interval:
    """Return the share with the exact interval of Clopper and Pearson (Biometrika 26, 1934).

    Count n out of n as n - 0.5.
    """
    return Interval(
        value=min(number, of - 0.5) / of,
        low=_beta_quantile(0.025, number, of - number + 1) if number else 0.0,
        high=_beta_quantile(0.975, number + 1, of - number) if number < of else 1.0,
    )


def _beta_quantile(p: float, a: float, b: float) -> float:
    return bisect(lambda share: regularised_beta(share, a, b) >= p, 0.0, 1.0)


def gamma_quantile(p: float, shape: float) -> float:
    """Return the point that a gamma variable of scale 1 stays below with probability p."""
    high = shape + 1.0
    while _gamma_cdf(high, shape) < p:
        high *= 2
    return bisect(lambda x: _gamma_cdf(x, shape) >= p, 0.0, high)


def _gamma_cdf(x: float, shape: float) -> float:
    """Return the regularised lower incomplete gamma function, by its series."""
    if x <= 0:
        return 0.0
    term = total = 1 / shape
    n = shape
    while term > 1e-16 * total:
        n += 1
        term *= x / n
        total += term
    return math.exp(shape * math.log(x) - x - math.lgamma(shape)) * total

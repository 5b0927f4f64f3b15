"""How far off forecasts of a job's cost and end on spot are, on replayed traces of capacity.

    python -m benchmarks.spot [FILE ...] [--traces 24] [--days 7] (in tests/; some minutes)

Makes traces to published statistics: losses per instance-hour and share of time with capacity. A forecast is
made from the first days of a trace, and jobs are replayed on the days after them. The replay steps through
the trace by itself; it has nothing of the forecast's formulas. A cell is a kind of market, a pair of
statistics and a job; its mean cost is over all its traces. docs/benchmarks.md quotes what this prints.

FILE: instead, traces in the form of github.com/skypilot-org/spot-traces. At twelve moments of their second
half a forecast is made from the days before.
"""

import argparse
import json
import math
import random
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, stdev

from tabulate import tabulate

from fastlaunch.analysis.spot import (
    HISTORY_S,
    HOUR_S,
    RETRY_S,
    Fallback,
    SpotForecast,
    SpotJob,
    SpotMarket,
    forecast_spot,
    market_of_states,
    young_interval_s,
)

LOSSES_PER_HOUR = (0.06, 0.2, 0.4, 0.74)
AVAILABLE = (0.31, 0.50, 0.84)
DAY_H = 24.0
#: Cost on a market may be off by this, and so many jobs have to end when promised.
GOAL, PROMISED = 0.15, 0.90
#: A cost is in its range if it is no further off than this: nobody knows the work itself better.
NEAR = 0.01
#: p5.48xlarge in us-east-1 in 2026: on demand, and spot's cheapest zone.
ON_DEMAND_USD, SPOT_USD = 55.04, 16.95
#: Deadlines with a fallback on demand, as multiples of what the job takes there.
DEADLINES = (1.2, 1.5, 2.0)
JOBS_PER_TRACE = 20
#: At so many moments of a published trace a forecast is made.
MOMENTS = 12

JOBS = {
    "6 h, quick": SpotJob(work_s=6 * HOUR_S, restart_s=600, checkpoint_s=20, every_s=900),
    "24 h, quick": SpotJob(work_s=24 * HOUR_S, restart_s=600, checkpoint_s=20, every_s=900),
    "24 h, slow": SpotJob(work_s=24 * HOUR_S, restart_s=900, checkpoint_s=240, every_s=900),
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How capacity comes and goes. Losses are `rate x f`, ends of spells without capacity `rate / f`."""

    shape: float = 1.0  # of Weibull's distribution of spells; 1 is exponential, 0.5 has heavy tails
    daily: float = 0.0  # log f goes up and down by this in a day
    storms: float = 1.0  # f is this, or 1 over this, for a day and a half on average


KINDS = {
    "steady": Kind(),
    "heavy tails": Kind(shape=0.5),
    "by time of day": Kind(daily=1.0),
    "in storms": Kind(storms=3.0),
    "all of these": Kind(shape=0.6, daily=0.7, storms=2.0),
}

#: Hours, and whether there is capacity, in order.
Trace = list[tuple[float, bool]]


def draw(kind: Kind, hours: float, losses_per_hour: float, ends_per_hour: float, rng: random.Random) -> Trace:
    """Return a trace of so many hours."""
    unit = math.gamma(1 + 1 / kind.shape)
    drawn: Trace = []
    is_up, is_storm = rng.random() < 0.5, rng.random() < 0.5
    need, spell, at = rng.weibullvariate(1 / unit, kind.shape), 0.0, 0.0
    while at < hours:
        is_storm ^= rng.random() < 1 / 36
        f = (kind.storms if is_storm else 1 / kind.storms) * math.exp(
            kind.daily * math.sin(2 * math.pi * at / DAY_H)
        )
        left = 1.0
        while need <= (rate := losses_per_hour * f if is_up else ends_per_hour / f) * left:
            drawn.append((spell + need / rate, is_up))
            left -= need / rate
            need, spell, is_up = rng.weibullvariate(1 / unit, kind.shape), 0.0, not is_up
        need -= rate * left
        spell += left
        at += 1.0
    drawn.append((spell, is_up))
    return drawn


@lru_cache(maxsize=128)
def rates(kind: Kind, losses_per_hour: float, available: float) -> tuple[float, float]:
    """Return the rates at which long traces of the kind have these statistics."""
    wanted = losses_per_hour, losses_per_hour * available / (1 - available)
    own = wanted
    for _ in range(8):
        trace = draw(kind, 4_000 / min(wanted), *own, random.Random(0))
        up = sum(hours for hours, is_up in trace if is_up)
        down = sum(hours for hours, is_up in trace if not is_up)
        own = own[0] * wanted[0] * up / len(trace) * 2, own[1] * wanted[1] * down / len(trace) * 2
    return own


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The spells with capacity of a trace, in seconds."""

    starts: Sequence[float]
    ends: Sequence[float]

    @classmethod
    def of(cls, trace: Trace) -> "Capacity":
        at, starts, ends = 0.0, [], []
        for hours, is_up in trace:
            if is_up:
                starts.append(at)
                ends.append(at + hours * HOUR_S)
            at += hours * HOUR_S
        return cls(starts=starts, ends=ends)

    def until(self, at_s: float) -> float | None:
        """Return when the spell ends in which `at_s` lies; None if there is no capacity then."""
        index = bisect_right(self.starts, at_s) - 1
        return self.ends[index] if index >= 0 and at_s < self.ends[index] else None


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A job as it went on a trace. total_s: None if the trace ended before it."""

    total_s: float | None
    billed_s: float
    on_demand_s: float

    @property
    def usd(self) -> float:
        return (self.billed_s * SPOT_USD + self.on_demand_s * ON_DEMAND_USD) / HOUR_S


def replay(job: SpotJob, capacity: Capacity, at_s: float, fallback: Fallback | None = None) -> Replayed:
    """Return how a job goes that is requested at `at_s`: machine by machine, checkpoint by checkpoint."""
    assert job.every_s is not None
    now, left_s, billed_s = at_s, job.work_s, 0.0
    while True:
        # What is left, with the checkpoints in it.
        rest_s = left_s + left_s / job.every_s * job.checkpoint_s
        gives_up = math.inf if fallback is None else at_s + float(fallback.latest_s(job, rest_s))
        while (lost := capacity.until(now)) is None and now + RETRY_S <= gives_up:
            now += RETRY_S
            if fallback is None and now > capacity.ends[-1]:
                return Replayed(total_s=None, billed_s=billed_s, on_demand_s=0.0)
        if fallback is not None and (lost is None or now > gives_up):
            on_demand_s = fallback.start_s + rest_s
            end = max(now, gives_up) + on_demand_s
            return Replayed(total_s=end - at_s, billed_s=billed_s, on_demand_s=on_demand_s)
        assert lost is not None
        begun, at, notice = now, now + job.restart_s, lost - job.notice_s
        saved_s = done_s = 0.0
        while at < notice and done_s < left_s:
            # Up to the next checkpoint, the end of the work, or the notice.
            work_s = min(job.every_s, left_s - done_s, notice - at)
            at, done_s = at + work_s, done_s + work_s
            if work_s == job.every_s and at + job.checkpoint_s <= notice:
                at, saved_s = at + job.checkpoint_s, done_s
            elif at < notice and done_s < left_s:
                at = notice
        if done_s >= left_s and at <= notice:
            return Replayed(total_s=at - at_s, billed_s=billed_s + at - begun, on_demand_s=0.0)
        left_s -= done_s if job.checkpoint_s <= job.notice_s / 2 else saved_s
        # EC2 does not bill what it takes back in the first hour.
        billed_s += lost - begun if lost - begun >= HOUR_S else 0.0
        now = lost


@dataclass(frozen=True, kw_only=True)
class Result:
    """Jobs of one kind on the later part of one trace, and what was forecast by the earlier part."""

    cell: tuple[str, ...]
    deadline: float | None  # of the fallback, as a multiple; None without one
    forecast_usd: float
    usd: float  # mean
    num_jobs: int
    in_range: float
    in_time: float | None  # None where too little was observed to promise anything
    share: float  # of the cost on demand


def judge(
    cell: tuple[str, ...], job: SpotJob, market: SpotMarket, capacity: Capacity, starts_s: Sequence[float]
) -> Iterator[Result]:
    """Yield what was forecast by `market` for a job, beside what jobs at `starts_s` took."""
    losses = market.losses_per_hour.value
    job = replace(job, every_s=max(60.0, young_interval_s(job.checkpoint_s, losses)))
    alone_s = job.restart_s + job.run_s
    for multiple in (None, *DEADLINES):
        fallback = Fallback(deadline_s=multiple * alone_s, start_s=job.restart_s) if multiple else None
        forecast = forecast_spot(job, market, fallback=fallback)
        promised_s = fallback.deadline_s if fallback else promised_end_s(forecast)
        usd = forecast.usd(SPOT_USD, ON_DEMAND_USD)
        assert usd.low is not None and usd.high is not None
        jobs = [replay(job, capacity, at, fallback) for at in starts_s]
        whole = [each for each in jobs if each.total_s is not None]
        if not whole:
            print(f"{' '.join(cell)}: no job ends, its cost is not judged", file=sys.stderr)
            continue
        yield Result(
            cell=cell,
            deadline=multiple,
            forecast_usd=usd.value,
            usd=mean(each.usd for each in whole),
            num_jobs=len(jobs),
            in_range=mean(usd.low * (1 - NEAR) <= each.usd <= usd.high * (1 + NEAR) for each in whole),
            in_time=None
            if math.isinf(promised_s)
            else mean(each.total_s is not None and each.total_s <= promised_s for each in jobs),
            share=mean(each.usd for each in whole) / (alone_s / HOUR_S * ON_DEMAND_USD),
        )


def promised_end_s(forecast: SpotForecast) -> float:
    """Return by when a job ends with the chance PROMISED; infinity if too little was observed to say."""
    ends = sorted(map(float, forecast.total_s))
    return next((end for end in ends if forecast.chance(end) >= PROMISED), math.inf)


def results_of(
    at: tuple[str, float, float], *, num_traces: int, days: float, job_names: Sequence[str] = tuple(JOBS)
) -> list[Result]:
    """Return the results of one kind of market at one pair of statistics."""
    kind, losses, available = at
    own = rates(KINDS[kind], losses, available)
    rng = random.Random(repr(at))
    results: list[Result] = []
    history_h = days * DAY_H
    for _ in range(num_traces):
        # The first weeks make it forget its beginning; the last let jobs end.
        trace = draw(KINDS[kind], 28 * DAY_H + 2 * history_h + 200 * DAY_H, *own, rng)
        trace = cut(trace, 28 * DAY_H, math.inf)
        market = market_of(trace, 0, history_h)
        if market is None:
            continue
        capacity = Capacity.of(trace)
        starts = [rng.uniform(history_h, 2 * history_h) * HOUR_S for _ in range(JOBS_PER_TRACE)]
        for name in job_names:
            cell = (kind, f"{losses:g}", f"{available:.0%}", name)
            results += judge(cell, JOBS[name], market, capacity, starts)
    return results


def cut(trace: Trace, start: float, end: float) -> Trace:
    """Return the part of the trace between two hours."""
    at, part = 0.0, []
    for hours, is_up in trace:
        first, last = max(at, start), min(at + hours, end)
        if first < last:
            part.append((last - first, is_up))
        at += hours
    return part


def read(path: Path) -> Trace:
    """Return a published trace: the number of instances to be had, or lost, at each tick."""
    text = json.loads(path.read_text(encoding="utf-8"))
    ticks, gap_h = text["data"], text["metadata"]["gap_seconds"] / HOUR_S
    most = max(ticks)
    trace: Trace = []
    for tick in ticks:
        is_up = tick == 0 if "preemption" in str(path) else tick == most
        if trace and trace[-1][1] == is_up:
            trace[-1] = (trace[-1][0] + gap_h, is_up)
        else:
            trace.append((gap_h, is_up))
    return trace


def results_of_file(path: Path, days: float) -> list[Result]:
    """Return the results of a published trace: at moments of its second half, told from the days before."""
    trace = read(path)
    end = sum(hours for hours, _ in trace)
    moments = [end * (0.5 + 0.5 * number / MOMENTS) for number in range(MOMENTS + 1)]
    # It goes on from its middle where it ends, so that jobs end.
    capacity = Capacity.of([*trace, *(20 * cut(trace, end / 2, end))])
    rng = random.Random(path.name)
    results: list[Result] = []
    for now, until in pairwise(moments):
        starts = [rng.uniform(now, until) * HOUR_S for _ in range(JOBS_PER_TRACE)]
        if (market := market_of(trace, now - days * DAY_H, now)) is not None:
            for name, job in JOBS.items():
                results += judge((path.parent.name, path.stem, name), job, market, capacity, starts)
    return results


def market_of(trace: Trace, start: float, end: float) -> SpotMarket | None:
    """Return the market by the trace between two hours; None if there was no capacity at all."""
    part = [(hours * HOUR_S, is_up) for hours, is_up in cut(trace, start, end)]
    return market_of_states([part], source="trace") if any(is_up for _, is_up in part) else None


def bias(results: Sequence[Result]) -> float:
    """Return by how much the jobs' mean cost is above its forecast."""
    return sum(each.usd for each in results) / sum(each.forecast_usd for each in results) - 1


def in_time(results: Sequence[Result]) -> tuple[float, float] | None:
    """Return the share of jobs that ended when promised, and its 95% interval's half-width, by traces."""
    shares = [each.in_time for each in results if each.in_time is not None]
    if len(shares) < 2:
        return (shares[0], 0.0) if shares else None
    return mean(shares), 1.96 * stdev(shares) / math.sqrt(len(shares))


def line(cells: Sequence[Sequence[Result]]) -> dict[str, str]:
    """Return a line of the table.

    cost: in parts of the cost on demand. off, worst: of a cell's mean cost. traces: so many of them are each
    within 15%. in range: of single jobs. promised: where enough was observed to promise an end at 90%.
    kept: cells whose share of jobs in time is not surely below that.
    """
    results = [each for cell in cells for each in cell]
    biases = [bias(cell) for cell in cells]
    promised = [each for each in map(in_time, cells) if each is not None]
    kept = [share + half >= PROMISED for share, half in promised]
    return {
        "cost": f"{mean(each.share for each in results):.0%}",
        "off": f"{mean(map(abs, biases)):.1%}",
        "worst": f"{max(biases, key=abs):+.1%}",
        "within 15%": f"{sum(abs(each) <= GOAL for each in biases)} of {len(cells)}",
        "traces": f"{mean(abs(bias([each])) <= GOAL for each in results):.0%}",
        "in range": f"{mean(each.in_range for each in results):.0%}",
        "promised": f"{mean(each.in_time is not None for each in results):.0%}",
        "in time": f"{pooled[0]:.1%} ± {pooled[1]:.1%}" if (pooled := in_time(results)) else "",
        "kept": f"{sum(kept)} of {len(kept)}",
    }


def table(results: Sequence[Result], by: Sequence[int], names: Sequence[str]) -> str:
    """Return a line for each deadline and group of cells. by: the parts of a cell's name that make one."""
    groups: dict[tuple[str, ...], dict[tuple[str, ...], list[Result]]] = {}
    for result in results:
        deadline = "none" if result.deadline is None else f"{result.deadline:g} x"
        group = groups.setdefault((deadline, *(result.cell[index] for index in by)), {})
        group.setdefault(result.cell, []).append(result)
    lines = [
        {**dict(zip(("fallback", *names), key, strict=True)), **line(list(cells.values()))}
        for key, cells in groups.items()
    ]
    return str(tabulate(lines, headers="keys", tablefmt="github", disable_numparse=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--traces", type=int, default=24)
    parser.add_argument("--days", type=float, default=HISTORY_S / HOUR_S / DAY_H)
    arguments = parser.parse_args()
    if arguments.files:
        results = [each for path in arguments.files for each in results_of_file(path, arguments.days)]
        print(table(results, (), ()))
        print(table([each for each in results if each.deadline is None], (0, 1), ("set", "zone")))
        up = [[hours for hours, is_up in read(path) if is_up] for path in arguments.files]
        spread = median(stdev(hours) / mean(hours) for hours in up)
        print(f"median coefficient of variation of spells with capacity: {spread:.1f}")
        return 0
    grid = [(kind, losses, share) for kind in KINDS for losses in LOSSES_PER_HOUR for share in AVAILABLE]
    with ProcessPoolExecutor() as pool:
        made = pool.map(partial(results_of, num_traces=arguments.traces, days=arguments.days), grid)
        results = [each for cell in made for each in cell]
    for by, names in (((), ()), ((0,), ("market",)), ((1, 2), ("losses/h", "available")), ((3,), ("job",))):
        print(table(results, by, names), end="\n\n", flush=True)
    cells: dict[tuple[object, ...], list[Result]] = {}
    for result in results:
        cells.setdefault((result.deadline, *result.cell), []).append(result)
    worst = max(abs(bias(cell)) for cell in cells.values())
    print(f"mean cost of a cell, goal within {GOAL:.0%} of its forecast: the worst is off by {worst:.1%}")
    return int(worst > GOAL)


if __name__ == "__main__":
    sys.exit(main())

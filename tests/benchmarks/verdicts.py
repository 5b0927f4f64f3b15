"""How often verdicts are wrong, and how often they find a difference, by simulation.

    python -m benchmarks.verdicts [--draws 2000] [--only NAME] (in tests/; about half an hour on two cores)

A cell is a kind of machine, a number of rows and a number of rounds. Its draws are tables in which no row is
faster than the baseline: a table with any `better` or `worse` is wrong. Power is how often a row that is 3%
faster is called better, where all runs deviate alike. With --best, the other rows are equally fast, and as
fast as the baseline or 30% faster; the table is wrong if the first of them is not among the rows that may be
best. docs/method.md quotes what this prints.
"""

import argparse
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from fastlaunch.analysis.best import Order
from fastlaunch.analysis.differences import RunTime
from fastlaunch.analysis.looks import Looked, look_again, look_through
from fastlaunch.analysis.statistics import BETTER, UNRESOLVED, WORSE
from fastlaunch.analysis.verdicts import BASELINE, exp
from fastlaunch.core.ownership import FIRST_LOOK
from fastlaunch.measure.summary import Interval

ROWS = (2, 3, 6, 10)
ROUNDS = (2, 3, 4, 6, 10)
#: Wrong tables that are accepted, in percent.
ACCEPTED = 7.0
#: Rows of the tables whose best is sought, and by how much their baseline is slower if it is.
BEST_ROWS, BASE_SLOWER = (3, 6), 0.3
#: How much faster the second row is where power is asked for.
FASTER = 0.03

#: Draws a table in which no row is faster, from a generator, a number of rows and one of rounds.
Machine = Callable[[random.Random, int, int], list[RunTime]]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Machines of one kind. beyond: no method can know what they do, so the error is shown and not held.

    asks_power: also draw tables in which the second row is faster.
    """

    name: str
    draw: Machine
    beyond: bool = False
    asks_power: bool = False


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What the tables of one scenario, number of rows and number of rounds came to, in percent."""

    scenario: str
    num_rows: int
    num_rounds: int
    wrong: float
    found: float | None
    beyond: bool


def in_rounds(time_of: Callable[[int, int], float | None], num_rows: int, num_rounds: int) -> list[RunTime]:
    """Return a run of each row in each round; time_of(row, round) is its log time, None if it failed."""
    cells = itertools.product(range(num_rounds), range(num_rows))
    times = ((row, number, time_of(row, number)) for number, row in cells)
    return [
        RunTime(row=row, log_time=time, host="host", block=number)
        for row, number, time in times
        if time is not None
    ]


def alike(
    rng: random.Random, num_rows: int, num_rounds: int, *, sd: float, round_sd: float = 0
) -> list[RunTime]:
    """Draw rows whose runs deviate alike, in rounds that deviate too."""
    rounds = [rng.gauss(0, round_sd) for _ in range(num_rounds)]
    return in_rounds(lambda _, number: rounds[number] + rng.gauss(0, sd), num_rows, num_rounds)


def uneven(rng: random.Random, num_rows: int, num_rounds: int, *, times: tuple[float, ...]) -> list[RunTime]:
    """Draw rows of which the first deviate by so many times 0.5%; the last of `times` is all others'."""
    sds = [0.005 * times[min(row, len(times) - 1)] for row in range(num_rows)]
    rounds = [rng.gauss(0, 0.02) for _ in range(num_rounds)]
    return in_rounds(lambda row, number: rounds[number] + rng.gauss(0, sds[row]), num_rows, num_rounds)


def heavy_tails(rng: random.Random, num_rows: int, num_rounds: int) -> list[RunTime]:
    """Draw runs that deviate by Student's t with 3 degrees of freedom, 1%."""

    def time(_row: int, _number: int) -> float:
        return 0.01 * rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1.5, 2) / 3) / math.sqrt(3)

    return in_rounds(time, num_rows, num_rounds)


def stalls(rng: random.Random, num_rows: int, num_rounds: int) -> list[RunTime]:
    """Draw runs in which single steps stall: a Poisson number of stalls, each 0.5% of a run on average."""

    def time(_row: int, _number: int) -> float:
        stalled, left = 0.0, math.exp(-3)
        draw = rng.random()
        while draw > left:
            stalled += rng.expovariate(1 / 0.005)
            draw *= rng.random()
        return math.log1p(stalled) + rng.gauss(0, 0.002)

    return in_rounds(time, num_rows, num_rounds)


def two_speeds(
    rng: random.Random, num_rows: int, num_rounds: int, *, runs_long: float, only: int | None = None
) -> list[RunTime]:
    """Draw a host that is 10% slower half of the time, for so many runs on average. only: the row it hits."""
    parts = 4
    slow, is_slow = [], rng.random() < 0.5
    for _ in range(num_rows * num_rounds * parts):
        # Half of the redrawn states are new ones.
        if rng.random() < min(1.0, 2 / (runs_long * parts)):
            is_slow = rng.random() < 0.5
        slow.append(is_slow)

    def time(row: int, number: int) -> float:
        first = (number * num_rows + row) * parts
        # Around the mean, so that a row which alone is hit is no slower in the long run.
        share = sum(slow[first : first + parts]) / parts - 0.5 if only in (None, row) else 0.0
        return 0.1 * share + rng.gauss(0, 0.003)

    return in_rounds(time, num_rows, num_rounds)


def drifting(rng: random.Random, num_rows: int, num_rounds: int) -> list[RunTime]:
    """Draw a session that slows down by 5%; every other round runs backwards, as `submit` does."""

    def time(row: int, number: int) -> float:
        place = row if number % 2 == 0 else num_rows - 1 - row
        return 0.05 * (number * num_rows + place) / (num_rows * num_rounds) + rng.gauss(0, 0.005)

    return in_rounds(time, num_rows, num_rounds)


def machines(
    rng: random.Random, num_rows: int, num_rounds: int, *, sd: float, num_hosts: int = 1
) -> list[RunTime]:
    """Draw rows that ran on so many machines of their own each, which deviate."""
    return [
        RunTime(row=row, log_time=speed + rng.gauss(0, 0.003), host=(row, host), block=(row, host, number))
        for row in range(num_rows)
        for host in range(num_hosts)
        for speed in [rng.gauss(0, sd)]
        for number in range(num_rounds)
    ]


def on_shared_hosts(
    rng: random.Random, num_rows: int, num_rounds: int, *, sd: float, num_hosts: int
) -> list[RunTime]:
    """Draw rounds that take turns on so many hosts, on each of which every row deviates by itself."""
    parts = [[rng.gauss(0, sd) for _ in range(num_rows)] for _ in range(num_hosts)]
    runs = in_rounds(
        lambda row, number: parts[number % num_hosts][row] + rng.gauss(0, 0.003), num_rows, num_rounds
    )
    return [replace(run, host=run.block % num_hosts) for run in runs]  # type: ignore[operator]


def carried_over(rng: random.Random, num_rows: int, num_rounds: int, *, correlation: float) -> list[RunTime]:
    """Draw rows whose noise, of 1%, carries over from round to round: an AR(1) process each."""
    noise = [rng.gauss(0, 1) for _ in range(num_rows)]

    def time(row: int, _number: int) -> float:
        new = rng.gauss(0, math.sqrt(1 - correlation**2))
        noise[row] = correlation * noise[row] + new
        return 0.01 * noise[row]

    return in_rounds(time, num_rows, num_rounds)


def many(rng: random.Random, num_rows: int, num_rounds: int) -> list[RunTime]:
    """Draw eight times the rounds, one row in which deviates ten times as much: hundreds of runs."""
    return uneven(rng, num_rows, 8 * num_rounds, times=(1, 10, 1))


def missing(rng: random.Random, num_rows: int, num_rounds: int) -> list[RunTime]:
    """Draw rounds of which one run in six fails."""
    rounds = [rng.gauss(0, 0.02) for _ in range(num_rounds)]

    def time(_row: int, number: int) -> float | None:
        return None if rng.random() < 1 / 6 else rounds[number] + rng.gauss(0, 0.01)

    return in_rounds(time, num_rows, num_rounds)


def skewed_row(rng: random.Random, num_rows: int, num_rounds: int) -> list[RunTime]:
    """Draw a row of which one run in ten is 10% slower, among quiet ones, at the same mean."""

    def time(row: int, _number: int) -> float:
        slow = 0.1 * ((rng.random() < 0.1) - 0.1) if row == 1 else 0.0
        return slow + rng.gauss(0, 0.003)

    return in_rounds(time, num_rows, num_rounds)


def lottery(rng: random.Random, num_rows: int, num_rounds: int) -> list[RunTime]:
    """Draw a row whose runs are of two kinds, 10% apart, at the same mean: a tuner's choice."""

    def time(row: int, _number: int) -> float:
        return (0.05 * rng.choice((-1, 1)) if row == 1 else 0.0) + rng.gauss(0, 0.003)

    return in_rounds(time, num_rows, num_rounds)


SCENARIOS = (
    *(
        Scenario(
            name=f"runs {sd:.1%}, rounds {round_sd:.0%}",
            draw=partial(alike, sd=sd, round_sd=round_sd),
            asks_power=True,
        )
        for sd in (0.002, 0.01, 0.03)
        for round_sd in (0.0, 0.02, 0.05)
    ),
    *(
        Scenario(name=f"rows uneven: {name}", draw=partial(uneven, times=times))
        for name, times in {
            "baseline x3": (3, 1),
            "baseline x10": (10, 1),
            "baseline x30": (30, 1),
            "a row x3": (1, 3, 1),
            "a row x10": (1, 10, 1),
            "two rows x10": (1, 10, 10, 1),
            "baseline and a row x10": (10, 10, 1),
            "three rows x6": (1, 6, 6, 6, 1),
            "graded": (1, 2, 4, 8, 16),
        }.items()
    ),
    Scenario(name="heavy tails", draw=heavy_tails),
    Scenario(name="stalls", draw=stalls),
    Scenario(name="two speeds, for half a run", draw=partial(two_speeds, runs_long=0.5)),
    Scenario(name="two speeds, for a run", draw=partial(two_speeds, runs_long=1.0)),
    Scenario(name="two speeds, for five runs", draw=partial(two_speeds, runs_long=5.0)),
    Scenario(name="one row on two speeds, within runs", draw=partial(two_speeds, runs_long=0.25, only=1)),
    Scenario(name="the session slows down", draw=drifting),
    Scenario(name="a run in six fails", draw=missing),
    Scenario(name="a machine each, 1%", draw=partial(machines, sd=0.01)),
    Scenario(name="a machine each, 2%", draw=partial(machines, sd=0.02)),
    Scenario(name="three machines each, 2%", draw=partial(machines, sd=0.02, num_hosts=3)),
    *(
        Scenario(
            name=f"rows vary by {sd:.1%} on each of {num_hosts} hosts",
            draw=partial(on_shared_hosts, sd=sd, num_hosts=num_hosts),
        )
        for sd in (0.003, 0.005)
        for num_hosts in (2, 3)
    ),
    Scenario(name="a row x10, eight times the rounds", draw=many),
    Scenario(name="noise carries over by 0.7", draw=partial(carried_over, correlation=0.7), beyond=True),
    Scenario(name="one run in ten of a row 10% slower", draw=skewed_row, beyond=True),
    Scenario(name="runs of two kinds in a row", draw=lottery, beyond=True),
)


def simulate(scenario: Scenario, num_rows: int, num_rounds: int, *, draws: int, seed: int = 0) -> Cell:
    """Return what `draws` tables of the cell came to."""
    rng = random.Random(f"{seed} {scenario.name} {num_rows} {num_rounds}")
    wrong = found = 0
    for _ in range(draws):
        runs = scenario.draw(rng, num_rows, num_rounds)
        verdicts = judge(runs, num_rows)
        wrong += any(verdict in (BETTER, WORSE) for verdict in verdicts)
        if scenario.asks_power:
            faster = [replace(run, log_time=run.log_time - FASTER * (run.row == 1)) for run in runs]
            found += judge(faster, num_rows)[0] == BETTER
    return Cell(
        scenario=scenario.name,
        num_rows=num_rows,
        num_rounds=num_rounds,
        wrong=100 * wrong / draws,
        found=100 * found / draws if scenario.asks_power else None,
        beyond=scenario.beyond,
    )


def best_dropped(
    scenario: Scenario, num_rows: int, num_rounds: int, *, base_slower: float, draws: int, seed: int = 0
) -> float:
    """Return how often, in percent, one of equally fast rows is not among those that may be best.

    base_slower: by how much the baseline is slower than the others; with 0 the row left out may be it.
    """
    rng = random.Random(f"{seed} {scenario.name} {num_rows} {num_rounds} {base_slower}")
    dropped = 0
    for _ in range(draws):
        runs = [
            replace(run, log_time=run.log_time + base_slower * (run.row == 0))
            for run in scenario.draw(rng, num_rows, num_rounds)
        ]
        looked = look_through(runs, range(1, num_rows), 0)
        ranked = sorted({0, *looked} & {run.row for run in runs})
        if 0 not in ranked:
            continue
        kinds = [looked[row].kind if row else BASELINE for row in ranked]
        ratios = [_interval(looked[row]) if row else Interval(value=1, low=1, high=1) for row in ranked]
        at = {row: number for number, row in enumerate(ranked)}
        order = Order([replace(run, row=at[run.row]) for run in runs if run.row in at], kinds, ratios)
        better = [number for number in order.rows if kinds[number] == BETTER]
        best = better[0] if better else max(range(len(ratios)), key=lambda number: ratios[number].value)
        # A row without an interval is kept.
        dropped += 1 in at and at[1] not in {best, *order.rivals(best)}
    return 100 * dropped / draws


def _interval(looked: Looked) -> Interval:
    difference = looked.difference
    low, high = difference.limits(looked.level)
    return Interval(value=exp(difference.value), low=exp(low), high=exp(high))


def judge(runs: list[RunTime], num_rows: int) -> list[str | None]:
    """Return the verdicts of rows 1, 2, ... beside row 0, corrected together; None without an interval."""
    looked = look_through(runs, range(1, num_rows), 0)
    return [looked[row].kind if row in looked else None for row in range(1, num_rows)]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What tables of one kind came to that were looked at after each round, in percent; and their runs."""

    wrong: float
    found: float
    num_runs: float  # a table, of num_rows * max_rounds


def looked_at(
    scenario: Scenario, num_rows: int, max_rounds: int, *, faster: int, draws: int, seed: int = 0
) -> Planned:
    """Return what plans of at most `max_rounds` came to. faster: how many of the rows are, by 3%."""
    rng = random.Random(f"{seed} {scenario.name} {num_rows} {max_rounds} {faster}")
    wrong = found = num_runs = 0
    for _ in range(draws):
        drawn = [
            replace(
                run,
                session="0",
                round=int(run.block) + 1,  # type: ignore[call-overload]
                max_rounds=max_rounds,
                log_time=run.log_time - FASTER * (0 < run.row <= faster),
            )
            for run in scenario.draw(rng, num_rows, max_rounds)
        ]
        looked: dict[int, Looked] = {}
        runs: list[RunTime] = []
        for number in range(1, max_rounds + 1):
            settled = {row for row, seen in looked.items() if seen.kind != UNRESOLVED}
            runs += [run for run in drawn if run.round == number and run.row not in settled]
            if number < FIRST_LOOK:
                continue
            looked = look_again(looked, runs, range(1, num_rows), 0, round=number, max_rounds=max_rounds)
            if all(seen.kind != UNRESOLVED for seen in looked.values()):
                break
        kinds = {row: seen.kind for row, seen in looked.items()}
        num_runs += len(runs)
        wrong += any(kind in (BETTER, WORSE) for row, kind in kinds.items() if row > faster)
        found += all(kinds.get(row) == BETTER for row in range(1, faster + 1))
    return Planned(wrong=100 * wrong / draws, found=100 * found / draws, num_runs=num_runs / draws)


#: Kinds of machines whose plans are simulated, with numbers of rows and of faster ones.
PLANS = (
    *(
        (f"runs {sd:.1%}, rounds 2%", *rows)
        for sd in (0.002, 0.01, 0.03)
        for rows in ((2, 0), (2, 1), (4, 0), (4, 2), (6, 0))
    ),
    *(
        (name, 4, 0)
        for name in (
            *("rows uneven: baseline x3", "rows uneven: a row x10", "heavy tails", "stalls"),
            *("two speeds, for a run", "the session slows down", "a run in six fails"),
        )
    ),
)


def plans(draws: int) -> Iterator[str]:
    """Yield what comes of looking after each round, and stopping what is settled."""
    scenarios = {scenario.name: scenario for scenario in SCENARIOS}
    grid = [(name, *at, most) for name, *at in PLANS for most in (8, 12)]
    with ProcessPoolExecutor() as pool:
        futures = [
            pool.submit(looked_at, scenarios[name], rows, most, faster=faster, draws=draws)
            for name, rows, faster, most in grid
        ]
        for (name, rows, faster, most), future in zip(grid, futures, strict=True):
            planned = future.result()
            found = f"{planned.found:>6.1f}" if faster else 6 * " "
            runs = f"{planned.num_runs:.1f} of {rows * most}"
            yield f"{name:34}{rows:>5}{faster:>7}{most:>7}{planned.wrong:>7.1f}{found}  {runs}"


def without_best(only: str, draws: int) -> Iterator[tuple[str, float]]:
    """Yield, as lines and their highest number, how often one of the best is not among those that may be."""
    chosen = [scenario for scenario in SCENARIOS if only in scenario.name]
    grid = list(itertools.product(chosen, BEST_ROWS, (0.0, BASE_SLOWER)))
    with ProcessPoolExecutor() as pool:
        futures = [
            [
                pool.submit(best_dropped, scenario, rows, rounds, base_slower=slower, draws=draws)
                for rounds in ROUNDS
            ]
            for scenario, rows, slower in grid
        ]
        for (scenario, rows, slower), line in zip(grid, futures, strict=True):
            rates = [future.result() for future in line]
            text = "".join(f"{rate:>7.1f}" for rate in rates)
            yield f"{scenario.name:44}{rows:>5}{slower:>8.0%}{text}", 0.0 if scenario.beyond else max(rates)


def cells(only: str, draws: int) -> Iterator[Cell]:
    """Yield all cells of the scenarios whose name contains `only`."""
    chosen = [scenario for scenario in SCENARIOS if only in scenario.name]
    grid = list(itertools.product(chosen, ROWS, ROUNDS))
    with ProcessPoolExecutor() as pool:
        yield from pool.map(partial(_cell, draws=draws), grid)


def _cell(at: tuple[Scenario, int, int], *, draws: int) -> Cell:
    return simulate(*at, draws=draws)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--only", default="")
    parser.add_argument("--looks", action="store_true", help="instead: plans that end when all is settled")
    parser.add_argument("--best", action="store_true", help="instead: tables whose best is called another")
    arguments = parser.parse_args()
    if arguments.best:
        print(f"Percent of {arguments.draws} tables whose best is not among those that may be, by rounds")
        print(f"{'':44}{'rows':>5}{'slower':>8}{''.join(f'{number:>7}' for number in ROUNDS)}")
        rates = []
        for line, rate in without_best(arguments.only, arguments.draws):
            print(line, flush=True)
            rates.append(rate)
        print(f"worst of those that can be held: {max(rates):.1f}% (accepted: {ACCEPTED:g}%)")
        return int(max(rates) > ACCEPTED)
    if arguments.looks:
        print(
            f"Percent of {arguments.draws} plans that are wrong, that find all faster rows; and runs a plan"
        )
        print(f"{'':34}{'rows':>5}{'faster':>7}{'rounds':>7}{'wrong':>7}{'found':>6}{'runs':>7}")
        for line in plans(arguments.draws):
            print(line, flush=True)
        return 0
    print(f"Percent of {arguments.draws} tables that are wrong / in which 3% is found, by rounds")
    worst = 0.0
    by_line = itertools.groupby(
        cells(arguments.only, arguments.draws), lambda cell: (cell.scenario, cell.num_rows)
    )
    print(f"{'':44}{'rows':>5} " + "".join(f"{number:>11}" for number in ROUNDS))
    for (name, num_rows), group in by_line:
        line = list(group)
        worst = max([worst, *(cell.wrong for cell in line if not cell.beyond)])
        cells_text = (
            f"{cell.wrong:>5.1f}" + (f" /{cell.found:>4.0f}" if cell.found is not None else 6 * " ")
            for cell in line
        )
        print(f"{name:44}{num_rows:>5} {''.join(cells_text)}", flush=True)
    print(f"worst of those that can be held: {worst:.1f}% (accepted: {ACCEPTED:g}%)")
    return int(worst > ACCEPTED)


if __name__ == "__main__":
    sys.exit(main())

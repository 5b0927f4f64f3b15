"""Simulate what docs/statistics.md says: its numbers, its tables and its pictures.

    python -m benchmarks.statistics_page [--draws 4000] (in tests/; a few minutes on two cores)

Writes docs/assets/statistics/simulated.json, the SVGs beside it, and what stands on the page between
`<!-- simulated:NAME -->` and `<!-- /simulated -->`. Each cell has a seed of its own, so that it can be
simulated again alone.
"""

import argparse
import json
import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

from benchmarks.verdicts import FASTER, SCENARIOS, alike, looked_at, simulate
from fastlaunch.analysis.differences import Differences, RunTime
from fastlaunch.analysis.statistics import BETTER, LEVEL, WORSE, t_quantile
from fastlaunch.core.ownership import FIRST_LOOK

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "statistics.md"
FOLDER = DOCS / "assets" / "statistics"
STORED = FOLDER / "simulated.json"
_BLOCK = re.compile(r"(?<=<!-- simulated:)([\w-]+)( -->\n).*?(?=<!-- /simulated -->)", re.DOTALL)

Cell = dict[str, Any]
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
USUAL = "runs 1.0%, rounds 2%"
#: Machines of the pictures, of those in `benchmarks.verdicts`, in words.
MACHINES = {
    USUAL: "runs differ by 1%, rounds by 2%",
    "rows uneven: baseline x10": "the baseline varies ten times as much",
    "rows uneven: a row x10": "a row varies ten times as much",
    "heavy tails": "heavy tails",
    "stalls": "single steps stall",
    "two speeds, for a run": "the host has two speeds",
    "the session slows down": "the session slows down by 5%",
    "a run in six fails": "one run in six fails",
    "a machine each, 1%": "a machine for each row, 1% apart",
    "rows vary by 0.5% on each of 2 hosts": "two hosts, on each of which rows differ by 0.5%",
    "noise carries over by 0.7": "noise carries over to the next round, by 0.7",
    "one run in ten of a row 10% slower": "one run in ten of one row is 10% slower",
}


def _seeded(figure: str, parameters: Mapping[str, Any]) -> random.Random:
    return random.Random(f"{figure} {json.dumps(parameters, sort_keys=True)}")


def intervals(*, draws: int, num_rounds: int) -> Cell:
    """Draw a few intervals of a row that is 3% faster: low, high."""
    rng = _seeded("intervals", {"num_rounds": num_rounds})
    limits = [
        _limits(_faster(alike(rng, 2, num_rounds, sd=0.01, round_sd=0.02))) for _ in range(min(draws, 60))
    ]
    return {"limits": [[round(100 * math.expm1(x), 3) for x in pair] for pair in limits if pair]}


def coverage(*, draws: int, machine: str, num_rounds: int) -> Cell:
    """Count how often the 95% interval of a row that is 3% faster holds the 3%."""
    rng = _seeded("coverage", {"machine": machine, "num_rounds": num_rounds})
    covered = []
    for _ in range(draws):
        runs = _faster(BY_NAME[machine].draw(rng, 4, num_rounds))
        # The limits are where a p-value is half the level: this is the same, without looking for them.
        if difference := Differences(runs).between(1, 0):
            covered.append(min(difference.p_above(FASTER), difference.p_below(FASTER)) > LEVEL / 2)
    return {"covered": 100 * fmean(covered)}


def pairing(*, draws: int, round_sd: float) -> Cell:
    """Measure half the interval's width by rounds, and by Welch's t, which knows of none: six runs."""
    rng = _seeded("pairing", {"round_sd": round_sd})
    tables = [_faster(alike(rng, 2, 6, sd=0.01, round_sd=round_sd)) for _ in range(draws)]
    by_rounds = [high - low for runs in tables if (limits := _limits(runs)) for low, high in [limits]]
    return {
        "by_rounds": 50 * median(by_rounds),
        "ignoring_rounds": 50 * median(2 * _welch(runs) for runs in tables),
    }


def errors(*, draws: int, machine: str) -> Cell:
    """Count tables of four equal rows, six rounds, with a wrong verdict."""
    return {"wrong": simulate(BY_NAME[machine], 4, 6, draws=draws).wrong}


def rows(*, draws: int, num_rows: int) -> Cell:
    """Count tables of equal rows with a wrong verdict, with Holm's correction and without, five rounds."""
    rng = _seeded("rows", {"num_rows": num_rows})
    uncorrected = 0
    for _ in range(draws):
        differences = Differences(alike(rng, num_rows, 5, sd=0.01, round_sd=0.02))
        found = [differences.between(row, 0) for row in range(1, num_rows)]
        uncorrected += any(each is not None and each.p_differs() <= LEVEL for each in found)
    return {
        "corrected": simulate(BY_NAME[USUAL], num_rows, 5, draws=draws).wrong,
        "uncorrected": 100 * uncorrected / draws,
    }


def power(*, draws: int, times: float, num_rounds: int) -> Cell:
    """Count how often a row is called better that is faster by so many times the runs' deviation, of two."""
    rng = _seeded("power", {"times": times, "num_rounds": num_rounds})
    found = 0
    for _ in range(draws):
        drawn = _faster(alike(rng, 2, num_rounds, sd=0.01, round_sd=0.02), 0.01 * times)
        difference = Differences(drawn).between(1, 0)
        found += difference is not None and difference.verdict(LEVEL) == BETTER
    return {"found": 100 * found / draws}


def looks(*, draws: int, max_rounds: int) -> Cell:
    """Count wrong verdicts between two equal rows that are looked at after rounds 3, 4, ..., max_rounds."""
    rng = _seeded("looks", {"max_rounds": max_rounds})
    wrong = 0
    for _ in range(draws):
        runs = alike(rng, 2, max_rounds, sd=0.01, round_sd=0.02)
        # The runs are in the order of the rounds, two of each.
        seen = (Differences(runs[: 2 * number]).between(1, 0) for number in range(FIRST_LOOK, max_rounds + 1))
        wrong += any(each is not None and each.verdict(LEVEL) in (BETTER, WORSE) for each in seen)
    planned = looked_at(BY_NAME[USUAL], 2, max_rounds, faster=0, draws=draws)
    return {"planned": planned.wrong, "each_at_5": 100 * wrong / draws}


def stopping(*, draws: int, sd: float, is_faster: bool) -> Cell:
    """Return what looking after each of at most 8 rounds came to: two rows, one 3% faster or not."""
    planned = looked_at(BY_NAME[f"runs {sd:.1%}, rounds 2%"], 2, 8, faster=int(is_faster), draws=draws)
    return {
        "wrong": planned.wrong,
        "found": planned.found if is_faster else None,
        "num_runs": planned.num_runs,
    }


def _faster(runs: Sequence[RunTime], by: float = FASTER) -> list[RunTime]:
    return [replace(run, log_time=run.log_time - by * (run.row == 1)) for run in runs]


def _limits(runs: Sequence[RunTime]) -> tuple[float, float] | None:
    difference = Differences(runs).between(1, 0)
    return difference.limits(LEVEL) if difference else None


def _welch(runs: Sequence[RunTime]) -> float:
    """Half the width of Welch's 95% interval, in log speed."""
    parts = [
        variance(times) / len(times)
        for row in (0, 1)
        if (times := [r.log_time for r in runs if r.row == row])
    ]
    dof = sum(parts) ** 2 / sum(part**2 / (len(runs) / 2 - 1) for part in parts)
    return t_quantile(1 - LEVEL / 2, dof) * math.sqrt(sum(parts))


#: Each figure's simulation, and the cells of which it is made.
FIGURES: Mapping[str, tuple[Callable[..., Cell], list[Cell]]] = {
    "intervals": (intervals, [{"num_rounds": 6}]),
    "coverage": (
        coverage,
        [{"machine": machine, "num_rounds": number} for machine in MACHINES for number in (3, 4, 6, 8)],
    ),
    "pairing": (pairing, [{"round_sd": sd} for sd in (0.0, 0.01, 0.02, 0.03, 0.04, 0.05)]),
    "errors": (errors, [{"machine": machine} for machine in MACHINES]),
    "rows": (rows, [{"num_rows": number} for number in (2, 3, 4, 6, 8, 10)]),
    "power": (
        power,
        [{"times": times, "num_rounds": number} for times in (1, 2, 3, 5) for number in range(2, 11)],
    ),
    "looks": (looks, [{"max_rounds": number} for number in (3, 4, 6, 8, 10, 12)]),
    "stopping": (
        stopping,
        [{"sd": sd, "is_faster": is_faster} for sd in (0.002, 0.01, 0.03) for is_faster in (False, True)],
    ),
}


def simulated(figure: str, parameters: Cell, draws: int) -> Cell:
    """Return a cell: its parameters, and what its draws came to, rounded as it is stored."""
    function, _ = FIGURES[figure]
    came_to = function(draws=draws, **parameters)
    return parameters | {name: round(of, 3) if isinstance(of, float) else of for name, of in came_to.items()}


def simulate_all(draws: int) -> dict[str, Any]:
    """Return all cells, by figure."""
    with ProcessPoolExecutor() as pool:
        waiting = {
            figure: [pool.submit(simulated, figure, cell, draws) for cell in cells]
            for figure, (_, cells) in FIGURES.items()
        }
        return {"draws": draws} | {
            figure: [future.result() for future in futures] for figure, futures in waiting.items()
        }


def with_simulated(page: str, stored: Mapping[str, Any]) -> str:
    """Return the page with every block as `stored` gives it."""

    def block(match: re.Match[str]) -> str:
        return f"{match[1]}{match[2]}{chr(10).join(_BLOCKS[match[1]](stored))}\n"

    return _BLOCK.sub(block, page)


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|---|{'--:|' * (len(header) - 1)}"
    yield from (f"| {' | '.join(line)} |" for line in lines)


def _about(stored: Mapping[str, Any]) -> Iterator[str]:
    draws = stored["draws"]
    points = 196 * math.sqrt(LEVEL * (1 - LEVEL) / draws)
    yield f"Each number below is of {draws:,} simulated tables, so near 5% it is known to"
    yield f"±{points:.1f} points."


def _intervals(stored: Mapping[str, Any]) -> Iterator[str]:
    limits = stored["intervals"][0]["limits"]
    truth = 100 * math.expm1(FASTER)
    missed = sum(not low <= truth <= high for low, high in limits)
    yield f"In the picture, {missed} of the {len(limits)} intervals miss the truth."


def _coverage(stored: Mapping[str, Any]) -> Iterator[str]:
    cells = stored["coverage"]
    rounds = sorted({cell["num_rounds"] for cell in cells})
    of = {(cell["machine"], cell["num_rounds"]): cell["covered"] for cell in cells}
    yield from _table(
        ["how often the 95% interval holds the truth", *(f"{number} rounds" for number in rounds)],
        [[words, *(f"{of[name, number]:.1f}%" for number in rounds)] for name, words in MACHINES.items()],
    )


def _pairing(stored: Mapping[str, Any]) -> Iterator[str]:
    yield from _table(
        ["rounds differ by", "compared within rounds", "ignoring rounds"],
        [
            [f"{cell['round_sd']:.0%}", f"±{cell['by_rounds']:.1f}%", f"±{cell['ignoring_rounds']:.1f}%"]
            for cell in stored["pairing"]
        ],
    )


def _errors(stored: Mapping[str, Any]) -> Iterator[str]:
    yield from _table(
        ["machine", "tables with a wrong verdict"],
        [[MACHINES[cell["machine"]], f"{cell['wrong']:.1f}%"] for cell in stored["errors"]],
    )


def _rows(stored: Mapping[str, Any]) -> Iterator[str]:
    last = stored["rows"][-1]
    of_tables = f"{last['uncorrected']:.0f}% of tables"
    yield f"With {last['num_rows']} rows, {of_tables} would have a wrong verdict if each row were"
    yield f"judged at 5% by itself. With Holm's correction {last['corrected']:.1f}% have."


def _power(stored: Mapping[str, Any]) -> Iterator[str]:
    cells = stored["power"]
    rounds = sorted({cell["num_rounds"] for cell in cells})
    of = {(cell["times"], cell["num_rounds"]): cell["found"] for cell in cells}
    yield from _table(
        ["difference / deviation of runs", *map(str, rounds)],
        [
            [f"{times}", *(f"{of[times, number]:.0f}%" for number in rounds)]
            for times in sorted({cell["times"] for cell in cells})
        ],
    )


def _looks(stored: Mapping[str, Any]) -> Iterator[str]:
    yield from _table(
        ["rounds at most", "planned looks", "5% at each look"],
        [
            [str(cell["max_rounds"]), f"{cell['planned']:.1f}%", f"{cell['each_at_5']:.1f}%"]
            for cell in stored["looks"]
        ],
    )


def _stopping(stored: Mapping[str, Any]) -> Iterator[str]:
    yield from _table(
        ["runs differ by", "in truth", "runs made, of 16", "found", "wrong"],
        [
            [
                f"{cell['sd']:.1%}",
                "3% faster" if cell["is_faster"] else "equal",
                f"{cell['num_runs']:.1f}",
                f"{cell['found']:.0f}%" if cell["is_faster"] else "",
                f"{cell['wrong']:.1f}%" if not cell["is_faster"] else "",
            ]
            for cell in stored["stopping"]
        ],
    )


_BLOCKS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {
    "about": _about,
    "intervals": _intervals,
    "coverage": _coverage,
    "pairing": _pairing,
    "errors": _errors,
    "rows": _rows,
    "power": _power,
    "looks": _looks,
    "stopping": _stopping,
}


def draw(stored: Mapping[str, Any]) -> None:
    """Draw each picture as an SVG."""
    import altair as alt

    blue, red = "#0072b2", "#c24e00"
    two = alt.Scale(range=[blue, red])

    def lines(data: list[Cell], x: str, x_title: str, y_title: str, legend: str, **scale: Any) -> alt.Chart:
        return (
            alt.Chart(alt.Data(values=data))
            .mark_line(point=alt.OverlayMarkDef(size=50, filled=True), strokeWidth=2)
            .encode(
                x=alt.X(f"{x}:Q", title=x_title, axis=alt.Axis(tickMinStep=1)),
                y=alt.Y("y:Q", title=y_title, scale=alt.Scale(**scale)),
                color=alt.Color(
                    "of:N", title=legend, scale=two if len({d["of"] for d in data}) == 2 else alt.Scale()
                ),
                shape=alt.Shape("of:N", legend=None),
            )
        )

    def at(value: float) -> alt.Chart:
        rule = alt.Chart(alt.Data(values=[{"y": value}])).mark_rule(strokeDash=[4, 4], color="#555")
        return rule.encode(y="y:Q")

    truth = 100 * math.expm1(FASTER)
    pairs = [
        {
            "number": number,
            "low": low,
            "high": high,
            "of": "holds it" if low <= truth <= high else "misses it",
        }
        for number, (low, high) in enumerate(stored["intervals"][0]["limits"], 1)
    ]
    drawn = (
        alt.Chart(alt.Data(values=pairs))
        .mark_rule(strokeWidth=3)
        .encode(
            x=alt.X("number:Q", title="table", axis=alt.Axis(grid=False)),
            y=alt.Y("low:Q", title="how much faster, in %"),
            y2="high:Q",
            color=alt.Color("of:N", title="the interval", scale=two),
        )
    )
    per_machine = alt.Data(
        values=[{"y": cell["wrong"], "machine": MACHINES[cell["machine"]]} for cell in stored["errors"]]
    )
    dots = alt.Chart(per_machine).encode(
        x=alt.X("y:Q", title="tables with a wrong verdict, in %", scale=alt.Scale(domainMin=0)),
        y=alt.Y("machine:N", title=None, sort=None, axis=alt.Axis(labelLimit=400)),
    )
    five = alt.Chart(alt.Data(values=[{"x": 5}])).mark_rule(strokeDash=[4, 4], color="#555").encode(x="x:Q")

    def folded(figure: str, x: str, **names: str) -> list[Cell]:
        return [
            {"x": cell[x], "y": cell[key], "of": words}
            for cell in stored[figure]
            for key, words in names.items()
        ]

    wrong = "tables with a wrong verdict, in %"
    pairing_data = [
        {**cell, "x": 100 * cell["x"]}
        for cell in folded(
            "pairing", "round_sd", by_rounds="within rounds", ignoring_rounds="ignoring rounds"
        )
    ]
    power_data = [
        {"x": cell["num_rounds"], "y": cell["found"], "of": str(cell["times"])} for cell in stored["power"]
    ]
    charts: dict[str, Any] = {
        "intervals": drawn + at(truth),
        "pairing": lines(
            pairing_data, "x", "rounds differ by, in %", "half the interval, in %", "compared", domainMin=0
        ),
        "errors": dots.mark_bar(color=blue, height=14) + five,
        "rows": lines(
            folded("rows", "num_rows", corrected="with Holm's correction", uncorrected="each row by itself"),
            *("x", "rows in the table", wrong, "judged"),
            domainMin=0,
        )
        + at(5),
        "power": lines(power_data, "x", "rounds", "found, in %", "difference / deviation", domain=[0, 100])
        + at(80),
        "looks": lines(
            folded("looks", "max_rounds", planned="planned levels", each_at_5="5% at each look"),
            *("x", "rounds at most", wrong, "looks at"),
            domainMin=0,
        )
        + at(5),
    }
    for name, chart in charts.items():
        sized = chart.properties(width=560, height=240, background="white", padding=12)
        # Wide fonts: a browser without the first draws no label wider than it was measured.
        svg = (
            sized.configure(font="DejaVu Sans, Verdana, sans-serif")
            .configure_axis(labelFontSize=12, titleFontSize=12, titleFontWeight="normal")
            .configure_legend(labelFontSize=12, titleFontSize=12, titleFontWeight="normal", orient="top")
        )
        svg.save(FOLDER / f"{name}.svg")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--stored", action="store_true", help="draw and write what was simulated before")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not arguments.stored:
        STORED.write_text(json.dumps(simulate_all(arguments.draws), indent=1) + "\n", encoding="utf-8")
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    draw(stored)
    PAGE.write_text(with_simulated(PAGE.read_text(encoding="utf-8"), stored), encoding="utf-8")
    for name, block in _BLOCKS.items():
        print(f"{name}:", *block(stored), "", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Tables fit the terminal: what is too wide is cut into several, each of which says which row it is."""

import datetime
from collections.abc import Sequence

import pytest
from fake_summaries import changed, evaluated

from fastlaunch.analysis.compare import Comparison, MeasuredRun, PriceRequest, compare
from fastlaunch.catalog.load import load_catalogue
from fastlaunch.measure.summary import Interval
from fastlaunch.report.finish import finish_table
from fastlaunch.report.table import as_table, tables
from fastlaunch.report.target import target_table

HEADINGS = ["recipe", "step ms", "images/s", "verdict"]
CELLS = [["bf16", "100", "640", "baseline"], ["compile", "80.0 ±0.5%", "800", "better"]]


def cut(width: int, kept: Sequence[str] = ("recipe",)) -> list[list[str]]:
    """The lines of each table."""
    text = tables(HEADINGS, CELLS, left=("recipe", "verdict"), kept=kept, width=width)
    return [part.splitlines() for part in text.split("\n\n")]


def test_what_fits_is_one_table() -> None:
    assert cut(39) == [
        [
            "recipe      step ms  images/s  verdict",
            "-------  ----------  --------  --------",
            "bf16            100       640  baseline",
            "compile  80.0 ±0.5%       800  better",
        ]
    ]


@pytest.mark.parametrize(("width", "num_tables"), [(39, 1), (38, 2), (27, 2), (26, 3), (19, 3)])
def test_what_is_too_wide_is_cut(width: int, num_tables: int) -> None:
    found = cut(width)
    assert len(found) == num_tables
    assert max(len(line) for lines in found for line in lines) <= width
    assert [name for lines in found for name in lines[0].replace("step ms", "step_ms").split()[1:]] == [
        "step_ms",
        *HEADINGS[2:],
    ]
    for lines in found:
        assert [line.split()[0] for line in lines] == ["recipe", "-------", "bf16", "compile"]


def test_what_fits_in_no_way_is_left_whole() -> None:
    assert len(cut(18)) == len(cut(5, kept=HEADINGS)) == 1
    assert cut(18) == cut(100)


def comparison() -> Comparison:
    """Rows of long names, with all that compare can say of them."""
    candidates = [
        MeasuredRun(
            run_id=f"{recipe}-{seed}",
            summary=changed(
                evaluated(recipe, seed, 2.0 + 0.1 * seed),
                step_time_s=Interval(value=time_s, low=0.99 * time_s, high=1.01 * time_s),
                build_s=20.0,
                compile_s=300.0,
                warmup_s=4.0,
                num_warmup_steps=10,
                total_s=12.0,
                number=2,
                last_step=100,
            ),
        )
        for recipe, time_s in (
            ("bf16 grad_accumulation=2", 0.1),
            ("compile-max-autotune precision=fp16", 0.08),
        )
        for seed in (0, 1, 2)
    ]
    prices = PriceRequest(today=datetime.date(2026, 11, 21), usd_per_hour=7.5)
    return compare(candidates, catalogue=load_catalogue(), prices=prices)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_table_is_wider_than_the_terminal(width: int) -> None:
    found = comparison()
    parts = [as_table(found, width=width), finish_table(found, 10_000, width=width)]
    text = "\n".join([*parts, target_table(found, "loss=3", width=width)])
    assert max(map(len, text.splitlines())) <= width
    for heading in ("% peak", "verdict", "convergence", "warm-up s", "total $", "mean $"):
        assert heading in text

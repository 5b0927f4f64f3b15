"""A comparison on a screen: order, sections and room; which row is best; what there is to know of one."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_records import write_run
from fake_summaries import CATALOGUE, by_recipe, changed, compared, runs

from fastlaunch.analysis.best import Order, best_of
from fastlaunch.analysis.compare import MeasuredRun
from fastlaunch.analysis.differences import RunTime
from fastlaunch.analysis.statistics import BETTER
from fastlaunch.analysis.verdicts import BASELINE
from fastlaunch.cli.main import run
from fastlaunch.core.plan import Ending, RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import open_ledger
from fastlaunch.lifecycle.rounds import RowVerdict
from fastlaunch.measure.summary import Interval
from fastlaunch.report.cost import finish_table
from fastlaunch.report.data import rows_to_json
from fastlaunch.report.table import as_markdown, as_overview, as_table, why
from fastlaunch.report.text import all_notes, answer, answer_to_json
from fastlaunch_train.records.records import Check

FOUR = [
    *runs("bf16", 0.1, 0.1001, 0.0999),
    *runs("compile", 0.08, 0.0801, 0.0799),
    *runs("fp32", 0.2, 0.2001, 0.1999),
    *runs("te-fp8", 0.05),
    *runs("bf16", 0.15, 0.15, batch_size_per_gpu=128, samples_per_step=128.0),
]


def test_the_answer_in_json_agrees_with_the_verdicts_of_its_sentence() -> None:
    base = runs("bf16", 0.1, 0.1, 0.1, 0.1)
    # t = 3.05 with 3 degrees of freedom: p = 2.8% by one side, and so 5.6% by two.
    close = compared([*base, *runs("compile", *(0.1 * math.exp(-by) for by in (0.006, 0.027, 0.033, 0.054)))])
    found = answer_to_json(close)
    assert close.rows[1].verdict.kind == "unresolved"
    assert (found["settled"], found["may_be_best"]) == (False, ["compile", "bf16"])
    # Of three rows Holm's levels make intervals that are wider than one at 95%; from the baseline's side it
    # is the inverse.
    wobbly = runs("tf32", 0.104, 0.11, 0.098, 0.107)
    slow = compared([*base, *runs("compile", 0.101, 0.104, 0.1, 0.103), *wobbly])
    ratio, found = slow.rows[1].verdict.speed_ratio, answer_to_json(slow)
    assert ratio is not None and (found["best"], found["runner_up"]) == ("bf16", "compile")
    assert found["ratio"]["value"] == pytest.approx(1 / ratio.value)
    assert ratio.high is not None and found["ratio"]["low"] == pytest.approx(1 / ratio.high)


@pytest.mark.parametrize(("low", "rivals"), [(1.2, []), (1.1, [2])])
def test_intervals_beside_the_baseline_tell_two_rows_apart(low: float, rivals: list[int]) -> None:
    """Rows 1 and 2 share one round, which says nothing of how much they vary."""
    times = [(0, 0.0, 1), (0, 0.01, 2), (1, -0.3, 1), (2, -0.1, 1), (2, -0.1, 2)]
    runs = [RunTime(row=row, log_time=time, host="a", block=block) for row, time, block in times]
    ratios = [Interval(value=1.0, low=1.0, high=1.0), Interval(value=1.35, low=low, high=1.5)]
    ratios += [Interval(value=1.11, low=1.05, high=1.15)]
    order = Order(runs, [BASELINE, BETTER, BETTER], ratios)
    assert order.rivals(1) == rivals


def test_the_best_row_and_those_that_may_be_it() -> None:
    best = best_of(compared([each for each in FOUR if each.run_id != "te-fp8-1"]).rows)
    assert best is not None and best.row is not None and best.runner_up is not None and best.ratio is not None
    assert (best.row.setup.recipe, best.runner_up.setup.recipe, best.is_settled) == ("compile", "bf16", True)
    assert best.ratio.value == pytest.approx(1.25, rel=1e-3)
    close = compared([*runs("bf16", 0.1, 0.102, 0.101), *runs("tf32", 0.1, 0.1015, 0.1012)])
    best = best_of(close.rows)
    assert best is not None and not best.is_settled
    assert {row.setup.recipe for row in best.may_be_best} == {"bf16", "tf32"}
    assert best_of(compared(runs("bf16", 0.1)).rows).runner_up is None  # type: ignore[union-attr]


def test_the_best_is_by_dollars_where_all_have_a_price() -> None:
    dear = runs("compile", 0.08, 0.0801, 0.0799, instance="p5.48xlarge", device_name=None)
    cheap = runs("bf16", 0.1, 0.1001, 0.0999, instance="p4d.24xlarge", device_name=None)
    best = best_of(compared([*cheap, *dear]).rows)
    assert best is not None and best.row is not None and best.row.setup.recipe == "bf16"


def test_the_answer_as_data_and_the_cheaper_row_that_it_leaves_out() -> None:
    found = answer_to_json(compared(FOUR))
    assert found["sentence"] == answer(compared(FOUR))
    assert found["asides"] == ["te-fp8 shows 1.600x that of compile, but has no interval"]
    assert (found["best"], found["runner_up"], found["settled"]) == ("compile", "bf16", False)
    assert found["may_be_best"] == ["compile", "te-fp8"]
    assert found["ratio"]["low"] < 1.25 < found["ratio"]["high"]
    several = answer_to_json(compared([*FOUR, *runs("bf16", 0.1, workload="vit-tiny")]))
    assert set(several) == {"vit-huge", "vit-tiny"}


NOISY = runs("te-fp8", 0.03, 0.2, 0.04)


@pytest.mark.parametrize(
    ("candidates", "best", "may_be_best"),
    [
        ([*runs("bf16", 0.2), *runs("compile", 0.19)], None, ["compile", "bf16"]),
        ([*runs("bf16", 0.19), *runs("compile", 0.2)], None, ["bf16", "compile"]),
        # The fastest has one run; of the others one is worse than the baseline.
        ([*FOUR[:3], *FOUR[6:9], *runs("te-fp8", 0.05)], None, ["te-fp8", "bf16"]),
        # One is better, another may be better still.
        ([*FOUR[:6], *NOISY], "compile", ["compile", "te-fp8"]),
        ([*FOUR[:6], *runs("te-fp8", 0.05)], "compile", ["compile", "te-fp8"]),
        ([*FOUR[:6], *runs("te-fp8", 0.5)], "compile", ["compile"]),
        # The next best is worse, and one below it may be anything.
        ([*FOUR[:3], *FOUR[6:9], *runs("tf32", 0.1, 0.9, 0.2)], "bf16", ["bf16", "tf32"]),
        ([*FOUR[:3], *runs("tf32", 0.1, 0.1001, 0.0998)], "tf32", ["tf32", "bf16"]),
        (FOUR[:3], "bf16", ["bf16"]),
    ],
)
def test_what_is_best_is_what_the_sentence_says(
    candidates: list[MeasuredRun], best: str | None, may_be_best: list[str]
) -> None:
    comparison = compared(candidates)
    found = answer_to_json(comparison)
    assert (found["best"], found["may_be_best"]) == (best, may_be_best)
    assert answer(comparison).removeprefix("not settled whether ").startswith(may_be_best[0])
    assert found["settled"] is (len(may_be_best) == 1 and len(comparison.rows) > 1)


def test_limits_that_say_nothing_are_words_wherever_they_are_shown() -> None:
    wild = [*runs("bf16", 0.2, 0.5), *runs("compile", 0.9, 0.1), *runs("te-fp8", 1e-9, 1e12)]
    comparison = compared(wild, usd_per_hour=1.0)
    ratio = by_recipe(comparison)["te-fp8"].verdict.ratio
    assert ratio is not None and ratio.is_boundless
    shown = [
        *(answer(comparison), as_overview(comparison), all_notes(comparison), as_markdown(comparison)),
        *(
            as_table(comparison),
            finish_table(comparison, 100, CATALOGUE),
            str(RowVerdict(kind="better", ratio=ratio)),
        ),
        *(why(comparison, recipe) for recipe in ("bf16", "compile", "te-fp8")),
    ]
    for text in shown:
        assert not re.search(r"\d(\.\d+)?e[+-]\d|\binf\b|\bnan\b", text), text
    # The data keep the numbers.
    assert rows_to_json([by_recipe(comparison)["te-fp8"]])[0]["ratio_to_baseline"]["high"] == ratio.high


@pytest.mark.parametrize(
    ("low", "high", "is_boundless"),
    [(0.1, 10.0, False), (0.09, 10.0, True), (0.0, 1.0, True), (1.0, math.inf, True), (None, None, False)],
)
def test_limits_say_nothing_from_ten_times_each_way(
    low: float | None, high: float | None, is_boundless: bool
) -> None:
    assert Interval(value=1.0, low=low, high=high).is_boundless is is_boundless


@pytest.mark.parametrize(
    ("ending", "code"), [(Ending.STOPPED, 1), (Ending.NOT_NEEDED, 0)], ids=["cancelled", "settled without it"]
)
def test_a_row_that_measured_nothing_fails(
    ending: Ending, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_rows(tmp_path, ("bf16", 0.1, 1, ()))
    with open_ledger(load_settings()) as ledger:
        submission = ledger.last_submission()
        assert submission is not None
        ledger.add_run(
            submission, "lost", backend="local", workload="vit-huge", recipe="compile", spec={}, plan={}
        )
        ledger.set_state("lost", RunState.CANCELLED, ending=ending)
    capsys.readouterr()
    assert run(["compare", "--fail-if-worse", "5"]) == code
    assert ("compile on vit-huge" in capsys.readouterr().err.splitlines()[-1]) == bool(code)
    assert [run(["compare", "--fail-if-worse", text]) for text in ("-3", "nan", "inf", "x")] == [2] * 4


def import_rows(folder: Path, *rows: tuple[str, float, int, tuple[Check, ...]]) -> None:
    """Import a run for each seed of each row: its recipe, step time, number of seeds, and checks."""
    for recipe, step_time_s, num_seeds, checks in rows:
        for seed in range(num_seeds):
            header, name = {"seed": seed}, f"{recipe}-{seed}"
            of_run: dict[str, Any] = {"recipe": recipe, "step_time_s": step_time_s, "checks": checks}
            write_run(folder / name, run_id=name, header=header, **of_run)
    assert run(["runs", "import", str(folder)]) == 0


@pytest.mark.parametrize(
    ("checks", "num_runs", "kind"),
    [((), 1, "no interval"), ((Check(name="isolation", passed=False, detail="wrong"),), 3, "not ranked")],
    ids=["one run", "fails a check"],
)
def test_a_row_that_was_not_judged_fails(
    checks: tuple[Check, ...], num_runs: int, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_rows(tmp_path, ("bf16", 0.1, 3, ()), ("fp32", 0.1, num_runs, checks))
    assert run(["compare", "--fail-if-worse", "5"]) == 1
    assert f"fp32 on vit-huge ({kind}: " in capsys.readouterr().err


def test_a_row_that_is_worse_by_more_than_allowed_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_rows(tmp_path, ("bf16", 0.1, 3, ()), ("fp32", 0.11, 3, ()))
    assert [run(["compare", "--fail-if-worse", percent]) for percent in ("5", "20")] == [1, 0]
    assert "fp32 on vit-huge" in capsys.readouterr().err
    assert run(["compare", "--output", "json", "--fail-if-worse", "5"]) == 1
    assert json.loads(capsys.readouterr().out)["answer"]["best"] == "bf16"


def _overview_row(text: str, name: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
    return line[len(name) :].split()


def test_a_row_of_another_batch_has_the_ratio_of_its_verdict() -> None:
    wide = {"batch_size_per_gpu": 128, "samples_per_step": 128.0}
    shown = [
        *(*runs("bf16", 0.1, 0.101, 0.099, 0.1), *runs("tf32", 0.1, 0.101, 0.099), *runs("fp32", 0.2, 0.2)),
        *runs("bf16", 0.18, 0.181, 0.179, 0.18, **wide),
        *runs("compile", 0.36, 0.361, 0.359, 0.36, **wide),
    ]
    text = as_overview(compared(shown, usd_per_hour=1.0))
    ratio, *interval, verdict = _overview_row(text, "compile")[1:]
    assert (ratio, verdict) == ("0.500", "worse") and float(interval[0]) < 0.5 < float(interval[-1])
    # The bar is beside the overall baseline, so there is none.
    assert _overview_row(text, "bf16 at batch 128")[1:] == ["1.000", "-", "baseline"]
    # All columns and Markdown show the same ratio.
    comparison = compared(shown, usd_per_hour=1.0)
    assert " 1.000  baseline in its batch" in as_table(comparison)
    (line,) = (line for line in as_markdown(comparison).splitlines() if line.startswith("| compile "))
    assert "| 0.500 " in line and "worse in its batch" in line
    # A batch of one row has no verdict, and no bar beside rows that train otherwise.
    text = as_overview(compared(shown[:-3], usd_per_hour=1.0))
    assert _overview_row(text, "compile")[1:] == ["-", "-", "-"]
    assert "global batch 128: throughput only:" in text and "within the batch" not in text
    wider = runs("bf16", 0.36, batch_size_per_gpu=256, samples_per_step=256.0)
    text = as_overview(compared([*shown[:-3], *wider], usd_per_hour=1.0))
    assert "other batches: throughput only:" in text


def test_options_of_all_rows_are_in_the_heading_alone() -> None:
    p = "parameter_dtype=bf16-master"
    alike = [*runs(f"bf16 {p}", 0.1, 0.101), *runs(f"compile {p} optimizer_impl=fused", 0.09, 0.091)]
    text = as_overview(compared(alike))
    assert text.partition("\n\n")[0].count(p) == text.count(p) == 1
    assert answer(compared(alike), lettered=True).startswith("compile optimizer_impl=fused on H200 ")
    # Beside a row without the option it tells rows apart, and alone a row keeps its name.
    for others in ([*alike, *runs("fp32", 0.2, 0.2)], alike[:2]):
        assert f"all with {p}" not in as_overview(compared(others))
    # What a row is called there finds it.
    assert p in why(compared(alike), "compile +o")


def test_the_best_row_of_unknown_convergence_has_a_note() -> None:
    rows = [*runs("bf16", 0.1, 0.101), *runs("compile", 0.09, 0.091)]
    note = "whether compile trains as well as bf16 is not known: no held-out loss was recorded"
    assert note in " ".join(as_overview(compared(rows)).split())
    assert "trains as well" not in as_overview(compared(rows, usd_per_hour=1.0), brief=True)
    slower = [*runs("bf16", 0.1, 0.101), *runs("compile", 0.2, 0.21)]
    assert "trains as well" not in as_overview(compared(slower))


def test_a_note_says_why_paired_ratios_are_in_another_order_than_the_amounts() -> None:
    # The machine slows down after two rounds; one recipe ran before, another after.
    base = runs("bf16", 1.0, 1.0, 2.0, 2.0)
    early = runs("compile", 0.99, 0.991)
    late = [
        replace(run, summary=changed(run.summary, seed=run.summary.seed + 2))
        for run in runs("tf32", 1.9, 1.91)
    ]
    note = "x base and bar are paired by round, images/s is not"
    text = as_overview(compared(base, early, late))
    assert text.index("tf32") < text.index("compile") and note in text
    assert note not in as_overview(compared(base, early))


@pytest.mark.parametrize("width", range(60, 121, 10))
def test_the_heading_of_a_bar_is_words(width: int) -> None:
    lines = as_overview(compared(runs("bf16", 0.1, 0.101), runs("compile", 0.09, 0.091)), width=width)
    (heading,) = (line for line in lines.splitlines() if line.startswith("recipe"))
    assert ("better" in heading) is any("█" in line for line in lines.splitlines())


def test_a_note_wraps_and_is_never_cut() -> None:
    failed = Check(name="isolation", passed=False, detail=f"{'word ' * 60}end")
    comparison = compared([*FOUR, *runs("te-article", 0.04, checks=(failed,))])
    for width in (80, 120):
        text = as_overview(comparison, width=width)
        assert "word end" in " ".join(text.split()) and "..." not in text
        assert max(map(len, text.splitlines())) <= width

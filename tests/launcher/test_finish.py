"""What a job costs to its end, and where the costs of two ways to train cross: known answers by hand."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_records import read_all, write_run
from fake_summaries import PLAIN, changed, compared
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.analysis.compare import Comparison
from fastlaunch.analysis.finish import PARTS, Account, BreakEven, Finish, account_of_run, to_finish
from fastlaunch.core.errors import UserError
from fastlaunch.measure.summarize import summarize
from fastlaunch.measure.summary import Interval, RunSummary
from fastlaunch.report.finish import finish_json, finish_table
from fastlaunch_train.records.records import FROM_CACHE, Check, Eval, Phase

#: A dollar a second.
DOLLAR = 3600.0


def evaluation(step: int, seconds: float, **changes: Any) -> Eval:
    told: dict[str, Any] = {"split": "validation", "loss": 1.0, "num_samples": 10, **changes}
    return Eval(step=step, seconds=seconds, **told)


def run(recipe: str, step_time_s: float, **changes: Any) -> RunSummary:
    """A run of known build, compile and warm-up time."""
    known = {"build_s": 5.0, "num_warmup_steps": 10, "warmup_s": 10 * step_time_s}
    timed = Interval(value=step_time_s)
    return changed(PLAIN, **{"recipe": recipe, "step_time_s": timed, **known, **changes})


def three(recipe: str, step_time_s: float, *, by: float = 0.0, **changes: Any) -> list[RunSummary]:
    """Repeats of it in three rounds, the second slower by a part of `by` and the third faster."""
    return [
        run(
            recipe,
            step_time_s * (1 + off),
            **{"seed": seed, "warmup_s": 10 * step_time_s * (1 + off), **changes},
        )
        for seed, off in enumerate((0.0, by, -by))
    ]


def account_of(summary: RunSummary) -> Account:
    known = account_of_run(summary)
    assert known is not None
    return known


def finish_of(comparison: Comparison, steps: float = 1000) -> Finish:
    """The job on the only row."""
    ((finish,),) = (workload.rows for workload in to_finish(comparison, steps))
    return finish


def pair_of(comparison: Comparison) -> BreakEven:
    (found,) = to_finish(comparison, 1000)
    (pair,) = found.break_evens
    return pair


def sentences(comparison: Comparison, steps: float = 1000) -> list[str]:
    (workload,) = finish_json(comparison, steps)["workloads"]
    return list(workload["notes"])


# --- to the end ------------------------------------------------------------------------------------------

FULL = run(
    "compile",
    1.0,
    boot_s=40.0,
    pull_s=20.0,
    compile_s=600.0,
    warmup_s=12.0,
    evals=(
        *(evaluation(step, 3.0) for step in (100, 200, 300, 400)),
        evaluation(400, 4.0, split="test"),
        evaluation(200, 6.0, split="test", weights="best"),
    ),
    longest_s=5.0,
    total_s=8.0,
    number=2,
    last_step=400,
)


def test_every_part_of_a_job_has_its_own_number() -> None:
    finish = finish_of(compared(FULL, usd_per_hour=DOLLAR))
    assert finish.parts_s == {
        "boot": 40,
        "pull": 20,
        "build": 5,
        "compile": 600,
        "warmup": pytest.approx(2),  # 12 s for ten steps of 1 s
        "steps": 1000,
        "evaluations": pytest.approx(10 * 3 + 10),  # every 100 steps, and on test data at the end
        "checkpoints": pytest.approx(5 * 4),  # every 200 steps
    }
    assert tuple(finish.parts_s) == PARTS and finish.unknown == ()
    assert finish.total_s is not None and finish.usd is not None
    assert finish.total_s.value == pytest.approx(1727)
    assert finish.usd.value == pytest.approx(1727)


def test_the_interval_of_the_step_time_is_carried_through() -> None:
    summary = changed(FULL, step_time_s=Interval(value=1.0, low=0.9, high=1.2))
    total = account_of(summary).total_s(1000)
    assert (total.value, total.low, total.high) == pytest.approx((1727, 1627, 1927))


def test_for_as_many_steps_as_a_run_did_a_job_takes_what_the_run_took(tmp_path: Path) -> None:
    phases = [Phase(name="build", seconds=7.0, step=0), Phase(name="compile", seconds=30.0, step=0)]
    phases += [Phase(name="checkpoint", seconds=2.0, step=step) for step in (50, 100, 150, 200)]
    evals = [evaluation(step, 1.5) for step in (40, 80, 120, 160, 200)]

    def time_of(rank: int, step: int) -> float:
        return 0.9 if step <= 10 else 0.1 + 0.001 * (step % 7)

    paths = write_run(tmp_path, steps=200, step_time_s=time_of, phases=phases, evals=evals)
    summary = summarize(read_all(paths))
    account = account_of(summary)
    took_s = sum(time_of(0, step) for step in range(1, 201))
    assert account.total_s(200).value == pytest.approx(7 + 30 + 4 * 2 + 5 * 1.5 + took_s)
    assert (summary.quality.eval_s, summary.checkpoints.total_s) == (7.5, 8.0)


def test_what_is_not_known_is_left_out_and_named() -> None:
    comparison = compared(run("bf16", 1.0, num_warmup_steps=None), usd_per_hour=DOLLAR)
    finish = finish_of(comparison, 100)
    assert finish.unknown == ("boot", "pull", "warmup")
    assert finish.total_s is not None and finish.total_s.value == pytest.approx(105)
    (workload,) = finish_json(comparison, 100)["workloads"]
    (row,) = workload["rows"]
    assert row["parts"]["boot"] is None and row["parts"]["build"] == {"seconds": 5.0, "usd": 5.0}
    assert row["unknown"] == ["boot", "pull", "warmup"]


def test_compiling_counts_as_a_first_run_does_where_one_is_known(tmp_path: Path) -> None:
    def recorded(seed: int, seconds: float, detail: str | None) -> RunSummary:
        phases = [Phase(name="build", seconds=3.0, step=0)]
        phases += [Phase(name="compile", seconds=seconds, step=0, detail=detail)]
        directory = tmp_path / f"{seconds:g}"
        return changed(summarize(read_all(write_run(directory, phases=phases))), recipe="compile", seed=seed)

    cold, warm = recorded(0, 600.0, None), recorded(1, 20.0, FROM_CACHE)
    assert (cold.startup.compile_cached, warm.startup.compile_cached) == (False, True)
    told = "compiled from a cache: a first run takes longer to compile"
    both, alone = compared(cold, warm), compared(warm)
    assert [row.overhead.compile_s for row in (*both.rows, *alone.rows)] == [600, 20]
    assert [told in row.verdict.reasons for row in (*both.rows, *alone.rows)] == [False, True]
    assert finish_of(both).parts_s["compile"] == 600


def test_repeats_are_averaged() -> None:
    repeats = [changed(FULL, compile_s=seconds, seed=seed) for seed, seconds in enumerate((500.0, 700.0))]
    assert finish_of(compared(*repeats)).parts_s["compile"] == 600


@pytest.mark.parametrize("number", [2, 6])
def test_what_the_first_evaluation_compiles_comes_once(number: int) -> None:
    evals = tuple(evaluation(100 * one, 62.0 if one == 1 else 2.0) for one in range(1, number + 1))
    account = account_of(run("compile", 1.0, evals=evals))
    assert account.parts_s(100 * number)["evaluations"] == pytest.approx(60 + 2 * number)
    assert account.parts_s(10_000)["evaluations"] == pytest.approx(60 + 2 * 100)


def test_one_evaluation_at_the_end_is_made_once_however_long_the_job() -> None:
    account = account_of(run("bf16", 1.0, evals=(evaluation(200, 6.0),)))
    assert [account.parts_s(steps)["evaluations"] for steps in (10, 200, 10_000)] == [6, 6, 6]


@pytest.mark.parametrize("steps", [0, math.nan, math.inf])
def test_a_job_has_steps(steps: float) -> None:
    with pytest.raises(UserError, match="no job"):
        finish_table(compared(FULL), steps)


# --- where costs cross -----------------------------------------------------------------------------------


def test_compiling_for_600_s_to_save_a_second_a_step_pays_after_600_steps(tmp_path: Path) -> None:
    def recorded(recipe: str, step_time_s: float, compile_s: float) -> RunSummary:
        phases = [Phase(name="build", seconds=3.0, step=0)]
        phases += [Phase(name="compile", seconds=compile_s, step=0)] if compile_s else []
        paths = write_run(tmp_path / recipe, recipe=recipe, step_time_s=step_time_s, phases=phases)
        return summarize(read_all(paths))

    bf16, compiled = recorded("bf16", 2.0, 0.0), recorded("compile", 1.0, 600.0)
    comparison = compared(*(changed(each, seed=seed) for each in (bf16, compiled) for seed in (0, 1, 2)))
    pair = pair_of(comparison)
    assert (pair.short.setup.recipe, pair.long.setup.recipe, pair.by) == ("bf16", "compile", "time")
    assert pair.steps is not None and pair.samples is not None
    assert pair.steps.value == pytest.approx(600) and pair.samples.value == pytest.approx(1200)
    # Runs that took the same are still taken to vary a little.
    assert pair.steps.low is not None and pair.steps.high is not None
    assert pair.steps.low < 600 < pair.steps.high and pair.settled
    (told,) = (text for text in sentences(comparison) if "only after" in text)
    assert told.startswith("compile is done sooner than bf16 only after about 600 steps (")
    assert sentences(comparison)[0].startswith("1,000 steps are done first with compile: ")
    assert sentences(comparison, 500)[0].startswith("500 steps are done first with bf16: ")


def test_where_both_have_a_price_it_is_dollars_that_cross() -> None:
    """600 s of compiling to halve the step time of 2 s: at $1.5/s against $1/s it takes $900 to save $0.5 a
    step; at $2.5/s it saves nothing.
    """

    def priced(usd_per_hour: float) -> BreakEven:
        slow, fast = run("bf16", 2.0), run("compile", 1.0, compile_s=600.0, build_s=5.0)
        comparison = compared(slow, fast, usd_per_hour=DOLLAR)
        rows = tuple(
            replace(row, price=replace(row.price, usd_per_hour=usd_per_hour))
            if row.setup.recipe == "compile" and row.price
            else row
            for row in comparison.rows
        )
        return pair_of(replace(comparison, rows=rows))

    dear = priced(2.5 * DOLLAR)
    assert dear.samples is None and dear.long.setup.recipe == "bf16"
    pair = priced(1.5 * DOLLAR)
    # Building costs 1.5 x 5 against 5, too.
    assert pair.by == "usd" and pair.steps is not None
    assert pair.steps.value == pytest.approx((900 + 2.5) / 0.5)


def test_the_interval_holds_the_lengths_at_which_the_step_times_do_not_tell() -> None:
    pair = BreakEven(
        first=ROW, second=ROW2, by="time", more_once=600.0, less_each=1.0, less_limits=(0.8, 1.2)
    )
    assert pair.samples == Interval(value=600.0, low=pytest.approx(500.0), high=pytest.approx(750.0))
    assert pair.difference(500.0).low == pytest.approx(0.0)
    assert pair.difference(750.0).high == pytest.approx(0.0)
    open_ended = replace(pair, less_limits=(-0.5, 2.5))
    assert open_ended.samples == Interval(value=600.0, low=pytest.approx(240.0))
    assert open_ended.settled is False
    # Far from even about the middle, as ratios of few noisy runs are.
    assert replace(pair, less_limits=(0.1, 5.0)).settled
    assert replace(pair, less_limits=None).samples == Interval(value=600.0)
    turned = replace(pair, more_once=-600.0, less_each=-1.0, less_limits=(-1.2, -0.8))
    assert turned.samples == Interval(value=600.0, low=pytest.approx(500.0), high=pytest.approx(750.0))


def test_the_error_is_that_of_the_difference_between_rounds() -> None:
    """A host that took 3% more in one round and 3% less in another did so to both rows."""
    comparison = compared(*three("bf16", 2.0, by=0.03), *three("compile", 1.0, by=0.03, compile_s=60.0))
    limits = pair_of(comparison).less_limits
    assert limits is not None
    # 0.1% between runs at least, at two degrees of freedom, of 2 s for 64 samples.
    width = math.exp(-math.log(2)) * 4.302653 * 0.001 * math.sqrt(2 / 3)
    assert (limits[1] - limits[0]) / 2 == pytest.approx(2.0 / 64 * width, rel=0.01)
    alone = compared(run("bf16", 2.0), run("compile", 1.0, compile_s=60.0))
    assert pair_of(alone).less_limits is None


def test_one_row_that_costs_less_from_the_start_is_never_crossed() -> None:
    comparison = compared(*three("bf16", 2.0), *three("te-bf16", 1.0))
    pair = pair_of(comparison)
    assert pair.samples is None and pair.steps is None and pair.settled
    assert pair.short is pair.long and pair.short.setup.recipe == "te-bf16"
    assert "te-bf16 is done sooner than bf16 from the first step on" in sentences(comparison)


def test_costs_that_differ_by_rounding_alone_do_not_cross() -> None:
    """Ten steps of 0.19 s, and of 0.095 s, less as many at that step time: zero, but for the last digit."""
    slow = run("bf16", 0.19, warmup_s=10 * 0.19 + 4e-16)
    fast = run("te-fp8", 0.095, warmup_s=10 * 0.095 + 8e-16)
    pair = pair_of(compared(slow, fast))
    assert pair.more_once != 0
    assert pair.steps is None
    (told,) = (text for text in sentences(compared(slow, fast)) if "sooner" in text)
    assert told.startswith("te-fp8 is done sooner than bf16 from the first step on")


def test_step_times_too_close_to_tell_leave_the_long_job_open() -> None:
    comparison = compared(*three("bf16", 1.0), *three("compile", 0.999, compile_s=60.0))
    assert any(
        text.startswith("compile is done sooner than bf16 only after about 60,000 steps, if ever:")
        for text in sentences(comparison)
    )
    slower = compared(*three("bf16", 1.0), *three("compile", 1.001, compile_s=60.0))
    assert any("too close to tell" in text for text in sentences(slower))


def test_arms_of_different_global_batch_are_held_to_as_many_samples() -> None:
    """64 images in 2 s against 128 in 3 s and 600 s of compiling: 1/128 s less an image, 76,800 images."""
    comparison = compared(
        run("bf16", 2.0), run("compile", 3.0, compile_s=600.0, batch_size_per_gpu=128, samples_per_step=128.0)
    )
    (found,) = to_finish(comparison, 1000)
    assert [finish.steps for finish in found.rows] == [1000, 500]
    assert [finish.parts_s["steps"] for finish in found.rows] == pytest.approx([2000, 1500])
    (pair,) = found.break_evens
    assert pair.samples is not None and pair.samples.value == pytest.approx(76_800)
    assert pair.steps is None
    text = finish_table(comparison, 1000)
    assert "throughput, not training progress" in text
    assert "as throughput, not training progress: compile is done sooner than bf16 only after" in text
    assert "1,000 steps are done first" not in text


def test_what_is_known_of_one_row_only_is_left_out_of_both() -> None:
    comparison = compared(run("bf16", 2.0), run("compile", 1.0, compile_s=600.0, boot_s=100.0, pull_s=50.0))
    pair = pair_of(comparison)
    assert pair.steps is not None and pair.steps.value == pytest.approx(600)
    assert pair.left_out == ("boot", "pull")


def test_evaluations_count_where_both_arms_make_them_as_often() -> None:
    def evaluating(recipe: str, step_time_s: float, every: int, **changes: Any) -> RunSummary:
        evals = tuple(evaluation(step, 2.0 * step_time_s) for step in range(every, 1001, every))
        return run(recipe, step_time_s, evals=evals, **changes)

    alike = compared(evaluating("bf16", 2.0, 100), evaluating("compile", 1.0, 100, compile_s=600.0))
    pair = pair_of(alike)
    # Per 100 steps: 204 s against 102 s.
    assert pair.steps is not None and pair.steps.value == pytest.approx(600 / 1.02)
    assert pair.left_out == ("boot", "pull")
    unlike = compared(evaluating("bf16", 2.0, 100), evaluating("compile", 1.0, 50, compile_s=600.0))
    pair = pair_of(unlike)
    assert pair.steps is not None and pair.steps.value == pytest.approx(600)
    assert pair.left_out == ("boot", "pull", "evaluations")
    assert any(text.startswith("evaluations are not equally frequent") for text in sentences(unlike))


def test_a_row_that_fails_a_check_is_shown_and_compared_with_none() -> None:
    wrong = Check(name="isolation", passed=False)
    comparison = compared(run("bf16", 2.0), run("te-article", 1.0, checks=(wrong,)))
    (found,) = to_finish(comparison, 1000)
    assert found.break_evens == () and found.rows[1].total_s is not None
    assert "te-article is not ranked, so it is not compared" in sentences(comparison)
    alone = compared(run("te-article", 1.0, checks=(wrong,)))
    assert "te-article is not ranked, so it is not compared" in sentences(alone)


def test_the_json_says_what_the_table_says() -> None:
    runs = (*three("bf16", 2.0), *three("compile", 1.0, compile_s=600.0))
    comparison = compared(*runs, usd_per_hour=DOLLAR)
    data = json.loads(json.dumps(finish_json(comparison, 1000), allow_nan=False))
    (workload,) = data["workloads"]
    assert (workload["workload"], workload["steps"], workload["samples"]) == ("vit-huge", 1000, 64_000)
    assert [row["recipe"] for row in workload["rows"]] == ["bf16", "compile"]
    assert [row["usd_to_finish"]["value"] for row in workload["rows"]] == pytest.approx([2005, 1605])
    (pair,) = workload["break_evens"]
    assert (pair["cheaper_short"], pair["cheaper_long"], pair["by"]) == ("first", "second", "usd")
    assert pair["steps"]["value"] == pytest.approx(600) and pair["settled"] is True
    assert pair["sentence"] in workload["notes"]


# --- whatever the numbers --------------------------------------------------------------------------------

SECONDS = st.floats(0.001, 1000.0)
ROW, ROW2 = compared(run("bf16", 2.0), run("compile", 1.0)).rows


@st.composite
def arms(draw: st.DrawFn) -> Sequence[RunSummary]:
    return [
        run(
            recipe,
            draw(SECONDS),
            build_s=draw(SECONDS),
            compile_s=draw(SECONDS),
            evals=(evaluation(10, draw(SECONDS)), evaluation(20, draw(SECONDS))),
        )
        for recipe in ("bf16", "compile")
    ]


@given(arms(), st.floats(1.0, 1e6))
def test_a_longer_job_never_costs_less(summaries: Sequence[RunSummary], steps: float) -> None:
    for summary in summaries:
        account = account_of(summary)
        assert account.total_s(steps).value < account.total_s(steps * 1.5).value
        assert account.total_s(steps).value == pytest.approx(
            sum(part for part in account.parts_s(steps).values() if part is not None)
        )


@given(arms())
def test_a_break_even_is_where_both_jobs_cost_the_same(summaries: Sequence[RunSummary]) -> None:
    comparison = compared(*summaries, usd_per_hour=DOLLAR)

    def usd(steps: float) -> dict[str, float]:
        (found,) = to_finish(comparison, steps)
        return {finish.row.setup.recipe: finish.usd.value for finish in found.rows if finish.usd}

    pair = pair_of(comparison)
    short, long = pair.short.setup.recipe, pair.long.setup.recipe
    if pair.steps is None:
        (loser,) = {"bf16", "compile"} - {short}
        for steps in (1 / 64, 1.0, 1e9):
            assert usd(steps)[short] <= usd(steps)[loser] * (1 + 1e-9)
        return
    at = usd(pair.steps.value)
    assert at[short] == pytest.approx(at[long], rel=1e-6)
    before, after = usd(pair.steps.value / 2), usd(pair.steps.value * 2)
    assert before[short] <= before[long] * (1 + 1e-9)
    assert after[long] <= after[short] * (1 + 1e-9)

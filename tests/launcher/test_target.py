"""What it takes to train to a target: known answers by hand, and no mean over runs that did not get there."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import stdev
from typing import Any

import pytest
from fake_summaries import CATALOGUE, PLAIN, changed, compared
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.analysis.pricing import ChargedAs
from fastlaunch.analysis.statistics import t_quantile
from fastlaunch.analysis.target import RowToTarget, Target, margins, parse_target, to_target
from fastlaunch.core.errors import UserError
from fastlaunch.measure.summary import Interval, RunSummary
from fastlaunch.report.target import target_json, target_table
from fastlaunch.report.text import MOST_WORDS
from fastlaunch_train.records.records import Eval

DOLLAR = 3600.0
ACCURACY = Target(metric="accuracy", value=0.9)


def run(
    recipe: str,
    seed: int | None,
    scores: Mapping[int, float | None],
    step_time_s: float = 1.0,
    **changes: Any,
) -> RunSummary:
    """A run that was evaluated, 2 s each, after the steps of `scores`; building took 8 s, warm-up nothing."""
    evals = tuple(
        Eval(
            step=step,
            split="validation",
            loss=None if score is None else 1 - score,
            num_samples=100,
            seconds=2.0,
            metric="accuracy",
            metric_value=score,
        )
        for step, score in scores.items()
    )
    known = {"build_s": 8.0, "num_warmup_steps": 10, "warmup_s": 10 * step_time_s, "evals": evals}
    timed = Interval(value=step_time_s, low=step_time_s, high=step_time_s)
    return changed(PLAIN, **{"recipe": recipe, "seed": seed, "step_time_s": timed, **known, **changes})


def rows(*summaries: RunSummary, target: Target = ACCURACY, **prices: Any) -> tuple[RowToTarget, ...]:
    return to_target(compared(*summaries, **prices), target)


def reaching(recipe: str, steps: Sequence[int], **changes: Any) -> list[RunSummary]:
    """A run of each seed, that reaches the target after its step and is evaluated once before."""
    return [
        run(recipe, seed, {step // 2: 0.5, step: 0.95}, **changes) for seed, step in enumerate(steps, start=1)
    ]


# --- the target ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("accuracy>=0.9", ACCURACY),
        (" loss <= 2.5 ", Target(metric="loss", value=2.5)),
        ("loss=1e-3", Target(metric="loss", value=0.001)),
    ],
)
def test_targets(text: str, target: Target) -> None:
    assert parse_target(text) == parse_target(target.text) == target


@pytest.mark.parametrize("text", ["", "accuracy=", "accuracy=high", "accuracy=nan", "a=1=2", "accuracy<=0.9"])
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not a target") as refused:
        parse_target(text)
    assert refused.value.hint is not None and "accuracy=0.9" in refused.value.hint


# --- one run ---------------------------------------------------------------------------------------------


def test_a_run_is_there_with_the_first_evaluation_that_says_so() -> None:
    scores = {100: 0.5, 200: 0.91, 300: 0.89, 400: 0.95}
    (row,) = rows(run("bf16", 1, scores))
    (found,) = row.runs
    assert (found.step, found.best, found.last_step, found.waited_steps) == (200, 0.95, 400, 100)
    # Building, 200 steps of a second, two evaluations of 2 s.
    assert found.time_s == pytest.approx(8 + 200 + 2 * 2)
    # A machine of one's own neither boots nor pulls.
    assert (found.unknown, row.assumed_s) == ((), {})


def test_where_no_run_shows_how_long_a_part_takes_it_is_assumed() -> None:
    (row,) = rows(run("bf16", 1, {200: 0.95}, instance="p5.48xlarge", num_warmup_steps=None))
    assert row.assumed_s == {"boot": 180, "pull": 300, "warmup": 1.6}
    assert row.runs[0].time_s == pytest.approx(180 + 300 + 1.6 + 8 + 200 + 2)
    assert row.runs[0].unknown == ("boot", "pull", "warmup")


def test_the_time_has_all_parts() -> None:
    summary = run(
        "compile",
        1,
        {200: 0.95},
        boot_s=40.0,
        pull_s=60.0,
        compile_s=30.0,
        warmup_s=15.0,
        longest_s=4.0,
        total_s=16.0,
        number=4,
        last_step=400,
    )
    (row,) = rows(summary)
    # Five more in the warm-up, and two checkpoints of 4 s.
    assert row.runs[0].time_s == pytest.approx(40 + 60 + 8 + 30 + 5 + 200 + 2 * 4 + 2)


def test_a_run_that_is_there_before_it_is_warm_has_but_a_part_of_the_warm_up() -> None:
    (row,) = rows(run("bf16", 1, {5: 0.95}, warmup_s=14.0))
    # Ten steps of warm-up took 4 s more than later steps do.
    assert row.runs[0].time_s == pytest.approx(8 + 5 + 2 + 2)
    (row,) = rows(run("bf16", 1, {5: 0.95}, warmup_s=2.0))
    # Steps that were faster then are no credit.
    assert row.runs[0].time_s == pytest.approx(8 + 5 + 2)


def test_a_loss_is_reached_from_above_and_one_that_is_no_number_is_not() -> None:
    (row,) = rows(run("bf16", 1, {100: None, 200: 0.3, 300: 0.5}), target=Target(metric="loss", value=0.5))
    assert (row.runs[0].step, row.runs[0].best) == (300, 0.5)


def test_test_data_and_best_weights_reach_nothing() -> None:
    summary = run("bf16", 1, {100: 0.5})
    (line,) = summary.quality.evals
    others = (
        replace(line, split="test", metric_value=0.99),
        replace(line, weights="best", metric_value=0.99),
    )
    (row,) = rows(changed(summary, evals=(line, *others)))
    assert row.runs[0].step is None
    (row,) = rows(changed(summary, evals=(line, *others)), target=Target(metric="accuracy", value=0.5))
    # Nor is their time what it took to get there.
    assert row.runs[0].time_s == pytest.approx(8 + 100 + 2 + 2)


# --- seeds -----------------------------------------------------------------------------------------------


def test_three_seeds_that_all_got_there_have_a_mean_and_an_interval() -> None:
    (row,) = rows(*reaching("bf16", [100, 200, 300]), usd_per_hour=DOLLAR)
    times = [8 + step + 4 for step in (100, 200, 300)]
    assert list(row.times_s.values()) == pytest.approx(times)
    assert (row.num_reached, row.num_seeds, row.reason) == (3, 3, None)
    half_width = 2.919986 * stdev(times) / math.sqrt(3)
    assert row.time_s is not None and row.samples is not None
    assert (row.time_s.value, row.time_s.low, row.time_s.high) == pytest.approx(
        (212, max(0, 212 - half_width), 212 + half_width), rel=1e-6
    )
    assert row.samples.value == 64 * 200


def test_seeds_that_took_the_same_are_not_taken_for_certain() -> None:
    (row,) = rows(*reaching("bf16", [100, 100, 100]))
    half_width = 2.919986 * 0.001 * 112 / math.sqrt(3)
    assert row.time_s is not None and row.time_s.high == pytest.approx(112 + half_width)


def test_repeats_of_one_seed_are_one_seed() -> None:
    (row,) = rows(*(run("bf16", 7, {100: 0.95}) for _ in range(4)))
    assert (row.num_seeds, row.time_s) == (1, None)
    assert row.reason == "1 of 3 seeds: 2 more runs of other seeds (--seed 8 --repeats 2)"
    (row,) = rows(run("bf16", 7, {100: 0.95}), run("bf16", 7, {100: 0.5}), *reaching("bf16", [50, 50]))
    assert (row.num_reached, row.num_seeds) == (2, 3)


def test_there_is_no_mean_over_those_that_got_there() -> None:
    comparison = compared(*reaching("bf16", [100, 200, 300]), run("bf16", 9, {400: 0.7}), usd_per_hour=DOLLAR)
    (row,) = to_target(comparison, ACCURACY)
    assert (row.num_reached, row.num_seeds, row.time_s, row.samples) == (3, 4, None, None)
    assert not row.is_ranked
    text = target_table(comparison, "accuracy=0.9", CATALOGUE)
    assert "mean s" not in text and "costs least" not in text


def test_runs_that_failed_count_among_those_that_did_not_get_there() -> None:
    lost = run("bf16", 4, {}, status="nan_loss", problems=("ended as nan_loss",), step_time_s=1.0)
    comparison = compared(*reaching("bf16", [100, 200, 300]), lost)
    (row,) = to_target(comparison, ACCURACY)
    assert (row.num_reached, row.num_seeds, row.time_s) == (3, 4, None)
    other = changed(lost, recipe="fp32")
    (row,) = rows(*reaching("bf16", [100, 200, 300]), other)
    assert row.num_seeds == 3


def test_a_run_too_short_to_be_timed_takes_the_step_time_of_its_repeats() -> None:
    short = run("bf16", 3, {15: 0.95}, problems=("too few steps",))
    short = changed(short, step_time_s=None, warmup_s=None, num_warmup_steps=None)
    (row,) = rows(*reaching("bf16", [100, 200]), short)
    (found,) = (one for one in row.runs if one.seed == 3)
    assert found.time_s == pytest.approx(8 + 15 * 1.0 + 2, rel=1e-3)
    assert found.unknown == ()
    assert row.time_s is not None and row.num_seeds == 3


# --- beside each other -----------------------------------------------------------------------------------


def test_the_cheapest_way_to_a_target_and_how_far_the_others_are_behind() -> None:
    comparison = compared(
        *reaching("bf16", [400, 410, 420], step_time_s=2.0),
        *reaching("compile", [390, 400, 410], step_time_s=1.0, compile_s=30.0),
        usd_per_hour=DOLLAR,
    )
    found = to_target(comparison, ACCURACY)
    (margin,) = margins(found, ACCURACY)
    assert (margin.best.row.setup.recipe, margin.other.row.setup.recipe) == ("compile", "bf16")
    assert margin.is_settled
    # The seeds are rounds: Student's t of the paired differences.
    ours, theirs = ([math.log(time) for time in one.times_s.values()] for one in found)
    apart = [one - other for one, other in zip(ours, theirs, strict=True)]
    assert margin.ratio.value == pytest.approx(math.exp(sum(apart) / 3))
    error = max(math.sqrt(2) * 0.001, stdev(apart)) / math.sqrt(3)
    assert margin.ratio.low is not None
    assert margin.ratio.low / margin.ratio.value == pytest.approx(math.exp(-4.302653 * error), rel=1e-6)


@pytest.mark.parametrize("where", [{}, {"instance": "p5.48xlarge"}])
def test_dollars_to_a_target_are_its_seconds_at_the_price(where: dict[str, Any]) -> None:
    comparison = compared(
        *reaching("bf16", [100, 200, 300], **where),
        *reaching("compile", [90, 190, 290], compile_s=200.0, **where),
        usd_per_hour=DOLLAR,
    )
    start_s = 480 if where else 0
    (workload,) = target_json(comparison, "accuracy=0.9", CATALOGUE)["workloads"]
    bf16, compiled = workload["rows"]
    assert [(one["seed"], one["step"], one["time_s"]) for one in bf16["runs"]] == [
        (seed, step, pytest.approx(start_s + 12 + step)) for seed, step in enumerate((100, 200, 300), start=1)
    ]
    assert bf16["evidence"] == ("measured + assumed start" if where else "measured")
    # A range, a dollar and a ratio all follow from the seconds, whose parts are the same.
    per_s = 1.0 if not where else bf16["usd_to_target"]["value"] / bf16["time_to_target_s"]["value"]
    assert 1.0 <= per_s < 1.0001
    for row in (bf16, compiled):
        for end in ("value", "low", "high"):
            assert row["usd_to_target"][end] == pytest.approx(per_s * row["time_to_target_s"][end])
    (margin,) = workload["margins"]
    ratios = [
        other["time_s"] / one["time_s"] for one, other in zip(bf16["runs"], compiled["runs"], strict=True)
    ]
    assert margin["ratio"]["value"] == pytest.approx(math.prod(ratios) ** (1 / 3))


def sentence_of(*summaries: RunSummary, **prices: Any) -> str:
    comparison = compared(*summaries, **prices)
    (workload,) = target_json(comparison, "accuracy=0.9", CATALOGUE)["workloads"]
    sentence = str(workload["sentence"])
    text = target_table(comparison, "accuracy=0.9", CATALOGUE)
    assert " ".join(text.partition("\n\n")[0].split()) == f"{sentence}."
    return sentence


def test_an_answer_of_long_names_is_read_at_a_glance() -> None:
    long = "bf16 grad_accumulation=2 optimizer_impl=fused"
    rows = [
        *reaching(long, [400, 410, 420], step_time_s=2.0),
        *reaching("compile", [390, 400, 410], instance="p4d.24xlarge"),
    ]
    (workload,) = target_json(compared(*rows, usd_per_hour=DOLLAR), "accuracy=0.9", CATALOGUE)["workloads"]
    assert len(str(workload["sentence"]).split()) <= MOST_WORDS


def test_the_answer_names_the_first_row_the_next_and_how_sure_it_is() -> None:
    bf16 = reaching("bf16", [400, 410, 420], step_time_s=2.0)
    compiled = reaching("compile", [390, 400, 410], step_time_s=1.0, compile_s=30.0)
    told = sentence_of(*bf16, *compiled)
    assert told.startswith("compile reaches accuracy >= 0.9 after 442 s; bf16 takes 1.88")
    assert "x as long (95% interval 1.8" in told
    told = sentence_of(*bf16, *compiled, usd_per_hour=DOLLAR)
    assert told.startswith("compile reaches accuracy >= 0.9 for $442.00; bf16 costs 1.88")
    alone = sentence_of(*compiled)
    assert alone.startswith("compile reaches accuracy >= 0.9 after 442 s, the mean of 3 seeds")
    near = sentence_of(*bf16, *reaching("compile", [300, 410, 500], step_time_s=2.0))
    assert near.startswith("not settled: ")
    assert "takes -" not in near
    slow = sentence_of(*reaching("bf16", [400, 410, 420], step_time_s=4.0), *compiled)
    assert "bf16 takes 3.737x as long (95% interval 3.7" in slow


def test_names_stay_whole_in_80_columns() -> None:
    name = "compile-reduce-overhead"
    summaries = [*reaching("bf16", [100, 200, 300]), *reaching(name, [100, 190, 300], compile_s=20.0)]
    for prices in ({}, {"price_as": (ChargedAs.parse("p5en.48xlarge:1/8"),)}):
        table = target_table(compared(*summaries, **prices), "accuracy=0.9", CATALOGUE, width=80)
        assert any(line.startswith(f"{name}  ") for line in table.splitlines())
        assert max(map(len, table.splitlines())) <= 80 and " batch " not in table


def test_where_no_row_gets_there_the_answer_names_the_closest_and_nothing_else_is_said() -> None:
    compiled = [*reaching("compile", [100, 200]), run("compile", 3, {400: 0.88})]
    bf16 = [*reaching("bf16", [100]), run("bf16", 2, {400: 0.7}), run("bf16", 3, {400: 0.89})]
    told = sentence_of(*bf16, *compiled)
    assert told == "no row reached accuracy >= 0.9 with all 3 seeds; closest: compile, 2 of 3"
    (workload,) = target_json(compared(*bf16, *compiled), "accuracy=0.9", CATALOGUE)["workloads"]
    assert workload["notes"] == []
    table = target_table(compared(*bf16, *compiled), "accuracy=0.9", CATALOGUE).split("\n\n")[2]
    assert table.splitlines()[2].startswith("compile")
    never = sentence_of(*(run("bf16", seed, {400: 0.7 + seed / 100}) for seed in (1, 2, 3)))
    assert never.endswith("with all 3 seeds; closest: bf16, best 0.73")
    few = reaching("bf16", [100, 200])
    assert sentence_of(*few).endswith("can be ranked: bf16, 2 of 3 seeds")
    (workload,) = target_json(compared(*few), "accuracy=0.9", CATALOGUE)["workloads"]
    assert "2 of 3 seeds: 1 more run of other seeds" in workload["notes"][0]


def test_a_margin_spends_no_more_than_its_looks_may() -> None:
    def low(**where: Any) -> float:
        summaries = [
            changed(summary, session="s", round=summary.seed, **where)
            for recipe, steps in (("bf16", [400, 420, 440]), ("compile", [380, 410, 415]))
            for summary in reaching(recipe, steps)
        ]
        (margin,) = margins(rows(*summaries, usd_per_hour=DOLLAR), ACCURACY)
        assert margin.ratio.low is not None
        return math.log(margin.ratio.value / margin.ratio.low)

    # A plan of 8 rounds looks after rounds 3 to 8, each time at 1.4%.
    quantiles = t_quantile(1 - 0.014 / 2, 2) / t_quantile(1 - 0.05 / 2, 2)
    assert low(max_rounds=8) / low(max_rounds=None) == pytest.approx(quantiles)


@pytest.mark.parametrize(
    ("one", "other", "is_apart"),
    [
        (("file", "ab"), ("file", "cd"), True),
        (("file", "ab"), ("file", None), True),
        (("file", "ab"), ("synthetic", None), True),
        (("file", "ab"), ("file", "ab"), False),
        (("loader", None), ("synthetic", None), False),
    ],
)
def test_rows_on_other_data_do_not_race(
    one: tuple[str, str | None], other: tuple[str, str | None], is_apart: bool
) -> None:
    both = []
    for recipe, (data, digest) in (("bf16", one), ("compile", other)):
        fingerprint = {"data": digest} if digest else {}
        both += reaching(recipe, (100, 110, 120), data=data, fingerprint=fingerprint)
    comparison = compared(*both)
    assert bool(margins(to_target(comparison, ACCURACY), ACCURACY)) is not is_apart


# --- whatever the numbers --------------------------------------------------------------------------------

SCORES = st.dictionaries(st.integers(1, 1000), st.floats(0, 1), min_size=1, max_size=6)


@given(st.lists(SCORES, min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 1))
def test_a_harder_target_is_reached_by_no_more_seeds_and_no_sooner(
    scores: list[dict[int, float]], easy: float, hard: float
) -> None:
    easy, hard = sorted((easy, hard))
    summaries = [run("bf16", seed, own) for seed, own in enumerate(scores)]
    (sooner,) = rows(*summaries, target=Target(metric="accuracy", value=easy))
    (later,) = rows(*summaries, target=Target(metric="accuracy", value=hard))
    assert later.num_reached <= sooner.num_reached <= sooner.num_seeds == len(scores)
    for one, other in zip(sooner.runs, later.runs, strict=True):
        if other.step is not None:
            assert one.step is not None and one.step <= other.step
            assert one.time_s is not None and other.time_s is not None and one.time_s <= other.time_s
    if sooner.time_s is not None:
        assert sooner.num_reached == sooner.num_seeds >= 3
        assert sooner.time_s.low is not None and sooner.time_s.high is not None
        assert sooner.time_s.low <= sooner.time_s.value <= sooner.time_s.high


def test_that_no_row_reached_it_is_read_at_a_glance() -> None:
    long = "bf16 ddp_bucket_mb=25 grad_accumulation=2 optimizer_impl=fused parameter_dtype=bf16-master"
    never = [
        run(recipe, seed, {10: 0.5}, instance=instance)
        for recipe, instance in ((long, "p5.48xlarge"), ("bf16", "p4d.24xlarge"))
        for seed in (1, 2, 3)
    ]
    (workload,) = target_json(compared(*never), "accuracy=0.9", CATALOGUE)["workloads"]
    assert "closest: " in workload["sentence"] and len(workload["sentence"].split()) <= MOST_WORDS
    alone = sentence_of(*reaching("bf16", [400]))
    assert "can be ranked: bf16" in alone and len(alone.split()) <= MOST_WORDS

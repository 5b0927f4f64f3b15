"""What a job costs to its end on each row, and which costs least: known answers by hand."""

import datetime
import math
from pathlib import Path
from typing import Any

import pytest
from fake_records import read_all, write_run
from fake_summaries import CATALOGUE, PLAIN, changed, compared

from fastlaunch.analysis.account import Account, account_of_row, account_of_run
from fastlaunch.analysis.compare import Comparison
from fastlaunch.analysis.cost import Finish, to_finish
from fastlaunch.analysis.pricing import ChargedAs
from fastlaunch.analysis.rate import Evidence
from fastlaunch.catalog.prices import VolumePrice
from fastlaunch.core.errors import UserError
from fastlaunch.measure.published import read_published, shipped_figures
from fastlaunch.measure.summarize import summarize
from fastlaunch.measure.summary import Interval, RunSummary
from fastlaunch.report.cost import finish_json, finish_table
from fastlaunch.report.text import MOST_WORDS, with_range
from fastlaunch_train.records.records import FROM_CACHE, Check, Eval, Phase

#: A dollar a second.
DOLLAR = 3600.0
H100: dict[str, Any] = {"device_name": "NVIDIA H100 80GB HBM3", "num_gpus": 8}
P5: dict[str, Any] = {**H100, "instance": "p5.48xlarge"}


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
    (finish,) = to_finish(comparison.rows, steps, lambda region: None)
    return finish


def row_account(comparison: Comparison) -> Account:
    known = account_of_row(comparison.rows[0])
    assert known is not None
    return known


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
    assert finish.cost is not None and finish.rate is not None
    assert {part.name: part.seconds.value for part in finish.cost.parts if part.seconds} == {
        "waiting": 0,
        "boot": 40,
        "pull": 20,
        "build": 5,
        "compile": 600,
        "warmup": pytest.approx(2),  # 12 s for ten steps of 1 s
        "steps": pytest.approx(1000),
        "evaluations": pytest.approx(10 * 3 + 10),  # every 100 steps, and on test data at the end
        "checkpoints": pytest.approx(5 * 4),  # every 200 steps
    }
    assert finish.cost.hours.value * 3600 == pytest.approx(1727)
    assert finish.cost.usd.value == pytest.approx(1727)
    assert finish.rate.evidence is Evidence.MEASURED


def test_a_row_that_is_charged_as_another_type_has_the_range_of_another_machine() -> None:
    here = three(
        "bf16", 0.1, by=0.01, instance="p5.48xlarge", device_name="NVIDIA H100 80GB HBM3", num_gpus=8
    )
    elsewhere = [changed(summary, instance=None) for summary in here]
    charge = (ChargedAs(instance="p5.48xlarge"),)
    rates = [finish_of(compared(*runs, price_as=charge)).rate for runs in (here, elsewhere)]
    measured, same_gpu = rates
    assert measured and same_gpu and measured.samples_per_s.low and same_gpu.samples_per_s.low
    assert (measured.evidence, same_gpu.evidence) == (Evidence.MEASURED, Evidence.SAME_GPU)
    assert same_gpu.samples_per_s.low < measured.samples_per_s.low


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
    total_s = sum(seconds or 0.0 for seconds in account.parts_s(200).values())
    assert total_s == pytest.approx(7 + 30 + 4 * 2 + 5 * 1.5 + took_s)
    assert (summary.quality.eval_s, summary.checkpoints.total_s) == (7.5, 8.0)


def test_what_is_not_known_is_assumed() -> None:
    finish = finish_of(compared(run("bf16", 1.0, num_warmup_steps=None, **P5), usd_per_hour=DOLLAR), 100)
    assert finish.cost is not None
    evidence = {part.name: part.evidence for part in finish.cost.parts}
    assert evidence["build"] == evidence["steps"] == "measured"
    assert finish.cost.assumed_s == {"boot": 180, "pull": 300, "warmup": 1.6}


VOLUME = VolumePrice(
    region="us-east-1",
    usd_per_gib_month=0.08,
    usd_per_mib_per_s_month=0.04,
    as_of=datetime.date(2026, 11, 1),
    source="a list",
)


def test_a_machine_of_ones_own_neither_boots_nor_pulls_nor_pays_for_a_volume() -> None:
    at_home, on_aws = (
        to_finish(compared(run("bf16", 1.0, **where), usd_per_hour=DOLLAR).rows, 100, lambda _: VOLUME)[0]
        for where in ({}, P5)
    )
    assert at_home.cost is not None and on_aws.cost is not None
    assert at_home.cost.hours.value * 3600 == pytest.approx(5 + 100)
    assert (at_home.cost.usd.value, at_home.cost.assumed_s) == (pytest.approx(105), {})
    assert on_aws.cost.hours.value * 3600 == pytest.approx(105 + 480)
    assert on_aws.cost.usd.value > 585
    # Charged as a type of AWS, the job boots a machine of it.
    charged = finish_of(compared(run("bf16", 1.0, **H100), price_as=(ChargedAs(instance="p5.48xlarge"),)))
    assert charged.cost is not None and set(charged.cost.assumed_s) == {"boot", "pull"}


def test_a_sum_with_assumed_parts_is_not_called_measured() -> None:
    for where, evidence in (({}, "measured"), (P5, "measured + assumed start")):
        comparison = compared(*three("bf16", 1.0, **where), usd_per_hour=DOLLAR)
        (workload,) = finish_json(comparison, 10_000, CATALOGUE)["workloads"]
        assert workload["rows"][0]["evidence"] == evidence
        assert workload["sentence"].endswith(f", {evidence}")
        text = finish_table(comparison, 10_000, CATALOGUE)
        assert ("assumed, not measured: 3 min of boot, 5 min of pull" in " ".join(text.split())) is bool(
            where
        )


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
    assert row_account(both).once_s["compile"] == 600
    slower = changed(cold, compile_s=800.0, seed=2)
    assert row_account(compared(cold, slower)).once_s["compile"] == 700


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
        finish_table(compared(FULL), steps, CATALOGUE)


# --- rows beside each other ---------------------------------------------------------------------------------


def test_the_cheapest_row_depends_on_the_length_of_the_job() -> None:
    rows = [*three("bf16", 2.0), *three("compile", 1.0, compile_s=600.0)]
    comparison = compared(*rows, usd_per_hour=DOLLAR)
    for steps, recipe in ((500, "bf16"), (700, "compile")):
        (workload,) = finish_json(comparison, steps, CATALOGUE)["workloads"]
        assert workload["sentence"].startswith(f"{recipe}: {steps} steps for $")
        usd = {row["recipe"]: row["usd"]["value"] for row in workload["rows"]}
        assert min(usd, key=lambda name: usd[name]) == recipe
        assert usd["compile"] - usd["bf16"] == pytest.approx(600 - steps, abs=1)


def test_rows_of_another_batch_are_held_to_as_many_samples_and_a_barred_one_is_not_the_cheapest() -> None:
    wide = run("bf16", 1.5, batch_size_per_gpu=128, samples_per_step=128.0)
    failed = Check(name="isolation", passed=False)
    wrong = run("te-article", 0.5, checks=(failed,))
    comparison = compared(run("bf16", 1.0), wide, wrong, usd_per_hour=DOLLAR)
    (workload,) = finish_json(comparison, 1000, CATALOGUE)["workloads"]
    assert [row["steps"] for row in workload["rows"]] == [1000, 500, 1000]
    assert workload["sentence"] == "bf16: the job for $1,005 ±4.0% in 16.8 min, measured"
    text = finish_table(comparison, 1000, CATALOGUE)
    ranked, others = text.split("not ranked with these:")
    assert "\nte-article " in others and "at batch 128" in others and "\nbf16 " in ranked
    assert "vit-huge on H200: time and cost for as many images as 1,000 bf16 steps" in text


def test_without_a_price_the_answer_is_which_row_finishes_first() -> None:
    rows = [*three("bf16", 2.0), *three("compile", 1.0, compile_s=600.0)]
    for steps, first in ((500, "bf16"), (700, "compile")):
        comparison = compared(*rows)
        (workload,) = finish_json(comparison, steps, CATALOGUE)["workloads"]
        assert all(row["hours"] and row["usd"] is None for row in workload["rows"])
        assert workload["sentence"].startswith(f"{first}: {steps} steps in ")
        assert "$" not in workload["sentence"] and " less than " in workload["sentence"]
        answer, _, *table = finish_table(comparison, steps, CATALOGUE).split("\n\n")
        assert " ".join(answer.split()) == f"{workload['sentence']}."
        # The row of the answer is the first of the table.
        assert table[0].splitlines()[2].startswith(first)


def test_a_range_that_is_narrower_than_what_is_assumed_is_not_shown() -> None:
    comparison = compared(*three("bf16", 1.0, by=0.01, **P5), usd_per_hour=DOLLAR)
    short, long = (finish_table(comparison, steps, CATALOGUE) for steps in (100, 1_000_000))
    # At 3% a range of 100 s is 3 s, and 480 s are assumed.
    assert "±" not in short.partition("* ")[0] and "±" in long.partition("* ")[0]


def test_single_runs_have_the_range_of_usual_runs_and_published_figures_none() -> None:
    for kind, ending in (("records", "measured"), ("published", "without a range")):
        rows = [run("bf16", 1.0, kind=kind), run("compile", 0.5, kind=kind)]
        (workload,) = finish_json(compared(*rows, usd_per_hour=DOLLAR), 1000, CATALOGUE)["workloads"]
        assert workload["sentence"].endswith(f"less than bf16, {ending}")


def test_rows_whose_ranges_overlap_are_not_settled() -> None:
    rows = [*three("bf16", 1.0, by=0.05), *three("compile", 0.99, by=0.05)]
    (workload,) = finish_json(compared(*rows, usd_per_hour=DOLLAR), 1000, CATALOGUE)["workloads"]
    assert workload["sentence"].startswith("not settled between compile and bf16: 1,000 steps for $")
    rows += three("tf32", 0.995, by=0.05)
    (workload,) = finish_json(compared(*rows, usd_per_hour=DOLLAR), 1000, CATALOGUE)["workloads"]
    assert workload["sentence"].startswith("not settled between compile and 2 others: ")


def test_an_answer_of_long_names_is_read_at_a_glance() -> None:
    long = "fp8-fused dgrad_accumulation=fast last_block=class_token weight_cast=optimizer"
    other = {**P5, "instance": "p4d.24xlarge"}
    for by, beginning in ((0.001, "bf16 on p4d.24xlarge: 1,000 steps for $"), (0.5, "not settled")):
        rows = [*three(long, 1.0, by=by, **P5), *three("bf16", 2.0, by=by, **other)]
        (workload,) = finish_json(compared(*rows), 1000, CATALOGUE)["workloads"]
        assert workload["sentence"].startswith(beginning)
        assert len(workload["sentence"].split()) <= MOST_WORDS


def test_rows_without_a_time_make_no_table() -> None:
    (path,) = (path for path in shipped_figures() if path.stem == "pointwise-fusion")
    shown = finish_table(compared(*read_published(path)), 1000, CATALOGUE)
    assert shown == "gelu-pointwise: no row for 1,000 steps is both ranked and timed."


def test_a_range_that_rounds_to_nothing_is_not_shown() -> None:
    assert with_range(Interval(value=1000.0, low=999.8, high=1000.2)) == "1,000"
    assert with_range(Interval(value=1000.0, low=999.0, high=1001.0)) == "1,000 ±0.1%"

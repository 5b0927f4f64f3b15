"""What bars a row from being ranked, what is only said, and what becomes of a comparison with such rows."""

import csv
import datetime
import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fake_summaries import changed, evaluated

from fastlaunch.analysis.compare import Comparison, MeasuredRun, PriceRequest, Row, compare
from fastlaunch.catalog.load import load_catalogue
from fastlaunch.core.errors import UserError
from fastlaunch.measure.summary import Interval, RunSummary
from fastlaunch.report.data import as_csv, as_json
from fastlaunch.report.table import as_table
from fastlaunch.report.text import answer
from fastlaunch_train.records.records import Check

CATALOGUE = load_catalogue()
TODAY = datetime.date(2026, 11, 21)

PASSED = (
    Check(name="equivalence", passed=True, value=0.003, limit=0.02),
    Check(name="isolation", passed=True, value=0.0, limit=0.0),
    Check(name="permutation", passed=True, value=0.0, limit=0.0),
)
ACROSS_THE_BATCH = (
    *PASSED[:1],
    Check(name="isolation", passed=False, detail="changing image 3 changed 28 other outputs"),
    Check(name="permutation", passed=False, value=0.31, limit=0.01),
)


def arm(
    recipe: str, step_time_s: float, losses: Sequence[float | None] = (), **changes: Any
) -> list[MeasuredRun]:
    """Three runs of seeds 0, 1, ...: as many as there are losses."""
    changes = {"checks": PASSED, **changes}
    summaries = [
        changed(
            evaluated(recipe, seed, loss, **changes), step_time_s=_timed(step_time_s * (1 + 0.001 * seed))
        )
        for seed, loss in enumerate(losses)
    ]
    return _candidates(recipe, summaries)


def _candidates(recipe: str, summaries: Sequence[RunSummary]) -> list[MeasuredRun]:
    return [
        MeasuredRun(run_id=f"{recipe}-{number}", summary=summary)
        for number, summary in enumerate(summaries, start=1)
    ]


def _timed(value: float) -> Interval:
    return Interval(value=value, low=0.999 * value, high=1.001 * value)


def compared(*arms: list[MeasuredRun], **options: Any) -> Comparison:
    candidates = [candidate for runs in arms for candidate in runs]
    return compare(candidates, catalogue=CATALOGUE, prices=PriceRequest(today=TODAY), **options)


def rows_of(comparison: Comparison) -> dict[str, Row]:
    return {row.setup.recipe: row for row in comparison.rows}


EQUAL = (2.0, 2.1, 2.2)
WORSE = (2.08, 2.185, 2.29)

BF16 = arm("bf16", 0.1, EQUAL)
COMPILE = arm("compile", 0.08, EQUAL)
WRONG = arm("te-bf16", 0.05, EQUAL, checks=ACROSS_THE_BATCH)
DULL = arm("te-fp8", 0.04, WORSE)


def test_what_passes_both_guards_is_ranked_without_a_word() -> None:
    row = rows_of(compared(BF16, COMPILE))["compile"]
    assert (row.verdict.kind, row.verdict.reasons) == ("better", ("by speed: no price is known",))
    assert (row.validity.numerics, row.validity.convergence.verdict) == ("passed", "within")
    base = rows_of(compared(BF16, COMPILE))["bf16"]
    assert (base.verdict.kind, base.validity.convergence.verdict, base.verdict.reasons) == (
        "baseline",
        "reference",
        (),
    )


def test_a_failed_check_bars_with_its_numbers() -> None:
    row = rows_of(compared(BF16, WRONG))["te-bf16"]
    assert (row.verdict.kind, row.is_barred, row.validity.numerics) == ("not ranked", True, "failed")
    assert row.verdict.reasons[:2] == (
        "isolation: changing image 3 changed 28 other outputs",
        "permutation: the outputs of a permuted batch differ by 31%, at most 1% is allowed",
    )
    # It is shown with all its figures.
    assert row.speed.samples_per_s is not None and row.speed.samples_per_s.low is not None
    assert row.verdict.speed_ratio is not None
    assert row.verdict.speed_ratio.value == pytest.approx(2.0)
    assert row.verdict.speed_ratio.low is not None


def test_a_check_that_failed_in_one_run_bars_the_row() -> None:
    first, *others = COMPILE
    failed = replace(first, summary=changed(first.summary, checks=ACROSS_THE_BATCH[:2]))
    for runs in ([failed, *others], [*others, failed], [*others, _unsteady(failed)]):
        row = rows_of(compared(BF16, runs))["compile"]
        assert row.verdict.kind == "not ranked"
        assert (
            row.verdict.reasons[0] == "isolation: changing image 3 changed 28 other outputs (in 1 of 3 runs)"
        )


def _unsteady(candidate: MeasuredRun) -> MeasuredRun:
    return replace(candidate, summary=changed(candidate.summary, steady=False))


def test_a_worse_loss_bars_with_its_evidence() -> None:
    row = rows_of(compared(BF16, DULL))["te-fp8"]
    assert (row.verdict.kind, row.validity.convergence.verdict) == ("not ranked", "worse")
    assert (
        row.verdict.reasons[0]
        == "convergence: held-out loss +4.0% against bf16 (at least +3.6%, 95%), 3 pairs"
    )


def test_a_loss_that_is_no_number_bars_though_its_run_is_left_out() -> None:
    good, lost = COMPILE, COMPILE[2].summary
    diverged = changed(lost, evals=(), status="nan_loss", problems=("ended as nan_loss",), step_time_s=None)
    comparison = compared(BF16, [*good[:2], MeasuredRun(run_id="lost", summary=diverged)])
    row = rows_of(comparison)["compile"]
    assert (row.num_runs, row.verdict.kind) == (2, "not ranked")
    assert row.verdict.reasons[0] == "convergence: the loss is no number at seed 2, where that of bf16 is"
    assert "lost (compile) is left out: ended as nan_loss" in comparison.warnings


def test_blocks_that_are_known_to_compute_something_else() -> None:
    for recipe in ("te-article", "te-article-fp8", "bf16 blocks=te-article"):
        row = rows_of(compared(BF16, arm(recipe, 0.05, EQUAL, checks=())))[recipe]
        assert (row.verdict.kind, row.validity.numerics) == ("not ranked", "failed")
        assert row.verdict.reasons[0].startswith("known not to be equivalent")
        assert "numerics not checked" in row.verdict.reasons
    others = ("te-bf16", "ours blocks=native", "te-article blocks=te")
    for recipe in others:
        row = rows_of(compared(BF16, arm(recipe, 0.05, EQUAL, checks=())))[recipe]
        assert (row.verdict.kind, row.validity.numerics) == ("better", "not checked")


def test_bf16_is_what_others_are_held_against_with_overrides_too() -> None:
    reference = arm("bf16 optimizer=adamw", 0.1, EQUAL)
    wrong = arm("te-fp8 optimizer=adamw", 0.04, WORSE)
    for arms in ((wrong, reference), (reference, wrong)):
        comparison = compared(*arms)
        assert comparison.baselines == {"vit-huge": "bf16 optimizer=adamw"}
        rows = rows_of(comparison)
        assert rows["te-fp8 optimizer=adamw"].verdict.kind == "not ranked"
        assert rows["bf16 optimizer=adamw"].validity.convergence.verdict == "reference"
    plain = rows_of(compared(reference, BF16))
    assert plain["bf16"].validity.convergence.verdict == "reference" and plain["bf16"].is_baseline


def test_a_row_is_held_against_one_that_trains_by_its_rules() -> None:
    """With a tenth of the rate all end 10% higher: within that rate nothing is wrong with either recipe."""
    slow = [1.1 * loss for loss in EQUAL]
    arms = [
        BF16,
        COMPILE,
        arm("bf16 learning_rate=0.0001", 0.1, slow),
        arm("compile learning_rate=0.0001", 0.08, slow),
        arm("te-fp8 learning_rate=0.0001", 0.04, [1.04 * loss for loss in slow]),
    ]
    rows = rows_of(compared(*arms))
    told = {
        name: (row.validity.convergence.reference, row.validity.convergence.verdict)
        for name, row in rows.items()
    }
    assert told == {
        "bf16": ("bf16", "reference"),
        "compile": ("bf16", "within"),
        "bf16 learning_rate=0.0001": ("bf16 learning_rate=0.0001", "reference"),
        "compile learning_rate=0.0001": ("bf16 learning_rate=0.0001", "within"),
        "te-fp8 learning_rate=0.0001": ("bf16 learning_rate=0.0001", "worse"),
    }
    assert rows_of(compared(*arms[::-1]))["compile"].validity.convergence.verdict == "within"
    text = as_table(compared(*arms))
    of_each = text.split("held-out loss at the end, and its difference to that of ")[1:]
    assert [part.splitlines()[0].partition(" at the same seeds")[0] for part in of_each] == [
        "bf16",
        "bf16 learning_rate=0.0001",
    ]
    assert re.search(r"^te-fp8 learning_rate=0.0001 +3 ", of_each[1], re.MULTILINE)
    assert "learning_rate" not in of_each[0].partition("held-out")[0]


def test_without_such_a_row_it_is_unknown_and_the_command_is_told() -> None:
    """Another optimizer that trains worse is no fault of how a recipe computes."""
    for rules in ("optimizer=adafactor", "learning_rate=0.01", "learning_rate=0.01 optimizer=adafactor"):
        row = rows_of(compared(BF16, arm(f"compile {rules}", 0.08, WORSE)))[f"compile {rules}"]
        assert (row.verdict.kind, row.validity.convergence.verdict) == ("better", "unknown")
        asked = " ".join(f"--set {rule}" for rule in rules.split())
        assert row.verdict.reasons[-1] == (
            f"convergence unknown: there is no reference with {rules.replace(' ', ' and ')}; run"
            f" fastlaunch submit --local --workload vit-huge --recipe bf16 {asked} --batch-size 64 --nproc 1"
            " --steps 200 --eval-every 10 --seed 0 --repeats 3"
        )
    # The other way round: the row has the workload's own rules, and bf16 has not.
    row = rows_of(compared(arm("bf16 learning_rate=0.01", 0.1, EQUAL), arm("compile", 0.08, WORSE)))[
        "compile"
    ]
    assert (
        "there is no reference with the workload's own optimizer and learning rate; run"
        in row.verdict.reasons[-1]
    )
    assert "--recipe bf16 --batch-size 64" in row.verdict.reasons[-1]


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size_per_gpu": 128},
        {"data": "loader"},
        {"sequence_length": 512},
        {"end": 200},
        {"num_gpus": 2},
        {"fingerprint": {"model": "gpt2"}},
    ],
)
def test_a_reference_that_makes_pairs_comes_before_others(changes: dict[str, Any]) -> None:
    """bf16 is not of the row's batch, data, ... , and fp32 is."""
    row = rows_of(compared(BF16, arm("fp32", 0.2, EQUAL, **changes), arm("te-fp8", 0.04, WORSE, **changes)))[
        "te-fp8"
    ]
    assert (row.validity.convergence.reference, row.validity.convergence.verdict) == ("fp32", "worse")
    both = [arm(name, 0.1, EQUAL, **changes) for name in ("fp32", "bf16", "compile")]
    assert rows_of(compared(*both))["compile"].validity.convergence.reference == "bf16"


def test_what_is_not_known_is_ranked_and_said() -> None:
    two = arm("compile", 0.08, EQUAL, checks=())
    row = rows_of(compared([run for run in BF16 if run.summary.seed != 1], two))["compile"]
    assert row.verdict.kind == "better"
    assert row.verdict.reasons[1:] == (
        "numerics not checked",
        "convergence unknown: 2 of 3 pairs: seed 1 has no bf16 run; 3 more (of both: --seed 3 --repeats 3)"
        " would make 5",
    )
    noisy = arm("compile", 0.08, (2.2, 2.0, 2.26))
    row = rows_of(compared(BF16, noisy))["compile"]
    assert row.verdict.reasons[1] == (
        "convergence unknown: held-out loss +2.5% against bf16 (-9.5% to +14.6%, 95% each), 3 pairs;"
        " about 21 more (of both: --seed 3 --repeats 21) would tell"
    )
    once = [replace(run, summary=changed(run.summary, seed=0)) for run in COMPILE]
    row = rows_of(compared(BF16, once))["compile"]
    assert row.verdict.reasons[1] == (
        "convergence unknown: 1 of 3 pairs: both recipes need more seeds (--repeats); 4 more (of both:"
        " --seed 3 --repeats 4) would make 5"
    )


def test_a_forward_pass_alone_is_held_to_no_convergence() -> None:
    shape = {"workload": "gelu", "sample_unit": "tensors", "evals": ()}
    row = rows_of(compared(arm("fp32", 0.1, EQUAL, **shape), arm("library", 0.05, EQUAL, **shape)))["library"]
    assert row.verdict.reasons == ("by speed: no price is known",)
    trained = {**shape, "sample_unit": "images"}
    both = compared(arm("fp32", 0.1, EQUAL, **trained), arm("library", 0.05, EQUAL, **trained))
    assert rows_of(both)["library"].verdict.reasons[-1].startswith("convergence unknown")


def test_barred_rows_are_no_part_of_holms_family() -> None:
    """The interval of the one row that is ranked is at 5%, as if the others were not there."""
    alone = rows_of(compared(BF16, COMPILE))["compile"].verdict.speed_ratio
    barred = [arm(name, 0.09, EQUAL, checks=ACROSS_THE_BATCH) for name in ("te-bf16", "te-fp8", "ao-fp8")]
    beside = rows_of(compared(BF16, COMPILE, *barred))["compile"].verdict.speed_ratio
    allowed = rows_of(compared(BF16, COMPILE, *barred, allow_unverified=True))["compile"]
    assert alone and beside and allowed.verdict.speed_ratio
    # More rows make the pooled deviation better known; the level is the same.
    assert _width(beside) < _width(alone)
    assert _width(beside) < _width(allowed.verdict.speed_ratio)


def _width(quantity: Interval) -> float:
    assert quantity.low is not None and quantity.high is not None
    return quantity.high / quantity.low - 1


def test_a_barred_row_is_no_baseline_and_no_answer() -> None:
    wrong = arm("bf16", 0.05, EQUAL, checks=ACROSS_THE_BATCH)
    comparison = compared(wrong, COMPILE, arm("fp32", 0.2, EQUAL))
    assert comparison.baselines == {"vit-huge": "compile"}
    assert rows_of(comparison)["bf16"].verdict.kind == "not ranked"
    # Nor is its loss what others are compared with.
    assert rows_of(comparison)["compile"].validity.convergence.reference == "fp32"
    assert answer(comparison).startswith("compile gives 799 images/s")
    assert "bf16" not in answer(comparison)
    assert "te-fp8" not in answer(compared(BF16, COMPILE, DULL))
    with pytest.raises(UserError, match="te-fp8 is no baseline: it is not ranked, convergence: ") as raised:
        compared(BF16, DULL, baseline="te-fp8")
    assert raised.value.hint is not None and "--allow-unverified" in raised.value.hint


def test_runs_of_the_reference_that_are_wrong_are_no_reference() -> None:
    """Here those of another version of torch, whose loss is a tenth higher."""
    wrong = arm(
        "bf16", 0.1, [1.1 * loss for loss in EQUAL], checks=ACROSS_THE_BATCH, fingerprint={"torch": "2.6"}
    )
    comparison = compared(BF16, wrong, COMPILE)
    row = rows_of(comparison)["compile"]
    assert row.validity.convergence.end is not None
    assert row.validity.convergence.end.mean == pytest.approx(0.0)
    assert [row.verdict.kind for row in comparison.rows] == ["baseline", "not ranked", "better"]


def test_where_every_row_is_barred_nothing_is_ranked() -> None:
    comparison = compared(WRONG, arm("te-article", 0.06, EQUAL, checks=ACROSS_THE_BATCH))
    assert [row.verdict.kind for row in comparison.rows] == ["not ranked"] * 2
    assert answer(comparison) == (
        "nothing is ranked: te-bf16, isolation: changing image 3 changed 28 other outputs."
    )
    assert "not ranked" in as_table(comparison)
    assert json.loads(as_json(comparison))["baseline"] == "te-bf16"


def test_allow_unverified_ranks_and_says_so() -> None:
    comparison = compared(BF16, WRONG, DULL, allow_unverified=True)
    rows = rows_of(comparison)
    assert (rows["te-bf16"].verdict.kind, rows["te-fp8"].verdict.kind) == ("better", "better")
    assert (
        "ranked all the same (--allow-unverified): isolation: changing image 3 changed 28 other outputs"
        in rows["te-bf16"].verdict.reasons
    )
    assert any(
        text.startswith(
            "te-fp8 is ranked as --allow-unverified asks, although convergence: held-out loss +4.0%"
        )
        for text in comparison.warnings
    )
    data = json.loads(as_json(comparison))
    assert data["allow_unverified"] is True
    row = next(row for row in data["rows"] if row["recipe"] == "te-bf16")
    assert (row["ranked"], row["numerics"], len(row["guard_failures"])) == (True, "failed", 2)
    assert "--allow-unverified" in row["reason"]
    assert rows_of(compared(BF16, WRONG, baseline="te-bf16", allow_unverified=True))["te-bf16"].is_baseline
    # Without anything to lift it says nothing.
    assert not compared(BF16, COMPILE, allow_unverified=True).warnings


def test_the_evidence_as_json_and_csv() -> None:
    comparison = compared(BF16, DULL, arm("fp32", 0.2, EQUAL, evals=()))
    base, row, unscored = json.loads(as_json(comparison))["rows"]
    assert (row["ranked"], row["numerics"], row["verdict"]) == (False, "passed", "not ranked")
    assert row["guard_failures"] == [row["reason"].split("; ")[0]]
    assert row["held_out"]["loss"] == pytest.approx(2.185)
    found = row["convergence"]
    assert (found["verdict"], found["reference"], found["num_pairs"]) == ("worse", "bf16", 3)
    assert (found["seeds"], found["step"]) == ([0, 1, 2], 100)
    assert found["difference"]["value"] == pytest.approx(0.085 / 2.1)
    assert found["difference"]["low"] < found["difference"]["value"] < found["difference"]["high"]
    assert [point["step"] for point in found["checkpoints"]] == [26, 52, 73]
    assert base["convergence"]["verdict"] == "reference"
    assert (unscored["held_out"], unscored["convergence"]["difference"]) == (None, None)
    flat = list(csv.DictReader(io.StringIO(as_csv(comparison))))
    assert [line["convergence_verdict"] for line in flat] == ["reference", "worse", "unknown"]
    assert float(flat[1]["convergence_difference"]) == found["difference"]["value"]
    assert float(flat[1]["held_out_loss"]) == row["held_out"]["loss"]
    assert flat[1]["convergence_seeds"] == "0; 1; 2"
    assert (flat[2]["held_out_loss"], flat[2]["convergence_difference_low"]) == ("", "")
    assert flat[1]["convergence_checkpoints"].startswith("26=0.04")

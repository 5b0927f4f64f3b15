"""What bars a row from being ranked, what is only said, and what becomes of a comparison with such rows."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fake_summaries import by_recipe, changed, compared, evaluated

from fastlaunch.analysis.compare import Comparison, MeasuredRun, Row
from fastlaunch.core.errors import UserError
from fastlaunch.measure.summary import Interval
from fastlaunch.report.data import as_csv, as_json
from fastlaunch.report.table import as_table
from fastlaunch.report.text import answer, asides_of
from fastlaunch_train.records.records import Check

PASSED = tuple(
    Check(name=name, passed=True, value=0.0, limit=0.01)
    for name in ("equivalence", "isolation", "permutation")
)
ISOLATION = "isolation: changing image 3 changed 28 other outputs"
ACROSS_THE_BATCH = (
    *PASSED[:1],
    Check(name="isolation", passed=False, detail="changing image 3 changed 28 other outputs"),
    Check(name="permutation", passed=False, value=0.31, limit=0.01),
)


def arm(recipe: str, step_time_s: float, losses: Sequence[float | None], **changes: Any) -> list[MeasuredRun]:
    """Runs of seeds 0, 1, ...: as many as there are losses."""
    times = [Interval(value=step_time_s * (1 + 0.001 * seed)) for seed in range(len(losses))]
    summaries = [
        changed(evaluated(recipe, seed, loss, **{"checks": PASSED, **changes}), step_time_s=times[seed])
        for seed, loss in enumerate(losses)
    ]
    return [MeasuredRun(run_id=f"{recipe}-{n}", summary=one) for n, one in enumerate(summaries, start=1)]


def row_of(recipe: str, *arms: list[MeasuredRun], **options: Any) -> Row:
    return by_recipe(compared(*arms, **options))[recipe]


def reasons(row: Row) -> str:
    return "; ".join(row.verdict.reasons)


EQUAL = (2.0, 2.1, 2.2)
WORSE = (2.08, 2.185, 2.29)

BF16 = arm("bf16", 0.1, EQUAL)
COMPILE = arm("compile", 0.08, EQUAL)
WRONG = arm("te-bf16", 0.05, EQUAL, checks=ACROSS_THE_BATCH)
DULL = arm("te-fp8", 0.04, WORSE)


def test_what_passes_both_guards_is_ranked_without_a_word() -> None:
    base, row = compared(BF16, COMPILE).rows
    assert (row.verdict.kind, row.verdict.reasons) == ("better", ("by speed: no price is known",))
    assert (row.validity.numerics, row.validity.convergence.verdict) == ("passed", "within")
    assert (base.verdict.kind, base.verdict.reasons) == ("baseline", ())
    assert base.validity.convergence.verdict == "reference"


@pytest.mark.parametrize(("fraction", "kind"), [(0.2, "better"), (0.21, "not ranked")])
def test_a_row_that_skips_many_steps_is_not_ranked(fraction: float, kind: str) -> None:
    fp16 = arm("fp16", 0.05, EQUAL, skipped_fraction=fraction)
    row = row_of("fp16", BF16, fp16)
    assert row.verdict.kind == kind
    assert row.is_barred == (kind == "not ranked")


# --- numerics --------------------------------------------------------------------------------------------


def test_a_failed_check_bars_with_its_numbers() -> None:
    row = row_of("te-bf16", BF16, WRONG)
    assert (row.verdict.kind, row.is_barred, row.validity.numerics) == ("not ranked", True, "failed")
    permutation = "permutation: the outputs of a permuted batch differ by 31%, at most 1% is allowed"
    assert row.verdict.reasons[:2] == (ISOLATION, permutation)
    # It is shown with all its figures.
    assert row.speed.samples_per_s is not None and row.verdict.speed_ratio is not None
    assert row.verdict.speed_ratio.value == pytest.approx(2.0)
    assert row.verdict.speed_ratio.low is not None


def test_a_check_that_failed_in_one_run_bars_the_row() -> None:
    first, *others = COMPILE
    failed = replace(first, summary=changed(first.summary, checks=ACROSS_THE_BATCH[:2]))
    row = row_of("compile", BF16, others, [failed])
    assert (row.verdict.kind, row.verdict.reasons[0]) == ("not ranked", f"{ISOLATION} (in 1 of 3 runs)")


@pytest.mark.parametrize(
    ("recipe", "is_barred"),
    [
        ("te-article-fp8", True),
        ("bf16 blocks=te-article", True),
        ("te-bf16", False),
        ("ours blocks=native", False),
        ("te-article blocks=te", False),
    ],
)
def test_blocks_that_are_known_to_compute_something_else(recipe: str, is_barred: bool) -> None:
    row = row_of(recipe, BF16, arm(recipe, 0.05, EQUAL, checks=()))
    assert row.verdict.kind == ("not ranked" if is_barred else "better")
    assert row.validity.numerics == ("failed" if is_barred else "not checked")
    assert ("known not to be equivalent" in reasons(row)) is is_barred
    assert "numerics not checked" in row.verdict.reasons


# --- convergence -----------------------------------------------------------------------------------------


def test_a_worse_loss_bars_with_its_evidence() -> None:
    row = row_of("te-fp8", BF16, DULL)
    assert (row.verdict.kind, row.validity.convergence.verdict) == ("not ranked", "worse")
    evidence = "convergence: held-out loss +12.1% of what bf16 learnt (at least +10.9%, 95%), 3 pairs"
    assert row.verdict.reasons[0] == evidence


def test_a_loss_that_is_no_number_bars_though_its_run_is_left_out() -> None:
    gone: dict[str, Any] = {"evals": (), "status": "nan_loss", "problems": ("ended as nan_loss",)}
    diverged = changed(COMPILE[2].summary, step_time_s=None, **gone)
    comparison = compared(BF16, COMPILE[:2], MeasuredRun(run_id="lost", summary=diverged))
    row = by_recipe(comparison)["compile"]
    assert (row.num_runs, row.verdict.kind) == (2, "not ranked")
    assert row.verdict.reasons[0] == "convergence: the loss is no number at seed 2, where that of bf16 is"
    assert "lost (compile) is left out: ended as nan_loss" in comparison.warnings


def test_where_some_of_both_are_no_number_it_is_unknown() -> None:
    """Two seeds lost, one pair left, and a reference that itself is lost once."""
    losses = (2.0, 2.1, 2.2)
    row = row_of("compile", arm("bf16", 0.1, (*losses, None)), arm("compile", 0.1, (None, None, 2.2, 2.3)))
    assert row.verdict.reasons[1:] == (
        "convergence unknown: held-out loss +0.0% of what bf16 learnt, 1 pair;"
        " seed 3 has no bf16 run whose loss stays a number",
        "its loss is no number at seeds 0 and 1",
        "the loss of bf16 itself is no number at seed 3",
    )


def test_a_reference_that_always_diverges_is_one_where_there_is_no_other() -> None:
    def verdicts(of_bf16: Sequence[float | None]) -> dict[str, str]:
        arms = [arm("bf16", 0.1, of_bf16), COMPILE, arm("fp32", 0.1, EQUAL)]
        return {row.setup.recipe: row.validity.convergence.verdict for row in compared(*arms).rows}

    assert verdicts((None,) * 3) == {"bf16": "worse", "compile": "within", "fp32": "reference"}
    # One run whose loss stays a number is enough.
    assert verdicts((None, None, 2.2))["bf16"] == "reference"


@pytest.mark.parametrize(("bf16", "other"), [(0.5, 1.7e308), (1.7e308, -1.7e308), (5e-324, 3e38)])
def test_an_absurd_loss_of_a_foreign_record_is_no_bug_of_ours(bf16: float, other: float) -> None:
    comparison = compared(arm("bf16", 0.1, (bf16,) * 3), arm("compile", 0.1, (other,) * 3))
    _, row = json.loads(as_json(comparison), parse_constant=pytest.fail)["rows"]
    assert row["convergence"]["verdict"] in ("worse", "unknown", "too short to tell")
    assert max(map(len, as_table(comparison).splitlines())) <= 120
    assert not {"inf", "nan"} & {
        cell for line in csv.reader(io.StringIO(as_csv(comparison))) for cell in line
    }


def test_what_is_not_known_is_ranked_and_said() -> None:
    some = [run for run in BF16 if run.summary.seed != 1]
    row = row_of("compile", some, arm("compile", 0.08, EQUAL, checks=()))
    assert row.verdict.kind == "better"
    assert row.verdict.reasons[1:] == (
        "numerics not checked",
        "convergence unknown: 2 of 3 pairs: seed 1 has no bf16 run; 3 more (of both: --seed 3 --repeats 3)"
        " would make 5",
    )
    row = row_of("compile", BF16, arm("compile", 0.08, (2.2, 2.0, 2.26)))
    assert row.verdict.reasons[1] == (
        "convergence unknown: held-out loss +7.6% of what bf16 learnt (-28.5% to +43.8%, 95% each), 3 pairs;"
        " about 21 more (of both: --seed 3 --repeats 21) would tell"
    )
    once = [replace(run, summary=changed(run.summary, seed=0)) for run in COMPILE]
    assert "1 of 3 pairs: both recipes need more seeds (--repeats); 4 more" in reasons(
        row_of("compile", BF16, once)
    )


def test_a_forward_pass_alone_is_held_to_no_convergence() -> None:
    for unit, is_said in (("tensors", False), ("images", True)):
        shape: dict[str, Any] = {"workload": "gelu", "sample_unit": unit, "evals": ()}
        row = row_of("library", arm("fp32", 0.1, EQUAL, **shape), arm("library", 0.05, EQUAL, **shape))
        assert ("convergence unknown" in reasons(row)) is is_said


# --- the reference ---------------------------------------------------------------------------------------


def test_bf16_with_overrides_is_a_reference_where_there_is_no_plain_one() -> None:
    reference = arm("bf16 optimizer=adamw", 0.1, EQUAL)
    comparison = compared(arm("te-fp8 optimizer=adamw", 0.04, WORSE), reference)
    assert comparison.baselines == {"vit-huge": "bf16 optimizer=adamw"}
    assert by_recipe(comparison)["te-fp8 optimizer=adamw"].verdict.kind == "not ranked"
    plain = row_of("bf16", reference, BF16)
    assert plain.validity.convergence.verdict == "reference" and plain.is_baseline


@pytest.mark.parametrize("order", [1, -1])
def test_a_row_is_held_against_one_that_trains_by_its_rules(order: int) -> None:
    """With a tenth of the rate all end 10% higher: within that rate nothing is wrong with either recipe."""
    slow = [1.1 * loss for loss in EQUAL]
    arms = [
        BF16,
        COMPILE,
        arm("bf16 learning_rate=0.0001", 0.1, slow),
        arm("compile learning_rate=0.0001", 0.08, slow),
        arm("te-fp8 learning_rate=0.0001", 0.04, [1.04 * loss for loss in slow]),
    ]
    comparison = compared(*arms[::order])
    found = {name: row.validity.convergence for name, row in by_recipe(comparison).items()}
    assert {name: (of.reference, of.verdict) for name, of in found.items()} == {
        "bf16": ("bf16", "reference"),
        "compile": ("bf16", "within"),
        "bf16 learning_rate=0.0001": ("bf16 learning_rate=0.0001", "reference"),
        "compile learning_rate=0.0001": ("bf16 learning_rate=0.0001", "within"),
        "te-fp8 learning_rate=0.0001": ("bf16 learning_rate=0.0001", "worse"),
    }
    tables = as_table(comparison).split("held-out loss at the end, and its difference to that of ")[1:]
    assert {text.partition(" at the same")[0] for text in tables} == {"bf16", "bf16 learning_rate=0.0001"}


def test_without_such_a_row_it_is_unknown_and_the_command_is_proposed() -> None:
    """Another optimizer that trains worse is no fault of how a recipe computes."""
    recipe = "compile learning_rate=0.01 optimizer=adafactor"
    row = row_of(recipe, BF16, arm(recipe, 0.08, WORSE))
    assert (row.verdict.kind, row.validity.convergence.verdict) == ("better", "unknown")
    assert row.verdict.reasons[-1] == (
        "convergence unknown: there is no reference with learning_rate=0.01 and optimizer=adafactor; run"
        " fastlaunch submit --local --workload vit-huge --recipe bf16 --set learning_rate=0.01"
        " --set optimizer=adafactor --batch-size 64 --nproc 1 --steps 200 --eval-every 10"
        " --seed 0 --repeats 3"
    )
    # The other way round: the row has the workload's own rules, and bf16 has not.
    row = row_of("compile", arm("bf16 learning_rate=0.01", 0.1, EQUAL), arm("compile", 0.08, WORSE))
    assert "the workload's own optimizer and learning rate; run" in row.verdict.reasons[-1]
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
    row = row_of("te-fp8", BF16, arm("fp32", 0.2, EQUAL, **changes), arm("te-fp8", 0.04, WORSE, **changes))
    assert (row.validity.convergence.reference, row.validity.convergence.verdict) == ("fp32", "worse")
    both = [arm(name, 0.1, EQUAL, **changes) for name in ("fp32", "bf16", "compile")]
    assert row_of("compile", *both).validity.convergence.reference == "bf16"


def test_runs_of_the_reference_that_are_wrong_are_no_reference() -> None:
    """Here those of another version of torch, whose loss is a tenth higher."""
    higher = [1.1 * loss for loss in EQUAL]
    wrong = arm("bf16", 0.1, higher, checks=ACROSS_THE_BATCH, fingerprint={"torch": "2.6"})
    rows = compared(BF16, wrong, COMPILE).rows
    assert [row.verdict.kind for row in rows] == ["baseline", "not ranked", "better"]
    end = rows[2].validity.convergence.end
    assert end is not None and end.mean == pytest.approx(0.0)


# --- the comparison --------------------------------------------------------------------------------------


def width_of(recipe: str, comparison: Comparison) -> float:
    ratio: Interval | None = by_recipe(comparison)[recipe].verdict.speed_ratio
    assert ratio is not None and ratio.low is not None and ratio.high is not None
    return ratio.high / ratio.low - 1


def test_barred_rows_are_no_part_of_holms_family() -> None:
    """The interval of the one row that is ranked is at 5%, as if the others were not there."""
    barred = [arm(name, 0.09, EQUAL, checks=ACROSS_THE_BATCH) for name in ("te-bf16", "te-fp8", "ao-fp8")]
    beside = width_of("compile", compared(BF16, COMPILE, *barred))
    # More rows make the pooled deviation better known; the level is the same.
    assert beside < width_of("compile", compared(BF16, COMPILE))
    assert beside < width_of("compile", compared(BF16, COMPILE, *barred, allow_unverified=True))


def test_a_barred_row_is_no_baseline_no_reference_and_no_answer() -> None:
    wrong = arm("bf16", 0.05, EQUAL, checks=ACROSS_THE_BATCH)
    comparison = compared(wrong, COMPILE, arm("fp32", 0.2, EQUAL))
    assert comparison.baselines == {"vit-huge": "compile"}
    rows = by_recipe(comparison)
    assert rows["bf16"].verdict.kind == "not ranked"
    assert rows["compile"].validity.convergence.reference == "fp32"
    assert answer(comparison).startswith("compile on H200 gives 799 images/s, 2.500x that of fp32")
    assert asides_of(comparison.rows) == ["bf16 shows 1.600x that of compile, but is not ranked"]
    with pytest.raises(UserError, match="te-fp8 is not ranked, so it is no baseline") as raised:
        compared(BF16, DULL, baseline="te-fp8")
    assert "--allow-unverified" in str(raised.value.hint)


def test_where_every_row_is_barred_nothing_is_ranked() -> None:
    comparison = compared(WRONG, arm("te-article", 0.06, EQUAL, checks=ACROSS_THE_BATCH))
    assert [row.verdict.kind for row in comparison.rows] == ["not ranked"] * 2
    assert answer(comparison) == f"nothing is ranked: te-bf16, {ISOLATION}."
    assert "not ranked" in as_table(comparison)
    assert json.loads(as_json(comparison))["baseline"] == "te-bf16"


def test_allow_unverified_ranks_and_says_so() -> None:
    comparison = compared(BF16, WRONG, DULL, allow_unverified=True)
    assert [row.verdict.kind for row in comparison.rows] == ["baseline", "better", "better"]
    assert f"ranked all the same (--allow-unverified): {ISOLATION}" in comparison.rows[1].verdict.reasons
    assert any(text.startswith("te-fp8 is ranked") for text in comparison.warnings)
    data = json.loads(as_json(comparison))
    _, row, _ = data["rows"]
    assert data["allow_unverified"] is True
    assert (row["ranked"], row["numerics"], len(row["guard_failures"])) == (True, "failed", 2)
    assert row_of("te-bf16", BF16, WRONG, baseline="te-bf16", allow_unverified=True).is_baseline
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
    assert found["difference"]["value"] == pytest.approx(0.085 / (2.1 / 3))
    assert found["learnt"] == pytest.approx(2.1 / 3)
    # From step 52 to 100 the reference falls by 15% of its loss at the end.
    assert found["more_steps"]["value"] == pytest.approx(0.085 / (2.1 * 0.15 / 48) / 100)
    assert row["ratio_to_same_loss"]["value"] == pytest.approx(
        row["speed_ratio_to_baseline"]["value"] / (1 + found["more_steps"]["value"])
    )
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
    assert flat[1]["convergence_checkpoints"].startswith("26=0.15")

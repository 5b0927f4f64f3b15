"""A small run of the tools in tests/benchmarks that no other test runs, so that none breaks unseen."""

from statistics import fmean, mean

import pytest

from benchmarks import bench, prediction, regret, script_cost, step_profile, sweeps
from fastlaunch.catalog.hardware import TRAINING_THROUGHPUT

PUBLISHED = prediction.read_rows(TRAINING_THROUGHPUT)


def test_sweeps_of_a_few_small_matrices_cost_a_part_of_all_runs() -> None:
    outcomes = sweeps.simulate(sweeps.SIZES[0], sweeps.NOISES[0], draws=4)
    assert fmean(each.cost for each in outcomes) < 0.3
    assert all(each.ratio <= sweeps.NEAR and 1.0 <= each.ratio_of_full <= sweeps.NEAR for each in outcomes)
    assert all(each.num_runs < each.num_cells * sweeps.MAX_ROUNDS / 2 for each in outcomes)


def test_predictions_of_rows_that_were_left_out_are_judged() -> None:
    judged = list(prediction.cases(PUBLISHED[::10], 2))
    assert {case.evidence for case in judged} >= {"A", "B", "C"}
    assert mean(case.errors["fastlaunch"] for case in judged) < 1
    assert prediction.table(judged).count("\n") > 3


def test_a_pick_by_prediction_is_judged_by_what_was_published() -> None:
    picks = list(
        regret.picks([row for row in PUBLISHED if row["source_repo"] == "NVIDIA/DeepLearningExamples"])
    )
    assert {(pick.known, pick.method) for pick in picks} == {
        (known, method) for known in regret.KNOWN for method in regret.METHODS
    }
    assert min(pick.regret for pick in picks) == pytest.approx(0)
    assert regret.table(picks).count("\n") == 1 + len(regret.KNOWN) * len(regret.METHODS)


def test_the_cost_of_recording_is_measured() -> None:
    (result,) = bench.bench_record()
    assert result.limit == 0.005 and 0 < result.ratio < 1


@pytest.mark.parametrize(("number", "num_outside"), [(6, 0), (20, 5), (100, 39)])
def test_the_medians_interval_by_order_statistics(number: int, num_outside: int) -> None:
    # Of 20 values the 6th and the 15th.
    assert script_cost.num_outside(number) == num_outside


def test_a_profile_without_a_record_has_empty_cells(tmp_path) -> None:
    assert set(step_profile._cells(tmp_path)) == {"n/a"}

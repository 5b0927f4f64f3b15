"""Which cells of a sweep may be the best, and which need not run any more."""

import math
from dataclasses import replace

import pytest

from fastlaunch.analysis.anchors import config_of
from fastlaunch.analysis.differences import RunTime
from fastlaunch.analysis.elimination import SweptCell, eliminate, next_places, predict_cells

MOST = 8
DECISIVE = "predicted not to be the best"


def cell(place: str, *times: float, usd: float = 1.0, batch: int = 64) -> SweptCell:
    """A cell whose runs, in rounds 1, 2, ..., took these seconds per sample."""
    runs = tuple(
        RunTime(row=0, log_time=math.log(time), host=place, block=(place, number))
        for number, time in enumerate(times)
    )
    return SweptCell(place=place, batch=batch, log_usd_per_hour=math.log(usd), runs=runs)


def test_one_run_leaves_out_what_is_far_behind_and_keeps_what_is_near() -> None:
    found = eliminate([cell("a", 1.0), cell("a", 1.05), cell("a", 1.5)], MOST)
    assert found.leaders == {64: 0} and found.may_be_best == {0, 1} and [*found.unneeded] == [2]


def test_dollars_decide_and_not_speed() -> None:
    found = eliminate([cell("a", 1.0, usd=4.0), cell("b", 2.0, usd=1.0)], MOST)
    assert found.leaders == {64: 1} and [*found.unneeded] == [0, 1]


def test_rounds_settle_what_one_run_does_not_and_then_the_best_ends_too() -> None:
    slow, fast = (1.030, 1.031, 1.029, 1.030), (1.0, 1.001, 0.999, 1.0)
    found = eliminate([cell("a", *fast[:1]), cell("a", *slow[:1])], MOST)
    assert found.unneeded == {}
    found = eliminate([cell("a", *fast), cell("a", *slow)], MOST)
    assert found.may_be_best == {0} and found.unneeded == {1: "not the best", 0: "the best"}


def test_what_cannot_be_more_than_one_percent_better_is_left_out() -> None:
    # Known to 0.1%: half a percent either way is no loss.
    alike = [
        cell("a", *(1 + n % 2 * 1e-3 for n in range(8))),
        cell("a", *(1.0005 + n % 2 * 1e-3 for n in range(8))),
    ]
    assert [*eliminate(alike, MOST).unneeded] == [1, 0]


def test_cells_of_another_batch_do_not_compete() -> None:
    found = eliminate([cell("a", 1.0, batch=64), cell("a", 9.0, batch=8)], MOST)
    assert found.leaders == {64: 0, 8: 1}


def test_machines_that_are_as_good_are_not_told_apart_by_more_runs() -> None:
    few = eliminate([cell("a", 1.0, 1.0), cell("b", 1.01)], MOST)
    assert 1 not in few.unneeded
    many = eliminate([cell("a", *[1.0] * 8), cell("b", *[1.002] * 8)], MOST)
    assert many.may_be_best == {0, 1} and set(many.unneeded) == {0, 1}


def test_the_leader_goes_on_while_a_cell_of_its_machine_has_not_run() -> None:
    assert eliminate([cell("a", 1.0), cell("a")], MOST).unneeded == {}
    assert eliminate([cell("a", 1.0), cell("b")], MOST).unneeded == {0: "the best"}


def test_a_barred_cell_neither_leads_nor_runs() -> None:
    found = eliminate([replace(cell("a", 0.5), barred="fails a check"), cell("a", 1.0)], MOST)
    assert found.leaders == {64: 1} and found.unneeded[0] == "not ranked: fails a check"


@pytest.mark.parametrize(
    ("predicted", "is_left_out"),
    [((math.log(1.5), math.log(1.3)), True), ((math.log(1.5), math.log(0.9)), False), (None, False)],
    ids=["not the best at its best", "the best at its best", "nothing predicts it"],
)
def test_a_cell_that_has_not_run_is_left_out_by_its_range(
    predicted: tuple[float, float] | None, is_left_out: bool
) -> None:
    found = eliminate([cell("a", 1.0), replace(cell("b"), predicted=predicted)], MOST)
    assert (found.unneeded.get(1) == DECISIVE) == is_left_out
    # Of many such cells one is further off its prediction.
    many = [replace(cell(f"type {n}"), predicted=predicted) for n in range(40)]
    assert not eliminate([cell("a", 1.0), *many], MOST).unneeded.keys() & {*range(1, 41)}


def on_gpu(place: str, gpu: str, label: str, *times: float, usd: float = 1.0) -> SweptCell:
    config = config_of(model=label, unit="samples", precision="bf16", gpu=gpu, num_gpus=8)
    return replace(cell(place, *times, usd=usd), config=config)


def test_a_recipe_is_predicted_by_its_runs_on_other_gpus_and_not_by_other_recipes() -> None:
    cells = [
        on_gpu("p4d", "A100 40GB", "bf16", 1e-3),
        on_gpu("p5", "H100", "bf16"),
        on_gpu("p5", "H100", "compile"),
    ]
    measured, predicted, unknown = predict_cells(cells)
    assert measured == cells[0] and unknown.predicted is None
    assert predicted.predicted is not None
    middle, low = predicted.predicted
    assert low < middle < math.log(1e-3)


def test_places_come_in_the_order_of_their_cheapest_cell() -> None:
    cells = [cell("dear", usd=9.0), cell("cheap", usd=2.0)]
    assert next_places(cells) == ["cheap", "dear"]
    cells = [replace(each, predicted=(value, value)) for each, value in zip(cells, (-3.0, 0.0), strict=True)]
    assert next_places([*cells, cell("unknown", usd=0.1)]) == ["dear", "cheap", "unknown"]

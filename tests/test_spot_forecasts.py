"""Known answers of the replay in `benchmarks.spot`, and a small part of what it judges."""

import math
import random
from dataclasses import replace
from statistics import mean

import pytest

from benchmarks.spot import GOAL, KINDS, Capacity, bias, cut, draw, rates, replay, results_of
from fastlaunch.analysis.spot import Fallback, SpotJob

#: Up for two hours, down for one, up for ten; down again, and up for long.
CAPACITY = Capacity.of([(2, True), (1, False), (10, True), (20, False), (500, True)])
QUICK = SpotJob(work_s=14_400, restart_s=600, checkpoint_s=20, every_s=3600)


def test_a_job_that_saves_at_the_notice_goes_on_where_it_was() -> None:
    # 6,460 s of work by 7,080 s, when the notice comes; looks every ten minutes until 10,800 s; then a start,
    # 7,940 s of work and two checkpoints.
    replayed = replay(QUICK, CAPACITY, 0.0)
    assert replayed.total_s == 10_800 + 600 + 7_940 + 40
    assert replayed.billed_s == 7_200 + 8_580


def test_a_job_with_slow_checkpoints_goes_on_from_the_last_one() -> None:
    # One hour of work is saved, and three are done on the second machine.
    replayed = replay(replace(QUICK, checkpoint_s=240), CAPACITY, 0.0)
    assert replayed.total_s == 10_800 + 600 + 3 * 3_840


def test_a_machine_that_is_taken_in_its_first_hour_is_free() -> None:
    replayed = replay(QUICK, CAPACITY, 5_400.0)
    # Half an hour, of which 1,080 s are work; the next look but five finds capacity.
    assert replayed.total_s == 5_400 + 600 + (14_400 - 1_080) + 3 * 20
    assert replayed.billed_s == replayed.total_s - 5_400


def test_a_job_goes_on_on_demand_just_in_time() -> None:
    start = 12.5 * 3600
    fallback = Fallback(deadline_s=30_000, start_s=900)
    replayed = replay(QUICK, CAPACITY, start, fallback)
    # 1,080 s of work were done on spot.
    assert replayed.on_demand_s == pytest.approx(900 + 13_320 * (1 + 20 / 3600))
    # What one more loss could have cost is left: a start and the last two minutes.
    assert replayed.total_s == pytest.approx(30_000 - 600 - 120)


def test_traces_have_the_statistics_that_they_are_made_to() -> None:
    kind = KINDS["all of these"]
    trace = draw(kind, 20_000, *rates(kind, 0.4, 0.5), random.Random(1))
    up = sum(hours for hours, is_up in trace if is_up)
    assert up / sum(hours for hours, _ in trace) == pytest.approx(0.5, abs=0.05)
    assert len(trace) / 2 / up == pytest.approx(0.4, rel=0.1)


def test_the_parts_of_a_trace_are_cut_by_the_hour() -> None:
    assert cut([(2, True), (1, False), (3, True)], 1, 4) == [(1, True), (1, False), (1, True)]
    assert cut([(2, True)], 1, math.inf) == [(1, True)]


def test_a_small_part_keeps_what_it_promises() -> None:
    results = results_of(("steady", 0.4, 0.5), num_traces=4, days=28, job_names=["6 h, quick"])
    alone = [each for each in results if each.deadline is None]
    backed = [each for each in results if each.deadline is not None]
    assert abs(bias(alone)) < GOAL / 3
    assert {each.in_time for each in backed} == {1.0}
    assert mean(each.share for each in alone) < mean(each.share for each in backed) < 1

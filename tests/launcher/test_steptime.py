"""What of a run is warm-up, what is retained, and its interval: known answers through `summarize`."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_records import read_all, step_time_s, write_run

from fastlaunch.measure.summarize import summarize
from fastlaunch.measure.summary import Interval, RunSummary, Startup
from fastlaunch_train.records.records import Phase


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunSummary]:
    """Summary of the attempts written so far and of the one that is asked for."""

    def write(**options: Any) -> RunSummary:
        write_run(tmp_path, **options)
        return summarize(read_all(sorted(tmp_path.iterdir(), reverse=True)))

    return write


# --- warm-up ---------------------------------------------------------------------------------------------


def test_slow_first_steps_are_cut_in_tenths(run) -> None:
    # After the first 10 steps, 200 are left; 30 of them are slow: a tenth is 20 steps, so two tenths go.
    # (With one tenth cut, 10 of the first fifth's 36 steps are slow, 28% more than the last half.)
    summary = run(steps=210, step_time_s=lambda rank, step: 0.2 if step <= 40 else 0.1)
    assert (summary.timing.num_retained_steps, summary.timing.steady) == (160, True)
    assert step_time_s(summary) == pytest.approx(0.1)
    assert summary.timing.warmup_s == pytest.approx(40 * 0.2 + 10 * 0.1)


@pytest.mark.parametrize(("excess", "num_retained"), [(0.019, 200), (0.021, 180), (-0.021, 180)])
def test_the_first_fifth_may_be_2_percent_off(run, excess: float, num_retained: int) -> None:
    # The first fifth of what is left is steps 11 to 50; with a tenth cut, 20 of 36 differ, 1.2% in the mean.
    summary = run(steps=210, step_time_s=lambda rank, step: 0.1 * (1 + excess) if step <= 50 else 0.1)
    assert (summary.timing.num_retained_steps, summary.timing.steady) == (num_retained, True)


def test_a_run_that_keeps_getting_faster_is_not_steady(run) -> None:
    summary = run(steps=210, step_time_s=lambda rank, step: 0.1 * 0.99**step)
    assert summary.timing.steady is False
    assert summary.timing.num_retained_steps == 100
    assert summary.timing.step_time_s.low is None and summary.timing.step_time_s.high is None
    assert summary.timing.drift < -0.4


def test_the_slowest_rank_must_settle(run) -> None:
    summary = run(world_size=2, steps=210, step_time_s=lambda rank, step: (0.1, 0.1 + 20.0 / step)[rank])
    assert summary.timing.steady is False


def test_settling_exactly_at_half_is_steady_and_later_is_not(tmp_path: Path) -> None:
    for slow_steps, steady in ((110, True), (130, False)):
        paths = write_run(
            tmp_path / str(slow_steps),
            steps=210,
            step_time_s=lambda rank, step, slow=slow_steps: 0.2 if step <= slow else 0.1,
        )
        assert summarize(read_all(paths)).timing.steady is steady


def test_everything_through_the_last_compile_is_cut(run) -> None:
    # The block of steps 41 to 50 recompiled.
    summary = run(steps=200, num_compiles=lambda step: 1 if step <= 40 else 2)
    assert summary.timing.num_retained_steps == 150


def test_everything_through_allocator_growth_is_cut_and_shrinking_is_none(run) -> None:
    summary = run(steps=200, reserved_gib=lambda step: {10: 5.0, 20: 8.0, 30: 7.0}.get(step, 7.0))
    assert summary.timing.num_retained_steps == 180


def test_any_rank_may_set_the_warm_up(tmp_path: Path) -> None:
    records = read_all(write_run(tmp_path, steps=100, world_size=2))
    grown = [*records[1].blocks[:3], *(replace(block, num_compiles=1) for block in records[1].blocks[3:])]
    assert summarize([records[0], replace(records[1], blocks=tuple(grown))]).timing.num_retained_steps == 60


def test_steps_before_a_compile_phase_are_cut(run) -> None:
    phases = (Phase(name="compile", seconds=30.0, step=0), Phase(name="compile", seconds=12.0, step=25))
    summary = run(steps=200, phases=phases)
    assert summary.timing.num_retained_steps == 175
    assert summary.startup == Startup(compile_s=42.0)


def test_first_compiled_block_is_warm_up_even_when_it_is_long(run) -> None:
    summary = run(steps=200, steps_per_block=50, num_compiles=lambda step: 3)
    assert summary.timing.num_retained_steps == 150


def test_the_rank_that_waits_and_builds_longest_counts(tmp_path: Path) -> None:
    first, second = read_all(write_run(tmp_path, world_size=2, data_wait_s=0.01))
    waiting = tuple(replace(step, data_wait_s=0.03) for step in second.steps)
    phases = (Phase(name="build", seconds=4.0, step=0), Phase(name="build", seconds=1.0, step=0))
    summary = summarize([first, replace(second, steps=waiting, phases=phases)])
    assert summary.timing.data_wait_fraction == pytest.approx(0.3)
    assert summary.startup.build_s == 5.0


def test_phases_between_steps_are_no_step_time(run) -> None:
    phases = [Phase(name="checkpoint", seconds=60.0, step=step) for step in (50, 100, 150)]
    summary = run(phases=[Phase(name="build", seconds=2.5, step=0), *phases])
    assert step_time_s(summary) == pytest.approx(0.1)
    assert (summary.startup.build_s, summary.startup.compile_s) == (2.5, None)


# --- interval --------------------------------------------------------------------------------------------


def test_interval_is_of_six_contiguous_batch_means(run) -> None:
    # 60 retained steps, six batches of ten: mean 0.1, squared deviations 1, 1, 0.16 and 0.16 x 1e-6.
    means = [0.1, 0.101, 0.099, 0.1004, 0.0996, 0.1]
    summary = run(steps=70, step_time_s=lambda rank, step: means[max(0, step - 11) // 10])
    half_width = 2.571 * 0.001 * math.sqrt((1 + 1 + 0.16 + 0.16) / 5) / math.sqrt(6)
    assert summary.timing.num_retained_steps == 60
    assert step_time_s(summary) == pytest.approx(0.1)
    assert summary.timing.step_time_s.low == pytest.approx(0.1 - half_width, rel=1e-9)
    assert summary.timing.step_time_s.high == pytest.approx(0.1 + half_width, rel=1e-9)


def test_under_60_retained_steps_there_is_no_interval(run) -> None:
    summary = run(steps=69)
    assert summary.timing.num_retained_steps == 59 and summary.timing.steady is True
    assert summary.timing.step_time_s == Interval(value=pytest.approx(0.1))


def test_an_interval_that_would_reach_zero_is_none(run) -> None:
    # One stall holds nearly all the time; it lies in neither the first fifth nor the last half.
    summary = run(steps=210, step_time_s=lambda rank, step: 1000.0 if step == 80 else 0.1)
    assert (summary.timing.num_retained_steps, summary.timing.steady) == (200, True)
    assert step_time_s(summary) == pytest.approx((1000 + 199 * 0.1) / 200)  # untrimmed: the stall is billed
    assert summary.timing.step_time_s.low is None and summary.timing.step_time_s.high is None


def test_drift_is_last_third_over_first_and_told_from_2_percent_on(run) -> None:
    summary = run(steps=310, step_time_s=lambda rank, step: 0.103 if step > 210 else 0.1)
    assert summary.timing.drift == pytest.approx(0.03)
    assert summary.warnings == ("step time drifted by +3.0% from the first third to the last",)

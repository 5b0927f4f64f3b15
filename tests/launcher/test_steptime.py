"""What of a run is warm-up, what is retained, and its interval: known answers through `summarize`."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_records import read_all, step_time_s, write_run

from fastlaunch.measure.record_files import Columns
from fastlaunch.measure.steptime import time_attempt
from fastlaunch.measure.summarize import summarize
from fastlaunch.measure.summary import RunSummary, Startup
from fastlaunch_train.records.records import Eval, Phase, Step


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunSummary]:
    """Summary of the attempts written so far and of the one that is asked for."""

    def write(**options: Any) -> RunSummary:
        write_run(tmp_path, **options)
        return summarize(read_all(sorted(tmp_path.iterdir(), reverse=True)))

    return write


# --- warm-up ---------------------------------------------------------------------------------------------


def test_ten_steps_and_a_tenth_of_the_rest_are_cut_whatever_they_took(run) -> None:
    summary = run(steps=210, step_time_s=lambda rank, step: 0.2 if step <= 40 else 0.1)
    assert (summary.timing.num_warmup_steps, summary.timing.num_retained_steps) == (30, 180)
    # Ten slow steps are left, and count.
    assert step_time_s(summary) == pytest.approx((10 * 0.2 + 170 * 0.1) / 180)
    assert summary.timing.warmup_s == pytest.approx(30 * 0.2)


@pytest.mark.parametrize(
    ("steps", "compiling", "num_retained", "is_noted"),
    [
        (200, {1, 2, 4}, 162, False),
        (200, {1, 4, 7}, 171, True),  # ten steps in a row without one end the warm-up
        (64, {1, 13}, 49, True),  # the shorter last batch of an epoch
        (150, {1, 16}, 126, True),  # a new shape halfway
        (200, set(range(1, 41)), 135, True),  # it never stops: a quarter
        (24, {1, 2, 3}, 13, True),
    ],
)
def test_compiles_before_ten_steps_without_one_in_the_first_quarter_are_warm_up(
    run, steps: int, compiling: set[int], num_retained: int, is_noted: bool
) -> None:
    # compiling: blocks of five steps, from 1. Each compilation stalls the last step of its block.
    def num_compiles(step: int) -> int:
        return sum(5 * block < step + 5 for block in compiling)

    def time_s(rank: int, step: int) -> float:
        return 2.0 if step % 5 == 0 and step // 5 in compiling else 0.1

    summary = run(steps=steps, steps_per_block=5, num_compiles=num_compiles, step_time_s=time_s)
    assert summary.timing.num_retained_steps == num_retained
    retained_s = [time_s(0, step) for step in range(steps - num_retained + 1, steps + 1)]
    assert step_time_s(summary) == pytest.approx(sum(retained_s) / num_retained)
    assert summary.timing.compiled_late is is_noted


def test_allocator_growth_is_warm_up_likewise_and_shrinking_is_none(run) -> None:
    held_gib = {5: 5.0, 10: 6.0, 15: 8.0, 20: 7.0, 80: 9.0}
    summary = run(steps=200, steps_per_block=5, reserved_gib=lambda step: held_gib.get(step, 7.0))
    assert (summary.timing.num_retained_steps, summary.warnings) == (167, ())


def test_any_rank_may_set_the_warm_up(tmp_path: Path) -> None:
    records = read_all(write_run(tmp_path, steps=100, world_size=2, num_compiles=lambda step: 1))
    grown = [*records[1].blocks[:1], *(replace(block, num_compiles=2) for block in records[1].blocks[1:])]
    assert summarize([records[0], replace(records[1], blocks=tuple(grown))]).timing.num_retained_steps == 72


def test_steps_before_a_compile_phase_are_cut(run) -> None:
    seconds = {0: 30.0, 8: 7.0, 16: 5.0}
    phases = [Phase(name="compile", seconds=each, step=step) for step, each in seconds.items()]
    summary = run(steps=200, phases=phases)
    assert summary.timing.num_retained_steps == 166
    assert summary.startup == Startup(compile_s=42.0)
    # The first block that compiled is warm-up even when it is long.
    long = run(attempt=2, steps=300, steps_per_block=50, num_compiles=lambda step: 3)
    assert long.timing.num_retained_steps == 225


@pytest.mark.parametrize(("second", "num_retained"), [(14, 168), (15, 171)])
def test_ten_steps_without_a_compile_end_the_warm_up(run, second: int, num_retained: int) -> None:
    phases = [Phase(name="compile", seconds=1.0, step=step) for step in (4, second)]
    assert run(steps=200, phases=phases).timing.num_retained_steps == num_retained


def test_nineteen_of_twenty_retained_steps_took_no_longer(run) -> None:
    # Steps 21 to 110.
    summary = run(steps=110, step_time_s=lambda rank, step: 0.01 * step)
    assert summary.timing.p95_step_time_s == pytest.approx(0.01 * (21 + 0.95 * 89))
    assert summary.timing.p5_step_time_s == pytest.approx(0.01 * (21 + 0.05 * 89))


def test_phases_between_steps_are_no_step_time_and_the_slowest_rank_counts_after_warm_up(run) -> None:
    phases = [Phase(name="checkpoint", seconds=60.0, step=step) for step in (50, 100)]
    summary = run(
        world_size=2,
        steps=110,
        phases=[Phase(name="build", seconds=2.5, step=0), *phases],
        step_time_s=lambda rank, step: (9.0, 0.1)[rank] if step <= 10 else (0.1, 0.2)[rank],
    )
    assert step_time_s(summary) == pytest.approx(0.2)
    assert (summary.startup.build_s, summary.startup.compile_s) == (2.5, None)


def test_the_rank_that_waits_and_builds_longest_counts(tmp_path: Path) -> None:
    first, second = read_all(write_run(tmp_path, world_size=2, data_wait_s=0.01))
    waiting = Columns(Step, (replace(step, data_wait_s=0.03) for step in second.steps))
    phases = (Phase(name="build", seconds=4.0, step=0), Phase(name="build", seconds=1.0, step=0))
    summary = summarize([first, replace(second, steps=waiting, phases=phases)])
    assert summary.timing.data_wait_fraction == pytest.approx(0.3)
    assert summary.startup.build_s == 5.0


# --- the mean --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_script", "waits_s"), [(True, 5.0), (True, 0.0), (False, 5.0)])
def test_the_wait_of_a_scripts_rank_for_one_that_evaluates_alone_is_no_step_time(
    tmp_path: Path, is_script: bool, waits_s: float
) -> None:
    def time_of(rank: int, step: int) -> float:
        return 0.1 + (waits_s if (rank, step) == (1, 101) else 0.0)

    evaluation = Eval(step=100, split="validation", loss=1.0, num_samples=8, seconds=5.0)
    script = {"script": {"command": [], "variant": {}}} if is_script else {}
    paths = write_run(
        tmp_path, world_size=2, steps=210, step_time_s=time_of, evals=[evaluation], header=script
    )
    first, second = read_all(paths)
    mean_s = step_time_s(summarize([first, replace(second, evals=())]))
    assert mean_s == pytest.approx(0.1 if is_script else 0.1 + 5 / 180)
    # What nobody says is a step's time.
    if waits_s:
        alike = [replace(record, evals=()) for record in (first, second)]
        assert step_time_s(summarize(alike)) == pytest.approx(0.1 + 5 / 180)


def test_steps_that_one_rank_made_alone_are_said_not_to_count(tmp_path: Path) -> None:
    script = {"script": {"command": [], "variant": {}}, "steps": None}
    long, short = (
        read_all(write_run(tmp_path / str(steps), world_size=2, steps=steps, header=script))
        for steps in (300, 200)
    )
    assert summarize(long).uncounted == ()
    uneven = summarize([long[0], short[1]])
    assert (uneven.problems, len(uneven.uncounted)) == ((), 1)
    # Killed ranks have not recorded as much as they did.
    killed = summarize([replace(long[0], end=None), replace(short[1], end=None)])
    assert killed.uncounted == ()


def test_stalls_are_billed_and_count(run) -> None:
    summary = run(steps=210, step_time_s=lambda rank, step: 1000.0 if step == 80 else 0.1)
    assert step_time_s(summary) == pytest.approx((1000 + 179 * 0.1) / 180)


def test_what_the_last_half_takes_more_is_recorded_and_told_from_2_percent_on(run) -> None:
    summary = run(steps=210, step_time_s=lambda rank, step: 0.11 if step > 120 else 0.1)
    assert summary.timing.late == pytest.approx(math.log(0.11 / 0.105))
    assert ["+4.8%" in warning for warning in summary.warnings] == [True]
    assert run(attempt=2, steps=210, step_time_s=0.1).timing.late == pytest.approx(0.0)


def test_short_batches_in_one_half_are_no_change(tmp_path: Path) -> None:
    # Half of the samples in half of the time.
    files = write_run(tmp_path, steps=210, step_time_s=lambda rank, step: 0.05 if step > 120 else 0.1)
    (record,) = read_all(files)
    assert time_attempt([record]).late == pytest.approx(math.log(2 / 3), abs=0.01)
    counted = (replace(step, num_samples=4 if step.step > 120 else 8) for step in record.steps)
    steps = Columns(Step, counted)
    assert time_attempt([replace(record, steps=steps)]).late == pytest.approx(0.0)


def test_an_attempt_that_took_another_time_is_told(run) -> None:
    run(steps=210, step_time_s=0.1)
    assert run(attempt=2, steps=110, step_time_s=0.101).warnings == ()
    summary = run(attempt=3, steps=110, step_time_s=0.5)
    assert step_time_s(summary) == pytest.approx(0.1)
    assert ["attempt 3 took 500 ms" in warning for warning in summary.warnings] == [True]

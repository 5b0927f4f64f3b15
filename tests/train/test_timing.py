"""Blocks of steps: where they end, and that their times add up."""

import itertools
import math
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch_train.timing import MAX_BLOCK_STEPS, WARMUP_STEPS, BlockTimer, next_block_steps


def blocks(*, first: int = 1, last: int, step_time_s: float, every: int = 0) -> list[tuple[int, int]]:
    """(first, last) step of every block of a run with constant steps."""
    found: list[tuple[int, int]] = []
    step = first
    while step <= last:
        known = step_time_s if found else 0.0
        count = next_block_steps(
            next_step=step, first_step=first, last_step=last, step_time_s=known, every=every
        )
        found.append((step, step + count - 1))
        step += count
    return found


def test_the_first_step_and_the_warm_up_stand_apart() -> None:
    assert blocks(last=60, step_time_s=0.05) == [(1, 1), (2, 10), (11, 30), (31, 50), (51, 60)]


def test_a_slow_step_is_a_block_of_its_own() -> None:
    assert blocks(last=4, step_time_s=3.0) == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_a_block_ends_at_every_checkpoint() -> None:
    ends = [last for _, last in blocks(last=50, step_time_s=0.05, every=8)]
    assert {8, 16, 24, 32, 40, 48} <= set(ends)


def test_a_resumed_run_warms_up_from_where_it_starts() -> None:
    assert blocks(first=101, last=130, step_time_s=0.1)[:2] == [(101, 101), (102, 110)]


@given(
    first=st.integers(1, 500),
    count=st.integers(1, 3000),
    step_time_s=st.floats(0, 100),
    every=st.integers(0, 300),
)
def test_blocks_cover_every_step_once(first: int, count: int, step_time_s: float, every: int) -> None:
    last = first + count - 1
    found = blocks(first=first, last=last, step_time_s=step_time_s, every=every)
    assert found[0][0] == first
    assert found[-1][1] == last
    for (_, end), (start, _) in itertools.pairwise(found):
        assert start == end + 1
    assert all(1 <= end - start + 1 <= MAX_BLOCK_STEPS for start, end in found)
    if every:
        assert not any(
            start <= n * every < end for start, end in found for n in [end // every] if end % every
        )
    assert any(end == min(first + WARMUP_STEPS - 1, last) for _, end in found)


def test_the_timer_gives_each_step_its_time_and_loss() -> None:
    timer = BlockTimer(torch.device("cpu"))
    met: list[None] = []
    timer.restart(lambda: met.append(None))
    for number in (1, 2):
        time.sleep(0.01 * number)
        timer.step_done(torch.tensor(float(number)), data_wait_s=0.001 * number)
    closed = timer.close(lambda: met.append(None))
    assert closed.losses == [1.0, 2.0]
    assert closed.data_waits_s == [0.001, 0.002]
    assert closed.step_times_s[0] >= 0.01
    assert closed.step_times_s[1] >= 0.02
    assert math.isclose(sum(closed.step_times_s), closed.wall_s, abs_tol=0.005)
    assert len(met) == 2


def test_what_happens_between_two_blocks_belongs_to_the_second() -> None:
    timer = BlockTimer(torch.device("cpu"))
    timer.restart(lambda: None)
    timer.step_done(torch.tensor(0.0), 0.0)
    timer.close(lambda: None)
    time.sleep(0.05)
    timer.step_done(torch.tensor(0.0), 0.0)
    assert timer.close(lambda: None).wall_s >= 0.05


def test_work_that_is_no_step_is_left_out_by_a_restart() -> None:
    timer = BlockTimer(torch.device("cpu"))
    timer.restart(lambda: None)
    time.sleep(0.5)
    timer.restart(lambda: None)
    timer.step_done(torch.tensor(0.0), 0.0)
    assert timer.close(lambda: None).wall_s < 0.5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_comes_back_as_it_was(value: float) -> None:
    timer = BlockTimer(torch.device("cpu"))
    timer.restart(lambda: None)
    timer.step_done(torch.tensor(value), 0.0)
    assert not math.isfinite(timer.close(lambda: None).losses[0])

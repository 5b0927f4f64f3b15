"""Blocks of steps: where they end, and that their times add up."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch_train.loop.recorder import MAX_BLOCK_STEPS, WARMUP_STEPS, Recorder, next_block_steps
from fastlaunch_train.records.records import RecordWriter

CPU = torch.device("cpu")


def blocks(*, first: int = 1, last: int, step_time_s: float, every: int = 0) -> list[tuple[int, int]]:
    """(first, last) step of every block of a run with constant steps."""
    found: list[tuple[int, int]] = []
    step = first
    while step <= last:
        known = step_time_s if found else 0.0
        count = next_block_steps(
            next_step=step, first_step=first, last_step=last, step_time_s=known, block_s=1.0, every=[every]
        )
        found.append((step, step + count - 1))
        step += count
    return found


def test_the_first_step_and_the_warm_up_stand_apart() -> None:
    assert blocks(last=60, step_time_s=0.05) == [(1, 1), (2, 10), (11, 30), (31, 50), (51, 60)]


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
        assert {step for step in range(first, last + 1) if step % every == 0} <= {end for _, end in found}
    assert any(end == min(first + WARMUP_STEPS - 1, last) for _, end in found)


class Clock:
    """A clock that only tests move on."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def recorder(clock: Clock, meet: Callable[[], None] = lambda: None) -> tuple[Recorder, list[Any]]:
    """A recorder that has started, and the lines that it writes."""
    lines: list[Any] = []
    writer = SimpleNamespace(add=lines.append, flush=lambda: None)
    started = Recorder(cast(RecordWriter, writer), CPU, meet, clock=clock)
    started.restart()
    return started, lines


def step(steps: Recorder, clock: Clock, *, loss: float = 0.0, data_wait_s: float = 0.0) -> None:
    """A step of a second."""
    clock.now_s += 1.0
    steps.step(torch.tensor(loss), data_wait_s)


def details(num_steps: int) -> Callable[[], list[dict[str, None]]]:
    return lambda: [{"num_samples": None, "num_tokens": None}] * num_steps


def test_each_step_is_recorded_with_its_time_and_loss() -> None:
    clock = Clock()
    met: list[float] = []

    def meet() -> None:
        # The others come half a second later.
        clock.now_s += 0.5
        met.append(clock.now_s)

    steps, lines = recorder(clock, meet)
    step(steps, clock, loss=1.5, data_wait_s=0.25)
    clock.now_s += 1.0
    step(steps, clock, loss=2.5, data_wait_s=0.125)
    closed = steps.close(details(2))
    first, second, block = lines
    assert closed.losses == [first.loss, second.loss] == [1.5, 2.5]
    assert [first.data_wait_s, second.data_wait_s] == [0.25, 0.125]
    assert [first.step_time_s, second.step_time_s] == [1.0, 2.0]
    assert closed.wall_s == block.wall_s == 3.5, "until the slowest rank has come"
    assert met == [100.5, 104.0]


def test_bookkeeping_between_blocks_counts_and_a_pause_does_not() -> None:
    clock = Clock()
    steps, lines = recorder(clock)
    step(steps, clock)
    steps.close(details(1))
    clock.now_s += 0.25  # bookkeeping
    step(steps, clock)
    assert (steps.close(details(1)).wall_s, lines[-2].step_time_s) == (1.25, 1.25)
    clock.now_s += 5.0  # a checkpoint
    steps.restart()
    step(steps, clock)
    assert steps.close(details(1)).wall_s == 1.0

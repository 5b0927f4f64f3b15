"""A script's ranks: what they agree on, and what is left of one that is killed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scripts import record, run

from fastlaunch_train.records.records import read_record
from fastlaunch_train.script.ranks import KEPT_BEFORE_STOP, Agreed, Meeting
from fastlaunch_train.script.recording import Recording
from fastlaunch_train.script.settings import ScriptSettings, read_settings

STORES: dict[str, Callable[[Path], torch.distributed.Store]] = {
    "memory": lambda folder: torch.distributed.HashStore(),
    "file": lambda folder: torch.distributed.FileStore(str(folder / "store"), 2),
}


def settings(folder: Path, **changes: object) -> ScriptSettings:
    read = read_settings(
        {"FASTLAUNCH_RECORDS": str(folder)}, script="train.py", command=["python", "train.py"]
    )
    assert read is not None
    return replace(read, **changes)


def after(last: int, num_steps: int, *, stop: bool = False) -> Agreed:
    return Agreed(num_steps=num_steps, block_end=last + num_steps, stop=stop)


@pytest.mark.parametrize("kind", STORES)
def test_the_first_rank_decides_and_none_waits_for_one_that_is_late(tmp_path: Path, kind: str) -> None:
    store, first, second = STORES[kind](tmp_path), Meeting(), Meeting()
    ends = [first.meet(store, 0, after(last, 10)).block_end for last in (1, 11, 21)]
    assert ends == [11, 21, 31]
    assert [second.meet(store, 1, after(last, 77)).block_end for last in (1, 11, 21)] == ends
    assert second.meet(store, 1, after(31, 77)) == first.meet(store, 0, after(31, 10)) == after(31, 77)


def test_a_stop_of_one_rank_is_of_all_after_the_same_step() -> None:
    store, first, second = torch.distributed.HashStore(), Meeting(), Meeting()
    assert not first.meet(store, 0, after(10, 10)).stop
    assert not second.meet(store, 1, after(10, 10, stop=True)).stop
    assert first.meet(store, 0, after(20, 10)) == second.meet(store, 1, after(20, 10, stop=True))
    assert first.meet(store, 0, after(30, 10)).stop


@pytest.mark.parametrize("num_behind", [KEPT_BEFORE_STOP, KEPT_BEFORE_STOP + 1])
def test_a_rank_that_lags_far_stops_at_once(num_behind: int) -> None:
    store, first, second = torch.distributed.HashStore(), Meeting(), Meeting()
    for number in range(num_behind + 1):
        first.meet(store, 0, after(10 * number, 10, stop=number == num_behind))
    assert second.meet(store, 1, after(0, 10)).stop == (num_behind > KEPT_BEFORE_STOP)


def test_ranks_that_made_other_numbers_of_steps_meet_after_as_many_more() -> None:
    store, first = torch.distributed.HashStore(), Meeting()
    first.meet(store, 0, after(300, 100))
    # The first that comes after a few steps more ends with the others.
    for last, block_end in ((200, 300), (303, 400), (400, 500)):
        assert Meeting().meet(store, 1, after(last, 1)).block_end == block_end


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_that_is_killed_leaves_all_but_the_last_second(tmp_path: Path, world_size: int) -> None:
    now, ended_at = 0.0, []
    recording = Recording(settings(tmp_path, world_size=world_size), clock=lambda: now)
    recording.start()
    for number in range(1, 431):
        now += 0.01 if number <= 400 else 0.5  # so that what was agreed makes a block too long
        recording.step(None)
        ended_at.append(now)
        if number > 10 and number % 9 == 0:
            num_left = len(read_record(tmp_path / "rank-00000-attempt-1.jsonl").steps)
            assert now - ended_at[num_left - 1] < 2
            assert number - num_left <= max(10, number / 5)
    recording.finish()


def test_a_loop_that_was_left_is_on_the_disk(tmp_path: Path) -> None:
    body = """
    import os, time
    import fastlaunch_train as fl
    for batch in fl.steps(range(100)):
        time.sleep(0.001)
    os._exit(0)
    """
    assert run(tmp_path, body)[0] == 0
    found = record(tmp_path)
    assert found.end is not None and found.end.status == "completed"
    assert found.blocks[-1].last_step == found.steps[-1].step == 100

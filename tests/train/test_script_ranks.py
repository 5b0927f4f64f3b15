"""A script's ranks: what they agree on, what is left of one that is killed, and ranks that record nothing."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scripts import record, run

from fastlaunch.core.plan import RunState
from fastlaunch.measure.outcome import outcome_of, read_records
from fastlaunch.measure.record_files import read_record
from fastlaunch.measure.summarize import summarize
from fastlaunch_train.process.torchrun import FIRST_FAILED
from fastlaunch_train.records.records import End, RecordWriter, record_path
from fastlaunch_train.script.ending import Ending, complete_records
from fastlaunch_train.script.ranks import KEPT_BEFORE_STOP, Agreed, Meeting
from fastlaunch_train.script.recording import Recording
from fastlaunch_train.script.settings import ScriptSettings, header, read_settings

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


@pytest.mark.parametrize(
    ("method", "parent", "num_steps", "num_uncounted"),
    [("fork", "", 20, 1), ("fork", "fl.stop_requested()", 0, 2), ("spawn", "", 20, 1)],
)
def test_processes_without_a_rank_of_their_own_are_told(
    tmp_path: Path, method: str, parent: str, num_steps: int, num_uncounted: int
) -> None:
    body = f"""
    import multiprocessing, time
    import fastlaunch_train as fl

    def work():
        fl.step()
        for _ in range(20):
            time.sleep(0.001)
            fl.step(num_samples=4)

    if __name__ == "__main__":
        {parent}
        children = [multiprocessing.get_context("{method}").Process(target=work) for _ in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
    """
    assert run(tmp_path, body)[0] == 0
    found = record(tmp_path)
    assert found.end is not None and (found.end.status, found.end.num_steps) == ("completed", num_steps)
    (uncounted,) = summarize([found]).uncounted
    assert f"{num_uncounted} process" in uncounted and " of train.py" in uncounted


@pytest.mark.parametrize("status", ["completed", "failed"])
def test_ranks_that_record_nothing_have_the_end_of_their_command(tmp_path: Path, status: str) -> None:
    own = header(settings(tmp_path, world_size=4, num_nodes=2), None, attempt=1)
    for node in (0, 1):
        ending = Ending(status=status, message=None if status == "completed" else "exit code 3", wall_s=3.0)
        ranks = range(2 * node, 2 * node + 2)
        complete_records(tmp_path, attempt=1, node=node, ranks=ranks, header=own, ending=ending)
        for path in tmp_path.glob("rank-*"):  # each node has a folder of its own
            path.rename(tmp_path / f"done-{path.name}")
    records, problems = read_records(sorted(tmp_path.glob("done-*")))
    summary, outcome = summarize(records), outcome_of(records)
    assert (problems, [of.header["rank"] for of in records], summary.setup.num_gpus) == ([], [0, 1, 2, 3], 4)
    if status == "completed":
        assert (outcome.state, summary.problems, summary.uncounted) == (RunState.COMPLETED, (), ())
        assert summary.figures.total_time_s == 3.0
    else:
        assert (outcome.state, outcome.reason) == (RunState.FAILED, "failed: exit code 3")


STOPPED, LEFT, RAISED = (
    ("interrupted", "stopped by SIGTERM"),
    ("completed", None),
    ("failed", "KeyError: 'x'"),
)


@pytest.mark.parametrize(
    ("said", "first", "status", "reason"),
    [
        # Each rank's own end, None without one: what torchrun tells is its end of the ranks that are left.
        ([STOPPED, LEFT], {}, "failed", "failed on rank 1: exit code 1"),
        ([LEFT, STOPPED], {}, "failed", "failed on rank 0: exit code 1"),
        ([STOPPED, None], {}, "failed", "failed on rank 1: exit code 1"),
        ([STOPPED, STOPPED], {}, "failed", "failed on rank 0: exit code 1"),
        ([STOPPED, RAISED], {}, "failed", "failed on rank 1: KeyError: 'x'"),
        ([LEFT, LEFT], {1: 3}, "failed", "failed on rank 1: exit code 3"),
        ([STOPPED, None], {1: -11}, "failed", "failed on rank 1: killed by SIGSEGV"),
        ([None, None], {1: -11}, "failed", "failed on rank 1: killed by SIGSEGV"),
        ([None, RAISED], {1: 1}, "failed", "failed on rank 1: KeyError: 'x'"),
        ([STOPPED, STOPPED], {}, "interrupted", "stopped by SIGTERM"),
        ([STOPPED, None], {}, "interrupted", "stopped by SIGTERM"),
        ([LEFT, STOPPED], {}, "interrupted", "stopped by SIGTERM"),
    ],
)
def test_a_rank_that_was_asked_to_stop_says_nothing_of_why_the_command_failed(
    tmp_path: Path, said: list[tuple[str, str | None] | None], first: dict[int, int], status: str, reason: str
) -> None:
    own = header(settings(tmp_path, world_size=2), None, attempt=1)
    for rank, words in enumerate(said):
        writer = RecordWriter(record_path(tmp_path, rank=rank, attempt=1))
        writer.write_header({**own, "rank": rank})
        if words:
            writer.add(End(status=words[0], message=words[1], num_steps=0, peak_memory_gib=None))
        writer.flush()
        writer.close()
    if first:
        (tmp_path / FIRST_FAILED).write_text(json.dumps(first))
    message = "exit code 1" if status == "failed" else "stopped by SIGTERM"
    ending = Ending(status=status, message=message, wall_s=3.0)
    complete_records(tmp_path, attempt=1, node=0, ranks=[0, 1], header=own, ending=ending)
    outcome = outcome_of(read_records(sorted(tmp_path.glob("rank-*")))[0])
    assert (outcome.state, outcome.reason) == (RunState(status), reason)
    assert not (tmp_path / FIRST_FAILED).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "of_rank", "reason"),
    [
        ("sys.exit('bad data')", 1, "failed on rank 1: exit code 1"),
        ("os.kill(os.getpid(), 11)", 0, "failed on rank 0: killed by SIGSEGV"),
    ],
)
def test_torchruns_end_of_the_other_ranks_is_no_stop(
    tmp_path: Path, end: str, of_rank: int, reason: str
) -> None:
    body = f"""
    import os, sys, time
    import fastlaunch_train as fl
    for i in range(3000):
        time.sleep(0.01)
        fl.step(num_samples=8)
        if i == 40 and os.environ["RANK"] == "{of_rank}":
            {end}
    """
    code, output = run(tmp_path, body, "--nproc", "2")
    assert code == 1, output
    outcome = outcome_of([record(tmp_path, 0), record(tmp_path, 1)])
    assert (outcome.state, outcome.reason) == (RunState.FAILED, reason)


def test_of_a_rank_that_records_alone_the_samples_are_counted_and_that_is_told(tmp_path: Path) -> None:
    of_rank = settings(tmp_path, world_size=2, rank=1)
    recording = Recording(of_rank)
    for _ in range(31):
        recording.step(8)
    recording.finish()
    # Its command knows no number of ranks.
    own = header(replace(of_rank, world_size=1, rank=0), None, attempt=1)
    ending = Ending(status="completed", message=None, wall_s=3.0)
    complete_records(tmp_path, attempt=1, node=0, ranks=[0], header=own, ending=ending)
    records, _ = read_records(sorted(tmp_path.glob("rank-*")))
    summary = summarize(records)
    assert (outcome_of(records).state, summary.problems) == (RunState.COMPLETED, ())
    assert (summary.setup.num_gpus, summary.timing.samples_per_step, summary.num_steps) == (2, 8, 30)
    assert len(summary.uncounted) == 1


@pytest.mark.slow
def test_ranks_with_other_numbers_of_batches_do_not_wait_for_each_other(tmp_path: Path) -> None:
    body = """
    import time
    import torch
    import torch.distributed as dist
    import fastlaunch_train as fl

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    for epoch in range(2):
        with net.join():
            for _ in fl.steps(range(40 if rank else 60), num_samples=8):
                time.sleep(0.01)
                net(torch.randn(8, 4)).sum().backward()
    for _ in fl.steps(range(60 if rank else 40), num_samples=8):
        time.sleep(0.01)
    dist.barrier()
    dist.destroy_process_group()
    """
    code, output = run(tmp_path, body, "--nproc", "2")
    assert code == 0, output
    first, second = record(tmp_path, 0), record(tmp_path, 1)
    assert (len(first.steps), len(second.steps)) == (160, 140)
    summary = summarize([first, second])
    assert (summary.problems, summary.timing.samples_per_step) == ((), 16)
    assert len(summary.uncounted) == 1

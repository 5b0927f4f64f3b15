"""How a run ended, by its records, and whether they are of the run asked for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_records import write_run
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.core.plan import RunState
from fastlaunch.jobs.job import Job
from fastlaunch.measure.outcome import Outcome, contradictions, outcome_of, read_records
from fastlaunch.measure.record_files import MAX_RECORD_BYTES, RankRecord, RecordReader
from fastlaunch.measure.summarize import summarize
from fastlaunch_train.recipes.recipes import resolve_recipe

ECHO = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer"
JOB = Job(workload="vit-huge", recipe=resolve_recipe("bf16"), batch_size=2, steps=20, num_gpus=2)


def records(directory: Path, **how: Any) -> list[RankRecord]:
    found, problems = read_records(write_run(directory, **{"steps": 20, "world_size": 2, **how}))
    assert problems == []
    return found


@pytest.mark.parametrize(
    ("status", "state", "reason"),
    [
        ("completed", RunState.COMPLETED, None),
        ("interrupted", RunState.INTERRUPTED, "told"),
        ("out_of_memory", RunState.FAILED, "out of memory on rank 0: told"),
        ("nan_loss", RunState.FAILED, "the loss is not a number on rank 0: told"),
        (None, RunState.LOST, "rank 0 ended without saying how, after step 20"),
    ],
)
def test_status_of_all_ranks_decides(
    tmp_path: Path, status: str | None, state: RunState, reason: str | None
) -> None:
    found = records(tmp_path, status=status, message="told")
    assert outcome_of(found) == Outcome(state=state, reason=reason)


def test_rank_that_failed_decides_over_those_it_took_along(tmp_path: Path) -> None:
    one = records(tmp_path / "a", status="interrupted")
    two = records(tmp_path / "b", status="out_of_memory")
    outcome = outcome_of([one[0], two[1]])
    assert outcome == Outcome(state=RunState.FAILED, reason="out of memory on rank 1")


def test_rank_whose_peer_was_gone_does_not_decide(tmp_path: Path) -> None:
    one = records(tmp_path / "a", status="failed", message=ECHO)
    two = records(tmp_path / "b", status="failed", message="KeyError: 'label'")
    assert outcome_of([one[0], two[1]]).reason == "failed on rank 1: KeyError: 'label'"
    assert outcome_of(one).reason == f"failed on rank 0: {ECHO}"


def test_rank_without_a_word_tells_more_than_those_that_lost_it(tmp_path: Path) -> None:
    one = records(tmp_path / "a", status="failed", message=ECHO)
    two = records(tmp_path / "b", status=None)
    told = "rank 1 ended without saying how, after step 20"
    # Whether that is a failure, or a machine that was taken, the node or its backend says.
    assert outcome_of([one[0], two[1]]) == Outcome(state=RunState.LOST, reason=told)
    assert outcome_of([one[0], two[1]], exit_code=1) == Outcome(
        state=RunState.FAILED, reason=f"{told} (exit code 1)"
    )
    assert outcome_of(one[:1]).reason == "rank 1 left no record"
    own = records(tmp_path / "c", status="failed", message="KeyError: 'label'")
    assert outcome_of([own[0], two[1]]).reason == "failed on rank 0: KeyError: 'label'"


def test_rank_that_never_called_us_gives_way_and_takes_no_blame(tmp_path: Path) -> None:
    script = {"command": ["python", "train.py"], "variant": {}, "silent": True}
    one = records(tmp_path / "a", status="failed", message="exit code 1", header={"script": script})
    two = records(tmp_path / "b", status="failed", message="KeyError: 'label'")
    assert outcome_of([one[0], two[1]]).reason == "failed on rank 1: KeyError: 'label'"
    assert outcome_of(one).reason == "failed: exit code 1"


def test_exit_code_tells_failed_from_lost(tmp_path: Path) -> None:
    assert outcome_of([]).state is RunState.LOST
    assert outcome_of([], exit_code=2) == Outcome(
        state=RunState.FAILED, reason="it ended before its first record (exit code 2)"
    )
    found = records(tmp_path, status=None)
    assert outcome_of(found, exit_code=-9).reason == (
        "rank 0 ended without saying how, after step 20 (killed by signal 9)"
    )


def test_only_the_last_attempt_counts(tmp_path: Path) -> None:
    first = records(tmp_path / "a", status="interrupted")
    second = records(tmp_path / "b", attempt=2, first_step=11, steps=10)
    assert outcome_of([*second, *first]).state is RunState.COMPLETED


def test_a_run_of_which_one_record_is_too_large_has_none(tmp_path: Path) -> None:
    paths = write_run(tmp_path, world_size=3)
    paths[1].write_bytes(paths[1].read_bytes() + b" " * 2**21)
    found, problems = read_records(paths)
    assert (found, [problem.path for problem in problems]) == ([], [paths[1]])


def test_ranks_are_not_counted_one_by_one(tmp_path: Path) -> None:
    record = records(tmp_path)[0]
    many = replace(record, header={**record.header, "world_size": 2**62})
    assert outcome_of([many]).state is RunState.LOST


def test_unreadable_records_are_named_and_skipped(tmp_path: Path) -> None:
    paths = write_run(tmp_path, world_size=2)
    paths[0].write_text("not a record\n")
    found, problems = read_records([*paths, tmp_path / "absent"])
    assert [record.header["rank"] for record in found] == [1]
    assert [(problem.path, problem.line) for problem in problems] == [
        (paths[0], 1),
        (tmp_path / "absent", None),
    ]


def test_record_of_the_job_contradicts_nothing(tmp_path: Path) -> None:
    assert contradictions(JOB, records(tmp_path)) == ()
    assert contradictions(replace(JOB, batch_size=None), records(tmp_path / "auto", batch_size=512)) == ()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"workload": "vit-tiny"}, "workload 'vit-tiny' for 'vit-huge'"),
        ({"batch_size": 4}, "batch size 4 for 2"),
        ({"world_size": 1}, "number of ranks 1 for 2"),
        ({"data": "loader"}, "data 'loader' for 'synthetic'"),
        ({"recipe": "bf16 optimizer_impl=fused"}, "optimizer_impl 'fused' for 'auto'"),
    ],
)
def test_contradiction_is_told_once(tmp_path: Path, how: dict[str, Any], words: str) -> None:
    found = contradictions(JOB, records(tmp_path, **how))
    assert len(found) == 1
    assert words in found[0]


def test_a_recipe_is_compared_by_the_fields_that_the_record_has(tmp_path: Path) -> None:
    found = records(tmp_path)
    known = ("name", "description", "precision", "label", "overrides", "compile_mode")
    for record in found:
        record.header["recipe"] = {name: record.header["recipe"][name] for name in known}
    assert contradictions(JOB, found) == ()
    found[0].header["recipe"]["precision"] = "fp32"
    assert contradictions(JOB, found) == (
        "the record contradicts the request: recipe with precision 'fp32' for 'bf16'",
    )


@given(data=st.data())
def test_records_that_grow_are_read_as_if_they_were_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("run")
    paths = write_run(folder, steps=40, world_size=2, num_tokens=64, message="told", status="interrupted")
    whole = {path: path.read_bytes() for path in paths}
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(whole[paths[0]])))
        whole[paths[0]] = whole[paths[0]][:at] + b"\n{}\n" + whole[paths[0]][at:]
    for path in paths:
        path.write_bytes(b"")
    readers: dict[Path, RecordReader] = {}
    for _ in range(data.draw(st.integers(1, 5))):
        for path in paths:
            size = path.stat().st_size
            # A file may also be cut, or be another one by now.
            if not data.draw(st.integers(0, 9)):
                path.unlink()
                size = data.draw(st.integers(0, size))
            end = data.draw(st.integers(size, len(whole[path])))
            ends = [at for at in range(size, end) if whole[path][at : at + 1] in b"}\n"]
            path.write_bytes(whole[path][: data.draw(st.sampled_from([end, *ends]))])
        records, problems = read_records(paths, readers)
        expected, known = read_records(paths)
        assert records == expected and list(map(str, problems)) == list(map(str, known))
        assert [record.num_bytes for record in records] == [record.num_bytes for record in expected]
        if records:
            assert summarize(records) == summarize(expected)


def test_a_header_whose_end_comes_later_is_read_again(tmp_path: Path) -> None:
    (path,) = write_run(tmp_path, steps=2)
    whole = path.read_bytes()
    reader = RecordReader(path)
    for end in (whole.index(b"\n"), whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:end])
        assert reader.read() == RecordReader(path).read()


def test_a_record_is_read_from_where_the_last_look_ended(tmp_path: Path) -> None:
    (path,) = write_run(tmp_path, steps=40)
    whole = path.read_bytes()
    path.write_bytes(whole[:-400])
    reader = RecordReader(path)
    num_steps = len(reader.read().steps)
    # What was read is not looked at again.
    path.write_bytes(b"x" * (len(whole) - 800) + whole[-800:])
    assert num_steps < len(reader.read().steps) == 40
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="empty"):
        reader.read()
    path.write_bytes(whole)
    assert reader.read(max_bytes=MAX_RECORD_BYTES).end == RecordReader(path).read().end

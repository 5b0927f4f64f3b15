"""What a training job's container leaves: segments that join, files that are whole, and causes."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastlaunch_train.sagemaker.causes import cause_of
from fastlaunch_train.sagemaker.segments import Segments, end_of, joined
from fastlaunch_train.sagemaker.shelf import Shelf
from fastlaunch_train.sagemaker.shipping import checkpoints, last_attempt
from fastlaunch_train.sagemaker.words import FAILURE_CHARS, write_failure


@pytest.fixture(params=["beside", "elsewhere"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shelf]:
    """One that files can be renamed into, and one on a file system of its own."""
    root = tmp_path / "ml/checkpoints"
    if request.param == "elsewhere":
        memory = Path("/dev/shm")
        if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("there is one file system only")
        root = Path(tempfile.mkdtemp(dir=memory))
    yield Shelf(root, tmp_path / "ml", tmp_path / "tmp")
    shutil.rmtree(root, ignore_errors=True)


def visible(root: Path) -> dict[str, bytes]:
    """What lies there, less what is hidden."""
    names = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith(".")}


def test_files_are_taken_in_whole(shelf: Shelf) -> None:
    shelf.put("a/b", b"1")
    shelf.put("a/b", b"22")
    large = shelf.work / "step"
    large.write_bytes(b"333")
    shelf.move(large, "run/checkpoints/step-00000001.pt")
    assert visible(shelf.root) == {"a/b": b"22", "run/checkpoints/step-00000001.pt": b"333"}
    assert not large.exists()
    left = [path for path in shelf.root.rglob("*") if path.is_file()]
    assert len(left) == 2, "nothing is left of what was written aside"


def test_what_is_not_there_cannot_be_taken_in(shelf: Shelf) -> None:
    with pytest.raises(FileNotFoundError):
        shelf.move(shelf.work / "gone", "gone")
    assert visible(shelf.root) == {}


def test_what_was_kept_free_is_given_back(shelf: Shelf) -> None:
    def used() -> int:
        return sum(path.stat().st_size for path in shelf.work.rglob("*") if path.is_file())

    assert used() == 32 * 2**20
    shelf.release_reserve()
    assert used() == 0


def test_a_disk_that_takes_nothing_leaves_nothing(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "ml/checkpoints", tmp_path / "ml", tmp_path / "tmp")
    (shelf.root / "a").write_bytes(b"no folder")
    with pytest.raises(OSError):
        shelf.put("a/b", b"1")
    assert visible(shelf.root) == {"a": b"no folder"}
    assert list((shelf.work / "staged").iterdir()) == []


@given(st.lists(st.one_of(st.binary(max_size=20), st.sampled_from(["cut", "restart"])), max_size=30))
@settings(max_examples=25)
def test_segments_join_whenever_they_are_cut_and_whoever_goes_on(events: list[bytes | str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shelf = Shelf(root / "ml/checkpoints", root / "ml", root / "tmp")
        segments, file, written = Segments(shelf), shelf.work / "log.txt", b""
        file.touch()
        for event in [*events, "cut"]:
            if isinstance(event, bytes):
                with file.open("ab") as end:
                    end.write(event)
                written += event
            else:
                before = visible(shelf.root)
                segments.cut(file, "t/node-0/log.txt")
                after = visible(shelf.root)
                assert before.items() <= after.items(), "a segment never changes"
            if event == "restart":
                shelf = Shelf(shelf.root, root / "ml", root / "tmp")
                segments = Segments(shelf)
                file.touch()
        at, found = 0, visible(shelf.root)
        for name in sorted(found):
            assert int(name.rpartition(".")[2]) == at and found[name]
            at += len(found[name])
        assert b"".join(found[name] for name in sorted(found)) == written
        assert end_of(shelf.root / "t/node-0/log.txt") == len(written)


def test_what_sagemaker_leaves_beside_files_is_none_of_them(tmp_path: Path) -> None:
    node = tmp_path / "job/node-1/a-run"
    node.mkdir(parents=True)
    for name in ("log.txt.000000000000", "log.txt.000000000007.sagemaker-uploaded", "log.txt.sagemaker"):
        (node / name).write_bytes(b"123")
    assert end_of(node / "log.txt") == 3
    (node / "rank-00001-attempt-3.jsonl.000000000000").touch()
    (node / "rank-00001-attempt-9.jsonl.000000000000.sagemaker-uploading").touch()
    assert joined(node / "log.txt.000000000000") == "log.txt"
    assert last_attempt(tmp_path, "a-run") == 3
    assert last_attempt(tmp_path, "another") == 0
    for name in ("step-00000010.pt", "step-00000009.pt", "step-00000011.pt.sagemaker-uploading", "step-x.pt"):
        (node / name).touch()
    assert [path.name for path in checkpoints(node)] == ["step-00000009.pt", "step-00000010.pt"]


def left(output: Path, name: str, text: str, *, at_s: int) -> None:
    (output / name).write_text(text)
    os.utime(output / name, (at_s, at_s))


def test_the_first_rank_to_fail_says_why(tmp_path: Path) -> None:
    left(tmp_path, "traceback-rank-00000-attempt-2.txt", "Traceback\nKeyError: 'second'\n", at_s=20)
    left(tmp_path, "traceback-rank-00003-attempt-2.txt", "Traceback\nKeyError: 'first'\n\n", at_s=10)
    left(tmp_path, "traceback-rank-00001-attempt-1.txt", "KeyError: 'of before'\n", at_s=1)
    assert cause_of(tmp_path, tmp_path / "log.txt", 2) == "KeyError: 'first'"


def test_a_rank_whose_peer_is_gone_says_it_only_where_nobody_says_more(tmp_path: Path) -> None:
    echo = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    left(tmp_path, "traceback-rank-00000-attempt-1.txt", f"{echo}\n", at_s=1)
    assert cause_of(tmp_path, tmp_path / "log.txt", 1) == echo
    left(tmp_path, "traceback-rank-00001-attempt-1.txt", "ValueError: x\n", at_s=2)
    assert cause_of(tmp_path, tmp_path / "log.txt", 1) == "ValueError: x"


def test_a_record_says_why_where_there_is_no_traceback(tmp_path: Path) -> None:
    end = {"kind": "end", "status": "out_of_memory", "message": "OutOfMemoryError: CUDA out of memory"}
    left(tmp_path, "rank-00000-attempt-1.jsonl", '{"kind": "header"}\n' + json.dumps(end) + "\n", at_s=1)
    left(tmp_path, "rank-00001-attempt-1.jsonl", '{"kind": "hea', at_s=0)
    (tmp_path / "log.txt").write_text("something else\n")
    assert cause_of(tmp_path, tmp_path / "log.txt", 1) == "OutOfMemoryError: CUDA out of memory"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("error: no such workload\n  give another\n\n", "give another"),
        ("failed\n  exitcode  : -9\n  traceback : Signal 9 (SIGKILL) received by PID 7\n=====\n", "Signal 9"),
        ("======\n", ""),
        ("", ""),
    ],
)
def test_else_the_log_does(log: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(log)
    told = cause_of(tmp_path, tmp_path / "log.txt", 1)
    assert told.startswith(expected) and bool(told) == bool(expected)


def test_the_failure_is_cut_to_what_sagemaker_keeps(tmp_path: Path) -> None:
    write_failure(tmp_path / "output/failure", "cause" + "x" * 3000)
    text = (tmp_path / "output/failure").read_text()
    assert len(text) == FAILURE_CHARS == 1024 and text.startswith("cause")

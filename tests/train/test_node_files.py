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

from fastlaunch_train.node.commands import Clock
from fastlaunch_train.node.protocol import MAX_OUTPUT_FILE_BYTES, is_echo
from fastlaunch_train.node.sagemaker import FAILURE_CHARS, last_attempt, write_failure
from fastlaunch_train.node.shelf import Shelf
from fastlaunch_train.node.uploads import Segments, Uploads, before_end, checkpoints
from fastlaunch_train.node.verdicts import cause_of


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


def test_what_was_kept_free_is_given_back(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "ml/checkpoints", tmp_path / "ml", tmp_path / "tmp")

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


@given(st.lists(st.one_of(st.binary(max_size=20), st.sampled_from(["cut", "restart"])), max_size=15))
@settings(max_examples=10)
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
        assert shelf.end_of("t/node-0/log.txt") == len(written)


def test_ends_that_a_wrapper_may_write_anew_wait_until_its_script_has_ended(shelf: Shelf) -> None:
    said: list[str] = []
    uploads = Uploads(
        shelf,
        "t/node-0",
        work=shelf.work,
        log=shelf.work / "log.txt",
        every_s=60,
        say=said.append,
        clock=Clock(),
    )
    run = shelf.work / "out" / "a-run"
    (run / "output" / "deep").mkdir(parents=True)
    record, name = (
        run / "rank-00000-attempt-1.jsonl",
        "t/node-0/a-run/rank-00000-attempt-1.jsonl.000000000000",
    )
    lines = b'{"kind":"header"}\n{"kind":"step"}\n'
    record.write_bytes(lines + b'{"kind":"end"}\n')
    (run / "output" / "deep" / "model").write_bytes(b"weights")
    (run / "output" / "link").symlink_to("/etc/passwd")
    (run / "output" / "huge").touch()
    os.truncate(run / "output" / "huge", MAX_OUTPUT_FILE_BYTES + 1)
    uploads.script_starts("a-run")
    assert uploads.now()
    assert visible(shelf.root) == {name: lines}
    added = b'{"kind":"phase"}\n{"kind":"end","more":1}\n'
    record.write_bytes(lines + added)
    uploads.script_ended("a-run")
    assert uploads.script_output("a-run", 2)
    assert visible(shelf.root) == {
        name: lines,
        f"{name[:-12]}{len(lines):012d}": added,
        "t/node-0/a-run/output-attempt-2/deep/model.000000000000": b"weights",
    }
    assert len(said) == 1 and "output-attempt-2/huge" in said[0]


@pytest.mark.parametrize(
    "data, kept",
    [(b"", b""), (b"half", b""), (b"a\nhalf", b"a\n"), (b'{"kind":"end"}\n', b""), (b"a\nb\n", b"a\nb\n")],
)
def test_of_a_record_whole_lines_before_its_end_are_settled(data: bytes, kept: bytes) -> None:
    assert before_end(data) == kept


def test_what_sagemaker_leaves_beside_files_is_none_of_them(tmp_path: Path) -> None:
    node = tmp_path / "job/node-1/a-run"
    node.mkdir(parents=True)
    for name in ("log.txt.000000000000", "log.txt.000000000007.sagemaker-uploaded", "log.txt.sagemaker"):
        (node / name).write_bytes(b"123")
    shelf = Shelf(tmp_path, tmp_path.parent / "ml", tmp_path.parent / "tmp")
    assert shelf.end_of("job/node-1/a-run/log.txt") == 3
    (node / "rank-00001-attempt-3.jsonl.000000000000").touch()
    (node / "rank-00001-attempt-9.jsonl.000000000000.sagemaker-uploading").touch()
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


def test_a_record_says_why_where_there_is_no_traceback(tmp_path: Path) -> None:
    end = {"kind": "end", "status": "out_of_memory", "message": "OutOfMemoryError: CUDA out of memory"}
    left(tmp_path, "rank-00000-attempt-1.jsonl", '{"kind": "header"}\n' + json.dumps(end) + "\n", at_s=1)
    left(tmp_path, "rank-00001-attempt-1.jsonl", '{"kind": "hea', at_s=0)
    (tmp_path / "log.txt").write_text("something else\n")
    assert cause_of(tmp_path, tmp_path / "log.txt", 1) == "OutOfMemoryError: CUDA out of memory"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("error: no such workload\n  give another\n\n", "error: no such workload"),
        ("run_train.sh: error: FASTLAUNCH_NPROC is 'x'\n", "run_train.sh: error: FASTLAUNCH_NPROC is 'x'"),
        ("======\n", ""),
    ],
)
def test_else_the_log_does(log: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(log)
    assert cause_of(tmp_path, tmp_path / "log.txt", 1) == expected


#: What torchrun prints after its ranks.
TORCHRUN = """\
E1121 16:20:04.123000 41 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
fastlaunch_train FAILED
Root Cause (first observed failure):
[0]:
  exitcode  : 1 (pid: 43)
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
ECHO = """\
Traceback (most recent call last):
  File "/fastlaunch/train/fastlaunch_train/loop/loop.py", line 90, in step
    loss.backward()
RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.5]:4242
"""


def test_torchrun_is_never_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    # The rank whose peer is gone says so, for there is no other reason here.
    left(tmp_path, "traceback-rank-00001-attempt-1.txt", ECHO, at_s=1)
    log.write_text(ECHO + TORCHRUN)
    cause = cause_of(tmp_path, log, 1)
    assert cause.startswith("RuntimeError: [gloo") and is_echo(cause)
    # Before a rank has a file of its own there is what it printed.
    log.write_text(f"rank 0 failed\n{ECHO.replace('[gloo/transport', '[x')}{TORCHRUN}")
    assert cause_of(tmp_path, log, 2).startswith("RuntimeError: [x")
    log.write_text(f"error: no such workload\n  give another\n{TORCHRUN}")
    assert cause_of(tmp_path, log, 2) == "error: no such workload"
    log.write_text(TORCHRUN)
    assert cause_of(tmp_path, log, 2) == ""


def test_a_killed_rank_is_the_cause_of_its_peers_end(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    left(tmp_path, "traceback-rank-00000-attempt-1.txt", ECHO, at_s=1)
    log.write_text(ECHO + TORCHRUN + "  traceback : Signal 9 (SIGKILL) received by PID 7\n")
    assert cause_of(tmp_path, log, 1) == "Signal 9 (SIGKILL) received by PID 7"
    # By this one torchrun ends those that are left.
    log.write_text(ECHO + TORCHRUN + "  traceback : Signal 15 (SIGTERM) received by PID 7\n")
    assert is_echo(cause_of(tmp_path, log, 1))


def test_a_network_that_is_not_the_one_asked_for_is_nobodys_echo(tmp_path: Path) -> None:
    fabric = "fastlaunch_train.process.failures.FabricError: this run has to use EFA, NCCL on node 1 took x"
    left(tmp_path, "traceback-rank-00000-attempt-1.txt", ECHO, at_s=1)
    left(tmp_path, "traceback-rank-00001-attempt-1.txt", f"Traceback\n{fabric}\n", at_s=2)
    assert cause_of(tmp_path, tmp_path / "log.txt", 1) == fabric


CHAINED = """\
Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'first'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
    raise DistBackendError(text)
torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:77, unhandled system error
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
socketStartConnect: Connect to 10.0.0.5<4242> failed : Software caused connection abort
"""
CRASHED = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f3 (most recent call first):
  File "/fastlaunch/train/fastlaunch_train/loop/loop.py", line 90 in step

Extension modules: numpy._core._multiarray_umath, torch._C (total: 28)
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CHAINED, "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:77, unhandled"),
        (CRASHED, "Fatal Python error: Segmentation fault"),
        (CRASHED.replace("Segmentation fault", "Aborted"), "Fatal Python error: Aborted"),
    ],
)
def test_a_traceback_is_told_by_its_exception(text: str, expected: str, tmp_path: Path) -> None:
    left(tmp_path, "traceback-rank-00000-attempt-1.txt", text, at_s=1)
    assert cause_of(tmp_path, tmp_path / "log.txt", 1).startswith(expected)


def test_the_failure_is_cut_to_what_sagemaker_keeps(tmp_path: Path) -> None:
    write_failure(tmp_path / "output/failure", "cause" + "x" * 3000)
    text = (tmp_path / "output/failure").read_text()
    assert len(text) == FAILURE_CHARS == 1024 and text.startswith("cause")

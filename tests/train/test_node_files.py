"""What a training job's container leaves: segments that join, files that are whole, and causes."""

import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastlaunch_train.node.commands import Clock
from fastlaunch_train.node.outputs import NotRegular, hold, opened
from fastlaunch_train.node.protocol import MAX_OUTPUT_FILE_BYTES, is_echo, last_attempt, newest_checkpoint
from fastlaunch_train.node.sagemaker import FAILURE_CHARS, write_failure
from fastlaunch_train.node.shelf import Shelf
from fastlaunch_train.node.uploads import Segments, Uploads, before_end, checkpoints
from fastlaunch_train.node.verdicts import cause_of, is_lasting, noted_step
from fastlaunch_train.script.checkpoints import Note, write_note


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
                segments.cut(file, "t/node-0/log.txt", below=shelf.work)
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


def uploads_of(shelf: Shelf, output: str = "node-0", **changes: Any) -> Uploads:
    given: dict[str, Any] = {"say": print, "clock": Clock(), **changes}
    return Uploads(shelf, output, work=shelf.work, log=shelf.work / "log.txt", every_s=60, **given)


def test_ends_that_a_wrapper_may_write_anew_wait_until_its_script_has_ended(shelf: Shelf) -> None:
    said: list[str] = []
    uploads = uploads_of(shelf, "t/node-0", say=said.append)
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
    assert uploads.output_folders("a-run", 2)
    assert visible(shelf.root) == {
        name: lines,
        f"{name[:-12]}{len(lines):012d}": added,
        "t/node-0/a-run/output-attempt-2/deep/model.000000000000": b"weights",
    }
    assert len(said) == 2 and "output-attempt-2/huge" in said[0]
    assert uploads.left_out == ["a-run/output-attempt-2/link"]


def test_the_trained_model_is_sent_as_a_scripts_output_is(shelf: Shelf) -> None:
    uploads, run = uploads_of(shelf), shelf.work / "out/a-run"
    (run / "model").mkdir(parents=True)
    (run / "model/adapter_model.safetensors").write_bytes(b"adapters")
    assert uploads.output_folders("a-run", 1)
    assert visible(shelf.root) == {"node-0/a-run/model/adapter_model.safetensors.000000000000": b"adapters"}


@pytest.mark.parametrize(
    ("num_files", "free", "is_sent"), [(6, 8 * 2**30, True), (6, 2**30, False), (201, 2**50, False)]
)
def test_a_model_is_sent_whole_or_not_at_all(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, num_files: int, free: int, is_sent: bool
) -> None:
    """Between 5 and 200 GiB, if a folder that is copied has room for it."""
    lines: list[str] = []
    uploads, model = uploads_of(shelf, say=lines.append), shelf.work / "out/a-run/model"
    model.mkdir(parents=True)
    for number in range(num_files):
        (model / f"model-{number}.safetensors").touch()
        os.truncate(model / f"model-{number}.safetensors", MAX_OUTPUT_FILE_BYTES)
    sent: list[str] = []
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setattr(Segments, "cut", lambda self, file, name, **_: sent.append(name))
    assert uploads.output_folders("a-run", 1)
    assert len(sent) == (num_files if is_sent else 0)
    assert is_sent or (len(lines) == 1 and "its model" in lines[0])


def test_no_name_that_a_script_gives_a_file_keeps_back_the_others(shelf: Shelf) -> None:
    said: list[str] = []
    uploads = uploads_of(shelf, say=said.append)
    output = shelf.work / "out/a-run/output"
    output.joinpath(*["d"] * 20).mkdir(parents=True)
    # No UTF-8, and a key longer than S3 takes.
    (output / os.fsdecode(b"caf\xe9")).touch()
    long = output.joinpath(*["n" * 150] * 7)
    long.mkdir(parents=True)
    (long / "f").touch()
    names = ["**", "a**b", "caf\u00e9", "[a]", "z/" * 15 + "z"]
    for name in names:
        (output / name).parent.mkdir(exist_ok=True, parents=True)
        (output / name).write_text("x")
    assert uploads.output_folders("a-run", 1)
    there = {f"node-0/a-run/output/{name}.000000000000": b"x" for name in names}
    assert visible(shelf.root) == there
    assert len(said) == 3 and uploads.left_out == []
    # The launcher refuses a last word that is no UTF-8.
    (output / os.fsdecode(b"link\xe9")).symlink_to("/etc/passwd")
    assert uploads.output_folders("a-run", 1)
    assert "".join(uploads.left_out).encode().startswith(b"a-run/output/link")


def plant(kind: str, path: Path, secret: Path) -> None:
    """Put what a container may leave instead of a file or a folder; `secret` is a file of the host."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "link":
        path.symlink_to(secret)
    elif kind == "link to nothing":
        path.symlink_to(secret.parent / "nothing")
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            # Its path may be too long to bind.
            server.bind("s")
            Path("s").rename(path)
    else:
        os.mkfifo(path)


@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "folder", "socket"])
def test_only_regular_files_leave_the_machine(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shelf = Shelf(tmp_path / "ml/checkpoints", tmp_path / "ml", tmp_path / "tmp")
    secret, run = tmp_path / "config.json", shelf.work / "out/a-run"
    secret.write_text("a login of the host")
    uploads = uploads_of(shelf)
    names = ["rank-00000-attempt-1.jsonl", "nccl-node-0.txt", "traceback-rank-00000-attempt-1.txt"]
    for name in (*names, "checkpoints/step-00000009.pt", "output/deep/model"):
        plant(kind, run / name, secret)
    (run / "rank-00001-attempt-1.jsonl").write_text("a record\n")
    (run / "checkpoints/step-00000001.pt").write_text("weights")
    assert uploads.last(30)
    assert uploads.output_folders("a-run", 1)
    assert visible(shelf.root) == {"node-0/a-run/rank-00001-attempt-1.jsonl.000000000000": b"a record\n"}
    script = [] if kind == "folder" else ["a-run/output/deep/model"]
    assert uploads.left_out == [*(f"a-run/{name}" for name in sorted(names)), *script]
    left_out: list[Path] = []
    (paths,) = checkpoints(run / "checkpoints", left_out.append).values()
    assert [path.name for path in paths] == ["step-00000001.pt"]
    assert [path.name for path in left_out] == ["step-00000009.pt"]
    assert cause_of(run, shelf.work / "log.txt", 1) == ""
    with pytest.raises(NotRegular):
        hold(run / "checkpoints/step-00000009.pt", tmp_path / "held", below=shelf.work)
    assert not (tmp_path / "held").exists()


def test_nothing_leaves_through_a_folder_that_is_a_link(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "ml/checkpoints", tmp_path / "ml", tmp_path / "tmp")
    host, run = tmp_path / "host", shelf.work / "out/a-run"
    host.mkdir()
    run.mkdir(parents=True)
    (host / "step-00000001.pt").write_text("a file of the host")
    for name in ("output", "checkpoints"):
        (run / name).symlink_to(host)
    uploads = uploads_of(shelf)
    assert uploads.output_folders("a-run", 1)
    assert uploads.left_out == ["a-run/output"]
    assert visible(shelf.root) == {}
    assert checkpoints(run / "checkpoints") == {}
    # Whoever swaps the folder after it was listed gains nothing.
    with pytest.raises(NotRegular):
        hold(run / "checkpoints/step-00000001.pt", tmp_path / "held", below=shelf.work)
    with pytest.raises(NotRegular), opened(run / "output/step-00000001.pt", below=shelf.work):
        pass


def test_the_last_upload_has_a_limit(shelf: Shelf) -> None:
    waits, goes_on = threading.Event(), threading.Event()

    class Hanging(Clock):
        def wait(self, seconds: float, event: threading.Event | None = None) -> bool:
            # Its limit is over once the upload hangs.
            return waits.wait(30) and event is not None and event.is_set()

    def hang() -> None:
        waits.set()
        goes_on.wait(30)

    uploads = uploads_of(shelf, clock=Hanging(), checkpoints=hang)
    assert not uploads.last(10)
    goes_on.set()


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
    segment = "rank-00001-attempt-3.jsonl.000000000000"
    assert last_attempt([segment, f"{segment.replace('3', '9')}.sagemaker-uploading"]) == 3
    assert last_attempt([]) == 0
    for name in ("step-00000010.pt", "step-00000009.pt", "step-00000011.pt.sagemaker-uploading", "step-x.pt"):
        (node / name).touch()
    names = [path.name for paths in checkpoints(node).values() for path in paths]
    assert names == ["step-00000009.pt", "step-00000010.pt"]


def test_the_newest_checkpoint_is_the_last_of_which_all_files_are_there() -> None:
    def files(step: int, attempt: int) -> list[str]:
        name = f"step-{step:08d}-a{attempt}"
        return [f"{name}-of-00002.pt", *(f"{name}.{rank:05d}-of-00002.distcp" for rank in (0, 1))]

    whole, without_a_shard, without_the_first = files(20, 1), files(30, 1)[:2], files(40, 1)[1:]
    # Another attempt at the same step makes it no more complete.
    other = files(30, 2)[::2]
    names = {"step-00000010.pt", *whole, *without_a_shard, *without_the_first, *other, "notes.txt"}
    assert newest_checkpoint(names) == whole
    assert newest_checkpoint(names - {whole[1]}) == ["step-00000010.pt"]
    assert newest_checkpoint({*names, "step-00000025.tar"}) == ["step-00000025.tar"]
    assert newest_checkpoint([]) == []


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
    ("status", "log", "expected"),
    [
        ("failed", "", "exit code 1"),
        (
            "completed",
            "  traceback : Signal 9 (SIGKILL) received by PID 7\n",
            "Signal 9 (SIGKILL) received by PID 7",
        ),
        ("completed", "", "stopped by SIGTERM"),
    ],
)
def test_a_rank_that_was_asked_to_stop_says_why_if_nothing_else_does(
    status: str, log: str, expected: str, tmp_path: Path
) -> None:
    for rank, (of_rank, message) in enumerate(
        [("interrupted", "stopped by SIGTERM"), (status, "exit code 1")]
    ):
        end = {"kind": "end", "status": of_rank, "message": message}
        left(tmp_path, f"rank-0000{rank}-attempt-1.jsonl", json.dumps(end) + "\n", at_s=rank)
    (tmp_path / "log.txt").write_text(log)
    assert cause_of(tmp_path, tmp_path / "log.txt", 1) == expected


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


def test_a_script_has_saved_what_all_its_ranks_have(tmp_path: Path) -> None:
    assert noted_step(tmp_path) == 0
    for rank, step in ((0, 40), (1, 30)):
        write_note(tmp_path, rank, Note(step=step))
    assert noted_step(tmp_path) == 30
    (tmp_path / "checkpoint-rank-00001.json").write_text("[")
    assert noted_step(tmp_path) == 0


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ((), False),
        (("failed", "interrupted"), False),
        (("failed", "out_of_memory"), True),
        (("nan_loss",), True),
    ],
)
def test_a_lack_of_memory_and_a_loss_that_is_no_number_would_return(
    statuses: tuple[str, ...], expected: bool, tmp_path: Path
) -> None:
    for rank, status in enumerate(statuses):
        path = tmp_path / f"rank-{rank:05d}-attempt-2.jsonl"
        path.write_text(json.dumps({"kind": "end", "status": status, "message": None}) + "\n")
    assert is_lasting(tmp_path, 2) == expected
    assert not is_lasting(tmp_path, 1)


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
    fabric = (
        "fastlaunch_train.process.failures.FabricError: this run has to use EFA, but NCCL on node 1 took x"
    )
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

"""What nodes upload, joined into local files: in whatever order it comes, however often, by however many."""

import json
import multiprocessing
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moto_server import MotoServer, backend

from fastlaunch.aws.client import Aws
from fastlaunch.aws.types import StoredObject
from fastlaunch.backends import s3_sync
from fastlaunch.core.errors import CloudRefused, UserError
from fastlaunch.lifecycle.rehearsal import FolderStore
from fastlaunch_train.node.protocol import MAX_SEGMENT_BYTES

RUN, OTHER = "20261121-090312-k3f9", "20261121-090313-ab2c"
TOKEN = f"{RUN}-a1"
OUTPUT = f"s3://bucket/fastlaunch/runs/{RUN}/attempt-1"


#: Keys that the bucket lists at once.
PAGE = 2


class Bucket:
    """Objects by their name under the attempt's output; `got`: what was downloaded, in order.

    sizes: what the list says of objects that are another size.
    """

    def __init__(self, **objects: bytes) -> None:
        self.objects = dict(objects)
        self.sizes: dict[str, int] = {}
        self.got: list[str] = []

    def download(self, region: str, bucket: str, key: str, file: BinaryIO, *, max_bytes: int) -> bool:
        name = key.partition("/attempt-1/")[2] or key.partition("/attempt-2/")[2]
        self.got.append(name)
        file.write(self.objects.get(name, b"")[:max_bytes])
        return name in self.objects

    def list_objects(
        self,
        region: str,
        bucket: str,
        prefix: str,
        *,
        known_to: Callable[[str], str | None] = lambda key: None,
    ) -> list[StoredObject]:
        assert bucket == "bucket" and prefix.endswith("/")
        sizes = {name: len(body) for name, body in self.objects.items()} | self.sizes
        there = sorted(
            (StoredObject(key=prefix + name, size=size) for name, size in sizes.items()),
            key=lambda one: one.key,
        )
        listed: list[StoredObject] = []
        while there:
            page = there[:PAGE]
            listed += page
            after = max(page[-1].key, known_to(page[-1].key) or "")
            there = [one for one in there if one.key > after]
        return listed


def sync(
    bucket: Bucket,
    home: Path,
    *,
    token: str = TOKEN,
    run_ids: tuple[str, ...] = (),
    num_nodes: int = 1,
    known: s3_sync.KnownSegments | None = None,
) -> s3_sync.SyncResult:
    output = OUTPUT.replace("attempt-1", f"attempt-{token[-1]}")
    return s3_sync.sync(
        bucket,
        home,
        region="us-east-1",
        output=output,
        token=token,
        run_ids=run_ids,
        num_nodes=num_nodes,
        known=known,
    )


def segments(body: bytes, cuts: list[int], name: str) -> dict[str, bytes]:
    """The segments that uploading `body` up to each of `cuts` leaves."""
    starts = sorted({0, *cuts})
    return {
        f"{name}.{start:012d}": body[start:end]
        for start, end in zip(starts, [*starts[1:], len(body)], strict=True)
    }


RECORD = f"node-0/{RUN}/rank-00003-attempt-1.jsonl"


def test_segments_become_files_in_the_folders_of_their_runs(tmp_path: Path) -> None:
    bucket = Bucket()
    for run_id in (RUN, OTHER):
        bucket.objects |= segments(b"abcdef", [2], f"node-0/{run_id}/rank-00003-attempt-1.jsonl")
        bucket.objects |= segments(b"printed", [], f"node-0/{run_id}/log.txt")
    bucket.objects |= segments(b"node", [], "node-0/log.txt")
    bucket.objects["boot.json"] = json.dumps({"token": TOKEN, "zone": "us-east-1a"}).encode()
    synced = sync(bucket, tmp_path, run_ids=(RUN, OTHER))
    assert synced.boot == {"token": TOKEN, "zone": "us-east-1a"}
    assert synced.status is None and not synced.is_complete
    for run_id in (RUN, OTHER):
        folder = tmp_path / "runs" / run_id
        assert (folder / "rank-00003-attempt-1.jsonl").read_bytes() == b"abcdef"
        assert (folder / "log.txt").read_bytes() == b"printed"
    assert (tmp_path / "runs" / RUN / "node-a1.log").read_bytes() == b"node"
    bucket.objects["node-0/status.json"] = json.dumps({"token": TOKEN, "outcome": "completed"}).encode()
    synced = sync(bucket, tmp_path, run_ids=(RUN, OTHER))
    assert synced.is_complete and synced.status == {"token": TOKEN, "outcome": "completed"}
    assert s3_sync.kept(tmp_path, TOKEN).status == synced.status


def test_what_scripts_left_lies_in_folders_of_their_runs(tmp_path: Path) -> None:
    bucket, output = Bucket(), f"node-0/{RUN}/output"
    bucket.objects |= segments(b"abcdef", [2], f"{output}/a model/log.txt")
    bucket.objects |= segments(b"of node 1", [], f"node-1/{RUN}/output/a")
    bucket.objects |= segments(b"again", [], f"node-0/{RUN}/output-attempt-2/a model/log.txt")
    bucket.objects |= segments(b"weights", [3], f"node-0/{RUN}/model/adapter_model.safetensors")
    for wrong in (
        *(f"{output}/../up", f"{output}/./here", f"{output}//a", f"{output}/a\\b", f"{output}/a\nb"),
        *(
            f"node-0/{RUN}/outputs/a",
            f"node-0/{RUN}/rank-x/a",
            "node-0/other/output/a",
            f"{output}/" + "a/" * 17,
            f"{output}/" + "é" * 130,
        ),
        # Where there is a file no folder can be.
        f"{output}/a model/log.txt/below",
    ):
        bucket.objects |= segments(b"wrong", [], wrong)
    sync(bucket, tmp_path, num_nodes=2)
    folder = tmp_path / "runs" / RUN
    found = {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("[a-z]*") if path.is_file()
    }
    assert found == {
        "output/a model/log.txt": b"abcdef",
        "output-node-1/a": b"of node 1",
        "output-attempt-2/a model/log.txt": b"again",
        "model/adapter_model.safetensors": b"weights",
    }


def test_a_model_that_the_disk_has_no_room_for_stays_in_the_bucket_and_records_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(**{"node-0/status.json": said(outcome="completed")})
    bucket.objects |= segments(b"weights", [3], f"node-0/{RUN}/model/model.safetensors")
    bucket.objects |= segments(b"abcdef", [2], RECORD)
    free = 2**30 + 6
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    synced = sync(bucket, tmp_path)
    assert not synced.is_complete and synced.left_out is not None
    assert f"{RUN}/model, and `fastlaunch status RUN` brings it" in synced.left_out.message
    assert not (tmp_path / "runs" / RUN / "model").exists()
    assert (tmp_path / "runs" / RUN / "rank-00003-attempt-1.jsonl").read_bytes() == b"abcdef"
    free += 1
    assert sync(bucket, tmp_path).is_complete
    assert (tmp_path / "runs" / RUN / "model/model.safetensors").read_bytes() == b"weights"


def said(**values: object) -> bytes:
    """An object in which a node of the attempt tells `values`."""
    return json.dumps({"token": TOKEN, **values}).encode()


def test_several_nodes_files_lie_side_by_side(tmp_path: Path) -> None:
    bucket = Bucket(**{"boot.json": said(zone="a"), "node-1/boot.json": said(zone="b")})
    for node in range(3):
        own = f"of node {node}".encode()
        bucket.objects |= segments(own, [3], f"node-{node}/log.txt")
        for name in ("log.txt", f"nccl-node-{node}.txt", f"rank-{node:05d}-attempt-1.jsonl"):
            bucket.objects |= segments(own, [2], f"node-{node}/{RUN}/{name}")
        bucket.objects |= segments(own, [], f"node-{node}/{RUN}/traceback-rank-{node:05d}-attempt-1.txt")
    synced = sync(bucket, tmp_path, num_nodes=3)
    assert synced.boot == {"token": TOKEN, "zone": "a"}
    assert (synced.num_booted, synced.status, synced.is_complete) == (2, None, False)
    folder = tmp_path / "runs" / RUN
    found = {path.name: path.read_bytes().decode() for path in synced.files if path.parent == folder}
    logs = [("node-a1.log", "log.txt"), *((f"node-{n}-a1.log", f"log-node-{n}.txt") for n in (1, 2))]
    names = "nccl-node-{0}.txt", "rank-{0:05d}-attempt-1.jsonl", "traceback-rank-{0:05d}-attempt-1.txt"
    assert found == {
        name: f"of node {node}"
        for node in range(3)
        for name in (*logs[node], *(name.format(node) for name in names))
    }
    assert len(synced.files) == 15


def test_several_nodes_have_said_their_last_when_all_have(tmp_path: Path) -> None:
    bucket = Bucket(**{"node-0/status.json": said(outcome="completed"), "boot.json": said()})
    synced = sync(bucket, tmp_path, num_nodes=2)
    assert synced.status is None and not synced.is_complete
    assert synced.statuses == {0: {"token": TOKEN, "outcome": "completed"}}
    bucket.objects["node-1/status.json"] = said(outcome="failed", reason="why")
    synced = sync(bucket, tmp_path, num_nodes=2)
    assert synced.is_complete and synced.status is not None
    assert (synced.status["outcome"], synced.status["node"]) == ("failed", 1)
    assert s3_sync.kept(tmp_path, TOKEN, num_nodes=2).status == synced.status
    # Of one node, what the others say does not count.
    assert s3_sync.kept(tmp_path, TOKEN).status == {"token": TOKEN, "outcome": "completed"}


def test_last_words_before_a_restart_are_none(tmp_path: Path) -> None:
    bucket = Bucket(
        **{
            "boot.json": said(booted_at="2026-11-21T10:00:00Z"),
            "node-0/status.json": said(outcome="interrupted", billed_until="2026-11-21T10:30:00Z"),
        }
    )
    assert sync(bucket, tmp_path).is_complete
    bucket.objects["boot.json"] = said(booted_at="2026-11-21T10:40:00+00:00")
    synced = sync(bucket, tmp_path)
    assert synced.status is None and synced.num_booted == 1 and not synced.is_complete
    last = {"outcome": "completed", "billed_until": "2026-11-21T11:00:00Z"}
    bucket.objects["node-0/status.json"] = said(**last)
    assert sync(bucket, tmp_path).status == {"token": TOKEN, **last}


def test_what_is_here_is_not_fetched_again(tmp_path: Path) -> None:
    bucket = Bucket(**segments(b"abcdef", [2, 4], RECORD))
    sync(bucket, tmp_path)
    assert len(bucket.got) == 3
    bucket.objects |= {f"{RECORD}.000000000006": b"gh"}
    bucket.got.clear()
    sync(bucket, tmp_path)
    assert bucket.got == [f"{RECORD}.000000000006"]
    assert (tmp_path / "runs" / RUN / "rank-00003-attempt-1.jsonl").read_bytes() == b"abcdefgh"


def test_a_look_lists_what_follows_the_last_one(aws: Aws, aws_server: MotoServer, tmp_path: Path) -> None:
    num_ranks, num_segments, known = 3, 2500, dict[str, s3_sync._Segment]()
    bucket = backend("s3", "aws")
    bucket.create_bucket("bucket", "us-east-1")
    prefix = OUTPUT.removeprefix("s3://bucket/")
    files = [f"rank-{rank:05d}-attempt-1.jsonl" for rank in range(num_ranks)]
    folder = tmp_path / "runs" / RUN

    def upload(file: str, offset: int) -> None:
        bucket.put_object("bucket", f"{prefix}/node-0/{RUN}/{file}.{offset:012d}", b"x")

    def look() -> int:
        """Return the number of lists that a look takes."""
        before = len(aws_server.sent("ListObjectsV2"))
        synced = s3_sync.sync(
            aws, tmp_path, region="us-east-1", output=OUTPUT, token=TOKEN, run_ids=(RUN,), known=known
        )
        assert {path.name for path in synced.files} == {*files}
        return len(aws_server.sent("ListObjectsV2")) - before

    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_bytes(b"x" * num_segments)
        for offset in range(num_segments):
            upload(file, offset)
    assert look() == 8
    # A page of each file, and what follows the last one.
    assert look() == num_ranks + 1
    for file in files:
        # The second comes before the first.
        upload(file, num_segments + 1)
    assert look() == num_ranks + 1
    assert {(folder / file).stat().st_size for file in files} == {num_segments}
    for file in files:
        upload(file, num_segments)
    assert look() == num_ranks + 1
    assert {(folder / file).read_bytes() for file in files} == {b"x" * (num_segments + 2)}


def test_a_file_that_was_removed_here_is_brought_again(tmp_path: Path) -> None:
    bucket, known = Bucket(**segments(b"abcdef", [1, 2, 3, 4, 5], RECORD)), dict[str, s3_sync._Segment]()
    bucket.objects["node-0/status.json"] = said(outcome="completed")
    assert sync(bucket, tmp_path, known=known).is_complete
    path = tmp_path / "runs" / RUN / "rank-00003-attempt-1.jsonl"
    path.unlink()
    assert not sync(bucket, tmp_path, known=known).is_complete
    assert sync(bucket, tmp_path, known=known).is_complete
    assert path.read_bytes() == b"abcdef"


def test_a_gap_waits(tmp_path: Path) -> None:
    whole = segments(b"abcdef", [2, 4], RECORD)
    status = {"node-0/status.json": json.dumps({"token": TOKEN, "outcome": "completed"}).encode()}
    gap = {name: body for name, body in whole.items() if not name.endswith("2")}
    bucket = Bucket(**gap, **status)
    assert not sync(bucket, tmp_path).is_complete
    path = tmp_path / "runs" / RUN / "rank-00003-attempt-1.jsonl"
    assert path.read_bytes() == b"ab"
    bucket.objects |= whole
    assert sync(bucket, tmp_path).is_complete
    assert path.read_bytes() == b"abcdef"


def test_what_was_cut_short_half_way_is_completed(tmp_path: Path) -> None:
    path = tmp_path / "runs" / RUN / "rank-00003-attempt-1.jsonl"
    path.parent.mkdir(parents=True)
    # A process was killed, or the disk was full, in the middle of an append.
    path.write_bytes(b"abcd")
    sync(Bucket(**segments(b"abcdef", [3], RECORD)), tmp_path)
    assert path.read_bytes() == b"abcdef"


@given(
    body=st.binary(min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    order=st.randoms(use_true_random=False),
    known=st.none() | st.builds(dict[str, s3_sync._Segment]),
)
def test_any_order_of_arrival_gives_the_file(
    tmp_path_factory: pytest.TempPathFactory,
    body: bytes,
    cuts: list[int],
    order: "object",
    known: s3_sync.KnownSegments | None,
) -> None:
    home = tmp_path_factory.mktemp("home")
    whole = list(segments(body, [cut for cut in cuts if cut < len(body)], RECORD).items())
    order.shuffle(whole)  # type: ignore[attr-defined]
    bucket = Bucket()
    path = home / "runs" / RUN / "rank-00003-attempt-1.jsonl"
    for name, segment in whole:
        bucket.objects[name] = segment
        sync(bucket, home, known=known)
        # Never anything but a part of it from the start.
        assert body.startswith(path.read_bytes() if path.exists() else b"")
    assert path.read_bytes() == body


def _sync_often(home: Path, bucket: Bucket, start: "object") -> None:
    start.wait()  # type: ignore[attr-defined]
    for _ in range(5):
        sync(bucket, home)


def test_two_processes_at_once_write_everything_once(tmp_path: Path) -> None:
    body = bytes(range(256)) * 16
    bucket = Bucket(**segments(body, list(range(0, len(body), 97)), RECORD))
    context = multiprocessing.get_context("fork")
    start = context.Barrier(3)
    others = [context.Process(target=_sync_often, args=(tmp_path, bucket, start)) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join(60)
        assert other.exitcode == 0
    assert (tmp_path / "runs" / RUN / "rank-00003-attempt-1.jsonl").read_bytes() == body


def test_the_logs_of_attempts_follow_each_other(tmp_path: Path) -> None:
    first = Bucket(**segments(b"first ", [3], f"node-0/{RUN}/log.txt"))
    late = f"node-0/{RUN}/log.txt.000000000006"
    sync(first, tmp_path)
    second = Bucket(**segments(b"second", [2], f"node-0/{RUN}/log.txt"))
    sync(second, tmp_path, token=f"{RUN}-a2")
    sync(second, tmp_path, token=f"{RUN}-a2")
    log = tmp_path / "runs" / RUN / "log.txt"
    assert log.read_bytes() == b"first second"
    # What the first one still uploads comes too late to stand where it belongs.
    first.objects[late] = b"late, and longer than all that is there"
    sync(first, tmp_path)
    assert log.read_bytes() == b"first second"


def test_an_attempt_whose_log_is_empty_does_not_take_the_next_ones(tmp_path: Path) -> None:
    empty = Bucket(**{f"node-0/{RUN}/log.txt.000000000000": b""})
    sync(empty, tmp_path)
    second = Bucket(**segments(b"second", [], f"node-0/{RUN}/log.txt"))
    sync(second, tmp_path, token=f"{RUN}-a2")
    empty.objects = {
        f"node-0/{RUN}/log.txt.000000000000": b"-",
        f"node-0/{RUN}/log.txt.000000000001": b"x" * 50,
    }
    sync(empty, tmp_path)
    assert (tmp_path / "runs" / RUN / "log.txt").read_bytes() == b"second"


@pytest.mark.parametrize(
    "name",
    [
        "node-0/../../evil/log.txt.000000000000",
        f"node-0/{RUN}/../../x.000000000000",
        f"node-0/{RUN}/weights.pt.000000000000",
        f"node-0/{RUN}/log.txt.5",
        f"node-0/.hidden/log.txt.{0:012d}",
        f"node-0/rank-00000-attempt-1.jsonl.{0:012d}",
        # Of a run that is not the attempt's.
        f"node-0/{OTHER}/rank-00003-attempt-1.jsonl.{0:012d}",
        f"node-0/{OTHER}/log.txt.{0:012d}",
        "abort",
    ],
)
def test_nothing_else_is_written(tmp_path: Path, name: str) -> None:
    bucket = Bucket(**{name: b"x"})
    sync(bucket, tmp_path)
    assert bucket.got == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


#: What a key may be made of by someone who wants to write elsewhere.
PIECES = st.sampled_from(
    [
        *("node-0", "node-1", "node-00", RUN, OTHER, "..", ".", "", "~", "/", "log.txt", "status.json"),
        *("rank-00003-attempt-1.jsonl", "ledger.sqlite", ".sync-lock", ".log-starts.json", "\0", "\n"),
        *("٣", f"{0:012d}", f"{1:012d}", "-a1.log", "nccl-node-0.txt", "log-node-1.txt", "boot.json"),
    ]
)


@given(
    names=st.lists(
        st.builds(
            lambda pieces, separator, is_segment: separator.join(pieces) + f".{0:012d}" * is_segment,
            st.lists(PIECES, min_size=1, max_size=5),
            st.sampled_from(["/", "/", "."]),
            st.booleans(),
        ),
        max_size=8,
    )
)
def test_whatever_keys_are_called_only_the_runs_own_files_are_written(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    base = tmp_path_factory.mktemp("base")
    sync(Bucket(**dict.fromkeys(names, b"x")), base / "home", num_nodes=2)
    written = [path for path in base.rglob("*") if not path.is_dir()]
    assert {path.parent for path in written} <= {base / "home" / "runs" / RUN}
    reports = {f"{what}{node}-a1.json" for what in ("boot", "status") for node in ("", "-node-1")}
    logs = {"log.txt", "log-node-1.txt", "node-a1.log", "node-1-a1.log", "log-node-3.txt", "node-3-a1.log"}
    kept = {f".{Path(name).stem}-starts.json" for name in logs} | {".sync-lock"}
    records = {"rank-00003-attempt-1.jsonl", "nccl-node-0.txt", ".nccl-node-0-starts.json"}
    assert {path.name for path in written} <= reports | logs | kept | records


def test_a_rehearsals_links_are_not_followed(tmp_path: Path) -> None:
    store = FolderStore(root=tmp_path / "root")
    folder = tmp_path / "root" / "algo-1" / "output" / "data" / "checkpoints" / TOKEN / "node-0" / RUN
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (folder / f"rank-00000-attempt-1.jsonl.{0:012d}").symlink_to(tmp_path / "secret")
    (folder / f"rank-00001-attempt-1.jsonl.{0:012d}").write_text("record")
    found = s3_sync.sync(store, tmp_path, region="", output=f"s3://rehearsal/{TOKEN}", token=TOKEN).files
    assert [path.name for path in found] == ["rank-00001-attempt-1.jsonl"]
    assert found[0].read_text() == "record"


def test_what_is_larger_than_nodes_write_stays_in_the_bucket(tmp_path: Path) -> None:
    bucket = Bucket(**segments(b"abcdef", [2, 4], RECORD), **segments(b"log", [], f"node-0/{RUN}/log.txt"))
    bucket.objects |= {"boot.json": said(), "node-0/status.json": said(outcome="completed")}
    whole = dict(bucket.objects)
    large = f"{RECORD}.{2:012d}"
    bucket.sizes[large] = MAX_SEGMENT_BYTES + 1
    synced = sync(bucket, tmp_path)
    assert large not in bucket.got and not synced.is_complete
    folder = tmp_path / "runs" / RUN
    assert (folder / "rank-00003-attempt-1.jsonl").read_bytes() == b"ab"
    # All else is here.
    assert synced.status and (folder / "log.txt").read_bytes() == b"log"
    assert synced.left_out is not None and f"{OUTPUT}/{large} has 64 MiB" in synced.left_out.message
    # Nothing is lost: once it is what a node writes, it is brought.
    bucket.objects, bucket.sizes = whole, {}
    synced = sync(bucket, tmp_path)
    assert synced.is_complete and synced.left_out is None
    assert (folder / "rank-00003-attempt-1.jsonl").read_bytes() == b"abcdef"


@pytest.mark.parametrize("name", ["boot.json", "node-0/status.json"])
def test_a_report_that_is_too_large_is_not_read(tmp_path: Path, name: str) -> None:
    bucket = Bucket(**{"boot.json": said(), "node-0/status.json": said(outcome="completed")})
    bucket.objects[name] = said(padding="x" * s3_sync.MAX_REPORT_BYTES)
    synced = sync(bucket, tmp_path)
    assert name not in bucket.got and synced.left_out is not None and not synced.is_complete
    assert synced.num_booted == (name != "boot.json") and bool(synced.status) == (name == "boot.json")


def test_no_more_is_downloaded_than_the_list_says(tmp_path: Path) -> None:
    bucket = Bucket(**{f"{RECORD}.{0:012d}": b"abc and much more"})
    bucket.sizes[f"{RECORD}.{0:012d}"] = 3
    sync(bucket, tmp_path)
    assert (tmp_path / "runs" / RUN / "rank-00003-attempt-1.jsonl").read_bytes() == b"abc"


def test_what_is_brought_is_the_users_alone(tmp_path: Path) -> None:
    bucket = Bucket(**segments(b"abc", [], RECORD), **segments(b"log", [], f"node-0/{RUN}/log.txt"))
    bucket.objects["boot.json"] = said()
    sync(bucket, tmp_path / "home")
    paths = [tmp_path / "home", *(tmp_path / "home").rglob("*")]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
    assert len(modes) > 5
    assert modes == {path: 0o700 if path.is_dir() else 0o600 for path in paths}


@pytest.mark.parametrize("body", [b"{", b'{"token": "another-a1"}'])
def test_a_last_word_that_is_none_does_not_count(tmp_path: Path, body: bytes) -> None:
    synced = sync(Bucket(**{"node-0/status.json": body}), tmp_path)
    assert synced.status is None and not synced.is_complete


def test_a_disk_that_refuses_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="cannot be written") as raised:
        sync(Bucket(**segments(b"abc", [], RECORD)), tmp_path)
    assert "fastlaunch status RUN" in (raised.value.hint or "")


def test_many_segments_come_side_by_side_until_one_is_refused(tmp_path: Path) -> None:
    class Slow(Bucket):
        refused = ""

        def download(self, region: str, bucket: str, key: str, file: BinaryIO, *, max_bytes: int) -> bool:
            # Nobody goes on before all files are under way.
            if "000000000000" in key:
                barrier.wait(10)
            if self.refused and self.refused in key:
                raise CloudRefused("refused by the test")
            return super().download(region, bucket, key, file, max_bytes=max_bytes)

    bucket, names = Slow(), [f"node-0/{RUN}/rank-{rank:05d}-attempt-1.jsonl" for rank in range(4)]
    for name in names:
        bucket.objects |= segments(b"abcdefgh", [1, 2, 3, 4, 5, 6, 7], name)
    barrier = threading.Barrier(len(names))
    bucket.refused = "rank-00002"
    with pytest.raises(CloudRefused):
        sync(bucket, tmp_path)
    barrier.reset()
    bucket.refused = ""
    for file in sync(bucket, tmp_path / "again").files:
        assert file.read_bytes() == b"abcdefgh"


def test_reports_come_without_what_runs_wrote(tmp_path: Path) -> None:
    bucket = Bucket(**segments(b"abc", [], RECORD), **{"boot.json": said(zone="a")})

    def report() -> s3_sync.SyncResult:
        return s3_sync.sync_reports(
            bucket, tmp_path, region="us-east-1", output=OUTPUT, token=TOKEN, num_nodes=2
        )

    assert report().status is None
    bucket.objects["node-0/status.json"] = said(outcome="completed")
    bucket.objects["node-1/status.json"] = said(padding="x" * s3_sync.MAX_REPORT_BYTES)
    assert report().statuses == {0: {"token": TOKEN, "outcome": "completed"}}
    bucket.objects["node-1/status.json"] = said(outcome="completed")
    assert report().status is not None and report().boot == {"token": TOKEN, "zone": "a"}
    assert not any("rank" in name for name in bucket.got)

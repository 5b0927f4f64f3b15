"""Bring what an attempt's nodes upload to S3 into the local folders of its runs, piece by piece.

A node uploads immutable segments, each named by the byte at which it starts; joined in order they are the
file. A segment is appended only where the file ends, so nothing is ever rewritten, a gap waits, and the next
call completes what was cut short. Any number of processes may do this at once.

The job itself may have written anything to the bucket. So we write only to the folders of the attempt's own
runs, under names that nodes use, and bring nothing that is larger than what nodes write.

Nodes report their boot and their end in small objects beside the segments, which `node/protocol.py` of the
training half names.
"""

import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO, Protocol, TypeAlias

from fastlaunch.aws.types import StoredObject
from fastlaunch.backends.node_report import is_sound, merged, time_of
from fastlaunch.core import locks
from fastlaunch.core.errors import UserError
from fastlaunch.core.home import make_folder, private, replace_file, writing
from fastlaunch.core.ownership import parse_token
from fastlaunch.core.units import size_text
from fastlaunch_train.node.protocol import (
    GPU_USE,
    LOG,
    MAX_SEGMENT_BYTES,
    OUTPUT,
    SEGMENT,
    boot_name,
    is_output_file,
    mean_gpu_use,
    status_name,
)

_NODE = re.compile(r"node-(\d+)")
_LOCK = ".sync-lock"
#: What models leave free on the disk, for records and logs.
_FREE_BYTES = 2**30
_KEPT = "; what the runs uploaded stays in the bucket, and `fastlaunch status RUN` brings it"
#: How many files come at a time, unless there are few segments.
_NUM_DOWNLOADS, _FEW_SEGMENTS = 8, 16
#: A report of thousands of runs has fewer.
MAX_REPORT_BYTES = 2**20
#: Files of a run that have the same name in every attempt, and the file that keeps where each attempt starts.
_FOLLOWING = re.compile(r"(log|log-node-\d+|nccl-node-\d+)\.txt")
_STARTS = ".{}-starts.json"


class Store(Protocol):
    """The methods of `Aws` that this module calls."""

    def download(self, region: str, bucket: str, key: str, file: BinaryIO, *, max_bytes: int) -> bool: ...
    def list_objects(
        self, region: str, bucket: str, prefix: str, *, known_to: Callable[[str], str | None] = ...
    ) -> list[StoredObject]: ...


@dataclass(frozen=True, kw_only=True)
class SyncResult:
    """The local part of an attempt's output."""

    #: The boot record of node 0; None until it is there.
    boot: Mapping[str, Any] | None
    #: The reports of all nodes as one (`node_report.merged`); None until each has reported.
    status: Mapping[str, Any] | None
    #: All nodes have reported, and everything that they uploaded is here.
    is_complete: bool
    #: Local paths of the bucket's files, which may still be missing.
    files: tuple[Path, ...] = ()
    #: Nodes that reported their boot.
    num_booted: int = 0
    #: The reports that are here, by node.
    statuses: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    #: The error for what stays in the bucket because it is larger than what nodes write.
    left_out: UserError | None = None


@dataclass(frozen=True, kw_only=True)
class _Segment:
    offset: int
    stored: StoredObject

    @property
    def end(self) -> int:
        return self.offset + self.stored.size


#: By bucket and key of a file's segments, less the offset: the last one that is here, with all before it. A
#: process keeps them between two looks, and the next one lists what follows.
KnownSegments: TypeAlias = dict[str, _Segment]


def sync(
    store: Store,
    home: Path,
    *,
    region: str,
    output: str,
    token: str,
    run_ids: Collection[str] = (),
    num_nodes: int = 1,
    known: KnownSegments | None = None,
) -> SyncResult:
    """Bring what is new under `output` (`s3://bucket/key`) into the folders of `home`.

    run_ids: the attempt's runs; the first, which the token names, may be missing. Records, tracebacks and
    logs go to their folders; the nodes' own files, suffixed `-a<n>`, to the first run's. known: what earlier
    calls left there, which is not listed again. Raises a kind of CloudRefused, and UserError if the disk
    refuses.
    """
    bucket, prefix = split_uri(output)
    known = {} if known is None else known

    def known_to(key: str) -> str | None:
        last = known.get(_file_of(bucket, key))
        return last.stored.key if last else None

    listed = store.list_objects(region, bucket, prefix + "/", known_to=known_to)
    objects = {stored.key[len(prefix) + 1 :]: stored for stored in listed}
    files = _by_file(objects, home, token, {parse_token(token)[0], *run_ids})
    if left_out := _without_room(files, home, bucket):
        files = {path: segments for path, segments in files.items() if not _is_output(path, home)}
    is_over = Event()

    def join(path: Path) -> _Segment | None:
        folder = home / Path(*path.relative_to(home).parts[:2])
        return _join(store, region, bucket, path, files[path], token, folder, known, is_over)

    missing = _all_at_once(join, files, is_over, num_segments=sum(map(len, files.values())))
    too_large = [segment.stored for segment in missing if segment and segment.stored.size > MAX_SEGMENT_BYTES]
    for node in range(num_nodes):
        has_ended = status_name(node) in objects
        for report, name in (("boot", boot_name(node)), ("status", status_name(node))):
            path = _report_path(home, token, report, node)
            # Fetch both again once the node has ended: a job that restarts by itself writes both anew.
            if name in objects and (has_ended or not path.exists()):
                if objects[name].size > MAX_REPORT_BYTES:
                    too_large.append(objects[name])
                else:
                    _bring_report(store, region, bucket, objects[name].key, path)
    here = kept(home, token, num_nodes=num_nodes)
    return replace(
        here,
        is_complete=not any(missing) and not too_large and left_out is None and here.status is not None,
        files=tuple(sorted(files)),
        left_out=_left_out(bucket, too_large) if too_large else left_out,
    )


def sync_reports(
    store: Store, home: Path, *, region: str, output: str, token: str, num_nodes: int = 1
) -> SyncResult:
    """Bring what the attempt's nodes reported, and nothing of what its runs wrote. Raises as `sync` does."""
    bucket, prefix = split_uri(output)
    for node in range(num_nodes):
        status_path = _report_path(home, token, "status", node)
        if _bring_report(store, region, bucket, f"{prefix}/{status_name(node)}", status_path):
            boot_path = _report_path(home, token, "boot", node)
            _bring_report(store, region, bucket, f"{prefix}/{boot_name(node)}", boot_path)
    return kept(home, token, num_nodes=num_nodes)


def _bring_report(store: Store, region: str, bucket: str, key: str, path: Path) -> bool:
    """Bring a node's report; return False if there is none, or it is larger than nodes write."""
    body = io.BytesIO()
    if not store.download(region, bucket, key, body, max_bytes=MAX_REPORT_BYTES + 1):
        return False
    if is_sound_size := len(body.getvalue()) <= MAX_REPORT_BYTES:
        write_whole(path, body.getvalue())
    return is_sound_size


def _all_at_once(
    join: Callable[[Path], _Segment | None], paths: Collection[Path], is_over: Event, *, num_segments: int
) -> list[_Segment | None]:
    """Return what `join` does of each file; side by side, where there is much to bring.

    is_over: set if one of them raises, or the user stops it, so that the others end soon.
    """
    if num_segments < _FEW_SEGMENTS:
        return [join(path) for path in paths]
    with ThreadPoolExecutor(max_workers=_NUM_DOWNLOADS) as pool:
        try:
            return list(pool.map(join, paths))
        except BaseException:
            is_over.set()
            raise


def kept(home: Path, token: str, num_nodes: int = 1) -> SyncResult:
    """Return the local part of the attempt's output, without a query to the bucket."""
    boots = {node: read_json(_report_path(home, token, "boot", node), token) for node in range(num_nodes)}
    statuses = {}
    for node, boot in boots.items():
        status = read_json(_report_path(home, token, "status", node), token)
        ended, booted = time_of(status, "billed_until"), time_of(boot, "booted_at")
        # On SageMaker, a node boots again after a spot interruption.
        if status is not None and not (ended and booted and ended < booted):
            statuses[node] = status
    return SyncResult(
        boot=boots[0],
        status=merged(statuses, num_nodes),
        is_complete=False,
        num_booted=sum(boot is not None for boot in boots.values()),
        statuses=statuses,
    )


def run_folder(home: Path, run_id: str) -> Path:
    """Return where a run's records and log lie."""
    return home / "runs" / run_id


def _report_path(home: Path, token: str, report: str, node: int) -> Path:
    """Return where a node's report lies. report: `boot`, or `status` for that of its end."""
    return _of_attempt(home, token, f"{report}{_suffix(node)}", ".json")


def node_log_path(home: Path, token: str, node: int = 0) -> Path:
    """Return where the node's own log lies."""
    return _of_attempt(home, token, "node" if node == 0 else f"node-{node}", ".log")


def gpu_use(home: Path, token: str) -> float | None:
    """Return how busy the first node's GPUs were last, from 0 to 1; None if it does not say."""
    return next(reversed(gpu_uses(home, token)), None)


def gpu_uses(home: Path, token: str) -> list[float | None]:
    """Return all that the first node said of its GPUs' use, oldest first; None for what is no use."""
    try:
        *lines, _ = _gpu_use_path(home, token).read_text().split("\n")
    except (OSError, ValueError):
        return []
    return [mean_gpu_use(line.rstrip("%")) for line in lines]


def _gpu_use_path(home: Path, token: str, node: int = 0) -> Path:
    return _of_attempt(home, token, f"gpu-use{_suffix(node)}", ".txt")


def console_path(home: Path, token: str) -> Path:
    """Return where the console output of a node that did not boot lies."""
    return _of_attempt(home, token, "console", ".log")


def record_paths(home: Path, run_id: str) -> tuple[Path, ...]:
    """Return the record files of every rank of the run, of all attempts."""
    return tuple(sorted(run_folder(home, run_id).glob("rank-*.jsonl")))


def split_uri(uri: str) -> tuple[str, str]:
    """Return bucket and key of `s3://bucket/key`."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key.rstrip("/")


def read_json(path: Path, token: str) -> Mapping[str, Any] | None:
    """Return the node's report at `path`; None if there is none, or it is damaged or another attempt's."""
    try:
        data = json.loads(path.read_bytes())
        # Refuse NaN, infinity, and text that cannot be stored.
        json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and data.get("token") == token and is_sound(data) else None


def _of_attempt(home: Path, token: str, name: str, suffix: str) -> Path:
    run_id, number = parse_token(token)
    return run_folder(home, run_id) / f"{name}-a{number}{suffix}"


def _suffix(node: int) -> str:
    """Return the suffix that tells a node's files from those of node 0."""
    return "" if node == 0 else f"-node-{node}"


def _by_file(
    objects: Mapping[str, StoredObject], home: Path, token: str, run_ids: Set[str]
) -> dict[Path, list[_Segment]]:
    """Return the segments, in order, by the local file that they belong to; ignore anything else."""
    files: dict[Path, list[_Segment]] = {}
    for name, stored in objects.items():
        segment = SEGMENT.fullmatch(name)
        path = _local_path(segment["name"], home, token, run_ids) if segment else None
        if segment and path:
            files.setdefault(path, []).append(_Segment(offset=int(segment["offset"]), stored=stored))
    for segments in files.values():
        segments.sort(key=lambda segment: segment.offset)
    # Leave out a file where another one needs a folder.
    return {path: segments for path, segments in files.items() if not files.keys() & set(path.parents)}


def _local_path(name: str, home: Path, token: str, run_ids: Set[str]) -> Path | None:
    """Return the local path of what a node uploaded as `node-<k>/[<run id>/]<file>`; None for others."""
    folder, *middle, file = name.split("/") if "/" in name else ("", name)
    node = _NODE.fullmatch(folder)
    if node and middle and middle[0] in run_ids and is_output_file("/".join([*middle[1:], file])):
        _, output, *inside = middle
        return run_folder(home, middle[0]).joinpath(f"{output}{_suffix(int(node[1]))}", *inside, file)
    if node is None or len(middle) > 1 or not set(middle) <= run_ids:
        return None
    if not middle:
        paths = {LOG: node_log_path, GPU_USE: _gpu_use_path}
        return paths[file](home, token, int(node[1])) if file in paths else None
    if file == LOG:
        file = f"log{_suffix(int(node[1]))}.txt"
    elif OUTPUT.fullmatch(file) is None:
        return None
    return run_folder(home, middle[0]) / file


def _join(
    store: Store,
    region: str,
    bucket: str,
    path: Path,
    segments: Sequence[_Segment],
    token: str,
    folder: Path,
    known: KnownSegments,
    is_over: Event,
) -> _Segment | None:
    """Append the segments that follow what is there; return the first that is still missing, if any.

    folder: the run's, locked meanwhile. known: gets the last segment that is here. is_over: to end early.
    """
    file_key = _file_of(bucket, segments[0].stored.key)
    for segment in segments:
        if is_over.is_set():
            return segment
        with _locked(folder):
            start = _log_start(path, token) if path.parent == folder else 0
            if start is None:
                return None
            size = _size(path) - start
        stored, last = segment.stored, known.get(file_key)
        if last and last.end > size:
            # The file here was cut or removed meanwhile: the next look lists all of it.
            del known[file_key]
            return segment
        if segment.end <= size:
            # Pages before the last segment that is known may be listed in part.
            known[file_key] = segment if last is None or segment.end > last.end else last
            continue
        if segment.offset > size or stored.size > MAX_SEGMENT_BYTES:
            return segment
        with writing(folder, _KEPT), tempfile.TemporaryFile(dir=folder) as body:
            if not store.download(region, bucket, stored.key, body, max_bytes=stored.size):
                return segment
            make_folder(path.parent)
            with _locked(folder), open(path, "ab", opener=private) as file:
                # Looked up again: another process may have appended it meanwhile.
                body.seek(max(0, _size(path) - start - segment.offset))
                shutil.copyfileobj(body, file)
        known[file_key] = segment
    return None


def _file_of(bucket: str, key: str) -> str:
    """Return the key in `KnownSegments` of a segment's file; of another object, one that no file has."""
    return f"{bucket}/{key.rpartition('.')[0]}"


def _log_start(path: Path, token: str) -> int | None:
    """Return the byte at which the attempt's part of a file starts; None if a later attempt's has begun.

    Each attempt of a run writes records under its own names, but appends its log to the run's `log.txt`.
    """
    if _FOLLOWING.fullmatch(path.name) is None:
        return 0
    kept_at = path.parent / _STARTS.format(path.stem)
    try:
        starts: dict[str, int] = json.loads(kept_at.read_bytes())
    except (FileNotFoundError, ValueError):
        starts = {}
    if token not in starts:
        starts[token] = _size(path)
        write_whole(kept_at, json.dumps(starts).encode())
    return starts[token] if list(starts)[-1] == token else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder, and make it if need be. Raises UserError if the disk refuses."""
    with writing(folder, _KEPT):
        make_folder(folder)
        descriptor = locks.take(folder / _LOCK)
        try:
            yield
        finally:
            os.close(descriptor)


def write_whole(path: Path, body: bytes) -> None:
    """Write a file of the home whole or not at all. Raises UserError if the disk refuses."""
    with writing(path.parent, _KEPT):
        replace_file(path, body)


def _is_output(path: Path, home: Path) -> bool:
    """Return whether it is what a run left for the user: such files lie in folders of the run's."""
    return len(path.relative_to(run_folder(home, "")).parts) > 2


def _without_room(files: Mapping[Path, Sequence[_Segment]], home: Path, bucket: str) -> UserError | None:
    """Return the error if the disk has no room for what is missing of the runs' models and outputs."""
    missing = {
        path: segments[-1].end - _size(path) for path, segments in files.items() if _is_output(path, home)
    }
    num_bytes = sum(max(0, size) for size in missing.values())
    free = shutil.disk_usage(home).free - _FREE_BYTES if num_bytes else 0
    if num_bytes <= free:
        return None
    first = files[max(missing, key=missing.__getitem__)][0].stored.key
    room = f"{size_text(num_bytes)}, and {size_text(max(0, free))} are free in {home}"
    return UserError(
        f"what the runs left takes {room}: it stays in s3://{bucket}/{first.rpartition('/')[0]}, "
        "and `fastlaunch status RUN` brings it once there is room"
    )


def _left_out(bucket: str, too_large: Sequence[StoredObject]) -> UserError:
    first = too_large[0]
    more = f" (and {len(too_large) - 1} more)" if len(too_large) > 1 else ""
    return UserError(
        f"s3://{bucket}/{first.key} has {first.size / 2**20:,.0f} MiB{more}, more than nodes write: "
        "it stays in the bucket"
    )

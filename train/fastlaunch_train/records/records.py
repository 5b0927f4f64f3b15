"""Step records: one JSONL file per rank, the only thing the two halves of fastlaunch exchange about a run.

A file is a `header`, then lines of the other kinds as they happen, then one `end`:

    header  what ran, on what, with what: recipe, workload, data, machine, versions, attention backend
    phase   seconds spent outside the steps: build, compile, checkpoint, eval, ...
    step    step_time_s by device events, data_wait_s, loss, num_samples, num_tokens
    block   about every second of work the ranks synchronise: first_step, last_step, and the wall time between
    eval    loss and metric on held-out data after a step
    check   whether the recipe computes what the model does, found before the steps or in the first
    end     status and message

Lines reach the file a block at a time in one write, so a killed process leaves everything up to the last
block. Nothing is dropped or averaged here. Steps count from 1. No torch: the launcher reads these files.

The last member of every line is `crc`: CRC-32 of the line without it, going on from the line before, in eight
hex digits. So a line that was changed, lost or moved is found, and named. A file whose header has no `crc`
was not written here; its lines have none either, and are checked for sense alone.
"""

import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastlaunch_train.record_lines import (
    FAILED_CHECK,
    FROM_CACHE,
    HEADER_TYPES,
    KIND_OF,
    KINDS,
    RECORD_SCHEMA,
    STATUSES,
    Block,
    Check,
    End,
    Eval,
    Line,
    Order,
    Phase,
    Step,
    header_problem,
    line_problem,
)

__all__ = [
    "FAILED_CHECK",
    "FROM_CACHE",
    "HEADER_TYPES",
    "RECORD_SCHEMA",
    "STATUSES",
    "SUFFIXES",
    "Block",
    "Check",
    "End",
    "Eval",
    "Phase",
    "RankRecord",
    "RecordError",
    "RecordWriter",
    "Step",
    "is_echo",
    "last_attempt",
    "read_record",
    "record_path",
]

#: Every ending of a record file's name that the reader takes.
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz")
_ATTEMPT = re.compile(r"-attempt-(\d+)\.jsonl")
#: No line of a record is nearly as long; a foreign file without line ends is not read to its end.
_MAX_LINE_BYTES = 2**20
#: What ranks say whose peer is gone, torch's and NCCL's words for it; SIGABRT is how NCCL's watchdog ends.
_ECHO = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe|DistBackendError|DistNetworkError|"
    r"TCPStore|remote process|process group|rendezvous|by a peer|SIGABRT|Fatal Python error: Aborted",
    re.IGNORECASE,
)
#: Words of `fabric`, which name NCCL and are nobody's echo.
_NO_ECHO = re.compile(r"has to use EFA|did not connect the nodes")


class RecordError(ValueError):
    """A record file that cannot be read: `path`, `line` (from 1) and what is wrong with it."""

    def __init__(self, path: Path, line: int, problem: str) -> None:
        super().__init__(f"{path}:{line}: {problem}")
        self.path = path
        self.line = line
        self.problem = problem


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One record file, read. `end` is None if the process was killed, `truncated` true if a line was cut."""

    path: Path
    header: dict[str, Any]
    phases: tuple[Phase, ...]
    steps: tuple[Step, ...]
    blocks: tuple[Block, ...]
    end: End | None
    truncated: bool = field(default=False)
    evals: tuple[Eval, ...] = ()
    checks: tuple[Check, ...] = ()


def is_echo(message: str) -> bool:
    """Whether a rank that ended with this message failed because one elsewhere did: its peer was gone."""
    return _ECHO.search(message) is not None and _NO_ECHO.search(message) is None


def record_path(directory: Path, *, rank: int, attempt: int) -> Path:
    """Where rank `rank` of attempt `attempt` (from 1) writes its record."""
    return directory / f"rank-{rank:05d}-attempt-{attempt}.jsonl"


def last_attempt(directory: Path) -> int:
    """The highest number of an attempt that left a record, of whatever rank; 0 without one."""
    names = (path.name for path in directory.glob("rank-*-attempt-*.jsonl*"))
    return max((int(match[1]) for name in names if (match := _ATTEMPT.search(name))), default=0)


class RecordWriter:
    """Writes one rank's record. Lines wait in memory until `flush`; an incomplete line is never written.

    Lines may be added before the header is known; nothing reaches the file until `write_header` is called.
    Raises FileExistsError rather than overwrite a record, OSError where the disk refuses, and ValueError for
    a header or a line that the reader would refuse.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[Line] = []
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._size = 0
        self._crc = 0
        self._order: Order | None = None
        self._closed = False
        self._last_step = 0

    @property
    def header_written(self) -> bool:
        return self._order is not None

    @property
    def last_step(self) -> int:
        """The last step of the last block that was flushed; 0 before."""
        return self._last_step

    def write_header(self, header: Mapping[str, Any]) -> None:
        """Write the header now, as the file's first line. `header` has the keys of HEADER_TYPES."""
        assert self._order is None
        line = {"kind": "header", "schema": RECORD_SCHEMA, **header}
        problem = header_problem(line)
        if problem:
            raise ValueError(problem)
        order = Order(line)
        for waiting in self._lines:
            problem = order.problem(waiting)
            if problem:
                raise ValueError(f"{KIND_OF[type(waiting)]} line: {problem}")
        self._size, self._crc = self._append([line])
        self._order = order
        self.flush()

    def add(self, line: Line) -> None:
        """Remember one line; O(1), touches neither disk nor device."""
        problem = line_problem(type(line), vars(line))
        if problem is None and self._order is not None:
            problem = self._order.problem(line)
        if problem:
            raise ValueError(f"{KIND_OF[type(line)]} line: {problem}")
        self._lines.append(line)

    def flush(self) -> None:
        """Write every remembered line in one system call, if the header is there."""
        if self._order is None or not self._lines:
            return
        lines = self._lines
        size, crc = self._append([{"kind": KIND_OF[type(line)], **vars(line)} for line in lines])
        last_step = max([self._last_step, *(line.last_step for line in lines if isinstance(line, Block))])
        # Nothing is called between these, so no signal handler can raise in their midst.
        self._size, self._crc, self._last_step, self._lines = size, crc, last_step, []

    def close(self) -> None:
        """Close the file. Lines not flushed are lost."""
        if not self._closed:
            self._closed = True
            os.close(self._file)

    def _append(self, lines: list[dict[str, Any]]) -> tuple[int, int]:
        """Size and checksum of the file with `lines` behind what it held; it has all of them or none."""
        crc, texts = self._crc, []
        for line in lines:
            plain = json.dumps(line, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
            body = plain.encode(errors="replace")  # half a surrogate pair, as in a file's name, is no text
            crc = zlib.crc32(body, crc)
            texts.append(b'%s,"crc":"%08x"}\n' % (body[:-1], crc))
        data = b"".join(texts)
        remaining = memoryview(data)
        try:
            if os.fstat(self._file).st_size > self._size:  # an earlier write was cut short
                os.ftruncate(self._file, self._size)
            while remaining:
                remaining = remaining[os.write(self._file, remaining) :]
        except BaseException:
            # A full disk may have taken half a line: leave the file as it was.
            os.ftruncate(self._file, self._size)
            raise
        return self._size + len(data), crc


def read_record(path: Path) -> RankRecord:
    """One rank's record file, plain, gzip or xz.

    Raises RecordError, with the line, for a file that is foreign or damaged. Only the last line may be
    incomplete, as a killed process can leave it; then `truncated` is true. Raises OSError as `open` does.
    """
    reader = _Reader(path)
    with _open(path) as file:
        for text in _lines(reader, file):
            reader.take(text)
    return reader.finish()


class _Reader:
    """Checks lines in order and gathers them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = 0
        self.crc: int | None = 0
        self.header: dict[str, Any] | None = None
        self.order: Order | None = None
        self.lines: dict[type, list[Any]] = {cls: [] for cls in KIND_OF}
        self.truncated = False

    def take(self, text: bytes) -> None:
        """Check line `self.number` and keep it."""
        try:
            line = json.loads(text.decode(), parse_constant=_refuse_constant, object_pairs_hook=_unique)
            if b"\\u" in text:  # half a surrogate pair can be written so, but never printed or stored
                json.dumps(line, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            if text.endswith(b"\n") or self.header is None:
                raise self.error("not valid JSON" if self.header else "not a fastlaunch record") from None
            self.truncated = True
            return
        if not isinstance(line, dict) or (self.header is None and line.get("kind") != "header"):
            raise self.error("not a JSON object" if self.header else "not a fastlaunch record")
        self._check_crc(line, text)
        if self.header is None or self.order is None:
            problem = header_problem(line)
            if problem:
                raise self.error(problem)
            self.header, self.order = line, Order(line)
            return
        kind = line.pop("kind", None)
        if not isinstance(kind, str) or kind not in KINDS:
            raise self.error(f"unknown kind of line {kind!r}")
        cls = KINDS[kind]
        problem = line_problem(cls, line)
        if problem:
            raise self.error(f"{kind} line: {problem}")
        value = cls(**line)
        problem = self.order.problem(value)
        if problem:
            raise self.error(problem)
        self.lines[cls].append(value)

    def finish(self) -> RankRecord:
        """The record, once every line was taken."""
        if self.header is None:
            raise RecordError(self.path, 1, "empty: no header")
        ends = self.lines[End]
        return RankRecord(
            path=self.path,
            header=self.header,
            phases=tuple(self.lines[Phase]),
            steps=tuple(self.lines[Step]),
            blocks=tuple(self.lines[Block]),
            end=ends[0] if ends else None,
            truncated=self.truncated,
            evals=tuple(self.lines[Eval]),
            checks=tuple(self.lines[Check]),
        )

    def _check_crc(self, line: dict[str, Any], text: bytes) -> None:
        """Take `crc` out of `line`; RecordError if it is not what the lines so far give."""
        if self.header is None and "crc" not in line:
            self.crc = None
        if self.crc is None:
            return
        match = _CRC.fullmatch(text)
        self.crc = zlib.crc32(match[1] + b"}", self.crc) if match else None
        if match is None or self.crc != int(match[2], 16):
            raise self.error("changed after it was written, or lines before it are missing: wrong checksum")
        del line["crc"]

    def error(self, problem: str) -> RecordError:
        """`problem`, at the line that is being read."""
        return RecordError(self.path, self.number, problem)


_CRC = re.compile(rb'(.*),"crc":"([0-9a-f]{8})"\}\s*', re.DOTALL)


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key twice")
    return values


def _open(path: Path) -> io.BufferedIOBase:
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".xz":
        return lzma.open(path, format=lzma.FORMAT_XZ)
    return path.open("rb")


def _lines(reader: _Reader, file: io.BufferedIOBase) -> Iterator[bytes]:
    """Lines of `file`, counted in `reader.number`; what a decompressor refuses is a RecordError there."""
    while True:
        reader.number += 1
        try:
            text = file.readline(_MAX_LINE_BYTES)
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
            raise reader.error(f"damaged: {error}") from None
        if not text:
            return
        if len(text) == _MAX_LINE_BYTES:
            raise reader.error("not a fastlaunch record" if reader.number == 1 else "too long")
        yield text

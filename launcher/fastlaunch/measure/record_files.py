"""Read record files, which anybody may have written: plain, gzip or xz, within bounds.

What a record holds is the training half's: `fastlaunch_train.records.records`.
"""

import codecs
import errno
import gzip
import io
import json
import lzma
import math
import os
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, get_args, overload

from fastlaunch_train.records.records import (
    HEADER_TYPES,
    KIND_OF,
    KINDS,
    MAX_INTEGER,
    OPTIONAL_HEADER_TYPES,
    SPLITS,
    STATUSES,
    WEIGHTS,
    Block,
    Check,
    Device,
    End,
    Eval,
    Line,
    Phase,
    Profile,
    Step,
)

READ_SCHEMAS = (1, 2)

#: What a reader takes: anybody may have written the file, and a few kilobytes unpack to terabytes. A step is
#: 150 bytes in a file and 65 in memory: these are three million steps of a rank.
MAX_LINE_BYTES = 2**20
MAX_RECORD_BYTES = 2**29
MAX_RECORD_MEMORY = 2**29
#: What liblzma may allocate; `xz -9` needs 65 MiB.
_MAX_LZMA_MEMORY = 2**27
_CHUNK_BYTES = 2**16
_PACKED = (".gz", ".tgz", ".xz")
#: Characters of a wrong value, and of what is wrong with a line.
_MOST_SHOWN, _MOST_SAID = 80, 300
#: What an object that stands for a line takes, and each byte of a header, as nested lists.
_LINE_MEMORY = 300
_HEADER_MEMORY = 32
#: What a script's header may leave null.
_UNKNOWN_OF_SCRIPTS = ("batch_size_per_gpu", "steps", "seed")
_AT_LEAST_ONE = ("attempt", "world_size", "num_nodes", "batch_size_per_gpu", "steps", "first_step")
_LINE_TYPES = {cls: {f.name: get_args(f.type) or (f.type,) for f in fields(cls)} for cls in KIND_OF}
_REQUIRED = {cls: {f.name for f in fields(cls) if f.default is MISSING} for cls in KIND_OF}

L = TypeVar("L", Step, Block)


class Columns(Sequence[L]):
    """Lines of a kind, held in columns: an object for each would take five times the memory."""

    def __init__(self, cls: type[L], lines: Iterable[L] = ()) -> None:
        self._cls: Callable[..., L] = cls
        # 8-byte integers, floats, and bytes for truth. None is -1, or nan among floats; no line has either.
        self._columns = {
            name: array("b" if bool in types else "d" if float in types else "q")
            for name, types in _LINE_TYPES[cls].items()
        }
        for line in lines:
            self.append(line)

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Columns) and all(
            column.tobytes() == other.column(name).tobytes() for name, column in self._columns.items()
        )

    def append(self, line: L) -> None:
        for name, column in self._columns.items():
            value = getattr(line, name)
            if value is None:
                value = math.nan if column.typecode == "d" else -1
            column.append(value)

    def column(self, name: str) -> "array[Any]":
        """Return the values of a field, None as -1 or nan; not to be changed."""
        return self._columns[name]

    @property
    def line_bytes(self) -> int:
        """What a line takes."""
        return sum(column.itemsize for column in self._columns.values())

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    @overload
    def __getitem__(self, index: int) -> L: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[L]: ...
    def __getitem__(self, index: int | slice) -> L | Sequence[L]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        values: dict[str, Any] = {}
        for name, column in self._columns.items():
            value = column[index]
            is_none = math.isnan(value) if column.typecode == "d" else value == -1
            values[name] = None if is_none else bool(value) if column.typecode == "b" else value
        return self._cls(**values)


#: Endings of the names of record files that can be read.
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz")


class RecordError(ValueError):
    """A record file that cannot be read: `path`, `line` (from 1) and what is wrong with it."""

    def __init__(self, path: Path, line: int, problem: str) -> None:
        super().__init__(f"{path}:{line}: {problem}")
        self.path = path
        self.line = line
        self.problem = problem


class TooLarge(RecordError):
    """A record file that goes beyond what is read of one."""


class DamagedFile(OSError):
    """A file that cannot be unpacked, or that holds more than is read (EFBIG)."""


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What a record file holds."""

    path: Path
    header: dict[str, Any]
    phases: tuple[Phase, ...]
    steps: Columns[Step]
    blocks: Sequence[Block]
    end: End | None  #: None: the process was killed
    truncated: bool = False  #: whether the last line was cut off
    evals: tuple[Eval, ...] = ()
    checks: tuple[Check, ...] = ()
    devices: tuple[Device, ...] = ()
    profiles: tuple[Profile, ...] = ()
    num_bytes: int = field(default=0, compare=False)  #: uncompressed
    memory: int = field(default=0, compare=False)  #: bytes that it takes in memory, about


class _Content(io.RawIOBase):
    """The bytes of a file, unpacked piece by piece, as `open_unpacked` gives them."""

    def __init__(self, path: Path, max_bytes: int, start: int) -> None:
        self._file = path.open("rb")
        self._file.seek(start)
        self._pieces = _pieces(self._file, path.suffix)
        self._rest = memoryview(b"")
        self._left = max_bytes - start

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            try:
                self._rest = memoryview(next(self._pieces, b""))
            except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
                raise DamagedFile(errno.EIO, f"damaged: {error}") from None
            self._left -= len(self._rest)
            if self._left < 0:
                raise DamagedFile(errno.EFBIG, os.strerror(errno.EFBIG))
        number = min(len(buffer), len(self._rest))
        buffer[:number] = self._rest[:number]
        self._rest = self._rest[number:]
        return number

    def close(self) -> None:
        self._file.close()
        super().close()


def _pieces(file: BinaryIO, suffix: str) -> Iterator[bytes]:
    if suffix != ".xz":
        source = gzip.GzipFile(fileobj=file) if suffix in _PACKED else file
        yield from iter(lambda: source.read(_CHUNK_BYTES), b"")
        return
    # `lzma.open` allocates as much as the file asks for.
    packed = file.read(_CHUNK_BYTES)
    while packed:
        decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_LZMA_MEMORY)
        while not decoder.eof:
            # Nothing would be the end.
            if piece := decoder.decompress(packed, _CHUNK_BYTES):
                yield piece
            packed = b""
            if decoder.needs_input and not decoder.eof and not (packed := file.read(_CHUNK_BYTES)):
                raise EOFError("it ends too early")
        # Another stream may follow, and zeros before it.
        packed = decoder.unused_data.lstrip(b"\0")
        while not packed and (packed := file.read(_CHUNK_BYTES)):
            packed = packed.lstrip(b"\0")


def open_unpacked(path: Path, max_bytes: int = MAX_RECORD_BYTES, *, start: int = 0) -> io.BufferedReader:
    """Open a file to read what is in it uncompressed, by the end of its name.

    start: the byte of a plain file to begin at. Reading raises DamagedFile, with EFBIG beyond `max_bytes`.
    Raises OSError as `open` does.
    """
    return io.BufferedReader(_Content(path, max_bytes, start), _CHUNK_BYTES)


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a record file. Raises as `read_record` does."""
    with open_unpacked(path) as file:
        return _Reader(path, file).header()


def read_record(
    path: Path, *, max_bytes: int = MAX_RECORD_BYTES, max_memory: int = MAX_RECORD_MEMORY
) -> RankRecord:
    """Read one rank's record file: plain, gzip or xz.

    max_bytes: of the file, uncompressed. max_memory: bytes for what it holds.

    Raises RecordError, with the line, for a file that is foreign or damaged, its kind TooLarge for one beyond
    what is read, and OSError as `open` does. Only the last line may be incomplete, as a killed process leaves
    it: the record is then `truncated`.
    """
    return RecordReader(path).read(max_bytes=max_bytes, max_memory=max_memory)


class RecordReader:
    """Reads a record file that grows: each call reads what was added since the one before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        #: What the last call read, up to the end of its last whole line.
        self._kept: _Lines | None = None

    def read(self, *, max_bytes: int = MAX_RECORD_BYTES, max_memory: int = MAX_RECORD_MEMORY) -> RankRecord:
        """Return what `read_record` would. The steps and blocks of earlier calls' records grow with it."""
        path, (kept, self._kept) = self._path, (self._kept, None)
        stat = path.stat()
        if kept and (
            stat.st_ino != kept.inode
            or not kept.num_bytes <= min(stat.st_size, max_bytes)
            or kept.memory > max_memory
        ):
            kept = None
        with open_unpacked(path, max_bytes, start=kept.num_bytes if kept else 0) as file:
            reader = _Reader(path, file, kept)
            lines = kept or _Lines(reader.header(), reader.num_bytes, inode=stat.st_ino)
            is_kept, truncated = path.suffix not in _PACKED and reader.is_at_line, False
            while text := reader.text():
                if not text.endswith(b"\n"):
                    # More of the line may come.
                    truncated = not _is_json(text)
                    is_kept = is_kept and truncated
                    if truncated:
                        break
                lines.add(text, reader)
                if lines.memory > max_memory:
                    raise TooLarge(path, reader.number, "holds more lines than are read of a run")
        if is_kept:
            self._kept = lines
        return lines.record(path, num_bytes=reader.num_bytes, truncated=truncated)


class _Lines:
    """The lines of a record, as far as they are read."""

    def __init__(self, header: dict[str, Any], num_bytes: int, *, inode: int) -> None:
        self.inode = inode
        self.number, self.num_bytes, self.memory = 1, num_bytes, _HEADER_MEMORY * num_bytes
        self._header, self._order = header, LineOrder(header)
        self._steps, self._blocks = Columns(Step), Columns(Block)
        self._others: dict[type[Line], list[Any]] = {cls: [] for cls in KIND_OF}

    def add(self, text: bytes, reader: "_Reader") -> None:
        """Add the line that `reader` has just read. Raises its error for a line that is wrong."""
        try:
            line = _parsed(text)
        except (ValueError, RecursionError):
            raise reader.error("not valid JSON") from None
        if not isinstance(line, dict):
            raise reader.error("not a JSON object")
        line.pop("crc", None)
        kind = line.pop("kind", None)
        cls = KINDS.get(str(kind))
        if cls is None:
            raise reader.error(f"unknown kind of line {_short(kind)}")
        if refused := line_problem(cls, line):
            raise reader.error(f"{kind} line: {refused}")
        value = cls(**line)
        if misplaced := self._order.problem(value):
            raise reader.error(misplaced)
        if isinstance(value, Step):
            self._steps.append(value)
            self.memory += self._steps.line_bytes
        elif isinstance(value, Block):
            self._blocks.append(value)
            self.memory += self._blocks.line_bytes
        else:
            self._others[cls].append(value)
            self.memory += _LINE_MEMORY + sum(
                sys.getsizeof(text) for text in line.values() if isinstance(text, str)
            )
        self.number, self.num_bytes = reader.number, reader.num_bytes

    def record(self, path: Path, *, num_bytes: int, truncated: bool) -> RankRecord:
        others = self._others
        return RankRecord(
            path=path,
            header=self._header,
            phases=tuple(others[Phase]),
            steps=self._steps,
            blocks=self._blocks,
            end=next(iter(others[End]), None),
            truncated=truncated,
            evals=tuple(others[Eval]),
            checks=tuple(others[Check]),
            devices=tuple(others[Device]),
            profiles=tuple(others[Profile]),
            num_bytes=num_bytes,
            memory=self.memory,
        )


class _Reader:
    """The lines of a record file, of bounded length, and how far they have been read."""

    def __init__(self, path: Path, file: BinaryIO, before: _Lines | None = None) -> None:
        self._path, self._file = path, file
        self.number = before.number if before else 0
        self.num_bytes = before.num_bytes if before else 0
        #: Whether the last line was read with its end.
        self.is_at_line = True

    def error(self, problem: str) -> RecordError:
        return RecordError(self._path, self.number, problem[:_MOST_SAID])

    def text(self) -> bytes:
        """Return the next line with its end; empty at the end of the file."""
        self.number += 1
        try:
            text = self._file.readline(MAX_LINE_BYTES + 1)
        except DamagedFile as error:
            if error.errno == errno.EFBIG:
                raise TooLarge(self._path, self.number, "is larger than what is read of a run") from None
            raise self.error(error.strerror or "damaged") from None
        if len(text) > MAX_LINE_BYTES:
            raise TooLarge(self._path, self.number, f"a line of more than {MAX_LINE_BYTES / 2**20:.0f} MiB")
        self.num_bytes += len(text)
        self.is_at_line = text.endswith(b"\n")
        return text

    def header(self) -> dict[str, Any]:
        """Return the header, which is the first line."""
        text = self.text()
        if not text:
            raise self.error("empty: it holds no line of a record")
        try:
            line = _parsed(text.removeprefix(codecs.BOM_UTF8))
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict) or line.get("kind") != "header":
            raise self.error("not a fastlaunch record")
        line.pop("crc", None)
        if refused := header_problem(line):
            raise self.error(refused)
        # What newer versions add is not looked at there.
        for key, value in line.items():
            if not is_storable(value):
                raise self.error(f"header: {key} is {_short(value)}")
        return line


def is_storable(value: object, depth: int = 32) -> bool:
    """Whether every number in a JSON value is finite and fits into 64 bits, and it is not nested deeper."""
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(is_storable(item, depth - 1) for item in items)
    if isinstance(value, int | float):
        return abs(value) <= MAX_INTEGER if isinstance(value, int) else math.isfinite(value)
    return True


def _parsed(text: bytes) -> Any:
    """Return the JSON of a line. Raises ValueError, and RecursionError for what is nested too deeply."""
    line = json.loads(text.decode(), parse_constant=_refuse_constant)
    if rb"\u" in text:
        # Half a surrogate pair is no text, and nothing can be written that has one.
        json.dumps(line, ensure_ascii=False).encode()
    return line


def _is_json(text: bytes) -> bool:
    try:
        _parsed(text)
    except (ValueError, RecursionError):
        return False
    return True


def _short(value: object) -> str:
    """Return a wrong value as a message shows it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or lists in lists
        return "absurd"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


class LineOrder:
    """Follow the lines after a header, and say what is wrong with a line at its place."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        self._num_steps: int | None = header["steps"]
        self._is_script = "script" in header
        self._last_step = self._last_block_step = header["first_step"] - 1
        self._ended = False

    def problem(self, line: Line) -> str | None:
        """Return what is wrong with `line` after those before it; None, and count it, if nothing is."""
        if self._ended:
            return f"a {KIND_OF[type(line)]} line after the end line"
        if isinstance(line, Step):
            if line.step != self._last_step + 1:
                return f"step {line.step} after step {self._last_step}"
            if self._num_steps is not None and line.step > self._num_steps:
                return f"step {line.step} of {self._num_steps}"
            if not self._is_script and line.num_tokens is None:
                return f"step {line.step} lacks its tokens"
            self._last_step = line.step
        elif isinstance(line, Block):
            if line.first_step != self._last_block_step + 1:
                return f"block from step {line.first_step} after one to step {self._last_block_step}"
            if not line.first_step <= line.last_step <= self._last_step:
                return f"block to step {line.last_step}, with steps to {self._last_step}"
            self._last_block_step = line.last_step
        elif isinstance(line, Phase | Eval | Profile):
            if line.step > self._last_step:
                name = line.name if isinstance(line, Phase) else KIND_OF[type(line)]
                return f"{name} after step {line.step}, with steps to {self._last_step}"
        elif isinstance(line, End):
            if line.status == "completed" and self._last_step < (self._num_steps or 0):
                return f"completed with step {self._last_step} of {self._num_steps}"
            self._ended = True
        return None


def header_problem(line: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a header line; None if nothing is."""
    schema = line.get("schema")
    if schema not in READ_SCHEMAS:
        return f"record schema {_short(schema)}; this version reads {' and '.join(map(str, READ_SCHEMAS))}"
    # None stands for data that were not identified.
    newer = {key: types for key, types in OPTIONAL_HEADER_TYPES.items() if key in line}
    if line.get("data_identity", "") is None:
        del newer["data_identity"]
    types = {**HEADER_TYPES, **newer}
    if "script" in line:
        unknown = [key for key in _UNKNOWN_OF_SCRIPTS if line.get(key, 0) is None]
        types = {key: of for key, of in types.items() if key not in unknown}
    if problem := _section_problem(line, types):
        return f"header: {problem}"
    for key in _AT_LEAST_ONE:
        if line[key] is not None and line[key] < 1:
            return f"header: {key} is {line[key]}, it is at least 1"
    if line["rank"] >= line["world_size"] or line["num_nodes"] > line["world_size"]:
        return f"header: rank {line['rank']} of world size {line['world_size']} on {line['num_nodes']} nodes"
    if not all(isinstance(text, str) for text in line["warnings"]):
        return "header: a warning is no text"
    return None if _is_time(line["started_at"]) else f"header: started_at is {_short(line['started_at'])}"


def line_problem(cls: type[Line], line: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the fields of a line of kind `cls`, by themselves; None if nothing is."""
    if missing := _REQUIRED[cls] - line.keys():
        return f"lacks {min(missing)!r}"
    types = _LINE_TYPES[cls]
    for key, value in line.items():
        if key not in types:
            return f"unknown field {_short(key)}"
        if not _fits(value, types[key]):
            return f"{key} is {_short(value)}"
    if cls is Block and line["wall_s"] == 0:  # rates divide by it
        return f"wall_s is {line['wall_s']}"
    if cls is Step and min(line["num_samples"] or 0, line["num_tokens"] or 0) < 0:
        return "samples or tokens below 0"
    if cls is Eval and (line["split"] not in SPLITS or line.get("weights", "current") not in WEIGHTS):
        return f"of {line['split']} with {line.get('weights')} weights"
    if cls is End and line["status"] not in STATUSES:
        return f"status is {_short(line['status'])}"
    return None


def _section_problem(values: Mapping[str, Any], types: Mapping[str, Any]) -> str | None:
    for key, expected in types.items():
        if key not in values:
            return f"lacks {key!r}"
        value = values[key]
        if isinstance(expected, Mapping):
            if not isinstance(value, dict):
                return f"{key} is {_short(value)}"
            if problem := _section_problem(value, expected):
                return f"{key}: {problem}"
        elif not _fits(value, get_args(expected) or (expected,)):
            return f"{key} is {_short(value)}"
    return None


def _fits(value: object, types: tuple[type, ...]) -> bool:
    """Whether a JSON value is of one of the types. Numbers are finite, and >= 0 unless they may be None."""
    if isinstance(value, float):
        return float in types and math.isfinite(value) and (value >= 0 or type(None) in types)
    if isinstance(value, int) and not isinstance(value, bool):
        is_number = (int in types or float in types) and abs(value) <= MAX_INTEGER
        return is_number and (value >= 0 or type(None) in types)
    return type(value) in types


def _is_time(text: str) -> bool:
    try:
        time = datetime.fromisoformat(text)
        # In the first and the last hours that there are, not every zone's time is one of UTC.
        return time.tzinfo is not None and bool(time.utctimetuple())
    except (ValueError, OverflowError):
        return False


def _refuse_constant(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity, which are no JSON

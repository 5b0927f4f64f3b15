"""Step records: one JSONL file per rank, the only thing the two halves of fastlaunch exchange about a run.

A file is a `header`, then lines of the other kinds as they happen, then one `end`:

    header  what ran, on what, with what: recipe, workload, data, machine, versions, attention backend
    phase   seconds spent outside the steps: build, compile, checkpoint, eval, ...
    step    step_time_s by device events, data_wait_s, loss, num_samples, num_tokens; in fp16 its loss scale
    block   about every second of work the ranks synchronise: first_step, last_step, and the wall time between
    eval    loss and metric on held-out data after a step
    check   whether the recipe computes what the model does
    device  a GPU seen from outside, of a script that records no steps
    profile where the time of a few more steps went, which no other line counts
    end     status and message

The header of a user's own script (room `script`) has the section `script`. What the script does not say is
null there and in its steps: batch_size_per_gpu, steps, seed, num_samples, num_tokens.

A block of lines reaches the file in one write, so a killed process leaves everything up to the last block.
Nothing is dropped or averaged here. Steps count from 1. No torch: the launcher reads these files.
"""

import codecs
import errno
import gzip
import io
import json
import lzma
import math
import os
import re
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, get_args, overload

#: Schema 2 added eval and check lines, and num_padding to step lines. Keys added since without a new number
#: are optional: data_identity, num_data_workers, session, round, max_rounds and script in headers, loss_scale
#: and skipped in steps, utilization in blocks, has_loss in evals; device and profile lines, too. Until
#: 2026-11 every line had a checksum, `crc`, which the reader leaves out.
RECORD_SCHEMA = 2
READ_SCHEMAS = (1, 2)
#: Detail of a `compile` phase that found an earlier run's work on the disk; a first run takes longer.
FROM_CACHE = "from the compiler's cache"
#: The phase that stands for the whole of a script without steps.
SCRIPT_PHASE = "script"
#: The phase in which a batch size was found; of a script whose detail is the new one, as a number.
BATCH_SIZE_PHASE = "batch-size"
#: The phase whose detail counts further processes of the same command, of which nothing else is recorded.
UNRECORDED_PHASE = "unrecorded"
#: In the header's section `script`, true for a rank that never called us: what started it wrote its record.
SILENT = "silent"
#: The parts of the phase `build`, in their order, as its details.
BUILD_MODEL, BUILD_CHECKS, BUILD_STEPS = "the model", "its conversion and checks", "what makes its steps"
SPLITS = ("validation", "test")
WEIGHTS = ("current", "best")
#: The parts of a step's time in a profile, in the order in which they are shown.
STEP_PARTS = ("data", "forward", "backward", "optimizer", "communication", "other")
STATUSES = ("completed", "interrupted", "out_of_memory", "nan_loss", "failed")
#: SQLite's largest integer.
MAX_INTEGER = 2**63 - 1

#: What a reader takes: anybody may have written the file, and a few kilobytes unpack to terabytes. A step is
#: 150 bytes in a file and 65 in memory: these are three million steps of a rank.
MAX_LINE_BYTES = 2**20
MAX_RECORD_BYTES = 2**29
MAX_RECORD_MEMORY = 2**29
#: What liblzma may allocate; `xz -9` needs 65 MiB.
_MAX_LZMA_MEMORY = 2**27
_CHUNK_BYTES = 2**16
#: Characters of a wrong value, and of what is wrong with a line.
_MOST_SHOWN, _MOST_SAID = 80, 300
#: What an object that stands for a line takes, and each byte of a header, as nested lists.
_LINE_MEMORY = 300
_HEADER_MEMORY = 32

#: What every header has. Sections may have more keys than these.
HEADER_TYPES: Mapping[str, Any] = {
    "run_id": str,
    "attempt": int,
    "rank": int,
    "world_size": int,
    "num_nodes": int,
    "started_at": str,  # ISO 8601, UTC
    "workload": {
        "name": str,
        "sample_unit": str,
        "flops_per_sample": int | None,
        "num_parameters": int | None,
    },
    "recipe": {"name": str, "label": str, "precision": str},  # Recipe.to_record()
    "batch_size_per_gpu": int,
    "steps": int,
    "first_step": int,  # 1, or the step after the checkpoint that was resumed
    "seed": int,
    "data": str,  # synthetic, loader, folder or file
    "machine": {"host_id": str | None, "device_type": str, "device_name": str | None},
    "versions": dict,  # python, torch, cuda, cudnn, nccl, timm, transformer_engine, fastlaunch_train, ...
    "attention_backend": str | None,
    "instance": str | None,
    "image_digest": str | None,
    "commit": str | None,
    "warnings": list,  # of text
}
#: What newer headers have, too.
OPTIONAL_HEADER_TYPES: Mapping[str, Any] = {
    # DataIdentity.to_record(), None where the data were not identified
    "data_identity": {
        "digest": str | None,
        "generator": str | None,
        "generator_version": int | None,
        "tokenizer": str | None,
    },
    "num_data_workers": int,  # processes that loaded data for the rank; 0: it did so itself
    "session": str | None,  # the submission that the run belongs to
    "round": int | None,  # which of its rounds, from 1
    "max_rounds": int | None,  # that it planned, to end as soon as all is settled; None without a plan
    "script": {"command": list, "variant": dict},  # argv, and text by the variant's names; of scripts alone
}
#: What a script's header may leave null.
_UNKNOWN_OF_SCRIPTS = ("batch_size_per_gpu", "steps", "seed")
_AT_LEAST_ONE = ("attempt", "world_size", "num_nodes", "batch_size_per_gpu", "steps", "first_step")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Time spent outside the steps."""

    name: str
    seconds: float
    step: int  #: the last step done before it began, 0 at the start
    detail: str | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step of one rank."""

    step: int
    step_time_s: float
    data_wait_s: float
    loss: float | None  #: None: not finite, or a script's that does not say
    num_samples: int | None  #: of the batch that came; None: its shapes do not tell
    num_tokens: int | None  #: padding included; None: a script's, which does not say
    num_padding: int = 0
    loss_scale: float | None = None  #: that its loss was multiplied by; None without loss scaling
    skipped: bool | None = None  #: whether the loss scaler skipped it, for gradients that were not finite


@dataclass(frozen=True, kw_only=True)
class Eval:
    """What the model after `step` scores on held-out data, all ranks together."""

    step: int
    split: str  #: one of SPLITS
    loss: float | None  #: None: not finite, unless `has_loss` is False
    num_samples: int  #: 0: a script's that does not say
    seconds: float  #: 0: a script's within a step, whose time has it
    weights: str = "current"  #: `best`: the weights that scored best on validation
    metric: str | None = None  #: its name, such as accuracy; higher is better
    metric_value: float | None = None
    has_loss: bool | None = None  #: False: a script's that gives none


@dataclass(frozen=True, kw_only=True)
class Check:
    """Whether the recipe computes what the model does: `value` has to be within `limit`."""

    name: str
    passed: bool
    value: float | None = None
    limit: float | None = None
    detail: str | None = None

    @property
    def warning(self) -> str:
        """What the log says, and the header's warnings, if it failed."""
        value = "" if self.value is None else f": {self.value:.2g}"
        limit = "" if self.limit is None else f", and {self.limit:.2g} is allowed"
        detail = f" ({self.detail})" if self.detail else ""
        return f"the recipe fails the check of {self.name}{value}{limit}{detail}"


@dataclass(frozen=True, kw_only=True)
class Block:
    """Steps between two synchronisations, and the wall time that they took together."""

    first_step: int
    last_step: int
    wall_s: float
    num_compiles: int = 0  #: graphs compiled so far in the process
    reserved_gib: float | None = None  #: device memory held by the allocator
    # Read from this rank's device at the end of the block, None if not known:
    clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    utilization: float | None = None  #: share of at most the last second in which a kernel ran


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU as the process that started a script sees it."""

    at_s: float  #: since the script began
    gpu: int  #: its number on the machine
    utilization: float | None = None  #: share of the driver's last sample in which a kernel ran
    memory_gib: float | None = None  #: in use, by whatever process
    power_w: float | None = None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the time of `num_steps` further steps after `step` went, by the profiler; the mean of a step.

    The parts that are not None add up to step_time_s. None: these steps have no such part, or could not be
    profiled. `problem` says why not; the others are None then.
    """

    step: int
    num_steps: int
    step_time_s: float | None = None
    data_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    communication_s: float | None = None  #: that no computation hides
    other_s: float | None = None
    overlapped_communication_s: float | None = None  #: that computation hides; in none of the parts
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class End:
    """How the rank ended."""

    status: str  #: one of STATUSES
    message: str | None
    num_steps: int  #: the last step done, counted from the start of the run and not from a resume
    peak_memory_gib: float | None


Line = Phase | Step | Block | Eval | Check | Device | Profile | End

KINDS: Mapping[str, type[Line]] = {
    "phase": Phase,
    "step": Step,
    "block": Block,
    "eval": Eval,
    "check": Check,
    "device": Device,
    "profile": Profile,
    "end": End,
}
KIND_OF = {cls: kind for kind, cls in KINDS.items()}
_LINE_TYPES = {cls: {f.name: get_args(f.type) or (f.type,) for f in fields(cls)} for cls in KIND_OF}
_REQUIRED = {cls: {f.name for f in fields(cls) if f.default is MISSING} for cls in KIND_OF}
#: Fields that a step line lacks where they are None: there are many such lines.
_LEFT_OUT = {f.name for f in fields(Step) if f.default is None}

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
_ATTEMPT = re.compile(r"-attempt-(\d+)\.jsonl")


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


def record_path(directory: Path, *, rank: int, attempt: int) -> Path:
    """Return where a rank writes its record; attempts count from 1."""
    return directory / f"rank-{rank:05d}-attempt-{attempt}.jsonl"


def last_attempt(directory: Path) -> int:
    """Return the highest attempt of which any rank left a record; 0 without one."""
    names = (path.name for path in directory.glob("rank-*-attempt-*.jsonl*"))
    return max((int(match[1]) for name in names if (match := _ATTEMPT.search(name))), default=0)


class RecordWriter:
    """Write one rank's record. Lines wait in memory until `flush`; a file never gets half a line.

    Lines may be added before the header is known; they are written after it. Raises FileExistsError rather
    than overwrite a record, OSError if the disk refuses, and ValueError for what the reader would refuse.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[Line] = []
        # As private as its folder: the launcher's are the user's alone.
        mode = path.parent.stat().st_mode & 0o666
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, mode)
        self._size = 0
        self._order: LineOrder | None = None
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
        """Write the header, which has the keys of HEADER_TYPES, and the lines that wait for it."""
        assert self._order is None
        line = {"kind": "header", "schema": RECORD_SCHEMA, **header}
        problem = header_problem(line)
        if problem:
            raise ValueError(problem)
        order = LineOrder(line)
        for waiting in self._lines:
            problem = order.problem(waiting)
            if problem:
                raise ValueError(f"{KIND_OF[type(waiting)]} line: {problem}")
        self._size = self._append([line])
        self._order = order
        self.flush()

    def add(self, line: Line) -> None:
        """Remember a line; O(1), touches neither disk nor device."""
        problem = line_problem(type(line), vars(line))
        if problem is None and self._order is not None:
            problem = self._order.problem(line)
        if problem:
            raise ValueError(f"{KIND_OF[type(line)]} line: {problem}")
        self._lines.append(line)

    def flush(self) -> None:
        """Write every remembered line in one system call, once there is a header."""
        if self._order is None or not self._lines:
            return
        lines = self._lines
        size = self._append([_plain(line) for line in lines])
        last_step = max([self._last_step, *(line.last_step for line in lines if isinstance(line, Block))])
        # No call separates these, so no signal handler can raise between them.
        self._size, self._last_step, self._lines = size, last_step, []

    def close(self) -> None:
        """Close the file. Lines not flushed are lost."""
        if not self._closed:
            self._closed = True
            os.close(self._file)

    def _append(self, lines: list[dict[str, Any]]) -> int:
        """Append all of `lines`, or none of them, and return the file's size."""
        # `replace`: a file name may hold half a surrogate pair, which is no text.
        data = "".join(f"{_text(line)}\n" for line in lines).encode(errors="replace")
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
        return self._size + len(data)


def _text(line: Mapping[str, Any]) -> str:
    return json.dumps(line, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _plain(line: Line) -> dict[str, Any]:
    values = vars(line)
    if isinstance(line, Step):
        values = {name: value for name, value in values.items() if value is not None or name not in _LEFT_OUT}
    return {"kind": KIND_OF[type(line)], **values}


def complete_record(path: Path, lines: Sequence[Line], end: End) -> None:
    """Add `lines` and `end` to the record of a process that is gone, instead of a half line or an end there.

    Raises OSError as `open` does, and ValueError for what the reader would refuse.
    """
    for line in (*lines, end):
        if problem := line_problem(type(line), vars(line)):
            raise ValueError(f"{KIND_OF[type(line)]} line: {problem}")
    kept = path.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    start_of_last = kept.rfind(b"\n", 0, -1) + 1
    if b'"kind":"end"' in kept[start_of_last:]:
        kept = kept[:start_of_last]
    added = "".join(f"{_text(_plain(line))}\n" for line in (*lines, end)).encode(errors="replace")
    with path.open("r+b") as file:
        file.seek(len(kept))
        file.write(added)
        file.truncate()


class _Content(io.RawIOBase):
    """The bytes of a file, unpacked piece by piece, as `open_unpacked` gives them."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._file = path.open("rb")
        self._pieces = _pieces(self._file, path.suffix)
        self._rest = memoryview(b"")
        self._left = max_bytes

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
        source = gzip.GzipFile(fileobj=file) if suffix in (".gz", ".tgz") else file
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


def open_unpacked(path: Path, max_bytes: int = MAX_RECORD_BYTES) -> io.BufferedReader:
    """Open a file to read what is in it uncompressed, by the end of its name.

    Reading raises DamagedFile, with EFBIG beyond `max_bytes`. Raises OSError as `open` does.
    """
    return io.BufferedReader(_Content(path, max_bytes), _CHUNK_BYTES)


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
    with open_unpacked(path, max_bytes) as file:
        reader = _Reader(path, file)
        header, truncated = reader.header(), False
        steps, blocks = Columns(Step), Columns(Block)
        order = LineOrder(header)
        lines: dict[type[Line], list[Any]] = {cls: [] for cls in KIND_OF}
        memory = _HEADER_MEMORY * reader.num_bytes
        while text := reader.text():
            try:
                line = _parsed(text)
            except (ValueError, RecursionError):
                if text.endswith(b"\n"):
                    raise reader.error("not valid JSON") from None
                truncated = True
                break
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
            if misplaced := order.problem(value):
                raise reader.error(misplaced)
            if isinstance(value, Step):
                steps.append(value)
                memory += steps.line_bytes
            elif isinstance(value, Block):
                blocks.append(value)
                memory += blocks.line_bytes
            else:
                lines[cls].append(value)
                memory += _LINE_MEMORY + sum(
                    sys.getsizeof(text) for text in line.values() if isinstance(text, str)
                )
            if memory > max_memory:
                raise TooLarge(path, reader.number, "holds more lines than are read of a run")
    return RankRecord(
        path=path,
        header=header,
        phases=tuple(lines[Phase]),
        steps=steps,
        blocks=blocks,
        end=next(iter(lines[End]), None),
        truncated=truncated,
        evals=tuple(lines[Eval]),
        checks=tuple(lines[Check]),
        devices=tuple(lines[Device]),
        profiles=tuple(lines[Profile]),
        num_bytes=reader.num_bytes,
        memory=memory,
    )


class _Reader:
    """The lines of a record file, of bounded length, and how far they have been read."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self.number = self.num_bytes = 0

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
        return text

    def header(self) -> dict[str, Any]:
        """Return the header, which is the first line."""
        text = self.text()
        if not text:
            raise self.error("empty: no header")
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

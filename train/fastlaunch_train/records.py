"""Step records: one JSONL file per rank, the only thing the two halves of fastlaunch exchange about a run.

A file is a `header`, then `phase`, `step` and `block` lines as they happen, then one `end`:

    header  what ran, on what, with what: resolved recipe, workload, machine, versions, attention backend
    phase   seconds spent outside the steps: build, compile, checkpoint, eval, ...
    step    step_time_s by device events, data_wait_s, loss, num_samples, num_tokens
    block   about every second of work the ranks synchronise: first_step, last_step, and the wall time between
    end     status and message

Lines reach the file a block at a time in one write, so a killed process leaves everything up to the last
block. Nothing is dropped or averaged here. Steps count from 1. No torch: the launcher reads these files.
"""

import gzip
import io
import json
import lzma
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

RECORD_SCHEMA = 1
STATUSES = ("completed", "interrupted", "out_of_memory", "nan_loss", "failed")
#: Every ending of a record file's name that the reader takes.
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz")

#: Header keys and the JSON types they may have; every one of them is present in every header.
HEADER_TYPES: Mapping[str, tuple[type, ...]] = {
    "run_id": (str,),
    "attempt": (int,),
    "rank": (int,),
    "world_size": (int,),
    "num_nodes": (int,),
    "started_at": (str,),  # ISO 8601, UTC
    "workload": (dict,),  # name, sample_unit, flops_per_sample, num_parameters
    "recipe": (dict,),  # Recipe.to_record()
    "batch_size_per_gpu": (int,),
    "steps": (int,),
    "first_step": (int,),  # 1, or the step after the checkpoint that was resumed
    "seed": (int,),
    "data": (str,),  # synthetic, loader, folder
    "machine": (dict,),  # host_id, device_type, device_name, num_devices, memory_gib, driver, power_limit_w
    "versions": (dict,),  # python, torch, cuda, cudnn, nccl, timm, transformer_engine, fastlaunch_train
    "attention_backend": (str, type(None)),
    "instance": (str, type(None)),
    "image_digest": (str, type(None)),
    "commit": (str, type(None)),
    "warnings": (list,),
}


class RecordError(ValueError):
    """A record file that cannot be read: `path`, `line` (from 1) and what is wrong with it."""

    def __init__(self, path: Path, line: int, problem: str) -> None:
        super().__init__(f"{path}:{line}: {problem}")
        self.path = path
        self.line = line
        self.problem = problem


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Seconds spent outside the steps; `step` is the last step done before it began (0 at the start)."""

    name: str
    seconds: float
    step: int
    detail: str | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step of one rank. `loss` is None where it was not finite."""

    step: int
    step_time_s: float
    data_wait_s: float
    loss: float | None
    num_samples: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Block:
    """Steps between two synchronisations, and the wall time that they took together.

    num_compiles: compiled graphs so far in the process. reserved_gib: device memory held by the allocator.
    clock_mhz, power_w, temperature_c: of this rank's device at the end of the block, None if not known.
    """

    first_step: int
    last_step: int
    wall_s: float
    num_compiles: int = 0
    reserved_gib: float | None = None
    clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None


@dataclass(frozen=True, kw_only=True)
class End:
    """How the rank ended."""

    status: str
    message: str | None
    num_steps: int
    peak_memory_gib: float | None


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


_KINDS: Mapping[str, type] = {"phase": Phase, "step": Step, "block": Block, "end": End}
_NAME_OF = {cls: kind for kind, cls in _KINDS.items()}


def record_path(directory: Path, *, rank: int, attempt: int) -> Path:
    """Where rank `rank` of attempt `attempt` (from 1) writes its record."""
    return directory / f"rank-{rank:05d}-attempt-{attempt}.jsonl"


class RecordWriter:
    """Writes one rank's record. Lines wait in memory until `flush`; an incomplete line is never written.

    Lines may be added before the header is known; nothing reaches the file until `write_header` is called.
    Raises FileExistsError rather than overwrite a record, and OSError where the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[Phase | Step | Block | End] = []
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._header_written = False
        self._closed = False

    @property
    def header_written(self) -> bool:
        return self._header_written

    def write_header(self, header: Mapping[str, Any]) -> None:
        """Write the header now, as the file's first line. `header` has the keys of HEADER_TYPES."""
        problem = _header_problem({"kind": "header", "schema": RECORD_SCHEMA, **header})
        assert problem is None, problem
        assert not self._header_written
        self._write(_dumps({"kind": "header", "schema": RECORD_SCHEMA, **header}) + "\n")
        self._header_written = True
        self.flush()

    def add(self, line: Phase | Step | Block | End) -> None:
        """Remember one line; O(1), touches neither disk nor device."""
        self._lines.append(line)

    def flush(self) -> None:
        """Write every remembered line in one system call, if the header is there."""
        if not self._header_written or not self._lines:
            return
        text = "".join(_dumps({"kind": _NAME_OF[type(line)], **vars(line)}) + "\n" for line in self._lines)
        self._write(text)
        self._lines.clear()

    def close(self) -> None:
        """Close the file. Lines not flushed are lost."""
        if not self._closed:
            self._closed = True
            os.close(self._file)

    def _write(self, text: str) -> None:
        remaining = memoryview(text.encode())
        size_before = os.fstat(self._file).st_size
        try:
            while remaining:
                remaining = remaining[os.write(self._file, remaining) :]
        except OSError:
            # A full disk may have taken half a line: leave the file as it was.
            os.ftruncate(self._file, size_before)
            raise


def read_record(path: Path) -> RankRecord:
    """One rank's record file, plain, gzip or xz.

    Raises RecordError, with the line, for a file that is foreign or damaged. Only the last line may be
    incomplete, as a killed process can leave it; then `truncated` is true. Raises OSError as `open` does.
    """
    reader = _Reader(path)
    with _open_text(path) as file:
        for number, text in enumerate(_lines(path, file), start=1):
            reader.take(number, text)
    return reader.finish()


class _Reader:
    """Checks lines in order and gathers them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = 0
        self.header: dict[str, Any] | None = None
        self.lines: dict[type, list[Any]] = {cls: [] for cls in _KINDS.values()}
        self.last_step = 0
        self.last_block_step = 0
        self.truncated = False

    def take(self, number: int, text: str) -> None:
        self.number = number
        if self.truncated:
            raise self._error("not valid JSON", number - 1)
        try:
            line = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            if text.endswith("\n") or self.header is None:
                raise self._error("not valid JSON" if number > 1 else "not a fastlaunch record") from None
            self.truncated = True
            return
        if not isinstance(line, dict) or (number == 1 and line.get("kind") != "header"):
            raise self._error("not a fastlaunch record" if number == 1 else "not a JSON object")
        if number == 1:
            self._take_header(line)
            return
        kind = line.pop("kind", None)
        if not isinstance(kind, str) or kind not in _KINDS:
            raise self._error(f"unknown kind of line {kind!r}")
        if self.lines[End]:
            raise self._error(f"a {kind} line after the end line")
        cls = _KINDS[kind]
        problem = _line_problem(cls, line)
        if problem:
            raise self._error(f"{kind} line: {problem}")
        value = cls(**line)
        self._check_order(value)
        self.lines[cls].append(value)

    def finish(self) -> RankRecord:
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
        )

    def _take_header(self, line: dict[str, Any]) -> None:
        problem = _header_problem(line)
        if problem:
            raise self._error(problem)
        self.header = line
        self.last_step = self.last_block_step = line["first_step"] - 1

    def _check_order(self, value: object) -> None:
        if isinstance(value, Step):
            if value.step != self.last_step + 1:
                raise self._error(f"step {value.step} after step {self.last_step}")
            self.last_step = value.step
        elif isinstance(value, Block):
            if value.first_step != self.last_block_step + 1:
                raise self._error(
                    f"block from step {value.first_step} after one to step {self.last_block_step}"
                )
            if not value.first_step <= value.last_step <= self.last_step:
                raise self._error(f"block to step {value.last_step}, with steps to {self.last_step}")
            self.last_block_step = value.last_step

    def _error(self, problem: str, line: int | None = None) -> RecordError:
        return RecordError(self.path, line or self.number, problem)


def _header_problem(line: Mapping[str, Any]) -> str | None:
    schema = line.get("schema")
    if schema != RECORD_SCHEMA:
        return f"record schema {schema!r}; this version reads {RECORD_SCHEMA}"
    for key, types in HEADER_TYPES.items():
        if key not in line:
            return f"header lacks {key!r}"
        if not isinstance(line[key], types) or isinstance(line[key], bool):
            return f"header: {key} is {line[key]!r}"
    for key in ("attempt", "world_size", "num_nodes", "batch_size_per_gpu", "steps", "first_step"):
        if line[key] < 1:
            return f"header: {key} is {line[key]}, it is at least 1"
    if not 0 <= line["rank"] < line["world_size"]:
        return f"header: rank {line['rank']} of world size {line['world_size']}"
    for section, key in (("workload", "name"), ("recipe", "label"), ("recipe", "name")):
        if not isinstance(line[section].get(key), str):
            return f"header: {section} lacks {key!r}"
    return None


_INTEGERS = frozenset(
    {"step", "num_samples", "num_tokens", "first_step", "last_step", "num_compiles", "num_steps"}
)
_STRINGS = frozenset({"name", "status"})
_OPTIONAL_STRINGS = frozenset({"detail", "message"})
_OPTIONAL_NUMBERS = frozenset(
    {"loss", "reserved_gib", "clock_mhz", "power_w", "temperature_c", "peak_memory_gib"}
)


def _line_problem(cls: type, line: Mapping[str, Any]) -> str | None:
    known = cls.__dataclass_fields__  # type: ignore[attr-defined]
    for key in line:
        if key not in known:
            return f"unknown field {key!r}"
    for key, spec in known.items():
        if key not in line:
            if spec.default is spec.default_factory:  # both MISSING: the field is required
                return f"lacks {key!r}"
            continue
        if not _has_type(key, line[key]):
            return f"{key} is {line[key]!r}"
    if cls is End and line["status"] not in STATUSES:
        return f"status is {line['status']!r}"
    return None


def _has_type(key: str, value: object) -> bool:
    if value is None:
        return key in _OPTIONAL_STRINGS or key in _OPTIONAL_NUMBERS
    if key in _STRINGS or key in _OPTIONAL_STRINGS:
        return isinstance(value, str)
    if isinstance(value, bool):
        return False
    if key in _INTEGERS:
        return isinstance(value, int) and value >= 0
    if not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return key in _OPTIONAL_NUMBERS or value >= 0


def _dumps(line: Mapping[str, Any]) -> str:
    return json.dumps(line, allow_nan=False, separators=(",", ":"))


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _open_plain(path: Path) -> BinaryIO:
    return path.open("rb")


@contextmanager
def _open_text(path: Path) -> Iterator[TextIO]:
    openers: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".xz": lzma.open}
    with (
        openers.get(path.suffix, _open_plain)(path) as raw,
        io.TextIOWrapper(raw, encoding="utf-8", newline="\n") as file,
    ):
        yield file


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    """Lines of `file`; what a decompressor or decoder refuses becomes a RecordError at its line."""
    number = 1
    while True:
        try:
            text = file.readline()
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile, UnicodeDecodeError) as error:
            raise RecordError(path, number, f"damaged: {error}") from None
        except OSError as error:
            if error.errno is None:  # gzip reports damage as a bare OSError
                raise RecordError(path, number, f"damaged: {error}") from None
            raise
        if not text:
            return
        yield text
        number += 1

"""Step records: one JSONL file per rank, the only data that fastlaunch's two halves exchange about a run.

A file is a `header`, then lines of the other kinds as they happen, then one `end`:

    header  what ran, on what, with what: recipe, workload, data, machine, versions, attention backend
    phase   seconds spent outside the steps: build, compile, checkpoint, eval, ...
    step    step_time_s by device events, data_wait_s, loss, num_samples, num_tokens; in fp16 its loss scale
    block   after some seconds of work the ranks synchronise: first_step, last_step, and the wall time between
    eval    loss and metric on held-out data after a step
    check   whether the recipe computes what the model does
    device  a GPU seen from outside, of a script that records no steps
    profile where the time of a few more steps went, which no other line counts
    end     status and message

The header of a user's own script (room `script`) has the section `script`. Values that the script does not
give are null there and in its steps: batch_size_per_gpu, steps, seed, num_samples, num_tokens.

A block of lines reaches the file in one write, so a killed process leaves everything up to the last block.
Nothing is dropped or averaged here. Steps count from 1. No torch: the launcher reads these files.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

#: Schema 2 added eval and check lines, and num_padding to step lines. Keys added since without a new number
#: are optional: data_identity, num_data_workers, session, round, max_rounds and script in headers, loss_scale
#: and skipped in steps, utilization in blocks, has_loss in evals; device and profile lines, too. Until
#: 2026-11 every line had a checksum, `crc`, which the reader ignores.
RECORD_SCHEMA = 2
#: Detail of a `compile` phase that used an earlier run's cache on the disk; a first run takes longer.
FROM_CACHE = "from the compiler's cache"
#: The phase that stands for a whole script without steps.
SCRIPT_PHASE = "script"
#: The phase in which a batch size was found; for a script, its detail is the new size as a number.
BATCH_SIZE_PHASE = "batch-size"
#: The phase in which a file of a model's weights is fetched from the hub.
FETCH_PHASE = "fetch"
#: The phase whose detail counts further processes of the same command, which have no other record.
UNRECORDED_PHASE = "unrecorded"
#: Key in the header's section `script`: true for a rank that never called us, whose starter wrote its record.
SILENT = "silent"
#: The phase, beside the steps, in which a rank wrote its part of a checkpoint, since 2026-11-28; the phase
#: `checkpoint` is the time for which the steps stood still.
WRITE_PHASE = "checkpoint-write"
#: The parts of the phase `build`, in their order, as its details.
BUILD_MODEL, BUILD_CHECKS, BUILD_STEPS = "the model", "its conversion and checks", "what makes its steps"
SPLITS = ("validation", "test")
WEIGHTS = ("current", "best")
#: The parts of a step's time in a profile, in the order of display.
STEP_PARTS = ("data", "forward", "backward", "optimizer", "communication", "other")
STATUSES = ("completed", "interrupted", "out_of_memory", "nan_loss", "failed")
#: SQLite's largest integer.
MAX_INTEGER = 2**63 - 1
#: Keys of every header. Sections may have more keys than these.
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
#: Further keys of newer headers.
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
    # Why the start before this one failed, if the run was begun again on its machine
    "restarted_after": str | None,
    "script": {"command": list, "variant": dict},  # argv, and text by the variant's names; of scripts alone
}


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
    loss: float | None  #: None: not finite, or not given by a script
    num_samples: int | None  #: samples of the batch; None: unknown from its shapes
    num_tokens: int | None  #: includes padding; None: not given by a script
    num_padding: int = 0
    loss_scale: float | None = None  #: factor of its loss; None without loss scaling
    skipped: bool | None = None  #: whether the loss scaler skipped it because of non-finite gradients


@dataclass(frozen=True, kw_only=True)
class Eval:
    """The score of the model after `step` on held-out data, over all ranks."""

    step: int
    split: str  #: one of SPLITS
    loss: float | None  #: None: not finite, unless `has_loss` is False
    num_samples: int  #: 0: not given by a script
    seconds: float  #: 0: a script's evaluation within a step, whose time includes it
    weights: str = "current"  #: `best`: the weights that scored best on validation
    metric: str | None = None  #: the metric's name, such as accuracy; higher is better
    metric_value: float | None = None
    has_loss: bool | None = None  #: False: a script gave no loss


@dataclass(frozen=True, kw_only=True)
class Check:
    """Whether the recipe computes the same as the model: `value` has to be within `limit`."""

    name: str
    passed: bool
    value: float | None = None
    limit: float | None = None
    detail: str | None = None

    @property
    def warning(self) -> str:
        """The warning of a failed check, for the log and the header."""
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
    # Means of samples of this rank's device in the block (until 2026-11-27: at its end), None if not known:
    clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    utilization: float | None = None  #: share of the sampled time in which a kernel ran


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU as seen by the process that started a script."""

    at_s: float  #: seconds since the script began
    gpu: int  #: the GPU's number on the machine
    utilization: float | None = None  #: share of the driver's last sample in which a kernel ran
    memory_gib: float | None = None  #: memory in use by any process
    power_w: float | None = None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The profiler's attribution of time: the mean over `num_steps` further steps after `step`.

    The parts that are not None add up to step_time_s. A part is None if these steps have no such part. If
    they could not be profiled, all parts are None and `problem` says why.
    """

    step: int
    num_steps: int
    step_time_s: float | None = None
    data_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    communication_s: float | None = None  #: communication that no computation hides
    other_s: float | None = None
    #: communication that computation hides; counted in no part
    overlapped_communication_s: float | None = None
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
#: Fields that a step line omits if they are None: there are many such lines.
_LEFT_OUT = {f.name for f in fields(Step) if f.default is None}
_ATTEMPT = re.compile(r"-attempt-(\d+)\.jsonl")


def record_path(directory: Path, *, rank: int, attempt: int) -> Path:
    """Return the path of a rank's record; attempts count from 1."""
    return directory / f"rank-{rank:05d}-attempt-{attempt}.jsonl"


def last_attempt(directory: Path) -> int:
    """Return the highest attempt with a record of any rank; 0 without a record."""
    names = (path.name for path in directory.glob("rank-*-attempt-*.jsonl*"))
    return max((int(match[1]) for name in names if (match := _ATTEMPT.search(name))), default=0)


class RecordWriter:
    """Write one rank's record. Lines wait in memory until `flush`; a file never gets half a line.

    Lines may be added before the header is known; they are written after it. Values are not checked here:
    they come from us, and users' input is checked where it comes in. Raises FileExistsError rather than
    overwrite a record, and OSError if the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[Line] = []
        # The file is as private as its folder: only the user can read the launcher's folders.
        mode = path.parent.stat().st_mode & 0o666
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, mode)
        self._size = 0
        self._closed = False
        self.header_written = False
        #: The last step of the last block that was flushed; 0 before.
        self.last_step = 0

    def write_header(self, header: Mapping[str, Any]) -> None:
        """Write the header, which has the keys of HEADER_TYPES, and the lines that wait for it."""
        assert not self.header_written
        self._size = self._append([{"kind": "header", "schema": RECORD_SCHEMA, **header}])
        self.header_written = True
        self.flush()

    def add(self, line: Line) -> None:
        """Remember a line, without touching disk or device."""
        self._lines.append(line)

    def flush(self) -> None:
        """Write every remembered line in one system call, once there is a header."""
        if not self.header_written or not self._lines:
            return
        lines = self._lines
        size = self._append([_plain(line) for line in lines])
        last_step = max([self.last_step, *(line.last_step for line in lines if isinstance(line, Block))])
        # No call separates these, so no signal handler can raise between them.
        self._size, self.last_step, self._lines = size, last_step, []

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
    """Add `lines` and `end` to the record of a process that is gone, replacing half a line or an old end.

    Raises OSError as `open` does.
    """
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

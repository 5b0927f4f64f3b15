"""What the lines of a record file may hold, and what is wrong with one that holds something else."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from datetime import datetime
from typing import Any

#: 2 added eval and check lines, and num_padding to step lines; files of 1 are read as they are. What may be
#: missing has been added since without another number: data_identity and num_data_workers to headers,
#: utilization to blocks.
RECORD_SCHEMA = 2
READ_SCHEMAS = (1, 2)
#: Detail of a phase `compile` that found work of an earlier run on the disk: a first run takes longer.
FROM_CACHE = "from the compiler's cache"
#: How the warning of a check that failed begins, which has a line of its own too.
FAILED_CHECK = "the recipe fails the check of"
SPLITS = ("validation", "test")
WEIGHTS = ("current", "best")
STATUSES = ("completed", "interrupted", "out_of_memory", "nan_loss", "failed")

#: Header keys and the JSON types they may have; a header has every one of them, and but for those of
#: OPTIONAL_HEADER_TYPES no other.
HEADER_TYPES: Mapping[str, tuple[type, ...]] = {
    "run_id": (str,),
    "attempt": (int,),
    "rank": (int,),
    "world_size": (int,),
    "num_nodes": (int,),
    "started_at": (str,),  # ISO 8601, UTC
    "workload": (dict,),  # name, sample_unit, flops_per_sample, num_parameters, optimizer, learning_rate, ...
    "recipe": (dict,),  # Recipe.to_record()
    "batch_size_per_gpu": (int,),
    "steps": (int,),
    "first_step": (int,),  # 1, or the step after the checkpoint that was resumed
    "seed": (int,),
    "data": (str,),  # synthetic, loader, folder
    "machine": (dict,),  # host_id, device_type, device_name, memory_gib, driver, cuda_compat, ...
    "versions": (dict,),  # python, torch, cuda, cudnn, nccl, timm, transformer_engine, fastlaunch_train
    "attention_backend": (str, type(None)),
    "instance": (str, type(None)),
    "image_digest": (str, type(None)),
    "commit": (str, type(None)),
    "warnings": (list,),
}
#: What headers have since: DataIdentity.to_record(), None where data were not identified; and how many
#: processes loaded data for the rank, 0 where it did that itself.
OPTIONAL_HEADER_TYPES: Mapping[str, tuple[type, ...]] = {
    "data_identity": (dict, type(None)),
    "num_data_workers": (int,),
}
_IDENTITY_TYPES: Mapping[str, tuple[type, ...]] = {
    "digest": (str, type(None)),
    "generator": (str, type(None)),
    "generator_version": (int, type(None)),
    "tokenizer": (str, type(None)),
}

#: Keys that the header's sections must have; they may have others.
_SECTION_TYPES: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "workload": {
        "name": (str,),
        "sample_unit": (str,),
        "flops_per_sample": (int, type(None)),
        "num_parameters": (int, type(None)),
    },
    "recipe": {"name": (str,), "label": (str,), "precision": (str,)},
    "machine": {"host_id": (str, type(None)), "device_type": (str,), "device_name": (str, type(None))},
}

#: The least value of the header's integers.
_LEAST: Mapping[str, int] = {
    "attempt": 1,
    "rank": 0,
    "world_size": 1,
    "num_nodes": 1,
    "batch_size_per_gpu": 1,
    "steps": 1,
    "first_step": 1,
    "seed": 0,
    "num_data_workers": 0,
}

#: SQLite's largest integer; anything above it is damage, and would not fit a float either.
MAX_INTEGER = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Seconds spent outside the steps; `step` is the last step done before it began (0 at the start)."""

    name: str
    seconds: float
    step: int
    detail: str | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step of one rank. `loss` is None where it was not finite. Padding counts as tokens."""

    step: int
    step_time_s: float
    data_wait_s: float
    loss: float | None
    num_samples: int
    num_tokens: int
    num_padding: int = 0


@dataclass(frozen=True, kw_only=True)
class Eval:
    """What the model after `step` scores on held-out data, of all ranks together; loss None if not finite.

    split: `validation` or `test`. weights: `current`, or `best` for those that scored best on validation.
    metric: its name, such as accuracy; higher is better. num_samples: of all ranks.
    """

    step: int
    split: str
    loss: float | None
    num_samples: int
    seconds: float
    weights: str = "current"
    metric: str | None = None
    metric_value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Check:
    """Whether the recipe computes what the model does, found by the first step: `value` within `limit`."""

    name: str
    passed: bool
    value: float | None = None
    limit: float | None = None
    detail: str | None = None


@dataclass(frozen=True, kw_only=True)
class Block:
    """Steps between two synchronisations, and the wall time that they took together.

    num_compiles: compiled graphs so far in the process. reserved_gib: device memory held by the allocator.
    clock_mhz, power_w, temperature_c: of this rank's device at the end of the block, None if not known.
    utilization: the share of its last second, at most, in which a kernel ran on it.
    """

    first_step: int
    last_step: int
    wall_s: float
    num_compiles: int = 0
    reserved_gib: float | None = None
    clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    utilization: float | None = None


@dataclass(frozen=True, kw_only=True)
class End:
    """How the rank ended. `num_steps`: the last step it did, those before a resume counted."""

    status: str
    message: str | None
    num_steps: int
    peak_memory_gib: float | None


Line = Phase | Step | Block | Eval | Check | End

KINDS: Mapping[str, type[Line]] = {
    "phase": Phase,
    "step": Step,
    "block": Block,
    "eval": Eval,
    "check": Check,
    "end": End,
}
KIND_OF = {cls: kind for kind, cls in KINDS.items()}


class Order:
    """Follows the lines after a header, and says what is wrong with one at its place."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        self._num_steps = header["steps"]
        self._last_step = self._last_block_step = header["first_step"] - 1
        self._ended = False

    def problem(self, line: Line) -> str | None:
        """What is wrong with `line` after those before it; None, and the line counts, if nothing is."""
        if self._ended:
            return f"a {KIND_OF[type(line)]} line after the end line"
        if isinstance(line, Step):
            if line.step != self._last_step + 1:
                return f"step {line.step} after step {self._last_step}"
            if line.step > self._num_steps:
                return f"step {line.step} of {self._num_steps}"
            self._last_step = line.step
        elif isinstance(line, Block):
            if line.first_step != self._last_block_step + 1:
                return f"block from step {line.first_step} after one to step {self._last_block_step}"
            if not line.first_step <= line.last_step <= self._last_step:
                return f"block to step {line.last_step}, with steps to {self._last_step}"
            self._last_block_step = line.last_step
        elif isinstance(line, Phase | Eval):
            if line.step > self._last_step:
                name = line.name if isinstance(line, Phase) else "eval"
                return f"{name} after step {line.step}, with steps to {self._last_step}"
        elif isinstance(line, End):
            if line.status == "completed" and self._last_step < self._num_steps:
                return f"completed with step {self._last_step} of {self._num_steps}"
            self._ended = True
        return None


def header_problem(line: Mapping[str, Any]) -> str | None:
    """What is wrong with a header line; None if nothing is."""
    schema = line.get("schema")
    if schema not in READ_SCHEMAS:
        return f"record schema {schema!r}; this version reads {' and '.join(map(str, READ_SCHEMAS))}"
    for key in line:
        if key not in HEADER_TYPES and key not in ("kind", "schema", *OPTIONAL_HEADER_TYPES):
            return f"header: unknown key {key!r}"
    added = {key: types for key, types in OPTIONAL_HEADER_TYPES.items() if key in line}
    problem = _types_problem("header", line, {**HEADER_TYPES, **added})
    if problem is None and line.get("data_identity") is not None:
        problem = _types_problem("header: data_identity", line["data_identity"], _IDENTITY_TYPES)
    if problem:
        return problem
    for section, types in _SECTION_TYPES.items():
        problem = _types_problem(f"header: {section}", line[section], types)
        if problem:
            return problem
    for key, least in _LEAST.items():
        if key in line and not least <= line[key] <= MAX_INTEGER:
            return f"header: {key} is {line[key]}, it is at least {least}"
    if line["rank"] >= line["world_size"] or line["num_nodes"] > line["world_size"]:
        return f"header: rank {line['rank']} of world size {line['world_size']} on {line['num_nodes']} nodes"
    flops = line["workload"]["flops_per_sample"]
    if flops is not None and not 1 <= flops <= MAX_INTEGER:
        return f"header: workload: flops_per_sample is {flops}"
    if not all(isinstance(text, str) for text in line["warnings"]):
        return "header: warnings are text"
    if not all(isinstance(version, str | int | None) for version in line["versions"].values()):
        return "header: versions are text"
    return None if _is_time(line["started_at"]) else f"header: started_at is {line['started_at']!r}"


def line_problem(cls: type[Line], line: Mapping[str, Any]) -> str | None:
    """What is wrong with the fields of a line of kind `cls`, by themselves; None if nothing is."""
    required = _REQUIRED[cls]
    if not line.keys() >= required:
        return f"lacks {min(required - line.keys())!r}"
    known = cls.__dataclass_fields__
    for key, value in line.items():
        if key not in known:
            return f"unknown field {key!r}"
        if not _has_type(key, value):
            return f"{key} is {value!r}"
    if cls is Eval and (line["split"] not in SPLITS or line.get("weights", "current") not in WEIGHTS):
        return f"of {line['split']} with {line.get('weights')} weights"
    if cls is End and line["status"] not in STATUSES:
        return f"status is {line['status']!r}"
    return None


_REQUIRED = {cls: frozenset(f.name for f in fields(cls) if f.default is MISSING) for cls in KIND_OF}
_INTEGERS = frozenset(
    [
        *("step", "num_samples", "num_tokens", "num_padding"),
        *("first_step", "last_step", "num_compiles", "num_steps"),
    ]
)
_STRINGS = frozenset({"name", "status", "split", "weights"})
_OPTIONAL_STRINGS = frozenset({"detail", "message", "metric"})
_OPTIONAL_NUMBERS = frozenset(
    [
        *("loss", "reserved_gib", "clock_mhz", "power_w", "temperature_c", "peak_memory_gib"),
        *("utilization", "metric_value", "value", "limit"),
    ]
)


def _has_type(key: str, value: object) -> bool:
    if value is None:
        return key in _OPTIONAL_STRINGS or key in _OPTIONAL_NUMBERS
    if key in _STRINGS or key in _OPTIONAL_STRINGS:
        return isinstance(value, str)
    if key == "passed":
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        return False
    if key in _INTEGERS:
        return isinstance(value, int) and value >= 0
    if key == "wall_s":  # steps took time; rates divide by it
        return 0 < value < math.inf
    return math.isfinite(value) and (key in _OPTIONAL_NUMBERS or value >= 0)


def _types_problem(what: str, values: Mapping[str, Any], types: Mapping[str, tuple[type, ...]]) -> str | None:
    for key, allowed in types.items():
        if key not in values:
            return f"{what} lacks {key!r}"
        if not isinstance(values[key], allowed) or isinstance(values[key], bool):
            return f"{what}: {key} is {values[key]!r}"
    return None


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).utcoffset() is not None
    except ValueError:
        return False

"""Step records: what is written is read again, and nothing else is taken for it."""

import gzip
import json
import lzma
import math
import os
import resource
import stat
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.measure.record_files import SUFFIXES, RankRecord, RecordError, read_record
from fastlaunch_train.recipes.recipes import RECIPES
from fastlaunch_train.records.records import (
    HEADER_TYPES,
    KINDS,
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
    RecordWriter,
    Step,
    complete_record,
    record_path,
)

HEADER: dict[str, Any] = {
    "run_id": "run-1",
    "attempt": 1,
    "rank": 0,
    "world_size": 1,
    "num_nodes": 1,
    "started_at": "2026-11-01T12:00:00+00:00",
    "workload": {
        "name": "vit-tiny",
        "sample_unit": "images",
        "flops_per_sample": None,
        "num_parameters": 12_345,
    },
    "recipe": RECIPES["bf16"].to_record(),
    "batch_size_per_gpu": 2,
    "steps": 6,
    "first_step": 1,
    "seed": 0,
    "data": "synthetic",
    "machine": {"host_id": "a", "device_type": "cpu", "device_name": "Zähler", "memory_gib": 7.5},
    "versions": {"python": "3.11.9", "torch": "2.13.0", "cuda": None},
    "attention_backend": None,
    "instance": None,
    "image_digest": None,
    "commit": None,
    "warnings": ["a warning\nof two lines"],
}


def step_line(step: int, **changes: Any) -> Step:
    values = {"step_time_s": 0.1, "data_wait_s": 0.001, "loss": 2.0, "num_samples": 2, "num_tokens": 0}
    return Step(step=step, **values | changes)


LINES: tuple[Line, ...] = (
    Phase(name="build", seconds=1.5, step=0),
    Phase(name="compile", seconds=2.5, step=0, detail='of "every" block'),
    step_line(1),
    step_line(2, loss=None),
    step_line(3),
    Block(first_step=1, last_step=3, wall_s=0.31, num_compiles=2, reserved_gib=1.25, utilization=0.98),
    Phase(name="checkpoint", seconds=0.25, step=3),
    step_line(4),
    step_line(5),
    step_line(6),
    Block(first_step=4, last_step=6, wall_s=0.32, clock_mhz=1980.0, power_w=612.5, temperature_c=51.0),
    Check(name="equivalence", passed=False, value=0.12, limit=0.003, detail="of 16 images"),
    Eval(
        step=6,
        split="test",
        weights="best",
        loss=0.5,
        num_samples=100,
        seconds=0.75,
        metric="accuracy",
        metric_value=0.875,
    ),
    Profile(step=6, num_steps=5, step_time_s=0.2, forward_s=0.15, other_s=0.05, communication_s=0.0),
    End(status="completed", message=None, num_steps=6, peak_memory_gib=2.5),
)


def write(path: Path, lines: tuple[Line, ...] = LINES, **header: Any) -> Path:
    writer = RecordWriter(path)
    writer.write_header({**HEADER, **header})
    for line in lines:
        writer.add(line)
    writer.flush()
    writer.close()
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a complete record."""
    return write(tmp_path_factory.mktemp("sound") / "record.jsonl").read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path that every example of a property test writes anew."""
    return tmp_path_factory.mktemp("scratch") / "record.jsonl"


def read_bytes(path: Path, data: bytes) -> RankRecord:
    path.write_bytes(data)
    return read_record(path)


def all_lines(record: RankRecord) -> list[Line]:
    """What is in `record`, by kind in KINDS' order."""
    kinds = ("phases", "steps", "blocks", "evals", "checks", "devices", "profiles")
    return [line for kind in kinds for line in getattr(record, kind)] + [record.end] * (
        record.end is not None
    )


# What is written is read again.


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_written_record_is_read_again(tmp_path: Path, suffix: str) -> None:
    plain = write(tmp_path / "record.jsonl").read_bytes()
    path = tmp_path / f"copy{suffix}"
    pack: dict[str, Callable[[bytes], bytes]] = {
        ".jsonl": bytes,
        ".jsonl.gz": gzip.compress,
        ".jsonl.xz": lzma.compress,
    }
    path.write_bytes(pack[suffix](plain))
    record = read_record(path)
    assert {key: record.header[key] for key in HEADER_TYPES} == {
        **HEADER,
        "recipe": json.loads(json.dumps(HEADER["recipe"])),
    }
    assert all_lines(record) == sorted(LINES, key=lambda line: list(KINDS.values()).index(type(line)))
    assert record.path == path
    assert not record.truncated


def test_a_step_line_lacks_what_there_is_without_loss_scaling(tmp_path: Path) -> None:
    step = Step(step=1, step_time_s=0.1, data_wait_s=0.0, loss=None, num_samples=1, num_tokens=0)
    scaled = replace(step, step=2, loss_scale=2.0, skipped=True)
    path = write(tmp_path / "a.jsonl", (step, scaled))
    first, second = (json.loads(text) for text in path.read_text().splitlines()[1:])
    assert "loss" in first and not first.keys() & {"loss_scale", "skipped"}
    assert (second["loss_scale"], second["skipped"]) == (2.0, True)
    assert [*read_record(path).steps] == [step, scaled]


#: Any value of a field, by the field's type.
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(st.characters(exclude_categories=["Cs"])),
    int: st.integers(0, 2**40),
    float: st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
}
VALUES |= {
    str | None: st.none() | VALUES[str],
    float | None: st.none() | st.floats(allow_nan=False, allow_infinity=False),
    int | None: st.none() | VALUES[int],
    bool | None: st.none() | st.booleans(),
}


def any_line(kind: type[Line], **chosen: st.SearchStrategy[Any]) -> st.SearchStrategy[Line]:
    return st.builds(kind, **{f.name: VALUES[f.type] for f in fields(kind)} | chosen)


ONE = st.just(1)
any_lines = st.tuples(
    any_line(Phase, step=st.just(0)),
    any_line(Step, step=ONE, num_samples=VALUES[int], num_tokens=VALUES[int]),
    any_line(Block, first_step=ONE, last_step=ONE, wall_s=st.floats(min_value=1e-9, max_value=1e9)),
    any_line(Eval, step=ONE, split=st.sampled_from(SPLITS), weights=st.sampled_from(WEIGHTS)),
    any_line(Check),
    any_line(Device),
    any_line(Profile, step=ONE),
    any_line(End, status=st.sampled_from(STATUSES)),
)


@given(lines=any_lines)
def test_any_values_are_read_as_they_were_written(scratch: Path, lines: tuple[Line, ...]) -> None:
    scratch.unlink(missing_ok=True)
    record = read_record(write(scratch, lines, steps=1))
    assert sorted(map(repr, all_lines(record))) == sorted(map(repr, lines))


SCRIPT = {"script": {"command": ["python", "train.py"], "variant": {"amp": "bf16"}}}


def test_a_script_may_leave_out_what_it_does_not_say(tmp_path: Path) -> None:
    unknown = {"batch_size_per_gpu": None, "steps": None, "seed": None}
    lines = (
        step_line(1, num_samples=None, num_tokens=None),
        Device(at_s=5.0, gpu=1, utilization=0.5, memory_gib=2.0),
        End(status="completed", message=None, num_steps=1, peak_memory_gib=None),
    )
    record = read_record(write(tmp_path / "a.jsonl", lines, **unknown, **SCRIPT))
    assert all_lines(record) == list(lines)
    for name in unknown:
        with pytest.raises(RecordError, match=name):
            read_record(write(tmp_path / f"{name}.jsonl", (), **{name: None}))
    with pytest.raises(RecordError, match="step 1"):
        read_record(write(tmp_path / "b.jsonl", lines))
    with pytest.raises(RecordError, match="below 0"):
        read_record(write(tmp_path / "c.jsonl", (step_line(1, num_samples=-1),), **SCRIPT))


@pytest.mark.parametrize("cut", [0, 5, None])
def test_the_record_of_a_process_that_is_gone_is_completed(tmp_path: Path, cut: int | None) -> None:
    path = write(tmp_path / "a.jsonl", LINES[:-1])
    if cut is None:
        path = write(tmp_path / "b.jsonl")  # with an end of its own
    else:
        path.write_bytes(path.read_bytes() + b'{"kind":"step"'[:cut])
    end = End(status="failed", message="exit code 3", num_steps=6, peak_memory_gib=None)
    wall = Phase(name="script", seconds=9.0, step=0)
    complete_record(path, [wall], end)
    record = read_record(path)
    assert (record.end, record.phases[-1], record.truncated) == (end, wall, False)
    assert len(record.steps) == 6


# Damage: never another exception than RecordError, never a number that was not written.


@given(data=st.data())
def test_a_truncated_record_is_read_up_to_the_cut(sound: bytes, scratch: Path, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(sound)))
    line_ends = [position for position, byte in enumerate(sound) if byte == ord("\n")]
    if cut < line_ends[0]:
        with pytest.raises(RecordError) as caught:
            read_bytes(scratch, sound[:cut])
        assert caught.value.line == 1
        return
    record = read_bytes(scratch, sound[:cut])
    whole_lines = LINES[: sum(position <= cut for position in line_ends) - 1]
    assert sorted(map(repr, all_lines(record))) == sorted(map(repr, whole_lines))
    assert record.truncated == (cut not in line_ends and cut - 1 not in line_ends)


@given(data=st.data())
def test_damage_never_crashes_the_reader(sound: bytes, scratch: Path, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(sound) - 1))
    replaced = data.draw(st.integers(0, 3))
    junk = data.draw(
        st.binary(max_size=3) | st.sampled_from([b"1e999", b"-1", b"NaN", b"9" * 400, b"[" * 9999])
    )
    try:
        record = read_bytes(scratch, sound[:position] + junk + sound[position + replaced :])
    except RecordError as error:
        assert error.path == scratch
        assert error.line <= sound.count(b"\n", 0, position) + 2
    else:
        assert all(math.isfinite(step.step_time_s) and step.step_time_s >= 0 for step in record.steps)
        assert all(math.isfinite(block.wall_s) and block.wall_s > 0 for block in record.blocks)


@given(data=st.data())
@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_a_damaged_archive_is_a_record_error(
    sound: bytes, scratch: Path, pack: Callable[[bytes], bytes], data: st.DataObject
) -> None:
    path = scratch.with_suffix(".jsonl.gz" if pack is gzip.compress else ".jsonl.xz")
    packed = pack(sound)
    position = data.draw(st.integers(0, len(packed) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != packed[position]))
    whole = read_bytes(path, packed)
    try:
        record = read_bytes(path, packed[:position] + bytes([byte]) + packed[position + 1 :])
    except RecordError as error:
        assert 1 <= error.line <= sound.count(b"\n") + 1
    else:
        assert record == whole  # the byte was of the archive's own header, such as its time stamp


# Foreign files, and records that make no sense.


@pytest.mark.parametrize(
    ("suffix", "data"),
    [
        (".jsonl", b""),
        (".jsonl", b"workload,instance\nvit-huge,p5.48xlarge\n"),
        (".jsonl", b"\x7fELF\x02\x01\x01\x00\xff\xfe"),
        (".jsonl", b'{"kind": "step", "step": 1}\n'),
        (".jsonl", b'{"kind": "header"}\n'),
        (".jsonl", b"[1, 2]\n"),
        (".jsonl", b"[" * 100_000),
        (".jsonl.gz", b"no archive\n"),
        (".jsonl.xz", b"no archive\n"),
    ],
)
def test_a_foreign_file_is_named_with_its_first_line(tmp_path: Path, suffix: str, data: bytes) -> None:
    path = tmp_path / f"foreign{suffix}"
    with pytest.raises(RecordError) as caught:
        read_bytes(path, data)
    assert (caught.value.path, caught.value.line) == (path, 1)


#: Number of the line in `sound`, what is changed in it, and a word of the refusal.
SENSELESS = [
    (1, {"attempt": 0}, "attempt"),
    (1, {"num_nodes": 2}, "2 nodes"),
    (1, {"batch_size_per_gpu": True}, "batch_size_per_gpu"),
    (1, {"started_at": "2026-11-01T12:00:00"}, "started_at"),
    (1, {"workload": {"name": "vit-tiny"}}, "sample_unit"),
    (1, {"schema": 3}, "schema 3"),
    (1, {"data_identity": {"digest": "ab"}}, "generator"),
    (1, {"machine": {**HEADER["machine"], "memory_gib": math.nan}}, "not a fastlaunch record"),
    (2, {"kind": "stride"}, "unknown kind"),
    (2, {"seconds": 10**400}, "seconds"),
    (2, {"step": 7}, "after step 7"),
    (4, {"step": 2}, "step 2 after step 0"),
    (4, {"step_time_s": None}, "step_time_s"),
    (4, {"num_samples": 2.0}, "num_samples"),
    (4, {"more": 1}, "unknown field 'more'"),
    (7, {"first_step": 2}, "block from step 2"),
    (7, {"wall_s": 0}, "wall_s"),
    (14, {"step": 7}, "after step 7"),
    (14, {"split": "train"}, "train"),
    (15, {"status": "fine"}, "status"),
    # Seen in a line that comes later.
    (1, {"steps": 5}, None),
    (1, {"steps": 7}, None),
    (1, {"first_step": 2}, None),
]


@pytest.mark.parametrize(("line", "changes", "word"), SENSELESS)
def test_a_line_that_makes_no_sense_is_named(
    sound: bytes, tmp_path: Path, line: int, changes: dict[str, Any], word: str | None
) -> None:
    lines = sound.splitlines()
    lines[line - 1] = json.dumps({**json.loads(lines[line - 1]), **changes}).encode()
    with pytest.raises(RecordError, match=word) as caught:
        read_bytes(tmp_path / "record.jsonl", b"\n".join(lines))
    assert word is None or caught.value.line == line


@pytest.mark.parametrize(("line", "key"), [*((1, key) for key in HEADER_TYPES), (4, "loss")])
def test_a_line_lacks_nothing(sound: bytes, tmp_path: Path, line: int, key: str) -> None:
    lines = [json.loads(text) for text in sound.splitlines()]
    del lines[line - 1][key]
    with pytest.raises(RecordError, match=f":{line}: .*: lacks '{key}'"):
        read_bytes(tmp_path / "record.jsonl", "\n".join(map(json.dumps, lines)).encode())


def test_a_message_that_is_not_text_is_written_all_the_same(tmp_path: Path) -> None:
    message = "no such file: " + os.fsdecode(b"\xffa.jpg")
    end = End(status="failed", message=message, num_steps=0, peak_memory_gib=None)
    record = read_record(write(tmp_path / "record.jsonl", (end,)))
    assert record.end is not None
    assert record.end.message == "no such file: ?a.jpg"


def test_a_record_of_lines_with_checksums_is_read(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    older = sound.replace(b"}\n", b',"crc":"0123abcd"}\n')
    assert read_bytes(path, older) == read_bytes(path, sound)


def test_a_record_of_the_schema_before_is_read(sound: bytes, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in sound.splitlines()]
    lines[0] |= {"schema": 1, "recipe": {"name": "bf16", "label": "bf16", "precision": "bf16"}}
    older = [line for line in lines if line["kind"] not in ("eval", "check")]
    for line in older:
        line.pop("num_padding", None)
    text = "\n".join(map(json.dumps, older)).encode()
    record, whole = read_bytes(tmp_path / "a.jsonl", text), read_bytes(tmp_path / "b.jsonl", sound)
    assert (record.steps, record.blocks, record.end) == (whole.steps, whole.blocks, whole.end)
    assert record.header["schema"] == 1
    assert (record.evals, record.checks) == ((), ())


# The writer.


@pytest.mark.parametrize(("folder", "record"), [(0o700, 0o600), (0o755, 0o644), (0o2750, 0o640)])
def test_a_record_is_as_private_as_its_folder(tmp_path: Path, folder: int, record: int) -> None:
    tmp_path.chmod(folder)
    path = write(tmp_path / "record.jsonl")
    assert stat.S_IMODE(path.stat().st_mode) == record


def test_nothing_is_in_the_file_before_the_header(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "record.jsonl")
    writer.add(LINES[0])
    writer.flush()
    assert not writer.header_written
    assert writer.path.read_bytes() == b""
    writer.write_header(HEADER)
    assert writer.header_written
    assert read_record(writer.path).phases == LINES[:1]
    writer.close()
    writer.close()


def test_a_resumed_attempt_counts_on(tmp_path: Path) -> None:
    path = record_path(tmp_path, rank=3, attempt=2)
    assert path.name == "rank-00003-attempt-2.jsonl"
    lines = (step_line(5), step_line(6), Block(first_step=5, last_step=6, wall_s=0.2), LINES[-1])
    record = read_record(write(path, lines, first_step=5, attempt=2, rank=3, world_size=4))
    assert [step.step for step in record.steps] == [5, 6]
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        RecordWriter(path)
    assert path.read_bytes() == before


@pytest.fixture
def half_written(tmp_path: Path) -> Iterator[RecordWriter]:
    """A writer that has flushed the lines of the first block, and remembers the others."""
    writer = RecordWriter(tmp_path / "record.jsonl")
    writer.write_header(HEADER)
    for line in LINES[:6]:
        writer.add(line)
    writer.flush()
    for line in LINES[6:]:
        writer.add(line)
    yield writer
    writer.close()


def test_a_full_disk_leaves_no_half_line_and_raises(half_written: RecordWriter) -> None:
    record = read_record(half_written.path)
    assert all_lines(record) == list(LINES[:6]) and record.end is None and not record.truncated
    # A limit on the file's size stands in for the disk: it too takes a part of what is written, then refuses.
    size = half_written.path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            half_written.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert half_written.path.stat().st_size == size
    # Once there is room again, nothing is missing and nothing is there twice.
    half_written.flush()
    assert sorted(map(repr, all_lines(read_record(half_written.path)))) == sorted(map(repr, LINES))


def test_a_half_line_of_an_interrupted_write_is_taken_back(half_written: RecordWriter) -> None:
    with half_written.path.open("ab") as file:
        file.write(b'{"kind":"phase","na')
    half_written.flush()
    assert read_record(half_written.path).end == LINES[-1]

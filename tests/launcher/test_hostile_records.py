"""Whatever lies in a file or an archive: a run or a reason, in bounded memory, and the others are read."""

import gzip
import io
import json
import lzma
import tarfile
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_records import write_run
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.core.data import to_data
from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.lifecycle import importer
from fastlaunch.lifecycle.importer import find_runs
from fastlaunch.measure import outcome
from fastlaunch.measure.steptime import read_series
from fastlaunch_train.records.records import Check, Eval, Phase, Profile

RANK = "rank-00000-attempt-1.jsonl"
GOOD = "20261121-090312-good"


def sound_record() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        (file,) = write_run(
            Path(folder),
            run_id="bad",
            steps=40,
            skipped=lambda step: step == 3,
            phases=[Phase(name="all-reduce", seconds=1.0, step=0, detail="bus_gb_per_s=3 bytes=9")],
            evals=[Eval(step=9, split="test", loss=1.0, num_samples=3, seconds=1.0)],
            checks=[Check(name="isolation", passed=True)],
            profile=Profile(step=40, num_steps=3, step_time_s=0.1),
            header={"session": "s", "round": 1, "data_identity": None, "files": {"a.py": "0"}},
        )
        return file.read_bytes()


SOUND = sound_record()
HEADER, REST = SOUND.split(b"\n", 1)
STARTED = json.loads(HEADER)["started_at"].encode()
PHASE = b'{"kind":"phase","name":"a","seconds":0,"step":0,"detail":null}\n'


def member(name: str, *, size: int = 0, kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, link
    return info.tobuf(tarfile.GNU_FORMAT)


def archive(*files: tuple[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as file:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return packed.getvalue()


def with_dictionary(record: bytes) -> bytes:
    """Return xz whose reader is asked for a dictionary of 4 GiB."""
    packed = bytearray(lzma.compress(record, filters=[{"id": lzma.FILTER_LZMA2, "preset": 0}]))
    end = 12 + 4 * packed[12]
    packed[packed.index(b"\x21\x01", 12) + 2] = 40
    packed[end : end + 4] = zlib.crc32(packed[12:end]).to_bytes(4, "little")
    return bytes(packed)


def run_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, RANK).write_bytes(SOUND)
        (run,) = find_runs([Path(folder)]).runs.values()
    shared = {"schema": "fastlaunch-run/1", "id": "x", "spec": None, "summary": to_data(run.summary)}
    return json.dumps(shared).encode()


RUN_FILE = run_file()


def deep(number: int) -> bytes:
    return b"[" * number + b"]" * number


#: What stands in a record file.
RECORDS = {
    "a long header": HEADER[:-1] + b" " * 2**21 + b"}\n" + REST,
    "a long line": HEADER + b"\n" + b" " * 2**21 + REST,
    "a long last line": SOUND + b" " * 2**21,
    "zeros": SOUND + b"\0" * 2**21,
    "many lines": HEADER + b"\n" + PHASE * 20_000,
    "a deep header": HEADER[:-1] + b',"x":' + deep(500) + b"}\n" + REST,
    "a deeper header": HEADER[:-1] + b',"x":' + deep(100_000) + b"}\n" + REST,
    "a number of many digits": HEADER[:-1] + b',"x":' + b"9" * 10_000 + b"}\n" + REST,
    "a large number": HEADER[:-1] + b',"x":1e999}\n' + REST,
    "half a character": HEADER[:-1] + b',"x":"\\ud800"}\n' + REST,
    "a warning that is a list": HEADER.replace(b'"warnings":[]', b'"warnings":[[]]') + b"\n" + REST,
    "a time before all": SOUND.replace(STARTED, b"0001-01-01T00:00:00+14:00"),
    "a time after all": SOUND.replace(STARTED, b"9999-12-31T23:59:59-14:00"),
    "no text": SOUND.replace(b"bad", b"\xff\xfe"),
}
GOOD_ARCHIVE = archive((RANK, SOUND))
COMMENT = b" comment=".ljust(2**20 - 8, b"a") + b"\n"
FIGURES = (
    b"workload,instance,num_nodes,recipe,batch_size_per_gpu,num_gpus,step_time_s,measured_on,source\n"
    b"vit-huge,p5.48xlarge,1,bf16,64,8,0.199,2023-11-15,an article\n"
)
#: What an archive is, but for its compression. But for what each is named by, an import would take most.
ARCHIVES = {
    "a long header": member("x", size=2**20, kind=tarfile.XHDTYPE) + b"1048576" + COMMENT + GOOD_ARCHIVE,
    "many headers": (member("x", size=512, kind=tarfile.XHDTYPE) + b"9 a=bbbb\n".ljust(512, b"\0")) * 3000,
    "a large file": archive(("notes.txt", b" " * 2**25), (RANK, SOUND)),
    "many members": b"".join(member(f"{number}.txt") for number in range(50)) + GOOD_ARCHIVE,
    "one member many times": archive(*[(RANK, SOUND)] * 50),
    "deep folders": archive(("a/" * 900 + RANK, SOUND)),
    "a link": member("a.jsonl", kind=tarfile.SYMTYPE, link="/etc/passwd"),
    "a hard link": member("a.jsonl", kind=tarfile.LNKTYPE, link="../../a"),
    "a device": member("a.jsonl", kind=tarfile.CHRTYPE),
    "a pipe": member("a.jsonl", kind=tarfile.FIFOTYPE),
    "above": archive(("../a.jsonl", SOUND)),
    "no archive": b"not a tar file",
    "half an archive": GOOD_ARCHIVE[: len(GOOD_ARCHIVE) // 2],
    "a long run file": archive(("run.json", RUN_FILE + b" " * 2**23)),
    "a deep run file": archive(("run.json", b'{"schema": "fastlaunch-run/1", "spec": ' + deep(500) + b"}")),
    "long figures": archive(("a.csv", FIGURES + b"\n" * 2**23)),
    "a large dictionary": archive((f"{RANK}.xz", with_dictionary(SOUND))),
    "trailing garbage in a record": archive((f"{RANK}.xz", lzma.compress(SOUND) + b"garbage")),
    **{f"{name} in a record": archive((f"a/{RANK}", record)) for name, record in RECORDS.items()},
    **{
        f"{name} in a gzipped record": archive((f"a/{RANK}.gz", gzip.compress(record)))
        for name, record in RECORDS.items()
    },
}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the folder in which archives are unpacked, where nothing may be left."""
    (place := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "pack"),
    [
        *((kind, gzip.compress) for kind in ARCHIVES),
        *((kind, lzma.compress) for kind in ARCHIVES if not kind.endswith("record")),
    ],
)
def test_what_breaks_a_bound_is_left_out_and_the_others_are_read(
    tmp_path: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    pack: Callable[[bytes], bytes],
) -> None:
    monkeypatch.setattr(importer, "MAX_MEMBERS", 40)
    monkeypatch.setattr(importer, "MAX_UNPACKED_BYTES", 2**24 + 2**23)
    monkeypatch.setattr(outcome, "MAX_RUN_MEMORY", 2**22)
    write_run(tmp_path / "runs" / "good", steps=40, run_id=GOOD)
    bad = tmp_path / "runs" / ("bad.tar.xz" if pack is lzma.compress else "bad.tgz")
    bad.write_bytes(pack(ARCHIVES[kind]))
    imports = find_runs([tmp_path / "runs"])
    assert list(imports.runs) == [GOOD]
    assert imports.skipped and all(str(problem.path).startswith(str(bad)) for problem in imports.skipped)
    assert all(len(problem.problem) < 1000 for problem in imports.skipped)


def test_a_line_of_48_mebibytes_takes_little_memory(tmp_path: Path, temporary: Path) -> None:
    with lzma.open(tmp_path / f"{RANK}.xz", "wb", preset=0) as file:
        file.write(HEADER + b"\n")
        for _ in range(48):
            file.write(b" " * 2**20)
    tracemalloc.start()
    with pytest.raises(BadFile):
        find_runs([tmp_path])
    assert tracemalloc.get_traced_memory()[1] < 2**25
    tracemalloc.stop()


def test_summaries_are_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importer, "MAX_SUMMARIES", 20_000)
    for number in range(20):
        write_run(tmp_path / f"{number}", steps=40, run_id=f"run-{number}")
    imports = find_runs([tmp_path])
    assert 1 < len(imports.runs) < 20
    assert len(imports.skipped) == 1


def test_a_run_that_is_long_is_read(tmp_path: Path) -> None:
    lines = (
        f'{{"kind":"step","step":{n},"step_time_s":0.1,"data_wait_s":0,"loss":1,"num_samples":2,"num_tokens":3}}\n'
        f'{{"kind":"block","first_step":{n},"last_step":{n},"wall_s":0.1}}\n'
        for n in range(1, 2_001)
    )
    header = {**json.loads(HEADER), "steps": 2_000}
    (tmp_path / RANK).write_text(f"{json.dumps(header)}\n{''.join(lines)}")
    (run,) = find_runs([tmp_path]).runs.values()
    assert run.summary.num_steps == 2_000
    # That of a million steps, each in a block of its own, of eight ranks has room.
    record = outcome.read_records([tmp_path / RANK])[0][0]
    assert record.memory * 500 * 8 < outcome.MAX_RUN_MEMORY
    assert record.num_bytes * 500 * 8 < outcome.MAX_RUN_BYTES


PACKED = lzma.compress(
    archive(
        (f"one/{RANK}", SOUND),
        (f"two/{RANK}.xz", lzma.compress(SOUND.replace(b"bad", b"two"))),
        (f"three/{RANK}.gz", gzip.compress(SOUND.replace(b"bad", b"three"))),
        ("run.json", b'{"schema": "fastlaunch-run/1", "id": "x", "spec": null, "summary": null}'),
    )
)
PLAIN = lzma.decompress(PACKED)


def read(path: Path) -> None:
    """Read a file as an import does: whatever is in it, it is a run or a UserError."""
    try:
        imports = find_runs([path])
    except UserError:
        return
    assert imports.runs
    for run in imports.runs.values():
        json.dumps(to_data(run.summary), allow_nan=False, ensure_ascii=False).encode()


@given(data=st.data())
def test_a_damaged_archive_is_runs_or_a_reason(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    is_packed = data.draw(st.booleans())
    whole = PACKED if is_packed else PLAIN
    position = data.draw(st.integers(0, len(whole) - 1))
    junk = data.draw(st.binary(max_size=8) | st.just(whole[: 512 * data.draw(st.integers(0, 4))]))
    after = data.draw(st.sampled_from([whole[position:], whole[position + len(junk) :], b""]))
    damaged = whole[:position] + junk + after
    path = tmp_path_factory.getbasetemp() / "damaged.tar.xz"
    path.write_bytes(damaged if is_packed else lzma.compress(damaged, preset=0))
    read(path)


WRONG = (
    *("x", "", "\x00", "\ud800", "1e999", None, True, -1, 0, 1.5, -2.5, 1e308, float("nan"), float("inf")),
    *(10**400, 2**63, 2**63 - 1, [], {}, [1], ["x"], [[]], {"a": 1}, {"a": 10**400}, ["\ud800"], "x" * 5000),
)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    for key, item in items:
        yield (*place, key)
        yield from places(item, (*place, key))


@given(data=st.data())
def test_a_wrong_type_in_any_field_is_a_run_or_a_reason(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lines: list[Any] = [json.loads(line) for line in SOUND.splitlines()]
    if data.draw(st.booleans()):
        lines[0]["script"] = {"command": ["python"], "variant": {"amp": "bf16"}}
    number = data.draw(st.just(0) | st.integers(0, len(lines) - 1))
    *above, last = data.draw(st.sampled_from([*places(lines[number])]))
    at = lines[number]
    for key in above:
        at = at[key]
    at[last] = data.draw(st.sampled_from(WRONG))
    path = tmp_path_factory.getbasetemp() / RANK
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    read(path)
    read_series([path])

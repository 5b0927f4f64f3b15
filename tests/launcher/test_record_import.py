"""Files become runs: rank files are put together, each run is found once, and nothing is skipped silently."""

import codecs
import gzip
import json
import lzma
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_records import write_run
from fake_summaries import changed

from fastlaunch.core.data import to_data
from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.ledger.ids import recorded_run_id
from fastlaunch.lifecycle.importer import find_runs
from fastlaunch.measure.record_files import read_record
from fastlaunch.measure.steptime import read_series
from fastlaunch.measure.summarize import summarize

HEADER = "workload,instance,num_nodes,recipe,batch_size_per_gpu,num_gpus,step_time_s,measured_on,source\n"
ROW = "vit-huge,p5.48xlarge,1,bf16,64,8,0.199,2023-11-15,an article\n"
PRICE = {
    **{"instance": "p5.48xlarge", "service": "ec2", "region": "us-east-1", "purchase": "on-demand"},
    **{"as_of": "2026-07-20", "source": "x"},
}


def test_the_ranks_of_a_run_become_one_run(tmp_path: Path) -> None:
    files = write_run(tmp_path, world_size=3, steps=40, run_id="20261121-090312-k3f9")
    (run,) = find_runs([tmp_path]).runs.values()
    assert run.run_file.id == "20261121-090312-k3f9"
    assert run.summary == summarize([read_record(file) for file in files])
    assert (run.summary.setup.num_gpus, run.summary.problems) == (3, ())
    assert (run.source, run.files) == (tmp_path, tuple(files))


def test_nodes_are_at_least_the_hosts_that_were_seen(tmp_path: Path) -> None:
    first, second = (read_record(file) for file in write_run(tmp_path, world_size=2, steps=40))
    second = replace(second, header={**second.header, "machine": second.header["machine"] | {"host_id": "b"}})
    setup = summarize([first, second]).setup
    assert (setup.num_nodes, setup.fingerprint["num_gpus_per_node"]) == (2, "1")


def test_more_gpus_than_the_instances_have_are_refused_and_more_processes_are_told(tmp_path: Path) -> None:
    ranks = {"instance": "p5.48xlarge", "world_size": 16, "steps": 40}
    files = write_run(tmp_path / "gpus", device_name="NVIDIA H100 80GB HBM3", **ranks)
    write_run(tmp_path / "cpus", device_name="AMD EPYC", run_id="cpus", **ranks)
    write_run(tmp_path / "two", num_nodes=2, run_id="two", **ranks)
    imports = find_runs([tmp_path])
    assert [error.path for error in imports.skipped] == [files[0]]
    notes = {run.summary.setup.num_nodes: len(run.summary.warnings) for run in imports.runs.values()}
    assert notes == {1: 1, 2: 0}


def test_folders_are_searched_to_their_depth(tmp_path: Path) -> None:
    write_run(tmp_path / "a" / "b", steps=40, run_id="one")
    write_run(tmp_path / "c", steps=40, run_id="two")
    (tmp_path / "c" / "rows.csv").write_text(HEADER + ROW)
    (tmp_path / "c" / "log.txt").write_text("what it printed")
    imports = find_runs([tmp_path])
    assert sorted(run.summary.setup.kind for run in imports.runs.values()) == [
        "published",
        "records",
        "records",
    ]
    assert imports.skipped == []


@pytest.mark.parametrize(("suffix", "compress"), [("", None), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_compression_and_a_byte_order_mark_say_nothing(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes] | None
) -> None:
    (file,) = write_run(tmp_path, steps=40, run_id="one")
    (plain,) = find_runs([file]).runs.values()
    series = read_series([file])
    marked = codecs.BOM_UTF8 + file.read_bytes()
    file.unlink()
    file = tmp_path / f"{file.name}{suffix}"
    file.write_bytes(compress(marked) if compress else marked)
    (run,) = find_runs([file]).runs.values()
    assert run.summary == plain.summary
    (marked_series,) = read_series([file])
    assert marked_series.step_times_s == series[0].step_times_s
    # Anywhere else it is damage.
    file.write_bytes(marked.replace(b"\n", b"\n" + codecs.BOM_UTF8, 1))
    with pytest.raises(BadFile):
        find_runs([file])


def test_runs_started_by_hand_are_texts_apart_by_when_they_started(tmp_path: Path) -> None:
    write_run(tmp_path / "a", steps=40, run_id="out", started_at="2026-11-01T12:00:00+00:00")
    write_run(tmp_path / "b", steps=40, run_id="out", started_at="2026-11-01T13:00:00+00:00")
    ids = list(find_runs([tmp_path]).runs)
    assert len(ids) == 2
    assert all(run_id.startswith("out-") for run_id in ids)


@pytest.mark.parametrize("run_id", ["", "../../x", "é" * 80, "-rf"])
def test_ids_of_runs_are_safe_in_names(run_id: str) -> None:
    header = {"run_id": run_id, "started_at": "2026-11-01T12:00:00+00:00", "machine": {"host_id": None}}
    made = recorded_run_id(header)
    assert 0 < len(made) <= 40
    assert made.isascii() and made.replace("-", "").isalnum() and made[0] != "-"


def test_a_copy_of_a_run_counts_once_and_a_differing_run_of_its_id_is_reported(tmp_path: Path) -> None:
    for name, steps in (("a", 40), ("b", 40), ("c", 41)):
        write_run(tmp_path / name, steps=steps)
    imports = find_runs([tmp_path])
    assert [run.source.parent.name for run in imports.runs.values()] == ["a"]
    (problem,) = imports.skipped
    assert f"{tmp_path / 'c' / 'rank-00000-attempt-1.jsonl'}: run run-1-" in problem.message
    assert "differing from" in problem.message


def test_lines_that_say_the_same_are_one_run_however_they_are_written(tmp_path: Path) -> None:
    columns = dict(zip(HEADER.strip().split(","), ROW.strip().split(","), strict=True))
    spelled = {**columns, "step_time_s": " 1.99e-1", "seed": "", "derived": ""}
    (tmp_path / "a.csv").write_text(HEADER + ROW + ROW.replace("0.199", "0.1990 ") + ROW)
    (tmp_path / "b.csv").write_text(
        f"{','.join(reversed(spelled))}\n{','.join(reversed(spelled.values()))}\n"
    )
    imports = find_runs([tmp_path])
    assert len(imports.runs) == 1 and imports.skipped == []
    assert imports.copies == {tmp_path / "a.csv": 2, tmp_path / "b.csv": 1}
    (tmp_path / "repeats.csv").write_text(
        HEADER.replace("\n", ",seed\n") + "".join(ROW.replace("\n", f",{seed}\n") for seed in (1, 2))
    )
    assert len(find_runs([tmp_path / "repeats.csv"]).runs) == 2


def test_rows_whose_digests_begin_alike_are_two_runs(tmp_path: Path) -> None:
    # Of 8 hex digits they were equal.
    rows = [f"vit,p5.48xlarge,1,bf16,64,8,{time},2026-11-01,own\n" for time in ("0.201793", "0.267238")]
    (tmp_path / "rows.csv").write_text(HEADER + "".join(rows))
    imports = find_runs([tmp_path])
    assert len(imports.runs) == 2 and imports.skipped == []


def test_a_damaged_file_is_named_with_its_line_and_the_rest_is_found(tmp_path: Path) -> None:
    write_run(tmp_path / "a", steps=40, run_id="whole")
    first, second = write_run(tmp_path / "b", steps=40, run_id="half", world_size=2)
    lines = second.read_text().splitlines(keepends=True)
    second.write_text("".join([*lines[:3], "{}\n", *lines[3:]]))
    (tmp_path / "a" / "other.jsonl").write_text('{"some": "thing"}\n')
    (tmp_path / "rows.csv").write_text(HEADER + ROW + ROW.replace("0.199", "-1"))
    imports = find_runs([tmp_path])
    texts = [problem.message for problem in imports.skipped]
    assert len(texts) == 3
    assert texts[0].startswith(f"{tmp_path / 'rows.csv'}:3: ") and "step_time_s" in texts[0]
    assert texts[1].startswith(f"{tmp_path / 'a' / 'other.jsonl'}:1: ")
    assert texts[2].startswith(f"{second}:4: ")
    whole, half = imports.runs.values()
    assert whole.summary.problems == ()
    assert half.files == (first,)
    assert half.summary.problems == ("attempt 1: no record of rank 1 of 2",)


def test_a_file_given_alone_must_be_sound(tmp_path: Path) -> None:
    (file,) = write_run(tmp_path, steps=40)
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(BadFile, match=r"rank-00000-attempt-1\.jsonl:1: "):
        find_runs([file])


def test_paths_that_cannot_be_imported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no record file and no CSV in"):
        find_runs([tmp_path])
    with pytest.raises(UserError, match="does not exist"):
        find_runs([tmp_path / "gone"])
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match=r"notes\.txt cannot be imported: its kind is unknown") as error:
        find_runs([tmp_path / "notes.txt"])
    assert error.value.hint is not None and ".jsonl.xz" in error.value.hint


def test_a_file_that_may_not_be_read_is_reported(tmp_path: Path) -> None:
    write_run(tmp_path, steps=40)
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    imports = find_runs([tmp_path])
    assert len(imports.runs) == 1
    assert "loop.jsonl: cannot be read: Too many levels of symbolic links" in imports.skipped[0].message


def test_an_archive_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "x.tar.gz"
    file.write_bytes(gzip.compress(b"not a tar file"))
    with pytest.raises(BadFile, match=r"x\.tar\.gz: cannot be unpacked") as error:
        find_runs([file])
    assert "\n" not in error.value.message


@pytest.mark.parametrize("suffix", ["tar.xz", "tgz"])
def test_an_archive_says_the_same_as_its_files_alone_and_in_a_folder(tmp_path: Path, suffix: str) -> None:
    write_run(tmp_path / "runs" / "one", world_size=2, steps=40, run_id="one")
    write_run(tmp_path / "runs" / "two", steps=40, run_id="two")
    (packed := tmp_path / "packed").mkdir()
    with tarfile.open(packed / f"records.{suffix}", f"w:{'xz' if suffix == 'tar.xz' else 'gz'}") as archive:
        archive.add(tmp_path / "runs", arcname="runs")
        # An archive in an archive could hold another, without end.
        write_run(tmp_path / "inner" / "three", steps=40, run_id="three")
        with tarfile.open(tmp_path / "inner.tar.xz", "w:xz") as inner:
            inner.add(tmp_path / "inner", arcname="inner")
        archive.add(tmp_path / "inner.tar.xz", arcname="inner.tar.xz")
    summaries = {run_id: run.summary for run_id, run in find_runs([tmp_path / "runs"]).runs.items()}
    for path in (packed, packed / f"records.{suffix}"):
        imports = find_runs([path])
        assert imports.skipped == []
        assert {run_id: run.summary for run_id, run in imports.runs.items()} == summaries
        assert {run.source for run in imports.runs.values()} == {packed / f"records.{suffix}"}


def test_of_records_and_an_archive_of_them_the_records_count(tmp_path: Path) -> None:
    """What is in the archive is gone when the run is exported again."""
    files = write_run(tmp_path / "a", world_size=2, steps=40)
    with tarfile.open(tmp_path / "a" / "all.tar.gz", "w:gz") as archive:
        for file in files:
            archive.add(file, arcname=f"a/{file.name}")
    imports = find_runs([tmp_path / "a"])
    assert [(run.source, run.files) for run in imports.runs.values()] == [(tmp_path / "a", tuple(files))]
    assert not imports.skipped


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": "fastlaunch-run/1", "id": 5}', "\xff"])
def test_a_run_file_that_is_not_ours_or_damaged_does_not_stand_in_the_way(
    tmp_path: Path, content: str
) -> None:
    write_run(tmp_path, steps=40)
    (tmp_path / "run.json").write_text(content, encoding="latin-1")
    imports = find_runs([tmp_path])
    assert len(imports.runs) == 1
    assert len(imports.skipped) == (content != "[]")


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "../../elsewhere"},
        {"spec": {"recipe": [1]}},
        {"summary": {"setup": {"num_gpus": 0}}},
        {"summary": {"setup": {"num_gpus": 9, "instance": "p5.48xlarge"}}},
        {"summary": {"timing": {"late": float("nan")}}},
        {"summary": {"quality": {"final_loss": "2"}}},
        {"summary": {"timing": {"step_time_s": {"value": -1.0}}}},
        {"summary": {"timing": {"samples_per_step": -0.5}}},
        {"summary": {"startup": {"boot_s": -1e9}}},
        {"summary": {"figures": {"total_time_s": 0}}},
        {"price": {**PRICE, "usd_per_hour": 5e-324}},
        {"price": {**PRICE, "usd_per_hour": 1e308}},
        {"summary": {"quality": {"checks": [{"name": "isolation", "passed": 1}]}}},
    ],
)
def test_a_run_file_with_a_wrong_value_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    summary = summarize([read_record(file) for file in write_run(tmp_path / "source", steps=40)])
    texts = {"schema": "fastlaunch-run/1", "id": "some-run", "spec": None, "summary": to_data(summary)}
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "run.json"
    file.write_text(json.dumps(texts))
    assert list(find_runs([file.parent]).runs) == ["some-run"]
    if "summary" in changes:
        topics = to_data(summary)
        for name, values in changes["summary"].items():
            topics[name] = topics.get(name, {}) | values
        changes = {"summary": topics}
    file.write_text(json.dumps({**texts, **changes}))
    with pytest.raises(BadFile):
        find_runs([file.parent])


def test_what_its_machine_took_to_start_comes_with_a_run(tmp_path: Path) -> None:
    """It stands in no record, and what the records say is read from them all the same."""
    files = write_run(tmp_path / "run", steps=40, run_id="20261121-090312-k3f9")
    summary = summarize([read_record(file) for file in files])
    known = to_data(changed(summary, boot_s=40.0, pull_s=60.5, final_loss=99.0))
    texts = {"schema": "fastlaunch-run/1", "id": "20261121-090312-k3f9", "spec": None, "summary": known}
    (tmp_path / "run" / "run.json").write_text(json.dumps(texts), encoding="utf-8-sig")
    imports = find_runs([tmp_path])
    assert imports.runs["20261121-090312-k3f9"].summary == changed(summary, boot_s=40.0, pull_s=60.5)

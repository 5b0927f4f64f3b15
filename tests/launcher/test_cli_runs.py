"""`fastlaunch runs`, as it is typed."""

import csv
import io
import json
import os
import stat
import sys
from pathlib import Path

import pytest
from fake_records import write_run

from fastlaunch.cli.main import run
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.jobs.job import Job
from fastlaunch.ledger.ledger import Ledger, open_ledger
from fastlaunch.lifecycle.importer import find_runs
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.records.records import Eval, Profile, record_path

OWN = "20261121-090312-k3f9"
PROFILE = Profile(step=80, num_steps=5, step_time_s=0.12, data_s=0.003, forward_s=0.04, backward_s=0.06)
ROWS = (
    "workload,instance,num_nodes,recipe,batch_size_per_gpu,num_gpus,step_time_s,measured_on,source\n"
    "vit-huge,p5.48xlarge,1,bf16,64,8,0.199,2023-11-15,an article\n"
    "vit-huge,p4d.24xlarge,1,bf16,64,8,0.41,2023-11-15,an article\n"
)


def typed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of `fastlaunch runs WORDS`, without a terminal."""
    capsys.readouterr()
    assert run(["runs", *words]) == code
    out, err = capsys.readouterr()
    return out, err


def asked_for(recipe: str) -> Job:
    return Job(workload="vit-tiny", recipe=resolve_recipe(recipe), batch_size=2, steps=40, num_gpus=1)


def ledger() -> Ledger:
    return open_ledger(load_settings())


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text(ROWS)
    return path


@pytest.fixture
def own(isolated: Path) -> Path:
    """The folder of a run that was started here, and that has ended."""
    folder = isolated / "runs" / OWN
    write_run(folder, steps=40, run_id=OWN, workload="vit-tiny", recipe="compile")
    with ledger() as it:
        it.add_run(
            it.add_submission("fastlaunch submit --local --recipe compile"),
            OWN,
            spec=asked_for("compile").to_json(),
            plan={"request": {"argv": ["python", "-m", "x y"]}},
            workload="vit-tiny",
            recipe="compile",
            backend="local",
            directory=folder,
        )
        it.set_state(OWN, RunState.RUNNING)
        attempt, _ = it.add_attempt([OWN])
        it.set_handle(attempt, {"pid": 5})
        it.set_summary(OWN, find_runs([folder]).runs[OWN].summary)
        it.set_state(OWN, RunState.COMPLETED)
        it.end_attempt(attempt, RunState.COMPLETED)
    return folder


def test_import_and_list(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "records", steps=40, world_size=2, run_id=OWN)
    assert typed(capsys, "import", str(tmp_path)) == ("Imported 3 runs.\n", "next: fastlaunch compare\n")
    assert typed(capsys, "import", str(rows))[0] == "Imported 0 runs, 2 were here already.\n"
    out, err = typed(capsys)
    assert out.splitlines()[3].split()[0] == OWN
    assert (out.splitlines()[-1], err) == ("3 runs in all.", f"next: fastlaunch runs show {OWN}\n")
    _, line, sentence = typed(capsys, "list", "--limit", "1")[0].splitlines()
    assert line.startswith(OWN) and sentence.startswith("3 runs")


def test_a_damaged_file_is_a_warning_in_a_folder_and_an_error_alone(
    tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"kind": "step"}\n')
    out, err = typed(capsys, "import", str(bad), code=2)
    assert out == "" and err.startswith(f"error: {bad}:1: ")
    with ledger() as it:
        assert it.select() == []
    out, err = typed(capsys, "import", str(tmp_path))
    assert out == "Imported 2 runs.\n" and err.startswith(f"warning: skipped {bad}:1: ")


def test_a_list_for_programs(rows: Path, own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed(capsys, "import", str(rows))
    of_csv = list(csv.DictReader(io.StringIO(typed(capsys, "list", "--output", "csv")[0])))
    out, err = typed(capsys, "list", "--output", "json")
    of_json = json.loads(out)
    assert err == "" and [row["id"] for row in of_csv] == [row["id"] for row in of_json]
    assert of_json[0]["directory"] == str(own)
    assert (of_json[1]["step_time_s"], of_json[1]["final_loss"]) == (0.199, None)
    assert (of_csv[1]["step_time_s"], of_csv[1]["final_loss"]) == ("0.199", "")


def test_every_output_of_a_run_for_programs_begins_alike(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = json.loads(typed(capsys, "list", "--output", "json")[0])
    assert (row["id"], row["state"], row["ending"], row["directory"]) == (OWN, "completed", None, str(own))
    shown = json.loads(typed(capsys, "show", OWN, "--output", "json")[0])
    assert run(["status", OWN, "--output", "json"]) == 0
    (current,) = json.loads(capsys.readouterr().out)["runs"]
    typed(capsys, "export", OWN, "--to", str(tmp_path / "to"))
    exported = json.loads((tmp_path / "to" / OWN / "run.json").read_text())
    for data in (shown, current, exported):
        assert {name: data[name] for name in row} == row


def test_rm_takes_the_folder_that_was_made_here(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", "rm", OWN, "--yes"]) == 0
    assert capsys.readouterr().out == "Removed 1 run.\n"
    assert not own.exists() and own.parent.exists()
    with ledger() as it:
        assert it.select() == []


def test_rm_never_deletes_what_was_imported(isolated: Path, tmp_path: Path, rows: Path) -> None:
    inside = isolated / "runs" / "20261101-000000-abcd"
    write_run(inside, steps=40, run_id="20261101-000000-abcd", world_size=2)
    for path in (rows, inside):
        assert run(["runs", "import", str(path)]) == 0
    assert run(["runs", "rm", "backend=import", "--yes"]) == 0
    assert rows.exists()
    assert record_path(inside, rank=0, attempt=1).exists()


def test_rm_keeps_a_folder_outside_the_home(tmp_path: Path, own: Path) -> None:
    elsewhere = tmp_path / OWN
    own.rename(elsewhere)
    own.symlink_to(elsewhere)
    assert run(["runs", "rm", OWN, "--yes"]) == 0
    assert record_path(elsewhere, rank=0, attempt=1).exists()


def test_rm_asks_first(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = typed(capsys, "rm", OWN, code=2)
    assert OWN in err and "--yes" in err
    assert own.exists()


def test_rm_refuses_a_run_that_has_not_ended(capsys: pytest.CaptureFixture[str]) -> None:
    with ledger() as it:
        # Of a backend that this fastlaunch cannot ask, so that nothing ends the run in passing.
        it.add_run(
            it.add_submission("x"), OWN, spec={}, plan={}, workload="w", recipe="r", backend="elsewhere"
        )
        it.set_state(OWN, RunState.RUNNING)
    assert f"fastlaunch cancel {OWN}" in typed(capsys, "rm", OWN, "--yes", code=2)[1]


@pytest.mark.parametrize("name", ["export.tar.gz", "export"])
def test_what_was_exported_is_imported_with_equal_summaries(
    name: str,
    rows: Path,
    own: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = {"profile": PROFILE, "evals": [Eval(step=80, split="test", loss=0.25, num_samples=9, seconds=1.0)]}
    write_run(tmp_path / "many", steps=80, world_size=2, run_id="by hand", status="interrupted", **told)
    for path in (rows, tmp_path / "many"):
        typed(capsys, "import", str(path))
    with ledger() as it:
        before = {run.id: run.summary for run in it.select()}
    target = tmp_path / name
    out, err = typed(capsys, "export", OWN, "backend=import", "--to", str(target))
    assert (out, err) == (f"Exported 4 runs to {target}.\n", f"next: fastlaunch runs import {target}\n")

    monkeypatch.setenv("FASTLAUNCH_HOME", str(tmp_path / "other home"))
    typed(capsys, "import", str(target))
    with ledger() as it:
        assert {run.id: run.summary for run in it.select()} == before
    # And once more: an import can be exported too.
    assert run(["runs", "export", "backend=import", "--to", str(tmp_path / "second")]) == 0
    assert {i: found.summary for i, found in find_runs([tmp_path / "second"]).runs.items()} == before
    assert len(list((tmp_path / "second").glob("*/rank-*.jsonl.xz"))) == 3


def test_an_export_warns_of_what_an_import_will_miss(
    tmp_path: Path, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_path(own, rank=0, attempt=1).unlink()
    with ledger() as it:
        fields = {"spec": {}, "plan": {}, "workload": "vit-tiny", "backend": "local"}
        it.add_run(it.add_submission("x"), "never", recipe="compile", **fields)
        it.set_state("never", RunState.CANCELLED)
    out, err = typed(capsys, "export", "recipe=compile", "--to", str(tmp_path / "out"))
    assert out == f"Exported 2 runs to {tmp_path / 'out'}.\n"
    assert f"{OWN}: its record files are gone" in err and "never: it is cancelled" in err
    assert list(find_runs([tmp_path / "out"]).runs) == [OWN]


def test_an_export_follows_the_umask(tmp_path: Path, own: Path) -> None:
    # Whatever the home's files allow.
    record_path(own, rank=0, attempt=1).chmod(0o600)
    before = os.umask(0o027)
    try:
        for name in ("x.tar.gz", "folder"):
            assert run(["runs", "export", OWN, "--to", str(tmp_path / name)]) == 0
    finally:
        os.umask(before)
    paths = list(tmp_path.rglob("*"))
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
    assert len(modes) == 5
    assert modes == {path: 0o750 if path.is_dir() else 0o640 for path in paths}


@pytest.mark.parametrize("name", ["x.zip", "x.tar", "x.gz"])
def test_an_export_to_another_kind_of_archive_is_refused(
    tmp_path: Path, own: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["runs", "export", OWN, "--to", str(tmp_path / name)]) == 2
    assert ".tar.gz" in capsys.readouterr().err and not (tmp_path / name).exists()


def test_an_export_overwrites_nothing(tmp_path: Path, own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, problem in (("x.tar.gz", "exists already"), ("folder", f"holds run {OWN} already")):
        assert run(["runs", "export", OWN, "--to", str(tmp_path / name)]) == 0
        assert run(["runs", "export", OWN, "--to", str(tmp_path / name)]) == 2
        assert problem in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "x.tar.gz"]


@pytest.mark.parametrize("words", [("show", "\udcff"), ("list", "recipe=\udcff"), ("import", "\udcff.csv")])
def test_arguments_that_are_no_text(words: tuple[str, ...]) -> None:
    assert run(["runs", *words]) == 2


@pytest.mark.parametrize("tracker", ["mlflow", "wandb", "tensorboard"])
def test_an_export_to_a_tracker_needs_its_library(
    tracker: str,
    own: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    _, err = typed(capsys, "export", OWN, "--format", tracker, "--to", str(tmp_path / "out"), code=2)
    assert "[export]" in err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_every_run_has_one_line_with_an_id_that_can_be_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, width: int
) -> None:
    typed(capsys, "import", "--published")
    recipe = "bf16 optimizer_impl=fused parameter_dtype=bf16-master grad_accumulation=2"
    for number in "12":
        write_run(tmp_path / number, recipe=recipe, run_id=f"vit-huge-{'long-' * 20}{number}")
    typed(capsys, "import", str(tmp_path))
    monkeypatch.setenv("COLUMNS", str(width))
    out, _ = typed(capsys, "list")
    _, *lines = out.split("\n\n")[0].splitlines()
    rows = [line for line in lines if not line.startswith(("(left out", "room:"))]
    assert max(map(len, out.splitlines())) <= width
    with ledger() as it:
        ids = [made.id for made in it.select()]
        assert [it.get(line.split()[0]).id for line in rows] == ids
    assert "optimizer_impl=fused" in out.split("\n\n")[1]
    capsys.readouterr()
    assert run(["status"]) == 0
    _, *lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert len([line for line in lines if " completed " in line]) == len(lines) - lines[-1].startswith(
        "(left out"
    )

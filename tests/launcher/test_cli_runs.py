"""`fastlaunch runs`, as it is typed."""

import csv
import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from fake_records import write_run

from fastlaunch.cli.main import run
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.ledger.ledger import Ledger, open_ledger
from fastlaunch.runs.importer import find_runs
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.records.records import Check, Eval, Phase, record_path

OWN = "20261121-090312-k3f9"
ROWS = (
    "workload,instance,num_nodes,recipe,batch_size_per_gpu,num_gpus,step_time_s,measured_on,source\n"
    "vit-huge,p5.48xlarge,1,bf16,64,8,0.199,2023-11-15,an article\n"
    "vit-huge,p4d.24xlarge,1,bf16,64,8,0.41,2023-11-15,an article\n"
)


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command line without a terminal."""

    def type_in(*words: str) -> Done:
        capsys.readouterr()
        returncode = run(list(words))
        return Done(returncode, *capsys.readouterr())

    return type_in


def asked_for(recipe: str) -> JobSpec:
    return JobSpec(workload="vit-tiny", recipe=resolve_recipe(recipe), batch_size=2, steps=40, num_gpus=1)


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


def test_import_and_list_from_the_command_line(
    rows: Path, tmp_path: Path, typed: Callable[..., Done]
) -> None:
    write_run(tmp_path / "records", steps=40, world_size=2, run_id=OWN)
    imported = typed("runs", "import", str(tmp_path))
    assert (imported.returncode, imported.stdout) == (0, "Imported 3 runs.\n")
    assert imported.stderr == "next: fastlaunch compare\n"
    again = typed("runs", "import", str(rows))
    assert again.stdout == "Imported 0 runs, 2 were here already.\n"
    listed = typed("runs")
    assert listed.returncode == 0
    heading, *lines, sentence = listed.stdout.splitlines()
    assert heading.split() == [
        *("run", "when", "backend", "workload", "recipe", "instance", "state", "s/step", "loss"),
    ]
    assert lines[0].split()[1:] == [
        "2023-11-15",
        "import",
        "vit-huge",
        "bf16",
        "p5.48xlarge",
        "completed",
        "0.199",
    ]
    assert lines[2].split()[0] == OWN
    assert sentence == "3 runs."
    assert listed.stderr == f"next: fastlaunch runs show {OWN}\n"


def test_a_damaged_file_in_a_folder_is_a_warning(
    tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"kind": "step"}\n')
    assert run(["runs", "import", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.out == "Imported 2 runs.\n"
    assert told.err.startswith(f"warning: skipped {tmp_path}/bad.jsonl:1: ")


def test_a_damaged_file_alone_is_an_error(tmp_path: Path, rows: Path, typed: Callable[..., Done]) -> None:
    rows.write_text(ROWS.replace("0.41", "0"))
    refused = typed("runs", "import", str(rows))
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.startswith(f"error: {rows}:3: ") and "step_time_s" in refused.stderr
    with ledger() as it:
        assert it.select() == []


def test_a_list_for_programs(rows: Path, own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", "import", str(rows)]) == 0
    capsys.readouterr()
    assert run(["runs", "list", "--output", "csv"]) == 0
    of_csv = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert run(["runs", "list", "--output", "json"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    of_json = json.loads(told.out)
    assert [row["id"] for row in of_csv] == [row["id"] for row in of_json]
    assert of_json[0]["directory"] == str(own)
    assert (of_json[1]["step_time_s"], of_json[1]["final_loss"]) == (0.199, None)
    assert (of_csv[1]["step_time_s"], of_csv[1]["final_loss"]) == ("0.199", "")


def test_the_list_can_be_cut_to_the_newest(rows: Path, own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", "import", str(rows)]) == 0
    capsys.readouterr()
    assert run(["runs", "list", "--limit", "1"]) == 0
    _, line, sentence = capsys.readouterr().out.splitlines()
    assert "p4d.24xlarge" in line
    assert sentence == "3 runs, the last 1 shown."
    assert run(["runs", "list", "--limit", "0"]) == 2
    assert "--limit: '0' is not above 0" in capsys.readouterr().err


def test_show_tells_everything(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", "show", "k3f9"]) == 0
    told = capsys.readouterr()
    lines = [line.strip() for line in told.out.splitlines()]
    assert "command     fastlaunch submit --local --recipe compile" in lines
    assert "python -m 'x y'" in lines
    assert "pid  5" in lines or "handle={'pid': 5}" in told.out
    assert f"token={OWN}-a1" in told.out
    assert [line.split("  ")[1] for line in lines if line.startswith("20") and "  " in line] == [
        "planned",
        "running",
        "completed",
    ]
    assert str(record_path(own, rank=0, attempt=1)) in lines
    assert lines[-1] == f"Run {OWN} is completed: 0.1 s per step, without an interval."
    assert told.err == f"next: fastlaunch compare {OWN}\n"


def test_show_tells_evaluations_checks_and_padding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scored = {"num_samples": 500, "seconds": 2.5, "metric": "accuracy"}
    evals = [
        Eval(step=100, split="validation", loss=None, metric_value=0.5, **scored),
        Eval(step=200, split="validation", loss=0.4, metric_value=0.875, **scored),
        Eval(step=200, split="test", weights="best", loss=0.25, metric_value=0.9125, **scored),
    ]
    checks = [
        Check(name="equivalence", passed=True, value=0.00312, limit=0.01),
        Check(name="isolation", passed=False, detail="28 other samples changed"),
    ]
    ran = [Phase(name="kernels", seconds=0.1, step=0, detail="1 kernel a tensor: fused")]
    write_run(tmp_path, run_id=OWN, phases=ran, evals=evals, checks=checks, num_tokens=512, num_padding=64)
    assert run(["runs", "import", str(tmp_path)]) == 0
    capsys.readouterr()
    assert run(["runs", "show", OWN]) == 0
    told = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in told.splitlines()]
    for line in (
        "step 100 accuracy 0.5 and loss not finite on validation data, current weights"
        " (500 samples in 2.5 s)",
        "step 200 accuracy 0.9125 and loss 0.25 on test data, best weights (500 samples in 2.5 s)",
        "passed equivalence 0.00312, at most 0.01",
        "FAILED isolation (28 other samples changed)",
        "padding_fraction 0.125",
    ):
        assert line in lines
    assert "; 12.5% of the tokens are padding; a forward pass ran 1 kernel a tensor: fused; " in told
    assert "; at the end accuracy 0.9125 and loss 0.25 on test" in told
    assert "; it does NOT pass the check of isolation." in told
    assert run(["runs", "show", OWN, "--output", "json"]) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert (len(summary["evals"]), summary["eval_s"], summary["padding_fraction"]) == (3, 7.5, 0.125)
    assert summary["checks"][1] == {
        "name": "isolation",
        "passed": False,
        "detail": "28 other samples changed",
    }


def test_show_for_programs(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", "show", OWN, "--output", "json"]) == 0
    told = capsys.readouterr()
    data = json.loads(told.out)
    assert told.err == ""
    assert (data["id"], data["state"], data["price"]) == (OWN, "completed", None)
    assert [event["state"] for event in data["history"]] == ["planned", "running", "completed"]
    assert data["attempts"][0]["handle"] == {"pid": 5}
    assert data["summary"]["recipe"] == "compile"


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


def test_rm_asks_first(own: Path, typed: Callable[..., Done]) -> None:
    refused = typed("runs", "rm", OWN)
    assert refused.returncode == 2
    assert OWN in refused.stderr
    assert "there is no terminal to ask on" in refused.stderr and "--yes" in refused.stderr
    assert own.exists()


@pytest.mark.parametrize(("answer", "exit_code"), [("n", 2), ("y", 0)])
def test_rm_does_what_is_answered_on_a_terminal(own: Path, answer: str, exit_code: int) -> None:
    terminal, end = pty.openpty()
    asked = subprocess.Popen(
        [sys.executable, "-m", "fastlaunch", "runs", "rm", OWN],
        stdin=end,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(end)
    os.write(terminal, f"{answer}\n".encode())
    _, told = asked.communicate()
    os.close(terminal)
    assert asked.returncode == exit_code, told
    assert "Remove 1 run and 1 folder with its records? [y/N]" in told
    assert own.exists() == (answer == "n")


def test_rm_refuses_a_run_that_has_not_ended(isolated: Path, typed: Callable[..., Done]) -> None:
    with ledger() as it:
        # Of a backend that this fastlaunch cannot ask, so that nothing ends the run in passing.
        it.add_run(
            it.add_submission("x"), OWN, spec={}, plan={}, workload="w", recipe="r", backend="elsewhere"
        )
        it.set_state(OWN, RunState.RUNNING)
    refused = typed("runs", "rm", OWN, "--yes")
    assert refused.returncode == 2
    assert f"run {OWN} is running\n  end it first: fastlaunch cancel {OWN}" in refused.stderr


@pytest.mark.parametrize("name", ["export.tar.gz", "export.tgz", "export.tar.xz", "export"])
def test_what_was_exported_is_imported_with_equal_summaries(
    name: str,
    rows: Path,
    own: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(tmp_path / "many", steps=80, world_size=2, run_id="by hand", status="interrupted")
    for path in (rows, tmp_path / "many"):
        assert run(["runs", "import", str(path)]) == 0
    with ledger() as it:
        before = {found.id: found.summary for found in it.select()}
    capsys.readouterr()
    target = tmp_path / name
    assert run(["runs", "export", OWN, "backend=import", "--to", str(target)]) == 0
    told = capsys.readouterr()
    assert told.out == f"Exported 4 runs to {target}.\n"
    assert told.err == f"next: fastlaunch runs import {target}\n"

    monkeypatch.setenv("FASTLAUNCH_HOME", str(tmp_path / "other home"))
    assert run(["runs", "import", str(target)]) == 0
    assert capsys.readouterr().err == "next: fastlaunch compare\n"
    with ledger() as it:
        assert {found.id: found.summary for found in it.select()} == before
    # And once more: an import can be exported too.
    assert run(["runs", "export", "backend=import", "--to", str(tmp_path / "second")]) == 0
    assert {i: found.summary for i, found in find_runs([tmp_path / "second"]).runs.items()} == before
    assert len(list((tmp_path / "second").glob("*/rank-*.jsonl.xz"))) == 3


def test_an_export_keeps_what_contradicted_the_request(tmp_path: Path, own: Path) -> None:
    with ledger() as it:
        it.remove([OWN])
        it.add_run(
            it.add_submission("x"),
            OWN,
            spec=asked_for("bf16").to_json(),
            plan={},
            workload="vit-tiny",
            recipe="bf16",
            backend="local",
            directory=own,
        )
        it.set_state(OWN, RunState.FAILED)
    assert run(["runs", "export", OWN, "--to", str(tmp_path / "out")]) == 0
    (found,) = find_runs([tmp_path / "out"]).runs.values()
    assert "the record contradicts the request: recipe" in found.summary.problems[0]


def test_an_export_overwrites_nothing(tmp_path: Path, own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, problem in (("x.tar.gz", "exists already"), ("folder", f"holds run {OWN} already")):
        assert run(["runs", "export", OWN, "--to", str(tmp_path / name)]) == 0
        assert run(["runs", "export", OWN, "--to", str(tmp_path / name)]) == 2
        assert problem in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "x.tar.gz"]


def test_an_export_of_lost_files_says_so(
    tmp_path: Path, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_path(own, rank=0, attempt=1).unlink()
    assert run(["runs", "export", OWN, "--to", str(tmp_path / "x")]) == 0
    assert f"warning: run {OWN}: its record files are gone" in capsys.readouterr().err
    assert list(find_runs([tmp_path / "x"]).runs) == [OWN]


@pytest.mark.parametrize("words", [("show", "\udcff"), ("list", "recipe=\udcff"), ("import", "\udcff.csv")])
def test_arguments_that_are_no_text(words: tuple[str, ...]) -> None:
    assert run(["runs", *words]) == 2

"""`fastlaunch submit --local -- COMMAND`, and what follows."""

import json
import sys
from pathlib import Path

import pytest
from fake_train.launcher import fastlaunch
from fake_train.processes import runs

from fastlaunch.core.log_file import LOG
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.jobs.job import Job
from fastlaunch.ledger.ledger import open_ledger
from fastlaunch.measure.outcome import contradictions, read_records

PYTHON = sys.executable
#: Prints what it was told, and what it finds.
TELL = """
import os, sys, time
print(sys.argv[1:], os.getcwd(), os.environ["FASTLAUNCH_VARIANT"], os.environ["FASTLAUNCH_SCRIPT"])
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a train.py."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write(TELL)
    return folder


def write(script: str) -> None:
    Path("train.py").write_text(script)


def submit(*argv: str, script: tuple[str, ...] = ("train.py",)) -> int:
    return fastlaunch("submit", "--local", *argv, "--", PYTHON, *script)


def log_of(number: int) -> str:
    directory = runs()[number].directory
    assert directory is not None
    return (directory / LOG).read_text()


@pytest.mark.slow
def test_variants_run_here_in_rounds_and_are_compared(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("-L", "amp=bf16,fp32", "--baseline", "amp=fp32", "--repeats", "2")
    assert submit(*options, script=("train.py", "--amp={amp}")) == 0
    out, err = capsys.readouterr()
    stored = runs()
    labels = ["amp=fp32", "amp=bf16", "amp=bf16", "amp=fp32"]
    assert [(run.workload, run.recipe) for run in stored] == [("train.py", label) for label in labels]
    assert {run.state for run in stored} == {RunState.COMPLETED}
    told = f"['--amp=fp32'] {here} {json.dumps({'amp': 'fp32'})} train.py"
    assert log_of(0).splitlines()[0] == told
    assert sorted(here.iterdir()) == [here / "train.py"]
    first, second, *_ = stored
    assert first.directory and first.spec and second.spec
    records, _ = read_records(first.directory.glob("rank-*.jsonl"))
    assert not contradictions(Job.from_json(first.spec), records)
    assert len(contradictions(Job.from_json(second.spec), records)) == 1
    assert "amp=bf16" in out and "[4/4] amp=fp32: completed" in err

    with open_ledger(load_settings()) as ledger:
        scripts = [run.script for run in ledger.fetch_comparable()]
    assert [script and script.variant for script in scripts[:2]] == [(("amp", "fp32"),), (("amp", "bf16"),)]
    assert {script and script.typed for script in scripts} == {("--", PYTHON, "train.py", "--amp={amp}")}

    assert fastlaunch("compare", "--output", "json") == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["baseline"] == "amp=fp32"
    assert [row["recipe"] for row in compared["rows"]] == ["amp=fp32", "amp=bf16"]
    assert [row["num_runs"] for row in compared["rows"]] == [2, 2]
    assert {row["convergence"]["verdict"] for row in compared["rows"]} == {"unknown"}
    assert fastlaunch("compare", "--baseline", "amp=bf16", "--why", "amp=fp32") == 0
    assert capsys.readouterr().out.startswith("train.py, amp=fp32: ")


@pytest.mark.slow
def test_what_is_added_to_a_submission_is_of_its_workload(capsys: pytest.CaptureFixture[str]) -> None:
    write("")
    assert submit("-L", "t=1,2", script=("train.py", "{t}")) == 0
    add = ("--add-to", runs()[0].submission_id)
    assert fastlaunch("submit", "--local", *add) == 2
    assert fastlaunch("submit", "--instance", "p5.48xlarge", "--dry-run", *add) == 2
    assert capsys.readouterr().err.count("trains train.py, and these runs would train") == 2
    assert submit(*add, script=("train.py", "1")) == 0
    assert "as is is a row of its own: " in capsys.readouterr().err
    assert len(runs()) == 3


def compared(capsys: pytest.CaptureFixture[str], *options: str) -> list[tuple[str, int]]:
    """The rows of all runs, as their workloads and numbers of runs."""
    capsys.readouterr()
    assert fastlaunch("compare", "--every-run", "--output", "json", *options) == 0
    return [(row["workload"], row["num_runs"]) for row in json.loads(capsys.readouterr().out)["rows"]]


@pytest.mark.slow
def test_a_script_is_its_path_and_its_contents(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "train.py").write_text("import model")
        Path(folder, "model.py").write_text("")
        assert submit(script=(f"{folder}/train.py",)) == 0
    Path("b/model.py").write_text("# other")
    assert submit(script=("a/train.py",)) == 0
    assert compared(capsys) == [("a/train.py", 2), ("b/train.py", 1)]
    first = runs()[0]
    Path("a/model.py").write_text("# edited")
    assert submit("--add-to", first.submission_id, script=("a/train.py",)) == 0
    assert "a/model.py changed since" in capsys.readouterr().err
    assert compared(capsys) == [("a/train.py", 2), ("a/train.py", 1), ("b/train.py", 1)]
    assert compared(capsys, "--any-version") == [("a/train.py", 3), ("b/train.py", 1)]
    assert first.summary and first.summary.setup.version
    assert fastlaunch("runs", "list", f"version={first.summary.setup.version[:8]}*", "--output", "json") == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


@pytest.mark.slow
def test_each_run_is_of_what_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    # An edit while rounds are under way.
    write("import os\nif os.environ['FASTLAUNCH_ROUND'] == '2': open(__file__, 'a').write('#')")
    assert submit("--repeats", "3") == 0
    assert capsys.readouterr().err.count("train.py changed since the last such run") == 1
    first, second, third = (run.summary.setup.version for run in runs() if run.summary)
    assert first == second != third


@pytest.mark.slow
def test_what_a_script_records_of_its_steps_is_measured() -> None:
    write(
        "import sys, time, fastlaunch_train as fl\n"
        "fl.step()\n"
        "for _ in range(25):\n"
        "    time.sleep(0.001)\n"
        "    fl.step(num_samples=int(sys.argv[1]) or None)\n"
        "fl.evaluate(loss=2.0)\n"
    )
    assert submit("-L", "n=4,0", script=("train.py", "{n}")) == 0
    sized, bare = (run.summary for run in runs())
    assert sized is not None and bare is not None
    assert (sized.setup.variant, sized.setup.batch_size_per_gpu) == ({"n": "4"}, 4)
    assert (bare.setup.global_batch, bare.timing.samples_per_step) == (None, None)
    assert sized.timing.step_time_s is not None and bare.timing.step_time_s is not None
    assert (sized.seed, sized.pair_number, sized.num_steps, sized.problems) == (None, 1, 25, ())


@pytest.mark.slow
def test_ranks_that_record_nothing_leave_a_run_completed_and_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(
        "import os, sys, time, fastlaunch_train as fl\n"
        "for _ in range(int(sys.argv[1])):\n"
        "    time.sleep(0.001)\n"
        "    if os.environ['RANK'] == '0': fl.step(num_samples=4)\n"
        # The silent rank fails first, and torchrun sees it before this one fails.
        "if sys.argv[1] == '1' and os.environ['RANK'] == '0': time.sleep(3)\n"
        "sys.exit(sys.argv[1] == '1')"
    )
    assert submit("--nproc", "2", script=("train.py", "0")) == 0
    assert submit("--nproc", "2", script=("train.py", "40")) == 0
    captured = capsys.readouterr()
    silent, alone = runs()
    assert {run.state for run in (silent, alone)} == {RunState.COMPLETED}
    assert silent.summary is not None and silent.summary.figures.total_time_s is not None
    assert alone.summary is not None and alone.summary.timing.samples_per_step == 4
    assert alone.summary.uncounted[0] in " ".join((captured.out + captured.err).split())
    assert submit("--nproc", "2", script=("train.py", "1")) == 1
    assert (runs()[2].state, runs()[2].reason) == (RunState.FAILED, "failed: exit code 1")


def test_dry_run_prints_each_command_and_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("-L", "a=1,2", "--repeats", "3", "--dry-run", script=("train.py", "{a}")) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.endswith(":")] == [
        f"a={text} on train.py, 3 times:" for text in (1, 2)
    ]
    assert f"-- {PYTHON} train.py 2\n" in out and "Planned, not started: 6 runs" in out
    assert not load_settings().home.exists()


def test_a_script_goes_on_with_what_it_left_in_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    write(
        "import os, pathlib, sys\n"
        "kept = pathlib.Path(os.environ['FASTLAUNCH_OUTPUT'], 'checkpoint')\n"
        "there, _ = kept.exists(), kept.touch()\n"
        "sys.exit(0 if there else 5)\n"
    )
    assert submit() == 1
    assert fastlaunch("resume", runs()[0].id) == 0
    (run,) = runs()
    assert run.state is RunState.COMPLETED
    assert run.directory and (run.directory / "rank-00000-attempt-2.jsonl").is_file()


def test_a_script_that_left_nothing_does_not_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    write("raise SystemExit(5)")
    assert submit() == 1
    assert fastlaunch("resume", runs()[0].id) == 2
    assert "$FASTLAUNCH_OUTPUT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--", PYTHON, "train.py"], f"fastlaunch submit --local -- {PYTHON} train.py"),
        (["--local", PYTHON, "train.py"], "write --"),
        (["--local", "--"], "no command follows --"),
        (["--local", "-L", "a=1"], "-L is for a script"),
        (["--local", "--nproc", "few"], "--nproc"),
        (["--local", "--container", "--backend", "sagemaker", "--", "x"], "--container"),
        (
            ["--local", "--recipe", "bf16", "--steps", "7", "--", PYTHON, "train.py"],
            "script of your own: --recipe, --steps",
        ),
        (["--local", "--hang-timeout", "0", "--", PYTHON, "train.py"], "--hang-timeout"),
    ],
)
def test_what_is_wrong_ends_with_2_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], argv: list[str], part: str
) -> None:
    assert fastlaunch("submit", *argv) == 2
    out, err = capsys.readouterr()
    assert part in err and out == ""
    assert not load_settings().home.exists()

"""`fastlaunch submit --local`, with the training entrypoint played by fake_train/entrypoint.py."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_train.launcher import CPU, fastlaunch
from fake_train.processes import is_training, launcher, runs, wait_until

import fastlaunch_train
from fastlaunch.cli.main import run
from fastlaunch.core.paths import training_package
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import open_ledger
from fastlaunch.lifecycle.world import commit_of, local_settings

TRAIN = str(Path(fastlaunch_train.__file__).parents[1])


def planned(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a dry run prints on stdout."""
    assert fastlaunch("submit", "--local", "--dry-run", *argv) == 0
    return capsys.readouterr().out


def test_submit_runs_stores_and_answers_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("submit", "--local", "--recipe", "fp32,bf16", "--steps", "70", "--repeats", "2", "--seed", "3")
    assert fastlaunch(*argv) == 0
    out, err = capsys.readouterr()
    stored = runs()
    assert [(run.recipe, run.state) for run in stored] == [
        (recipe, RunState.COMPLETED) for recipe in ("fp32", "bf16", "bf16", "fp32")
    ]
    assert len({run.submission_id for run in stored}) == 1
    first = stored[0]
    assert first.spec is not None and first.plan is not None and first.summary is not None
    assert (first.backend, first.workload, first.instance) == ("local", "vit-tiny", None)
    assert (first.spec["seed"], first.spec["recipe"]["precision"]) == (3, "fp32")
    assert first.plan["request"]["directory"] == str(first.directory)
    assert (first.summary.num_steps, first.summary.seed, first.summary.problems) == (70, 3, ())
    with open_ledger(load_settings()) as ledger:
        assert ledger.command_of(first.submission_id) == f"fastlaunch {' '.join(argv)}"
        (attempt,) = ledger.attempts_of(first.id)
        assert attempt.ended_at is not None
    # Known answer: every block says 1 ms per step, so 8 images are 8,000 a second.
    assert re.search(rf"^{first.id} +fp32 +completed +1.00 ms +8,000", out, re.MULTILINE)
    assert fastlaunch("compare", "--output", "json") == 0
    answer = json.loads(capsys.readouterr().out)["answer"]
    assert " ".join(out.splitlines()).endswith(answer["sentence"])
    assert err.splitlines()[-1] == "next: fastlaunch compare"
    assert "[1/4] fp32: step 70/70" in err and "\r" not in err and "\x1b" not in err


def test_dry_run_as_json_is_a_plan_or_a_list_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads(planned(capsys, "--output", "json"))
    assert (plan["backend"], plan["operation"], plan["placeholders"]) == ("local", "exec", ["run-id"])
    plans = json.loads(planned(capsys, "--output", "json", "--repeats", "3"))["plans"]
    argvs = [each["request"].pop("argv") for each in plans]
    argv = plan["request"].pop("argv")
    assert [each["request"]["env"].pop("FASTLAUNCH_ROUND") for each in plans] == ["1", "2", "3"]
    assert plan["request"]["env"].pop("FASTLAUNCH_ROUND") == "1"
    assert plans == [plan] * 3
    at = argv.index("--seed") + 1
    assert argvs == [[*argv[:at], str(seed), *argv[at + 1 :]] for seed in range(3)]
    assert not load_settings().home.exists()


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--local", "--recipe", "bf16,te-fp8"], "the nearest that can: --recipe bf16"),
        (["--local", "--instance", "p5.48xlarg"], "p5.48xlarge"),
        (["--local", "--steps", "-3"], "--steps"),
        (["--local", "--batch-size", "big"], "--batch-size"),
        (["--local", "--until-resolved"], "name several: --recipe bf16,compile"),
        (["--local", "--max-rounds", "4"], "--until-resolved"),
        (["--local", "--recipe", "bf16,fp32", "--until-resolved", "--steps", "9"], "give more steps"),
        (["--local", "--add-to", "sub-0"], "there is no submission sub-0"),
        (["--local", "--until-resolved", "--max-rounds", "13"], "give 3 to 12"),
        (["--local", "--backend", "ec2"], "give one of the two"),
        (["--local", "--container"], "--backend sagemaker"),
        (["--backend", "locl"], "local"),
        (["--backend", "ec2"], "--instance p5.48xlarge"),
        (["--set", "optimizer=sgd"], "type: fastlaunch submit --set optimizer=sgd --local"),
        *(
            (["--local", *option], f"{option[0]} is for AWS")
            for option in (("--detach",), ("--max-cost", "5"), ("--requirements", "r.txt"))
        ),
    ],
)
def test_what_is_wrong_ends_with_2_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], argv: list[str], part: str
) -> None:
    assert fastlaunch("submit", *argv) == 2
    out, err = capsys.readouterr()
    assert part in err and out == ""
    assert not load_settings().home.exists()


def test_runs_that_are_added_to_a_submission_are_compared_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("submit", "--local", "--recipe", "bf16", "--steps", "25")
    assert fastlaunch(*argv) == 0
    first = runs()[0].submission_id
    assert fastlaunch(*argv, "--seed", "2", "--add-to", first) == 0
    assert fastlaunch(*argv, "--seed", "4", "--add-to", runs()[-1].submission_id) == 0
    capsys.readouterr()
    assert fastlaunch("compare", "--output", "json") == 0
    assert [row["num_runs"] for row in json.loads(capsys.readouterr().out)["rows"]] == [3]


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("out_of_memory", "out of memory: tried to allocate 2.00 GiB"),
        ("killed", "rank 0 ended without saying how, after step 20"),
    ],
)
def test_failed_run_exits_1_with_its_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, status: str, reason: str
) -> None:
    monkeypatch.setenv("FAKE_STATUS", status)
    assert fastlaunch("submit", "--local", "--steps", "20") == 1
    (run,) = runs()
    assert (run.state, run.reason) == (RunState.FAILED, reason)
    assert run.summary is not None and run.summary.num_steps == 20
    assert reason in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_the_run_keeps_its_records_and_starts_no_other(number: signal.Signals) -> None:
    argv = ["submit", "--local", "--steps", "100000", "--repeats", "3"]
    with launcher(*argv, FAKE_STEP_S="0.01") as process:
        wait_until(is_training)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    by = "Ctrl-C" if number == signal.SIGINT else number.name
    first, *others = runs()
    assert (first.state, first.reason) == (RunState.INTERRUPTED, f"stopped by {by}")
    assert first.summary is not None and first.summary.num_steps > 0
    # It wrote its own end: it was asked, not killed.
    assert first.summary.status == "interrupted"
    assert {(run.state, run.reason) for run in others} == {(RunState.CANCELLED, f"stopped by {by}")}
    assert first.id in out


@pytest.mark.slow
def test_second_ctrl_c_kills_at_once() -> None:
    argv = ["submit", "--local", "--steps", "100000", "--repeats", "2"]
    with launcher(*argv, FAKE_STEP_S="0.01", FAKE_DEAF="1") as process:
        wait_until(is_training)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
    assert [run.state for run in runs()] == [RunState.INTERRUPTED, RunState.CANCELLED]


@pytest.mark.slow
def test_two_launchers_at_once_do_not_disturb_each_other() -> None:
    argv = ["submit", "--local", "--steps", "70", "--repeats", "3"]
    with launcher(*argv, FAKE_STEP_S="0.005") as one, launcher(*argv, FAKE_STEP_S="0.005") as two:
        assert one.communicate(timeout=60)[0].count("completed") == 3
        assert two.communicate(timeout=60)[0].count("completed") == 3
    assert (one.returncode, two.returncode) == (0, 0)
    assert [run.state for run in runs()] == [RunState.COMPLETED] * 6
    assert len({run.submission_id for run in runs()}) == 2


def test_entrypoint_is_importable_and_keeps_what_the_user_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = local_settings(tmp_path, CPU, {})
    assert (alone.pythonpath, alone.num_cores) == (TRAIN, CPU.num_cores)
    assert alone.launch[:3] == (sys.executable, "-m", "torch.distributed.run")
    with_more = local_settings(tmp_path, CPU, {"PYTHONPATH": "/their/own", "OMP_NUM_THREADS": "1"})
    assert (with_more.pythonpath, with_more.num_cores) == (os.pathsep.join([TRAIN, "/their/own"]), None)
    assert local_settings(tmp_path, CPU, {"PYTHONPATH": f"/their/own:{TRAIN}"}).pythonpath is None
    assert local_settings(tmp_path, replace(CPU, devices=("NVIDIA L4",)), {}).num_cores is None
    # The job starts elsewhere than where the ledger is read one day.
    monkeypatch.chdir(tmp_path)
    assert local_settings(Path("home"), CPU, {}).home == tmp_path / "home"


def test_the_commit_is_that_of_the_training_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = shutil.copytree(training_package() / "records", tmp_path / "train")
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "ada")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "ada@example.com")
    assert commit_of(package) is None
    for command in (["init"], ["add", "."], ["commit", "--message", "x"]):
        subprocess.run(["git", "-C", str(package), *command], check=True, capture_output=True)
    commit_of.cache_clear()
    commit = commit_of(package)
    assert commit is not None and re.fullmatch("[0-9a-f]{40}", commit)
    (package / "__init__.py").write_text("")
    commit_of.cache_clear()
    assert commit_of(package) == f"{commit}-dirty"


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        ("submit --recipe bf-16", "unknown recipe 'bf-16'", "did you mean bf16 or "),
        ("sweep --recipe bf-16", "unknown recipe 'bf-16'", "did you mean bf16 or "),
        ("submit --workload vit-hug", "unknown workload 'vit-hug'", "did you mean vit-huge or "),
        ("submit --experiment foo", "unknown experiment 'foo'", "known: "),
        ("submit --purchase spto", "unknown purchase option 'spto'", "did you mean spot?"),
        (
            "submit -L ckpt=a,b -- python fit.py --ckpt {ckp}",
            "no -L fills {ckp} in the command",
            "did you mean {ckpt}?",
        ),
    ],
)
def test_a_wrong_name_is_reported_before_a_missing_place(
    capsys: pytest.CaptureFixture[str], argv: str, message: str, hint: str
) -> None:
    command, *words = argv.split()
    assert run([command, "--dry-run", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}\n  {hint}")


def test_a_placeholder_that_resembles_no_list_is_not_taken_for_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lists = ["-L", "amp=bf16,fp32", "-L", "ampere=1,2"]
    assert run(["submit", "--local", *lists, "--", "python", "fit.py", "--amp", "{amp}", "{out}"]) == 2
    assert "the command has no {ampere}, in whose place" in capsys.readouterr().err

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
from fastlaunch.core.paths import training_package
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.jobs.machine import this_machine
from fastlaunch.ledger.ledger import open_ledger
from fastlaunch.lifecycle.world import CLOUD, commit_of, local_settings, make_backends

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


def test_json_output_is_one_object_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert fastlaunch("submit", "--local", "--steps", "5", "--output", "json") == 0
    data = json.loads(capsys.readouterr().out)
    assert [run["state"] for run in data["runs"]] == ["completed"]
    assert data["runs"][0]["summary"]["num_steps"] == 5


def test_dry_run_prints_the_same_plan_twice_and_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--recipe", "fp32,bf16", "--steps", "7", "--repeats", "3", "--seed", "4")
    out = planned(capsys, *argv)
    assert out == planned(capsys, *argv)
    lines = out.splitlines()
    assert [line for line in lines if line.endswith(":")] == [
        *("fp32 on vit-tiny, 3 times, seeds 4 to 6:", "bf16 on vit-tiny, 3 times, seeds 4 to 6:"),
    ]
    assert "--workload vit-tiny --recipe bf16 --batch-size 8 --steps 7" in out and "<run-id>" in out
    assert "6 runs" in lines[-1]
    assert not load_settings().home.exists()


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


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--local", "--recipe", "bf16,te-fp8"], "the nearest that can: --recipe bf16"),
        (["--local", "--instance", "p5.48xlarg"], "p5.48xlarge"),
        (["--local", "--steps", "-3"], "--steps"),
        (["--local", "--batch-size", "big"], "--batch-size"),
        (["--local", "--repeats", "0", "--dry-run"], "--repeats is 0"),
        (["--local", "--until-resolved"], "name several: --recipe bf16,compile"),
        (["--local", "--max-rounds", "4"], "--until-resolved"),
        (["--local", "--recipe", "bf16,fp32", "--until-resolved", "--steps", "9"], "give more steps"),
        (["--local", "--add-to", "sub-0"], "there is no submission sub-0"),
        (["--local", "--batch-size", "aut"], "auto-each"),
        (["--local", "--until-resolved", "--max-rounds", "13"], "give 3 to 12"),
        (["--local", "--until-resolved", "--repeats", "6"], "--max-rounds 6"),
        (["--local", "--backend", "ec2"], "give one of the two"),
        (["--local", "--container"], "--backend sagemaker"),
        (["--backend", "locl"], "local"),
        (["--backend", "ec2"], "--instance p5.48xlarge"),
        (["--set", "optimizer=sgd"], "type: fastlaunch submit --set optimizer=sgd --local"),
        *(
            (["--local", *option], f"{option[0]} is for AWS")
            for option in (
                ("--detach",),
                ("--max-cost", "5"),
                ("--purchase", "spot"),
                ("--subnet", "a=b"),
                ("--max-hours", "3"),
                ("--num-nodes", "2"),
                ("--region", "us-west-2"),
                ("--no-account-timer",),
                ("--requirements", "r.txt"),
                ("--input", "d=s3://b-1"),
            )
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


def test_missing_torch_is_reported_before_anything_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    machine = replace(CPU, modules=frozenset({"torch"}))
    assert fastlaunch("submit", "--local", machine=machine) == 2
    err = capsys.readouterr().err
    assert "timm" in err and "pip install '.[train]'" in err
    assert not load_settings().home.exists()


def test_bf16_on_a_gpu_that_emulates_it_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("submit", "--local", "--dry-run", "--recipe", "bf16,fp32", "--repeats", "2")
    assert fastlaunch(*argv, machine=replace(CPU, devices=("Tesla T4",) * 2)) == 0
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: recipe bf16: Tesla T4 emulates bf16")


def test_rehearsal_names_what_it_does_not_cover(capsys: pytest.CaptureFixture[str]) -> None:
    """The command for AWS, with --local."""
    argv = ("--instance", "ml.p5.48xlarge,ml.p4d.24xlarge", "--recipe", "te-fp8", "--steps", "5")
    assert fastlaunch("submit", "--local", *argv, "--num-nodes", "2", "--purchase", "spot") == 0
    err = capsys.readouterr().err
    assert "rehearsing for p5.48xlarge on this machine" in err
    assert re.search(r"^  nodes +2; here: 1$", err, re.MULTILINE)
    assert "rehearsed with vit-wide" in err and "rehearsed as bf16" in err
    (run,) = runs()
    assert (run.workload, run.recipe, run.instance) == ("vit-wide", "bf16", None)


def test_rounds_end_when_all_is_settled(capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of recipes that are alike take as long here: they tie at the first look."""
    argv = ("submit", "--local", "--recipe", "bf16,fp32", "--steps", "25", "--until-resolved")
    assert fastlaunch(*argv) == 0
    assert re.search(r"after round 3 of at most 8: fp32 1x \(.*\), tie", capsys.readouterr().err)
    done = [run for run in runs() if run.state is RunState.COMPLETED]
    assert len(done) == 6 and all(run.is_unneeded for run in runs() if run not in done)
    assert fastlaunch("compare", "--why", "fp32") == 0
    out, err = capsys.readouterr()
    assert "settled after round 3 of at most 8" in out and "warning" not in err


def test_runs_that_are_added_to_a_submission_are_compared_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("submit", "--local", "--recipe", "bf16", "--steps", "25")
    assert fastlaunch(*argv) == 0
    first = runs()[0].submission_id
    assert fastlaunch(*argv, "--seed", "2", "--add-to", first) == 0
    assert fastlaunch(*argv, "--seed", "4", "--add-to", runs()[-1].submission_id) == 0
    capsys.readouterr()
    assert fastlaunch("compare", "--output", "json") == 0
    assert [row["num_runs"] for row in json.loads(capsys.readouterr().out)["rows"]] == [3]


def test_what_the_launcher_believes_the_entrypoint_may_refuse(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STATUS", "refused")
    assert fastlaunch("submit", "--local", "--recipe", "compile", "--repeats", "3") == 1
    out, err = capsys.readouterr()
    first, *others = runs()
    assert (first.recipe, first.state) == ("compile", RunState.FAILED)
    assert first.reason == "it ended before its first record: error: this machine cannot run that"
    assert [run.state for run in others] == [RunState.CANCELLED] * 2
    assert (out + err).count("this machine cannot run that") == 1, "a reason is printed once"


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


def test_home_that_cannot_be_written_is_reported_before_training(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTLAUNCH_HOME", str(tmp_path / "file" / "home"))
    assert fastlaunch("submit", "--local") == 2
    assert "set FASTLAUNCH_HOME" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ],
)
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


def test_every_backend_is_made_under_its_name() -> None:
    backends = make_backends(load_settings(), lambda: CPU)
    assert list(backends) == ["local", *CLOUD]
    assert all(backend.name == name for name, backend in backends.items())


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


def test_this_machine_hides_gpus_that_cuda_hides() -> None:
    assert this_machine({"CUDA_VISIBLE_DEVICES": ""}).devices == ()

"""`fastlaunch submit`, with the training entrypoint played by fake_train/entrypoint.py."""

import json
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_train.launcher import CPU, fastlaunch
from fake_train.processes import is_training, launcher, runs, wait_until

from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import open_ledger


def test_submit_runs_and_answers_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert fastlaunch("submit", "--local", "--steps", "100", "--repeats", "2") == 0
    out, err = capsys.readouterr()
    assert [run.state for run in runs()] == [RunState.COMPLETED] * 2
    # Known answer: every block says 1 ms per step, so 8 images are 8,000 a second.
    assert out.splitlines()[-1] == (
        "bf16 on vit-tiny, batch 8: 1.00 ms per step (1.00 to 1.00), 8000 images/s over 2 runs."
    )
    assert re.search(rf"^{runs()[0].id} +bf16 +completed +1.00 ms +8000", out, re.MULTILINE)
    assert err.splitlines()[-1] == "next: fastlaunch compare"
    assert "[1/2] bf16: step 100/100, 8000 images/s, loss 2.010" in err
    assert "\r" not in err and "\x1b" not in err


def test_spec_plan_and_summary_are_stored() -> None:
    assert fastlaunch("submit", "--local", "--recipe", "fp32", "--steps", "100", "--seed", "3") == 0
    (run,) = runs()
    assert run.spec is not None and run.plan is not None and run.summary is not None
    assert (run.backend, run.workload, run.recipe, run.instance) == ("local", "vit-tiny", "fp32", None)
    assert (run.spec["seed"], run.spec["recipe"]["precision"]) == (3, "fp32")
    assert run.plan["request"]["directory"] == str(run.directory)
    assert (run.summary.num_steps, run.summary.seed, run.summary.problems) == (100, 3, ())
    with open_ledger(load_settings()) as ledger:
        states = [event.state for event in ledger.history(run.id)]
        assert states == [RunState.PLANNED, RunState.RUNNING, RunState.COMPLETED]
        assert ledger.command_of(run.submission_id) == (
            "fastlaunch submit --local --recipe fp32 --steps 100 --seed 3"
        )
        (attempt,) = ledger.attempts_of(run.id)
        assert attempt.ended_at is not None


def test_recipes_are_interleaved_in_one_submission(capsys: pytest.CaptureFixture[str]) -> None:
    assert fastlaunch("submit", "--local", "--recipe", "fp32,bf16", "--steps", "70", "--repeats", "2") == 0
    assert [run.recipe for run in runs()] == ["fp32", "bf16", "bf16", "fp32"]
    assert len({run.submission_id for run in runs()}) == 1
    assert re.fullmatch(
        r"(fp32|bf16) on vit-tiny, batch 8: 1.00 ms per step \(1.00 to 1.00\), "
        r"8000 images/s over 2 runs; (fp32|bf16) 1.00 ms per step, too close to tell apart.",
        capsys.readouterr().out.splitlines()[-1],
    )


def test_json_output_is_one_object_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert fastlaunch("submit", "--local", "--steps", "20", "--output", "json") == 0
    data = json.loads(capsys.readouterr().out)
    assert [run["state"] for run in data["runs"]] == ["completed"]
    assert data["runs"][0]["summary"]["num_steps"] == 20


def test_too_few_steps_for_a_step_time_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert fastlaunch("submit", "--local", "--steps", "5") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("No step time: ")


def test_dry_run_prints_the_same_plan_twice_and_does_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    without_torch = replace(CPU, modules=frozenset())
    shown = []
    for _ in range(2):
        assert fastlaunch("submit", "--local", "--dry-run", "--steps", "7", machine=without_torch) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert "--workload vit-tiny --recipe bf16 --batch-size 8 --steps 7" in shown[0]
    assert "<run-id>" in shown[0]
    assert not load_settings().home.exists()


def test_dry_run_of_repeats_shows_each_recipe_once(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("submit", "--local", "--recipe", "fp32,bf16", "--repeats", "3", "--seed", "4", "--dry-run")
    assert fastlaunch(*argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith(":")] == [
        *("fp32 on vit-tiny, 3 times, seeds 4 to 6:", "bf16 on vit-tiny, 3 times, seeds 4 to 6:"),
    ]
    assert lines[-1].startswith("Planned, not started: 6 runs")


def test_dry_run_as_json_is_a_plan_or_a_list_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert fastlaunch("submit", "--local", "--dry-run", "--output", "json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert list(plan) == [
        *("backend", "operation", "request", "placeholders"),
        *("max_cost_usd", "usd_per_hour", "price_as_of"),
    ]
    assert (plan["backend"], plan["operation"], plan["placeholders"]) == ("local", "exec", ["run-id"])
    assert fastlaunch("submit", "--local", "--dry-run", "--output", "json", "--repeats", "3") == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    argvs = [one["request"].pop("argv") for one in plans]
    argv = plan["request"].pop("argv")
    assert plans == [plan] * 3
    at = argv.index("--seed") + 1
    assert argvs == [[*argv[:at], str(seed), *argv[at + 1 :]] for seed in range(3)]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--recipe", "bf17"], "bf16"),
        (["--workload", "vit-tny"], "vit-tiny"),
        (["--instance", "p5.48xlarg"], "p5.48xlarge"),
        (["--set", "compil_mode=default"], "compile_mode"),
        (["--set", "compile_mode"], "FIELD=VALUE"),
        (["--steps", "0"], "steps is 0"),
        (["--steps", "-3"], "'-3' is not a count"),
        (["--batch-size", "0"], "batch size is 0"),
        (["--batch-size", "-8"], "'-8' is not a count"),
        (["--batch-size", "big"], "'big' is not a count"),
        (["--repeats", "0"], "repeats is 0"),
        (["--nproc", "0"], "number of processes is 0"),
        (["--backend", "locl"], "local"),
        (["--data", "real"], "folder:PATH"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_bad_values_exit_2_and_write_nothing(
    capsys: pytest.CaptureFixture[str], argv: list[str], told: str, more: list[str]
) -> None:
    local = [] if "--backend" in argv else ["--local"]
    assert fastlaunch("submit", *local, *argv, *more) == 2
    out, err = capsys.readouterr()
    assert told in err and out == ""
    assert not load_settings().home.exists()


def test_without_a_backend_the_command_to_type_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert fastlaunch("submit", "--set", "optimizer=sgd") == 2
    assert "type: fastlaunch submit --set optimizer=sgd --local" in capsys.readouterr().err


def test_two_backends_at_once_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert fastlaunch("submit", "--local", "--backend", "ec2") == 2
    assert "give one of the two" in capsys.readouterr().err


def test_missing_torch_is_told_before_anything_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    machine = replace(CPU, modules=frozenset({"torch"}))
    assert fastlaunch("submit", "--local", machine=machine) == 2
    err = capsys.readouterr().err
    assert "training here needs timm" in err and "pip install 'fastlaunch[train]'" in err
    assert not load_settings().home.exists()


def test_bf16_on_a_gpu_that_emulates_it_is_told_before_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def told(device: str, recipe: str) -> list[str]:
        argv = ("submit", "--local", "--dry-run", "--recipe", recipe, "--repeats", "2")
        assert fastlaunch(*argv, machine=replace(CPU, devices=(device,) * 2)) == 0
        return capsys.readouterr().err.splitlines()

    (warning,) = told("Tesla T4", "bf16,fp32")
    assert warning.startswith("warning: recipe bf16: Tesla T4 emulates bf16") and warning.endswith(" is fp16")
    assert told("Tesla T4", "fp16") == told("NVIDIA H200", "bf16") == []


def test_rehearsal_says_what_it_does_not_cover(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["submit", "--local", "--instance", "p5.48xlarge", "--recipe", "te-fp8", "--steps", "20"]
    assert fastlaunch(*argv) == 0
    err = capsys.readouterr().err
    assert "rehearsing for p5.48xlarge on this machine, which does not cover:" in err
    assert "vit-huge at batch 64: rehearsed with vit-tiny at batch 8" in err
    assert "te-fp8: FP8 needs an NVIDIA GPU, and there is none, rehearsed as bf16" in err
    (run,) = runs()
    assert (run.workload, run.recipe, run.instance) == ("vit-tiny", "bf16", None)


def test_a_rehearsal_for_several_nodes_of_sagemaker_is_one_process_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ("submit", "--local", "--instance", "ml.p5.48xlarge", "--num-nodes", "2", "--dry-run")
    assert fastlaunch(*argv) == 0
    assert re.search(r"^  nodes +2; here: 1$", capsys.readouterr().err, re.MULTILINE)


def test_what_cannot_run_here_is_refused_with_what_can(capsys: pytest.CaptureFixture[str]) -> None:
    assert fastlaunch("submit", "--local", "--recipe", "bf16,te-fp8") == 2
    out, err = capsys.readouterr()
    assert (out, runs()) == ("", [])
    assert err == (
        "error: recipe te-fp8 cannot run here: FP8 needs an NVIDIA GPU, and there is none\n"
        "  the nearest that can: --recipe bf16\n"
    )


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
    assert out.splitlines()[-1] == f"No step time: {first.reason}."
    assert f"the end of {first.directory}/log.txt:\ntraining vit-tiny with compile\nerror: this" in err


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("out_of_memory", "out of memory: tried to allocate 2.00 GiB"),
        ("nan_loss", "the loss is not a number"),
        ("failed", "failed: ValueError: no such thing"),
        ("killed", "rank 0 ended without saying how, after step 70"),
    ],
)
def test_failed_run_exits_1_with_its_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, status: str, reason: str
) -> None:
    monkeypatch.setenv("FAKE_STATUS", status)
    assert fastlaunch("submit", "--local", "--steps", "70") == 1
    (run,) = runs()
    assert (run.state, run.reason) == (RunState.FAILED, reason)
    assert run.summary is not None and run.summary.num_steps == 70
    assert reason in capsys.readouterr().out


def test_header_that_contradicts_its_spec_fails_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_HEADER", '{"seed": 99}')
    assert fastlaunch("submit", "--local", "--steps", "70") == 1
    (run,) = runs()
    problem = "the record contradicts the request: seed 99 for 0"
    assert (run.state, run.reason) == (RunState.FAILED, problem)
    assert run.summary is not None and problem in run.summary.problems


def test_home_that_cannot_be_written_is_told_before_training(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTLAUNCH_HOME", str(tmp_path / "file" / "home"))
    assert fastlaunch("submit", "--local") == 2
    err = capsys.readouterr().err
    assert "cannot be written" in err and "set FASTLAUNCH_HOME" in err


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
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
        assert "over 3 runs." in one.communicate(timeout=60)[0]
        assert "over 3 runs." in two.communicate(timeout=60)[0]
    assert (one.returncode, two.returncode) == (0, 0)
    assert [run.state for run in runs()] == [RunState.COMPLETED] * 6
    assert len({run.submission_id for run in runs()}) == 2

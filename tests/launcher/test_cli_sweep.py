"""`fastlaunch sweep`: the matrix and its ceiling, sweeps with the fake entrypoint, one that AWS refuses."""

import json
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_train.launcher import app_context, fastlaunch
from fake_train.processes import is_training, launcher, runs, wait_until
from moto_server import MotoServer
from test_cli_submit_aws import AWS, IMAGE, region  # noqa: F401

from fastlaunch.cli.main import run
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import UPDATED_PRICES, load_settings
from fastlaunch.ledger.ledger import open_ledger

THREE = ("--instance", "p4d.24xlarge,p5.48xlarge,g6e.12xlarge", "--recipe", "bf16,te-fp8")
HERE = ("sweep", "--local", "--recipe", "fp32,bf16", "--steps", "60")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cells() -> list[tuple[str, int | None, int, RunState]]:
    """Recipe, batch size, round and state of each run of the ledger."""
    specs = [(run, run.spec or {}) for run in runs()]
    return sorted((run.recipe, spec.get("batch_size"), spec["round"], run.state) for run, spec in specs)


def test_the_matrix_names_cells_ceilings_and_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("sweep", *THREE, "--batch-size", "auto,64", "--max-cost", "200", "--dry-run")
    assert fastlaunch(*argv, "--output", "json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert len(planned["cells"]) == 12
    skipped = [cell for cell in planned["cells"] if cell["skipped"]]
    assert [(cell["instance"], cell["label"], cell["batch_size"], cell["runs"]) for cell in skipped] == [
        ("p4d.24xlarge", "te-fp8", size, 0) for size in ("auto", 64)
    ]
    assert {cell["runs"] for cell in planned["cells"] if not cell["skipped"]} == {8}
    ceilings = planned["ceilings_usd"]
    # Known answers: (2 h + 10 min) of each, and (1 h + 10 min) of the type whose GPUs have 40 GB.
    assert ceilings["p5.48xlarge"] == pytest.approx((2 + 1 / 6) * (55.04 + 0.046), abs=0.01)
    assert ceilings["batch size"] == pytest.approx(ceilings["p4d.24xlarge"] * 70 / 130)
    # What that cannot run is fitted where there is the least memory but for it: 45 GB.
    further = "batch size on g6e.12xlarge"
    assert ceilings[further] == pytest.approx(ceilings["g6e.12xlarge"] * 70 / 130)
    # At the largest batch that fits, nothing was measured.
    assert [each["usd"] for each in planned["expected"].values()] == [None, None, None]
    assert list(ceilings) == ["batch size", further, "p4d.24xlarge", "p5.48xlarge", "g6e.12xlarge"]
    assert not load_settings().home.exists()


def test_a_budget_of_the_ceiling_that_is_shown_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("sweep", "--instance", "p5.48xlarge", "--dry-run")
    assert fastlaunch(*argv, "--output", "json") == 0
    (usd,) = json.loads(capsys.readouterr().out)["ceilings_usd"].values()
    assert fastlaunch(*argv, "--max-cost", f"{usd:.2f}") == 0
    assert round(usd, 2) < usd
    assert fastlaunch(*argv, "--max-cost", f"{usd - 0.01:.2f}") == 2


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ((*THREE, "--max-cost", "20"), "give more --max-cost, or shorter --max-hours"),
        (("--instance", "p4d.24xlarge", "--recipe", "te-fp8"), "no cell can run: recipe te-fp8"),
        (("--instance", "p4d.24xlarge", "--batch-size", "auto-each"), "auto-each is not for a sweep"),
        (("--instance", "p5.48xlarge", "--purchase", "capacity-block"), "of one instance type"),
        (("--instance", "p5.48xlarge", "--", "python", "none.py"), "travels with the job: there is none"),
        (("--local", "--instance", "p5.48xlarge"), "--local sweeps this machine"),
        (("--local", "--max-cost", "5"), "--max-cost is for AWS"),
        (("--local", "--until-best", "--repeats", "2"), "says itself how often each cell runs"),
        (("--local", "--parallel", "2"), "--parallel is for AWS"),
        (("--local", "--batch-size", "auto", "--", sys.executable), "script of your own: --batch-size"),
        (("--resume",), "there is no sweep"),
        (("--resume", "x", "--local"), "leave out the other options"),
    ],
)
def test_what_cannot_be_swept(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], part: str) -> None:
    assert fastlaunch("sweep", *argv) == 2
    assert part in capsys.readouterr().err
    assert not (load_settings().home / "runs").exists()


@pytest.mark.slow
def test_a_sweep_here_ends_with_a_comparison_and_what_it_saved(capsys: pytest.CaptureFixture[str]) -> None:
    assert fastlaunch(*HERE, "--batch-size", "auto,16", "--max-rounds", "4", "--output", "json") == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    # The fake finds 8.
    assert {row["batch_size_per_gpu"] for row in told["rows"]} == {8, 16} and len(told["rows"]) == 4
    assert told["answer"]["sentence"]
    saved = told["sweep"]["saved"]
    num_made = sum(run.state is RunState.COMPLETED for run in runs()) - 1
    assert saved["num_runs"] == 16 - num_made > 0
    # Known answer: 60 steps of 1 ms, and 0.1 s of building.
    assert saved["machine_s"] == pytest.approx(0.16 * saved["num_runs"], rel=0.01) and saved["usd"] is None
    assert err.splitlines()[-1] == f"next: fastlaunch compare sweep={told['sweep']['id']} --all"
    assert fastlaunch("compare", f"sweep={told['sweep']['id']}", "--output", "json") == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 4
    assert fastlaunch("sweep", "--resume") == 0
    again = capsys.readouterr()
    assert "Stopping early saved" in again.out and "started, 60 steps" not in again.err


@pytest.mark.slow
def test_a_sweep_for_the_best_cell_names_it_and_leaves_out_what_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fastlaunch(*HERE, "--until-best", "--max-rounds", "4", "--output", "json") == 0
    told = json.loads(capsys.readouterr().out)
    (((best, *_),),) = [told["sweep"]["best"]]
    states = {run.recipe: run.state for run in runs()}
    assert best["recipe"] in states and best["num_runs"] >= 1 and best["usd_per_million_samples"] is None
    assert all(run.state is RunState.COMPLETED or run.is_unneeded for run in runs())
    assert fastlaunch("sweep", "--resume") == 0
    assert "Best at global batch 8: " in capsys.readouterr().out


def test_a_comparison_that_fails_loses_no_run_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    broken = load_settings().home / UPDATED_PRICES
    broken.parent.mkdir(parents=True, exist_ok=True)
    broken.write_text("no prices")
    assert fastlaunch(*HERE, "--repeats", "2", "--output", "json") == 0
    out, err = capsys.readouterr()
    told = json.loads(out)["sweep"]
    assert told["parts"] == {"this machine": {"completed": 4}}
    assert err.count("warning: the comparison failed") == 1
    # `compare` itself says what to mend.
    assert fastlaunch("compare", f"sweep={told['id']}") == 2


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [signal.SIGKILL, signal.SIGINT], ids=lambda one: one.name)
def test_a_sweep_that_was_killed_or_stopped_goes_on(
    capsys: pytest.CaptureFixture[str], signalled: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("sweep", "--local", "--recipe", "fp32,bf16", "--steps", "60", "--repeats", "2")
    with launcher(*argv, FAKE_STEP_S="0.01") as process:
        wait_until(is_training)
        process.send_signal(signalled)
        process.wait(timeout=60)
    assert process.returncode == (-9 if signalled == signal.SIGKILL else 130)
    assert fastlaunch("sweep", "--resume") == 0
    err = capsys.readouterr().err
    assert cells() == [
        (recipe, 8, number, RunState.COMPLETED) for recipe in ("bf16", "fp32") for number in (1, 2)
    ]
    with open_ledger(load_settings()) as ledger:
        attempts = [len(ledger.attempts_of(run.id)) for run in runs()]
        (submission,) = {run.submission_id for run in runs()}
        assert list(ledger.parts_of(ledger.sweep().id).values()) == [submission]
    # A job outlives its launcher that was killed; one that was stopped begins again.
    assert attempts == [1 if signalled == signal.SIGKILL else 2, 1, 1, 1]
    assert re.search(r"going on with sweep-\S+; started: this machine", err)
    monkeypatch.chdir("/")
    assert fastlaunch("sweep", "--resume") == 2
    assert "type: cd " in capsys.readouterr().err


def on_aws(*argv: str) -> int:
    """Exit code of `fastlaunch ARGV` over the AWS on loopback."""
    # Every command asks anew who is logged in.
    AWS._identity = None
    return run(list(argv), replace(app_context(*argv), connect=lambda: AWS, sleep=lambda seconds: None))


@pytest.mark.parametrize("further", [(), ("--parallel", "2")], ids=["one", "both"])
def test_every_type_is_asked_for_and_the_sweep_says_which_had_no_capacity(
    region: MotoServer,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    further: tuple[str, ...],
) -> None:
    refusal = region.refuse("RunInstances", "InsufficientInstanceCapacity", "EC2's own words")
    options = ("--image", IMAGE, "--steps", "20", "--max-cost", "50", "--yes", "--output", "json")
    argv = ("sweep", "--instance", "g5.xlarge,g6e.xlarge", "--recipe", "bf16,compile", *options, *further)
    assert on_aws(*argv) == 3
    out, err = capsys.readouterr()
    told: dict[str, Any] = json.loads(out)["sweep"]
    assert sorted(told["left_out"]) == ["g5.xlarge", "g6e.xlarge"]
    assert ("g5.xlarge: g5.xlarge in us-east-1a" in err) == bool(further), "each line begins with its part"
    sent = region.sent("RunInstances")
    assert sorted(each.parameters["InstanceType"] for each in sent) == ["g5.xlarge"] * 2 + ["g6e.xlarge"] * 2
    assert told["parts"] == {"g5.xlarge": {"failed": 16}, "g6e.xlarge": {"failed": 16}}
    region.allow(refusal)
    # Without quota a type is left out before anybody is asked.
    region.quotas["us-east-1", "L-DB2E81BA"] = 0
    num_sent = len(sent)
    assert on_aws(*argv) == 3
    assert "not enough quota" in capsys.readouterr().err
    assert len(region.sent("RunInstances")) == num_sent

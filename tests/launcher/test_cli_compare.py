"""`fastlaunch compare` on runs in a ledger: what it takes, what it says, what it refuses."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_records import write_run

from fastlaunch.cli.compare import _parse_charged_as as parse_charged_as
from fastlaunch.cli.main import run
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import open_ledger
from fastlaunch.measure.published import shipped_figures
from fastlaunch.measure.summarize import summarize
from fastlaunch_train.records.records import Check, Eval, read_record

(FIGURES,) = (path for path in shipped_figures() if path.stem == "fp8-experiment")


def answer(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of `fastlaunch compare`."""
    capsys.readouterr()
    assert run(["compare", *argv]) == code
    out, err = capsys.readouterr()
    return out, err


def rows(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    out, _ = answer(capsys, *argv, "--output", "json")
    found: list[dict[str, Any]] = json.loads(out)["rows"]
    return found


def record(folder: Path, recipe: str, step_time_s: float, number: int = 1, **changes: Any) -> None:
    """Records of a run under `folder`, to be imported."""
    name = f"{recipe}-{number}"
    write_run(folder / name, recipe=recipe, step_time_s=step_time_s, batch_size=64, run_id=name, **changes)


@pytest.fixture
def measured(tmp_path: Path) -> None:
    """Three runs of bf16 and of compile in the ledger, and before them an older submission."""
    assert run(["runs", "import", str(FIGURES)]) == 0
    for number, factor in enumerate((0.999, 1.0, 1.001), start=1):
        record(tmp_path / "records", "bf16", 0.1 * factor, number)
        record(tmp_path / "records", "compile", 0.08 * factor, number)
    assert run(["runs", "import", str(tmp_path / "records")]) == 0


def test_the_published_dollars_in_a_process_of_its_own() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

    def fastlaunch(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "fastlaunch", *argv],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )

    assert fastlaunch("runs", "import", str(FIGURES)).returncode == 0
    done = fastlaunch("compare", "--prices-as-of", "2023-11-15")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == (
        "bf16 on p4d.24xlarge gives 137,176 images per dollar, 45.6% more than on p5.48xlarge,"
        " by figures without an interval."
    )
    assert done.stderr.splitlines()[-1].startswith("next: fastlaunch ")


@pytest.mark.usefixtures("measured")
def test_without_arguments_it_is_the_last_submission(capsys: pytest.CaptureFixture[str]) -> None:
    found = {row["recipe"]: row for row in rows(capsys)}
    assert {name: row["verdict"] for name, row in found.items()} == {"bf16": "baseline", "compile": "better"}
    assert found["compile"]["num_runs"] == 3
    assert found["compile"]["speed_ratio_to_baseline"]["value"] == pytest.approx(1.25)
    out, err = answer(capsys)
    assert out.splitlines()[-1].startswith("compile gives 800 images/s, 25.0% more than bf16")
    assert err.splitlines()[-1] == "next: fastlaunch compare --price-as p5en.48xlarge --price-share 1/8"


@pytest.mark.parametrize(
    ("device_name", "world_size", "charged"),
    [
        ("NVIDIA H100 80GB HBM3", 1, "--price-as p5.4xlarge"),
        ("NVIDIA H100 80GB HBM3", 8, "--price-as p5.48xlarge"),
        ("NVIDIA H100 80GB HBM3", 2, "--price-as p5.48xlarge --price-share 1/4"),
        ("NVIDIA A100-SXM4-40GB", 8, "--price-as p4d.24xlarge"),
        ("AMD EPYC", 1, "--output json"),
        ("NVIDIA H200", 16, "--output json"),
    ],
)
def test_runs_without_a_price_are_next_charged_as_an_instance_with_their_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], device_name: str, world_size: int, charged: str
) -> None:
    write_run(tmp_path, device_name=device_name, world_size=world_size)
    assert run(["runs", "import", str(tmp_path)]) == 0
    _, err = answer(capsys)
    assert err.splitlines()[-1] == f"next: fastlaunch compare {charged}"
    assert run(["compare", *charged.split()]) == 0


@pytest.mark.usefixtures("measured")
def test_all_or_chosen_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(rows(capsys, "--all")) == 5 + 2
    assert {row["recipe"] for row in rows(capsys, "recipe=te-*")} == {"te-article", "te-article-fp8"}
    (name,) = rows(capsys, "recipe=compile")[0]["run_ids"][:1]
    (row,) = rows(capsys, name)
    assert (row["recipe"], row["num_runs"], row["verdict"]) == ("compile", 1, "baseline")


@pytest.mark.usefixtures("measured")
def test_baselines_and_prices(capsys: pytest.CaptureFixture[str]) -> None:
    found = {row["recipe"]: row for row in rows(capsys, "--baseline", "compile", "--usd-per-hour", "2")}
    assert found["bf16"]["verdict"] == "worse"
    assert found["bf16"]["ratio_to_baseline"]["value"] == pytest.approx(0.8)
    assert found["bf16"]["usd_per_million_samples"]["value"] == pytest.approx(
        0.1 / 64 * 1e6 * 2 / 3600, rel=1e-5
    )
    (row, _) = rows(
        capsys, "--price-as", "p5en.48xlarge", "--price-share", "1/8", "--prices-as-of", "2026-11-21"
    )
    assert row["usd_per_hour"] == pytest.approx(63.296 / 8)
    assert (row["price_as_of"], row["price_hypothetical"]) == ("2026-07-20", "1/8 of p5en.48xlarge")


@pytest.mark.usefixtures("measured")
def test_a_price_file_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "prices:\n  - {instance: p5.48xlarge, service: ec2, region: us-east-1, usd_per_hour: 40,"
        " as_of: 2026-11-01, source: ours}\n"
    )
    found = rows(capsys, "instance=p5.48xlarge", "--prices", str(tmp_path / "mine.yaml"))
    assert {row["usd_per_hour"] for row in found} == {40}


@pytest.fixture
def guarded(tmp_path: Path) -> None:
    """bf16 and te-fp8 with held-out losses at three seeds; te-fp8 is faster, and fails a check."""
    failed = Check(name="isolation", passed=False, detail="changing image 3 changed 28 other outputs")
    for recipe, step_time_s, checks in (("bf16", 0.1, ()), ("te-fp8", 0.05, (failed,))):
        for seed in range(3):
            evals = [
                Eval(step=step, split="validation", loss=loss + 0.1 * seed, num_samples=100, seconds=1.0)
                for step, loss in ((100, 3.0), (200, 2.0))
            ]
            record(tmp_path, recipe, step_time_s, seed, seed=seed, checks=checks, evals=evals)
    assert run(["runs", "import", str(tmp_path)]) == 0


@pytest.mark.usefixtures("measured")
def test_chosen_columns_and_no_notes(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = answer(capsys, "--columns", "verdict, step ms", "--brief")
    told = out.splitlines()
    assert told[2] == "recipe      step ms  verdict"
    assert [line.split()[::3] for line in told[4:6]] == [["bf16", "baseline"], ["compile", "better"]]
    assert told[-3:-1] == ["(3 notes left out by --brief)", ""]
    assert told[-1].startswith("compile gives 800 images/s")
    assert "before the measured steps" not in out and "* " not in out
    assert "before the measured steps" in answer(capsys, "--columns", "verdict")[0]


def test_more_runs_are_of_new_seeds_and_the_commands_can_be_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is told where a verdict or convergence waits for more runs goes through `submit` as it is."""
    evals = [Eval(step=n, split="validation", loss=2.0, num_samples=100, seconds=0.1) for n in (50, 100)]
    here: dict[str, Any] = {"steps": 100, "evals": evals, "workload": "vit-tiny", "device_name": "AMD EPYC"}
    for seed, (ours, theirs) in enumerate([(0.1, 0.097), (0.102, 0.1), (0.098, 0.0995)], start=2):
        record(tmp_path / "records", "bf16", ours, seed, seed=seed, **here)
        record(tmp_path / "records", "compile", theirs, seed, seed=seed, **here)
        record(tmp_path / "records", "compile learning_rate=0.01", theirs / 2, seed, seed=seed, **here)
    assert run(["runs", "import", str(tmp_path / "records")]) == 0
    out, err = answer(capsys)
    told = re.search(r"compile: needs about (\d+) more runs", out)
    assert told is not None
    (needed,) = told.groups()
    command = err.splitlines()[-1].removeprefix("next: ")
    assert command == (
        "fastlaunch submit --local --workload vit-tiny --recipe bf16,compile --batch-size 64 --steps 100"
        f" --eval-every 50 --seed 5 --repeats {needed}"
    )
    capsys.readouterr()
    assert run([*shlex.split(command)[1:], "--dry-run"]) == 0
    assert f"seeds 5 to {4 + int(needed)}" in capsys.readouterr().out

    words = " ".join(out.split())
    reference = re.search(
        r"no reference with learning_rate=0.01; run (fastlaunch submit .*?) \*", f"{words} *"
    )
    assert reference is not None
    assert run([*shlex.split(reference[1])[1:], "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert "bf16 learning_rate=0.01 on vit-tiny, 3 times, seeds 2 to 4" in planned


@pytest.mark.usefixtures("guarded")
def test_a_wrong_recipe_is_shown_and_not_ranked(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = answer(capsys)
    assert out.splitlines()[-1] == "bf16 gives 640 images/s."
    assert "* isolation: changing image 3 changed 28 other outputs" in out
    assert re.search(r"^te-fp8 +3 +2\.1 +\+0\.0% \(\+0\.0 to \+0\.0\) +within$", out, re.MULTILINE)
    assert "warning" not in err
    found = {row["recipe"]: row for row in rows(capsys)}
    assert (found["te-fp8"]["verdict"], found["te-fp8"]["ranked"]) == ("not ranked", False)
    assert found["te-fp8"]["speed_ratio_to_baseline"]["value"] == pytest.approx(2.0)
    assert found["te-fp8"]["convergence"]["verdict"] == "within"
    _, err = answer(capsys, "--baseline", "te-fp8", code=2)
    assert "te-fp8 is no baseline: it is not ranked, isolation: " in err
    assert "--allow-unverified" in err


@pytest.mark.usefixtures("guarded")
def test_jobs_to_their_end_and_to_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--usd-per-hour", "36", "--finish", "10000", "--target", "loss=2.1")
    out, _ = answer(capsys, *argv)
    plain, _ = answer(capsys, *argv[:2])
    assert out.startswith(plain[: plain.index("bf16 gives")])
    assert out.splitlines()[-1] == plain.splitlines()[-1]
    data = json.loads(answer(capsys, *argv, "--output", "json")[0])
    assert data["finish"]["steps"] == 10000
    assert data["target"]
    data = json.loads(answer(capsys, "--output", "json")[0])
    assert (data["finish"], data["target"]) == (None, None)
    _, err = answer(capsys, *argv, "--output", "csv", code=2)
    assert "--finish and --target have no place in a CSV of rows" in err
    _, err = answer(capsys, "--finish", "0", code=2)
    assert "--finish" in err


def test_runs_that_cannot_be_used_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record(tmp_path, "bf16", 0.1)
    for number in range(10):
        record(tmp_path, "compile", 0.1, number, status="nan_loss", message="step 7")
    assert run(["runs", "import", str(tmp_path)]) == 0
    out, err = answer(capsys)
    assert "compile" not in out
    warnings = [line for line in err.splitlines() if line.startswith("warning: ")]
    assert "(compile) is left out: ended as nan_loss: step 7" in warnings[0]
    assert warnings[-1] == "warning: and 2 more of these"
    answer(capsys, "recipe=compile", code=2)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["nope"], "unknown run 'nope'"),
        (["recipe=nope"], "no run is like that"),
        (["--baseline", "bf61"], "unknown baseline 'bf61'\n  did you mean bf16?"),
        (["--usd-per-hour", "0"], "--usd-per-hour is 0"),
        (["--price-as", "p5en.48xlarge"], "bf16 ran on 1 x H200; p5en.48xlarge is 8 x H200"),
        (["--price-share", "1/8"], "--price-share is a share of one instance"),
        (
            ["--price-as", "p5.4xlarge", "--price-as", "p5en.48xlarge", "--price-share", "1/8"],
            "of one instance",
        ),
        (["--price-as", "p5.4xlarge", "--price-as", "p5.48xlarge"], "bf16 ran on 1 x H200, which none of"),
        (["--price-as", "p5en.48xlarge", "--price-share", "1/0"], "'1/0' is no share"),
        (["--prices-as-of", "2023-13-01"], "'2023-13-01' is not a date"),
        (["--all", "recipe=bf16"], "--all is every run"),
        (["--prices", "/does/not/exist.yaml"], "/does/not/exist.yaml"),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], argv: list[str], told: str) -> None:
    out, err = answer(capsys, *argv, code=2)
    assert out == ""
    assert told in err


def test_without_runs_it_says_how_to_make_some(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = answer(capsys, code=2)
    assert out == ""
    assert err == "error: there are no runs to compare\n  make some: fastlaunch submit --local --repeats 3\n"


@pytest.mark.parametrize(("text", "share"), [("1/8", 0.125), ("0.125", 0.125), ("1", 1.0), (" 3/4 ", 0.75)])
def test_shares(text: str, share: float) -> None:
    charged = parse_charged_as(f"p5en.48xlarge:{text}")
    assert (charged.instance, charged.share) == ("p5en.48xlarge", share)
    assert parse_charged_as("p5.4xlarge").share is None


def test_a_training_jobs_run_without_a_noted_price_is_charged_sagemakers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with open_ledger(load_settings()) as ledger:
        summary = summarize(
            [
                read_record(path)
                for path in write_run(tmp_path, instance="p5.48xlarge", world_size=16, num_nodes=2)
            ]
        )
        run_id = ledger.new_run_id()
        ledger.add_run(
            ledger.add_submission("fastlaunch submit"),
            run_id,
            spec={},
            plan=None,
            workload="vit-huge",
            recipe="bf16",
            instance="p5.48xlarge",
            backend="sagemaker",
        )
        ledger.set_summary(run_id, summary)
        ledger.set_state(run_id, RunState.COMPLETED)
    _, err = answer(capsys)
    assert err.splitlines()[-1] == "next: fastlaunch prices --instance p5.48xlarge --service sagemaker --all"
    (row,) = rows(capsys)
    assert (row["service"], row["usd_per_hour"], row["num_nodes"]) == ("sagemaker", 63.296, 2)
    # 32 images in 0.1 s on both: 320/s.
    assert row["usd_per_million_samples"]["value"] == pytest.approx(2 * 63.296 / 3600 / 320 * 1e6)

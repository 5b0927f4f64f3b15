"""`fastlaunch compare` on runs in a ledger: what it takes, what it says, what it refuses."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from attempt_builders import run_with
from fake_records import write_run
from fake_summaries import CATALOGUE, PLAIN, TODAY, changed

from fastlaunch.analysis.pricing import PriceRequest
from fastlaunch.api.comparison import compared
from fastlaunch.cli.main import run
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import open_ledger
from fastlaunch.lifecycle.evidence import measured_run
from fastlaunch.measure.published import shipped_figures
from fastlaunch_train.records.records import Check, Eval

(FIGURES,) = (path for path in shipped_figures() if path.stem == "fp8-experiment")
SHARE = ["--price-as", "p5en.48xlarge:1/8"]


def answer(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of `fastlaunch compare`."""
    capsys.readouterr()
    assert run(["compare", *argv]) == code
    out, err = capsys.readouterr()
    return out, err


def data(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    return json.loads(answer(capsys, *argv, "--output", "json")[0])


def rows(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, dict[str, Any]]:
    """The rows by recipe."""
    return {row["recipe"]: row for row in data(capsys, *argv)["rows"]}


def proposed(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """The words of the next command, without `fastlaunch`."""
    line = answer(capsys, *argv)[1].splitlines()[-1]
    assert line.startswith("next: fastlaunch ")
    return shlex.split(line)[2:]


def record(folder: Path, recipe: str, step_time_s: float, number: int = 1, **changes: Any) -> None:
    """Records of a run under `folder`, to be imported."""
    name = f"{recipe}-{number}"
    write_run(folder / name, recipe=recipe, step_time_s=step_time_s, batch_size=64, run_id=name, **changes)


@pytest.fixture
def measured(tmp_path: Path) -> None:
    """Three runs of bf16 and of compile in the ledger."""
    for number, factor in enumerate((0.999, 1.0, 1.001), start=1):
        record(tmp_path / "records", "bf16", 0.1 * factor, number, steps=60)
        record(tmp_path / "records", "compile", 0.08 * factor, number, steps=60)
    assert run(["runs", "import", str(tmp_path / "records")]) == 0


@pytest.mark.usefixtures("measured")
def test_all_or_chosen_runs(capsys: pytest.CaptureFixture[str]) -> None:
    compared = rows(capsys)
    assert {name: row["verdict"] for name, row in compared.items()} == {
        "bf16": "baseline",
        "compile": "better",
    }
    assert compared["compile"]["num_runs"] == 3
    assert compared["compile"]["speed_ratio_to_baseline"]["value"] == pytest.approx(1.25)
    assert run(["runs", "import", str(FIGURES)]) == 0
    assert len(data(capsys, "--every-run")["rows"]) == 5 + 2
    assert set(rows(capsys, "recipe=te-*")) == {"te-article", "te-article-fp8"}
    name = compared["compile"]["run_ids"][0]
    row = rows(capsys, name)["compile"]
    assert (row["num_runs"], row["verdict"]) == (1, "baseline")


@pytest.mark.parametrize(
    ("device_name", "world_size", "charged"),
    [
        ("NVIDIA H100 80GB HBM3", 1, "--price-as p5.4xlarge"),
        ("NVIDIA H100 80GB HBM3", 2, "--price-as p5.48xlarge:1/4"),
        ("AMD EPYC", 1, None),
        ("NVIDIA H200", 16, None),
    ],
)
def test_runs_without_a_price_are_next_charged_as_an_instance_with_their_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], device_name: str, world_size: int, charged: str | None
) -> None:
    write_run(tmp_path, device_name=device_name, world_size=world_size, steps=40)
    assert run(["runs", "import", str(tmp_path)]) == 0
    out, err = answer(capsys)
    assert f"cost: no price is known; to see it, compare with {charged or '--usd-per-hour USD'}\n" in out
    assert err == (f"next: fastlaunch compare {charged}\n" if charged else "")
    if charged:
        out, err = answer(capsys, *charged.split())
        assert "no price is known" not in out and "next: " not in err


@pytest.mark.usefixtures("measured")
def test_baselines_and_prices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    row = rows(capsys, "--baseline", "compile", "--usd-per-hour", "2")["bf16"]
    assert row["verdict"] == "worse"
    assert row["ratio_to_baseline"]["value"] == pytest.approx(0.8)
    assert row["usd_per_million_samples"]["value"] == pytest.approx(0.1 / 64 * 1e6 * 2 / 3600, rel=1e-5)
    share = ("--price-as", "p5en.48xlarge", "--price-share", "0.125", "--prices-as-of", "2026-11-21")
    row = rows(capsys, *share)["bf16"]
    assert row["usd_per_hour"] == pytest.approx(63.296 / 8)
    assert (row["price_as_of"], row["price_hypothetical"]) == ("2026-07-20", "1/8 of p5en.48xlarge")
    out, _ = answer(capsys, "--price-as", "p5.4xlarge", "--price-share", "1")
    assert out.startswith("compile on H200 (charged as H100) gives ")
    assert run(["runs", "import", str(FIGURES)]) == 0
    (tmp_path / "mine.yaml").write_text(
        "prices:\n  - {instance: p5.48xlarge, service: ec2, region: us-east-1, usd_per_hour: 40,"
        " as_of: 2026-11-01, source: ours}\n"
    )
    own = rows(capsys, "instance=p5.48xlarge", "--prices", str(tmp_path / "mine.yaml"))
    assert {row["usd_per_hour"] for row in own.values()} == {40}


@pytest.mark.usefixtures("measured")
def test_chosen_columns_and_no_notes(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = answer(capsys, "--columns", "verdict, step ms", "--brief")
    lines = out.splitlines()
    assert lines[0].startswith("compile on H200 gives 800 images/s")
    assert lines[4] == "recipe      step ms  verdict"
    assert [line.split()[::3] for line in lines[6:8]] == [["compile", "better"], ["bf16", "baseline"]]
    assert "before the measured steps" not in out and "* " not in out
    assert "before the measured steps" in answer(capsys, "--columns", "verdict")[0]


@pytest.mark.usefixtures("measured")
def test_the_proposed_command_compares_and_prices_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (
        ["--usd-per-hour", "4.5"],
        ["recipe=bf16", "recipe=comp*", *SHARE, "--prices-as-of", "2026-11-21", "--baseline", "compile"],
        ["--every-run", "--allow-unverified", "--finish", "10k", "--usd-per-hour", "2"],
    ):
        assert "next: " not in answer(capsys, *given, "--brief", "--columns", "verdict")[1]
    given = ["recipe=bf16", "recipe=compile", "--baseline", "compile", "--finish", "100"]
    given += ["--columns", "step ms,verdict", "--brief"]
    assert proposed(capsys, *given) == ["compare", *given, *SHARE]


def test_more_runs_are_of_new_seeds_and_the_commands_can_be_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evals = [Eval(step=n, split="validation", loss=2.0, num_samples=100, seconds=0.1) for n in (50, 100)]
    here: dict[str, Any] = {"steps": 100, "evals": evals, "workload": "vit-tiny", "device_name": "AMD EPYC"}
    for seed, (ours, theirs) in enumerate([(0.1, 0.097), (0.1002, 0.0999), (0.1001, 0.0983)], start=2):
        record(tmp_path / "records", "bf16", ours, seed, seed=seed, **here)
        record(tmp_path / "records", "compile", theirs, seed, seed=seed, **here)
    assert run(["runs", "import", str(tmp_path / "records")]) == 0
    out, err = answer(capsys)
    waiting = re.search(r"compile: about (\d+) more rounds? would settle it", out)
    assert waiting is not None
    (needed,) = waiting.groups()
    command = err.splitlines()[-1].removeprefix("next: ")
    assert command == (
        "fastlaunch submit --local --workload vit-tiny --recipe bf16,compile --batch-size 64 --steps 100"
        f" --eval-every 50 --seed 5 --repeats {needed}"
    )
    capsys.readouterr()
    assert run([*shlex.split(command)[1:], "--dry-run"]) == 0
    assert f"seeds 5 to {4 + int(needed)}" in capsys.readouterr().out


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


@pytest.mark.usefixtures("guarded")
def test_brief_prints_less_and_says_why_a_row_is_not_ranked(capsys: pytest.CaptureFixture[str]) -> None:
    prices = ("--usd-per-hour", "36")
    brief, plain, full, brief_full = (
        answer(capsys, *prices, *options)[0].splitlines()
        for options in (["--brief"], [], ["--all"], ["--all", "--brief"])
    )
    assert len(brief) < len(plain) and len(brief_full) < len(full)
    assert set(brief) < set(plain)
    assert any("isolation" in line for line in brief) and any("$36/h" in line for line in brief)


@pytest.mark.usefixtures("guarded")
def test_jobs_to_their_end_and_to_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--usd-per-hour", "36", "--finish", "10000", "--target", "loss=2.1")
    out, _ = answer(capsys, *argv)
    plain, _ = answer(capsys, *argv[:2])
    # What was asked for stands before the comparison.
    further = data(capsys, *argv)
    sentences = [further[name]["workloads"][0]["sentence"] for name in ("finish", "target")]
    at = [" ".join(out.split()).index(text) for text in (*sentences, plain.partition("\n")[0])]
    assert at == sorted(at) and at[0] == 0
    assert further["finish"]["steps"] == 10000
    without = data(capsys)
    assert (without["finish"], without["target"]) == (None, None)


def test_runs_that_cannot_be_used_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record(tmp_path, "bf16", 0.1, steps=60)
    for number in range(10):
        record(tmp_path, "compile", 0.1, number, steps=60, status="nan_loss", message="step 7")
    assert run(["runs", "import", str(tmp_path)]) == 0
    out, err = answer(capsys)
    assert "compile" not in out
    warnings = [line for line in err.splitlines() if line.startswith("warning: ")]
    assert "(compile) is left out: ended as nan_loss: step 7" in warnings[0]
    assert warnings[-1] == "warning: and 2 more of these"
    answer(capsys, "recipe=compile", code=2)


@pytest.mark.parametrize(
    ("status", "counts"), [("completed", True), ("interrupted", True), (None, True), ("failed", False)]
)
def test_all_commands_agree_on_what_a_run_that_ended_early_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, status: str | None, counts: bool
) -> None:
    record(tmp_path, "bf16", 0.1, steps=60)
    record(tmp_path, "compile", 0.1, steps=60, status=status)
    assert run(["runs", "import", str(tmp_path)]) == 0
    by_recipe = rows(capsys)
    assert ("compile" in by_recipe) is counts
    capsys.readouterr()
    for argv in (["runs", "list"], ["status", "state=*"]):
        assert run([*argv, "--output", "json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        (step_time_s,) = (
            row["step_time_s"]
            for row in (shown if isinstance(shown, list) else shown["runs"])
            if row["recipe"] == "compile"
        )
        assert (step_time_s == pytest.approx(0.1)) if counts else step_time_s is None
    # The plain screen says of a row whose run did not complete.
    out, _ = answer(capsys)
    assert ("made 60 steps, which count, and ended as" in out) is (counts and status != "completed")


def test_a_run_that_is_under_way_is_not_said_to_have_measured_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record(tmp_path, "bf16", 0.1, steps=60)
    assert run(["runs", "import", str(tmp_path)]) == 0
    with open_ledger(load_settings()) as ledger:
        (done,) = ledger.select()
    comparison = compared([done, run_with(recipe="fp32")], PriceRequest(today=TODAY), catalogue=CATALOGUE)
    assert comparison.warnings[0] == "run-a (fp32) is left out: it is running and counts once it has ended"


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["nope"], "unknown run"),
        (["/"], "fastlaunch runs import /"),
        (["recipe=nope"], "no run"),
        (["--baseline", "bf61"], "did you mean bf16"),
        (["--usd-per-hour", "0"], "--usd-per-hour"),
        (["--price-as", "p5en.48xlarge"], "8 x H200"),
        (["--price-share", "1/8"], "--price-share"),
        ([*SHARE, "--price-share", "1/8"], "--price-share"),
        (["--price-as", "p5en.48xlarge:1/0"], "no share"),
        (["--price-as", "p5en.48xlarge:9e9"], "no share"),
        (["--prices-as-of", "2023-13-01"], "--prices-as-of"),
        (["--every-run", "recipe=bf16"], "--every-run"),
        (["--prices", "/does/not/exist.yaml"], "/does/not/exist.yaml"),
        (["--finish", "10", "--output", "csv"], "--finish"),
        (["--brief", "--output", "json"], "--brief"),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], argv: list[str], part: str) -> None:
    out, err = answer(capsys, *argv, code=2)
    assert out == "" and part in err


def test_without_runs_it_says_how_to_make_some(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = answer(capsys, code=2)
    assert out == "" and "fastlaunch submit --local" in err


@pytest.mark.parametrize(("backend", "session"), [("local", "sub-1"), ("import", None)])
def test_the_submission_is_the_session_unless_it_was_an_import(backend: str, session: str | None) -> None:
    one = run_with(submission_id="sub-1", backend=backend, state=RunState.COMPLETED, summary=PLAIN)
    measured = measured_run(one, "us-east-1")
    assert measured is not None and measured.session == session


def test_of_an_imported_script_the_row_that_ran_first_is_the_baseline(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = [
        changed(
            PLAIN,
            workload="train.py",
            recipe=f"amp={amp}",
            variant={"amp": amp},
            precision="unknown",
            seed=None,
            started_at=f"2026-11-25T10:{number:02d}:00+00:00",
        )
        for number, amp in enumerate(("exact", "sloppy", "exact", "sloppy"))
    ]
    with open_ledger(load_settings()) as ledger:
        # As files are named, which says nothing.
        ledger.add_imported(
            [(summary, Path("records")) for summary in reversed(made)],
            submission_id=ledger.add_submission("fastlaunch runs import"),
            run_ids=["a", "b", "c", "d"],
        )
    found = {row["recipe"]: row["verdict"] for row in data(capsys)["rows"]}
    assert found["amp=exact"] == "baseline" != found["amp=sloppy"]

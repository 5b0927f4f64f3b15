"""The command that compare proposes after a table: it shows the same runs, compared and priced the same."""

import json
import shlex
from pathlib import Path

import pytest
from fake_records import write_run

from fastlaunch.cli.main import run

SHARE = ["--price-as", "p5en.48xlarge", "--price-share", "1/8"]


@pytest.fixture(autouse=True)
def measured(tmp_path: Path) -> None:
    for recipe, time_s in (("bf16", 0.1), ("compile", 0.08), ("fp32", 0.2)):
        write_run(tmp_path / "records" / recipe, recipe=recipe, step_time_s=time_s, run_id=recipe)
    assert run(["runs", "import", str(tmp_path / "records")]) == 0


def proposed(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    capsys.readouterr()
    assert run(["compare", *argv]) == 0
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("next: fastlaunch ")
    return shlex.split(told)[2:]


@pytest.mark.parametrize(
    "typed",
    [
        ["--usd-per-hour", "4.5"],
        ["recipe=bf16", "recipe=comp*", *SHARE, "--prices-as-of", "2026-11-21", "--baseline", "compile"],
        ["--all", "--allow-unverified", "--finish", "10k", *SHARE],
        ["--price-as", "p5.4xlarge", "--price-as", "p5en.48xlarge:1/8", "--prices-as-of", "2026-11-21"],
    ],
)
def test_the_table_as_json(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command = proposed(capsys, *typed, "--brief", "--columns", "verdict")
    assert command[-2:] == ["--output", "json"]
    assert "--brief" not in command and "--columns" not in command
    assert run(command) == 0
    found = capsys.readouterr().out
    assert run(["compare", *typed, "--output", "json"]) == 0
    assert json.loads(found) == json.loads(capsys.readouterr().out)


def test_json_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert proposed(capsys, *SHARE, "--output", "json") == ["compare", *SHARE]


def test_a_price_comes_on_top_of_what_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["recipe=bf16", "recipe=fp32", "--baseline", "fp32", "--finish", "100", "--brief"]
    assert proposed(capsys, *typed) == ["compare", *typed, *SHARE]

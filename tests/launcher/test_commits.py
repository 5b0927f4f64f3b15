"""Runs of several commits of the training code in one row: told, with how far apart they are."""

import datetime
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_records import write_run
from fake_summaries import PLAIN, changed

from fastlaunch.analysis.compare import Comparison, MeasuredRun, PriceRequest, compare
from fastlaunch.analysis.notes import OF_COMMITS
from fastlaunch.catalog.load import load_catalogue
from fastlaunch.cli.main import run
from fastlaunch.measure.summarize import summarize
from fastlaunch.measure.summary import Interval, RunSummary
from fastlaunch_train.records.records import read_record

OLD, NEW = "76689a99023ff044deda788085a7fe2d40e265b0", "e20c5bc1d1b7a7f3fd2c4a7a13a3b0a5d2b7c001"


def runs(
    commit: str | None, rates: Sequence[float], recipe: str = "bf16", **changes: Any
) -> list[MeasuredRun]:
    """A run for each rate in images/s, at 64 images a step."""
    return [
        MeasuredRun(
            run_id=f"{recipe}-{commit}-{number}",
            summary=changed(
                PLAIN,
                **{"recipe": recipe, "commit": commit, "step_time_s": Interval(value=64 / rate), **changes},
            ),
        )
        for number, rate in enumerate(rates)
    ]


def compared(*candidates: MeasuredRun) -> Comparison:
    prices = PriceRequest(today=datetime.date(2026, 11, 21))
    return compare(candidates, catalogue=load_catalogue(), prices=prices)


def notes(*candidates: MeasuredRun) -> list[str]:
    (row,) = compared(*candidates).rows
    return [reason for reason in row.verdict.reasons if reason.startswith(OF_COMMITS)]


def test_commits_further_apart_than_their_runs_are_told_with_their_speeds() -> None:
    """What would become 769 images/s, which nobody has measured."""
    assert notes(*runs(OLD, (825.4, 824.6)), *runs(NEW, (717.1, 716.9))) == [
        f"{OF_COMMITS}76689a9 (2 runs, 825 images/s), e20c5bc (2 runs, 717 images/s), further apart than"
        " one commit's runs; to compare one commit, run fastlaunch compare 'commit=76689a9*'"
    ]


def test_commits_as_close_as_their_runs_are_told_without() -> None:
    (told,) = notes(*runs(OLD, (800, 810, 820)), *runs(NEW, (802, 812)))
    assert told == (
        f"{OF_COMMITS}76689a9 (3 runs), e20c5bc (2 runs); to compare one commit,"
        " run fastlaunch compare 'commit=76689a9*'"
    )


def test_the_spread_is_that_within_a_commit() -> None:
    """That of the whole row is as wide as the commits are apart, and would hide any difference."""
    wide = [*runs(OLD, (880, 800, 720)), *runs(NEW, (800, 720, 650))]
    assert "images/s" not in notes(*wide)[0]
    narrow = [*runs(OLD, (801, 800, 799)), *runs(NEW, (721, 720, 719))]
    assert "images/s" in notes(*narrow)[0]


@pytest.mark.parametrize(("other", "told"), [(780, True), (790, False)])
def test_single_runs_are_held_to_what_is_assumed_between_runs(other: float, told: bool) -> None:
    """1% for each of two runs: apart from 2.8% on."""
    (note,) = notes(*runs(OLD, (803,)), *runs(NEW, (other,)))
    assert ("1 run, 803 images/s" in note) is told


def test_runs_of_one_commit_and_runs_without_any_say_nothing() -> None:
    assert notes(*runs(OLD, (800, 700))) == notes(*runs(None, (800, 700))) == []


def test_a_run_without_a_commit_is_of_an_unknown_one() -> None:
    (told,) = notes(*runs(None, (800, 801, 802)), *runs(OLD, (799,)))
    assert told.startswith(f"{OF_COMMITS}76689a9 (1 run), unknown (3 runs); to compare one commit, run ")


def test_the_commit_is_the_record_s_and_no_part_of_what_summaries_are_compared_by(tmp_path: Path) -> None:
    (path,) = write_run(tmp_path, steps=40, header={"commit": OLD})
    summary = summarize([read_record(path)])
    assert summary.environment.commit == OLD
    stored = json.loads(json.dumps(summary.to_json()))
    assert RunSummary.from_json(stored).environment.commit == OLD
    del stored["commit"]
    before = RunSummary.from_json(stored)
    assert before.environment.commit is None and before == summary


def test_runs_are_picked_by_their_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, commit, step_time_s in (
        ("a", OLD, 0.1),
        ("b", OLD, 0.1001),
        ("c", NEW, 0.12),
        ("d", None, 0.1),
    ):
        write_run(tmp_path / name, run_id=name, step_time_s=step_time_s, header={"commit": commit})
    assert run(["runs", "import", str(tmp_path)]) == 0
    capsys.readouterr()
    assert run(["compare"]) == 0
    out, _ = capsys.readouterr()
    (command,) = (line.strip() for line in out.splitlines() if "commit=" in line)
    assert run([*shlex.split(command)[1:], "--output", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["num_runs"] == 2 and row["reason"] is not None and OF_COMMITS not in row["reason"]
    assert run(["compare", "commit=", "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["num_runs"] == 1


def test_a_row_of_other_commits_than_its_baseline_says_so() -> None:
    rest = {"recipe": "compile"}
    (_, row) = compared(*runs(OLD, (800, 801)), *runs(NEW, (900, 901), **rest)).rows
    assert "of another commit than the baseline: e20c5bc against 76689a9" in row.verdict.reasons
    for candidates in (
        runs(OLD, (900, 901), **rest),
        [*runs(OLD, (900,), **rest), *runs(NEW, (901,), **rest)],
        runs(None, (900, 901), **rest),
    ):
        (_, row) = compared(*runs(OLD, (800, 801)), *candidates).rows
        assert "another commit than the baseline" not in " ".join(row.verdict.reasons)

"""Runs of several commits of the training code in one row: told, with how far apart they are."""

import datetime
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_records import write_run
from fake_summaries import PLAIN
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.analysis.compare import Candidate, Comparison, PriceRequest, compare
from fastlaunch.analysis.notes import OF_COMMITS, commit_notes
from fastlaunch.analysis.pooling import pool
from fastlaunch.catalog.prices import load_catalogue
from fastlaunch.cli import run
from fastlaunch.ledger.ledger import Ledger
from fastlaunch.measure.summarize import Interval, RunSummary, summarize
from fastlaunch.report.data import to_json
from fastlaunch.report.table import as_table
from fastlaunch_train.records.records import read_record

OLD, NEW = "76689a99023ff044deda788085a7fe2d40e265b0", "e20c5bc1d1b7a7f3fd2c4a7a13a3b0a5d2b7c001"


def runs(commit: str | None, rates: Sequence[float], recipe: str = "bf16", **changes: Any) -> list[Candidate]:
    """A run for each rate in images/s, at 64 images a step."""
    return [
        Candidate(
            run_id=f"{recipe}-{commit}-{number}",
            summary=replace(
                PLAIN,
                **{"recipe": recipe, "commit": commit, "step_time_s": Interval(value=64 / rate), **changes},
            ),
        )
        for number, rate in enumerate(rates)
    ]


def compared(*candidates: Candidate) -> Comparison:
    prices = PriceRequest(today=datetime.date(2026, 11, 21))
    return compare(candidates, catalogue=load_catalogue(), prices=prices)


def notes(*candidates: Candidate) -> list[str]:
    (row,) = compared(*candidates).rows
    return [reason for reason in row.reasons if reason.startswith(OF_COMMITS)]


def test_commits_further_apart_than_their_runs_are_told_with_their_speeds() -> None:
    """What would become 769 images/s, which nobody has measured."""
    assert notes(*runs(OLD, (825.4, 824.6)), *runs(NEW, (717.1, 716.9))) == [
        f"{OF_COMMITS}76689a9 (2 runs, 825 images/s), e20c5bc (2 runs, 717 images/s), further apart than"
        " one commit's runs; for one alone, run fastlaunch compare 'commit=76689a9*'"
    ]


def test_commits_as_close_as_their_runs_are_told_without() -> None:
    (told,) = notes(*runs(OLD, (800, 810, 820)), *runs(NEW, (802, 812)))
    assert told == (
        f"{OF_COMMITS}76689a9 (3 runs), e20c5bc (2 runs); for one alone,"
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
    assert told.startswith(f"{OF_COMMITS}76689a9 (1 run), unknown (3 runs); for one alone, run ")


@pytest.mark.parametrize(
    ("commits", "names", "glob"),
    [
        (("76689a99", "76689a9b"), ("76689a99", "76689a9b"), "76689a99*"),
        (("76689a99f", "76689a9b0"), ("76689a99", "76689a9b"), "76689a99*"),
        ((OLD, f"{OLD}-dirty"), ("76689a9", "76689a9-dirty"), OLD),
        ((f"{OLD}-dirty", NEW), ("76689a9-dirty", "e20c5bc"), "76689a9*"),
        (("a tag [of mine]", NEW), ("a tag [", "e20c5bc"), None),
        (("\x1b[31m\n", NEW), ("?[31m?", "e20c5bc"), None),
    ],
)
def test_names_are_short_and_tell_the_commits_apart(
    commits: tuple[str, str], names: tuple[str, str], glob: str | None
) -> None:
    (told,) = notes(*runs(commits[0], (800, 800)), *runs(commits[1], (800,)))
    assert told.startswith(f"{OF_COMMITS}{names[0]} (2 runs), {names[1]} (1 run)")
    _, _, command = told.partition(", run ")
    assert (shlex.split(command)[-1:] == [f"commit={glob}"]) if glob else not command


def test_of_many_commits_those_with_the_most_runs_are_named() -> None:
    many = [one for n in range(6) for one in runs(f"{n}" * 40, (800,) * (6 - n))]
    (told,) = notes(*many)
    assert "0000000 (6 runs), 1111111 (5 runs), 2222222 (4 runs), 3333333 (3 runs), and 2 more; " in told


def test_runs_that_are_left_out_are_not_counted() -> None:
    assert notes(*runs(OLD, (800, 801)), *runs(NEW, (100,), steady=False)) == []
    (told,) = notes(*runs(OLD, (800,), steady=False), *runs(NEW, (100,), steady=False))
    assert "images/s" not in told


def test_the_note_names_its_row_ends_in_a_command_and_goes_into_json() -> None:
    """The row is the baseline, which no other reason names where it is of all rows but that."""
    mixed = [*runs(OLD, (801, 800)), *runs(NEW, (799,))]
    comparison = compared(*mixed, *runs(OLD, (1000, 1001), recipe="compile"))
    lines = as_table(comparison).splitlines()
    told = next(line for line in lines if OF_COMMITS[:20] in line)
    assert told.startswith(f"* bf16: {OF_COMMITS[:20]}")
    assert "    fastlaunch compare 'commit=76689a9*'" in lines
    assert OF_COMMITS in to_json(comparison)["rows"][0]["reason"]


def test_a_brief_table_keeps_the_commits_that_are_apart() -> None:
    apart = [*runs(OLD, (825, 826)), *runs(NEW, (717, 718))]
    close = [*runs(OLD, (901, 900), "compile"), *runs(NEW, (899,), "compile")]
    comparison = compared(*apart, *close)
    assert f"* compile: {OF_COMMITS}" in as_table(comparison)
    text = as_table(comparison, brief=True)
    assert f"* bf16: {OF_COMMITS}" in text and f"* compile: {OF_COMMITS}" not in text


def test_of_a_row_beside_a_baseline_of_one_commit_the_row_is_named() -> None:
    mixed = [*runs(OLD, (901, 900), "compile"), *runs(NEW, (899,), "compile")]
    assert f"* compile: {OF_COMMITS.strip()}" in as_table(compared(*runs(OLD, (800, 801)), *mixed))


def test_the_commit_is_the_record_s_and_no_part_of_what_summaries_are_compared_by(tmp_path: Path) -> None:
    (path,) = write_run(tmp_path, steps=40, header={"commit": OLD})
    summary = summarize([read_record(path)])
    assert summary.commit == OLD
    stored = json.loads(json.dumps(summary.to_json()))
    assert RunSummary.from_json(stored).commit == OLD
    del stored["commit"]
    before = RunSummary.from_json(stored)
    assert before.commit is None and before == summary


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


def test_a_run_without_a_summary_is_of_no_known_commit(tmp_path: Path) -> None:
    with Ledger(tmp_path / "runs.sqlite") as ledger:
        submission = ledger.add_submission("x")
        ledger.add_run(submission, "run-a", spec={}, plan={}, workload="w", recipe="r", backend="local")
        assert ledger.select(["commit=*"]) != [] == ledger.select(["commit=?*"])


TIMES = st.floats(min_value=1e-300, max_value=1e300)


@given(
    given=st.lists(
        st.tuples(st.none() | st.text(max_size=50) | st.sampled_from([OLD, NEW]), TIMES), min_size=1
    )
)
def test_no_commit_and_no_time_crashes_the_note(given: list[tuple[str | None, float]]) -> None:
    candidates = [
        Candidate(run_id=str(n), summary=replace(PLAIN, commit=commit, step_time_s=Interval(value=time_s)))
        for n, (commit, time_s) in enumerate(given)
    ]
    (row,), _ = pool(candidates)
    told = list(commit_notes(row))
    assert len(told) == (len({commit for commit, _ in given}) > 1)


def test_a_row_of_other_commits_than_its_baseline_says_so() -> None:
    rest = {"recipe": "compile"}
    (_, row) = compared(*runs(OLD, (800, 801)), *runs(NEW, (900, 901), **rest)).rows
    assert "of another commit than the baseline: e20c5bc against 76689a9" in row.reasons
    for candidates in (
        runs(OLD, (900, 901), **rest),
        [*runs(OLD, (900,), **rest), *runs(NEW, (901,), **rest)],
        runs(None, (900, 901), **rest),
    ):
        (_, row) = compared(*runs(OLD, (800, 801)), *candidates).rows
        assert "another commit than the baseline" not in " ".join(row.reasons)

"""What is said of a row besides its figures: GPUs that wait, several commits, unequal power limits."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from fake_records import read_all, write_run
from fake_summaries import PLAIN, changed, compared, runs

from fastlaunch.analysis.compare import MeasuredRun
from fastlaunch.analysis.notes import Note, NoteKind
from fastlaunch.cli.main import run
from fastlaunch.core.data import to_data
from fastlaunch.measure.summarize import summarize
from fastlaunch.measure.summary import RunSummary, read_summary

OLD, NEW = "76689a99023ff044deda788085a7fe2d40e265b0", "e20c5bc1d1b7a7f3fd2c4a7a13a3b0a5d2b7c001"


def notes(word: str, *candidates: RunSummary | list[MeasuredRun]) -> list[str]:
    """The reasons with that word, of each row."""
    rows = compared(*candidates).rows
    return ["; ".join(reason for reason in row.verdict.reasons if word in reason) for row in rows]


# --- GPUs that wait --------------------------------------------------------------------------------------


def busy(share: float, fetching: float = 0.0) -> RunSummary:
    return changed(PLAIN, utilization=share, data_wait_fraction=fetching, data="folder")


def test_utilization_is_of_the_least_busy_gpu_after_the_warm_up(tmp_path: Path) -> None:
    """100 steps in blocks of 20: the first compiles, 12 steps of the second count, one was not sampled."""
    of_rank_0: dict[int, float | None] = {20: 0.1, 40: 0.6, 60: None, 80: 0.7, 100: 0.8}
    paths = write_run(
        tmp_path,
        world_size=2,
        steps=100,
        steps_per_block=20,
        # Which rank was slower is chance: they wait for each other.
        step_time_s=lambda rank, step: 0.1 + 1e-6 * rank,
        num_compiles=lambda step: 1,
        utilization=lambda rank, step: 0.9 if rank else of_rank_0[step],
    )
    timing = summarize(read_all(paths)).timing
    mean = (12 * 0.6 + 20 * 0.7 + 20 * 0.8) / 52
    assert (timing.num_retained_steps, timing.utilization) == (72, pytest.approx(mean))


@pytest.mark.parametrize(
    ("summaries", "beginning"),
    [
        ([busy(0.9), busy(1.0)], ""),
        # Why one run is slower than its fellows.
        (
            [busy(0.7), busy(1.0), busy(1.0)],
            "in 1 of 3 runs a GPU computes 70% of the time and waits for its",
        ),
        ([busy(0.8), busy(1.0, 0.5)], "in 1 of 2 runs a GPU computes 80% of the time and waits for its host"),
        ([busy(0.899)], "a GPU computes 89% of the time and waits for its host: "),
        ([busy(0.7, 0.14)], "a GPU computes 70% of the time and waits for its host: "),
        ([busy(0.7, 0.15), busy(0.6, 0.25)], "a GPU computes 65% of the time and waits for data,"),
        # Runs without a GPU's utilization do not count.
        ([busy(0.5), changed(PLAIN, data="folder", data_wait_fraction=0.9)], "a GPU computes 50% of the"),
    ],
)
def test_gpus_that_wait_with_the_cause(summaries: Sequence[RunSummary], beginning: str) -> None:
    (note,) = notes("waits", *summaries)
    assert bool(note) == bool(beginning) and note.startswith(beginning)


# --- commits ---------------------------------------------------------------------------------------------


def at_rates(commit: str | None, rates: Sequence[float], recipe: str = "bf16") -> list[MeasuredRun]:
    """A run for each rate in images/s, at 64 images a step."""
    return runs(recipe, *(64 / rate for rate in rates), commit=commit)


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ((800, 810, 820), (802, 812), NoteKind.COMMITS),
        # The spread is that within a commit: that of the row would hide any difference.
        ((880, 800, 720), (800, 720, 650), NoteKind.COMMITS),
        ((801, 800, 799), (721, 720, 719), NoteKind.COMMITS_APART),
        # Of one run each nothing is known of their scatter.
        ((803,), (780,), NoteKind.COMMITS),
    ],
)
def test_commits_that_differ_by_more_than_their_runs_are_apart(
    old: Sequence[float], new: Sequence[float], kind: NoteKind
) -> None:
    def kinds(*candidates: list[MeasuredRun]) -> list[NoteKind]:
        (row,) = compared(*candidates).rows
        of_commits = (NoteKind.COMMITS, NoteKind.COMMITS_APART)
        return [note.kind for note in map(Note.of, row.verdict.reasons) if note.kind in of_commits]

    assert kinds(at_rates(OLD, old), at_rates(NEW, new)) == [kind]
    assert kinds(at_rates(None, old), at_rates(OLD, (799,))) == [NoteKind.COMMITS]
    assert kinds(at_rates(OLD, old)) == kinds(at_rates(None, old)) == []


def test_a_row_of_other_commits_than_its_baseline() -> None:
    old = at_rates(OLD, (800, 801))
    word = "another commit than the baseline"
    assert "e20c5bc against 76689a9" in notes(word, old, at_rates(NEW, (900, 901), "compile"))[1]
    for commit in (OLD, None):
        assert notes(word, old, at_rates(commit, (900, 901), "compile")) == ["", ""]


def test_runs_are_picked_by_their_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, commit, step_time_s in (
        ("a", OLD, 0.1),
        ("b", OLD, 0.1001),
        ("c", NEW, 0.12),
        ("d", None, 0.1),
    ):
        header = {"commit": commit}
        write_run(tmp_path / name, steps=80, run_id=name, step_time_s=step_time_s, header=header)
    assert run(["runs", "import", str(tmp_path)]) == 0
    capsys.readouterr()
    assert run(["compare", "--notes"]) == 0
    (command,) = (line.strip() for line in capsys.readouterr().out.splitlines() if "commit=" in line)
    for argv, num_runs in ((shlex.split(command)[1:], 2), (["compare", "commit="], 1)):
        assert run([*argv, "--output", "json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        assert row["num_runs"] == num_runs


# --- power limits ----------------------------------------------------------------------------------------


def at(watts: float | None, recipe: str = "bf16") -> RunSummary:
    return changed(PLAIN, recipe=recipe, power_limit_w=watts)


def test_power_limits_that_are_mixed_in_a_row_or_differ_between_rows() -> None:
    mixed = "runs on GPUs at power limits of 400 W and 700 W make one row"
    assert notes("power limit", at(700.0), at(400.0), at(None), at(700.0, "compile")) == [mixed, ""]
    differing = "GPUs at a power limit of 500 W against 700 W"
    assert notes("power limit", at(700.0), at(500.0, "compile")) == ["", differing]
    for first in (500.0, None):
        assert notes("power limit", at(first), at(500.0, "compile")) == ["", ""]


# --- what of this records hold ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recorded", "watts"),
    [(700.0, 700.0), (350, 350.0), (None, None), ("much", None), (True, None), (0, None)],
)
def test_commit_and_power_limit_are_recorded(recorded: Any, watts: float | None, tmp_path: Path) -> None:
    machine = {"host_id": "a", "device_type": "cuda", "device_name": "NVIDIA H200", "power_limit_w": recorded}
    summary = summarize(read_all(write_run(tmp_path, steps=40, header={"machine": machine, "commit": OLD})))
    assert (summary.environment.power_limit_w, summary.environment.commit) == (watts, OLD)
    assert asdict(read_summary(to_data(summary)).environment) == asdict(summary.environment)


# --- runs whose figures have a catch ---------------------------------------------------------------------


def test_early_ends_and_late_compilation_matter_for_a_decision() -> None:
    killed = changed(PLAIN, status="killed", ended="ended as killed", num_steps=40, seed=1)
    late = changed(PLAIN, compiled_late=True, seed=2)
    (row,) = compared(PLAIN, killed, changed(killed, num_steps=60, seed=3), late).rows
    assert row.verdict.decisive == (
        "2 of its 4 runs made 40 to 60 steps, which count, and ended as killed",
        "1 of its 4 runs compiled within the measured steps, which are billed and count",
    )
    (row,) = compared(killed).rows
    assert row.verdict.decisive == ("its run made 40 steps, which count, and ended as killed",)


def test_uneven_steps_on_a_cpu_leave_a_verdict_open_with_a_way_out() -> None:
    note = "steps vary 5x within a run: try OMP_NUM_THREADS=1"
    uneven = {"device_name": "x86_64", "p5_step_time_s": 0.04, "p95_step_time_s": 0.2}
    noisy = (1.0, 1.6, 0.9)
    _, row = compared(runs("bf16", 1.0, 1.1, 1.4, **uneven), runs("compile", *noisy, **uneven)).rows
    assert row.verdict.kind == "unresolved" and note in row.verdict.decisive and note in row.verdict.reasons
    assert notes("within a run", runs("bf16", 1.0, 1.1, 1.4, **uneven), runs("compile", *noisy)) == ["", note]
    for known in ({"p5_step_time_s": 0.09}, {"p5_step_time_s": None}, {"device_name": "NVIDIA H200"}):
        quiet = {**uneven, **known}
        assert not any(
            notes("within a run", runs("bf16", 1.0, 1.1, 1.4, **quiet), runs("compile", *noisy, **quiet))
        )
    settled = runs("bf16", 1.0, 1.01, 1.02, **uneven), runs("compile", 0.5, 0.51, 0.52, **uneven)
    assert not any(notes("within a run", *settled))

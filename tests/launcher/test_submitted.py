"""How a command that started runs ends: its exit code, and what it says to type next."""

from dataclasses import replace
from pathlib import Path

import pytest

from fastlaunch.backends import RunState
from fastlaunch.cli.submitted import exit_code_of, tell_runs
from fastlaunch.core.log_file import LOG
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.ledger.rows import Run
from fastlaunch_train.recipes.recipes import RECIPES


def a_run(state: RunState, directory: Path | None = None) -> Run:
    return Run(
        id="20261121-090312-k3f9",
        submission_id="sub-1",
        created_at="2026-11-21T09:03:12Z",
        backend="ec2",
        state=state,
        reason=None,
        workload="vit-huge",
        recipe="bf16",
        instance="p5.48xlarge",
        directory=directory,
        price=None,
        summary=None,
    )


@pytest.mark.parametrize(
    ("states", "stopped", "code"),
    [
        ([RunState.COMPLETED] * 2, False, 0),
        ([RunState.COMPLETED, RunState.RUNNING], False, 0),
        ([RunState.PLANNED], False, 0),
        ([RunState.COMPLETED, RunState.FAILED], False, 1),
        ([RunState.INTERRUPTED], False, 1),
        ([RunState.LOST], False, 1),
        ([RunState.COMPLETED], True, 130),
    ],
)
def test_the_exit_code_says_whether_all_is_well(states: list[RunState], stopped: bool, code: int) -> None:
    assert exit_code_of([a_run(state) for state in states], stopped=stopped) == code


def test_the_next_command_is_one_that_has_something_to_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def next_after(run: Run) -> str:
        tell_runs([run], output="table")
        return capsys.readouterr().err.splitlines()[-1]

    assert next_after(a_run(RunState.RUNNING)) == "next: fastlaunch logs -f 20261121-090312-k3f9"
    stopped = a_run(RunState.CANCELLED, tmp_path)
    assert next_after(stopped) == "next: fastlaunch runs show 20261121-090312-k3f9"
    (tmp_path / LOG).write_text("it said something\n")
    assert next_after(stopped) == "next: fastlaunch logs 20261121-090312-k3f9"


def test_the_end_of_a_failed_runs_log_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / LOG).write_text("ValueError: no such thing\n")
    tell_runs([replace(a_run(RunState.FAILED, tmp_path), reason="failed")], output="table")
    out, err = capsys.readouterr()
    assert "20261121-090312-k3f9" in out
    assert f"the end of {tmp_path / LOG}:\nValueError: no such thing\n" in err


def test_runs_of_one_recipe_are_told_apart_in_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    job = JobSpec(workload="vit-huge", recipe=RECIPES["bf16"], batch_size=64, steps=9, num_gpus=8)
    of_64, of_128 = (
        replace(a_run(RunState.COMPLETED), spec=one.to_json()) for one in (job, replace(job, batch_size=128))
    )
    tell_runs([of_64, of_128], output="table")
    rows = capsys.readouterr().out.splitlines()[1:3]
    assert ["bf16 at batch 64 " in rows[0], "bf16 at batch 128 " in rows[1]] == [True, True]
    # Imported runs, of which no request is known, have their recipe's name.
    tell_runs([of_64, replace(of_128, spec=None)], output="table")
    assert "at batch" not in capsys.readouterr().out

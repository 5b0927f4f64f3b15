"""Runs as rows and as a sentence, and how a command that started them ends."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from attempt_builders import run_with
from fake_records import write_run
from fake_summaries import changed

from fastlaunch.api.results import Runs, Submitted
from fastlaunch.cli.render import print_run_rows, print_runs, print_table, run_row, runs_sentence
from fastlaunch.core.log_file import LOG
from fastlaunch.core.plan import Ending, RunState
from fastlaunch.core.terminal import plain_output
from fastlaunch.core.units import in_ms
from fastlaunch.jobs.job import Job
from fastlaunch.ledger.ledger import Run
from fastlaunch.lifecycle.describe import run_to_dict
from fastlaunch.measure.record_files import read_record
from fastlaunch.measure.summarize import summarize
from fastlaunch.measure.summary import Interval, RunSummary
from fastlaunch_train.recipes.recipes import RECIPES


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> RunSummary:
    """Two images per step on each of eight ranks."""
    paths = write_run(tmp_path_factory.mktemp("run"), step_time_s=0.1, batch_size=2, world_size=8)
    return summarize([read_record(path) for path in paths])


def run(
    summary: RunSummary | None,
    seconds: float = 0.1,
    *,
    recipe: str = "bf16",
    state: RunState = RunState.COMPLETED,
    reason: str | None = None,
) -> Run:
    if summary:
        summary = changed(
            summary, step_time_s=Interval(value=seconds, low=seconds * 0.99, high=seconds * 1.01)
        )
    return run_with(
        id="r1",
        backend="local",
        state=state,
        reason=reason,
        recipe=recipe,
        instance=None,
        directory=Path("/home/user/runs/r1"),
        summary=summary,
        purchase=None,
    )


def test_speeds_of_sequences_are_in_tokens_and_of_images_in_samples(summary: RunSummary) -> None:
    assert run_row(run(summary))["samples_per_s"] == "160"
    assert run_row(run(summary))["tokens_per_s"] is None
    setup = replace(summary.setup, sample_unit="sequences")
    timing = replace(run(summary).summary.timing, tokens_per_step=1000.0)  # type: ignore[union-attr]
    row = run_row(replace(run(summary), summary=replace(summary, setup=setup, timing=timing)))
    assert (row["samples_per_s"], row["tokens_per_s"]) == (None, "10,000")


def test_the_closing_sentence_is_that_of_compare_with_what_it_leaves_out(summary: RunSummary) -> None:
    runs = [run(summary, 0.1), run(summary, 0.1), run(summary, 0.6, recipe="fp32"), run(None, recipe="fp32")]
    answer = "bf16 gives the most.\nAt batch 8 nothing is ranked."
    lines = runs_sentence(runs, answer).splitlines()
    assert lines[0] == "bf16 gives the most." and lines[1].endswith("1 of 4 runs gave no step time.")
    assert runs_sentence(runs[:3], answer) == answer


def test_runs_that_contradict_are_left_out(summary: RunSummary) -> None:
    wrong = run(changed(summary, problems=("the ranks differ",)), 0.2)
    assert run_row(wrong)["note"] == "the ranks differ"
    assert run_row(wrong)["step_time"] is None
    assert runs_sentence([wrong], "bf16 gives 1.").startswith("No step time: ")
    assert runs_sentence([wrong, wrong, run(summary)], "bf16 gives 1.").endswith(
        "; 2 of 3 runs gave no step time."
    )


def test_a_run_that_was_stopped_half_way_was_measured_up_to_there(summary: RunSummary) -> None:
    # Whatever its state, `compare` counts it, too.
    assert run_row(run(summary, state=RunState.FAILED))["step_time"] == "100 ms"
    stopped = run(summary, state=RunState.INTERRUPTED, reason="stopped by Ctrl-C")
    row = run_row(stopped)
    assert (row["step_time"], row["samples_per_s"], row["note"]) == ("100 ms", "160", "stopped by Ctrl-C")
    assert runs_sentence([stopped], "bf16 gives 1.") == "bf16 gives 1."


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00123456, "1.23 ms"), (0.1234, "123 ms"), (0.9996, "1,000 ms"), (12.34, "12,340 ms")],
)
def test_step_times_have_three_digits_and_one_unit(seconds: float, text: str) -> None:
    assert in_ms(seconds) == text


def a_run(state: RunState, directory: Path | None = None) -> Run:
    return replace(run(None, state=state), id="20261121-090312-k3f9", directory=directory)


@pytest.mark.parametrize(
    ("states", "stopped", "code"),
    [
        ([RunState.COMPLETED, RunState.RUNNING], False, 0),
        ([RunState.PLANNED], False, 0),
        ([RunState.COMPLETED, RunState.FAILED], False, 1),
        ([RunState.INTERRUPTED], False, 1),
        ([RunState.LOST], False, 1),
        ([RunState.COMPLETED], True, 130),
    ],
)
def test_the_exit_code_says_whether_all_is_well(states: list[RunState], stopped: bool, code: int) -> None:
    submitted = Submitted(runs=Runs([a_run(state) for state in states]), is_stopped=stopped)
    assert submitted.exit_code == code


def test_the_next_command_is_one_that_has_something_to_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def next_after(run: Run) -> str:
        print_runs([run], output="table")
        return capsys.readouterr().err.splitlines()[-1]

    assert next_after(a_run(RunState.RUNNING)) == "next: fastlaunch logs -f 20261121-090312-k3f9"
    stopped = a_run(RunState.CANCELLED, tmp_path)
    assert next_after(stopped) == "next: fastlaunch runs show 20261121-090312-k3f9"
    (tmp_path / LOG).write_text("it said something\n")
    assert next_after(stopped) == "next: fastlaunch logs 20261121-090312-k3f9"
    print_runs([a_run(RunState.FAILED, tmp_path)], output="table")
    assert f"{tmp_path / LOG}:\nit said something\n" in capsys.readouterr().err
    # The error itself is the run's reason, which its hint follows.
    (tmp_path / LOG).write_text("error: its rank is 0\n  give 1 or more\n")
    print_runs([a_run(RunState.FAILED, tmp_path)], output="table")
    assert capsys.readouterr().err.startswith("  give 1 or more\n")


def test_of_several_runs_that_were_stopped_the_one_that_can_go_on_is_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], summary: RunSummary
) -> None:
    job = Job(workload="vit-huge", recipe=RECIPES["bf16"], batch_size=2, steps=9, num_gpus=1)
    done = replace(run(summary, 0.1), backend="local", directory=tmp_path, spec=job.to_json())
    stopped = replace(done, state=RunState.INTERRUPTED, id="20261121-090312-k3f9")

    def next_after(last: Run) -> str:
        print_runs([done, last], output="table")
        return capsys.readouterr().err.splitlines()[-1]

    assert next_after(stopped) == "next: fastlaunch compare"
    on_aws = replace(stopped, backend="ec2", spec=replace(job, checkpoint_every=3).to_json())
    assert next_after(on_aws) == f"next: fastlaunch resume {stopped.id}"
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000003.pt").touch()
    assert next_after(stopped) == f"next: fastlaunch resume {stopped.id}"


def test_runs_of_one_recipe_are_named_apart_in_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(workload="vit-huge", recipe=RECIPES["bf16"], batch_size=64, steps=9, num_gpus=8)
    of_64, of_128 = (
        replace(a_run(RunState.COMPLETED), spec=one.to_json()) for one in (job, replace(job, batch_size=128))
    )
    print_runs([of_64, of_128], output="table")
    rows = capsys.readouterr().out.splitlines()[1:3]
    assert ["bf16 at batch 64 " in rows[0], "bf16 at batch 128 " in rows[1]] == [True, True]
    # Imported runs, of which no request is known, have their recipe's name.
    print_runs([of_64, replace(of_128, spec=None)], output="table")
    assert "at batch" not in capsys.readouterr().out


def test_the_model_that_a_run_left_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = a_run(RunState.COMPLETED, tmp_path)
    print_runs([done], output="table")
    assert "model of" not in capsys.readouterr().out
    (tmp_path / "model-attempt-2").mkdir()
    print_runs([done, replace(done, state=RunState.FAILED)], output="table")
    assert capsys.readouterr().out.splitlines().count(f"model of {done.id}: {tmp_path}/model-attempt-2") == 1
    assert run_to_dict(done)["model"] == f"{tmp_path}/model-attempt-2"


class Terminal(io.StringIO):
    """A terminal that keeps what it is sent."""

    def isatty(self) -> bool:
        return True


def test_states_have_colours_on_a_terminal_and_what_jobs_say_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = "r1  bf16  completed  12.3 ms\nr2  fp32  failed     failed: \x1b]0;title\x07\x1b[31mred"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", plain_output(terminal))
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_table(shown)
    assert terminal.getvalue() == (
        "r1  bf16  \x1b[32mcompleted\x1b[0m  12.3 ms\n"
        "r2  fp32  \x1b[31mfailed\x1b[0m     failed: ^[]0;title^Gred\n"
    )
    monkeypatch.setenv("NO_COLOR", "1")
    before = len(terminal.getvalue())
    print_table(shown)
    assert "\x1b" not in terminal.getvalue()[before:]


def test_planned_runs_that_were_not_needed_take_one_line(
    summary: RunSummary, capsys: pytest.CaptureFixture[str]
) -> None:
    print_run_rows([run_row(run(summary))], num_unneeded=10)
    assert capsys.readouterr().out.splitlines()[-2:] == ["10 planned runs were not needed.", ""]
    print_run_rows([], num_unneeded=1)
    assert capsys.readouterr().out == "1 planned run was not needed.\n\n"


def test_runs_that_a_stop_kept_from_starting_take_one_line_and_are_not_missed(
    summary: RunSummary, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = replace(
        a_run(RunState.INTERRUPTED), id="begun", ending=Ending.STOPPED, reason="stopped by Ctrl-C"
    )
    later = [replace(stopped, state=RunState.CANCELLED, id=f"later-{number}") for number in range(13)]
    print_runs([run(summary), stopped, *later], output="table", answer="bf16 gives 160 images/s.")
    printed = capsys.readouterr().out
    assert "13 planned runs were not started." in printed and "later" not in printed
    assert printed.rstrip().endswith("; 1 of 2 runs gave no step time.")


def test_several_runs_with_one_reason_all_show_it(capsys: pytest.CaptureFixture[str]) -> None:
    failed = [replace(a_run(RunState.FAILED), id=f"r{number}", reason="too few steps") for number in range(3)]
    print_runs(failed, output="table")
    assert capsys.readouterr().out.count("too few steps") == 4
    print_runs(failed[:1], output="table")
    assert capsys.readouterr().out.count("too few steps") == 1


def test_a_script_without_torch_is_told_the_extra_and_what_came_after_it_takes_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.txt").write_text("ModuleNotFoundError: No module named 'torch'\n", encoding="utf-8")
    failed = replace(a_run(RunState.FAILED, tmp_path), reason="failed: exit code 1")
    after = replace(a_run(RunState.CANCELLED), id="later", ending=Ending.EARLIER_FAILED)
    print_runs([failed, after, replace(after, id="last")], output="table")
    printed = capsys.readouterr()
    assert "2 planned runs were not started." in printed.out and "later" not in printed.out
    assert "  pip install 'fastlaunch[train]'" in printed.err.splitlines()

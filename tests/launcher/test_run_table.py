"""Runs as rows and as a sentence, with known answers."""

from dataclasses import replace
from pathlib import Path

import pytest
from fake_records import write_run

from fastlaunch.backends import RunState
from fastlaunch.cli.render import answer, duration, row
from fastlaunch.ledger.ledger import Run
from fastlaunch.measure.summarize import Interval, RunSummary, summarize
from fastlaunch_train.records.records import read_record


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
        summary = replace(
            summary, step_time_s=Interval(value=seconds, low=seconds * 0.99, high=seconds * 1.01)
        )
    return Run(
        id="r1",
        submission_id="s1",
        created_at="2026-11-21T10:00:00+00:00",
        backend="local",
        state=state,
        reason=reason,
        workload="vit-huge",
        recipe=recipe,
        instance=None,
        directory=Path("/home/user/runs/r1"),
        price=None,
        summary=summary,
    )


def test_one_run_has_its_own_interval_and_all_ranks_count(summary: RunSummary) -> None:
    assert answer([run(summary)]) == (
        "bf16 on vit-huge, batch 2: 100 ms per step (99.0 to 101), 160 images/s."
    )


def test_several_runs_are_their_geometric_mean_and_the_two_ends(summary: RunSummary) -> None:
    assert answer([run(summary, 0.1), run(summary, 0.144)]) == (
        "bf16 on vit-huge, batch 2: 120 ms per step (100 to 144), 133 images/s over 2 runs."
    )


def test_the_fastest_recipe_is_named_only_if_its_slowest_run_beats_the_others(summary: RunSummary) -> None:
    bf16 = [run(summary, 0.1), run(summary, 0.11)]
    fp32 = [run(summary, 0.5, recipe="fp32"), run(summary, 0.6, recipe="fp32")]
    assert answer([*fp32, *bf16]) == (
        "bf16 is the fastest on vit-huge, batch 2: 105 ms per step (100 to 110), 153 images/s over 2 runs; "
        "fp32 548 ms per step."
    )
    close = [run(summary, 0.105, recipe="fp32"), run(summary, 0.2, recipe="fp32")]
    assert answer([*close, *bf16]).startswith("bf16 on vit-huge")
    assert answer([*close, *bf16]).endswith("; fp32 145 ms per step, too close to tell apart.")


def test_recipes_without_intervals_are_not_called_close(summary: RunSummary) -> None:
    short = replace(summary, step_time_s=Interval(value=0.5))
    told = answer([replace(run(summary, recipe="fp32"), summary=short), run(summary, 0.1)])
    assert told.endswith("; fp32 500 ms per step, from too few steps to tell how far apart.")


def test_runs_that_did_not_settle_or_contradict_are_left_out(summary: RunSummary) -> None:
    restless = run(replace(summary, steady=False), 0.2)
    assert row(restless)["note"] == "its step time did not settle"
    assert answer([restless]) == "No step time: its step time did not settle."
    wrong = run(replace(summary, problems=("the ranks differ",)), 0.2)
    assert answer([restless, wrong, run(summary)]).endswith("; 2 of 3 runs gave no step time.")


def test_a_run_that_was_stopped_half_way_was_measured_up_to_there(summary: RunSummary) -> None:
    stopped = run(summary, state=RunState.INTERRUPTED, reason="stopped by Ctrl-C")
    assert answer([stopped]).startswith("bf16 on vit-huge, batch 2: 100 ms per step")
    assert row(stopped)["note"] == "stopped by Ctrl-C"


def test_a_failed_run_gives_its_reason(summary: RunSummary) -> None:
    failed = run(summary, state=RunState.FAILED, reason="out of memory")
    assert answer([failed]) == "No step time: out of memory."
    assert answer([run(None, state=RunState.RUNNING)]) == "No step time: no run has ended."
    assert answer([]) == "No step time: there are no runs."


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00123456, "1.23 ms"), (0.0123, "12.3 ms"), (0.1234, "123 ms"), (0.9996, "1.00 s"), (12.34, "12.3 s")],
)
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_runs_of_other_batch_sizes_get_a_sentence_of_their_own(summary: RunSummary) -> None:
    larger = run(replace(summary, batch_size_per_gpu=4), 0.15)
    told = answer([run(summary, 0.1), larger, run(None, state=RunState.FAILED, reason="out of memory")])
    assert [line.split(":")[0] for line in told.splitlines()] == [
        "bf16 on vit-huge, batch 2",
        "bf16 on vit-huge, batch 4",
    ]
    assert told.endswith("; 1 of 3 runs gave no step time.") and told.count("gave no") == 1

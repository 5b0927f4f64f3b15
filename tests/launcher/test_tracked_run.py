"""What experiment trackers are given of a run."""

import datetime
from pathlib import Path
from typing import Any

import pytest
from fake_records import read_all, write_run

from fastlaunch.catalog.prices import Price
from fastlaunch.measure.summarize import summarize
from fastlaunch.report.trackers import TrackedRun, tracked_run
from fastlaunch_train.records.records import Eval

STARTED_S = datetime.datetime(2026, 11, 1, 12, tzinfo=datetime.UTC).timestamp()
ROW = {
    "id": "r1",
    "created_at": "2026-11-01T12:00:00+00:00",
    "submission": None,
    "backend": "local",
    "state": "completed",
}
SCRIPT_RECIPE = {"name": "script", "label": "amp=a b", "precision": "unknown"}
PRICE = Price(
    instance="p5.48xlarge",
    service="ec2",
    region="us-east-1",
    usd_per_hour=36.0,
    as_of=datetime.date(2026, 11, 1),
    source="a test",
)


def tracked(folder: Path, price: Price | None = None, **changes: Any) -> TrackedRun:
    """The run whose records lie in `folder`, written there first if there are `changes`."""
    if changes:
        write_run(folder, **changes)
    records = read_all(sorted(folder.iterdir()))
    return tracked_run(ROW, summarize(records), records, price)


def test_parameters_tags_and_figures(tmp_path: Path) -> None:
    run = tracked(
        tmp_path,
        PRICE,
        recipe="bf16 optimizer_impl=fused",
        world_size=2,
        num_nodes=2,
        batch_size=4,
        seed=3,
        instance="p5.48xlarge",
        step_time_s=0.1,
    )
    assert (run.id, run.name, run.workload, run.status) == (
        *("r1", "bf16 optimizer_impl=fused", "vit-huge", "completed"),
    )
    expected = {
        "workload": "vit-huge",
        "recipe": "bf16 optimizer_impl=fused",
        "recipe.optimizer_impl": "fused",
        "batch_size_per_gpu": 4,
        "global_batch": 8,
        "num_nodes": 2,
        "seed": 3,
        "instance": "p5.48xlarge",
        "fingerprint.torch": "2.13.0",
    }
    assert {name: run.params.get(name) for name in expected} == expected
    # Not known, so not there.
    assert not {"fingerprint.transformer_engine", "commit", "command"} & run.params.keys()
    assert run.tags == {"run_id": "r1", "backend": "local", "state": "completed"}
    figures = run.figures
    assert figures["step_time_s"] == pytest.approx(0.1)
    assert figures["samples_per_s"] == pytest.approx(80)
    # Two nodes at $36 per hour: $0.02 per second for 80 samples.
    assert figures["usd_per_hour"] == 72
    assert figures["usd_per_million_samples"] == pytest.approx(250)
    assert (figures["build_s"], figures["num_steps"]) == (1.5, 200)


def test_a_step_is_that_of_the_slowest_rank_and_the_samples_are_all_ranks(tmp_path: Path) -> None:
    run = tracked(
        tmp_path,
        steps=40,
        world_size=2,
        batch_size=4,
        steps_per_block=1,
        step_time_s=lambda rank, step: 0.1 + 0.1 * rank,
        loss=lambda rank, step: float(step + rank),
        data_wait_s=0.01,
    )
    assert [point.step for point in run.points] == list(range(1, 41))
    assert run.points[4].metrics == pytest.approx(
        {"step_time_s": 0.2, "samples_per_s": 40, "loss": 5.5, "data_wait_s": 0.01}
    )
    assert (run.started_s, run.points[0].at_s) == pytest.approx((STARTED_S, STARTED_S + 0.2))
    assert run.ended_s == pytest.approx(STARTED_S + 40 * 0.2)


def test_what_a_script_leaves_open_is_not_there(tmp_path: Path) -> None:
    script = {"command": ["python", "train.py", "--amp", "a b"], "variant": {"amp": "a b"}}
    run = tracked(
        tmp_path,
        steps=40,
        loss=lambda rank, step: None,
        header={"script": script, "seed": None, "steps": None, "recipe": SCRIPT_RECIPE},
    )
    assert run.params["variant.amp"] == "a b"
    assert run.params["command"] == "python train.py --amp 'a b'"
    assert "seed" not in run.params and "usd_per_hour" not in run.figures
    assert {*run.points[0].metrics} == {"step_time_s", "samples_per_s", "data_wait_s"}


def test_evaluations_stand_at_their_steps(tmp_path: Path) -> None:
    scored = {"num_samples": 10, "seconds": 5.0, "metric": "accuracy", "metric_value": 0.5}
    evals = [
        Eval(step=20, split="validation", loss=None, **scored),
        Eval(step=40, split="test", loss=0.25, weights="best", **scored),
    ]
    run = tracked(tmp_path, steps=40, evals=evals, phases=())
    first, last = (run.points[step - 1].metrics for step in (20, 40))
    assert first["validation/accuracy"] == 0.5 and "validation/loss" not in first
    assert last["test-best/loss"] == 0.25


def test_a_step_done_again_is_the_later_attempts(tmp_path: Path) -> None:
    again = {"attempt": 2, "first_step": 21, "started_at": "2026-11-01T13:00:00+00:00"}
    write_run(tmp_path, steps=30, status=None, num_unsynchronised=5, phases=())
    write_run(tmp_path, steps=20, phases=(), loss=lambda rank, step: -1.0, **again)
    run = tracked(tmp_path)
    assert [point.step for point in run.points] == list(range(1, 41))
    assert run.points[19].metrics["loss"] > 0 > run.points[20].metrics["loss"]
    assert run.points[20].at_s == pytest.approx(STARTED_S + 3600.1)


def test_a_run_without_records_has_what_the_ledger_knows(tmp_path: Path) -> None:
    records = read_all(write_run(tmp_path, steps=40))
    run = tracked_run(ROW, summarize(records), (), None)
    assert run.params["recipe"] == "bf16" and run.figures["step_time_s"] == pytest.approx(0.1)
    assert (run.points, run.started_s, run.ended_s) == ((), STARTED_S, STARTED_S)

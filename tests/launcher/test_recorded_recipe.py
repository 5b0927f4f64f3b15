"""The label by which runs are pooled and paired, of what their headers say of recipe and workload."""

from pathlib import Path
from typing import Any

import pytest
from fake_records import read_all, write_run

from fastlaunch.analysis.pooling import MeasuredRun, pool
from fastlaunch.analysis.validity import rules_of
from fastlaunch.measure.summarize import summarize
from fastlaunch.measure.summary import RunSummary
from fastlaunch_train.recipes.recipes import resolve_recipe

WORKLOAD = {"name": "vit-tiny", "sample_unit": "images", "flops_per_sample": None, "num_parameters": None}
OWN = {"optimizer": "adamw", "learning_rate": 1e-3}


def summary_of(folder: Path, *overrides: str, own: dict[str, Any]) -> RunSummary:
    recipe = resolve_recipe("bf16", overrides)
    header = {"workload": WORKLOAD | own, "recipe": recipe.to_record()}
    folder.mkdir()
    write_run(folder, run_id=folder.name, workload="vit-tiny", header=header)
    return summarize(read_all(folder.iterdir()))


@pytest.mark.parametrize(
    ("overrides", "own", "label"),
    [
        (["optimizer=adamw"], OWN, "bf16"),
        (["learning_rate=0.001", "optimizer=adamw"], OWN, "bf16"),
        (["learning_rate=0.001", "optimizer=sgd"], OWN, "bf16 optimizer=sgd"),
        (["learning_rate=0.1", "optimizer_impl=fused"], OWN, "bf16 learning_rate=0.1 optimizer_impl=fused"),
        # Of before it was kept, and of a workload that trains nothing.
        (["optimizer=adamw"], {}, "bf16 optimizer=adamw"),
        (["optimizer=adamw"], dict.fromkeys(OWN), "bf16 optimizer=adamw"),
    ],
)
def test_an_override_that_asks_for_the_workloads_own_is_none(
    overrides: list[str], own: dict[str, Any], label: str, tmp_path: Path
) -> None:
    assert summary_of(tmp_path / "r", *overrides, own=own).setup.recipe == label


def test_the_same_optimizer_by_name_is_a_repeat_and_trains_by_the_same_rules(tmp_path: Path) -> None:
    asked = {"plain": (), "named": ("optimizer=adamw",), "other": ("optimizer=sgd",)}
    summaries = {name: summary_of(tmp_path / name, *of, own=OWN) for name, of in asked.items()}
    rows, unfit = pool([MeasuredRun(run_id=name, summary=summary) for name, summary in summaries.items()])
    assert [[run.run_id for run in row.all_runs] for row in rows] == [["plain", "named"], ["other"]]
    assert not unfit
    assert [rules_of(row.first.setup.recipe) for row in rows] == [(), ("optimizer=sgd",)]

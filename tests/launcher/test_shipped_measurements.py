"""The measurements that ship with fastlaunch: sound, and what the demo says of them is what they say."""

import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
from fake_summaries import compared

from fastlaunch.core.data import to_data
from fastlaunch.core.paths import shipped
from fastlaunch.lifecycle.importer import find_runs
from fastlaunch.measure.published import shipped_summaries
from fastlaunch.measure.summary import RunSummary

#: Images/s on one H200 as measured before fastlaunch was written: eager bf16 at batch 128, Transformer
#: Engine's FP8 at 256.
BEFORE = {"bf16": 481, "te-fp8": 743}


@pytest.fixture(scope="module")
def summaries() -> dict[str, RunSummary]:
    return shipped_summaries()


@pytest.mark.slow
def test_the_summaries_are_those_of_the_records(summaries: dict[str, RunSummary]) -> None:
    found = find_runs([shipped("measurements")])
    assert not found.skipped
    counted = {id: run for id, run in found.runs.items() if run.summary.profile is None}
    assert set(counted) == set(summaries)
    for run_id, run in counted.items():
        assert _rounded(to_data(run.summary)) == _rounded(to_data(summaries[run_id])), run_id


def _rounded(value: Any) -> Any:
    """Return the value with 12 digits of every number; processors differ in the last ones of a logarithm."""
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return float(f"{value:.12g}") if isinstance(value, float) else value


def test_the_page_of_records_lists_every_folder_with_its_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "results" / "records.md").read_text(encoding="utf-8")
    listed = {}
    for line in page.splitlines():
        if line.startswith("| `"):
            folders, _, _, runs, _ = line.strip("| ").split(" | ")
            counts = re.split(", ", runs)
            listed |= dict(zip(re.findall(r"`([^`]+)`", folders), map(int, counts), strict=True))
    counted = {}
    for path in shipped("measurements").glob("*/*.tar.xz"):
        with tarfile.open(path) as archive:
            runs = {name.split("/")[0] for name in archive.getnames()}
        counted[path.parent.name] = counted.get(path.parent.name, set()) | runs
    assert listed == {folder: len(runs) for folder, runs in counted.items()}


def test_every_run_is_fit_to_compare(summaries: dict[str, RunSummary]) -> None:
    assert len(summaries) >= 4
    assert not [run_id for run_id, summary in summaries.items() if summary.problems]


def test_the_experiments_arms_are_there_and_its_speed_is_met(summaries: dict[str, RunSummary]) -> None:
    comparison = compared(*summaries.values())
    h200 = [row for row in comparison.rows if row.setup.device_name == "NVIDIA H200"]
    rows = {
        row.setup.recipe: row
        for row in h200
        if (row.setup.num_gpus, row.setup.batch_size_per_gpu) == (1, 256)
    }
    assert rows.keys() >= {"bf16", "compile", "te-bf16", "te-fp8"}
    for recipe, images_per_s in BEFORE.items():
        speed = rows[recipe].speed.samples_per_s
        assert speed is not None and speed.value >= images_per_s
    others = [row for row in comparison.rows if row not in h200]
    assert {(row.setup.workload, row.setup.num_gpus, row.setup.device_name) for row in others} == {
        (workload, num_gpus, "NVIDIA H100 80GB HBM3")
        for workload, num_gpus in (
            ("vit-huge", 1),
            ("vit-huge", 2),
            ("gpt2-xsmall", 1),
            ("distilbert-imdb", 1),
            ("hf-lora:llama-2-7b", 1),
            ("hf-lora:llama-3.1-8b", 1),
        )
    }

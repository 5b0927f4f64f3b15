"""GPUs that may draw unequal power are unequally fast: where rows mix them, or differ in them, it is said."""

import datetime
from pathlib import Path
from typing import Any

import pytest
from fake_records import write_run
from fake_summaries import PLAIN, changed

from fastlaunch.analysis.compare import MeasuredRun, PriceRequest, compare
from fastlaunch.catalog.load import load_catalogue
from fastlaunch.measure.summarize import summarize
from fastlaunch.measure.summary import RunSummary
from fastlaunch_train.records.records import read_record

MACHINE = {"host_id": "a", "device_type": "cuda", "device_name": "NVIDIA H200"}


def told(*runs: RunSummary) -> list[str]:
    """What is said of power limits, of the baseline and of the other row."""
    candidates = [MeasuredRun(run_id=str(number), summary=one) for number, one in enumerate(runs)]
    prices = PriceRequest(today=datetime.date(2026, 11, 21))
    rows = compare(candidates, catalogue=load_catalogue(), prices=prices).rows
    return ["; ".join(text for text in row.verdict.reasons if "power limit" in text) for row in rows]


def at(watts: float | None, recipe: str = "bf16") -> RunSummary:
    return changed(PLAIN, recipe=recipe, power_limit_w=watts)


@pytest.mark.parametrize(
    ("recorded", "watts"),
    [(700.0, 700.0), (350, 350.0), (None, None), ("much", None), (True, None), (0, None)],
)
def test_it_is_read_from_the_records(recorded: Any, watts: float | None, tmp_path: Path) -> None:
    files = write_run(tmp_path, header={"machine": {**MACHINE, "power_limit_w": recorded}})
    found = summarize([read_record(file) for file in files])
    assert found.environment.power_limit_w == watts
    # Summaries of before it was kept, as they are shipped, are the same ones.
    assert found == changed(found, power_limit_w=None)
    assert RunSummary.from_json(found.to_json()).environment.power_limit_w == watts


def test_a_row_of_several_is_told() -> None:
    mixed = "runs on GPUs at power limits of 400 W and 700 W make one row"
    assert told(at(700.0), at(400.0), at(None), at(700.0, "compile")) == [mixed, ""]


def test_a_row_at_another_than_the_baselines_is_told() -> None:
    differing = "GPUs at a power limit of 500 W against 700 W"
    assert told(at(700.0), at(500.0, "compile")) == ["", differing]
    assert told(at(700.0), at(700.0, "compile")) == told(at(None), at(500.0, "compile")) == ["", ""]

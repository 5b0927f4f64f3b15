"""GPUs that wait for their host: found in the records, and told where a faster one would gain little."""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_records import read_all, write_run
from fake_summaries import PLAIN, changed

from fastlaunch.analysis.compare import Comparison, MeasuredRun, PriceRequest, compare
from fastlaunch.catalog.load import load_catalogue
from fastlaunch.measure.summarize import summarize
from fastlaunch.measure.summary import RunSummary


def compared(*runs: RunSummary) -> Comparison:
    candidates = [MeasuredRun(run_id=str(number), summary=one) for number, one in enumerate(runs)]
    prices = PriceRequest(today=datetime.date(2026, 11, 22))
    return compare(candidates, catalogue=load_catalogue(), prices=prices)


def told(*runs: RunSummary) -> list[str]:
    """What is said of waiting, of each row."""
    return [
        "; ".join(text for text in row.verdict.reasons if "waits" in text) for row in compared(*runs).rows
    ]


def busy(share: float | None, fetching: float | None = 0.0, **others: str) -> RunSummary:
    return changed(PLAIN, utilization=share, data_wait_fraction=fetching, **{"data": "folder", **others})


def test_it_is_the_mean_of_the_blocks_after_the_warm_up(tmp_path: Path) -> None:
    """Of 100 steps in blocks of 20 the first block compiles; one was not sampled."""
    paths = write_run(
        tmp_path,
        steps=100,
        steps_per_block=20,
        num_compiles=lambda step: 1,
        utilization=lambda rank, step: {20: 0.1, 40: 0.6, 60: None, 80: 0.7, 100: 0.8}[step],
    )
    found = summarize(read_all(paths))
    assert found.timing.num_retained_steps == 80
    assert found.timing.utilization == pytest.approx(0.7)
    assert RunSummary.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize("slower", [-1e-6, 1e-6])
def test_it_is_of_the_gpu_that_computed_least(tmp_path: Path, slower: float) -> None:
    """Ranks meet at the end of every block: which was slower is chance."""
    paths = write_run(
        tmp_path,
        world_size=2,
        step_time_s=lambda rank, step: 0.1 + slower * rank,
        utilization=lambda rank, step: 0.9 - 0.4 * rank,
    )
    assert summarize(read_all(paths)).timing.utilization == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([busy(0.9)], ""),
        ([busy(0.8), busy(1.0)], ""),
        ([busy(0.899)], "a GPU computes 89% of the time and waits for its host: "),
        ([busy(0.7, 0.14)], "a GPU computes 70% of the time and waits for its host: "),
        (
            [busy(0.7, 0.15), busy(0.6, 0.25)],
            "a GPU computes 65% of the time and waits for data,"
            " which its host takes 20% of the time to fetch: ",
        ),
        # Of the runs in which a GPU was looked at.
        ([busy(0.5), busy(None, 0.9)], "a GPU computes 50% of the time and waits for its host: "),
    ],
)
def test_gpus_that_wait_are_told_with_the_cause(runs: Sequence[RunSummary], said: str) -> None:
    (found,) = told(*runs)
    assert found.partition(": ")[0] == said.removesuffix(": ")

"""What costs least to the end of a job, beside totals that hold more than what is compared."""

import datetime
from dataclasses import replace
from typing import Any

from fake_summaries import PLAIN

from fastlaunch.analysis.compare import Candidate, Comparison, PriceRequest, compare
from fastlaunch.catalog.prices import load_catalogue
from fastlaunch.measure.summarize import Interval, RunSummary
from fastlaunch.report.finish import finish_json, finish_table
from fastlaunch_train.records.records import Eval


def run(recipe: str, time_s: float, every: int, **changes: Any) -> RunSummary:
    """A run of 200 steps, evaluated for 10 s at each `every` steps."""
    evals = [
        Eval(step=step, split="validation", loss=2.0, num_samples=100, seconds=10.0)
        for step in range(every, 201, every)
    ]
    times = {"build_s": 2.0, "warmup_s": 10 * time_s, "num_warmup_steps": 10, "step_time_s": timed(time_s)}
    return replace(PLAIN, recipe=recipe, evals=tuple(evals), eval_s=10.0 * len(evals), **{**times, **changes})


def timed(value: float) -> Interval:
    return Interval(value=value, low=0.999 * value, high=1.001 * value)


def compared(*runs: RunSummary, **prices: Any) -> Comparison:
    candidates = [Candidate(run_id=str(number), summary=one) for number, one in enumerate(runs)]
    request = PriceRequest(today=datetime.date(2026, 11, 21), **prices)
    return compare(candidates, catalogue=load_catalogue(), prices=request)


def notes(*runs: RunSummary, **prices: Any) -> list[str]:
    (workload,) = finish_json(compared(*runs, **prices), 1000)["workloads"]
    return list(workload["notes"])


def test_a_single_step_is_one() -> None:
    found = compared(run("bf16", 0.1, 50), run("compile", 0.08, 50))
    assert "to the end of 1 step, 64 images" in finish_table(found, 1)
    assert "to the end of 2 steps, " in finish_table(found, 2)


def test_what_costs_least_is_told_with_its_total() -> None:
    runs = run("bf16", 0.1, 50), run("compile", 0.08, 50)
    # 2 + 1000 x 0.08 + 20 x 10 = 282 s
    assert notes(*runs)[0] == "1,000 steps are done first with compile: 282 s"
    assert notes(*runs, usd_per_hour=36.0)[0] == "1,000 steps cost least with compile: $2.82"


def test_a_total_that_holds_more_than_what_is_compared_is_not_told_as_the_least() -> None:
    """compile is faster, and was evaluated twice as often: its total is the larger one."""
    runs = run("bf16", 0.1, 100), run("compile", 0.08, 50)
    assert notes(*runs, usd_per_hour=36.0)[0] == "1,000 steps cost least with compile, evaluations apart"
    assert notes(*runs)[0] == "1,000 steps are done first with compile, evaluations apart"
    booted = run("bf16", 0.1, 50), run("compile", 0.08, 50, boot_s=60.0, pull_s=90.0)
    assert notes(*booted)[0] == "1,000 steps are done first with compile, boot and pull apart"

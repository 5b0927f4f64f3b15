"""The sentence that answers a comparison claims no more than its rows do, and leaves out nothing better."""

import datetime

from fake_summaries import PLAIN, changed

from fastlaunch.analysis.compare import MeasuredRun, PriceRequest, compare
from fastlaunch.catalog.load import load_catalogue
from fastlaunch.measure.summary import Interval
from fastlaunch.report.text import answer


def runs(recipe: str, time_s: float, number: int = 3, *, steady: bool = True) -> list[MeasuredRun]:
    """Runs of one row; a single one has no interval."""
    bounds = {} if number == 1 else {"low": 0.999 * time_s, "high": 1.001 * time_s}
    summary = changed(PLAIN, recipe=recipe, step_time_s=Interval(value=time_s, **bounds), steady=steady)
    return [MeasuredRun(run_id=f"{recipe}-{n}", summary=changed(summary, seed=n)) for n in range(number)]


def answered(*rows: list[MeasuredRun]) -> str:
    candidates = [run for row in rows for run in row]
    prices = PriceRequest(today=datetime.date(2026, 11, 21))
    return answer(compare(candidates, catalogue=load_catalogue(), prices=prices))


def test_what_may_be_better_than_the_best_is_named() -> None:
    established = [runs("bf16", 0.1), runs("compile", 0.08)]
    assert answered(*established, runs("te-fp8", 0.09)).endswith("than bf16 (between +23.5% and +26.5%).")
    assert answered(*established, runs("te-fp8", 0.05, 1)).endswith(
        "%); te-fp8 shows 100.0% more, but has no interval."
    )


def test_what_did_not_settle_is_not_told_as_measured() -> None:
    assert answered(runs("bf16", 0.1)) == "bf16 gives 640 images/s."
    assert answered(runs("bf16", 0.1), runs("fp32", 0.2, steady=False)) == (
        "bf16 gives 640 images/s; the step times of the others did not settle."
    )
    assert answered(runs("bf16", 0.1, steady=False)) == (
        "bf16 gives 640 images/s, by a step time that did not settle."
    )

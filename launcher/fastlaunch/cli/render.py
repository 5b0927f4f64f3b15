"""Runs as rows of a table and as a sentence, as `submit` and `status` end with."""

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from fastlaunch.backends import RunState
from fastlaunch.measure.summarize import Interval, RunSummary

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Run

HEADERS: Mapping[str, str] = {
    "run": "run",
    "recipe": "recipe",
    "state": "state",
    "step_time": "step time",
    "samples_per_s": "samples/s",
    "note": "",
}


def row(run: "Run", *, note: str | None = None) -> dict[str, Any]:
    """A run as a row under HEADERS. note: what to say of it; by default why it is as it is."""
    summary = run.summary
    step_time = summary.step_time_s if summary else None
    return {
        "run": run.id,
        "recipe": run.recipe,
        "state": str(run.state),
        "step_time": duration(step_time.value) if step_time else None,
        "samples_per_s": _rounded(_rate(summary)) if summary and step_time else None,
        "note": note or run.reason or (_shortcoming(summary) if summary else None),
    }


def to_json(run: "Run") -> dict[str, Any]:
    """A run as programs get it."""
    return {
        "id": run.id,
        "submission": run.submission_id,
        "state": str(run.state),
        "reason": run.reason,
        "workload": run.workload,
        "recipe": run.recipe,
        "directory": str(run.directory) if run.directory else None,
        "summary": run.summary.to_json() if run.summary else None,
    }


def answer(runs: Sequence["Run"]) -> str:
    """What the runs say, in a sentence: the step time of a recipe, or which recipe is the fastest.

    The fastest is one whose slowest run beats the others' fastest; `compare` judges by more than that. Runs
    of other workloads, batch sizes or numbers of ranks get a sentence of their own, in a line.
    """
    alike: dict[tuple[str, int, int], dict[str, list[RunSummary]]] = {}
    num_measured = 0
    for run in runs:
        # What was stopped half-way was measured as well, up to there.
        stood = run.state in (RunState.COMPLETED, RunState.INTERRUPTED)
        if stood and run.summary and run.summary.step_time_s and not _shortcoming(run.summary):
            what = (run.summary.workload, run.summary.batch_size_per_gpu, run.summary.num_gpus)
            alike.setdefault(what, {}).setdefault(run.recipe, []).append(run.summary)
            num_measured += 1
    if not alike:
        return f"No step time: {_why_not(runs)}."
    missing = len(runs) - num_measured
    told = f"; {missing} of {len(runs)} runs gave no step time" if missing else ""
    *others, last = (_fastest(measured) for measured in alike.values())
    return "\n".join([*(f"{sentence}." for sentence in others), f"{last}{told}."])


def _fastest(measured: Mapping[str, Sequence[RunSummary]]) -> str:
    """The sentence, without its end, of runs by recipe that are alike in all else."""
    ranked = sorted(measured.items(), key=lambda item: _over_runs(item[1]).value)
    (recipe, summaries), *slower = ranked
    first = summaries[0]
    times = _over_runs(summaries)
    interval = f" ({_between(times.low, times.high)})" if times.low and times.high else ""
    apart = all(_is_below(times, _over_runs(of)) for _, of in slower)
    leads = f"{recipe} is the fastest" if slower and apart else recipe
    num_runs = f" over {len(summaries)} runs" if len(summaries) > 1 else ""
    rest = "".join(f", {name} {duration(_over_runs(of).value)}" for name, of in slower)
    return (
        f"{leads} on {first.workload}, batch {first.batch_size_per_gpu}: {duration(times.value)} per step"
        f"{interval}, {_rounded(_rate(first, times.value))} {first.sample_unit}/s{num_runs}"
        + (f";{rest[1:]} per step" if rest else "")
        + (_why_not_apart([_over_runs(of) for of in measured.values()]) if rest and not apart else "")
    )


def duration(seconds: float) -> str:
    """Three digits with a unit: `12.3 ms`, `1.25 s`."""
    milliseconds = seconds * 1000
    return f"{_rounded(milliseconds)} ms" if milliseconds < 999.5 else f"{_rounded(seconds)} s"


def _over_runs(summaries: Sequence[RunSummary]) -> Interval:
    """Geometric mean of the runs' step times, as `compare` takes it, with the smallest and largest.

    Of a single run, its own interval.
    """
    times = [summary.step_time_s for summary in summaries if summary.step_time_s]
    if len(times) == 1:
        return times[0]
    values = [time.value for time in times]
    return Interval(value=geometric_mean(values), low=min(values), high=max(values))


def _is_below(one: Interval, other: Interval) -> bool:
    return one.high is not None and other.low is not None and one.high < other.low


def _why_not_apart(times: Sequence[Interval]) -> str:
    if any(time.low is None or time.high is None for time in times):
        return ", from too few steps to tell how far apart"
    return ", too close to tell apart"


def _shortcoming(summary: RunSummary) -> str | None:
    """Why the step time of a run is not to be used."""
    if summary.problems:
        return summary.problems[0]
    return "its step time did not settle" if summary.steady is False else None


def _between(low: float, high: float) -> str:
    (low_text, low_unit), (high_text, high_unit) = duration(low).split(), duration(high).split()
    return f"{low_text} to {high_text}" if low_unit == high_unit else f"{duration(low)} to {duration(high)}"


def _rate(summary: RunSummary, step_time_s: float | None = None) -> float:
    """Samples per second of all ranks, at the run's own step time unless another is given."""
    assert summary.step_time_s is not None
    per_step = summary.samples_per_step or summary.batch_size_per_gpu * summary.num_gpus
    return per_step / (step_time_s or summary.step_time_s.value)


def _why_not(runs: Sequence["Run"]) -> str:
    for run in runs:
        if run.reason:
            return run.reason
    for run in runs:
        if run.summary and (shortcoming := _shortcoming(run.summary)):
            return shortcoming
    return "no run has ended" if runs else "there are no runs"


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"

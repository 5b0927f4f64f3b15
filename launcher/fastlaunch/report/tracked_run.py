"""A run for experiment trackers: parameters, tags, figures and metrics by step. Pure."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any

from fastlaunch.analysis.pricing import reciprocal, samples_per_usd
from fastlaunch.catalog.prices import Price
from fastlaunch.measure.steptime import wall_times_s
from fastlaunch.measure.summary import Interval, RunSummary
from fastlaunch_train.records.records import RankRecord, Step


@dataclass(frozen=True, kw_only=True)
class Point:
    """The metrics of a step, or of held-out data after it."""

    step: int
    at_s: float  # when it ended, in seconds since 1970, as if an attempt did nothing but its steps
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run for a tracker. Times are seconds since 1970; unknown values have no key."""

    id: str
    name: str  # the recipe's label, or the script's variant
    workload: str
    status: str  # as in RunSummary
    started_s: float
    ended_s: float
    params: Mapping[str, str | int | float]
    tags: Mapping[str, str]
    figures: Mapping[str, float]  # of the whole run
    points: Sequence[Point]  # by step


def tracked_run(
    row: Mapping[str, Any], summary: RunSummary, records: Sequence[RankRecord], price: Price | None
) -> TrackedRun:
    """Return the run for a tracker.

    row: the run's `run_to_dict`. records: of all its ranks and attempts; none where the files are gone.
    price: of one node, None if not known.
    """
    records = sorted(records, key=lambda record: (record.header["attempt"], record.header["rank"]))
    header = records[0].header if records else {}
    started_s = _timestamp(header.get("started_at", row["created_at"]))
    points = _points(records, summary, started_s)
    tags = {name: row[name] for name in ("submission", "backend", "state")}
    return TrackedRun(
        id=row["id"],
        name=summary.setup.recipe,
        workload=summary.setup.workload,
        status=summary.status,
        started_s=started_s,
        ended_s=points[-1].at_s if points else started_s + (summary.figures.total_time_s or 0.0),
        params=_params(summary, header),
        tags=_as_text({"run_id": row["id"], **tags, "round": summary.environment.round}),
        figures=_figures(summary, price),
        points=points,
    )


def _as_text(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value is not None}


def _params(summary: RunSummary, header: Mapping[str, Any]) -> dict[str, str | int | float]:
    """Return what was trained, and how; the keys of a mapping stand behind its name: `fingerprint.torch`."""
    script = header.get("script")
    values = {
        **vars(summary.setup),
        "global_batch": summary.setup.global_batch,
        "seed": summary.seed,
        "commit": summary.environment.commit,
        "command": shlex.join(map(str, script["command"])) if script else None,
    }
    nested = {name: values.pop(name) for name in ("variant", "fingerprint")}
    nested["recipe"] = header.get("recipe", {}).get("overrides") or {}
    values |= {f"{name}.{key}": value for name, items in nested.items() for key, value in items.items()}
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return {**_as_text(values), **numbers}


def _figures(summary: RunSummary, price: Price | None) -> dict[str, float]:
    """Return every number of the summary's topics, the speed and the cost."""
    timing, profile, num_nodes = summary.timing, summary.profile, summary.setup.num_nodes
    step, samples = timing.step_time_s, timing.samples_per_step
    rate = reciprocal(step, samples) if step and samples else None
    topics = (summary.startup, summary.quality, summary.figures, timing)
    values: dict[str, object] = {name: value for topic in topics for name, value in vars(topic).items()}
    values |= {"peak_memory_gib": summary.peak_memory_gib, "num_steps": summary.num_steps or None}
    values["samples_per_s"] = rate
    if price:
        values["usd_per_hour"] = price.usd_per_hour * num_nodes
    if price and rate:
        values["usd_per_million_samples"] = reciprocal(samples_per_usd(rate, price, num_nodes), 1e6)
    if profile:
        values |= {f"profile/{name}": value for name, value in vars(profile).items()}
        values |= {f"profile/{name}_s": value for name, value in profile.parts_s.items()}
    numbers = {name: value.value if isinstance(value, Interval) else value for name, value in values.items()}
    return {
        name: float(number)
        for name, number in numbers.items()
        if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
    }


def _points(records: Sequence[RankRecord], summary: RunSummary, started_s: float) -> tuple[Point, ...]:
    """Return the metrics by step; a step that a later attempt did again is the later one's."""
    points = {point.step: point for point in _steps(records)}
    metrics: dict[int, dict[str, float]] = {step: dict(point.metrics) for step, point in points.items()}
    for line in summary.quality.evals:
        place = line.split if line.weights == "current" else f"{line.split}-{line.weights}"
        scores = {"loss": line.loss, line.metric or "": line.metric_value}
        known = {f"{place}/{name}": value for name, value in scores.items() if value is not None}
        metrics.setdefault(line.step, {}).update(known)
    last_s, ordered = started_s, []
    for step, values in sorted(metrics.items()):
        last_s = points[step].at_s if step in points else last_s
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        ordered.append(Point(step=step, at_s=last_s, metrics=finite))
    return tuple(ordered)


def _steps(records: Sequence[RankRecord]) -> Iterator[Point]:
    """Yield the steps that all ranks took, attempt by attempt."""
    for _, attempt in groupby(records, key=lambda record: record.header["attempt"]):
        ranks = list(attempt)
        walls = [wall_times_s(rank) for rank in ranks]
        at_s = _timestamp(ranks[0].header["started_at"])
        for index in range(min(map(len, walls))):
            steps = [rank.steps[index] for rank in ranks]
            step_time_s = float(max(wall[index] for wall in walls))
            at_s += step_time_s
            yield Point(step=steps[0].step, at_s=at_s, metrics=_metrics(steps, step_time_s))


def _metrics(steps: Sequence[Step], step_time_s: float) -> dict[str, float]:
    """Return the metrics of one step over all ranks. step_time_s: wall time of the slowest rank."""
    losses = [step.loss for step in steps if step.loss is not None]
    samples = [step.num_samples for step in steps if step.num_samples is not None]
    metrics = {"step_time_s": step_time_s, "data_wait_s": max(step.data_wait_s for step in steps)}
    if len(losses) == len(steps):
        metrics["loss"] = sum(losses) / len(losses)
    if len(samples) == len(steps) and step_time_s > 0:
        metrics["samples_per_s"] = sum(samples) / step_time_s
    return metrics


def _timestamp(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()

"""A run as experiment trackers take it: parameters, tags, figures of the whole, and metrics by step. Pure."""

import hashlib
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from fastlaunch.analysis.pricing import reciprocal, samples_per_usd
from fastlaunch.catalog.prices import Price
from fastlaunch.measure.steptime import wall_times_s
from fastlaunch.measure.summary import Interval, RunSummary
from fastlaunch_train.records.records import SCRIPT_PHASE, RankRecord, Step


@dataclass(frozen=True, kw_only=True)
class Point:
    """What was measured in a step, or after it on held-out data."""

    step: int
    at_s: float  # when it ended, in seconds since 1970
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run for a tracker. Times are seconds since 1970; what is not known has no key."""

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

    @property
    def fingerprint(self) -> str:
        """A hash of all of it: it tells whether a tracker has the run as it is now."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def tracked_run(
    run_id: str,
    summary: RunSummary,
    records: Sequence[RankRecord],
    *,
    created_at: str,
    price: Price | None,
    tags: Mapping[str, str | None],
) -> TrackedRun:
    """Return the run for a tracker, by the record files of all its ranks and attempts, which may be gone.

    created_at: ISO 8601, for a run without records. price: of one node, None if not known.
    """
    attempts: dict[int, list[RankRecord]] = {}
    for record in sorted(records, key=lambda record: (record.header["attempt"], record.header["rank"])):
        attempts.setdefault(record.header["attempt"], []).append(record)
    first = next(iter(attempts.values()))[0].header if attempts else {}
    started_s = _timestamp(first.get("started_at", created_at))
    points = _points(attempts, summary, started_s)
    return TrackedRun(
        id=run_id,
        name=summary.setup.recipe,
        workload=summary.setup.workload,
        status=summary.status,
        started_s=started_s,
        ended_s=points[-1].at_s if points else started_s + (summary.figures.total_time_s or 0.0),
        params=_params(summary, first),
        tags={name: text for name, text in {"run_id": run_id, **tags}.items() if text is not None},
        figures=_figures(summary, price),
        points=points,
    )


def _params(summary: RunSummary, header: Mapping[str, Any]) -> dict[str, str | int | float]:
    """Return what was trained, and how; the keys of a mapping stand behind its name: `version.torch`."""
    script, recipe = header.get("script"), header.get("recipe", {})
    values = {
        **vars(summary.setup),
        "global_batch": summary.setup.global_batch,
        "seed": summary.seed,
        "commit": summary.environment.commit,
        "command": shlex.join(map(str, script["command"])) if script else None,
        "attention_backend": header.get("attention_backend"),
        "fingerprint": None,
        "version": header.get("versions") or summary.setup.fingerprint,
    }
    values |= {f"recipe.{name}": value for name, value in _items(recipe.get("overrides"))}
    flat = {name: value for name, value in values.items() if not isinstance(value, Mapping)}
    flat |= {f"{name}.{key}": text for name, of in values.items() for key, text in _items(of)}
    return {
        name: value if isinstance(value, int | float) else str(value)
        for name, value in flat.items()
        if value is not None
    }


def _items(value: object) -> Iterable[tuple[str, Any]]:
    """Return the items of a mapping; none of anything else, as in older records."""
    return value.items() if isinstance(value, Mapping) else ()


def _figures(summary: RunSummary, price: Price | None) -> dict[str, float]:
    """Return every number of the summary's topics, the speed and the cost."""
    timing, profile = summary.timing, summary.profile
    step, samples = timing.step_time_s, timing.samples_per_step
    rate = reciprocal(step, samples) if step and samples else None
    num_nodes = summary.setup.num_nodes
    values: dict[str, object] = {
        **vars(summary.startup),
        **vars(summary.quality),
        **vars(summary.figures),
        **vars(timing),
        "samples_per_s": rate,
        "usd_per_hour": price.usd_per_hour * num_nodes if price else None,
        "usd_per_million_samples": (
            reciprocal(samples_per_usd(rate, price, num_nodes), 1e6) if rate and price else None
        ),
        "peak_memory_gib": summary.peak_memory_gib,
        "num_steps": summary.num_steps or None,
        **({f"profile/{name}": value for name, value in vars(profile).items()} if profile else {}),
        **({f"profile/{name}_s": value for name, value in profile.parts_s.items()} if profile else {}),
    }
    numbers = {name: of.value if isinstance(of, Interval) else of for name, of in values.items()}
    return {
        name: float(number)
        for name, number in numbers.items()
        if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
    }


def _points(
    attempts: Mapping[int, Sequence[RankRecord]], summary: RunSummary, started_s: float
) -> tuple[Point, ...]:
    """Return the metrics by step; a step that a later attempt did again is the later one's."""
    at_s: dict[int, float] = {}
    metrics: dict[int, dict[str, float]] = {}
    for ranks in attempts.values():
        walls = [wall_times_s(rank) for rank in ranks]
        elapsed_s = _timestamp(ranks[0].header["started_at"])
        pauses = _pauses(ranks[0])
        for index in range(min(map(len, walls))):
            steps = [rank.steps[index] for rank in ranks]
            step_time_s = float(max(wall[index] for wall in walls))
            while pauses and pauses[0][0] < steps[0].step:
                elapsed_s += pauses.pop(0)[1]
            elapsed_s += step_time_s
            at_s[steps[0].step], metrics[steps[0].step] = elapsed_s, _metrics(steps, step_time_s)
    for line in summary.quality.evals:
        place = line.split if line.weights == "current" else f"{line.split}-{line.weights}"
        scores = {"loss": line.loss, line.metric or "": line.metric_value}
        known = {f"{place}/{name}": value for name, value in scores.items() if value is not None}
        metrics.setdefault(line.step, {}).update(known)
    last_s = started_s
    points = []
    for step, values in sorted(metrics.items()):
        last_s = at_s.get(step, last_s)
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        points.append(Point(step=step, at_s=last_s, metrics=finite))
    return tuple(points)


def _metrics(steps: Sequence[Step], step_time_s: float) -> dict[str, float]:
    """Return the metrics of one step of all ranks. step_time_s: wall time of the slowest."""
    losses = [step.loss for step in steps if step.loss is not None]
    samples = [step.num_samples for step in steps if step.num_samples is not None]
    metrics = {"step_time_s": step_time_s, "data_wait_s": max(step.data_wait_s for step in steps)}
    if len(losses) == len(steps):
        metrics["loss"] = sum(losses) / len(losses)
    if len(samples) == len(steps) and step_time_s > 0:
        metrics["samples_per_s"] = sum(samples) / step_time_s
    return metrics


def _pauses(record: RankRecord) -> list[tuple[int, float]]:
    """Return what took time beside the steps, in order: the step before it, and its seconds."""
    # Our own loop records an evaluation as a phase, too.
    phases = [
        (phase.step, phase.seconds) for phase in record.phases if phase.name not in (SCRIPT_PHASE, "eval")
    ]
    return sorted([*phases, *((line.step, line.seconds) for line in record.evals)])


def _timestamp(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()

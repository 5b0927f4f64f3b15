"""Step records -> `RunSummary`: the step time of one run, with its interval, once and for all.

A summary is made when a run is collected and stored with it, so that comparing never reads step files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A measured quantity with its 95% interval; `low` and `high` are None where there is none."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run as the analysis sees it, whether it was recorded step by step or published as a total.

    kind: `records` (step records) or `published` (a CSV row; no steps, so no interval of its own).
    recipe: the recipe's label, overrides included.
    num_gpus: ranks over all nodes. batch_size_per_gpu x num_gpus is the global batch.
    steady: whether the step time settled; None for a published row.
    step_time_s: synchronised wall time of the slowest rank per retained step; None if it has no such steps.
    build_s, compile_s, warmup_s: time before the first step, in compiling, and in the steps cut as warm-up.
    fingerprint: what must agree for two runs to be repeats of each other (GPU, versions, attention backend).
    problems: what makes the run unfit to compare, in words; empty for a sound one.
    """

    kind: str
    workload: str
    sample_unit: str
    flops_per_sample: int | None
    recipe: str
    precision: str | None
    data: str
    batch_size_per_gpu: int
    num_nodes: int
    num_gpus: int
    seed: int | None
    status: str
    instance: str | None
    device_name: str | None
    host_id: str | None
    measured_on: str | None
    source: str | None
    derived: bool = False
    steady: bool | None = None
    step_time_s: Interval | None = None
    num_steps: int = 0
    num_retained_steps: int = 0
    samples_per_step: float | None = None
    tokens_per_step: float | None = None
    median_step_time_s: float | None = None
    p95_step_time_s: float | None = None
    data_wait_fraction: float | None = None
    drift: float | None = None
    build_s: float | None = None
    compile_s: float | None = None
    warmup_s: float | None = None
    final_loss: float | None = None
    peak_memory_gib: float | None = None
    total_time_s: float | None = None
    num_samples: int | None = None
    metric: str | None = None
    metric_value: float | None = None
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` turns back into an equal summary."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "RunSummary":
        raise NotImplementedError

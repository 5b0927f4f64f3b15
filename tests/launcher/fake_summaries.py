"""Summaries of runs that were never made, for tests to change and to compare."""

import datetime
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastlaunch.analysis.compare import Comparison, MeasuredRun, PriceRequest, Row, compare
from fastlaunch.catalog.load import load_catalogue
from fastlaunch.catalog.prices import Price
from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import open_ledger
from fastlaunch.measure.summary import Environment, Interval, RunSummary, Setup, Timing
from fastlaunch_train.records.records import Eval

PLAIN = RunSummary(
    setup=Setup(
        kind="records",
        workload="vit-huge",
        sample_unit="images",
        flops_per_sample=763_504_000_000,
        recipe="bf16",
        precision="bf16",
        data="synthetic",
        batch_size_per_gpu=64,
        num_nodes=1,
        num_gpus=1,
        device_name="NVIDIA H200",
        fingerprint={"device_name": "NVIDIA H200", "torch": "2.13.0"},
    ),
    seed=0,
    status="completed",
    num_steps=200,
    timing=Timing(step_time_s=Interval(value=0.1), num_retained_steps=190, samples_per_step=64.0),
    environment=Environment(host_id="host-a", measured_on="2026-11-01"),
)
CATALOGUE = load_catalogue()
TODAY = datetime.date(2026, 11, 21)
_TOPICS = ("setup", "timing", "startup", "checkpoints", "quality", "environment", "figures")

#: As `hf-lora:llama-3.1-8b` is counted: adapters of rank 16 on all linear layers, 4,096 tokens a sample.
LLAMA_8B = {
    "num_parameters": 8_072_204_288, "flops_per_sample": 150_167_625_924_608, "tokens_per_sample": 4096,
    "num_trained": 41_943_040, "num_layers": 32, "width": 4096, "mlp_width": 14_336, "num_kv_features": 2048,
    "vocabulary": 128_256,
}  # fmt: skip


def changed(summary: RunSummary, **values: Any) -> RunSummary:
    """The summary with other values, of fields at whatever depth."""
    for topic in _TOPICS:
        own = {name: values.pop(name) for name in vars(getattr(summary, topic)) if name in values}
        summary = replace(summary, **{topic: replace(getattr(summary, topic), **own)})
    return replace(summary, **values)


def runs(recipe: str, *times_s: float, **changes: Any) -> list[MeasuredRun]:
    """A run for each time, repeats of each other: of the rounds 1, 2, ... of one session on one host."""
    return [
        MeasuredRun(
            run_id=f"{recipe}-{number}",
            summary=changed(
                PLAIN, **{"recipe": recipe, "step_time_s": Interval(value=time_s), "seed": number, **changes}
            ),
        )
        for number, time_s in enumerate(times_s, start=1)
    ]


#: Eight H100 of one machine, at 64 samples each.
P5_NODE: dict[str, Any] = {
    **{"instance": "p5.48xlarge", "device_name": "NVIDIA H100 80GB HBM3"},
    **{"num_gpus": 8, "samples_per_step": 512.0},
}


def on_p5(step_time_s: float, **changes: Any) -> RunSummary:
    """A run of batch 64 on each of eight H100."""
    return changed(PLAIN, **{**P5_NODE, "step_time_s": Interval(value=step_time_s), **changes})


def imported(*summaries: RunSummary) -> None:
    """Put runs into the ledger of this test."""
    with open_ledger(load_settings()) as ledger:
        ledger.add_imported(
            [(summary, Path("records")) for summary in summaries],
            submission_id=ledger.add_submission("fastlaunch runs import"),
        )


def compared(
    *runs: MeasuredRun | RunSummary | Sequence[MeasuredRun],
    baseline: str | None = None,
    allow_unverified: bool = False,
    any_version: bool = False,
    **prices: Any,
) -> Comparison:
    """The comparison of runs, of lists of runs, or of summaries."""
    candidates: list[MeasuredRun] = []
    for number, one in enumerate(runs):
        if isinstance(one, RunSummary):
            candidates.append(MeasuredRun(run_id=f"run-{number}", summary=one))
        else:
            candidates += [one] if isinstance(one, MeasuredRun) else one
    return compare(
        candidates,
        catalogue=CATALOGUE,
        prices=PriceRequest(today=TODAY, **prices),
        baseline=baseline,
        allow_unverified=allow_unverified,
        any_version=any_version,
    )


def by_recipe(comparison: Comparison) -> dict[str, Row]:
    return {row.setup.recipe: row for row in comparison.rows}


def price_of(usd_per_hour: float, **changes: Any) -> Price:
    """A price of so much, of p5.48xlarge on EC2 in us-east-1."""
    place = {"instance": "p5.48xlarge", "service": "ec2", "region": "us-east-1", "source": "a test"}
    return Price(**{**place, "as_of": datetime.date(2026, 11, 1), **changes}, usd_per_hour=usd_per_hour)


def evaluated(recipe: str, seed: int, loss: float | None, **changes: Any) -> RunSummary:
    """A completed run of 100 steps with held-out losses on the way: `loss` at the end, and more before.

    on_the_way: what the losses before the end are multiplied by. num_samples: held-out samples.
    """
    on_the_way = changes.pop("on_the_way", 1.0)
    num_samples = changes.pop("num_samples", 1000)
    at = {step: None if loss is None else loss * more * on_the_way for step, more in BEFORE.items()}
    evals = tuple(
        Eval(step=step, split="validation", loss=value, num_samples=num_samples, seconds=1.0)
        for step, value in {**at, changes.pop("end", 100): loss}.items()
    )
    return changed(PLAIN, **{"recipe": recipe, "seed": seed, "evals": evals, **changes})


#: Loss at steps before the end, as a multiple of that at the end.
#: The first one's makes 3% of what was learnt 1% of the loss at the end.
BEFORE = {10: 4 / 3, 26: 1.25, 52: 1.15, 73: 1.05}

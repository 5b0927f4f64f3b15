"""The warning that checkpoints may be too slow for spot, from what earlier runs in the ledger measured."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_summaries import PLAIN, changed

from fastlaunch.jobs.spec import JobSpec
from fastlaunch.ledger.ledger import Ledger
from fastlaunch.runs.resume import slow_checkpoint
from fastlaunch_train.recipes.recipes import resolve_recipe

SPOT = JobSpec(
    workload="vit-huge",
    recipe=resolve_recipe("bf16"),
    batch_size=64,
    steps=200,
    num_gpus=8,
    purchase="spot",
)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite") as opened:
        submission = opened.add_submission("fastlaunch submit")
        summaries = [
            changed(PLAIN, longest_s=12.0),
            changed(PLAIN, longest_s=72.4),
            changed(PLAIN, recipe="te-fp8", longest_s=60.0),
            changed(PLAIN, workload="vit-tiny", longest_s=None),
        ]
        opened.add_imported([(summary, None) for summary in summaries], submission_id=submission)
        yield opened


def test_the_longest_checkpoint_of_the_same_training_is_told(ledger: Ledger) -> None:
    told = slow_checkpoint(ledger, [SPOT], backend="ec2")
    assert told is not None
    assert "bf16 on vit-huge took 72 s" in told
    assert "EC2 gives a spot instance two minutes" in told


def test_of_sagemakers_spot_no_notice_is_promised(ledger: Ledger) -> None:
    told = slow_checkpoint(ledger, [SPOT], backend="sagemaker")
    assert told is not None
    assert "bf16 on vit-huge took 72 s" in told
    assert "SageMaker promises no time" in told
    assert "EC2" not in told
    assert "minutes" not in told


@pytest.mark.parametrize(
    "job",
    [
        replace(SPOT, purchase="on-demand"),
        replace(SPOT, recipe=resolve_recipe("te-fp8")),
        replace(SPOT, recipe=resolve_recipe("fp32")),
        replace(SPOT, workload="vit-tiny"),
    ],
    ids=["on demand", "not above a minute", "never measured", "no checkpoint measured"],
)
def test_nothing_is_told_otherwise(ledger: Ledger, job: JobSpec) -> None:
    assert slow_checkpoint(ledger, [job], backend="ec2") is None

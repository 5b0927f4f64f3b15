"""Job refuses what cannot be run, and survives being stored."""

import json
from typing import Any

import pytest

from fastlaunch.core.errors import UserError
from fastlaunch.jobs.job import Job, names_apart
from fastlaunch_train.recipes.recipes import RECIPES, resolve_recipe


def job(**changes: Any) -> Job:
    usual = {"workload": "vit-tiny", "recipe": RECIPES["bf16"], "batch_size": 8, "steps": 200, "num_gpus": 1}
    job = Job(**usual)  # type: ignore[arg-type]
    return Job.from_json({**job.to_json(), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "^--batch-size is 0"),
        ({"steps": 0}, "^--steps is 0"),
        ({"num_gpus": 0}, "^--nproc is 0"),
        ({"num_gpus": 9, "num_nodes": 2}, "number of processes is 9 on 2 nodes"),
        ({"seed": -1}, "^--seed is -1"),
        ({"num_workers": -1}, "^--num-workers is -1"),
        ({"sequence_length": 1}, "^--sequence-length is 1"),
        ({"steps": None}, "a run of None steps and None epochs"),
        ({"epochs": 3}, "a run of 200 steps and 3 epochs"),
        ({"model": ""}, "^--model is empty"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        job(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": resolve_recipe("te-fp8", ["fp8_scaling=current"]).to_record()},
        {"batch_size": None, "num_gpus": 16, "num_nodes": 2, "backend": "ec2", "instance": "p5.48xlarge"},
        {"steps": None, "epochs": 3, "eval_every": 9, "tokenizer": "./t", "sequence_length": 64},
        # Which submit refuses today.
        {"recipe": RECIPES["graph"].to_record(), "num_gpus": 8},
        {"workload": "./my.py:build", "workload_arguments": ("depth=3", "width=4")},
    ],
)
def test_a_spec_survives_being_stored(changes: dict[str, Any]) -> None:
    spec = job(**changes)
    assert Job.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_a_job_in_words() -> None:
    assert [job(steps=1).length, job(steps=20_000).length] == ["1 step", "20,000 steps"]
    assert job(steps=None, epochs=3).length == "3 epochs"
    assert names_apart([job(), job(recipe=RECIPES["fp32"].to_record())]) == ["bf16", "fp32"]
    assert names_apart([job(), job(batch_size=None), job(workload="gelu", num_gpus=2)]) == [
        "bf16 on vit-tiny at batch 8 on 1 GPU",
        "bf16 on vit-tiny at batch auto on 1 GPU",
        "bf16 on gelu at batch 8 on 2 GPUs",
    ]

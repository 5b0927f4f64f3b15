"""JobSpec refuses what cannot be run."""

import json
from typing import Any

import pytest

from fastlaunch.core.errors import UserError
from fastlaunch.core.units import DEFAULT_REGION
from fastlaunch.jobs.spec import JobSpec, names_apart
from fastlaunch_train.recipes.recipes import RECIPES, resolve_recipe


def job(**changes: Any) -> JobSpec:
    values = {
        "workload": "vit-tiny",
        "recipe": RECIPES["bf16"],
        "batch_size": 8,
        "steps": 200,
        "num_gpus": 1,
        **changes,
    }
    return JobSpec(**values)


def test_the_defaults_are_a_run_on_this_machine() -> None:
    spec = job()
    assert (spec.backend, spec.instance, spec.num_nodes, spec.purchase) == ("local", None, 1, "on-demand")
    assert (spec.seed, spec.data, spec.checkpoint_every, spec.region) == (0, "synthetic", 0, DEFAULT_REGION)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": None},
        {"batch_size": 1, "steps": 1},
        {"seed": 0, "num_workers": 0, "checkpoint_every": 0},
        {"num_gpus": 16, "num_nodes": 2},
    ],
)
def test_the_least_that_can_be_run(changes: dict[str, Any]) -> None:
    spec = job(**changes)
    assert all(getattr(spec, field) == value for field, value in changes.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch size is 0"),
        ({"batch_size": -8}, "batch size is -8"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": -1}, "steps is -1"),
        ({"num_gpus": 0}, "number of processes is 0"),
        ({"num_nodes": 0}, "number of nodes is 0"),
        ({"num_gpus": 1, "num_nodes": 2}, "number of processes is 1 on 2 nodes"),
        ({"num_gpus": 9, "num_nodes": 2}, "number of processes is 9 on 2 nodes"),
        ({"seed": -1}, "seed is -1"),
        ({"num_workers": -1}, "number of loader workers is -1"),
        ({"checkpoint_every": -1}, "checkpoint interval is -1"),
        ({"eval_every": -1}, "evaluation interval is -1"),
        ({"sequence_length": 1}, "sequence length is 1"),
        ({"steps": None, "epochs": 0}, "epochs is 0"),
        ({"steps": None}, "a run of None steps and None epochs"),
        ({"epochs": 3}, "a run of 200 steps and 3 epochs"),
        ({"model": ""}, "the model's name is empty"),
        ({"tokenizer": ""}, "the tokenizer's name is empty"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        job(**changes)
    assert caught.value.message == message
    assert caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recipe": resolve_recipe("te-fp8", ["fp8_scaling=current", "learning_rate=1e-4"])},
        {"batch_size": None, "num_gpus": 16, "num_nodes": 2, "backend": "ec2", "instance": "p5.48xlarge"},
        {
            "steps": None,
            "epochs": 3,
            "eval_every": 9,
            "model": "gpt2",
            "tokenizer": "./t",
            "sequence_length": 64,
        },
    ],
)
def test_a_spec_survives_being_stored(changes: dict[str, Any]) -> None:
    spec = job(**changes)
    assert JobSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_a_spec_stored_before_there_were_epochs_and_models_is_read() -> None:
    old = job().to_json()
    for field in ("epochs", "eval_every", "model", "tokenizer", "sequence_length"):
        del old[field]
    old["recipe"] = {key: value for key, value in old["recipe"].items() if key != "schema"} | {
        "blocks": "timm"
    }
    assert JobSpec.from_json(old) == job()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 1}, "1 step"),
        ({"steps": 20_000}, "20,000 steps"),
        ({"steps": None, "epochs": 1}, "1 epoch"),
        ({"steps": None, "epochs": 3}, "3 epochs"),
    ],
)
def test_how_long_a_run_is_in_words(changes: dict[str, Any], words: str) -> None:
    assert job(**changes).length == words


def test_jobs_are_named_by_what_sets_them_apart() -> None:
    assert names_apart([job(), job(recipe=RECIPES["fp32"])]) == ["bf16", "fp32"]
    assert names_apart([job(), job(batch_size=None), job(workload="gelu", num_gpus=2)]) == [
        "bf16 on vit-tiny at batch 8 on 1 GPU",
        "bf16 on vit-tiny at batch auto on 1 GPU",
        "bf16 on gelu at batch 8 on 2 GPUs",
    ]

"""The optimizer that the launcher takes a workload for having is its own, refused where it cannot be had."""

from pathlib import Path
from typing import Any

import pytest

from fastlaunch.core.errors import UserError
from fastlaunch.jobs.options import SubmitOptions
from fastlaunch.jobs.variants import variants_of, workload_optimizer
from fastlaunch_train.workloads.contract import load_workload
from fastlaunch_train.workloads.registry import WORKLOADS, workload_info

FUSED: dict[str, Any] = {"recipes": ("fsdp2",), "overrides": ("optimizer_impl=fused",)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WORKLOADS, "timm:resnet18"])
def test_a_workloads_optimizer_is_what_it_is_taken_for(name: str) -> None:
    workload = load_workload(name)
    assert not workload.trains or workload_optimizer(workload_info(name)) == workload.optimizer


@pytest.mark.parametrize("name", ["vit-huge", "timm:resnet18"])
def test_fused_sgd_of_shards_is_refused_before_anything_is_started(name: str) -> None:
    with pytest.raises(UserError) as refused:
        variants_of(SubmitOptions(**FUSED), name)
    assert refused.value.message == (
        f"recipe fsdp2 optimizer_impl=fused does not fit workload {name}: "
        "torch has no fused SGD for the sharded parameters of fsdp2"
    )
    assert refused.value.hint == "add --set optimizer_impl=foreach, or --set optimizer=adamw"


@pytest.mark.parametrize("recipe", ["bf16", "ao-fp8"])
def test_fused_adafactor_is_refused_before_anything_is_started(recipe: str) -> None:
    with pytest.raises(
        UserError, match="does not fit workload gpt2-xsmall: there is no fused adafactor"
    ) as told:
        variants_of(SubmitOptions(recipes=(recipe,), overrides=("optimizer_impl=fused",)), "gpt2-xsmall")
    assert told.value.hint == "add --set optimizer_impl=auto, or --set optimizer=adamw"


def test_a_recipe_with_an_sgd_of_its_own_is_refused_for_any_workload() -> None:
    overrides = (*FUSED["overrides"], "optimizer=sgd")
    with pytest.raises(UserError, match="recipe fsdp2: torch has no fused SGD for the sharded parameters"):
        variants_of(SubmitOptions(recipes=("fsdp2",), overrides=overrides), "distilbert-imdb")


@pytest.mark.parametrize("name", ["vit-tiny", "distilbert-imdb"])
def test_what_has_no_sgd_is_let_through(name: str) -> None:
    assert variants_of(SubmitOptions(**FUSED), name)


def test_the_optimizers_that_there_are_in_its_place_are_let_through() -> None:
    for override in ("optimizer_impl=foreach", "optimizer_impl=auto"):
        assert variants_of(SubmitOptions(recipes=("fsdp2",), overrides=(override,)), "vit-huge")
    overrides = (*FUSED["overrides"], "optimizer=adamw")
    assert variants_of(SubmitOptions(recipes=("fsdp2",), overrides=overrides), "vit-huge")
    assert variants_of(SubmitOptions(recipes=("bf16",), overrides=FUSED["overrides"]), "vit-huge")


def test_what_says_how_to_train_is_refused_where_nothing_is_trained() -> None:
    with pytest.raises(UserError) as refused:
        variants_of(SubmitOptions(recipes=("bf16",), overrides=("optimizer=adamw",)), "gelu")
    assert refused.value.message == (
        "recipe bf16 optimizer=adamw does not fit workload gelu: "
        "it trains nothing, and optimizer=adamw says how to train"
    )
    assert refused.value.hint == "leave out optimizer"
    assert variants_of(SubmitOptions(recipes=("bf16",), overrides=("deterministic=true",)), "gelu")


@pytest.mark.parametrize("workload", ["vit-huge", "./mine.py:build"])
@pytest.mark.parametrize(
    ("recipe", "override", "told"),
    [
        ("zero2", "set_to_none=false", "DeepSpeed frees gradients itself"),
        ("transformers", "set_to_none=false", "the Transformers Trainer frees gradients"),
        ("te-fp8", "loop=lightning", "loop=lightning trains in fp32"),
    ],
)
def test_what_nobody_makes_steps_of_is_refused_before_anything_is_started(
    recipe: str, override: str, told: str, workload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    with pytest.raises(UserError, match=f"recipe {recipe} {override}: {told}") as refused:
        variants_of(SubmitOptions(recipes=(recipe,), overrides=(override,)), workload)
    assert refused.value.hint
    assert variants_of(SubmitOptions(recipes=(recipe,)), workload)

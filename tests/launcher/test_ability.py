"""Which recipes a machine can run, and what would run instead."""

from dataclasses import replace
from pathlib import Path

import pytest
from ec2_builders import catalogue

from fastlaunch.jobs.machine import Machine, this_machine
from fastlaunch.jobs.options import Variant
from fastlaunch.jobs.variants import missing_on, nearest_on
from fastlaunch_train.recipes.recipe import Recipe
from fastlaunch_train.recipes.recipes import RECIPES, resolve_recipe
from fastlaunch_train.recipes.requirements import needed_packages
from fastlaunch_train.workloads.registry import workload_info

CATALOGUE = catalogue()
SOFTWARE = frozenset(package for recipe in RECIPES.values() for package in needed_packages(recipe))
CPU = Machine(devices=(), num_cores=2, modules=SOFTWARE)


def why_not(recipe: Recipe, machine: Machine) -> str | None:
    return missing_on(recipe, machine.capabilities(CATALOGUE))


def nearest_that_runs(recipe: Recipe, machine: Machine, optimizer: str = "sgd") -> Recipe:
    """The nearest recipe for vit-huge, which trains with SGD, or for the small one, with AdamW."""
    workload = workload_info({"sgd": "vit-huge", "adamw": "vit-tiny"}[optimizer])
    variant = Variant(
        workload=workload, recipe=recipe, batch_size=8, steps=1, epochs=None, eval_every=0, data="synthetic"
    )
    return nearest_on(variant, machine.capabilities(CATALOGUE))


def with_gpu(accelerator: str) -> Machine:
    return replace(CPU, devices=CATALOGUE.accelerators[accelerator].device_names[:1])


@pytest.mark.parametrize(
    ("gpu", "cannot"),
    [
        ("H200", {"te-mxfp8"}),
        # FP8 in blocks of 128 is computed by way of MXFP8, by Transformer Engine's own word on 12.0 too.
        ("B200", set()),
        ("RTX PRO 6000", {"te-mxfp8"}),
        ("L40S", {"te-fp8-block", "te-mxfp8", "ao-fp8-rowwise"}),
        (
            "A100 40GB",
            {name for name, recipe in RECIPES.items() if recipe.precision == "fp8"},
        ),
    ],
)
def test_what_a_gpu_cannot_run_though_everything_is_installed(gpu: str, cannot: set[str]) -> None:
    machine = with_gpu(gpu)
    found = {name: why_not(recipe, machine) for name, recipe in RECIPES.items()}
    assert {name for name, why in found.items() if why} == cannot
    assert all("compute capability" in (found[name] or "") for name in cannot)


def test_without_a_gpu_all_runs_but_transformer_engine_and_tf32() -> None:
    cannot = {name for name, recipe in RECIPES.items() if why_not(recipe, CPU)}
    assert cannot == {"tf32", *(name for name in RECIPES if name.startswith("te-"))}


@pytest.mark.parametrize(
    ("recipe", "lacking", "told", "nearest"),
    [
        ("te-article", "transformer_engine", "needs transformer_engine", "bf16"),
        (
            "ao-fp8",
            "torchao",
            "torchao, which is not installed (pip install 'fastlaunch[float8]')",
            "compile",
        ),
        ("zero3", "deepspeed", "needs deepspeed", "fsdp2"),
        (
            "lightning",
            "lightning",
            "needs lightning",
            "bf16",
        ),
        (
            "transformers",
            "transformers",
            "needs transformers",
            "bf16",
        ),
        ("ort", "torch_ort", "needs torch_ort", "fp16"),
        ("ort-zero1", "deepspeed", "needs deepspeed", "ort"),
    ],
)
def test_what_is_not_installed_is_named_with_the_nearest(
    recipe: str, lacking: str, told: str, nearest: str
) -> None:
    machine = replace(with_gpu("H200"), modules=SOFTWARE - {lacking})
    asked = resolve_recipe(recipe)
    assert told in (why_not(asked, machine) or "")
    assert nearest_that_runs(asked, machine).label == nearest


@pytest.mark.parametrize(
    ("optimizer", "overrides", "nearest"),
    [
        ("adamw", (), "fsdp2 optimizer_impl=fused"),
        # Which torch has not for the shards of fsdp2, whoever asks for it.
        ("sgd", (), "fsdp2"),
        ("adamw", ("optimizer=sgd",), "fsdp2 optimizer=sgd"),
        ("sgd", ("optimizer=adamw",), "fsdp2 optimizer=adamw optimizer_impl=fused"),
    ],
)
def test_what_is_deepspeeds_goes_with_it(optimizer: str, overrides: tuple[str, ...], nearest: str) -> None:
    machine = replace(with_gpu("H200"), modules=SOFTWARE - {"deepspeed"})
    asked = resolve_recipe("zero2", ["overlap_comm=false", "optimizer_impl=fused", *overrides])
    assert nearest_that_runs(asked, machine, optimizer).label == nearest


@pytest.mark.parametrize(
    ("recipe", "gpu", "nearest"),
    [
        ("te-mxfp8", "H200", "te-fp8-block"),
        ("te-fp8-block", "B200", "te-fp8-block"),
        ("te-fp8-block", "L40S", "te-fp8"),
        ("ao-fp8-rowwise", "L40S", "ao-fp8"),
        ("te-fp8-block", "A100 40GB", "te-bf16"),
        ("te-article-fp8", "A100 40GB", "te-article"),
        ("ao-fp8-rowwise", "A100 40GB", "compile"),
        ("te-fp8", "H200", "te-fp8"),
    ],
)
def test_the_nearest_on_a_gpu(recipe: str, gpu: str, nearest: str) -> None:
    assert nearest_that_runs(resolve_recipe(recipe), with_gpu(gpu)).label == nearest


@pytest.mark.parametrize("gpu", ["H200", "B200", "A100 40GB", None])
@pytest.mark.parametrize("name", RECIPES)
def test_the_nearest_always_runs(name: str, gpu: str | None) -> None:
    machine = replace(with_gpu(gpu) if gpu else CPU, modules=frozenset({"torch", "timm"}))
    nearest = nearest_that_runs(RECIPES[name], machine)
    assert why_not(nearest, machine) is None


def test_what_was_set_beside_it_stays() -> None:
    asked = resolve_recipe("te-fp8", ["grad_accumulation=2", "deterministic=true"])
    found = nearest_that_runs(asked, with_gpu("A100 40GB"))
    assert found.label == "te-bf16 deterministic=true grad_accumulation=2"


def test_a_machine_looks_for_all_that_a_recipe_may_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in SOFTWARE:
        (tmp_path / f"{module}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert this_machine({}).modules >= SOFTWARE

"""The published experiments: what their runs are, and how they are submitted here and on AWS."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ec2_builders import IMAGE, catalogue
from fake_train.launcher import CPU, fastlaunch
from fake_train.processes import runs

from fastlaunch.catalog.experiments import published_experiments
from fastlaunch.core.errors import UserError
from fastlaunch.jobs.build import Jobs, build_jobs
from fastlaunch.jobs.job import Inputs
from fastlaunch.jobs.machine import Machine
from fastlaunch.jobs.options import Options
from fastlaunch_train.recipes.recipes import RECIPES, resolve_recipe
from fastlaunch_train.recipes.requirements import needed_packages
from fastlaunch_train.workloads.registry import workload_info

EXPERIMENTS = published_experiments()
ALL_SOFTWARE = frozenset(package for recipe in RECIPES.values() for package in needed_packages(recipe))
LAPTOP = Machine(devices=(), num_cores=2, modules=ALL_SOFTWARE)
ONE_H200 = Machine(devices=("NVIDIA H200",), num_cores=16, modules=ALL_SOFTWARE)


def here(name: str, machine: Machine = LAPTOP, **options: Any) -> Jobs:
    return build_jobs(Options(experiment=name, **options), machine=machine, catalogue=catalogue())


def there(name: str, terms: dict[str, Any] | None = None, **options: Any) -> Jobs:
    usual = Options(experiment=name, instances=("p5.48xlarge",), regions=("us-east-1",))
    return build_jobs(replace(usual, **(terms or {}), **options), catalogue=catalogue())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_arm_exists_and_no_two_are_the_same(name: str) -> None:
    experiment = EXPERIMENTS[name]
    assert name == experiment.name and (experiment.steps is None) != (experiment.epochs is None)
    made = {
        (of.workload, resolve_recipe(of.recipe, of.overrides), of.batch_size, of.num_gpus)
        for of in experiment.variants
    }
    assert len(made) == len(experiment.variants) > 1
    assert all(workload_info(variant.workload).small for variant in experiment.variants)


def test_the_published_rows_are_among_the_arms() -> None:
    labels = {
        name: [
            (resolve_recipe(variant.recipe, variant.overrides).label, variant.batch_size, variant.num_gpus)
            for variant in experiment.variants
        ]
        for name, experiment in EXPERIMENTS.items()
    }
    assert set(labels) == {"fp8", "compile-modes", "ort", "distilbert", "fusion", "lora"}
    assert {("bf16", 64, None), ("te-article", 128, None), ("te-article-fp8", 128, None)} <= {*labels["fp8"]}
    assert ("compile-max-autotune precision=fp32", 4, 1) in labels["compile-modes"]
    assert ("lightning precision=fp16", 12, 1) in labels["distilbert"]
    assert ("zero2 precision=fp16", 12, 4) in labels["distilbert"]
    assert ("jit-script precision=fp32", None, 1) in labels["fusion"]
    # 35,000 reviews at 12 a step are 2,917 steps, so that every epoch ends with an evaluation.
    assert {(variant.num_gpus, variant.eval_every) for variant in EXPERIMENTS["distilbert"].variants} == {
        (1, 2917),
        (4, 730),
    }


def test_deepspeed_is_given_no_adafactor_which_it_cannot_shard() -> None:
    for experiment in EXPERIMENTS.values():
        for variant in experiment.variants:
            recipe = resolve_recipe(variant.recipe, variant.overrides)
            if recipe.parallelism.startswith("zero"):
                # gpt2-xsmall's own optimizer is adafactor.
                assert recipe.optimizer == "adamw" or variant.workload != "gpt2-xsmall"
    ort = {
        resolve_recipe(variant.recipe, variant.overrides).optimizer
        for variant in EXPERIMENTS["ort"].variants[:4]
    }
    assert ort == {"adamw"}


def test_without_a_gpu_the_small_workloads_stand_in_and_it_is_said() -> None:
    found = here("distilbert", repeats=2)
    assert {job.workload for job in found.at()} == {"distilbert-tiny"}
    assert [(job.recipe.label, job.num_gpus) for job in found.at()[:5]] == [
        ("fp32", 1),
        ("lightning precision=fp32", 1),
        ("lightning precision=fp16", 1),
        ("lightning compile_mode=default compile_scope=model precision=fp16", 1),
        ("lightning precision=fp16", 2),
    ]
    # A B, then B A.
    there, back = found.at()[:7], found.at()[:6:-1]
    assert [replace(job, seed=1, round=2) for job in there] == list(back)
    assert {(job.steps, job.epochs, job.batch_size) for job in found.at()} == {(200, None, 12)}
    assert found.differences == (
        ("length", "3 epochs; made-up data have no end, so 200 steps"),
        ("workload", "distilbert-imdb at batch 12: rehearsed with distilbert-tiny at batch 12"),
        ("ranks", "4; here: 2"),
    )
    assert {job.workload for job in here("fusion").at()} == {"gelu:256x1024"}


def test_what_a_machine_cannot_run_is_left_out_and_said() -> None:
    found = here("fp8", replace(ONE_H200, modules=frozenset({"torch", "timm"})))
    assert [(job.workload, job.recipe.label, job.batch_size) for job in found.at()] == [
        *(("vit-huge", "bf16", 64), ("vit-huge", "bf16-fused", 128), ("vit-huge", "fp8-fused", 128))
    ]
    assert "pip install 'fastlaunch[te]'" in found.differences[0][1]
    assert len(found.differences) == len(EXPERIMENTS["fp8"].variants) - 3
    on_one = here("distilbert", ONE_H200)
    assert {job.num_gpus for job in on_one.at()} == {1}
    assert "it is for 4 GPUs, and here is 1 x NVIDIA H200" in on_one.differences[1][1]
    assert len(here("distilbert", replace(ONE_H200, devices=("NVIDIA H200",) * 8)).differences) == 1


def test_without_a_gpu_the_fp8_experiment_compares_what_a_cpu_computes() -> None:
    assert [(job.workload, job.recipe.label, job.batch_size) for job in here("fp8").at()] == [
        ("vit-wide", recipe, 16) for recipe in ("bf16", "bf16-fused", "fp8-fused", "ao-fp8")
    ]


def test_length_evaluations_text_and_data_may_be_ones_own(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.touch()
    options = {"steps": 7, "eval_every": 3, "model": "gpt2", "tokenizer": "gpt2", "sequence_length": 64}
    found = here("compile-modes", ONE_H200, data=f"file:{corpus}", seed=4, **options)
    assert {(job.steps, job.epochs, job.eval_every, job.seed) for job in found.at()} == {(7, None, 3, 4)}
    text = Inputs(data=f"file:{corpus}", model="gpt2", tokenizer="gpt2", sequence_length=64)
    assert {job.inputs for job in found.at()} == {text}
    assert {job.inputs.data for job in here("fp8", ONE_H200).at()} == {"loader"}


def test_epochs_are_of_data_that_have_an_end(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": f"folder:{tmp_path}"}
    found = here("distilbert", ONE_H200, **options)
    assert {(job.steps, job.epochs, job.eval_every) for job in found.at()} == {(None, 3, 2917)}
    assert not [what for what, _ in found.differences if what == "length"]
    # Made-up data have none: asked for, the entrypoint would refuse every run on a machine that is paid.
    made_up = there("distilbert", {"image": IMAGE})
    jobs = made_up.at(made_up.instances[0], "us-east-1")
    assert {(job.steps, job.epochs) for job in jobs} == {(200, None)}
    assert {job.steps for job in here("distilbert", ONE_H200, steps=9).at()} == {9}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"recipes": ("bf16",)}, "--recipe"),
        ({"overrides": ("optimizer=sgd",)}, "--set"),
        ({"workload": "vit-tiny"}, "--workload"),
        ({"batch_size": 8}, "--batch-size"),
        ({"nproc": 2}, "--nproc"),
        ({"steps": 3, "epochs": 3}, "--epochs"),
        ({"epochs": 3}, "have no end"),
        ({"name": "distilbert", "data": "loader"}, "makes images"),
        ({"name": "fusion", "eval_every": 5}, "no held-out data"),
        ({"model": "gpt2"}, "--model"),
        ({"name": "fp9"}, "fp9"),
    ],
)
def test_what_an_experiment_says_itself_is_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word) as caught:
        here(**{"name": "fp8", "machine": ONE_H200, **options})
    assert caught.value.hint


def test_an_experiment_of_which_nothing_runs_is_refused() -> None:
    with pytest.raises(UserError, match="no run of experiment fp8 can be made"):
        there("fp8", {"instances": ("trn1.32xlarge",)})


def test_on_aws_each_variant_has_its_batch_and_what_an_instance_cannot_is_left_out() -> None:
    request = there("fp8")
    jobs = request.at(request.instances[0], "us-east-1")
    assert [(job.recipe.label, job.batch_size, job.num_gpus) for job in jobs] == [
        *(("bf16", 64, 8), ("te-article", 64, 8), ("te-article", 128, 8), ("te-article-fp8", 128, 8)),
        *(("te-bf16", 64, 8), ("te-bf16", 128, 8), ("te-fp8", 128, 8)),
        *(("bf16-fused", 128, 8), ("fp8-fused", 128, 8)),
    ]
    ((left_out, why),) = request.skipped
    assert left_out.startswith("ao-fp8") and "needs torchao, which AWS's images lack" in why
    both = there("fp8", {"instances": ("p5.48xlarge", "p4d.24xlarge")})
    assert [name for name, _ in both.skipped] == [
        "te-article-fp8 on vit-huge at batch 128",
        "te-fp8 on vit-huge at batch 128",
        "fp8-fused on vit-huge at batch 128",
        "ao-fp8 on vit-huge at batch 128",
    ]
    assert "A100 40GB has 8.0" in both.skipped[0][1]
    on_each = [[job.recipe for job in both.at(one, "us-east-1")] for one in both.instances]
    assert on_each[0] == on_each[1] and len(on_each[0]) == 6


def test_on_aws_an_arm_may_use_some_of_the_gpus() -> None:
    own = {"image": IMAGE}
    on_ec2 = there("distilbert", own)
    num_gpus = [job.num_gpus for job in on_ec2.at(on_ec2.instances[0], "us-east-1")]
    assert num_gpus == [1, 1, 1, 1, 4, 4, 4]
    trained = there("distilbert", {**own, "backend": "sagemaker", "instances": ("ml.g5.xlarge",)})
    assert len(trained.variants) == 4
    assert "for 4 GPUs" in trained.skipped[0][1]
    with pytest.raises(UserError, match="for 1 GPU, and a SageMaker job uses all 8"):
        there("fusion", {"backend": "sagemaker"})


def test_aws_images_lack_what_language_models_need_and_it_is_said_how_to_get_it() -> None:
    # One image serves all the variants.
    builds = {"distilbert": "--with transformers --with lightning", "ort": "--ort"}
    for name, options in {"compile-modes": "--with transformers", **builds}.items():
        with pytest.raises(UserError, match="needs transformers") as caught:
            there(name)
        assert f"fastlaunch build {options} --push" in str(caught.value.hint)
    assert len(there("compile-modes", {"image": IMAGE}).variants) == 6


def test_the_experiments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert fastlaunch("experiments") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:-1]] == list(EXPERIMENTS)
    assert fastlaunch("experiments", "distilbert", "--output", "json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["recipe"] for row in rows][:2] == ["fp32", "lightning precision=fp32"]
    assert {(row["num_gpus"], row["length"]) for row in rows} == {(1, "3 epochs"), (4, "3 epochs")}


@pytest.mark.slow
def test_an_experiment_runs_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    machine = replace(CPU, modules=ALL_SOFTWARE | {"torch"})
    argv = ["submit", "--local", "--experiment", "fusion", "--steps", "20"]
    assert fastlaunch(*argv, machine=machine) == 0
    assert "rehearsed with gelu:256x1024" in capsys.readouterr().err
    assert [run.recipe for run in runs()] == [
        *("fp32", "jit-script precision=fp32", "compile precision=fp32", "library precision=fp32"),
        *("bf16", "jit-script", "compile", "library"),
    ]
    assert len({run.submission_id for run in runs()}) == 1

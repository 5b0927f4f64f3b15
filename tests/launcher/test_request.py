"""From options to jobs: defaults, order of repeats, rehearsals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastlaunch.catalog.hardware import Accelerator, InstanceType
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.cli.submit_container import rehearsed_jobs
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.jobs.build import build_jobs
from fastlaunch.jobs.machine import Machine
from fastlaunch.jobs.options import SubmitOptions
from fastlaunch.jobs.spec import JobSpec

MODULES = frozenset({"torch", "timm"})
CPU = Machine(devices=(), num_cores=2, modules=MODULES)
TWO_H200 = Machine(devices=("NVIDIA H200",) * 2, num_cores=16, modules=MODULES | {"transformer_engine"})
TWO_A100 = replace(TWO_H200, devices=("NVIDIA A100-SXM4-40GB",) * 2)


def accelerator(name: str, *formats: str, capability: str = "9.0") -> Accelerator:
    return Accelerator(
        name=name,
        memory_gib=80,
        bandwidth_tb_per_s=3,
        compute_capability=capability,
        peak_tflops={},
        formats=frozenset(formats),
        device_names=(name,),
        source="test",
    )


CATALOGUE = Catalogue(
    accelerators={
        "h100": accelerator("NVIDIA H100", "bf16", "tf32", "fp8"),
        "h200": accelerator("NVIDIA H200", "bf16", "tf32", "fp8"),
        "a100": accelerator("NVIDIA A100-SXM4-40GB", "bf16", "tf32", capability="8.0"),
    },
    instances={
        "p5.48xlarge": InstanceType(
            name="p5.48xlarge",
            accelerator="h100",
            num_accelerators=8,
            vcpus=192,
            memory_gib=2048,
            network_gbps=3200,
            num_network_cards=32,
            num_efa_interfaces=32,
            local_nvme_gb=30400,
            purchase_options=("on-demand",),
            source="test",
        )
    },
    prices=(),
)


def jobs(machine: Machine = CPU, **options: Any) -> Any:
    return build_jobs(SubmitOptions(**options), machine=machine, catalogue=CATALOGUE)


def test_defaults_follow_the_machine() -> None:
    (here,) = jobs().specs
    assert (here.workload, here.batch_size, here.recipe.name) == ("vit-tiny", 8, "bf16")
    assert (here.steps, here.seed, here.num_gpus, here.instance) == (200, 0, 1, None)
    (there,) = jobs(TWO_H200).specs
    assert (there.workload, there.batch_size, there.num_gpus) == ("vit-huge", 64, 2)


def test_a_rehearsal_in_ones_own_image_reads_data_there(tmp_path: Path) -> None:
    there = f"folder:{tmp_path / 'nowhere here'}"

    def rehearsed(data: str, image: str | None) -> tuple[JobSpec, ...]:
        request = SubmitOptions(workload="distilbert-tiny", data=data, model=str(tmp_path))
        jobs = build_jobs(request, machine=CPU, catalogue=CATALOGUE, image=image).specs
        return rehearsed_jobs(jobs, {"image": image, "num_nodes": 1})

    (job,) = rehearsed(there, "acme/train:1")
    assert (job.data, job.model) == (there, str(tmp_path))
    for data, image, told in (
        (there, None, "there is no folder"),
        ("folder:nowhere", "acme/train:1", "in an image it begins with /"),
        ("file:/opt/ml/x", "acme/train:1", "get /opt/ml from outside"),
        ("synthetic", None, "is on this machine, not in the container"),
    ):
        with pytest.raises(UserError, match=told):
            rehearsed(data, image)


def test_what_is_given_counts() -> None:
    (job,) = jobs(TWO_H200, workload="vit-tiny", batch_size=16, nproc=1, seed=5, steps=7).specs
    assert (job.workload, job.batch_size, job.num_gpus, job.seed, job.steps) == ("vit-tiny", 16, 1, 5, 7)
    assert jobs(batch_size="auto").specs[0].batch_size is None
    assert jobs(nproc=4).specs[0].num_gpus == 4
    assert jobs(workload="timm:vit_base_patch16_224").specs[0].batch_size == 8


@pytest.mark.parametrize(("repeats", "order"), [(1, "ABC"), (2, "ABCCBA"), (3, "ABCCBAABC")])
def test_repeats_are_interleaved_there_and_back(repeats: int, order: str) -> None:
    names = {"fp32": "A", "bf16": "B", "compile": "C"}
    specs = jobs(recipes=tuple(names), repeats=repeats).specs
    assert "".join(names[spec.recipe.name] for spec in specs) == order
    assert len({spec.without_seed for spec in specs}) == 3
    # The runs of a round have a seed of their own, and make pairs.
    assert [spec.seed for spec in specs] == [number for number in range(repeats) for _ in names]


def test_overrides_hold_for_every_recipe() -> None:
    specs = jobs(recipes=("bf16", "fp32"), overrides=("optimizer_impl=fused",)).specs
    assert [spec.recipe.label for spec in specs] == ["bf16 optimizer_impl=fused", "fp32 optimizer_impl=fused"]


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"recipes": ("bf61",)}, "unknown recipe 'bf61'", "bf16"),
        ({"workload": "vit-hug"}, "unknown workload 'vit-hug'", "vit-huge"),
        ({"overrides": ("compile_mod=default",)}, "no field 'compile_mod'", "compile_mode"),
        ({"overrides": ("precision=fp8",)}, "fp8", "scaling"),
        ({"recipes": ("bf16", "bf16")}, "given twice", "--repeats 2"),
        ({"repeats": 10**9}, "repeats is 1000000000", "give 1 to 1000"),
        ({"batch_size": 0}, "batch size is 0", "1 or more"),
        ({"steps": -1}, "steps is -1", "1 or more"),
        ({"repeats": 0}, "repeats is 0", "give 1 to 1000"),
        ({"nproc": 0}, "number of processes is 0", "1 or more"),
        ({"seed": -1}, "seed is -1", "0 or more"),
        ({"data": "sinthetic"}, "unknown data source", "synthetic, loader"),
        ({"data": "folder:/no/such/folder"}, "no folder /no/such/folder", "images"),
        ({"data": "file:/no/such.txt", "workload": "gpt2-tiny"}, "no file /no/such.txt", "text"),
        ({"data": f"file:{__file__}"}, "workload 'vit-tiny' reads no text", "--data folder:PATH"),
        ({"model": "gpt2"}, "workload 'vit-tiny' takes no --model", "leave out --model"),
        ({"sequence_length": 64}, "takes no --sequence-length", "leave out --sequence-length"),
        ({"steps": 3, "epochs": 3}, "--steps and --epochs both", "one of them"),
        ({"epochs": 0}, "epochs is 0", "1 or more"),
        ({"recipes": ("te-fp8",)}, "te-fp8 cannot run here: FP8 needs", "--recipe bf16"),
        (
            {"recipes": ("zero2",)},
            "needs deepspeed, which is not installed (pip install",
            "nearest that can: --recipe fsdp2",
        ),
        ({"workload": "./no_such.py:build"}, "no file ./no_such.py", "./my.py:build"),
        ({"instance": "p5.48xlrge"}, "unknown instance 'p5.48xlrge'", "p5.48xlarge"),
    ],
)
def test_bad_values_are_refused_with_what_would_do(options: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        jobs(**options)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_unknown_instance_is_an_unknown_name() -> None:
    with pytest.raises(UnknownName):
        jobs(instance="p5")


def test_more_processes_than_gpus_are_refused() -> None:
    with pytest.raises(UserError, match="3 processes on 2 x NVIDIA H200"):
        jobs(TWO_H200, nproc=3)


def test_own_workload_and_folder_are_taken(tmp_path: Path) -> None:
    own = tmp_path / "my.py"
    own.touch()
    (job,) = jobs(workload=f"{own}:build", data=f"folder:{tmp_path}").specs
    assert (job.workload, job.data) == (f"{own}:build", f"folder:{tmp_path}")


def test_rehearsal_without_a_gpu_uses_the_small_size_and_says_what_it_leaves_out() -> None:
    found = jobs(instance="p5.48xlarge", recipes=("te-fp8",), batch_size=128)
    (job,) = found.specs
    assert (job.workload, job.batch_size, job.num_gpus, job.instance) == ("vit-tiny", 8, 1, None)
    assert job.recipe.label == "bf16"
    assert found.differences == (
        ("workload", "vit-huge at batch 128: rehearsed with vit-tiny at batch 8"),
        (
            "recipe",
            "te-fp8: FP8 needs an NVIDIA GPU, and there is none, rehearsed as bf16",
        ),
        ("GPU", "8 x NVIDIA H100; here: CPU with 2 cores"),
        ("ranks", "8; here: 1"),
        ("network", "3200 Gbps, 32 EFA interfaces"),
        ("image", "the container image, its driver and its libraries"),
        ("price", "nothing here tells what a step costs on p5.48xlarge"),
    )


def test_rehearsal_with_a_gpu_that_can_keeps_the_job() -> None:
    found = jobs(TWO_H200, instance="p5.48xlarge", recipes=("te-fp8",), batch_size=128)
    (job,) = found.specs
    assert (job.workload, job.batch_size, job.recipe.name) == ("vit-huge", 128, "te-fp8")
    assert [what for what, _ in found.differences] == ["GPU", "ranks", "network", "image", "price"]


def test_two_recipes_with_one_stand_in_are_rehearsed_once() -> None:
    found = jobs(instance="p5.48xlarge", recipes=("te-fp8", "te-bf16"), repeats=2)
    assert [spec.recipe.label for spec in found.specs] == ["bf16"] * 2
    assert sum(what == "recipe" for what, _ in found.differences) == 2


def test_data_are_found_below_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No shell writes out a `~` after a colon; training does.
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "reviews.csv").touch()
    for data, workload in (("folder:~", "vit-tiny"), ("file:~/reviews.csv", "distilbert-tiny")):
        assert {spec.data for spec in jobs(workload=workload, data=data).specs} == {data}
    with pytest.raises(UserError, match="there is no file ~/none"):
        jobs(workload="distilbert-tiny", data="file:~/none.csv")


def test_text_and_epochs_reach_the_job(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.touch()
    folder = str(tmp_path)
    text = {"model": folder, "tokenizer": "org/t", "sequence_length": 64, "data": f"file:{corpus}"}
    (job,) = jobs(workload="gpt2-xsmall", epochs=2, eval_every=50, **text).specs
    assert (job.steps, job.epochs, job.eval_every, job.batch_size) == (None, 2, 50, 4)
    assert (job.model, job.tokenizer, job.sequence_length, job.data) == tuple(text.values())
    (job,) = jobs(workload=f"hf-clm:{folder}").specs
    assert (job.workload, job.steps) == (f"hf-clm:{folder}", 200)


def test_models_that_are_not_here_are_named_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for given, hint in (
        ({"workload": "gpt2-xsmall", "model": "./gpt2"}, "give --model FOLDER"),
        ({"workload": "gpt2-xsmall", "model": "~no such user/gpt2"}, "give --model FOLDER"),
        ({"workload": "distilbert-imdb", "tokenizer": str(tmp_path / "file")}, "give --tokenizer FOLDER"),
        ({"workload": "hf-clm:models/gpt/neo"}, "give hf-clm:FOLDER"),
    ):
        with pytest.raises(UserError, match="there is no folder") as caught:
            jobs(**given)
        assert hint in (caught.value.hint or "")
    assert jobs(workload="hf-clm:EleutherAI/gpt-neo-2.7B", tokenizer="gpt2").specs


def test_deepspeed_shards_the_optimizer_of_the_small_language_model() -> None:
    machine = replace(CPU, modules=frozenset({"torch", "deepspeed", "transformers"}))
    request = SubmitOptions(workload="gpt2-tiny", recipes=("zero1",))
    assert len(build_jobs(request, machine=machine, catalogue=CATALOGUE).specs) == 1


def test_a_rehearsal_of_text_without_a_gpu_leaves_the_model_out() -> None:
    found = jobs(instance="p5.48xlarge", workload="gpt2-xsmall", model="./gpt2", sequence_length=512)
    (job,) = found.specs
    assert (job.workload, job.model, job.sequence_length) == ("gpt2-tiny", None, None)
    assert found.differences[0] == ("workload", "gpt2-xsmall at batch 4: rehearsed with gpt2-tiny at batch 4")


@pytest.mark.parametrize("workload", ["vit-huge", "my.py:build"])
def test_the_proposed_recipe_is_let_through(
    workload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.py").touch()
    request = SubmitOptions(workload=workload, recipes=("zero2",), overrides=("optimizer_impl=fused",))
    with pytest.raises(UserError, match="needs deepspeed") as caught:
        build_jobs(request, machine=TWO_H200, catalogue=CATALOGUE)
    assert (caught.value.hint or "").startswith("the nearest that can: --recipe fsdp2")
    request = replace(request, recipes=("fsdp2",), overrides=())
    assert build_jobs(request, machine=TWO_H200, catalogue=CATALOGUE).specs


def test_a_gpu_of_the_catalogue_that_lacks_a_format_is_told() -> None:
    with pytest.raises(UserError, match=r"te-fp8 cannot run here: .* NVIDIA A100.* has 8.0") as caught:
        jobs(TWO_A100, recipes=("te-fp8",))
    assert caught.value.hint == "the nearest that can: --recipe te-bf16"

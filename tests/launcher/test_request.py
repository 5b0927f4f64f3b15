"""From options to jobs on this machine: defaults, order of repeats, rehearsals, and what cannot run here."""

import contextlib
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ec2_builders import catalogue

from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.ownership import FEWEST_TIMED_STEPS
from fastlaunch.jobs.build import build_jobs
from fastlaunch.jobs.job import Inputs, Job, entrypoint_arguments
from fastlaunch.jobs.machine import Machine, this_machine
from fastlaunch.jobs.options import Options
from fastlaunch.jobs.variants import missing_on, nearest_on
from fastlaunch.lifecycle.sweep_plan import search_options
from fastlaunch.measure.steptime import MIN_TIMED_STEPS, MIN_WARMUP_STEPS
from fastlaunch_train.recipes.recipe import Recipe
from fastlaunch_train.recipes.recipes import RECIPES, resolve_recipe
from fastlaunch_train.recipes.requirements import needed_packages
from fastlaunch_train.run.options import parse_options
from fastlaunch_train.workloads.registry import workload_info

CATALOGUE = catalogue()
SOFTWARE = frozenset(package for recipe in RECIPES.values() for package in needed_packages(recipe))
BARE = frozenset({"torch", "timm"})
CPU = Machine(devices=(), num_cores=2, modules=BARE)
TWO_H200 = Machine(devices=("NVIDIA H200",) * 2, num_cores=16, modules=BARE | {"transformer_engine"})


def jobs(machine: Machine = CPU, **options: Any) -> Any:
    return build_jobs(Options(**options), machine=machine, catalogue=CATALOGUE)


def test_defaults_follow_the_machine() -> None:
    (here,) = jobs().at()
    assert (here.workload, here.batch_size, here.recipe.name) == ("vit-tiny", 8, "bf16")
    assert (here.steps, here.seed, here.num_gpus, here.instance) == (200, 0, 1, None)
    (there,) = jobs(TWO_H200).at()
    assert (there.workload, there.batch_size, there.num_gpus) == ("vit-huge", 64, 2)


def test_a_rehearsal_in_ones_own_image_reads_data_there(tmp_path: Path) -> None:
    there = f"folder:{tmp_path / 'nowhere here'}"

    def rehearsed(data: str, image: str | None) -> tuple[Job, ...]:
        typed = {"workload": "distilbert-tiny", "data": data, "model": str(tmp_path), "image": image}
        return jobs(**typed, container=True).at()

    (job,) = rehearsed(there, "acme/train:1")
    assert (job.inputs.data, job.inputs.model) == (there, str(tmp_path))
    for data, image, told in (
        (there, None, "there is no folder"),
        ("folder:nowhere", "acme/train:1", "in an image it begins with /"),
        ("file:/opt/ml/x", "acme/train:1", "get /opt/ml from outside"),
        ("synthetic", None, "is on this machine, not in the container"),
    ):
        with pytest.raises(UserError, match=told):
            rehearsed(data, image)


def test_what_is_given_counts() -> None:
    (job,) = jobs(TWO_H200, workload="vit-tiny", batch_size=16, nproc=1, seed=5, steps=7).at()
    assert (job.workload, job.batch_size, job.num_gpus, job.seed, job.steps) == ("vit-tiny", 16, 1, 5, 7)
    assert jobs(batch_size="auto").at()[0].batch_size is None
    assert jobs(nproc=4).at()[0].num_gpus == 4
    assert jobs(workload="timm:vit_base_patch16_224").at()[0].batch_size == 8


@pytest.mark.parametrize(("repeats", "order"), [(1, "ABC"), (2, "ABCCBA"), (3, "ABCCBAABC")])
def test_repeats_are_interleaved_there_and_back(repeats: int, order: str) -> None:
    names = {"fp32": "A", "bf16": "B", "compile": "C"}
    specs = jobs(recipes=tuple(names), repeats=repeats).at()
    assert "".join(names[spec.recipe.name] for spec in specs) == order
    assert len({spec.without_seed for spec in specs}) == 3
    # The runs of a round have a seed of their own, and make pairs.
    assert [spec.seed for spec in specs] == [number for number in range(repeats) for _ in names]
    assert [spec.round for spec in specs] == [number + 1 for number in range(repeats) for _ in names]


def test_the_largest_batch_fits_all_recipes_or_each_its_own() -> None:
    labels = ("fp32", "bf16", "compile")
    specs = jobs(recipes=labels, batch_size="auto", repeats=2).at()
    assert [spec.batch_size for spec in specs] == [None] * 6
    assert {spec.fit for spec in specs} == {labels}
    words = entrypoint_arguments(specs[0])
    assert [after for word, after in itertools.pairwise(words) if word == "--fit"] == list(labels)
    assert {spec.fit for spec in jobs(recipes=labels, batch_size="auto-each").at()} == {()}
    (alone,) = jobs(recipes=labels[:1], batch_size="auto").at()
    assert (alone.fit, alone.batch_size) == ((), None)
    assert Job.from_json(json.loads(json.dumps(specs[0].to_json()))) == specs[0]


@pytest.mark.parametrize(
    ("options", "num_caveats"),
    [({}, 0), ({"steps": 19}, 1), ({"steps": 19, "repeats": 3}, 1), ({"steps": 20}, 0)],
)
def test_too_few_steps_for_a_step_time_are_told(options: dict[str, int], num_caveats: int) -> None:
    caveats = jobs(recipes=("fp32",), **options).caveats
    assert len(caveats) == num_caveats
    assert all(str(options["steps"]) in caveat for caveat in caveats)


def test_the_fewest_steps_are_those_of_the_step_time() -> None:
    assert FEWEST_TIMED_STEPS == MIN_WARMUP_STEPS + MIN_TIMED_STEPS


def test_a_misspelt_model_of_timm_is_refused_before_it_is_tried() -> None:
    for name in ("vit_base_patch16_224", "vit_base_patch16_224.augreg_in21k", "resnet50"):
        assert jobs(workload=f"timm:{name}").at()[0].workload == f"timm:{name}"
    with pytest.raises(UnknownName, match="vit_bas_patch16") as refused:
        jobs(workload="timm:vit_bas_patch16_224")
    assert "timm:vit_base_patch16_224" in str(refused.value.hint)


def test_overrides_hold_for_every_recipe() -> None:
    specs = jobs(recipes=("bf16", "fp32"), overrides=("optimizer_impl=fused",)).at()
    assert [spec.recipe.label for spec in specs] == ["bf16 optimizer_impl=fused", "fp32 optimizer_impl=fused"]


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"recipes": ("bf61",)}, "unknown recipe 'bf61'", "bf16"),
        ({"workload": "vit-hug"}, "unknown workload 'vit-hug'", "vit-huge"),
        ({"workload": "./no_such.py:build"}, "no file ./no_such.py", "./my.py:build"),
        ({"workload": f"{__file__}:test_override"}, "unknown function", "test_overrides_hold"),
        ({"local": True, "instances": ("p5.48xlrge",)}, "unknown instance 'p5.48xlrge'", "p5.48xlarge"),
        ({"workload": "hf-lora"}, "workload 'hf-lora' names no model", "llama-3.1-8b"),
        ({"workload": "hf-sft:llama-tini"}, "no model 'llama-tini'", "did you mean hf-sft:llama-tiny"),
        (
            {"workload": "hf-lora:llama-tiny", "workload_arguments": ("rank=0",)},
            "--set-workload rank is 0",
            "from 1 to 1024",
        ),
        (
            {"workload": "hf-sft:llama-tiny", "recipes": ("nf4",)},
            "recipe nf4 does not fit workload hf-sft:llama-tiny, which trains all its weights",
            "--workload hf-lora:MODEL",
        ),
        ({"workload": "gpt2-tiny", "recipes": ("liger",)}, "Liger's kernels are those", "give bf16"),
        ({"overrides": ("compile_mod=default",)}, "no field 'compile_mod'", "compile_mode"),
        ({"recipes": ("bf16", "bf16")}, "given twice", "--repeats 2"),
        ({"repeats": 0}, "--repeats is 0", "give 1 to 1000"),
        ({"repeats": 1001}, "--repeats is 1001", "give 1 to 1000"),
        ({"nproc": 0}, "--nproc is 0", "1 or more"),
        ({"steps": 3, "epochs": 3}, "--steps and --epochs both", "one of them"),
        ({"data": "sinthetic"}, "unknown data source", "synthetic, loader"),
        ({"data": "folder:/no/such/folder"}, "no folder /no/such/folder", "images"),
        ({"data": "file:/no/such.txt", "workload": "gpt2-tiny"}, "no file /no/such.txt", "text"),
        ({"data": f"file:{__file__}"}, "workload 'vit-tiny' reads no text", "--data folder:PATH"),
        ({"model": "gpt2"}, "workload 'vit-tiny' takes no --model", "leave out --model"),
        ({"sequence_length": 64}, "takes no --sequence-length", "leave out --sequence-length"),
        ({"workload": "gpt2-xsmall", "model": "./gpt2"}, "there is no folder", "give --model FOLDER"),
        ({"workload": "gpt2-xsmall", "model": "~nobody/gpt2"}, "there is no folder", "--model FOLDER"),
        ({"workload": "gpt2-tiny", "tokenizer": __file__}, "there is no folder", "--tokenizer FOLDER"),
        ({"workload": "hf-clm:models/gpt/neo"}, "there is no folder", "give hf-clm:FOLDER"),
        ({"recipes": ("te-fp8",)}, "te-fp8 cannot run here: FP8 needs", "--recipe bf16"),
        ({"recipes": ("zero2",)}, "needs deepspeed, which is not installed (pip install", "--recipe fsdp2"),
        # The workload's optimizer decides: SGD, adafactor, none.
        (
            {"workload": "vit-huge", "recipes": ("fsdp2",), "overrides": ("optimizer_impl=fused",)},
            "torch has no fused SGD for the sharded parameters of fsdp2",
            "add --set optimizer_impl=foreach, or --set optimizer=adamw",
        ),
        (
            {"workload": "gpt2-xsmall", "overrides": ("optimizer_impl=fused",)},
            "does not fit workload gpt2-xsmall: there is no fused adafactor",
            "--set optimizer=adamw",
        ),
        (
            {"workload": "gelu", "overrides": ("optimizer=adamw",)},
            "it trains nothing, and optimizer=adamw says how to train",
            "leave out optimizer",
        ),
        (
            {"recipes": ("te-fp8",), "overrides": ("loop=lightning",)},
            "recipe te-fp8 loop=lightning: loop=lightning trains in fp32",
            "loop=ours",
        ),
    ],
)
def test_what_cannot_run_here_is_refused_with_what_would(
    options: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(UserError) as caught:
        jobs(**options).at()
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a.jsonl is empty"),
        (b'{"text": ""}\n{"prompt": "a", "completion": ""}\n', "a.jsonl has nothing to predict"),
        (b'{"text": "a"}\n{"text": "oops\n', "a.jsonl, line 2: it is not JSON"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        jobs(workload="hf-lora:llama-tiny", data=f"file:{tmp_path}/a.jsonl")
    assert '{"messages": [...]}' in str(caught.value.hint)


def test_more_processes_than_gpus_are_refused() -> None:
    with pytest.raises(UserError, match="3 processes on 2 x NVIDIA H200"):
        jobs(TWO_H200, nproc=3)


@pytest.mark.parametrize("workload", ["vit-tiny", "distilbert-imdb"])
def test_a_recipe_that_fits_the_workloads_optimizer_is_taken(workload: str) -> None:
    machine = replace(CPU, modules=SOFTWARE)
    assert jobs(machine, workload=workload, recipes=("fsdp2",), overrides=("optimizer_impl=fused",)).at()
    assert jobs(machine, workload="gpt2-tiny", recipes=("zero1",)).at()


def test_arguments_of_an_own_workload_reach_the_job(tmp_path: Path) -> None:
    own = tmp_path / "my.py"
    own.write_text("def build(depth: int, width: int = 8): ...")
    given = {"workload": f"{own}:build", "workload_arguments": ("width=4", "depth=3")}
    (job,) = jobs(**given, data=f"folder:{tmp_path}").at()
    assert (job.workload, job.inputs.data) == (f"{own}:build", f"folder:{tmp_path}")
    argv = entrypoint_arguments(job)
    assert parse_options([*argv, "--output", "out"]).arguments == {"depth": 3, "width": 4}
    reordered = given | {"workload_arguments": ("depth=3", "width=4")}
    (other,) = jobs(**reordered, data=f"folder:{tmp_path}").at()
    assert job == other
    for texts in (("depht=3",), ()):
        with pytest.raises(UserError, match="cannot be called with"):
            jobs(**given | {"workload_arguments": texts})
    with pytest.raises(UserError, match="takes no --set-workload"):
        jobs(workload="vit-tiny", workload_arguments=("depth=3",))


def test_rehearsal_without_a_gpu_uses_the_small_size_and_says_what_it_leaves_out() -> None:
    found = jobs(local=True, instances=("p5.48xlarge",), recipes=("te-fp8",), batch_size=128)
    (job,) = found.at()
    assert (job.workload, job.batch_size, job.num_gpus, job.instance) == ("vit-wide", 16, 1, None)
    assert job.recipe.label == "bf16"
    assert found.differences == (
        ("workload", "vit-huge at batch 128: rehearsed with vit-wide at batch 16"),
        ("recipe", "te-fp8: FP8 needs an NVIDIA GPU, and there is none, rehearsed as bf16"),
        ("GPU", "8 x H100; here: CPU with 2 cores"),
        ("ranks", "8; here: 1"),
        ("network", "3200 Gbps, 32 EFA interfaces"),
        ("image", "the container image, its driver and its libraries"),
        ("price", "nothing here tells what a step costs on p5.48xlarge"),
    )


def test_fused_blocks_are_rehearsed_and_refused_for_a_width_that_their_kernels_lack() -> None:
    (job,) = jobs(local=True, instances=("p5.48xlarge",), recipes=("bf16-fused",)).at()
    assert (job.workload, job.batch_size, job.recipe.label) == ("vit-wide", 16, "bf16-fused")
    for where in ({"local": True}, {"instances": ("p5.48xlarge",)}):
        with pytest.raises(UserError, match="2048 or 2560, and it is 64") as caught:
            jobs(**where, workload="vit-tiny", recipes=("bf16-fused",), batch_size=16)
        assert "te-bf16" in (caught.value.hint or "")


def test_the_width_of_a_users_workload_is_known_by_its_argument(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def build(width: int = 1280): ...")
    for width, fits in (("1280", True), ("1792", False), ("2816", False), ("3584", False), ("wide", True)):
        given = {"workload": f"{own}:build", "workload_arguments": (f"width={width}",), "batch_size": 16}
        refused = contextlib.nullcontext() if fits else pytest.raises(UserError, match=f"it is {width}")
        with refused:
            jobs(instances=("p5.48xlarge",), recipes=("fp8-fused",), **given)
    jobs(TWO_H200, recipes=("te-fp8",), **given | {"workload_arguments": ("width=1792",)})


def test_rehearsal_with_a_gpu_that_can_keeps_the_job() -> None:
    found = jobs(TWO_H200, local=True, instances=("p5.48xlarge",), recipes=("te-fp8",), batch_size=128)
    (job,) = found.at()
    assert (job.workload, job.batch_size, job.recipe.name) == ("vit-huge", 128, "te-fp8")
    assert [what for what, _ in found.differences] == ["GPU", "ranks", "network", "image", "price"]


def test_data_are_found_below_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No shell writes out a `~` after a colon; training does.
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "reviews.csv").touch()
    for data, workload in (("folder:~", "vit-tiny"), ("file:~/reviews.csv", "distilbert-tiny")):
        assert {spec.inputs.data for spec in jobs(workload=workload, data=data).at()} == {data}
    with pytest.raises(UserError, match="there is no file ~/none"):
        jobs(workload="distilbert-tiny", data="file:~/none.csv")


def test_text_and_epochs_reach_the_job(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.touch()
    folder = str(tmp_path)
    text = {"model": folder, "tokenizer": "org/t", "sequence_length": 64, "data": f"file:{corpus}"}
    (job,) = jobs(workload="gpt2-xsmall", epochs=2, eval_every=50, **text).at()
    assert (job.steps, job.epochs, job.eval_every, job.batch_size) == (None, 2, 50, 4)
    assert job.inputs == Inputs(**text)  # type: ignore[arg-type]
    (job,) = jobs(workload=f"hf-clm:{folder}").at()
    assert (job.workload, job.steps) == (f"hf-clm:{folder}", 200)


def test_a_step_profile_reaches_the_entrypoint() -> None:
    (job,) = jobs(workload="vit-tiny", step_profile=True).at()
    (plain,) = jobs(workload="vit-tiny").at()
    for spec in (job, plain):
        options = parse_options([*entrypoint_arguments(spec), "--output", "out"])
        assert options.step_profile == spec.step_profile
    assert {*entrypoint_arguments(job)} - {*entrypoint_arguments(plain)} == {"--step-profile"}
    # A run that looks for a batch size measures nothing.
    assert not search_options(Options(step_profile=True)).step_profile
    with pytest.raises(UserError, match="loop=lightning") as refused:
        jobs(workload="vit-tiny", recipes=("bf16", "lightning"), step_profile=True)
    assert "--step-profile" in (refused.value.hint or "")


def test_a_rehearsal_of_text_without_a_gpu_leaves_the_model_out() -> None:
    found = jobs(
        local=True, instances=("p5.48xlarge",), workload="gpt2-xsmall", model="./gpt2", sequence_length=512
    )
    (job,) = found.at()
    assert (job.workload, job.inputs) == ("gpt2-tiny", Inputs())
    assert found.differences[0] == ("workload", "gpt2-xsmall at batch 4: rehearsed with gpt2-tiny at batch 4")


def test_a_machine_looks_for_all_that_a_recipe_may_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in SOFTWARE:
        (tmp_path / f"{module}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert this_machine({}).modules >= SOFTWARE


# Which recipes a machine runs, and what would run instead


def with_gpu(accelerator: str | None, *, without: str = "") -> Machine:
    devices = CATALOGUE.accelerators[accelerator].device_names[:1] if accelerator else ()
    return Machine(devices=devices, num_cores=2, modules=SOFTWARE - {without})


def why_not(recipe: Recipe, machine: Machine) -> str | None:
    return missing_on(recipe, machine.capabilities(CATALOGUE))


def nearest_that_runs(recipe: Recipe, machine: Machine, workload: str = "vit-huge") -> Recipe:
    return nearest_on(recipe, workload_info(workload), machine.capabilities(CATALOGUE))


@pytest.mark.parametrize(
    ("gpu", "cannot"),
    [
        ("H200", {"te-mxfp8"}),
        # FP8 in blocks of 128 is computed by way of MXFP8, by Transformer Engine's own word on 12.0 too.
        ("B200", set()),
        ("RTX PRO 6000", {"te-mxfp8"}),
        ("L40S", {"te-fp8-block", "te-mxfp8", "ao-fp8-rowwise"}),
        ("A100 40GB", {name for name, recipe in RECIPES.items() if recipe.precision == "fp8"}),
        (None, {"tf32", "graph", "liger", *(name for name in RECIPES if name.startswith("te-"))}),
    ],
)
def test_what_a_machine_cannot_run_though_everything_is_installed(gpu: str | None, cannot: set[str]) -> None:
    assert {name for name, recipe in RECIPES.items() if why_not(recipe, with_gpu(gpu))} == cannot


@pytest.mark.parametrize(
    ("recipe", "machine", "nearest"),
    [
        ("te-article", with_gpu("H200", without="transformer_engine"), "bf16"),
        ("ao-fp8", with_gpu("H200", without="torchao"), "compile"),
        ("zero2", with_gpu("H200", without="deepspeed"), "fsdp2"),
        ("transformers", with_gpu("H200", without="transformers"), "bf16"),
        ("ort", with_gpu("H200", without="torch_ort"), "fp16"),
        ("ort-zero1", with_gpu("H200", without="deepspeed"), "ort"),
        ("te-mxfp8", with_gpu("H200"), "te-fp8-block"),
        ("te-fp8-block", with_gpu("B200"), "te-fp8-block"),
        ("te-fp8-block", with_gpu("L40S"), "te-fp8"),
        ("ao-fp8-rowwise", with_gpu("L40S"), "ao-fp8"),
        ("te-article-fp8", with_gpu("A100 40GB"), "te-article"),
        ("ao-fp8-rowwise", with_gpu("A100 40GB"), "compile"),
    ],
)
def test_the_nearest_recipe(recipe: str, machine: Machine, nearest: str) -> None:
    assert nearest_that_runs(resolve_recipe(recipe), machine).label == nearest


@pytest.mark.parametrize(
    ("workload", "overrides", "nearest"),
    [
        ("vit-tiny", (), "fsdp2 optimizer_impl=fused"),
        # Which torch has not for the shards of fsdp2, whoever asks for it.
        ("vit-huge", (), "fsdp2"),
        ("vit-tiny", ("optimizer=sgd",), "fsdp2 optimizer=sgd"),
        ("vit-huge", ("optimizer=adamw",), "fsdp2 optimizer=adamw optimizer_impl=fused"),
        ("vit-tiny", ("deterministic=true",), "fsdp2 deterministic=true optimizer_impl=fused"),
    ],
)
def test_what_is_deepspeeds_goes_with_it(workload: str, overrides: tuple[str, ...], nearest: str) -> None:
    recipe = resolve_recipe("zero2", ["overlap_comm=false", "optimizer_impl=fused", *overrides])
    assert nearest_that_runs(recipe, with_gpu("H200", without="deepspeed"), workload).label == nearest


@pytest.mark.parametrize("gpu", ["H200", "B200", "A100 40GB", None])
def test_the_nearest_always_runs(gpu: str | None) -> None:
    machine = replace(with_gpu(gpu), modules=BARE)
    for recipe in RECIPES.values():
        assert why_not(nearest_that_runs(recipe, machine), machine) is None

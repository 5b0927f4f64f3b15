"""What a recipe needs of a machine, what is said where it is missing, and which recipe is named instead."""

import dataclasses
import importlib.metadata
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastlaunch_train.checks.runs_here import (
    check_runs_here,
    check_runs_on,
    installed_version,
    runnable_recipes,
    te_scaling_problem,
)
from fastlaunch_train.recipes.advice import distance, nearest_recipe
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.recipes.recipes import RECIPES, resolve_recipe
from fastlaunch_train.recipes.requirements import (
    EXTRAS,
    TORCHAO_RELEASE,
    Capabilities,
    Version,
    dotted,
    missing_part,
    parse_version,
)

CPU = torch.device("cpu")
INSTALLED: Mapping[str, Version] = {
    "torch": (2, 11, 0),
    "transformer_engine": (2, 20, 2),
    "torchao": (0, 17, 0),
    "deepspeed": (0, 19, 8),
    "lightning": (2, 6, 6),
    "transformers": (5, 23, 0),
    "accelerate": (1, 15, 0),
    "torch_ort": (1, 19, 2),
}


def machine(capability: tuple[int, int] | None, **changes: Any) -> Capabilities:
    """With everything installed but ORTModule, unless `changes` say otherwise.

    without: packages that are not there. unusable: those that cannot be used, with why.
    """
    without = changes.pop("without", ())
    unusable = {"torch_ort": "no ORTModule here", **changes.pop("unusable", {})}
    versions = {**INSTALLED, **changes.pop("versions", {})}
    fields: dict[str, Any] = {
        "compute_capability": capability,
        "cuda": None if capability is None else (13, 0),
        "version_of": lambda package: None if package in without else versions[package],
        "package_problem": unusable.get,
    }
    return Capabilities(**fields | changes)


def runs(on: Capabilities) -> set[str]:
    return {name for name, recipe in RECIPES.items() if missing_part(recipe, on) is None}


def having(**values: str) -> set[str]:
    return {
        name
        for name, recipe in RECIPES.items()
        if all(getattr(recipe, field) == value for field, value in values.items())
    }


ORT = having(engine="ort")
EVERYTHING = set(RECIPES) - ORT
COMPILED = set(RECIPES) - having(compile_mode="none")
TE = set(RECIPES) - having(blocks="native")
FP8 = having(precision="fp8")
TORCHAO = FP8 - TE
HOPPER = {"te-fp8-block", "ao-fp8-rowwise"}


def test_what_runs_on_which_gpu() -> None:
    assert runs(machine(None)) == EVERYTHING - TE - {"tf32"}
    assert runs(machine((6, 1))) == EVERYTHING - TE - FP8 - COMPILED - {"tf32"}
    # Inductor would run eagerly what it cannot compile there: bf16, which all of these are.
    assert runs(machine((7, 0))) == runs(machine((7, 5))) == EVERYTHING - TE - FP8 - COMPILED - {"tf32"}
    assert missing_part(resolve_recipe("compile", ["precision=fp16"]), machine((7, 5))) is None
    assert runs(machine((8, 0))) == EVERYTHING - FP8
    assert runs(machine((8, 9))) == EVERYTHING - HOPPER - {"te-mxfp8"}
    assert runs(machine((9, 0))) == EVERYTHING - {"te-mxfp8"}
    assert runs(machine((10, 0))) == runs(machine((10, 3))) == EVERYTHING
    assert runs(machine((12, 0))) == EVERYTHING - {"te-mxfp8"}
    assert runs(machine((10, 0), unusable={"torch_ort": None})) == set(RECIPES)


def test_what_runs_with_which_packages() -> None:
    hopper = EVERYTHING - {"te-mxfp8"}
    assert runs(machine((9, 0), unusable={"transformer_engine": "no"})) == hopper - TE
    assert runs(machine((9, 0), compile_problem=lambda backend: "no")) == hopper - COMPILED
    for package, lost in (
        ("torchao", TORCHAO),
        ("deepspeed", {"zero1", "zero2", "zero3"}),
        ("lightning", {"lightning"}),
        ("transformers", {"transformers"}),
        ("accelerate", {"transformers"}),
    ):
        assert lost and runs(machine((9, 0), without=(package,))) == hopper - lost, package


@pytest.mark.parametrize(
    ("recipe", "on", "words"),
    [
        ("te-fp8", machine(None), "FP8 needs an NVIDIA GPU"),
        ("te-bf16", machine(None), "Transformer Engine needs an NVIDIA GPU"),
        ("te-article", machine(None), "Transformer Engine needs an NVIDIA GPU"),
        ("te-fp8", machine((8, 0)), "FP8 needs compute capability 8.9 (Ada), and this GPU has 8.0"),
        ("ao-fp8", machine((8, 0)), "FP8 needs compute capability 8.9 (Ada), and this GPU has 8.0"),
        ("te-fp8", machine((9, 0), unusable={"transformer_engine": "no TE here"}), "no TE here"),
        ("te-bf16", machine((7, 5)), "compute capability 8.0 (Ampere), and this GPU has 7.5"),
        (
            "te-mxfp8",
            machine((9, 0)),
            "MXFP8 needs compute capability 10.0 (Blackwell), and this GPU has 9.0",
        ),
        ("te-mxfp8", machine((12, 0)), "lacks some of its products"),
        ("te-fp8-block", machine((8, 9)), "block scaling needs compute capability 9.0 (Hopper)"),
        ("te-fp8-block", machine((9, 0), cuda=(12, 8)), "CUDA 12.9, and torch has 12.8"),
        ("ao-fp8-rowwise", machine((8, 9)), "needs compute capability 9.0 (Hopper)"),
        (
            "te-fp8-block",
            machine((10, 0), scaling_problem=lambda scaling: f"{scaling} requires Hopper"),
            "Transformer Engine refuses fp8_scaling block: block requires Hopper",
        ),
        (
            "te-fp8-current",
            machine((9, 0), versions={"transformer_engine": (2, 1)}),
            "fp8_scaling current needs transformer_engine 2.2, and 2.1 is installed",
        ),
        (
            "te-fp8-block",
            machine((9, 0), versions={"transformer_engine": (2, 2, 1)}),
            "fp8_scaling block needs transformer_engine 2.3, and 2.2.1 is installed",
        ),
        (
            "te-fp8-block",
            machine((10, 0), versions={"transformer_engine": (2, 8)}),
            "fp8_scaling block on Blackwell needs transformer_engine 2.9, and 2.8 is installed",
        ),
        (
            "te-mxfp8",
            machine((10, 0), versions={"transformer_engine": (1, 13)}),
            "needs transformer_engine 2.0, and 1.13 is installed",
        ),
        ("tf32", machine(None), "TF32 needs an NVIDIA GPU"),
        ("tf32", machine((7, 5)), "this GPU has 7.5"),
        ("compile", machine((6, 0)), "compute capability 7.0"),
        ("compile", machine(None, compile_problem=lambda backend: "no compiler"), "no compiler"),
        (
            "compile",
            machine(None, versions={"torch": (1, 13, 1)}),
            "needs torch 2.2, and 1.13.1 is installed",
        ),
        ("fsdp2", machine(None, versions={"torch": (2, 5, 1)}), "fully_shard needs torch 2.6, and 2.5.1"),
        (
            "fsdp2",
            machine(None, versions={"torch": (2, 6, 0)}),
            "fully_shard on a CPU needs torch 2.9, and 2.6.0 is installed",
        ),
        (
            "zero2",
            machine(None, without=("deepspeed",)),
            "zero2 needs deepspeed, which is not installed (pip install",
        ),
        ("ao-fp8", machine(None, without=("torchao",)), "tensorwise needs torchao, which is not installed"),
        ("ao-fp8", machine(None, versions={"torchao": (0, 7)}), "needs torchao 0.9, and 0.7 is installed"),
        ("lightning", machine(None, without=("lightning",)), "lightning needs lightning, which is not"),
        ("transformers", machine(None, without=("accelerate",)), "needs accelerate, which is not installed"),
        ("ort", machine((8, 0)), "no ORTModule here"),
        (
            "ort-zero1",
            machine((8, 0), unusable={"torch_ort": None}, without=("deepspeed",)),
            "zero1 needs deepspeed",
        ),
    ],
)
def test_the_missing_part_is_named(recipe: str, on: Capabilities, words: str) -> None:
    assert words in (missing_part(RECIPES[recipe], on) or "")


def test_versions_of_no_known_form_are_not_refused() -> None:
    unknown = machine((9, 0), versions={"transformer_engine": (), "deepspeed": ()})
    assert missing_part(RECIPES["zero1"], unknown) is None


def test_a_slow_question_is_not_asked_without_need() -> None:
    def never(*asked: str) -> Any:
        raise AssertionError("asked")

    shy = dataclasses.replace(
        machine(None),
        package_problem=never,
        compile_problem=never,
        scaling_problem=never,
        version_of=never,
    )
    assert missing_part(RECIPES["bf16"], shy) is None
    assert missing_part(RECIPES["te-fp8"], shy) is not None


NEAREST = [
    ("te-mxfp8", machine((9, 0)), "te-fp8-block"),
    ("te-mxfp8", machine((8, 9)), "te-fp8"),
    ("te-fp8-block", machine((9, 0), cuda=(12, 8)), "te-fp8"),
    ("te-fp8", machine((8, 0)), "te-bf16"),
    ("te-fp8", machine((9, 0), unusable={"transformer_engine": "no"}), "ao-fp8"),
    ("te-bf16", machine((9, 0), unusable={"transformer_engine": "no"}), "bf16"),
    ("te-bf16", machine(None), "bf16"),
    ("te-article", machine(None), "bf16"),
    ("te-article-fp8", machine((8, 0)), "te-article"),
    ("ao-fp8-rowwise", machine((8, 9)), "ao-fp8"),
    ("ao-fp8", machine((9, 0), without=("torchao",)), "compile"),
    ("compile-max-autotune", machine(None, compile_problem=lambda backend: "no"), "bf16"),
    ("tf32", machine(None), "fp32"),
    ("zero3", machine(None, without=("deepspeed",)), "fsdp2"),
    ("fsdp2", machine(None, versions={"torch": (2, 5)}), "zero1"),
    ("ort", machine((8, 0)), "fp16"),
    ("ort-zero1", machine((8, 0), unusable={"torch_ort": None}, without=("deepspeed",)), "ort"),
    ("lightning", machine(None, without=("lightning",)), "bf16"),
    ("transformers", machine(None, without=("transformers",)), "bf16"),
]


@pytest.mark.parametrize(("name", "on", "nearest"), NEAREST, ids=[f"{n}-{to}" for n, _, to in NEAREST])
def test_the_nearest_recipe_that_runs_is_named(name: str, on: Capabilities, nearest: str) -> None:
    with pytest.raises(RecipeError, match=f"recipe {name} cannot run here: ") as caught:
        check_runs_on(RECIPES[name], on)
    assert (caught.value.hint or "").startswith(f"the nearest recipe that runs here is {nearest}: ")


def test_an_override_that_cannot_run_leads_back_to_the_recipe() -> None:
    picky = machine(
        None, compile_problem=lambda backend: None if backend == "inductor" else "no backend here"
    )
    with pytest.raises(RecipeError, match="no backend here") as caught:
        check_runs_on(resolve_recipe("compile", ["compile_backend=nothing"]), picky)
    assert "here is compile: " in (caught.value.hint or "")


def test_a_recipe_is_nearest_to_itself_and_another_model_to_none() -> None:
    for recipe in RECIPES.values():
        assert nearest_recipe(recipe, lambda other: True) == recipe
        assert distance(recipe, recipe) == 0
    sound = [recipe for recipe in RECIPES.values() if recipe.blocks != "te-article"]
    assert all(distance(a, RECIPES["te-article"]) > distance(a, b) for a in sound for b in sound)


def test_compile_backends() -> None:
    check_runs_here(resolve_recipe("compile", ["compile_backend=aot_eager"]), CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU runs these")
def test_a_cpu_says_what_is_missing_and_what_runs() -> None:
    assert set(runnable_recipes(CPU)) >= {"fp32", "bf16", "fp16"}
    for name in ("te-fp8", "te-bf16", "te-article", "tf32"):
        with pytest.raises(
            RecipeError, match=f"recipe {name} cannot run here: .*needs an NVIDIA GPU"
        ) as caught:
            check_runs_here(RECIPES[name], CPU)
        assert "(all that run: fp32, bf16, fp16, " in (caught.value.hint or "")
    for name in ("fp32", "bf16", "fp16"):
        check_runs_here(RECIPES[name], CPU)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RecipeError, match=r"needs a C\+\+ compiler"):
        check_runs_here(RECIPES["compile"], CPU)


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.11.0+cu130", (2, 11, 0)), ("13.0", (13, 0)), ("2.13.0a0+git1", (2, 13, 0)), ("unknown", ())],
)
def test_versions(text: str, version: Version) -> None:
    assert parse_version(text) == version


def test_installed_versions() -> None:
    assert installed_version("pytest") == parse_version(importlib.metadata.version("pytest"))
    assert installed_version("torch") == parse_version(torch.__version__)
    assert installed_version("no-such-package-at-all") is None


def loading(name: str, **functions: Callable[[], tuple[bool, str]]) -> Callable[[str], Any]:
    def load(module: str) -> Any:
        if module == name:
            return SimpleNamespace(**functions)
        raise ImportError(module)

    return load


@pytest.mark.parametrize(
    "module", ["transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"]
)
def test_transformer_engine_is_asked_in_old_releases_and_new(module: str) -> None:
    load = loading(
        module,
        check_fp8_support=lambda: (True, ""),
        check_fp8_block_scaling_support=lambda: (False, "requires Hopper"),
        check_mxfp8_support=lambda: (False, "requires Blackwell"),
    )
    assert te_scaling_problem("delayed", load) is None
    assert te_scaling_problem("block", load) == "requires Hopper"
    assert te_scaling_problem("mxfp8", load) == "requires Blackwell"


def test_a_transformer_engine_that_says_nothing_is_tried() -> None:
    assert te_scaling_problem("block", loading("transformer_engine.pytorch.fp8")) is None


def test_the_extras_that_are_named_exist() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS.values()) <= set(extras)
    # What it installs at the oldest is what a recipe takes.
    assert extras["float8"] == [f"torchao>={dotted(TORCHAO_RELEASE)}"]


def test_what_a_cpu_lacks_a_gpu_may_have() -> None:
    assert missing_part(RECIPES["fsdp2"], machine((9, 0), versions={"torch": (2, 6, 0)})) is None

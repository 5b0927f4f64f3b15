"""What a recipe needs of a machine, what is said where it is missing, and which recipe is named instead."""

import importlib.metadata
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import toy

from fastlaunch_train.checks.runs_here import (
    check_runs_here,
    check_runs_on,
    installed_version,
    runnable_recipes,
    this_machine,
)
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.recipes.recipes import RECIPES
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
    "liger_kernel": (0, 8, 5),
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


def only_inductor(backend: str) -> str | None:
    return None if backend == "inductor" else f"no {backend}"


ORT = having(engine="ort")
EVERYTHING = set(RECIPES) - ORT
COMPILED = set(RECIPES) - having(compile_mode="none")
TE = having(blocks="te") | having(blocks="te-article")
FP8 = having(precision="fp8")
FUSED = having(blocks="fused")
TORCHAO = FP8 - TE - FUSED
HOPPER = {"te-fp8-block", "ao-fp8-rowwise"}
LIGER = having(kernels="liger")


def test_what_runs_on_which_gpu() -> None:
    assert runs(machine(None)) == EVERYTHING - TE - LIGER - {"tf32", "graph"}
    assert runs(machine((6, 1))) == EVERYTHING - TE - FP8 - FUSED - COMPILED - {"tf32", "graph"}
    # Inductor would run eagerly what it cannot compile there: bf16, which all of these are.
    assert (
        runs(machine((7, 0))) == runs(machine((7, 5))) == EVERYTHING - TE - FP8 - FUSED - COMPILED - {"tf32"}
    )
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
        ("torchao", TORCHAO | having(frozen_weights="nf4")),
        ("liger_kernel", LIGER),
        ("deepspeed", {"zero1", "zero2"}),
        ("lightning", {"lightning"}),
        ("transformers", {"transformers"}),
        ("accelerate", {"transformers"}),
    ):
        assert lost and runs(machine((9, 0), without=(package,))) == hopper - lost, package


#: A machine that lacks something of each kind, and words of what is said.
MISSING = [
    ("te-fp8", machine(None), "FP8 needs an NVIDIA GPU"),
    ("te-mxfp8", machine((9, 0)), "compute capability 10.0 (Blackwell), and this GPU has 9.0"),
    ("te-mxfp8", machine((12, 0)), "lacks some of its products"),
    ("te-fp8-block", machine((9, 0), cuda=(12, 8)), "CUDA 12.9, and torch has 12.8"),
    ("te-fp8", machine((9, 0), unusable={"transformer_engine": "no TE here"}), "no TE here"),
    ("te-fp8-block", machine((10, 0), scaling_problem=lambda scaling: f"no {scaling}"), "no block"),
    ("te-fp8-current", machine((9, 0), versions={"transformer_engine": (2, 1)}), "2.2, and 2.1 is"),
    ("te-fp8-block", machine((9, 0), versions={"transformer_engine": (2, 2, 1)}), "2.3, and 2.2.1"),
    ("te-fp8-block", machine((10, 0), versions={"transformer_engine": (2, 8)}), "Blackwell"),
    ("te-mxfp8", machine((10, 0), versions={"transformer_engine": (1, 13)}), "2.0, and 1.13"),
    ("compile", machine(None, compile_problem=lambda backend: f"no {backend}"), "no inductor"),
    ("compile", machine(None, versions={"torch": (1, 13, 1)}), "torch 2.2, and 1.13.1"),
    ("ort", machine(None, versions={"torch": (1, 13, 1)}), "fp16 on a CPU needs torch 2.3"),
    ("fsdp2", machine((9, 0), versions={"torch": (2, 5, 1)}), "torch 2.6, and 2.5.1"),
    ("fsdp2", machine(None, versions={"torch": (2, 6, 0)}), "torch 2.9, and 2.6.0"),
    ("te-bf16", machine((9, 0), versions={"torch": (2, 3)}), "optimizer_impl fused needs torch 2.4"),
    ("zero2", machine(None, without=("deepspeed",)), "zero2 needs deepspeed, which is not installed (pip"),
    ("ao-fp8", machine(None, versions={"torchao": (0, 7)}), "torchao 0.9, and 0.7"),
]


@pytest.mark.parametrize(("recipe", "on", "words"), MISSING)
def test_the_missing_part_is_named(recipe: str, on: Capabilities, words: str) -> None:
    assert words in (missing_part(RECIPES[recipe], on) or "")


OLD = machine(None, versions={"torch": (2, 3, 1)}, unusable={"torch_ort": None})


@pytest.mark.parametrize(
    ("label", "on"),
    [
        *((label, OLD) for label in ("fp32", "bf16", "jit-script", "library", "ort precision=fp32")),
        ("compile precision=fp16", machine((7, 5))),
        # What a CPU lacks a GPU may have.
        ("fsdp2", machine((9, 0), versions={"torch": (2, 6, 0)})),
        # Versions of no known form are not refused.
        ("zero1", machine((9, 0), versions={"transformer_engine": (), "deepspeed": ()})),
    ],
)
def test_what_is_there_is_enough(label: str, on: Capabilities) -> None:
    assert missing_part(toy.recipe_of(label), on) is None


NEAREST = [
    ("te-mxfp8", machine((9, 0)), "te-fp8-block"),
    ("te-fp8", machine((9, 0), unusable={"transformer_engine": "no"}), "fp8-fused"),
    ("ao-fp8", machine((9, 0), without=("torchao",)), "compile"),
    ("ort", machine((8, 0)), "fp16"),
    ("compile compile_backend=nothing", machine(None, compile_problem=only_inductor), "compile"),
]


@pytest.mark.parametrize(("label", "on", "nearest"), NEAREST)
def test_the_stand_in_that_runs_is_named(label: str, on: Capabilities, nearest: str) -> None:
    with pytest.raises(RecipeError, match="cannot run here: ") as caught:
        check_runs_on(toy.recipe_of(label), on)
    assert (caught.value.hint or "").startswith(f"the nearest recipe that runs here is {nearest}: ")


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RecipeError, match=r"needs a C\+\+ compiler"):
        check_runs_here(RECIPES["compile"], CPU)


def test_versions() -> None:
    assert parse_version("2.11.0+cu130") == (2, 11, 0)
    assert parse_version("unknown") == ()
    assert installed_version("pytest") == parse_version(importlib.metadata.version("pytest"))
    assert installed_version("torch") == parse_version(torch.__version__)
    assert installed_version("no-such-package-at-all") is None


def test_a_slow_question_is_not_asked_without_need() -> None:
    def never(*_: str) -> Any:
        raise AssertionError

    shy = Capabilities(
        compute_capability=None,
        version_of=never,
        package_problem=never,
        compile_problem=never,
        scaling_problem=never,
    )
    assert missing_part(RECIPES["bf16"], shy) is None
    assert missing_part(RECIPES["te-fp8"], shy) is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU runs it")
def test_a_cpu_says_what_is_missing_and_what_runs() -> None:
    assert set(runnable_recipes(this_machine(CPU))) >= {"fp32", "bf16", "fp16"}
    with pytest.raises(RecipeError, match="needs an NVIDIA GPU") as caught:
        check_runs_here(RECIPES["te-fp8"], CPU)
    assert "(all that run: fp32, bf16, fp16, " in (caught.value.hint or "")
    check_runs_here(RECIPES["fp16"], CPU)


def test_extras_exist_and_install_what_recipes_take() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS.values()) <= set(extras)
    assert extras["float8"] == [f"torchao>={dotted(TORCHAO_RELEASE)}"]

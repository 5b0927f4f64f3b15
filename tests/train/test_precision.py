"""The arithmetic of recipes, and what is said on a machine that cannot do it."""

import dataclasses
from pathlib import Path

import pytest
import torch

from fastlaunch_train.precision import (
    Machine,
    check_runs_here,
    cudnn_warning,
    decode_cudnn_version,
    guard_cudnn_attention,
    loaded_cudnn_versions,
    missing_part,
    runnable_recipes,
    set_fp32_products,
    setup_precision,
)
from fastlaunch_train.recipes import RECIPES, RecipeError, resolve_recipe

CPU = torch.device("cpu")


def machine(
    capability: tuple[int, int] | None, *, te: str | None = None, inductor: str | None = None
) -> Machine:
    return Machine(
        device_type="cpu" if capability is None else "cuda",
        compute_capability=capability,
        transformer_engine_problem=lambda: te,
        inductor_problem=lambda: inductor,
        compile_backends=lambda: ["eager", "inductor"],
    )


def runs(on: Machine) -> set[str]:
    return {name for name, recipe in RECIPES.items() if missing_part(recipe, on) is None}


ANYWHERE = {"fp32", "bf16", "fp16"}
COMPILED = {name for name, recipe in RECIPES.items() if recipe.compile_mode != "none"}
TE = {name for name, recipe in RECIPES.items() if recipe.blocks == "te"}
FP8 = {name for name, recipe in RECIPES.items() if recipe.precision == "fp8"}


def test_what_runs_on_which_machine() -> None:
    assert runs(machine(None)) == ANYWHERE | COMPILED
    assert runs(machine(None, inductor="no compiler")) == ANYWHERE
    assert runs(machine((7, 0))) == ANYWHERE | COMPILED
    assert runs(machine((6, 1))) == ANYWHERE
    assert runs(machine((8, 0))) == set(RECIPES) - FP8
    assert runs(machine((8, 9))) == runs(machine((9, 0))) == runs(machine((10, 0))) == set(RECIPES)
    assert runs(machine((9, 0), te="not installed")) == set(RECIPES) - TE
    assert FP8 < TE


@pytest.mark.parametrize(
    ("recipe", "on", "words"),
    [
        ("te-fp8", machine(None), "FP8 needs an NVIDIA GPU"),
        ("te-bf16", machine(None), "Transformer Engine needs an NVIDIA GPU"),
        ("te-fp8", machine((8, 0)), "FP8 needs compute capability 8.9, and this GPU has 8.0"),
        ("te-fp8", machine((9, 0), te="no TE here"), "no TE here"),
        ("te-bf16", machine((7, 5)), "compute capability 8.0, and this GPU has 7.5"),
        ("tf32", machine(None), "TF32 needs an NVIDIA GPU"),
        ("tf32", machine((7, 5)), "this GPU has 7.5"),
        ("compile", machine((6, 0)), "compute capability 7.0"),
        ("compile", machine(None, inductor="no compiler"), "no compiler"),
    ],
)
def test_the_missing_part_is_named(recipe: str, on: Machine, words: str) -> None:
    assert words in (missing_part(RECIPES[recipe], on) or "")


def test_a_slow_question_is_not_asked_without_need() -> None:
    def never() -> str | None:
        raise AssertionError("asked")

    shy = dataclasses.replace(
        machine(None), transformer_engine_problem=never, inductor_problem=never, compile_backends=never
    )
    assert missing_part(RECIPES["bf16"], shy) is None
    assert missing_part(RECIPES["te-fp8"], shy) is not None


def test_compile_backends() -> None:
    eager = resolve_recipe("compile", ["compile_backend=eager"])
    other = resolve_recipe("compile", ["compile_backend=nothing"])
    assert missing_part(eager, machine(None, inductor="no compiler")) is None
    assert "no backend 'nothing' here (known: eager, inductor)" in (missing_part(other, machine(None)) or "")
    check_runs_here(resolve_recipe("compile", ["compile_backend=aot_eager"]), CPU)


def test_a_cpu_says_what_is_missing_and_what_runs() -> None:
    assert set(runnable_recipes(CPU)) >= ANYWHERE
    for name in ("te-fp8", "te-bf16", "tf32"):
        with pytest.raises(
            RecipeError, match=f"recipe {name} cannot run here: .*needs an NVIDIA GPU"
        ) as caught:
            check_runs_here(RECIPES[name], CPU)
        assert "fp32, bf16, fp16" in (caught.value.hint or "")
    for name in ANYWHERE:
        check_runs_here(RECIPES[name], CPU)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RecipeError, match=r"needs a C\+\+ compiler"):
        check_runs_here(RECIPES["compile"], CPU)


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_autocast_computes_products_in_the_recipes_precision(name: str, dtype: torch.dtype) -> None:
    precision = setup_precision(RECIPES[name], CPU)
    layer = torch.nn.Linear(4, 4)
    for _ in range(2):  # a fresh context each time
        with precision.autocast():
            assert layer(torch.ones(2, 4)).dtype == dtype
    assert layer(torch.ones(2, 4)).dtype == torch.float32
    assert (precision.scaler is not None) == (name == "fp16")


def test_tf32_is_on_for_tf32_alone() -> None:
    try:
        set_fp32_products(allow_tf32=True)
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
        setup_precision(RECIPES["fp32"], CPU)
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
        # The compiler reads it through this one, which fails if torch's two interfaces were mixed.
        assert not torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True


@pytest.mark.parametrize(
    ("number", "version"), [(91501, (9, 15, 1)), (91900, (9, 19, 0)), (8907, (8, 9, 7)), (90100, (9, 1, 0))]
)
def test_cudnn_version_numbers(number: int, version: tuple[int, ...]) -> None:
    assert decode_cudnn_version(number) == version


def test_the_loaded_cudnn_are_found_in_the_process_map(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 11   /opt/python/nvidia/cudnn/lib/libcudnn.so.9\n"
        "7f01-7f02 r--p 00001000 08:01 11   /opt/python/nvidia/cudnn/lib/libcudnn.so.9\n"
        "7f03-7f04 r-xp 00000000 08:01 12   /usr/lib/x86_64-linux-gnu/libcudnn.so.9.14.0\n"
        "7f05-7f06 r-xp 00000000 08:01 13   /usr/lib/x86_64-linux-gnu/libcudnn_graph.so.9\n"
        "7f07-7f08 r-xp 00000000 08:01 14   /usr/lib/libcublas.so.13\n"
        "7f09-7f0a rw-p 00000000 00:00 0\n"
    )
    numbers = {
        "/opt/python/nvidia/cudnn/lib/libcudnn.so.9": 91900,
        "/usr/lib/x86_64-linux-gnu/libcudnn.so.9.14.0": 91400,
    }
    assert loaded_cudnn_versions(maps, numbers.__getitem__) == [(9, 14, 0), (9, 19, 0)]
    assert loaded_cudnn_versions(maps, lambda path: None) == []
    assert loaded_cudnn_versions(tmp_path / "none", numbers.__getitem__) == []


def test_an_old_cudnn_and_several_are_warned_of() -> None:
    assert cudnn_warning([]) is None
    assert cudnn_warning([(9, 15, 1)]) is None
    assert "9.15.0 is older than 9.15.1" in (cudnn_warning([(9, 15, 0)]) or "")
    both = cudnn_warning([(9, 14, 0), (9, 19, 0)]) or ""
    assert "several cuDNN are loaded: 9.14.0, 9.19.0" in both
    assert "attention is off" in both


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU has a cuDNN")
def test_without_a_gpu_there_is_no_cudnn_to_guard() -> None:
    assert guard_cudnn_attention() == (None, None)

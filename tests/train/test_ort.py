"""What is said where ORTModule cannot work. Where it works is the environment of test_old_torch."""

import types

import pytest
import torch
from torch import nn

from fastlaunch_train.models.ort import WORKING, inside_ort, is_installed, ort_module, problem_of
from fastlaunch_train.recipes.recipes import RecipeError


def package(cuda: str | None = None, refusal: Exception | None = None) -> types.ModuleType:
    module = types.ModuleType("ortmodule")
    module.ONNXRUNTIME_CUDA_VERSION = cuda  # type: ignore[attr-defined]
    module._FALLBACK_INIT_EXCEPTION = refusal  # type: ignore[attr-defined]
    return module


def problem(
    *,
    installed: tuple[str, ...] = ("onnxruntime", "torch_ort"),
    loaded: types.ModuleType | Exception | None = None,
    cuda: str | None = None,
) -> str | None:
    def load() -> types.ModuleType:
        if isinstance(loaded, Exception):
            raise loaded
        return loaded or package()

    return problem_of(lambda name: name in installed, load, cuda)


def test_there_is_no_problem_where_it_loads_and_is_built_for_the_gpu() -> None:
    assert problem() is None
    assert problem(loaded=package("11.8"), cuda="11.8") is None
    assert problem(loaded=package("11.8"), cuda="11.6") is None
    # Without a GPU it does not matter what either was built for.
    assert problem(loaded=package("11.8")) is None


def test_what_is_missing_is_named_with_the_versions_that_work_together() -> None:
    missing = problem(installed=("torch_ort",))
    assert missing == f"ORTModule needs onnxruntime-training, which is not installed; {WORKING}"
    missing = problem(installed=("onnxruntime",))
    assert missing == f"ORTModule needs torch-ort, which is not installed; {WORKING}"
    for version in ("torch 1.13.1", "onnxruntime-training 1.19.2", "torch-ort 1.19.2", "onnx 1.16.2"):
        assert version in WORKING


def test_versions_that_do_not_fit_are_named() -> None:
    text = problem(loaded=ImportError("cannot import name 'jit_utils'\nand more"))
    assert text == (
        f"ORTModule is installed but cannot be imported with torch {torch.__version__} "
        f"(ImportError: cannot import name 'jit_utils'); {WORKING}"
    )
    text = problem(loaded=package("11.8"), cuda="13.0")
    assert text is not None and text.startswith(
        "onnxruntime-training is built for CUDA 11.8, and torch for CUDA 13.0"
    )
    text = problem(loaded=package(None), cuda="11.8")
    assert text is not None and text.startswith(
        "onnxruntime-training is built without CUDA, and torch for CUDA 11.8"
    )


def test_an_extension_that_was_not_built_is_told_in_its_own_words() -> None:
    refusal = RuntimeError("There was an error.\nRun `python -m torch_ort.configure` first.")
    assert problem(loaded=package(refusal=refusal)) == (
        "ORTModule does not start: Run `python -m torch_ort.configure` first."
    )


@pytest.mark.skipif(is_installed("torch_ort"), reason="ORTModule is installed here")
def test_a_model_is_not_wrapped_without_it() -> None:
    with pytest.raises(RecipeError, match="ORTModule needs") as error:
        ort_module(nn.Linear(2, 2))
    assert error.value.hint == "or use --set engine=torch"


def test_evaluations_ask_the_module_inside() -> None:
    class ORTModule(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    class DeepSpeedEngine(ORTModule):
        pass

    inner = nn.Linear(2, 2)
    assert inside_ort(DeepSpeedEngine(ORTModule(inner))) is inner
    assert inside_ort(ORTModule(inner)) is inner
    assert inside_ort(inner) is inner

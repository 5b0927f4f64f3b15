"""What is said where ORTModule cannot work. Where it works is the environment of test_ort_environment."""

import types
from typing import Any

import pytest
from torch import nn

from fastlaunch_train.models.ort import is_installed, ort_module, problem_of, unwrap_ort
from fastlaunch_train.recipes.recipe import RecipeError


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


@pytest.mark.parametrize(
    ("circumstances", "words"),
    [
        ({}, None),
        ({"loaded": package("11.8"), "cuda": "11.6"}, None),
        # Without a GPU it does not matter what either was built for.
        ({"loaded": package("11.8")}, None),
        ({"installed": ("torch_ort",)}, "needs onnxruntime-training"),
        ({"loaded": ImportError("cannot import name 'jit_utils'\nand more")}, "jit_utils'"),
        ({"loaded": package("11.8"), "cuda": "13.0"}, "built for CUDA 11.8, and torch for CUDA 13.0"),
        ({"loaded": package(), "cuda": "11.8"}, "built without CUDA"),
        ({"loaded": package(refusal=RuntimeError("An error.\nRun configure first."))}, "Run configure first"),
    ],
)
def test_what_is_wrong_is_named(circumstances: dict[str, Any], words: str | None) -> None:
    found = problem(**circumstances)
    assert found is None if words is None else words in (found or "")


@pytest.mark.skipif(is_installed("torch_ort"), reason="ORTModule is installed here")
def test_a_model_is_not_wrapped_without_it() -> None:
    with pytest.raises(RecipeError, match="ORTModule needs"):
        ort_module(nn.Linear(2, 2))


def test_evaluations_ask_the_module_inside() -> None:
    class ORTModule(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    class DeepSpeedEngine(ORTModule):
        pass

    inner = nn.Linear(2, 2)
    assert unwrap_ort(DeepSpeedEngine(ORTModule(inner))) is inner
    assert unwrap_ort(ORTModule(inner)) is inner
    assert unwrap_ort(inner) is inner

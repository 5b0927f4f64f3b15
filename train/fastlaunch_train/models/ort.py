"""ONNX Runtime's ORTModule, which runs a model forward and backward, and whether it works here.

onnxruntime-training and torch-ort ended with release 1.19.2 in September 2024, so this needs an environment
of its own, which `containers/Dockerfile.ort` builds.
"""

import functools
import importlib.util
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fastlaunch_train.recipes.recipe import RecipeError

#: Tested on CPUs on 2026-11-21; the GPU wheel of 1.19.2 is built for CUDA 11.8.
WORKING = (
    "these work together: torch 2.3.1, onnxruntime-training 1.19.2 (for CUDA 11.8; without a GPU "
    "onnxruntime-training-cpu 1.19.2), torch-ort 1.19.2, onnx 1.16.2, protobuf 4.25.8, numpy < 2, "
    "transformers 4.40.2, as in containers/Dockerfile.ort"
)


@functools.cache
def ort_problem() -> str | None:
    """Return why ORTModule does not work here, and which versions work together; None if it does."""
    return problem_of(is_installed, load_ort, gpu_cuda())


def problem_of(
    installed: Callable[[str], bool], load: Callable[[], ModuleType], cuda: str | None
) -> str | None:
    """Return the same. installed: as `is_installed`. load: as `load_ort`. cuda: as `gpu_cuda`."""
    for module, package in (("onnxruntime", "onnxruntime-training"), ("torch_ort", "torch-ort")):
        if not installed(module):
            return f"ORTModule needs {package}, which is not installed; {WORKING}"
    try:
        ortmodule = load()
    # ImportError, AttributeError, RuntimeError or OSError, depending on the versions.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        return (
            f"ORTModule is installed but cannot be imported with torch {torch.__version__} "
            f"({type(error).__name__}: {reason}); {WORKING}"
        )
    # ORTModule would report this only at its first step.
    refusal: BaseException | None = getattr(ortmodule, "_FALLBACK_INIT_EXCEPTION", None)
    if refusal is not None:
        return f"ORTModule does not start: {(str(refusal).strip().splitlines() or [''])[-1]}"
    built_for: str | None = getattr(ortmodule, "ONNXRUNTIME_CUDA_VERSION", None)
    if cuda is not None and _major(built_for) != _major(cuda):
        what = f"for CUDA {built_for}" if built_for else "without CUDA"
        return f"onnxruntime-training is built {what}, and torch for CUDA {cuda}; {WORKING}"
    return None


def ort_module(model: nn.Module) -> nn.Module:
    """Return a module that runs `model` by ONNX Runtime, forward and backward, with the same parameters.

    A model that ONNX Runtime cannot run raises in the first step; nothing falls back to torch. Raises
    RecipeError if the installed versions do not work.
    """
    problem = ort_problem()
    if problem is not None:
        raise RecipeError(f"engine ort: {problem}", "or use --set engine=torch")
    # Otherwise it warns and lets torch run a model that it cannot run, and we would time that.
    os.environ["ORTMODULE_FALLBACK_POLICY"] = "FALLBACK_DISABLE"
    # At lower levels it logs a page at each export.
    os.environ.setdefault("ORTMODULE_LOG_LEVEL", "ERROR")
    wrapped: nn.Module = load_ort().ORTModule(model)
    return wrapped


def unwrap_ort(model: nn.Module) -> nn.Module:
    """Return the module inside ORTModule and other wrappers; `model` itself without one."""
    while type(model).__name__ in ("ORTModule", "DeepSpeedEngine"):
        model = model.module  # type: ignore[assignment]
    return model


def load_ort() -> Any:
    """Import `onnxruntime.training.ortmodule`. Raises whatever its import does."""
    if torch.version.cuda is None:
        # ORTModule marks ranges for NVIDIA's profiler, which raises in a torch without CUDA.
        torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = _nothing
    # This import makes sure that the releases fit.
    importlib.import_module("torch_ort")
    return importlib.import_module("onnxruntime.training.ortmodule")


def is_installed(module: str) -> bool:
    """Return whether there is such a module, without importing it."""
    return importlib.util.find_spec(module) is not None


def gpu_cuda() -> str | None:
    """Return the CUDA version that torch was built for; None without a GPU."""
    return torch.version.cuda if torch.cuda.is_available() else None


def _nothing(*_: object) -> int:
    return 0


def _major(version: str | None) -> str | None:
    return version.partition(".")[0] if version else None

"""ONNX Runtime's ORTModule: a model run by it, forward and backward, and whether that works here.

onnxruntime-training and torch-ort ended with release 1.19.2, in September 2024: this needs an environment of
its own. `containers/Dockerfile.ort` makes one.
"""

import functools
import importlib.util
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fastlaunch_train.recipes.recipes import RecipeError

#: Tried on CPUs with both of these torch, 2026-11-21; 1.19.2's wheel for GPUs is built for CUDA 11.8.
WORKING = (
    "these work together: torch 1.13.1 or 2.3.1, onnxruntime-training 1.19.2 (for CUDA 11.8; without a GPU "
    "onnxruntime-training-cpu 1.19.2), torch-ort 1.19.2, onnx 1.16.2, protobuf 4.25.8, numpy < 2, "
    "transformers 4.40.2, as in containers/Dockerfile.ort"
)


@functools.cache
def ort_problem() -> str | None:
    """Why ORTModule cannot be used here, and which versions work together; None if it can."""
    return problem_of(is_installed, load_ort, gpu_cuda())


def problem_of(
    installed: Callable[[str], bool], load: Callable[[], ModuleType], cuda: str | None
) -> str | None:
    """The same, asking `installed` for packages and `load` for ORTModule's package.

    cuda: what torch was built for, where there is a GPU; None without one.
    """
    for module, package in (("onnxruntime", "onnxruntime-training"), ("torch_ort", "torch-ort")):
        if not installed(module):
            return f"ORTModule needs {package}, which is not installed; {WORKING}"
    try:
        ortmodule = load()
    # By versions: ImportError, AttributeError, RuntimeError, OSError.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        return (
            f"ORTModule is installed but cannot be imported with torch {torch.__version__} "
            f"({type(error).__name__}: {reason}); {WORKING}"
        )
    # What it would otherwise say at its first step, after it had been built.
    refusal: BaseException | None = getattr(ortmodule, "_FALLBACK_INIT_EXCEPTION", None)
    if refusal is not None:
        return f"ORTModule does not start: {(str(refusal).strip().splitlines() or [''])[-1]}"
    built_for: str | None = getattr(ortmodule, "ONNXRUNTIME_CUDA_VERSION", None)
    if cuda is not None and _major(built_for) != _major(cuda):
        what = f"for CUDA {built_for}" if built_for else "without CUDA"
        return f"onnxruntime-training is built {what}, and torch for CUDA {cuda}; {WORKING}"
    return None


def ort_module(model: nn.Module) -> nn.Module:
    """`model` run by ONNX Runtime, forward and backward, with the same parameters.

    Nothing falls back to torch: what ONNX Runtime cannot run is an error, in the first step. Raises
    RecipeError where the installed versions cannot work.
    """
    problem = ort_problem()
    if problem is not None:
        raise RecipeError(f"engine ort: {problem}", "or use --set engine=torch")
    # Else a model that it cannot run would be run by torch with a warning, and timed as if it were not.
    os.environ["ORTMODULE_FALLBACK_POLICY"] = "FALLBACK_DISABLE"
    # Beneath errors it prints a page about itself at each export.
    os.environ.setdefault("ORTMODULE_LOG_LEVEL", "ERROR")
    wrapped: nn.Module = load_ort().ORTModule(model)
    return wrapped


def inside_ort(model: nn.Module) -> nn.Module:
    """The module that ORTModule was made of, whatever else is around that; `model` itself without one."""
    while type(model).__name__ in ("ORTModule", "DeepSpeedEngine"):
        model = model.module  # type: ignore[assignment]
    return model


def load_ort() -> Any:
    """The package `onnxruntime.training.ortmodule`. Raises whatever its import does."""
    if torch.version.cuda is None:
        # It marks ranges for NVIDIA's profiler, and a torch without CUDA raises there.
        torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = _nothing
    # Importing torch_ort alone makes sure that its release fits.
    importlib.import_module("torch_ort")
    return importlib.import_module("onnxruntime.training.ortmodule")


def is_installed(module: str) -> bool:
    """Whether there is such a module, not imported."""
    return importlib.util.find_spec(module) is not None


def gpu_cuda() -> str | None:
    """The CUDA version that torch was built for, where there is a GPU; None without one."""
    return torch.version.cuda if torch.cuda.is_available() else None


def _nothing(*_: object) -> int:
    return 0


def _major(version: str | None) -> str | None:
    return version.partition(".")[0] if version else None

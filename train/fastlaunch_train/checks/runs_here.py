"""Whether a recipe runs on this machine, found by asking the GPU and the installed software."""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fastlaunch_train.models.ort import ort_problem
from fastlaunch_train.recipes.advice import nearest_recipe
from fastlaunch_train.recipes.recipes import RECIPES, Recipe, RecipeError
from fastlaunch_train.recipes.requirements import EXTRAS, Machine, Version, missing_part


def this_machine(device: torch.device) -> Machine:
    """What `device` and the installed software can do."""
    gpu = device.type == "cuda"
    return Machine(
        device_type=device.type,
        compute_capability=torch.cuda.get_device_capability(device) if gpu else None,
        cuda=parse_version(torch.version.cuda) if torch.version.cuda else None,
        version_of=installed_version,
        transformer_engine_problem=_transformer_engine_problem,
        scaling_problem=te_scaling_problem,
        ort_problem=ort_problem,
        inductor_problem=_inductor_problem_gpu if gpu else _inductor_problem_cpu,
        compile_backends=_compile_backends,
    )


def check_runs_here(recipe: Recipe, device: torch.device) -> None:
    """Returns if `recipe` can run on `device`; else RecipeError with what is missing and what would run."""
    check_runs_on(recipe, this_machine(device))


def check_runs_on(recipe: Recipe, machine: Machine) -> None:
    """Returns if `recipe` can run on `machine`; else RecipeError with what is missing and what would run."""
    missing = missing_part(recipe, machine)
    if missing is None:
        return
    running = _running(machine)
    nearest = nearest_recipe(recipe, running)
    raise RecipeError(
        f"recipe {recipe.label} cannot run here: {missing}",
        f"the nearest recipe that runs here is {nearest.name}: {nearest.description} "
        f"(all that do: {', '.join(other.name for other in running)})",
    )


def runnable_recipes(device: torch.device) -> list[str]:
    """Names of the recipes that can run on `device`, in the table's order."""
    return [recipe.name for recipe in _running(this_machine(device))]


def _running(machine: Machine) -> list[Recipe]:
    return [recipe for recipe in RECIPES.values() if missing_part(recipe, machine) is None]


def installed_version(package: str) -> Version | None:
    """The version of an installed distribution; None if there is none. () if it is in no known form."""
    if package == "torch":  # a machine's own build may have no metadata
        return parse_version(torch.__version__)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        # None where only a part of the metadata is left.
        return parse_version(importlib.metadata.version(package) or "")
    return None


def parse_version(text: str) -> Version:
    """(2, 11, 0) of `2.11.0+cu130`; what is no number ends it."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def te_scaling_problem(scaling: str, load: Callable[[str], Any] = importlib.import_module) -> str | None:
    """Why Transformer Engine will not do FP8 with `scaling` on this GPU; None if it will, or says nothing."""
    function = {"block": "check_fp8_block_scaling_support", "mxfp8": "check_mxfp8_support"}.get(
        scaling, "check_fp8_support"
    )
    # In quantization since release 2.9, in fp8 before.
    for module in ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"):
        try:
            check = getattr(load(module), function)
        except (ImportError, AttributeError):
            continue
        supported, reason = check()
        return None if supported else str(reason)
    return None


@functools.cache
def _transformer_engine_problem() -> str | None:
    if importlib.util.find_spec("transformer_engine") is None:
        return f"Transformer Engine is not installed (the extra `{EXTRAS['transformer_engine']}` installs it)"
    try:
        importlib.import_module("transformer_engine.pytorch")
    # Without a library it needs it raises RuntimeError, OSError or AssertionError, by version.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        return f"Transformer Engine is installed but cannot be imported ({type(error).__name__}: {reason})"
    return None


def _inductor_problem_cpu() -> str | None:
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"torch.compile on a CPU needs a C++ compiler, and {compiler!r} is not found"
    return None


def _inductor_problem_gpu() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "torch.compile on a GPU needs the package triton, which is not installed"
    # triton compiles the launcher of each kernel with it.
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang", "cc"]
    if not any(shutil.which(compiler) for compiler in compilers):
        return f"torch.compile on a GPU needs a C compiler, and {' or '.join(compilers)} is not found"
    return None


def _compile_backends() -> list[str]:
    import torch._dynamo

    # eager, aot_eager and the other debugging backends too: they are left out of the plain listing.
    backends: Iterable[str] = torch._dynamo.list_backends(exclude_tags=())
    return sorted(backends)

"""Whether a recipe runs on this machine, by its GPU and installed software."""

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fastlaunch_train.models.ort import ort_problem
from fastlaunch_train.recipes.recipe import Recipe, RecipeError
from fastlaunch_train.recipes.recipes import RECIPES, stand_in
from fastlaunch_train.recipes.requirements import (
    EXTRAS,
    INSTALL_EXTRA,
    Capabilities,
    Version,
    can_stand_in,
    missing_part,
    parse_version,
)


def this_machine(device: torch.device) -> Capabilities:
    """Return the capabilities of `device` and the installed software."""
    has_gpu = device.type == "cuda"
    return Capabilities(
        compute_capability=torch.cuda.get_device_capability(device) if has_gpu else None,
        cuda=parse_version(torch.version.cuda) if torch.version.cuda else None,
        version_of=installed_version,
        package_problem=_package_problem,
        scaling_problem=te_scaling_problem,
        compile_problem=functools.partial(_compile_problem, has_gpu=has_gpu),
    )


def check_runs_here(recipe: Recipe, device: torch.device) -> None:
    """Raise RecipeError, with what is missing and what would run, unless `recipe` can run on `device`."""
    check_runs_on(recipe, this_machine(device))


def check_runs_on(recipe: Recipe, machine: Capabilities) -> None:
    """Raise RecipeError, with what is missing and what would run, unless `recipe` can run on `machine`."""
    missing = missing_part(recipe, machine)
    if missing is None:
        return
    nearest = stand_in(recipe, lambda other: can_stand_in(other, machine))
    raise RecipeError(
        f"recipe {recipe.label} cannot run here: {missing}",
        f"the nearest recipe that runs here is {nearest.label}: {nearest.description} "
        f"(all that run: {', '.join(runnable_recipes(machine))})",
    )


def runnable_recipes(machine: Capabilities) -> list[str]:
    """Return the names of the recipes that can run on `machine`, in the table's order."""
    return [name for name, recipe in RECIPES.items() if missing_part(recipe, machine) is None]


def installed_version(package: str) -> Version | None:
    """Return the version of an installed package; None if not installed, () if unknown."""
    if package == "torch":  # a local build may have no metadata
        return parse_version(torch.__version__)
    try:
        # None where only a part of the metadata is left.
        return parse_version(importlib.metadata.version(package) or "")
    except importlib.metadata.PackageNotFoundError:
        return () if importlib.util.find_spec(package) else None


def te_scaling_problem(scaling: str, load: Callable[[str], Any] = importlib.import_module) -> str | None:
    """Return Transformer Engine's reason to refuse FP8 with `scaling` on this GPU; None if it gives none."""
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


def _package_problem(package: str) -> str | None:
    if package == "transformer_engine":
        return _transformer_engine_problem()
    return ort_problem() if package == "torch_ort" else None


@functools.cache
def _transformer_engine_problem() -> str | None:
    if importlib.util.find_spec("transformer_engine") is None:
        install = INSTALL_EXTRA.format(EXTRAS["transformer_engine"])
        return f"Transformer Engine is not installed ({install})"
    try:
        importlib.import_module("transformer_engine.pytorch")
    # If it lacks a library it raises RuntimeError, OSError or AssertionError, depending on the version.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        return f"Transformer Engine is installed but cannot be imported ({type(error).__name__}: {reason})"
    return None


def _compile_problem(backend: str, *, has_gpu: bool) -> str | None:
    if backend != "inductor":
        import torch._dynamo

        # Include eager, aot_eager and the other debugging backends, which the plain list leaves out.
        backends: Iterable[str] = torch._dynamo.list_backends(exclude_tags=())
        known = f"torch.compile has no backend {backend!r} here (known: {', '.join(sorted(backends))})"
        return None if backend in backends else known
    if has_gpu and importlib.util.find_spec("triton") is None:
        return "torch.compile on a GPU needs the package triton, which is not installed"
    # triton compiles the launcher of each kernel with a C compiler.
    usual = ["gcc", "clang", "cc"] if has_gpu else ["clang++" if sys.platform == "darwin" else "g++"]
    language, variable = ("C", "CC") if has_gpu else ("C++", "CXX")
    compilers = [os.environ[variable]] if variable in os.environ else usual
    if any(shutil.which(compiler) for compiler in compilers):
        return None
    place = "a GPU" if has_gpu else "a CPU"
    return f"torch.compile on {place} needs a {language} compiler, and {' or '.join(compilers)} is not found"

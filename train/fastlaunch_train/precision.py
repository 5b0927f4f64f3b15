"""The arithmetic of a recipe: what this machine can run, the matrix-product settings, and the autocast."""

import contextlib
import ctypes
import functools
import importlib.util
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastlaunch_train.recipes import RECIPES, Recipe, RecipeError

#: FP8 matrix units: Ada (8.9), Hopper, Blackwell. TF32, and Transformer Engine: Ampere (8.0).
FP8_CAPABILITY = (8, 9)
TF32_CAPABILITY = (8, 0)
#: What triton, which inductor writes its GPU kernels in, supports.
TRITON_CAPABILITY = (7, 0)
#: Before this version cuDNN's attention is wrong at lengths that are no multiple of 128, such as 197.
SAFE_CUDNN = (9, 15, 1)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What decides which recipes run here.

    compute_capability: of the GPU; None without one. The problems say why a thing cannot be used, and are
    None if it can; they are functions because finding out takes seconds.
    """

    device_type: str
    compute_capability: tuple[int, int] | None
    transformer_engine_problem: Callable[[], str | None]
    inductor_problem: Callable[[], str | None]
    compile_backends: Callable[[], list[str]]


def this_machine(device: torch.device) -> Machine:
    """What `device` and the installed software can do."""
    gpu = device.type == "cuda"
    return Machine(
        device_type=device.type,
        compute_capability=torch.cuda.get_device_capability(device) if gpu else None,
        transformer_engine_problem=_transformer_engine_problem,
        inductor_problem=_inductor_problem_gpu if gpu else _inductor_problem_cpu,
        compile_backends=_compile_backends,
    )


def missing_part(recipe: Recipe, machine: Machine) -> str | None:
    """What `recipe` needs and `machine` has not; None if it can run."""
    capability = machine.compute_capability
    if recipe.precision == "fp8" or recipe.blocks != "native":
        what = "FP8" if recipe.precision == "fp8" else "Transformer Engine"
        if capability is None:
            return f"{what} needs an NVIDIA GPU, and there is none here"
        needed = FP8_CAPABILITY if recipe.precision == "fp8" else TF32_CAPABILITY
        if capability < needed:
            return (
                f"{what} needs compute capability {_dotted(needed)}, and this GPU has {_dotted(capability)}"
            )
        problem = machine.transformer_engine_problem()
        if problem is not None:
            return problem
    if recipe.precision == "tf32":
        if capability is None:
            return "TF32 needs an NVIDIA GPU, and there is none here"
        if capability < TF32_CAPABILITY:
            return (
                f"TF32 needs compute capability {_dotted(TF32_CAPABILITY)}, "
                f"and this GPU has {_dotted(capability)}"
            )
    if recipe.compile_mode != "none":
        if recipe.compile_backend == "inductor":
            if capability is not None and capability < TRITON_CAPABILITY:
                return (
                    f"torch.compile needs compute capability {_dotted(TRITON_CAPABILITY)}, "
                    f"and this GPU has {_dotted(capability)}"
                )
            return machine.inductor_problem()
        known = machine.compile_backends()
        if recipe.compile_backend not in known:
            return f"torch.compile has no backend {recipe.compile_backend!r} here (known: {', '.join(known)})"
    return None


def check_runs_here(recipe: Recipe, device: torch.device) -> None:
    """Returns if `recipe` can run on `device`; else RecipeError with what is missing and what would run."""
    machine = this_machine(device)
    missing = missing_part(recipe, machine)
    if missing is not None:
        raise RecipeError(
            f"recipe {recipe.label} cannot run here: {missing}",
            f"these recipes run here: {', '.join(runnable_recipes(device))}",
        )


def runnable_recipes(device: torch.device) -> list[str]:
    """Names of the recipes that can run on `device`, in the table's order."""
    machine = this_machine(device)
    return [name for name, recipe in RECIPES.items() if missing_part(recipe, machine) is None]


def batch_multiple(recipe: Recipe) -> int:
    """What a batch size should be a multiple of, so that `recipe` can run at it and runs well.

    FP8 products need every dimension to be a multiple of 16: those of the weight gradients include the
    number of tokens, batch x 197 in a ViT. (Release 2.20.2 refuses a batch of 8 there, in the backward pass.)
    """
    return 16 if recipe.precision == "fp8" else 8


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The arithmetic of one run. `scaler` scales the loss of fp16 recipes, and is None for others."""

    autocast: Callable[[], AbstractContextManager[Any]]
    scaler: torch.amp.GradScaler | None


def setup_precision(recipe: Recipe, device: torch.device) -> Precision:
    """The autocast and loss scaler of `recipe`, after setting fp32 matrix products as it says.

    `.autocast()` makes a context for one forward pass. In fp8 it is Transformer Engine's inside torch's bf16
    autocast: only Transformer Engine's modules compute in FP8, the patch embedding and the head in bf16.
    """
    if recipe.precision in ("fp32", "tf32"):
        set_fp32_products(allow_tf32=recipe.precision == "tf32")
        return Precision(autocast=contextlib.nullcontext, scaler=None)
    dtype = torch.float16 if recipe.precision == "fp16" else torch.bfloat16
    autocast = functools.partial(torch.autocast, device.type, dtype)
    if recipe.precision == "fp8":
        return Precision(autocast=functools.partial(_fp8_autocast, autocast, fp8_recipe(recipe)), scaler=None)
    scaler = torch.amp.GradScaler(device.type) if recipe.precision == "fp16" else None
    return Precision(autocast=autocast, scaler=scaler)


def set_fp32_products(*, allow_tf32: bool) -> None:
    """Have matrix products and convolutions of fp32 tensors computed in fp32, or in TF32.

    Through the older of torch's two interfaces: mixing them is an error, and torch's own compiler still
    reads the older one. Some releases warn about that, which nobody can act on.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = allow_tf32


def fp8_recipe(recipe: Recipe) -> Any:
    """Transformer Engine's own recipe object for `recipe.fp8_scaling`.

    Always explicit, since its default depends on the GPU. Both: E4M3 forward, E5M2 backward. `delayed`
    takes the largest of the last 1024 steps' maxima.
    """
    from transformer_engine.common import recipe as te_recipes

    if recipe.fp8_scaling == "current":
        return te_recipes.Float8CurrentScaling(fp8_format=te_recipes.Format.HYBRID)
    return te_recipes.DelayedScaling(
        fp8_format=te_recipes.Format.HYBRID, amax_history_len=recipe.amax_history, amax_compute_algo="max"
    )


@contextlib.contextmanager
def _fp8_autocast(autocast: Callable[[], AbstractContextManager[Any]], te_recipe: Any) -> Iterator[None]:
    import transformer_engine.pytorch as te

    # `autocast` since Transformer Engine 2.9, `fp8_autocast` before.
    if hasattr(te, "autocast"):
        inner = te.autocast(enabled=True, recipe=te_recipe)
    else:
        inner = te.fp8_autocast(enabled=True, fp8_recipe=te_recipe)
    with autocast(), inner:
        yield


def guard_cudnn_attention() -> tuple[tuple[int, ...] | None, str | None]:
    """The version of the cuDNN that is really loaded, and a warning; both None where there is nothing to say.

    If it is older than 9.15.1, torch's cuDNN attention is switched off. If several are loaded (importing
    Transformer Engine can load the system's beside torch's own), the oldest counts.
    """
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return None, None
    versions = loaded_cudnn_versions(Path("/proc/self/maps"), _cudnn_version_of)
    if not versions:
        try:
            number = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            number = None
            warnings.warn(f"torch cannot tell its cuDNN version: {error}", stacklevel=2)
        versions = [] if number is None else [decode_cudnn_version(number)]
    warning = cudnn_warning(versions)
    if versions and min(versions) < SAFE_CUDNN:
        torch.backends.cuda.enable_cudnn_sdp(False)
    return (min(versions) if versions else None), warning


def cudnn_warning(versions: list[tuple[int, ...]]) -> str | None:
    """What a reader of the record must know of the loaded cuDNN versions."""
    parts = []
    if len(versions) > 1:
        parts.append(f"several cuDNN are loaded: {', '.join(map(_dotted, versions))}")
    if versions and min(versions) < SAFE_CUDNN:
        parts.append(
            f"cuDNN {_dotted(min(versions))} is older than {_dotted(SAFE_CUDNN)}, whose predecessors compute "
            "attention wrongly at lengths that are no multiple of 128: torch's cuDNN attention is off"
        )
    return "; ".join(parts) or None


def loaded_cudnn_versions(maps: Path, version_of: Callable[[str], int | None]) -> list[tuple[int, ...]]:
    """Versions of the cuDNN libraries loaded by the process of `maps` (/proc/PID/maps), oldest first."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/libcudnn.so" in line}
    numbers = {version_of(path) for path in paths}
    return sorted(decode_cudnn_version(number) for number in numbers if number is not None)


def decode_cudnn_version(number: int) -> tuple[int, ...]:
    """(major, minor, patch) of cudnnGetVersion's number: 91501 is 9.15.1, 8907 is 8.9.7."""
    major, rest = divmod(number, 10000 if number >= 90000 else 1000)
    return (major, *divmod(rest, 100))


def _cudnn_version_of(path: str) -> int | None:
    try:
        library = ctypes.CDLL(path)
        library.cudnnGetVersion.restype = ctypes.c_size_t
        return int(library.cudnnGetVersion())
    except (OSError, AttributeError):
        return None


@functools.cache
def _transformer_engine_problem() -> str | None:
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed (the extra `te` installs it)"
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
    # eager, aot_eager and the other debugging backends too: they are left out of the plain listing.
    return sorted(torch._dynamo.list_backends(exclude_tags=()))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))

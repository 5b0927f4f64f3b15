"""The arithmetic of a recipe: matrix-product settings, autocast, loss scaler, deterministic algorithms."""

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from fastlaunch_train.models.fp8_fused.context import fused_passes
from fastlaunch_train.models.te_fp8 import fp8_recipe, nested, te_autocast
from fastlaunch_train.recipes.recipe import Recipe, RecipeError

#: cuBLAS is reproducible only with such a workspace (its documentation, "Results reproducibility"). The other
#: variable keeps Transformer Engine from attention whose backward pass adds in any order.
_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The arithmetic of a run."""

    autocast: Callable[[], AbstractContextManager[Any]]  #: makes the context of one forward pass
    scaler: "torch.amp.GradScaler | None"  #: scales the loss; fp16 alone has one


def setup_precision(recipe: Recipe, device: torch.device) -> Precision:
    """Set the mode of fp32 matrix products for `recipe`, and return its autocast and loss scaler.

    Transformer Engine's FP8 context is inside torch's bf16 autocast: its modules compute in FP8, the patch
    embedding and the head in bf16.
    """
    if recipe.precision in ("fp32", "tf32"):
        set_fp32_products(allow_tf32=recipe.precision == "tf32")
        return Precision(autocast=contextlib.nullcontext, scaler=None)
    dtype = torch.float16 if recipe.precision == "fp16" else torch.bfloat16
    autocast: Callable[[], AbstractContextManager[Any]] = functools.partial(
        torch.autocast, device.type, dtype
    )
    te_recipe = fp8_recipe(recipe)
    if te_recipe is not None:
        autocast = nested(autocast, functools.partial(te_autocast, te_recipe))
    elif recipe.blocks == "fused":
        autocast = nested(autocast, fused_passes)
    return Precision(
        autocast=autocast, scaler=torch.amp.GradScaler(device.type) if recipe.precision == "fp16" else None
    )


def set_fp32_products(*, allow_tf32: bool) -> None:
    """Compute matrix products and convolutions of fp32 tensors in fp32, or in TF32.

    This uses the older of torch's two interfaces: mixing them is an error, and torch's own compiler still
    reads the older one. Some releases warn about it, which no user could act on.
    """
    _set_products("high" if allow_tf32 else "highest", allow_tf32)


def _set_products(matmul_precision: str, cudnn_tf32: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision(matmul_precision)
        torch.backends.cudnn.allow_tf32 = cudnn_tf32


@contextlib.contextmanager
def full_fp32() -> Iterator[None]:
    """Compute products of fp32 tensors in fp32 inside this context, whatever the recipe allows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    set_fp32_products(allow_tf32=False)
    try:
        yield
    finally:
        _set_products(*before)


def set_deterministic(recipe: Recipe) -> None:
    """Have torch compute the same bits every time if `recipe` says so. Call it before the GPU is used."""
    if not recipe.deterministic:
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


@contextlib.contextmanager
def name_nondeterministic(recipe: Recipe) -> Iterator[None]:
    """Raise RecipeError instead of the RuntimeError of torch, if torch lacks a deterministic algorithm."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not recipe.deterministic or "deterministic" not in text:
            raise
        operator, separator, _ = text.partition(" does not have a deterministic implementation")
        reason = (
            f"torch has no deterministic algorithm for {operator}" if separator else text.partition(". ")[0]
        )
        raise RecipeError(
            f"recipe {recipe.label}: {reason}", "leave out deterministic=true, or use another workload"
        ) from error

"""The arithmetic of a recipe: the matrix-product settings, the autocast and the loss scaler."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fastlaunch_train.models.te_fp8 import fp8_recipe, nested, te_autocast
from fastlaunch_train.recipes.recipes import Recipe

if TYPE_CHECKING:
    # Of torch 2.3 and newer; recipes without FP8 and compilation run with older ones.
    from torch.amp import GradScaler


def batch_multiple(recipe: Recipe) -> int:
    """What a batch size should be a multiple of, so that `recipe` can run at it and runs well.

    FP8 products need every dimension to be a multiple of 16, MXFP8 of 32: those of the weight gradients
    include the number of tokens, batch x 197 in a ViT. (Release 2.20.2 refuses a batch of 8 there, in the
    backward pass.)
    """
    if recipe.precision != "fp8":
        return 8
    return 32 if recipe.fp8_scaling == "mxfp8" else 16


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The arithmetic of one run. `scaler` scales the loss of fp16 recipes, and is None for others."""

    autocast: Callable[[], AbstractContextManager[Any]]
    scaler: "GradScaler | None"


def setup_precision(recipe: Recipe, device: torch.device) -> Precision:
    """The autocast and loss scaler of `recipe`, after setting fp32 matrix products as it says.

    `.autocast()` makes a context for one forward pass. With Transformer Engine's FP8 it is that package's
    inside torch's bf16 autocast: only its modules compute in FP8, the patch embedding and the head in bf16.
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
    return Precision(autocast=autocast, scaler=_scaler(device) if recipe.precision == "fp16" else None)


def set_fp32_products(*, allow_tf32: bool) -> None:
    """Have matrix products and convolutions of fp32 tensors computed in fp32, or in TF32.

    Through the older of torch's two interfaces: mixing them is an error, and torch's own compiler still
    reads the older one. Some releases warn about that, which nobody can act on.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = allow_tf32


@contextlib.contextmanager
def full_fp32() -> Iterator[None]:
    """A context in which products of fp32 tensors are computed in fp32, whatever the recipe allows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    set_fp32_products(allow_tf32=False)
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.set_float32_matmul_precision(before[0])
            torch.backends.cudnn.allow_tf32 = before[1]


def _scaler(device: torch.device) -> "GradScaler":
    if hasattr(torch.amp, "GradScaler"):
        return torch.amp.GradScaler(device.type)
    # Before torch 2.3 there is one for GPUs alone; switched off it does nothing.
    return torch.cuda.amp.GradScaler(enabled=device.type == "cuda")

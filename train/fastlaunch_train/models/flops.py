"""Floating-point operations of one training step, counted by running it on no data."""

import contextlib
import importlib
from collections.abc import Callable

import torch
from torch import nn


def training_flops_per_sample(
    build_model: Callable[[], nn.Module], sample_shape: tuple[int, ...]
) -> int | None:
    """Operations of one sample's forward and backward pass in the matrix products; a multiply-add is two.

    Elementwise work and the optimizer are not counted, nor is recomputation: attention is counted as the
    matrix products it is defined by (so this is model FLOPs, for MFU). The model runs on torch's meta device:
    nothing is computed, and no memory taken. sample_shape: (channels, height, width). None where torch cannot
    count, before 2.1.
    """
    # Two samples, halved: batch normalisation refuses a batch of one.
    return _count(build_model, torch.empty(2, *sample_shape, device="meta"))


def language_flops_per_sample(build_model: Callable[[], nn.Module], length: int) -> int | None:
    """The same of one sequence of `length` tokens, all of them counted, padding too.

    Products that a causal mask makes superfluous are counted, as is usual. None if the model cannot run
    without data.
    """
    tokens = torch.zeros(2, length, dtype=torch.int64, device="meta")
    # Some models look at the values of their positions if they are given no mask, and some at a mask's.
    for inputs in ((tokens,), (tokens, torch.ones_like(tokens))):
        with contextlib.suppress(RuntimeError, NotImplementedError):
            return _count(build_model, *inputs)
    return None


def _count(build_model: Callable[[], nn.Module], *inputs: torch.Tensor) -> int | None:
    try:
        from torch.utils.flop_counter import FlopCounterMode
    except ImportError:  # torch before 2.1
        return None
    model = build_on_meta(build_model).train()
    # What a model makes on its way, such as a mask, is to be there too.
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model(*inputs).sum().backward()
    return int(counter.get_total_flops()) // 2


def build_on_meta(build_model: Callable[[], nn.Module]) -> nn.Module:
    """The model without its weights' values, on torch's meta device."""
    random_state = torch.get_rng_state()
    try:
        with contextlib.suppress(ImportError):  # torch 1 has none
            # timm and transformers import it: torch 2.6 then makes a real tensor, which it cannot below.
            importlib.import_module("torch._dynamo")
        with torch.device("meta"):
            return build_model()
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        # Some models read values of tensors while they are built, and torch 1 has no such context.
        return build_model().to("meta")
    finally:
        torch.set_rng_state(random_state)

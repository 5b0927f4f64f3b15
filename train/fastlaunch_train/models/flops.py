"""Floating-point operations of a training step, counted by running it without data."""

import contextlib
import importlib
from collections.abc import Callable

import torch
from torch import nn


def training_flops_per_sample(
    build_model: Callable[[], nn.Module], sample_shape: tuple[int, ...]
) -> int | None:
    """Count the operations of one sample's matrix products, forward and backward; a multiply-add is two.

    Elementwise work, the optimizer and recomputation do not count; attention counts as the products that
    define it. These are model FLOPs, for MFU. The model runs on torch's meta device, without computing or
    allocating anything. sample_shape: (channels, height, width). None before torch 2.1, which cannot count.
    """
    # Two samples, halved: batch normalisation refuses a batch of one.
    return _count(build_model, torch.empty(2, *sample_shape, device="meta"))


def language_flops_per_sample(build_model: Callable[[], nn.Module], length: int) -> int | None:
    """Count the same for one sequence of `length` tokens, padding included.

    Products that a causal mask makes superfluous count, as usual. None if the model cannot run without data.
    """
    tokens = torch.zeros(2, length, dtype=torch.int64, device="meta")
    # Without a mask some models look at their positions' values; with one, some look at its values.
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
    # Tensors that the model creates, such as a mask, have to be on the meta device, too.
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model(*inputs).sum().backward()
    return int(counter.get_total_flops()) // 2


def build_on_meta(build_model: Callable[[], nn.Module]) -> nn.Module:
    """Build the model on torch's meta device, without values of its weights."""
    random_state = torch.get_rng_state()
    try:
        with contextlib.suppress(ImportError):  # torch 1 has none
            # timm and transformers import it: torch 2.6 then creates a real tensor, which fails below.
            importlib.import_module("torch._dynamo")
        with torch.device("meta"):
            return build_model()
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        # Some models read tensors' values while they are built, and torch 1 has no such context.
        return build_model().to("meta")
    finally:
        torch.set_rng_state(random_state)

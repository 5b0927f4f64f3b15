"""Floating-point operations of a training step, counted by running it without data."""

import contextlib
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from fastlaunch_train.models.model_state import preserve_state

#: Finds a model's transformer blocks, if it has some.
FindBlocks = Callable[[nn.Module], nn.ModuleList | None]


def training_flops_per_sample(build_model: Callable[[], nn.Module], sample_shape: tuple[int, ...]) -> int:
    """Count the operations of one sample's matrix products, forward and backward; a multiply-add is two.

    Elementwise work, the optimizer and recomputation do not count; attention counts as the products that
    define it. These are model FLOPs, for MFU. The model runs on torch's meta device, without computing or
    allocating anything. sample_shape: (channels, height, width).
    """
    # Two samples, halved: batch normalisation refuses a batch of one.
    return _count(build_model, torch.empty(2, *sample_shape, device="meta"))


def language_flops_per_sample(
    build_model: Callable[[], nn.Module], length: int, blocks: FindBlocks = lambda model: None
) -> int | None:
    """Count the same for one sequence of `length` tokens, padding included.

    Products that a causal mask makes superfluous count, as usual. blocks: finds the transformer blocks; equal
    ones are counted once. Return None if the model cannot run without data.
    """
    tokens = torch.zeros(2, length, dtype=torch.int64, device="meta")
    # Without a mask some models look at their positions' values; with one, some look at its values.
    for inputs in ((tokens,), (tokens, torch.ones_like(tokens))):
        with contextlib.suppress(RuntimeError, NotImplementedError):
            return _count(build_model, *inputs, blocks=blocks)
    return None


def step_flops(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> int | None:
    """Count the same for `loss` of `model`, by computing it and its gradients on the device.

    Call it before the model is compiled or converted; the model does not change. Return None if the model
    cannot run, as for want of memory: its first step reports what is wrong. Kernels that are not torch's do
    not count.
    """
    device = next(model.parameters()).device
    try:
        with preserve_state(model.train()), _counted_attention(device):
            flops = _counted(lambda: loss(model))
    except Exception:
        flops = None
    model.zero_grad(set_to_none=True)
    return flops or None


def _counted_attention(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which torch's attention uses kernels whose products can be counted."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = [SDPBackend.MATH]
    if device.type == "cuda":
        kernels += [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    context: AbstractContextManager[Any] = sdpa_kernel(kernels)
    return context


def _count(
    build_model: Callable[[], nn.Module], *inputs: torch.Tensor, blocks: FindBlocks = lambda model: None
) -> int:
    model = build_on_meta(build_model).train()

    def count() -> int:
        # Tensors that the model creates, such as a mask, have to be on the meta device, too.
        with torch.device("meta"):
            return _counted(lambda: model(*inputs).sum())

    layers = blocks(model)
    # The first block may need fewer products: nothing below it is trained if it has frozen weights.
    if layers is None or len(layers) <= 3 or len(set(map(_structure, layers[1:]))) > 1:
        return count() // 2
    rest = list(layers[3:])
    try:
        del layers[3:]
        with_three = count()
        del layers[2:]
        return (with_three + len(rest) * (with_three - count())) // 2
    except (LookupError, AttributeError):
        # A model that knows its blocks by number: they all have to be there.
        return _count(build_model, *inputs)


def _structure(block: nn.Module) -> tuple[object, ...]:
    """Return what a block's operations depend on: its modules, and which parameters it trains."""
    modules = ((name, type(module)) for name, module in block.named_modules())
    parameters = ((name, value.shape, value.requires_grad) for name, value in block.named_parameters())
    return *modules, *parameters


def _counted(loss: Callable[[], torch.Tensor]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        loss().backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


def build_on_meta(build_model: Callable[[], nn.Module]) -> nn.Module:
    """Build the model on torch's meta device, without values of its weights."""
    random_state = torch.get_rng_state()
    try:
        # On this import torch 2.6 creates a real tensor, which would fail below, where timm imports it.
        importlib.import_module("torch._dynamo")
        with torch.device("meta"):
            return build_model()
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        # Some models read tensors' values while they are built.
        return build_model().to("meta")
    finally:
        torch.set_rng_state(random_state)

"""Floating-point operations of one training step, counted by running it on no data."""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def training_flops_per_sample(build_model: Callable[[], nn.Module], sample_shape: tuple[int, ...]) -> int:
    """Operations of one sample's forward and backward pass in the matrix products; a multiply-add is two.

    Elementwise work and the optimizer are not counted, nor is recomputation: attention is counted as the
    matrix products it is defined by (so this is model FLOPs, for MFU). The model runs on torch's meta
    device: nothing is computed, and no memory taken. sample_shape: (channels, height, width).
    """
    model = build_on_meta(build_model).train()
    # Two samples, halved: batch normalisation refuses a batch of one.
    samples = torch.empty(2, *sample_shape, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(samples).sum().backward()
    return int(counter.get_total_flops()) // 2


def build_on_meta(build_model: Callable[[], nn.Module]) -> nn.Module:
    """The model without its weights' values, on torch's meta device."""
    random_state = torch.get_rng_state()
    try:
        with torch.device("meta"):
            return build_model()
    except (RuntimeError, NotImplementedError):
        # Some models read values of tensors while they are built.
        return build_model().to("meta")
    finally:
        torch.set_rng_state(random_state)

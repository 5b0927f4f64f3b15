"""Running a model between the steps of its training, and leaving it as it was."""

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fastlaunch_train.models.te_fp8 import reset_scales

#: What Transformer Engine's delayed scaling remembers between passes, which is in no buffer.
_REMEMBERED = ("scale", "scale_inv", "amax_history")


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """A context after which the model's buffers, modes and FP8 scales, and the random state, are as before.

    Normalisation layers count batches, dropout draws, and delayed scaling remembers maxima (release 2.20
    writes them in any forward pass): what is run to learn something must not change the run. FP8 scales that
    a module had not before become those of one that has not run yet.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    modes = [(module, module.training) for module in model.modules()]
    scales = {
        module: {key: value.clone() for key, value in _scales(module).items()} for module in model.modules()
    }
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    drawn, numpy_random = random.getstate(), sys.modules.get("numpy.random")
    drawn_by_numpy = numpy_random.get_state() if numpy_random else None
    try:
        with torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]):
            yield
    finally:
        random.setstate(drawn)
        if numpy_random:
            numpy_random.set_state(drawn_by_numpy)
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                # A pass may make some, or make them larger.
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])
            for module in model.modules():
                _restore_scales(module, scales.get(module, {}))


def _restore_scales(module: nn.Module, kept: dict[tuple[str, str], torch.Tensor]) -> None:
    if not _scales(module).keys() <= kept.keys():
        reset_scales(module)
    for key, value in _scales(module).items():
        if key in kept:
            value.copy_(kept[key])


def _scales(module: nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    """Delayed scaling's scales and maxima of a module itself, forward and backward."""
    meta: Any = getattr(module, "fp8_meta", None)
    passes = ("scaling_fwd", "scaling_bwd") if isinstance(meta, dict) else ()
    values = {(key, name): getattr(meta.get(key), name, None) for key in passes for name in _REMEMBERED}
    return {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}

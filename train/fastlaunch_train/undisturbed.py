"""Running a model to learn something of it, and leaving it as it was."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from fastlaunch_train.te_fp8 import reset_scales


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """A context after which the model's buffers, modes and FP8 scales, and the random state, are as before.

    Normalisation layers count batches, dropout draws, and delayed scaling remembers maxima: what is run to
    learn something must not change the run. FP8 scales become those of a model that has not run yet.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    modes = [(module, module.training) for module in model.modules()]
    on_gpu = any(tensor.device.type == "cuda" for tensor in [*model.parameters(), *model.buffers()])
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else []):
        yield
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    for module, training in modes:
        module.training = training
    reset_scales(model)

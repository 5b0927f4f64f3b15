"""A model's state: for a checkpoint, and preserved while the model runs between training steps.

With delayed scaling Transformer Engine's modules pickle their scales and history into an "extra state". A
pickle from a file can run any code, so release 2.20.2 opens none unless an environment variable allows it.
Here the process that made a pickle opens it and saves its tensors, and loading makes a new pickle: no pickle
from a file is ever opened.
"""

import contextlib
import os
import pickle
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fastlaunch_train.models.te_fp8 import reset_scales
from fastlaunch_train.recipes.recipe import RecipeError

#: What Transformer Engine's delayed scaling remembers between passes, outside of buffers.
_REMEMBERED = ("scale", "scale_inv", "amax_history")

#: Allows Transformer Engine to open pickles, such as those made here.
ALLOW_PICKLES = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of `model`, with tensors and mappings of plain values only.

    Parameters that are not trained are left out: whoever builds the model knows them.
    """
    frozen = _frozen(model)
    state: dict[str, Any] = {name: value for name, value in model.state_dict().items() if name not in frozen}
    for name in _extra_states(state):
        state[name] = _opened(state[name])
    return state


def load_model_state(model: nn.Module, state: dict[str, Any], *, fp8_recipe: Any = None) -> None:
    """Load the result of `model_state` into `model`, and change `state`.

    fp8_recipe: Transformer Engine's recipe object, which is not saved. Raises RecipeError for a state of
    another kind.
    """
    names = _extra_states(state)
    for name in names:
        state[name] = _packed(name, state[name], fp8_recipe)
    before = os.environ.get(ALLOW_PICKLES)
    try:
        if any(state[name].numel() for name in names):
            os.environ[ALLOW_PICKLES] = "1"
        lacking = model.load_state_dict(state, strict=False)
        frozen = _frozen(model)
        wrong = [*lacking.unexpected_keys, *(name for name in lacking.missing_keys if name not in frozen)]
        if wrong:
            raise RecipeError(f"the checkpoint is of another model: {wrong[0]}", "start without --resume")
    finally:
        os.environ.pop(ALLOW_PICKLES, None)
        if before is not None:
            os.environ[ALLOW_PICKLES] = before


def _frozen(model: nn.Module) -> set[str]:
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if not parameter.requires_grad}


def _extra_states(state: Mapping[str, Any]) -> list[str]:
    return [name for name in state if name.rpartition(".")[2] == "_extra_state"]


def _opened(value: Any) -> Any:
    # Other extra states, and the empty ones of precisions without, stay as they are.
    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.numel() == 0:
        return value
    extra = pickle.loads(value.cpu().numpy().tobytes())
    if not isinstance(extra, dict):
        return torch.empty(0, dtype=torch.uint8)
    return plain(extra)


def plain(value: Any) -> Any:
    """Return a nest without those entries of its mappings that are neither plain data nor tensors.

    These are the recipe objects of the module and of its attention, which every forward pass sets anew, and
    members of enumerations: `torch.load` refuses both.
    """
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items() if _is_plain(part)}
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return isinstance(value, (dict, torch.Tensor)) or type(value) in (bool, int, float, str, type(None))


def _packed(name: str, value: Any, fp8_recipe: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.numel() == 0:
        return value
    if not isinstance(value, dict) or fp8_recipe is None:
        raise RecipeError(f"the checkpoint's {name} is of another version", "start without --resume")
    packed = bytearray(pickle.dumps({**value, "recipe": fp8_recipe}))
    return torch.frombuffer(packed, dtype=torch.uint8)


@contextlib.contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers, modes and FP8 scales, and the random state, at the context's end.

    Normalisation layers count batches, dropout draws random numbers, and delayed scaling remembers maxima
    (release 2.20 does in any forward pass): a trial run must not change the training. FP8 scales that a
    module did not have before are reset.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    modes = [(module, module.training) for module in model.modules()]
    scales = {
        module: {key: value.clone() for key, value in _scales(module).items()} for module in model.modules()
    }
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    python_state, numpy_random = random.getstate(), sys.modules.get("numpy.random")
    numpy_state = numpy_random.get_state() if numpy_random else None
    try:
        with torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]):
            yield
    finally:
        random.setstate(python_state)
        if numpy_random:
            numpy_random.set_state(numpy_state)
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                # A pass may add buffers, or enlarge them.
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
    """Return the scales and maxima of delayed scaling of one module, forward and backward."""
    meta: Any = getattr(module, "fp8_meta", None)
    passes = ("scaling_fwd", "scaling_bwd") if isinstance(meta, dict) else ()
    values = {(key, name): getattr(meta.get(key), name, None) for key in passes for name in _REMEMBERED}
    return {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}

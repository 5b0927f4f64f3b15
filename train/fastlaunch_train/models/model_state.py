"""A model's state for a checkpoint, with Transformer Engine's FP8 scales as tensors instead of pickles.

With delayed scaling each of its modules pickles its scales and their history into an "extra state". A pickle
out of a file can run any code, so Transformer Engine opens none unless an environment variable allows it, as
seen in release 2.20.2. Here the pickle is opened when it is saved, by the process that made it, and made anew
when it is loaded: no pickle of a file is ever opened.
"""

import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fastlaunch_train.recipes.recipes import RecipeError

#: Allows Transformer Engine to open the pickles that are made here.
ALLOW_PICKLES = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


def model_state(model: nn.Module) -> dict[str, Any]:
    """The state dict of `model`, in which every value is a tensor or a mapping of plain values."""
    state: dict[str, Any] = model.state_dict()
    for name in _extra_states(state):
        state[name] = _opened(state[name])
    return state


def load_model_state(model: nn.Module, state: dict[str, Any], *, fp8_recipe: Any = None) -> None:
    """Load what `model_state` made into `model`; `state` is changed.

    fp8_recipe: Transformer Engine's recipe object, which is not saved. Raises RecipeError for a state that
    `model_state` does not make.
    """
    names = _extra_states(state)
    for name in names:
        state[name] = _packed(name, state[name], fp8_recipe)
    before = os.environ.get(ALLOW_PICKLES)
    try:
        if any(state[name].numel() for name in names):
            os.environ[ALLOW_PICKLES] = "1"
        model.load_state_dict(state)
    finally:
        os.environ.pop(ALLOW_PICKLES, None)
        if before is not None:
            os.environ[ALLOW_PICKLES] = before


def _extra_states(state: Mapping[str, Any]) -> list[str]:
    return [name for name in state if name.rpartition(".")[2] == "_extra_state"]


def _opened(value: Any) -> Any:
    # Other extra states, and empty ones of precisions that need none, stay as they are.
    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.numel() == 0:
        return value
    extra = pickle.loads(value.cpu().numpy().tobytes())
    if not isinstance(extra, dict):
        return torch.empty(0, dtype=torch.uint8)
    kept: dict[str, Any] = _plain_part(extra)
    return kept


def _plain_part(value: Any) -> Any:
    """`value` without the entries of its mappings that are neither plain data nor tensors.

    Those are recipe objects, one of the module's own and one in a list of its attention's: every forward
    pass sets them anew, and `torch.load` refuses a file that holds one.
    """
    return {
        key: _plain_part(part) if isinstance(part, dict) else part
        for key, part in value.items()
        if _is_plain(part)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str, dict, torch.Tensor))


def _packed(name: str, value: Any, fp8_recipe: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.numel() == 0:
        return value
    if not isinstance(value, dict) or fp8_recipe is None:
        raise RecipeError(
            f"the checkpoint's {name} is not one that this version saves", "start without --resume"
        )
    packed = bytearray(pickle.dumps({**value, "recipe": fp8_recipe}))
    return torch.frombuffer(packed, dtype=torch.uint8)

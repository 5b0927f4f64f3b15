"""What a DeepSpeed engine's next step depends on, as tensors and plain values that a checkpoint can hold."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastlaunch_train.distributed.parallel import Process
from fastlaunch_train.models.model_state import model_state

#: Under which DeepSpeed's optimizers save their loss scaler, an object.
_SCALER = "loss_scaler"


def own_state(engine: Any, model: nn.Module, *, weights: bool = True) -> dict[str, Any]:
    """This rank's share of the state of `engine`, copied to the CPU.

    weights: whether `model`'s own are in it, which with ZeRO-3 are in the masters alone.
    """
    optimizer = engine.optimizer.state_dict()
    scaler = vars(optimizer.pop(_SCALER))
    state = {"optimizer": plain(optimizer), "scaler": plain(scaler)}
    if weights:
        state["model"] = plain(_buffers(model) if _partitioned(model) else model_state(model))
    return state


def restore(engine: Any, model: nn.Module, state: dict[str, Any]) -> None:
    """Take over what `own_state` returned on this rank, with the weights in it."""
    with torch.no_grad():
        if _partitioned(model):
            for name, buffer in _buffers(model).items():
                buffer.copy_(state["model"][name])
        else:
            model.load_state_dict(state["model"])
    scaler = engine.optimizer.loss_scaler
    vars(scaler).update(state["scaler"])
    # DeepSpeed looks for its own in a list with one of each rank.
    listed: list[Any] = [None] * dist.get_world_size()
    listed[dist.get_rank()] = {**state["optimizer"], _SCALER: scaler}
    engine.optimizer.load_state_dict(listed, load_from_fp32_weights=True)


def whole_model(model: nn.Module, *, keep: bool) -> dict[str, Any]:
    """The state dict of `model` on the CPU, gathered where it is sharded; every rank has to call it.

    keep: whether this rank wants it; else it is empty.
    """
    if not _partitioned(model):
        return dict(plain(model_state(model))) if keep else {}
    import deepspeed

    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            if keep:
                found[name] = parameter.detach().to("cpu", copy=True)
    return {**found, **plain(_buffers(model))} if keep else {}


def gather_states(state: dict[str, Any], process: Process) -> list[dict[str, Any]]:
    """Every rank's `state` in order, on rank 0; its own alone elsewhere."""
    if process.world_size == 1:
        return [state]
    gathered: list[Any] | None = [None] * process.world_size if process.rank == 0 else None
    dist.gather_object(state, gathered)
    return gathered or [state]


def plain(value: Any) -> Any:
    """`value` with tensors copied to the CPU, and without what is neither tensor, number, text nor a nest."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if _is_plain(item)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    # Not isinstance: an enumeration's number is of its own class, which `torch.load` refuses.
    return isinstance(value, (dict, torch.Tensor)) or type(value) in (bool, int, float, str, type(None))


def _partitioned(model: nn.Module) -> bool:
    return any(hasattr(parameter, "ds_tensor") for parameter in model.parameters())


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers())

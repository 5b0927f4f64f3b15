"""Which kernel computes a model's attention, found by running it."""

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastlaunch_train.models.precision import Precision
from fastlaunch_train.undisturbed import left_as_it_was
from fastlaunch_train.workloads.contract import Batch

#: What torch's scaled_dot_product_attention can choose, by the name of its operator.
_KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_flash_attention_for_cpu": "flash_cpu",
}
_SOFTMAX = ("_softmax", "_safe_softmax")


def attention_backend(
    model: nn.Module,
    batch: Batch,
    precision: Precision,
    loss: Callable[[nn.Module, Batch], torch.Tensor],
) -> str:
    """The attention kernel that runs in a forward pass of `model`, found by running one.

    `flash`, `cudnn`, `efficient`, `flash_cpu`: of torch's scaled_dot_product_attention. `math`: separate
    matrix products and softmax. `te:fused`, `te:flash`, `te:unfused`: as Transformer Engine chose,
    `te:unknown` if it does not tell. `none`: no attention. Several are joined by `+`.
    The model, its buffers and the random state are left as they were. FP8 needs a batch of a multiple of 16,
    MXFP8 of 32.
    """
    seen = _OperatorNames()
    of_transformer_engine = has_transformer_engine(model)
    # Transformer Engine's tensors are not for dispatch modes, and it tells its choice itself.
    listening = contextlib.nullcontext() if of_transformer_engine else seen
    # Through the loss: only it knows what of a batch the model takes.
    with left_as_it_was(model), torch.no_grad(), precision.autocast(), listening:
        loss(model, batch)
    return transformer_engine_backend() if of_transformer_engine else name_kernels(seen.names)


def has_transformer_engine(model: nn.Module) -> bool:
    """Whether any module of `model` is Transformer Engine's."""
    return any(type(module).__module__.startswith("transformer_engine") for module in model.modules())


def name_kernels(operators: Sequence[str]) -> str:
    """The kernels among the names of `operators` that ran, in alphabetical order."""
    kernels = {_KERNELS[name] for name in operators if name in _KERNELS}
    if not kernels and any(name in _SOFTMAX for name in operators):
        kernels = {"math"}
    return "+".join(sorted(kernels)) or "none"


def transformer_engine_backend(
    load: Callable[[str], Any] = importlib.import_module,
) -> str:
    """What Transformer Engine chose in the last forward pass."""
    # In dot_product_attention since release 2.3, in attention before.
    for module in (
        "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention",
        "transformer_engine.pytorch.attention.dot_product_attention",
        "transformer_engine.pytorch.attention",
    ):
        try:
            choice = getattr(load(module), "_attention_backends", None)
        except ImportError:
            continue
        if isinstance(choice, Mapping):
            for name in ("flash", "fused", "unfused"):
                if choice.get(f"use_{name}_attention"):
                    return f"te:{name}"
    return "te:unknown"


class _OperatorNames(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of the operators that run inside it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

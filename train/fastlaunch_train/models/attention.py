"""Which kernel computes a model's attention, found by running it, and which cuDNN releases get it wrong."""

import contextlib
import ctypes
import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastlaunch_train.models.model_state import preserve_state
from fastlaunch_train.models.precision import Precision
from fastlaunch_train.recipes.requirements import dotted
from fastlaunch_train.workloads.contract import Batch

#: Older cuDNN computes attention wrongly at lengths that are no multiple of 128, such as 197.
SAFE_CUDNN = (9, 15, 1)

#: What torch's scaled_dot_product_attention can choose, by the name of its operator.
_KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_flash_attention_for_cpu": "flash_cpu",
}
_SOFTMAX = ("_softmax", "_safe_softmax")


def attention_backend(
    model: nn.Module, batch: Batch, precision: Precision, loss: Callable[[nn.Module, Batch], torch.Tensor]
) -> str:
    """Run a forward pass of `model`, as training does, and return its attention kernels, joined by `+`.

    `flash`, `cudnn`, `efficient`, `flash_cpu`: torch's scaled_dot_product_attention. `math`: separate matrix
    products and softmax. `te:fused`, `te:flash`, `te:unfused`: Transformer Engine's choice, `te:unknown` if
    it does not say. `own_backward` beside another: fused blocks' kernel computes the gradients. `none`: no
    attention. The model and the random state are preserved. FP8 needs a batch that is a multiple of 16, MXFP8
    of 32.
    """
    operators = _OperatorNames()
    is_te = any(type(module).__module__.startswith("transformer_engine") for module in model.modules())
    # Dispatch modes do not accept Transformer Engine's tensors, and it names its choice itself.
    listening = contextlib.nullcontext() if is_te else operators
    # The loss knows which part of a batch the model takes. Some kernels compute no gradients.
    with preserve_state(model), precision.autocast(), listening:
        loss(model, batch)
    if is_te:
        return transformer_engine_backend()
    has_own_backward = any(getattr(module, "has_own_backward", False) for module in model.modules())
    return name_kernels(operators.names) + ("+own_backward" if has_own_backward else "")


def name_kernels(operators: Sequence[str]) -> str:
    """Return the kernels among the operators that ran, in alphabetical order."""
    kernels = {_KERNELS[name] for name in operators if name in _KERNELS}
    if not kernels and any(name in _SOFTMAX for name in operators):
        kernels = {"math"}
    return "+".join(sorted(kernels)) or "none"


def transformer_engine_backend(load: Callable[[str], Any] = importlib.import_module) -> str:
    """Return Transformer Engine's choice in the last forward pass."""
    # Its module is dot_product_attention since release 2.3, and attention before.
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


def guard_cudnn_attention() -> tuple[tuple[int, ...] | None, str | None]:
    """Switch torch's cuDNN attention off if cuDNN is too old; return its version and a warning, if any.

    If several are loaded, as Transformer Engine can load the system's beside torch's own, the oldest counts.
    """
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return None, None
    versions = loaded_cudnn_versions(Path("/proc/self/maps"), _cudnn_version_of)
    if not versions:
        try:
            number = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            number = None
            warnings.warn(f"torch cannot tell its cuDNN version: {error}", stacklevel=2)
        versions = [] if number is None else [decode_cudnn_version(number)]
    warning = cudnn_warning(versions)
    if versions and min(versions) < SAFE_CUDNN:
        torch.backends.cuda.enable_cudnn_sdp(False)
    return (min(versions) if versions else None), warning


def cudnn_warning(versions: list[tuple[int, ...]]) -> str | None:
    """Return the record's warning about the loaded cuDNN versions; None if there is none."""
    parts = []
    if len(versions) > 1:
        parts.append(f"several cuDNN are loaded: {', '.join(map(dotted, versions))}")
    if versions and min(versions) < SAFE_CUDNN:
        parts.append(
            f"cuDNN {dotted(min(versions))} is older than {dotted(SAFE_CUDNN)} and gets attention wrong at "
            "lengths that are no multiple of 128: torch's cuDNN attention is off"
        )
    return "; ".join(parts) or None


def loaded_cudnn_versions(maps: Path, version_of: Callable[[str], int | None]) -> list[tuple[int, ...]]:
    """Return the cuDNN versions that a process has loaded, oldest first. maps: its /proc/PID/maps."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/libcudnn.so" in line}
    numbers = {version_of(path) for path in paths}
    return sorted(decode_cudnn_version(number) for number in numbers if number is not None)


def decode_cudnn_version(number: int) -> tuple[int, ...]:
    """Return (major, minor, patch) of cudnnGetVersion's number: 91501 is 9.15.1, 8907 is 8.9.7."""
    major, rest = divmod(number, 10000 if number >= 90000 else 1000)
    return (major, *divmod(rest, 100))


def _cudnn_version_of(path: str) -> int | None:
    try:
        library = ctypes.CDLL(path)
        library.cudnnGetVersion.restype = ctypes.c_size_t
        return int(library.cudnnGetVersion())
    except (OSError, AttributeError):
        return None

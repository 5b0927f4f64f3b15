"""Weights that are not trained: held in a recipe's precision, rounded once to FP8, or to the 4 bits of NF4.

A frozen weight loses nothing by it but its rounding, since no update is added to it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fastlaunch_train.workloads.contract import Workload

#: NF4 has a scale for each 64 values, and a scale for each 256 of these.
_NF4_VALUES = 64 * 256


def frozen_linears(model: nn.Module, workload: Workload) -> list[nn.Linear]:
    """Return the Linear layers of the model's blocks whose weights are not trained."""
    blocks = workload.blocks(model) if workload.blocks else ()
    return [
        module
        for block in blocks
        for module in block.modules()
        if isinstance(module, nn.Linear) and not module.weight.requires_grad
    ]


def hold_frozen(model: nn.Module, workload: Workload, dtype: torch.dtype) -> None:
    """Make the floating-point parameters that are not trained `dtype`, in place, if the workload says so."""
    if not workload.rounds_frozen:
        return
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def hold_in_fp8(layers: Iterable[nn.Linear]) -> None:
    """Round the weights of torchao's `layers` once to E4M3, each with one scale, not in every pass.

    An FP8 weight takes half the memory of a bf16 one, and a step neither searches its largest value nor casts
    it, for the forward and again for the backward pass.
    """
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole

    for layer in layers:
        converted: Any = layer
        if not hasattr(converted, "linear_mm_config"):
            continue  # of a size that FP8 does not take
        weight = hp_tensor_to_float8_dynamic(
            layer.weight.detach(),
            converted.config.cast_config_weight.target_dtype,
            converted.linear_mm_config,
            gemm_input_role=GemmInputRole.WEIGHT,
        )
        layer.weight = nn.Parameter(weight, requires_grad=False)


def hold_in_nf4(layers: Iterable[nn.Linear]) -> None:
    """Round the weights of `layers` to 4-bit NormalFloat with scales of 8 bits, as QLoRA does.

    Products are computed in bf16 with weights that are unpacked as they are needed. Source: Dettmers et al.,
    QLoRA, 2023.
    """
    for layer in filter(_takes_nf4, layers):
        layer.weight = nn.Parameter(_nf4(layer.weight.detach()), requires_grad=False)


def round_to_nf4(layers: Iterable[nn.Linear]) -> None:
    """Replace the weights of `layers` by the values that NF4 can hold, in their own dtype."""
    for layer in filter(_takes_nf4, layers):
        weight = layer.weight.detach()
        layer.weight.data = _nf4(weight.bfloat16()).get_original_weight().to(weight.dtype)


def _takes_nf4(layer: nn.Linear) -> bool:
    return layer.weight.numel() % _NF4_VALUES == 0


def _nf4(weight: torch.Tensor) -> Any:
    try:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4
    except ImportError:  # before release 0.18
        from torchao.dtypes.nf4tensor import to_nf4
    return to_nf4(weight)

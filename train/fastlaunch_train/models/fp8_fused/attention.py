"""Attention between the two functions of a fused block, with our own backward pass where that is faster.

Elsewhere torch's `scaled_dot_product_attention` computes both passes.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from fastlaunch_train.models.fp8_fused.context import passes_for

#: The sizes of ViT-Base to ViT-Huge at 224 pixels and patches of 16. Our kernel holds 208 tokens in 256 rows;
#: below 129 tokens, half of these or more would be padding. It was timed at 197 alone.
_HEAD_DIMS, _MIN_TOKENS, _MAX_TOKENS = (64, 80), 129, 208
#: Releases of Triton whose Gluon compiles the kernel, from the first to before the second; torch 2.9 has 3.5.
_GLUON = (3, 5), (3, 9)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, own_backward: bool) -> torch.Tensor:
    """Return softmax(q k' / sqrt(head_dim)) v, of the shape of q: (samples, heads, tokens, head_dim).

    own_backward: whether our kernel computes the gradients; it can if `has_own_backward` says so.
    """
    if own_backward:
        return _Attention.apply(q, k, v)  # type: ignore[no-any-return, no-untyped-call]
    return functional.scaled_dot_product_attention(q, k, v)


def has_own_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether our kernel can compute the gradients of these."""
    return (
        q.is_cuda
        and q.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(q.device) == (9, 0)
        and q.shape[-1] in _HEAD_DIMS
        and _MIN_TOKENS <= q.shape[-2] <= _MAX_TOKENS
        and side_by_side((q, k, v)) is not None
        # It is off if cuDNN is too old.
        and torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
        and _has_gluon()
    )


def side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return q, k and v, or their gradients, as the one tensor (samples, tokens, 3 * width) that holds them.

    Return None if they are not views of one tensor.
    """
    samples, heads, tokens, head_dim = parts[0].shape
    width = heads * head_dim
    strides = (3 * width * tokens, head_dim, 3 * width, 1)
    first, size = parts[0].data_ptr(), parts[0].element_size()
    if any(part.stride() != strides for part in parts):
        return None
    if any(part.data_ptr() != first + index * width * size for index, part in enumerate(parts)):
        return None
    return parts[0].as_strided((samples, tokens, 3 * width), (3 * width * tokens, 3 * width, 1))


class _Attention(torch.autograd.Function):
    """Computes `attend` for q, k and v that are `side_by_side`; so are their gradients."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = passes_for(q).attention_forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        samples, heads, tokens, head_dim = q.shape
        qkv = side_by_side((q, k, v))
        assert qkv is not None
        by_token = [of.transpose(1, 2).contiguous().flatten(2) for of in (out, dout)]
        dqkv = passes_for(q).attention_backward(qkv, *by_token, lse.contiguous(), heads)
        return tuple(dqkv.view(samples, tokens, 3, heads, head_dim).permute(2, 0, 3, 1, 4).unbind())


@functools.cache
def _has_gluon() -> bool:
    """Return whether the installed Triton's Gluon, which still changes, compiles the kernel."""
    try:
        version = importlib.import_module("triton").__version__
    except ImportError:
        return False
    return _GLUON[0] <= tuple(map(int, version.split(".")[:2])) < _GLUON[1]

"""What makes Transformer Engine's layers faster changes nothing of what they compute."""

import pytest
import torch
from torch import nn

from fastlaunch_train.models.te_blocks import (
    CUDNN_NORM_SWITCHES,
    UnpackQKV,
    prefer_cudnn_norm,
    unpack_without_copies,
)

BATCH, TOKENS, HEADS, HEAD_DIM = 2, 5, 3, 4
SHAPE = {-3: (BATCH, TOKENS, 3, HEADS, HEAD_DIM), -2: (BATCH, TOKENS, HEADS, 3, HEAD_DIM)}


class _Gradients(torch.autograd.Function):
    """Something of q, k and v whose gradients are written as slices of one buffer, or apart."""

    @staticmethod
    def forward(ctx, q, k, v, dim, together):
        ctx.dim, ctx.together, ctx.shape = dim, together, q.shape
        return q.sum() + k.sum() + v.sum()

    @staticmethod
    def backward(ctx, _):
        gradient = torch.arange(float(torch.Size(SHAPE[ctx.dim]).numel())).view(SHAPE[ctx.dim])
        slices = gradient.unbind(ctx.dim)
        if not ctx.together:
            slices = tuple(part.clone() for part in slices)
        BUFFERS.append(gradient.untyped_storage())
        return (*slices, None, None)


#: Kept: a buffer that is free could be where the next one is made.
BUFFERS: list[torch.UntypedStorage] = []


@pytest.mark.parametrize("dim", [-3, -2])
@pytest.mark.parametrize("together", [True, False])
def test_the_packed_gradient_is_that_of_q_k_and_v_and_is_copied_only_where_it_must_be(dim, together):
    packed = torch.randn(SHAPE[dim], requires_grad=True)
    seen = []
    packed.register_hook(seen.append)

    _Gradients.apply(*UnpackQKV.apply(packed, dim), dim, together).backward()

    expected = torch.arange(float(packed.numel())).view(SHAPE[dim])
    assert torch.equal(packed.grad, expected)
    assert (seen[0].untyped_storage().data_ptr() == BUFFERS[-1].data_ptr()) == together


@pytest.mark.parametrize("dim", [-3, -2])
def test_slices_are_views_and_their_gradients_those_of_select(dim):
    packed = torch.randn(SHAPE[dim], dtype=torch.float64, requires_grad=True)
    q, k, v = UnpackQKV.apply(packed, dim)
    assert [part.untyped_storage().data_ptr() for part in (q, k, v)] == [
        packed.untyped_storage().data_ptr()
    ] * 3
    ((q * k).sum() + (v**3).sum()).backward()
    found, packed.grad = packed.grad, None
    q, k, v = (packed.select(dim, index) for index in range(3))
    ((q * k).sum() + (v**3).sum()).backward()
    assert torch.equal(found, packed.grad)


class _Core(nn.Module):
    """Takes what Transformer Engine's attention takes, and remembers it."""

    def forward(self, query=None, key=None, value=None, mask=None, *, qkv_layer=None, qkv_interleave_dim=-3):
        self.seen = (query, key, value, qkv_layer, qkv_interleave_dim, mask)
        return query


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attention = nn.Module()
        self.self_attention.core_attention = _Core()


def test_attention_gets_slices_instead_of_what_is_packed_and_names_stay():
    layer = _Layer()
    names = [name for name, _ in layer.named_modules()]
    unpack_without_copies(layer)
    core = layer.self_attention.core_attention
    packed = torch.randn(SHAPE[-3])
    mask = torch.ones(TOKENS)
    core(None, None, None, mask, qkv_layer=packed, qkv_interleave_dim=-3)
    assert core.seen[3] is None and core.seen[5] is mask
    for part, expected in zip(core.seen[:3], packed.unbind(-3), strict=True):
        assert torch.equal(part, expected)
    assert [name for name, _ in layer.named_modules()] == names
    q, k, v = torch.randn(3, BATCH, TOKENS, HEADS, HEAD_DIM)
    core(q, k, v)
    assert core.seen[0] is q and core.seen[1] is k and core.seen[2] is v


def test_what_the_user_says_of_layer_norm_stays():
    environ = {CUDNN_NORM_SWITCHES[0]: "0"}
    prefer_cudnn_norm(environ)
    assert environ == {CUDNN_NORM_SWITCHES[0]: "0", CUDNN_NORM_SWITCHES[1]: "1"}

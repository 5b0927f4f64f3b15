"""What Transformer Engine's blocks are asked for, without it; tests/gpu has what they compute."""

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fastlaunch_train.data.cpu_torchvision import prepare_torchvision
from fastlaunch_train.models.te_blocks import (
    CUDNN_NORM_SWITCHES,
    TransformerEngineBlock,
    UnpackQKV,
    article_arguments,
    prefer_cudnn_norm,
    replace_with_article_blocks,
    te_arguments,
)
from fastlaunch_train.models.te_fp8 import fp8_recipe, nested
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.recipes.recipes import RECIPES, resolve_recipe

WIDTH, HIDDEN = 32, 96


@cache
def timm_vit() -> Any:
    """Its module: imported by these tests alone, and not by whoever collects them."""
    prepare_torchvision()
    from timm.models import vision_transformer

    return vision_transformer


def timm_block(**changes: Any) -> nn.Module:
    arguments = {"num_heads": 4, "mlp_ratio": 3.0, "qkv_bias": True} | changes
    block: nn.Module = timm_vit().Block(WIDTH, **arguments)
    return block


def with_parts(**parts: nn.Module) -> nn.Module:
    block = timm_block()
    for name, part in parts.items():
        setattr(block, name, part)
    return block


def test_what_differs_from_the_defaults_is_taken_over() -> None:
    block = timm_block(
        norm_layer=lambda width, **more: nn.LayerNorm(width, eps=1e-4), attn_drop=0.2, drop_path=0.1
    )
    expected = {
        "hidden_size": WIDTH,
        "ffn_hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "layernorm_epsilon": 1e-4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.2,
        "drop_path_rate": 0.1,
        "self_attn_mask_type": "no_mask",
        "attn_input_format": "bshd",
        "qkv_weight_interleaved": False,
        "activation": "gelu",
        "bias": True,
        "params_dtype": torch.float32,
        "device": "cpu",
    }
    arguments = te_arguments(block)
    assert {name: arguments[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("block", "word"),
    [
        (lambda: timm_block(init_values=1e-5), "ls1"),
        (lambda: timm_block(qk_norm=True), "attn.q_norm"),
        (lambda: timm_block(qkv_bias=False), "attn.qkv.bias"),
        (lambda: timm_block(proj_drop=0.1), "dropout after the activation"),
        (lambda: timm_block(act_layer=nn.ReLU), "ReLU"),
        (lambda: timm_block(norm_layer=lambda *by, **more: timm_vit().RmsNorm(*by, **more)), "norm1"),
        (lambda: timm_block(mlp_layer=lambda **more: timm_vit().SwiGLU(**more)), "mlp"),
        (lambda: with_parts(drop_path2=timm_vit().DropPath(0.3)), "drop path rates"),
        (
            lambda: with_parts(
                drop_path1=timm_vit().DropPath(0.3, scale_by_keep=False),
                drop_path2=timm_vit().DropPath(0.3, scale_by_keep=False),
            ),
            "without rescaling",
        ),
        (lambda: with_parts(norm2=nn.LayerNorm(WIDTH, eps=1e-3)), "different epsilons"),
        (lambda: timm_vit().ResPostBlock(WIDTH, 4, qkv_bias=True), "cannot replace"),
        (lambda: timm_vit().ParallelScalingBlock(WIDTH, 4, qkv_bias=True), "cannot replace"),
        (lambda: nn.TransformerEncoderLayer(WIDTH, 4), "cannot replace"),
    ],
)
def test_a_block_that_computes_something_else_is_refused(block: Callable[[], nn.Module], word: str) -> None:
    with pytest.raises(RecipeError, match=word):
        te_arguments(block())


def test_masked_attention_is_refused_rather_than_ignored() -> None:
    block, x = TransformerEngineBlock(nn.Identity()), torch.randn(1, 5, WIDTH)
    for mask in ({"attn_mask": torch.ones(5, 5)}, {"is_causal": True}):
        with pytest.raises(RecipeError, match="masks its attention"):
            block(x, **mask)


def test_the_articles_layer_is_given_sizes_alone() -> None:
    assert article_arguments(timm_block(drop_path=0.1)) == {
        "hidden_size": WIDTH,
        "ffn_hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "device": "cpu",
    }
    with pytest.raises(RecipeError, match="not a Linear"):  # before Transformer Engine is imported
        replace_with_article_blocks(nn.ModuleList([nn.Linear(3, 3)]))


def test_the_recipe_object_is_of_the_recipes_scaling_and_others_do_not_load_transformer_engine() -> None:
    module = SimpleNamespace(
        Format=SimpleNamespace(HYBRID="hybrid", E4M3="e4m3"),
        DelayedScaling=lambda **arguments: ("delayed", arguments),
        Float8BlockScaling=lambda **arguments: ("block", arguments),
    )
    delayed = resolve_recipe("te-article-fp8", ["amax_history=16"])
    arguments = {"fp8_format": "hybrid", "amax_history_len": 16, "amax_compute_algo": "max"}
    assert fp8_recipe(delayed, lambda name: module) == ("delayed", arguments)
    assert fp8_recipe(RECIPES["te-fp8-block"], lambda name: module) == ("block", {"fp8_format": "e4m3"})
    for other in ("bf16", "te-bf16", "ao-fp8", "ao-fp8-rowwise"):
        assert fp8_recipe(RECIPES[other], {}.__getitem__) is None


def test_contexts_are_entered_in_order_and_left() -> None:
    log: list[str] = []

    @contextlib.contextmanager
    def named(name: str) -> Iterator[None]:
        log.append(name)
        yield
        log.append(f"{name} left")

    make = nested(lambda: named("outer"), lambda: named("inner"))
    for _ in range(2):  # a fresh one each time
        with make():
            log.append("inside")
    assert log == ["outer", "inner", "inside", "inner left", "outer left"] * 2


BATCH, TOKENS, HEADS, HEAD_DIM = 2, 5, 3, 4
SHAPE = {-3: (BATCH, TOKENS, 3, HEADS, HEAD_DIM), -2: (BATCH, TOKENS, HEADS, 3, HEAD_DIM)}


class _Gradients(torch.autograd.Function):
    """Something of q, k and v whose gradients are written as slices of one buffer, or apart."""

    @staticmethod
    def forward(ctx, q, k, v, dim, together):
        ctx.dim, ctx.together = dim, together
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
    q, k, v = UnpackQKV.apply(packed, dim)
    assert {part.untyped_storage().data_ptr() for part in (q, k, v)} == {packed.untyped_storage().data_ptr()}
    _Gradients.apply(q, k, v, dim, together).backward()
    assert torch.equal(packed.grad, torch.arange(float(packed.numel())).view(SHAPE[dim]))
    assert (seen[0].untyped_storage().data_ptr() == BUFFERS[-1].data_ptr()) == together


def test_what_the_user_says_of_layer_norm_stays():
    environ = {CUDNN_NORM_SWITCHES[0]: "0"}
    prefer_cudnn_norm(environ)
    assert environ == {CUDNN_NORM_SWITCHES[0]: "0", CUDNN_NORM_SWITCHES[1]: "1"}

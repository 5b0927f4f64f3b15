"""Transformer Engine's block from timm's: arguments and weights, without Transformer Engine."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from te_fakes import FakeLayer, timm_weights_from_te
from torch import nn

from fastlaunch_train.data.cpu_torchvision import prepare_torchvision
from fastlaunch_train.models.te_blocks import (
    article_arguments,
    replace_blocks,
    replace_with_article_blocks,
    te_arguments,
    te_block_from_timm,
)
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.workloads.contract import load_workload

WIDTH, HIDDEN = 32, 96


@cache
def timm_vit() -> Any:
    """Its module: imported by these tests alone, and not by whoever collects them."""
    prepare_torchvision()
    from timm.models import vision_transformer

    return vision_transformer


def timm_block(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    arguments = {"num_heads": 4, "mlp_ratio": 3.0, "qkv_bias": True} | changes
    block: nn.Module = timm_vit().Block(WIDTH, **arguments)
    for parameter in block.parameters():  # biases start at 0 and norms at 1, which would hide a mix-up
        nn.init.normal_(parameter, std=0.3)
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
    ("arguments", "word"),
    [
        ({"init_values": 1e-5}, "ls1"),
        ({"qk_norm": True}, "attn.q_norm"),
        ({"qkv_bias": False}, "attn.qkv.bias"),
        ({"proj_drop": 0.1}, "dropout after the activation"),
        ({"act_layer": nn.ReLU}, "ReLU"),
        ({"norm_layer": lambda *by, **more: timm_vit().RmsNorm(*by, **more)}, "norm1"),
        ({"mlp_layer": lambda **more: timm_vit().SwiGLU(**more)}, "mlp"),
    ],
)
def test_a_block_that_computes_something_else_is_refused(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(RecipeError, match=word):
        te_arguments(timm_block(**arguments))


@pytest.mark.parametrize(
    "parts",
    [
        {"drop_path2": lambda: timm_vit().DropPath(0.3)},
        dict.fromkeys(("drop_path1", "drop_path2"), lambda: timm_vit().DropPath(0.3, scale_by_keep=False)),
        {"norm2": lambda: nn.LayerNorm(WIDTH, eps=1e-3)},
    ],
)
def test_a_changed_block_is_refused(parts: dict[str, Callable[[], nn.Module]]) -> None:
    block = timm_block()
    for name, part in parts.items():
        setattr(block, name, part())
    with pytest.raises(RecipeError, match="cannot replace"):
        te_arguments(block)


@pytest.mark.parametrize(
    "block",
    [
        lambda: timm_vit().ResPostBlock(WIDTH, 4, qkv_bias=True),
        lambda: timm_vit().ParallelScalingBlock(WIDTH, 4, qkv_bias=True),
        lambda: nn.TransformerEncoderLayer(WIDTH, 4),
    ],
)
def test_other_kinds_of_block_are_refused(block: Callable[[], nn.Module]) -> None:
    with pytest.raises(RecipeError, match="cannot replace"):
        te_arguments(block())


def test_the_block_computes_what_timms_does() -> None:
    block = timm_block().double()
    twin = te_block_from_timm(block, layer_factory=FakeLayer).double()
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(twin(x), block(x))
    assert twin.layer.arguments["layer_number"] == 1


def test_masked_attention_is_refused_rather_than_ignored() -> None:
    twin = te_block_from_timm(timm_block(), layer_factory=FakeLayer)
    x = torch.randn(1, 5, WIDTH)
    with pytest.raises(RecipeError, match="masks its attention"):
        twin(x, attn_mask=torch.ones(5, 5))
    with pytest.raises(RecipeError, match="masks its attention"):
        twin(x, is_causal=True)


def test_blocks_are_replaced_inside_a_model_that_then_computes_the_same() -> None:
    workload = load_workload("vit-tiny")
    assert workload.blocks is not None
    model = workload.build_model().eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        before = model(images)
        replace_blocks(model, workload.blocks(model), layer_factory=FakeLayer)
        torch.testing.assert_close(model(images), before, rtol=1e-4, atol=1e-5)
    blocks = workload.blocks(model)
    assert [block.layer.arguments["layer_number"] for block in blocks] == [1, 2, 3, 4]
    assert not any(block.training for block in blocks)


def test_the_articles_layer_is_given_sizes_alone() -> None:
    assert article_arguments(timm_block(drop_path=0.1)) == {
        "hidden_size": WIDTH,
        "ffn_hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "device": "cpu",
    }
    with pytest.raises(RecipeError, match="not a Linear"):  # before Transformer Engine is imported
        replace_with_article_blocks(nn.ModuleList([nn.Linear(3, 3)]))


def test_the_articles_blocks_have_transformer_engines_defaults_and_their_own_weights() -> None:
    model = load_workload("vit-tiny").build_model().eval()
    before = model.state_dict()
    replace_with_article_blocks(model.blocks, layer_factory=FakeLayer)
    for block in model.blocks:
        assert not block.training
        assert block.layer.arguments["layernorm_epsilon"] == 1e-5
        weights = timm_weights_from_te(dict(block.layer.named_parameters()))
        assert not any(torch.equal(weights["mlp.fc1.weight"], value) for value in before.values())


def test_the_articles_block_attends_to_the_images_before() -> None:
    model = load_workload("vit-tiny").build_model().eval()
    replace_with_article_blocks(model.blocks, layer_factory=FakeLayer)
    x = torch.randn(5, 6, 64)
    changed = x.clone()
    changed[2] = torch.randn(6, 64)
    with torch.no_grad():
        differs = (model.blocks[0](x) != model.blocks[0](changed)).flatten(1).any(1)
    assert differs.tolist() == [False, False, True, True, True]

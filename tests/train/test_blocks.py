"""Transformer Engine's block from timm's: arguments and weights, without Transformer Engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fastlaunch_train.blocks import (
    TE_NAMES,
    replace_blocks,
    te_arguments,
    te_block_from_timm,
    te_weights_from_timm,
    timm_weights_from_te,
)
from fastlaunch_train.cpu_torchvision import prepare_torchvision
from fastlaunch_train.recipes import RecipeError
from fastlaunch_train.workload import load_workload

prepare_torchvision()
from timm.models import vision_transformer as timm_vit  # noqa: E402 (needs the line above)

WIDTH, HIDDEN = 32, 96


class RecordedLayer(nn.Module):
    """Has TransformerLayer's parameters, computes the same in plain torch, and keeps its arguments."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments
        width, hidden = arguments["hidden_size"], arguments["ffn_hidden_size"]
        shapes = {
            "self_attention.layernorm_qkv.layer_norm_weight": (width,),
            "self_attention.layernorm_qkv.layer_norm_bias": (width,),
            "self_attention.layernorm_qkv.weight": (3 * width, width),
            "self_attention.layernorm_qkv.bias": (3 * width,),
            "self_attention.proj.weight": (width, width),
            "self_attention.proj.bias": (width,),
            "layernorm_mlp.layer_norm_weight": (width,),
            "layernorm_mlp.layer_norm_bias": (width,),
            "layernorm_mlp.fc1_weight": (hidden, width),
            "layernorm_mlp.fc1_bias": (hidden,),
            "layernorm_mlp.fc2_weight": (width, hidden),
            "layernorm_mlp.fc2_bias": (width,),
        }
        for name, shape in shapes.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(torch.full(shape, 7.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = dict(self.named_parameters())
        eps, heads = self.arguments["layernorm_epsilon"], self.arguments["num_attention_heads"]
        functional = nn.functional

        def norm(y: torch.Tensor, prefix: str) -> torch.Tensor:
            return functional.layer_norm(
                y, y.shape[-1:], w[f"{prefix}.layer_norm_weight"], w[f"{prefix}.layer_norm_bias"], eps
            )

        prefix = "self_attention.layernorm_qkv"
        qkv = functional.linear(norm(x, prefix), w[f"{prefix}.weight"], w[f"{prefix}.bias"])
        query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + functional.linear(attended, w["self_attention.proj.weight"], w["self_attention.proj.bias"])
        prefix = "layernorm_mlp"
        hidden = functional.linear(norm(x, prefix), w[f"{prefix}.fc1_weight"], w[f"{prefix}.fc1_bias"])
        return x + functional.linear(
            functional.gelu(hidden), w[f"{prefix}.fc2_weight"], w[f"{prefix}.fc2_bias"]
        )


def timm_block(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    arguments = {"num_heads": 4, "mlp_ratio": 3.0, "qkv_bias": True} | changes
    block: nn.Module = timm_vit.Block(WIDTH, **arguments)
    for parameter in block.parameters():  # biases start at 0 and norms at 1, which would hide a mix-up
        nn.init.normal_(parameter, std=0.3)
    return block


def test_arguments_that_keep_the_maths() -> None:
    assert te_arguments(timm_block()) == {
        "hidden_size": WIDTH,
        "ffn_hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "layernorm_epsilon": 1e-6,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "drop_path_rate": 0.0,
        "self_attn_mask_type": "no_mask",
        "attn_input_format": "bshd",
        "fuse_qkv_params": True,
        "qkv_weight_interleaved": False,
        "output_layernorm": False,
        "layer_type": "encoder",
        "activation": "gelu",
        "normalization": "LayerNorm",
        "bias": True,
        "params_dtype": torch.float32,
        "device": "cpu",
    }


def test_epsilon_attention_dropout_and_drop_path_are_taken_over() -> None:
    block = timm_block(
        norm_layer=lambda width, **more: nn.LayerNorm(width, eps=1e-4), attn_drop=0.2, drop_path=0.1
    )
    arguments = te_arguments(block)
    assert arguments["layernorm_epsilon"] == 1e-4
    assert arguments["attention_dropout"] == 0.2
    assert arguments["drop_path_rate"] == 0.1


def unequal_drop_path(block: nn.Module) -> None:
    block.drop_path2 = timm_vit.DropPath(0.3)


def unscaled_drop_path(block: nn.Module) -> None:
    block.drop_path1 = block.drop_path2 = timm_vit.DropPath(0.3, scale_by_keep=False)


def unequal_epsilon(block: nn.Module) -> None:
    block.norm2 = nn.LayerNorm(WIDTH, eps=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"init_values": 1e-5}, "ls1"),
        ({"qk_norm": True}, "attn.q_norm"),
        ({"qkv_bias": False}, "attn.qkv.bias"),
        ({"proj_bias": False}, "attn.proj.bias"),
        ({"proj_drop": 0.1}, "dropout after the activation"),
        ({"act_layer": nn.ReLU}, "activation ReLU"),
        ({"norm_layer": timm_vit.RmsNorm}, "norm1"),
        ({"mlp_layer": timm_vit.SwiGLU}, "mlp"),
    ],
)
def test_a_block_that_computes_something_else_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match="cannot stand for") as caught:
        te_arguments(timm_block(**arguments))
    assert words in caught.value.message


@pytest.mark.parametrize("change", [unequal_drop_path, unscaled_drop_path, unequal_epsilon])
def test_a_changed_block_is_refused(change: Callable[[nn.Module], None]) -> None:
    block = timm_block()
    change(block)
    with pytest.raises(RecipeError, match="cannot stand for"):
        te_arguments(block)


def test_other_kinds_of_block_are_refused() -> None:
    for block in (
        timm_vit.ResPostBlock(WIDTH, 4, qkv_bias=True),
        timm_vit.ParallelScalingBlock(WIDTH, 4, qkv_bias=True),
        nn.TransformerEncoderLayer(WIDTH, 4),
        nn.Linear(3, 3),
    ):
        with pytest.raises(RecipeError, match="cannot stand for"):
            te_arguments(block)


def test_weights_there_and_back() -> None:
    weights = timm_block().state_dict()
    there = te_weights_from_timm(weights)
    assert set(there) == set(TE_NAMES.values())
    back = timm_weights_from_te({**there, "self_attention.proj._extra_state": torch.empty(0)})
    assert back.keys() == weights.keys()
    assert all(back[name] is weights[name] for name in weights)


def test_the_block_computes_what_timms_does() -> None:
    block = timm_block().double()
    twin = te_block_from_timm(block, layer_factory=RecordedLayer).double()
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(twin(x), block(x))
    assert twin.layer.arguments["layer_number"] == 1


def test_masked_attention_is_refused_rather_than_ignored() -> None:
    twin = te_block_from_timm(timm_block(), layer_factory=RecordedLayer)
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
        replace_blocks(model, workload.blocks(model), layer_factory=RecordedLayer)
        torch.testing.assert_close(model(images), before, rtol=1e-4, atol=1e-5)
    blocks = workload.blocks(model)
    assert [block.layer.arguments["layer_number"] for block in blocks] == [1, 2, 3, 4]
    assert not any(block.training for block in blocks)

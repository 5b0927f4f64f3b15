"""Transformer Engine's layer as its documentation has it, in plain torch; its states under timm's names."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fastlaunch_train.models.te_blocks import TE_NAMES, native_name


class FakeLayer(nn.Module):
    """Takes TransformerLayer's arguments with its defaults, has its parameters, and computes what it does.

    But for GELU, which is the exact one here, and qkv, which is fused and not interleaved.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        *,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        self_attn_mask_type: str = "causal",
        attn_input_format: str = "sbhd",
        **more: Any,
    ) -> None:
        super().__init__()
        self.arguments = {
            "hidden_size": hidden_size,
            "ffn_hidden_size": ffn_hidden_size,
            "num_attention_heads": num_attention_heads,
            "layernorm_epsilon": layernorm_epsilon,
            "hidden_dropout": hidden_dropout,
            "attention_dropout": attention_dropout,
            "self_attn_mask_type": self_attn_mask_type,
            "attn_input_format": attn_input_format,
            **more,
        }
        shapes = {
            "self_attention.layernorm_qkv.layer_norm_weight": (hidden_size,),
            "self_attention.layernorm_qkv.layer_norm_bias": (hidden_size,),
            "self_attention.layernorm_qkv.weight": (3 * hidden_size, hidden_size),
            "self_attention.layernorm_qkv.bias": (3 * hidden_size,),
            "self_attention.proj.weight": (hidden_size, hidden_size),
            "self_attention.proj.bias": (hidden_size,),
            "layernorm_mlp.layer_norm_weight": (hidden_size,),
            "layernorm_mlp.layer_norm_bias": (hidden_size,),
            "layernorm_mlp.fc1_weight": (ffn_hidden_size, hidden_size),
            "layernorm_mlp.fc1_bias": (ffn_hidden_size,),
            "layernorm_mlp.fc2_weight": (hidden_size, ffn_hidden_size),
            "layernorm_mlp.fc2_bias": (hidden_size,),
        }
        for name, shape in shapes.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            values = torch.full(shape, 1.0 if last == "layer_norm_weight" else 0.0)
            if len(shape) == 2:
                nn.init.normal_(values, std=0.023)
            module.register_parameter(last, nn.Parameter(values))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (sequence, batch, width), or with bshd (batch, sequence, width)."""
        w, arguments = dict(self.named_parameters()), self.arguments
        functional = nn.functional
        dropout, training = arguments["hidden_dropout"], self.training

        def norm(y: torch.Tensor, prefix: str) -> torch.Tensor:
            scale, shift = w[f"{prefix}.layer_norm_weight"], w[f"{prefix}.layer_norm_bias"]
            return functional.layer_norm(y, y.shape[-1:], scale, shift, arguments["layernorm_epsilon"])

        prefix = "self_attention.layernorm_qkv"
        qkv = functional.linear(norm(x, prefix), w[f"{prefix}.weight"], w[f"{prefix}.bias"])
        if arguments["attn_input_format"] == "sbhd":
            qkv = qkv.transpose(0, 1)
        heads = arguments["num_attention_heads"]
        query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=arguments["attention_dropout"] if training else 0.0,
            is_causal=arguments["self_attn_mask_type"] == "causal",
        )
        attended = attended.transpose(1, 2).flatten(2)
        if arguments["attn_input_format"] == "sbhd":
            attended = attended.transpose(0, 1)
        projected = functional.linear(
            attended, w["self_attention.proj.weight"], w["self_attention.proj.bias"]
        )
        x = x + functional.dropout(projected, dropout, training)
        prefix = "layernorm_mlp"
        hidden = functional.linear(norm(x, prefix), w[f"{prefix}.fc1_weight"], w[f"{prefix}.fc1_bias"])
        output = functional.linear(
            functional.gelu(hidden), w[f"{prefix}.fc2_weight"], w[f"{prefix}.fc2_bias"]
        )
        return x + functional.dropout(output, dropout, training)


def timm_weights_from_te(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state of a timm block for that of a TransformerLayer, without FP8 scales."""
    return {name: weights[te_name] for name, te_name in TE_NAMES.items()}


def native_state_from_te(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a model with timm's blocks for one with Transformer Engine's; no FP8 scales."""
    return {
        native_name(name): weight
        for name, weight in weights.items()
        if name.rpartition(".")[2] != "_extra_state"
    }

"""Transformer Engine's layer with its own defaults in the place of timm's block, as an article had it.

NOT equivalent, and here to show what that costs. The layer takes dimension 0 for the sequence and the next
for the batch, and attends causally: given (batch, tokens, width) it attends across the images of a batch,
so that a class token sees other class tokens and never its own image. Its LayerNorm has another epsilon
(1e-5), it drops out a tenth of its activations in training, and starts from its own weights.
(An article on FP8 training of November 2023, with Transformer Engine 0.12; releases 2.x do the same.)
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fastlaunch_train.models.te_fp8 import MakeContext
from fastlaunch_train.recipes.recipes import RecipeError


class ArticleBlock(nn.Module):
    """A timm block's call around Transformer Engine's `layer`, whose defaults are not a timm block's."""

    def __init__(self, layer: nn.Module, *, context: MakeContext = contextlib.nullcontext) -> None:
        super().__init__()
        self.layer = layer
        self._context = context

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer makes of x: (batch, tokens, width), the batch taken for the sequence."""
        with self._context():
            output: torch.Tensor = self.layer(x)
        return output


def article_arguments(block: nn.Module) -> dict[str, Any]:
    """The arguments that the article gave: sizes, and nothing of what the timm `block` computes with them.

    Raises RecipeError for a block without the parts that tell its sizes.
    """
    try:
        attn: Any = block.get_submodule("attn")
        fc1: Any = block.get_submodule("mlp.fc1")
        return {
            "hidden_size": fc1.in_features,
            "ffn_hidden_size": fc1.out_features,
            "num_attention_heads": attn.num_heads,
            "device": str(fc1.weight.device),
        }
    except AttributeError:
        raise RecipeError(
            f"the article's blocks take the place of timm's, not of a {type(block).__name__}",
            "use a recipe with blocks=native",
        ) from None


def replace_with_article_blocks(
    blocks: nn.ModuleList | nn.Sequential,
    *,
    contexts: Sequence[MakeContext] = (),
    layer_factory: Callable[..., nn.Module] | None = None,
) -> None:
    """Put the article's blocks in the place of `blocks`, with their own first weights.

    contexts: of each block's forward pass; none change nothing.
    """
    arguments = [article_arguments(block) for block in blocks]
    if layer_factory is None:
        import transformer_engine.pytorch as te

        layer_factory = te.TransformerLayer
    for index, block in enumerate(blocks):
        layer = layer_factory(**arguments[index])
        context = contexts[index] if contexts else contextlib.nullcontext
        blocks[index] = ArticleBlock(layer, context=context).train(block.training)

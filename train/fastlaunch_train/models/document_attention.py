"""Causal attention that ends at documents' borders, for Transformers' models on packed sequences.

Without borders torch chooses among its causal kernels. With borders a GPU uses FlexAttention, which skips the
blocks that a document does not see, and a CPU a mask.
"""

from typing import Any

import torch
from torch import nn

#: The name by which Transformers finds `attend`. It makes no masks for names that it does not know.
ATTENTION = "fastlaunch_documents"


def register_attention() -> None:
    """Make `attend` known to Transformers. Raises ImportError before release 4.51."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)


def document_mask(positions: torch.Tensor) -> Any:
    """Return what `attend` takes as documents.

    positions: (samples, tokens), counted from 0 in each document.
    """
    document = (positions == 0).cumsum(1)
    length = positions.shape[1]
    if positions.device.type != "cuda":
        order = torch.arange(length, device=positions.device)
        return ((document[:, :, None] == document[:, None, :]) & (order[:, None] >= order))[:, None]
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(sample: Any, _head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (document[sample, query] == document[sample, key])

    return create_block_mask(sees, len(positions), None, length, length, device=positions.device)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    *,
    documents: Any = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return (samples, tokens, heads, features), and no weights, as Transformers' interface asks.

    query: (samples, heads, tokens, features). key, value: likewise, with as many heads or fewer.
    """
    grouped = key.shape[1] != query.shape[1]
    query, key = query.to(value.dtype), key.to(value.dtype)
    if documents is None or isinstance(documents, torch.Tensor):
        output = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=documents,
            dropout_p=dropout,
            is_causal=documents is None,
            scale=scaling,
            enable_gqa=grouped,
        )
    else:
        from torch.nn.attention.flex_attention import flex_attention

        flex: Any = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
        output = flex(query, key, value, block_mask=documents, scale=scaling, enable_gqa=grouped)
    return output.transpose(1, 2).contiguous(), None


_compiled: list[Any] = []


def _compiled_flex_attention() -> Any:
    """Return FlexAttention as a kernel: uncompiled it would hold all scores."""
    if not _compiled:
        from torch.nn.attention.flex_attention import flex_attention

        _compiled.append(torch.compile(flex_attention))
    return _compiled[0]

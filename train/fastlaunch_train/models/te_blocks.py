"""Transformer Engine's blocks instead of timm's: the same function with the same weights, or an article's."""

import contextlib
import os
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from fastlaunch_train.models.te_fp8 import MakeContext
from fastlaunch_train.recipes.recipe import RecipeError

#: Transformer Engine's name of each parameter of a timm block. With qkv fused and not interleaved, both stack
#: [q; k; v].
TE_NAMES: Mapping[str, str] = {
    "norm1.weight": "self_attention.layernorm_qkv.layer_norm_weight",
    "norm1.bias": "self_attention.layernorm_qkv.layer_norm_bias",
    "attn.qkv.weight": "self_attention.layernorm_qkv.weight",
    "attn.qkv.bias": "self_attention.layernorm_qkv.bias",
    "attn.proj.weight": "self_attention.proj.weight",
    "attn.proj.bias": "self_attention.proj.bias",
    "norm2.weight": "layernorm_mlp.layer_norm_weight",
    "norm2.bias": "layernorm_mlp.layer_norm_bias",
    "mlp.fc1.weight": "layernorm_mlp.fc1_weight",
    "mlp.fc1.bias": "layernorm_mlp.fc1_bias",
    "mlp.fc2.weight": "layernorm_mlp.fc2_weight",
    "mlp.fc2.bias": "layernorm_mlp.fc2_bias",
}

_NATIVE_NAMES = {te_name: name for name, te_name in TE_NAMES.items()}

#: Modules of a timm block that may do something; any other has to be an identity.
_KNOWN_MODULES = frozenset(
    [
        *("norm1", "attn", "attn.qkv", "attn.attn_drop", "attn.proj", "attn.proj_drop", "drop_path1"),
        *("norm2", "mlp", "mlp.fc1", "mlp.act", "mlp.drop1", "mlp.fc2", "mlp.drop2", "drop_path2"),
    ]
)


class TransformerEngineBlock(nn.Module):
    """Transformer Engine's `layer`, called as a timm block is.

    In bf16 autocast it keeps the residual stream in bf16 where timm's block keeps it in fp32, which is part
    of its speed and of its rounding error. GELU is the tanh approximation, within 4.7e-4 of the exact one.
    context: makes the context of its forward pass; one without FP8 for blocks that a recipe excludes.
    """

    def __init__(self, layer: nn.Module, *, context: MakeContext = contextlib.nullcontext) -> None:
        super().__init__()
        self.layer = layer
        self._context = context

    def forward(
        self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False
    ) -> torch.Tensor:
        """Return the block's output for x: (batch, tokens, width), of the same shape."""
        if attn_mask is not None or is_causal:
            raise RecipeError(
                "the model masks its attention, which Transformer Engine's block does not support",
                "use a recipe with blocks=native",
            )
        with self._context():
            output: torch.Tensor = self.layer(x)
        return output


def native_name(name: str) -> str:
    """Return what a model's parameter was called before `replace_blocks`."""
    block, _, te_name = name.rpartition(".layer.")
    return f"{block}.{_NATIVE_NAMES[te_name]}" if te_name in _NATIVE_NAMES else name


def te_arguments(block: nn.Module) -> dict[str, Any]:
    """Return arguments with which Transformer Engine's TransformerLayer computes what the timm `block` does.

    Raises RecipeError, naming the part, if it cannot. Checked against timm 1.0.15 to 1.0.31.
    """
    _check_parts(block)
    part: Any = block  # its parts were checked above
    attn, mlp, norm = part.attn, part.mlp, part.norm1
    width, hidden = mlp.fc1.in_features, mlp.fc1.out_features
    _require(_dropout(mlp.drop1) == 0, "dropout after the activation")
    _require(_dropout(attn.proj_drop) == _dropout(mlp.drop2), "different dropout after attention and MLP")
    _require(_drop_path(part.drop_path1) == _drop_path(part.drop_path2), "different drop path rates")
    return {
        "hidden_size": width,
        "ffn_hidden_size": hidden,
        "num_attention_heads": attn.num_heads,
        "layernorm_epsilon": norm.eps,
        "hidden_dropout": _dropout(mlp.drop2),
        "attention_dropout": _dropout(attn.attn_drop),
        "drop_path_rate": _drop_path(part.drop_path1),
        # The defaults attend causally, and across the batch: sbhd takes dimension 0 for the sequence.
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
        "device": str(norm.weight.device),
    }


def te_block_from_timm(
    block: nn.Module,
    *,
    layer_number: int = 1,
    context: MakeContext = contextlib.nullcontext,
    layer_factory: Callable[..., nn.Module] | None = None,
) -> TransformerEngineBlock:
    """Return a Transformer Engine block with the weights, device and mode of the timm `block`.

    layer_number: from 1, as Transformer Engine counts. layer_factory: replaces its TransformerLayer in tests.
    Raises RecipeError if the block computes something that Transformer Engine's does not.
    """
    arguments = te_arguments(block)
    layer_factory = layer_factory or _transformer_layer
    layer = layer_factory(**arguments, layer_number=layer_number)
    weights = {TE_NAMES[name]: weight for name, weight in block.state_dict().items()}
    parameters = dict(layer.named_parameters())
    assert parameters.keys() == weights.keys(), sorted(parameters.keys() ^ weights.keys())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return TransformerEngineBlock(layer, context=context).train(block.training)


def replace_blocks(
    model: nn.Module,
    blocks: nn.ModuleList | nn.Sequential,
    *,
    contexts: Sequence[MakeContext] = (),
    layer_factory: Callable[..., nn.Module] | None = None,
) -> None:
    """Replace `blocks`, which is a part of `model`, by Transformer Engine blocks.

    contexts: makers of the context of each block's forward pass; empty for none.
    """
    assert any(module is blocks for module in model.modules())
    for index, block in enumerate(blocks):
        blocks[index] = te_block_from_timm(
            block,
            layer_number=index + 1,
            context=contexts[index] if contexts else contextlib.nullcontext,
            layer_factory=layer_factory,
        )


def _transformer_layer(**arguments: Any) -> nn.Module:
    import transformer_engine.pytorch as te

    prefer_cudnn_norm()
    layer: nn.Module = te.TransformerLayer(**arguments)
    unpack_without_copies(layer)
    return layer


def _check_parts(block: nn.Module) -> None:
    modules: dict[str, Any] = dict(block.named_modules())
    for name in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"):
        _require(name in modules, f"a {type(block).__name__} without {name}")
    for name, module in modules.items():
        if name and name not in _KNOWN_MODULES:
            _require(isinstance(module, nn.Identity), f"{name} ({type(module).__name__})")
    for name, expected in (("attn", "Attention"), ("mlp", "Mlp")):
        _require(type(modules[name]).__name__ == expected, f"{name} of type {type(modules[name]).__name__}")
    _require(type(block).__name__ == "Block", f"blocks of type {type(block).__name__}")
    for name in ("norm1", "norm2"):
        norm = modules[name]
        _require(
            isinstance(norm, nn.LayerNorm) and "Rms" not in type(norm).__name__,
            f"{name} ({type(norm).__name__})",
        )
    _require(modules["norm1"].eps == modules["norm2"].eps, "different epsilons of norm1 and norm2")
    _require(isinstance(modules["mlp.act"], nn.GELU), f"activation {type(modules['mlp.act']).__name__}")
    parameters = {name for name, _ in block.named_parameters()}
    missing = sorted(TE_NAMES.keys() - parameters)
    extra = sorted(parameters - TE_NAMES.keys())
    _require(not missing, f"a block without {', '.join(missing)}")
    _require(not extra, f"the parameters {', '.join(extra)}")
    attn = modules["attn"]
    _require(attn.qkv.out_features == 3 * attn.qkv.in_features, "heads that are not width / num_heads wide")


def _dropout(module: nn.Module) -> float:
    return float(getattr(module, "p", 0.0))


def _drop_path(module: nn.Module) -> float:
    if not isinstance(module, nn.Identity):
        _require(getattr(module, "scale_by_keep", True), "drop path without rescaling")
    return float(getattr(module, "drop_prob", 0.0) or 0.0)


def _require(holds: bool, part: str) -> None:
    if not holds:
        raise RecipeError(
            f"other blocks cannot replace this model's: it has {part}", "use a recipe with blocks=native"
        )


def article_arguments(block: nn.Module) -> dict[str, Any]:
    """Return the article's arguments of TransformerLayer: the sizes of the timm `block` alone.

    Raises RecipeError for a block without the parts that have these sizes.
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
            f"the article's blocks replace timm's, not a {type(block).__name__}",
            "use a recipe with blocks=native",
        ) from None


def replace_with_article_blocks(
    blocks: nn.ModuleList | nn.Sequential,
    *,
    contexts: Sequence[MakeContext] = (),
    layer_factory: Callable[..., nn.Module] | None = None,
) -> None:
    """Replace `blocks` by Transformer Engine's layers with their defaults, as an article did.

    NOT equivalent; this is here to show the cost. The layer takes dimension 0 for the sequence and the
    next for the batch, and attends causally: given (batch, tokens, width) it attends across the images of a
    batch, so that a class token sees other class tokens and never its own image. Its LayerNorm has another
    epsilon (1e-5), it drops a tenth of its activations in training, and starts from weights of its own.
    (An article on FP8 training of November 2023, with Transformer Engine 0.12; releases 2.x do the same.)
    """
    arguments = [article_arguments(block) for block in blocks]
    layer_factory = layer_factory or _transformer_layer
    for index, block in enumerate(blocks):
        context = contexts[index] if contexts else contextlib.nullcontext
        layer = layer_factory(**arguments[index])
        blocks[index] = TransformerEngineBlock(layer, context=context).train(block.training)


# Two changes that make Transformer Engine's layers faster and compute the same, found by profiling `te-fp8`
# of `vit-huge` at batch 256 on one H200 with release 2.20.2 (2026-11-21): the backward pass of the packed
# q, k and v took 43 ms of a 340 ms step, LayerNorm 26 ms where cuDNN's takes 11.

#: Transformer Engine's switches for cuDNN's LayerNorm, which it reads at a process's first LayerNorm. Its own
#: LayerNorm has tuned kernels for a few widths only, and not for 1280.
CUDNN_NORM_SWITCHES = ("NVTE_NORM_FWD_USE_CUDNN", "NVTE_NORM_BWD_USE_CUDNN")


def prefer_cudnn_norm(environ: MutableMapping[str, str] = os.environ) -> None:
    """Switch cuDNN's LayerNorm on, unless the user has set a switch."""
    for switch in CUDNN_NORM_SWITCHES:
        environ.setdefault(switch, "1")


def unpack_without_copies(layer: nn.Module) -> None:
    """Make the gradients of q, k and v in the attention of `layer`, a TransformerLayer, need no copies.

    Release 2.20.2 passes the packed projection (batch, tokens, 3, heads, head_dim), or with the 3 second to
    last, and slices it: in the backward pass autograd then zeroes three buffers of the packed size, copies a
    slice into each, and adds them up. A release that packs nothing is unaffected.
    """
    attention: Any = layer
    core = attention.self_attention.core_attention
    core.register_forward_pre_hook(_unpack_packed, with_kwargs=True)
    # Transformer Engine warns about slices and recommends the packed projection.
    warnings.filterwarnings(
        "ignore", message=r"(?s).*deprecated: pass the packed buffer", category=DeprecationWarning
    )


def _unpack_packed(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    packed = kwargs.get("qkv_layer")
    if not isinstance(packed, torch.Tensor):
        return None
    slices: tuple[Any, ...] = UnpackQKV.apply(packed, kwargs["qkv_interleave_dim"])  # type: ignore[no-untyped-call]
    return (*slices, *args[len(slices) :]), {**kwargs, "qkv_layer": None}


class UnpackQKV(torch.autograd.Function):
    """Split the packed projection into views q, k and v, whose gradients become the packed one in place.

    packed: q, k and v along `dim`, -3 or -2. If the gradients lie in one buffer as q, k and v do, as cuDNN's
    fused attention writes them, return that buffer; otherwise stack them.
    """

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
        ctx.dim = dim
        return packed.unbind(dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        first = gradients[0]
        # The distance from q to k: heads x head_dim, or head_dim if the 3 is second to last.
        distance = first.shape[-1] * (first.shape[-2] if ctx.dim == -3 else 1)
        shape, stride = list(first.shape), list(first.stride())
        at = len(shape) + 1 + ctx.dim
        shape.insert(at, len(gradients))
        stride.insert(at, distance)
        in_one_buffer = stride == _contiguous_stride(shape) and all(
            gradient.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and gradient.stride() == first.stride()
            and gradient.storage_offset() == first.storage_offset() + index * distance
            for index, gradient in enumerate(gradients)
        )
        if in_one_buffer:
            return first.as_strided(shape, stride, first.storage_offset()), None
        return torch.stack(gradients, dim=ctx.dim), None


def _contiguous_stride(shape: list[int]) -> list[int]:
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * size)
    return stride

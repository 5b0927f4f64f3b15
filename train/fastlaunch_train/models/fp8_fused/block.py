"""A pre-norm transformer block in FP8 or bf16, as two autograd functions around attention.

`FusedBlock` has the parameters of timm's block, under the same names, and computes as that does outside
`fused_passes`. Inside, blocks hand each other the residual stream and the last branch separately, since the
next norm adds them:

    total, q, k, v = NormQkv(x, branch)          total = x + branch
    attended       = attend(q, k, v)             in bf16
    x, branch      = ProjMlp(total, attended)    x = total + proj(attended)

Products are in E4M3 forward and with E5M2 gradients, with delayed scaling, or all in bf16; the residual
stream is bf16, weights and their gradients fp32, GELU by tanh: the numerics of Transformer Engine's
TransformerLayer.
Gradients come block by block, so that DDP sends them while the others are computed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fastlaunch_train.models.fp8_fused import reference
from fastlaunch_train.models.fp8_fused.attention import attend, has_own_backward, side_by_side
from fastlaunch_train.models.fp8_fused.context import passes_for, uses_fused_passes
from fastlaunch_train.models.fp8_fused.delayed_scaling import WEIGHTS, DelayedScaling, Slot
from fastlaunch_train.models.fp8_fused.reference import E4M3, E5M2
from fastlaunch_train.models.fp8_fused.weights import RoundedWeights
from fastlaunch_train.models.te_blocks import te_arguments
from fastlaunch_train.recipes.recipe import Recipe, RecipeError, refuse
from fastlaunch_train.recipes.rules import width_problem

#: The width of the kernels' tiles over an MLP's hidden values.
_TILE_WIDTH = 256
#: FP8 products take only multiples of this number of rows (samples x tokens); see `rules.batch_multiple`.
_ROW_MULTIPLE = 16

Stream = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def _product(
    a: torch.Tensor, b: torch.Tensor, inverse_a: torch.Tensor | None, inverse_b: torch.Tensor | None,
    bias: torch.Tensor | None = None, *, fast: bool, dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:  # fmt: skip
    """Return a (m, k) times b (n, k) transposed, in `dtype`.

    fast: accumulate FP8 products in fewer bits, as forward products do. In bf16 a gradient of weights is in
    fp32 from torch 2.8 on; older releases round it to bf16.
    """
    if a.device.type != "cuda":
        return reference.product(a, b, inverse_a, inverse_b, bias, dtype)
    if inverse_a is not None and inverse_b is not None:
        return torch._scaled_mm(a, b.t(), inverse_a, inverse_b, bias, None, dtype, use_fast_accum=fast)
    if bias is not None:
        return torch.addmm(bias, a, b.t())
    if dtype == a.dtype:
        return a @ b.t()
    if hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(a, b.t(), out_dtype=dtype)
    return (a @ b.t()).to(dtype)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The number of a block, and what it needs besides tensors."""

    scaling: DelayedScaling | None  # None in bf16, which needs none
    #: Scales of the weights, the same ones unless the optimizer's pass rounds them.
    weight_scaling: DelayedScaling | None
    rounded: RoundedWeights | None  # by the optimizer's pass, if they match the weights
    block: int
    record: bool  # magnitudes; not while the model is evaluated
    fast_dgrad: bool
    eps: float

    def slot(self, slot: Slot) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.dtype]:
        """Return the scale, the amax and the dtype to round to."""
        scaling = self._scaling_of(slot)
        if scaling is None:
            return None, None, torch.bfloat16
        dtype = E5M2 if slot >= Slot.FC2_GRADIENT else E4M3
        return *scaling.slot(self.block, slot, record=self.record), dtype

    def inverse(self, slot: Slot) -> torch.Tensor | None:
        scaling = self._scaling_of(slot)
        return None if scaling is None else scaling.inverse_of(self.block, slot)

    def _scaling_of(self, slot: Slot) -> DelayedScaling | None:
        return self.weight_scaling if slot in WEIGHTS else self.scaling

    def weight(self, slot: Slot, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight rounded, and transposed."""
        return self.rounded[self.block, slot] if self.rounded else self.cast(slot, weight)[:2]

    def cast(
        self, slot: Slot, *parts: torch.Tensor, sums: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        out, transposed, summed = passes_for(parts[0]).cast_transpose(parts, *self.slot(slot), sums=sums)
        return out, transposed, summed


class NormQkv(torch.autograd.Function):
    """Computes x + branch, and q, k, v (samples, heads, tokens, width / heads) of its norm.

    x, branch: (samples, tokens, width) in bf16; branch may be None. Weights in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, branch: torch.Tensor | None, norm_weight: torch.Tensor,
        norm_bias: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, num_heads: int, place: _Place,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        samples, tokens, width = x.shape
        rows = x.reshape(-1, width)
        total, normed, normed_t, mean, rstd = passes_for(x).norm_forward(
            rows, None if branch is None else branch.reshape(-1, width), norm_weight, norm_bias, place.eps,
            *place.slot(Slot.NORM1),
        )  # fmt: skip
        weight8, weight8_t = place.weight(Slot.QKV_WEIGHT, weight)
        packed = _product(
            normed, weight8, place.inverse(Slot.NORM1), place.inverse(Slot.QKV_WEIGHT), bias.to(x.dtype),
            fast=True,
        )  # fmt: skip
        ctx.save_for_backward(total, normed_t, mean, rstd, norm_weight, weight8_t)
        ctx.place, ctx.has_branch = place, branch is not None
        q, k, v = packed.view(samples, tokens, 3, num_heads, width // num_heads).permute(2, 0, 3, 1, 4)
        # x is returned as a view, so that autograd sees a new tensor and not an input.
        return total.view(samples, tokens, width) if branch is not None else x.view_as(x), q, k, v

    @staticmethod
    def backward(ctx: Any, dtotal: torch.Tensor, *gradients: torch.Tensor) -> tuple[Any, ...]:
        total, normed_t, mean, rstd, norm_weight, weight8_t = ctx.saved_tensors
        place: _Place = ctx.place
        dqkv, dqkv_t, dbias = place.cast(Slot.QKV_GRADIENT, *_rows_of(gradients), sums=True)
        of_gradient, of_weight = place.inverse(Slot.QKV_GRADIENT), place.inverse(Slot.QKV_WEIGHT)
        dnormed = _product(dqkv, weight8_t, of_gradient, of_weight, fast=place.fast_dgrad)
        dweight = _weight_gradient(dqkv_t, normed_t, of_gradient, place.inverse(Slot.NORM1))
        skip = dtotal.flatten(0, 1)
        dx, dnorm_weight, dnorm_bias = passes_for(total).norm_backward(
            dnormed, total, skip, norm_weight, mean, rstd
        )
        dx = dx.view(dtotal.shape)
        branch = dx if ctx.has_branch else None
        return dx, branch, dnorm_weight, dnorm_bias, dweight, dbias, None, None


class ProjMlp(torch.autograd.Function):
    """Computes x = total + proj(attended), and the MLP of its norm; all (samples, tokens, width) in bf16."""

    @staticmethod
    def forward(
        ctx: Any, total: torch.Tensor, attended: torch.Tensor, proj_weight: torch.Tensor,
        proj_bias: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor,
        fc1_weight: torch.Tensor, fc1_bias: torch.Tensor, fc2_weight: torch.Tensor, fc2_bias: torch.Tensor,
        place: _Place,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        shape, width, dtype = total.shape, total.shape[-1], total.dtype
        passes, inverse = passes_for(total), place.inverse
        attended8, attended8_t, _ = place.cast(Slot.ATTENTION, attended.reshape(-1, width))
        proj8, proj8_t = place.weight(Slot.PROJ_WEIGHT, proj_weight)
        branch = _product(
            attended8,
            proj8,
            inverse(Slot.ATTENTION),
            inverse(Slot.PROJ_WEIGHT),
            proj_bias.to(dtype),
            fast=True,
        )
        x, normed, normed_t, mean, rstd = passes.norm_forward(
            total.reshape(-1, width), branch, norm_weight, norm_bias, place.eps, *place.slot(Slot.NORM2)
        )
        fc18, fc18_t = place.weight(Slot.FC1_WEIGHT, fc1_weight)
        hidden = _product(
            normed, fc18, inverse(Slot.NORM2), inverse(Slot.FC1_WEIGHT), fc1_bias.to(dtype), fast=True
        )
        activated, activated_t = passes.gelu_forward(hidden, *place.slot(Slot.GELU))
        fc28, fc28_t = place.weight(Slot.FC2_WEIGHT, fc2_weight)
        branch = _product(
            activated, fc28, inverse(Slot.GELU), inverse(Slot.FC2_WEIGHT), fc2_bias.to(dtype), fast=True
        )
        ctx.save_for_backward(
            attended8_t, proj8_t, x, normed_t, mean, rstd, norm_weight, fc18_t, hidden, activated_t, fc28_t
        )
        ctx.place = place
        return x.view(shape), branch.view(shape)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor, dbranch: torch.Tensor) -> tuple[Any, ...]:
        attended8_t, proj8_t, x, normed_t, mean, rstd, norm_weight, fc18_t, hidden, activated_t, fc28_t = (
            ctx.saved_tensors
        )
        place: _Place = ctx.place
        passes, inverse, fast = passes_for(x), place.inverse, place.fast_dgrad
        width = x.shape[1]
        d2, d2_t, dfc2_bias = place.cast(Slot.FC2_GRADIENT, dbranch.reshape(-1, width), sums=True)
        of_gradient = inverse(Slot.FC2_GRADIENT)
        dactivated = _product(d2, fc28_t, of_gradient, inverse(Slot.FC2_WEIGHT), fast=fast)
        dfc2 = _weight_gradient(d2_t, activated_t, of_gradient, inverse(Slot.GELU))
        d1, d1_t, dfc1_bias = passes.gelu_backward(dactivated, hidden, *place.slot(Slot.FC1_GRADIENT))
        of_gradient = inverse(Slot.FC1_GRADIENT)
        dnormed = _product(d1, fc18_t, of_gradient, inverse(Slot.FC1_WEIGHT), fast=fast)
        dfc1 = _weight_gradient(d1_t, normed_t, of_gradient, inverse(Slot.NORM2))
        dtotal, dnorm_weight, dnorm_bias = passes.norm_backward(
            dnormed, x, dx.reshape(-1, width), norm_weight, mean, rstd
        )
        dp, dp_t, dproj_bias = place.cast(Slot.PROJ_GRADIENT, dtotal, sums=True)
        of_gradient = inverse(Slot.PROJ_GRADIENT)
        dattended = _product(dp, proj8_t, of_gradient, inverse(Slot.PROJ_WEIGHT), fast=fast)
        dproj = _weight_gradient(dp_t, attended8_t, of_gradient, inverse(Slot.ATTENTION))
        return (
            *(dtotal.view(dx.shape), dattended.view(dx.shape), dproj, dproj_bias),
            *(dnorm_weight, dnorm_bias, dfc1, dfc1_bias, dfc2, dfc2_bias, None),
        )


def _rows_of(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return gradients of q, k and v as (rows, width) each, or as one (rows, 3 * width) that holds them."""
    packed = side_by_side(parts)
    if packed is not None:
        return (packed.flatten(0, 1),)
    return tuple(part.transpose(1, 2).flatten(2).flatten(0, 1) for part in parts)


def _weight_gradient(
    gradient_t: torch.Tensor, x_t: torch.Tensor, of_gradient: torch.Tensor | None, of_x: torch.Tensor | None
) -> torch.Tensor:
    return _product(gradient_t, x_t, of_gradient, of_x, fast=False, dtype=torch.float32)


class FusedBlock(nn.Module):
    """A timm block, computed by fused passes inside `fused_passes`; it keeps the block's parameters.

    Takes (samples, tokens, width), or what the block before returned: the residual stream and the last
    branch, which are still to be added. The last block returns their sum.
    """

    def __init__(
        self,
        block: nn.Module,
        scaling: DelayedScaling | None,
        rounded: RoundedWeights | None,
        index: int,
        recipe: Recipe,
        *,
        is_last: bool,
    ) -> None:
        super().__init__()
        for name, part in block.named_children():
            self.add_module(name, part)
        # All blocks share them, and the first holds their buffers.
        if index == 0 and scaling:
            self.scaling = scaling
            if rounded:
                self.weight_scaling = rounded.scaling
        self.__dict__["_shared"] = scaling
        #: See `weights`; None if each forward pass rounds the weights.
        self.rounded_weights = rounded
        self._index, self._is_last = index, is_last
        self._fast_dgrad = recipe.dgrad_accumulation == "fast"
        self._class_token_alone = is_last and recipe.last_block == "class_token"
        self._num_tokens = 0
        #: Whether attention's gradients are computed by our kernel, once it has run.
        self.has_own_backward = False
        self.train(block.training)

    def forward(self, stream: Stream) -> Stream:
        """Return the residual stream and the last branch, or their sum: natively, and in the last block."""
        x, branch = stream if isinstance(stream, tuple) else (stream, None)
        if not uses_fused_passes():
            assert branch is None
            return self._native(x)
        scaling: DelayedScaling | None = self.__dict__["_shared"]
        record = self.training and torch.is_grad_enabled()
        rounded = self.rounded_weights
        if self._index == 0:
            if scaling and record:
                scaling.update()
            if rounded:
                rounded.check(refresh=record)
        self._num_tokens = x.shape[1]
        parts: Any = self
        if x.shape[0] * x.shape[1] % _ROW_MULTIPLE:
            raise RecipeError(
                f"fused passes take multiples of {_ROW_MULTIPLE} rows, not {x.shape[0]} samples of "
                f"{x.shape[1]} tokens",
                f"give a --batch-size that is a multiple of {_ROW_MULTIPLE}",
            )
        place = _Place(
            scaling=scaling,
            weight_scaling=rounded.scaling if rounded else scaling,
            rounded=rounded if rounded and rounded.is_current else None,
            block=self._index,
            record=record,
            fast_dgrad=self._fast_dgrad,
            eps=parts.norm1.eps,
        )
        attn, mlp = parts.attn, parts.mlp
        with torch.autocast(x.device.type, enabled=False):
            total, q, k, v = NormQkv.apply(  # type: ignore[no-untyped-call]
                x.to(torch.bfloat16), branch, parts.norm1.weight, parts.norm1.bias, attn.qkv.weight,
                attn.qkv.bias, attn.num_heads, place,
            )  # fmt: skip
            self.has_own_backward = has_own_backward(q, k, v)
            attended = attend(q, k, v, own_backward=self.has_own_backward)
            attended = attended.transpose(1, 2).reshape(total.shape)
            if self._class_token_alone:
                # No other row reaches the head.
                total, attended = total[:, :1].contiguous(), attended[:, :1].contiguous()
            x, branch = ProjMlp.apply(  # type: ignore[no-untyped-call]
                total, attended, attn.proj.weight, attn.proj.bias, parts.norm2.weight,
                parts.norm2.bias, mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias, place,
            )  # fmt: skip
        return x + branch if self._is_last else (x, branch)

    @property
    def flops_left_out(self) -> int:
        """Return the operations of a sample's training step that this block leaves out, once it has run."""
        if not self._class_token_alone:
            return 0
        parts: Any = self
        weights = (parts.attn.proj.weight, parts.mlp.fc1.weight, parts.mlp.fc2.weight)
        # A multiplication and an addition each, forward and in both gradients.
        return 6 * (self._num_tokens - 1) * sum(int(weight.numel()) for weight in weights)

    def _native(self, x: torch.Tensor) -> torch.Tensor:
        """Compute as timm's block does."""
        parts: Any = self
        x = x + parts.attn(parts.norm1(x))
        return x + parts.mlp(parts.norm2(x))  # type: ignore[no-any-return]


def check_blocks(blocks: Iterable[nn.Module], recipe: Recipe) -> None:
    """Raise RecipeError for blocks that compute something else, or whose sizes do not fit."""
    for block in blocks:
        _check_drops(block)
        te_arguments(block)  # raises RecipeError for what neither computes
        mlp: Any = block.get_submodule("mlp")
        refuse(width_problem(recipe, mlp.fc1.in_features), f"recipe {recipe.label}")
        if mlp.fc1.out_features % _TILE_WIDTH:
            raise RecipeError(
                f"fused blocks need an MLP whose width is a multiple of {_TILE_WIDTH}, and it is "
                f"{mlp.fc1.out_features}",
                "use te-fp8, or another model",
            )


def replace_blocks(blocks: nn.ModuleList | nn.Sequential, recipe: Recipe) -> None:
    """Replace timm's blocks, which have to be called one after the other, by fused blocks.

    Raises RecipeError, as `check_blocks` does.
    """
    check_blocks(blocks, recipe)
    device = next(blocks.parameters()).device
    in_fp8 = recipe.precision == "fp8"
    scaling = DelayedScaling(len(blocks), recipe.amax_history, device) if in_fp8 else None
    rounded = None
    if recipe.weight_cast == "optimizer":
        weights = {(index, slot): of for index, block in enumerate(blocks) for slot, of in _weights(block)}
        rounded = RoundedWeights(weights, DelayedScaling(len(blocks), recipe.amax_history, device))
    for index, block in enumerate(blocks):
        blocks[index] = FusedBlock(block, scaling, rounded, index, recipe, is_last=index == len(blocks) - 1)


def _weights(block: Any) -> Iterator[tuple[Slot, nn.Parameter]]:
    linears = block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2
    yield from zip(WEIGHTS, (linear.weight for linear in linears), strict=True)


def _check_drops(block: nn.Module) -> None:
    """Raise RecipeError for a block that drops anything, which Transformer Engine's may."""
    for name, module in block.named_modules():
        if getattr(module, "p", 0.0) or getattr(module, "drop_prob", 0.0):
            raise RecipeError(
                f"fused blocks drop nothing, and this model drops in {name}", "use te-fp8, or drop rates of 0"
            )


class PatchProduct(nn.Conv2d):
    """A convolution whose stride is its kernel's size, computed as one matrix product.

    cuDNN's convolution of 16 x 16 patches and its weight gradient take longer.
    """

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return (samples, width, rows, columns) of images (samples, channels, height, width)."""
        samples, channels, height, width = images.shape
        down, across = self.kernel_size
        rows, columns = height // down, width // across
        images = images[:, :, : rows * down, : columns * across]
        patches = images.reshape(samples, channels, rows, down, columns, across).permute(0, 2, 4, 1, 3, 5)
        patches = patches.reshape(samples * rows * columns, channels * down * across)
        embedded = functional.linear(patches, self.weight.flatten(1), self.bias)
        return embedded.view(samples, rows, columns, -1).permute(0, 3, 1, 2)


def patches_by_product(model: nn.Module) -> None:
    """Turn the patch embedding of a timm ViT into a product, in place; other embeddings stay."""
    conv = getattr(getattr(model, "patch_embed", None), "proj", None)
    if (
        type(conv) is nn.Conv2d
        and conv.stride == conv.kernel_size
        and conv.groups == 1
        and set(conv.padding) <= {0}
        and set(conv.dilation) == {1}
    ):
        conv.__class__ = PatchProduct

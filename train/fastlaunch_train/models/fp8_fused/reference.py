"""The passes of an FP8 block in plain torch: what the kernels compute, and what runs where there is no GPU.

All take tensors of two dimensions, (rows, width), rows being samples x tokens, and `scale` and `amax` of one
element each: values are multiplied by `scale` before they are rounded to FP8, and `amax` becomes the largest
magnitude that it or the tensor has.
"""

import torch
from torch.nn import functional

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: The largest value of each format.
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def norm_forward(
    x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor, eps: float,
    scale: torch.Tensor, amax: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return x + branch in bf16, its LayerNorm in E4M3 and transposed, and rows' mean and 1 / deviation."""
    total = x if branch is None else (x.float() + branch.float()).to(x.dtype)
    variance, mean = torch.var_mean(total.float(), dim=1, correction=0)
    rstd = torch.rsqrt(variance + eps)
    normed = (total.float() - mean[:, None]) * rstd[:, None] * weight + bias
    return total, *_to_fp8(normed, scale, amax, E4M3), mean, rstd


def norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, skip: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the gradient of LayerNorm's input plus `skip`, in bf16, and those of its weight and bias."""
    dy = gradient.float()
    normed = (x.float() - mean[:, None]) * rstd[:, None]
    scaled = dy * weight
    along = (scaled * normed).mean(1, keepdim=True)
    dx = (scaled - normed * along - scaled.mean(1, keepdim=True)) * rstd[:, None] + skip.float()
    return dx.to(x.dtype), (dy * normed).sum(0), dy.sum(0)


def gelu_forward(hidden: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return GELU of `hidden`, by tanh, in E4M3 and transposed."""
    return _to_fp8(functional.gelu(hidden.float(), approximate="tanh"), scale, amax, E4M3)


def gelu_backward(
    gradient: torch.Tensor, hidden: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the gradient of GELU's input in E5M2, transposed, and summed over the rows."""
    with torch.enable_grad():
        leaf = hidden.detach().float().requires_grad_()
        (slope,) = torch.autograd.grad(functional.gelu(leaf, approximate="tanh").sum(), leaf)
    product = gradient.float() * slope
    return *_to_fp8(product, scale, amax, E5M2), product.sum(0)


def cast_transpose(
    parts: tuple[torch.Tensor, ...],
    scale: torch.Tensor,
    amax: torch.Tensor,
    dtype: torch.dtype,
    *,
    sums: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the parts side by side in FP8, transposed, and if asked for their sums over the rows."""
    whole = torch.cat([part.float() for part in parts], dim=1)
    return *_to_fp8(whole, scale, amax, dtype), whole.sum(0) if sums else None


def sgd_cast(
    weight: torch.Tensor, gradient: torch.Tensor, velocity: torch.Tensor | None, out: torch.Tensor,
    transposed: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, *, lr: float, momentum: float,
    decay: float,
) -> None:  # fmt: skip
    """Do a step of SGD on `weight` and its momentum's buffer, and write the new weight to `out` in E4M3."""
    step = gradient + decay * weight
    if velocity is not None:
        step = velocity.mul_(momentum).add_(step)
    weight.sub_(lr * step)
    for target, value in zip((out, transposed), _to_fp8(weight, scale, amax, E4M3), strict=True):
        target.copy_(value)


def product(
    a: torch.Tensor, b: torch.Tensor, inverse_a: torch.Tensor, inverse_b: torch.Tensor,
    bias: torch.Tensor | None, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Return a (m, k) times b (n, k) transposed, plus bias (n,), of FP8 values and their inverse scales."""
    result = (a.float() * inverse_a) @ (b.float() * inverse_b).t()
    return (result if bias is None else result + bias.float()).to(dtype)


def _to_fp8(
    values: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.maximum(amax, values.abs().amax().reshape(amax.shape), out=amax)
    limit = LARGEST[dtype]
    rounded = (values * scale).clamp(-limit, limit).to(dtype)
    return rounded, rounded.t().contiguous()

"""The passes of a fused block in plain torch: the kernels compute the same, and these run without a GPU.

All take tensors of two dimensions, (rows, width), rows being samples x tokens. Operands of products
are returned as (rows, width) in `dtype`, and transposed. Values are multiplied by `scale` and rounded to FP8,
and `amax` becomes the largest magnitude of itself and the tensor; both have one element. In bf16 there is
neither, and the transpose is a view.
"""

import torch
from torch.nn import functional

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: The largest value of each FP8 format.
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def norm_forward(
    x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor, eps: float,
    scale: torch.Tensor | None, amax: torch.Tensor | None, dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return x + branch in bf16, its LayerNorm in `dtype`, transposed, and rows' mean and 1 / deviation."""
    total = x if branch is None else (x.float() + branch.float()).to(x.dtype)
    variance, mean = torch.var_mean(total.float(), dim=1, correction=0)
    rstd = torch.rsqrt(variance + eps)
    normed = (total.float() - mean[:, None]) * rstd[:, None] * weight + bias
    return total, *_both(normed, scale, amax, dtype), mean, rstd


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


def gelu_forward(
    hidden: torch.Tensor, scale: torch.Tensor | None, amax: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Return GELU of `hidden`, by tanh, in `dtype` and transposed."""
    return _both(functional.gelu(hidden.float(), approximate="tanh"), scale, amax, dtype)


def gelu_backward(
    gradient: torch.Tensor, hidden: torch.Tensor, scale: torch.Tensor | None, amax: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the gradient of GELU's input in `dtype`, transposed, and summed over the rows."""
    with torch.enable_grad():
        leaf = hidden.detach().float().requires_grad_()
        (slope,) = torch.autograd.grad(functional.gelu(leaf, approximate="tanh").sum(), leaf)
    product = gradient.float() * slope
    return *_both(product, scale, amax, dtype), product.sum(0)


def cast_transpose(
    parts: tuple[torch.Tensor, ...],
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    sums: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the parts side by side in `dtype`, their transpose, and on request their sums over the rows."""
    whole = torch.cat([part.float() for part in parts], dim=1)
    return *_both(whole, scale, amax, dtype), whole.sum(0) if sums else None


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
    for target, value in zip((out, transposed), _both(weight, scale, amax, E4M3), strict=True):
        target.copy_(value)


def attention_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention, of the shape of q (samples, heads, tokens, head_dim), and its logarithms.

    The logarithms, (samples, heads, tokens) in fp32, are those of each query's sum of exponentials, of scores
    scaled by head_dim ** -0.5.
    """
    scores = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    lse = scores.logsumexp(-1)
    return (torch.exp(scores - lse[..., None]) @ v.float()).to(q.dtype), lse


def attention_backward(
    qkv: torch.Tensor, out: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor, num_heads: int
) -> torch.Tensor:
    """Return the gradient of qkv, of its shape.

    qkv: (samples, tokens, 3 * width), queries, keys and values side by side. out, dout: (samples, tokens,
    width). All contiguous. lse: what `attention_forward` returned.
    """
    samples, tokens, width = out.shape
    head_dim = width // num_heads
    q, k, v = qkv.float().view(samples, tokens, 3, num_heads, head_dim).permute(2, 0, 3, 1, 4)
    o, g = (of.float().view(samples, tokens, num_heads, head_dim).transpose(1, 2) for of in (out, dout))
    scale = head_dim**-0.5
    p = torch.exp(q @ k.mT * scale - lse.view(samples, num_heads, tokens, 1))
    dscores = p * (g @ v.mT - (o * g).sum(-1, keepdim=True)) * scale
    parts = torch.stack((dscores @ k, dscores.mT @ q, p.mT @ g))
    return parts.permute(1, 3, 0, 2, 4).reshape(qkv.shape).to(qkv.dtype)


def product(
    a: torch.Tensor, b: torch.Tensor, inverse_a: torch.Tensor | None, inverse_b: torch.Tensor | None,
    bias: torch.Tensor | None, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Return a (m, k) times b (n, k) transposed, plus bias (n,); FP8 values need their inverse scales."""
    left, right = (
        values.float() if inverse is None else values.float() * inverse
        for values, inverse in ((a, inverse_a), (b, inverse_b))
    )
    result = left @ right.t()
    return (result if bias is None else result + bias.float()).to(dtype)


def _both(
    values: torch.Tensor, scale: torch.Tensor | None, amax: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    if scale is None or amax is None:
        rounded = values.to(dtype)
        return rounded, rounded.t()
    torch.maximum(amax, values.abs().amax().reshape(amax.shape), out=amax)
    limit = LARGEST[dtype]
    rounded = (values * scale).clamp(-limit, limit).to(dtype)
    return rounded, rounded.t().contiguous()

"""The passes of a fused block, in Triton: whatever writes FP8 also writes its transpose.

An FP8 product needs both operands with the inner dimension last, so that a gradient product needs the
transpose of what the forward product read. Each kernel here reads a bf16 tensor once and writes both.

In bf16, products take a transposed view, so that the kernels write one tensor, without a scale.

FP8 tiles are not transposed as bytes: Triton 3.6.0 writes wrong ones at some tile sizes. Four rows are packed
into a word of 32 bits, the words are transposed, and each is four neighbours of a transposed row. So the
number of rows has to be a multiple of 4; FP8 products need a multiple of 16.

Where it pays, the next tile or row is loaded before this one is stored: no compiler moves a load over a store
that might be to the same memory, and the memory would be idle in between. Casts by themselves take 2 to 5%
longer with it, because it needs more registers.

Tile sizes are those that were fastest at 50,432 rows on an H200 (docs/results/fp8-fused.md).
tests/gpu/test_gpu_fp8_fused.py checks every kernel, at the sizes it ships with, against `reference`.
"""

from typing import Any

import torch
import triton
import triton.language as tl

E5M2 = torch.float8_e5m2
#: Rows, columns, the number of tiles if a program goes down several, and warps.
_NORM, _SGD = (32, 256, 8), (64, 64, 4)
_GELU, _GELU_BACKWARD, _CAST = (128, 64, 1, 8), (64, 64, 8, 4), (128, 64, 4, 4)
#: The n programs of LayerNorm's backward pass, each of which does every n-th row, and their warps.
_NORM_BACKWARD = (528, 4)
_TO_E4M3, _TO_E5M2 = (
    tl.constexpr(
        f"{{.reg .b16 l, h; cvt.rn.satfinite.{kind}x2.f32 l, $2, $1;"
        f" cvt.rn.satfinite.{kind}x2.f32 h, $4, $3; mov.b32 $0, {{l, h}};}}"
    )
    for kind in ("e4m3", "e5m2")
)
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_CUBIC = tl.constexpr(0.035677408136300125)  # of tanh's argument: 0.044715 x sqrt(2 / pi)


@triton.jit
def _tanh(x):
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _gelu(x):
    half = 0.5 * x
    return half * _tanh(x * (_CUBIC * x * x + _SQRT_2_OVER_PI)) + half


@triton.jit
def _gelu_slope(x):
    square = x * x
    tanh = _tanh(x * (_CUBIC * square + _SQRT_2_OVER_PI))
    slope = 0.5 * x * (3.0 * _CUBIC * square + _SQRT_2_OVER_PI)
    return slope * (1.0 - tanh * tanh) + (0.5 * tanh + 0.5)


@triton.jit
def _pack(a, b, c, d, ROUND: tl.constexpr):
    """Return four values in FP8 as a word, a in its lowest byte."""
    return tl.inline_asm_elementwise(ROUND, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _store_both(
    out, transposed, first_row, columns, num_rows, width, a, b, c, d, scale, ROWS: tl.constexpr,
    E5: tl.constexpr,
):  # fmt: skip
    """Store four rows of each group, a to d, scaled, in FP8 and transposed; return their largest magnitudes.

    out: (num_rows, width). transposed: (width, num_rows / 4) words, or None: then `out` is in bf16, without a
    scale. columns: the tile's, in both.
    """
    group = tl.arange(0, ROWS // 4)
    rows = first_row + 4 * group
    inside = (rows < num_rows)[:, None]
    place = out + rows.to(tl.int64)[:, None] * width + columns[None, :]
    kind = out.dtype.element_ty
    tl.store(place, (a * scale).to(kind), mask=inside)
    tl.store(place + width, (b * scale).to(kind), mask=inside)
    tl.store(place + 2 * width, (c * scale).to(kind), mask=inside)
    tl.store(place + 3 * width, (d * scale).to(kind), mask=inside)
    if transposed is not None:
        words = _pack(a * scale, b * scale, c * scale, d * scale, _TO_E5M2 if E5 else _TO_E4M3)
        word = first_row // 4 + group
        place = transposed + columns.to(tl.int64)[:, None] * (num_rows // 4) + word[None, :]
        tl.store(place, tl.trans(words), mask=(word < num_rows // 4)[None, :])
    return tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))


@triton.jit
def _load_rows(source, rows, columns, end, width):
    """Return a tile's rows as they are stored, and 0 from row `end` on."""
    place = source + rows.to(tl.int64)[:, None] * width + columns[None, :]
    return tl.load(place, mask=(rows < end)[:, None], other=0.0)


@triton.jit
def _load_four(source, first_row, columns, end, width, ROWS: tl.constexpr):
    """Return four rows of each group, as they are stored."""
    rows = first_row + 4 * tl.arange(0, ROWS // 4)
    return (
        _load_rows(source, rows, columns, end, width),
        _load_rows(source, rows + 1, columns, end, width),
        _load_rows(source, rows + 2, columns, end, width),
        _load_rows(source, rows + 3, columns, end, width),
    )


@triton.jit
def _load_scale(scale):
    return 1.0 if scale is None else tl.load(scale)


@triton.jit
def _record_amax(amax, largest):
    if amax is not None:
        tl.atomic_max(amax, tl.max(tl.max(largest, 1), 0), sem="relaxed")


@triton.jit
def _load_summands(x, branch, rows, columns, num_rows, width, HAS_BRANCH: tl.constexpr):
    """Return a tile of x and of the branch; without one, of x twice."""
    tile = _load_rows(x, rows, columns, num_rows, width)
    return tile, _load_rows(branch, rows, columns, num_rows, width) if HAS_BRANCH else tile


@triton.jit
def _sum_eights(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the sum of each eight neighbours in a row, which one thread holds."""
    return tl.sum(tl.reshape(tile, [ROWS, COLUMNS // 8, 8]), 2)


@triton.jit
def _norm_forward(
    x, branch, total, weight, bias, out, transposed, mean_out, rstd_out, scale_in, amax, num_rows, eps,
    WIDTH: tl.constexpr, HAS_BRANCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0) * ROWS
    rows = first_row + tl.arange(0, ROWS)
    inside = rows < num_rows
    columns = tl.arange(0, COLUMNS)
    next_x, next_branch = _load_summands(x, branch, rows, columns, num_rows, WIDTH, HAS_BRANCH)
    sums = tl.zeros([ROWS, COLUMNS // 8], tl.float32)
    squares = tl.zeros([ROWS, COLUMNS // 8], tl.float32)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        value, summand = next_x, next_branch
        if start + COLUMNS < WIDTH:
            following = start + COLUMNS + columns
            next_x, next_branch = _load_summands(x, branch, rows, following, num_rows, WIDTH, HAS_BRANCH)
        if HAS_BRANCH:
            value = (value.to(tl.float32) + summand.to(tl.float32)).to(tl.bfloat16)
            place = total + rows.to(tl.int64)[:, None] * WIDTH + (start + columns)[None, :]
            tl.store(place, value, mask=inside[:, None])
        value = value.to(tl.float32)
        # Distances are from the first tile's mean: sums of squares of far-off values would cancel out.
        if start == 0:
            pivot = tl.sum(value, 1)[:, None] / COLUMNS
        distance = value - pivot
        sums += _sum_eights(distance, ROWS, COLUMNS)
        squares += _sum_eights(distance * distance, ROWS, COLUMNS)
    offset = tl.sum(sums, 1) / WIDTH
    # Rounding may leave a constant row's just below 0.
    variance = tl.maximum(tl.sum(squares, 1) / WIDTH - offset * offset, 0.0)
    tl.store(mean_out + rows, tl.reshape(pivot, [ROWS]) + offset, mask=inside)
    tl.store(rstd_out + rows, tl.rsqrt(variance + eps), mask=inside)
    # The rows are read again in groups of four, by other threads.
    tl.debug_barrier()
    source = total if HAS_BRANCH else x
    next_tile = _load_four(source, first_row, columns, num_rows, WIDTH, ROWS)
    scale = _load_scale(scale_in)
    rows = first_row + 4 * tl.arange(0, ROWS // 4)
    inside = rows < num_rows
    mean_a = tl.load(mean_out + rows, mask=inside, other=0.0)[:, None]
    mean_b = tl.load(mean_out + rows + 1, mask=inside, other=0.0)[:, None]
    mean_c = tl.load(mean_out + rows + 2, mask=inside, other=0.0)[:, None]
    mean_d = tl.load(mean_out + rows + 3, mask=inside, other=0.0)[:, None]
    rstd_a = tl.load(rstd_out + rows, mask=inside, other=0.0)[:, None]
    rstd_b = tl.load(rstd_out + rows + 1, mask=inside, other=0.0)[:, None]
    rstd_c = tl.load(rstd_out + rows + 2, mask=inside, other=0.0)[:, None]
    rstd_d = tl.load(rstd_out + rows + 3, mask=inside, other=0.0)[:, None]
    largest = tl.zeros([ROWS // 4, COLUMNS], tl.float32)
    # Each thread loads what its rows need: sharing it would take barriers.
    everywhere = tl.broadcast_to(columns[None, :], [ROWS // 4, COLUMNS])
    for start in tl.static_range(0, WIDTH, COLUMNS):
        a, b, c, d = next_tile
        # This load precedes the next tile's, since a load may wait for those that were issued before it.
        gain = tl.load(weight + start + everywhere)
        shift = tl.load(bias + start + everywhere)
        if start + COLUMNS < WIDTH:
            next_tile = _load_four(source, first_row, start + COLUMNS + columns, num_rows, WIDTH, ROWS)
        a = (a.to(tl.float32) - mean_a) * rstd_a * gain + shift
        b = (b.to(tl.float32) - mean_b) * rstd_b * gain + shift
        c = (c.to(tl.float32) - mean_c) * rstd_c * gain + shift
        d = (d.to(tl.float32) - mean_d) * rstd_d * gain + shift
        tile = _store_both(
            out, transposed, first_row, start + columns, num_rows, WIDTH, a, b, c, d, scale, ROWS, False
        )
        # Rows past the end are the shift alone.
        largest = tl.maximum(largest, tl.where(inside[:, None], tile, 0.0))
    _record_amax(amax, largest)


@triton.jit
def _load_part(gradient, x, skip, row, columns, num_rows, WIDTH: tl.constexpr):
    """Return a part of a row of each, as it is stored; past the last row, any values."""
    place = tl.cast(row, tl.int64) * WIDTH + columns
    inside = row < num_rows
    return (
        tl.load(gradient + place, mask=inside),
        tl.load(x + place, mask=inside),
        tl.load(skip + place, mask=inside),
    )


@triton.jit
def _load_statistics(mean, rstd, row, num_rows):
    return tl.load(mean + row, mask=row < num_rows), tl.load(rstd + row, mask=row < num_rows)


@triton.jit
def _add_pairs(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def _norm_backward(
    gradient, x, skip, weight, mean_in, rstd_in, out, partial, num_rows, NUM_PROGRAMS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Hold one row at a time in registers, LEFT + RIGHT wide, since Triton's ranges are powers of 2."""
    WIDTH: tl.constexpr = LEFT + RIGHT
    left = tl.arange(0, LEFT)
    right = LEFT + tl.arange(0, RIGHT)
    gain_l, gain_r = tl.load(weight + left), tl.load(weight + right)
    dgain_l, dshift_l = tl.zeros([LEFT], tl.float32), tl.zeros([LEFT], tl.float32)
    dgain_r, dshift_r = tl.zeros([RIGHT], tl.float32), tl.zeros([RIGHT], tl.float32)
    first = tl.program_id(0)
    next_l = _load_part(gradient, x, skip, first, left, num_rows, WIDTH)
    next_r = _load_part(gradient, x, skip, first, right, num_rows, WIDTH)
    next_statistics = _load_statistics(mean_in, rstd_in, first, num_rows)
    for row in range(first, num_rows, NUM_PROGRAMS):
        dy_l, x_l, skip_l = next_l
        dy_r, x_r, skip_r = next_r
        mean, rstd = next_statistics
        next_l = _load_part(gradient, x, skip, row + NUM_PROGRAMS, left, num_rows, WIDTH)
        next_r = _load_part(gradient, x, skip, row + NUM_PROGRAMS, right, num_rows, WIDTH)
        next_statistics = _load_statistics(mean_in, rstd_in, row + NUM_PROGRAMS, num_rows)
        dy_l, dy_r = dy_l.to(tl.float32), dy_r.to(tl.float32)
        x_l, x_r = (x_l.to(tl.float32) - mean) * rstd, (x_r.to(tl.float32) - mean) * rstd
        scaled_l, scaled_r = dy_l * gain_l, dy_r * gain_r
        # Both sums are reduced at once: each wait for other warps counts.
        along_l, offset_l = tl.reduce((scaled_l * x_l, scaled_l), 0, _add_pairs)
        along_r, offset_r = tl.reduce((scaled_r * x_r, scaled_r), 0, _add_pairs)
        along, offset = (along_l + along_r) / WIDTH, (offset_l + offset_r) / WIDTH
        dx_l = (scaled_l - x_l * along - offset) * rstd + skip_l.to(tl.float32)
        dx_r = (scaled_r - x_r * along - offset) * rstd + skip_r.to(tl.float32)
        place = tl.cast(row, tl.int64) * WIDTH
        tl.store(out + place + left, dx_l.to(tl.bfloat16))
        tl.store(out + place + right, dx_r.to(tl.bfloat16))
        dgain_l += dy_l * x_l
        dgain_r += dy_r * x_r
        dshift_l += dy_l
        dshift_r += dy_r
    place = partial + tl.program_id(0) * (2 * WIDTH)
    tl.store(place + left, dgain_l)
    tl.store(place + right, dgain_r)
    tl.store(place + WIDTH + left, dshift_l)
    tl.store(place + WIDTH + right, dshift_r)


@triton.jit
def _gelu_forward(
    hidden, out, transposed, scale_in, amax, num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    scale = _load_scale(scale_in)
    largest = tl.zeros([ROWS // 4, COLUMNS], tl.float32)
    for tile in range(TILES):
        first_row = (tl.program_id(1) * TILES + tile) * ROWS
        a, b, c, d = _load_four(hidden, first_row, columns, num_rows, WIDTH, ROWS)
        a, b = _gelu(a.to(tl.float32)), _gelu(b.to(tl.float32))
        c, d = _gelu(c.to(tl.float32)), _gelu(d.to(tl.float32))
        magnitudes = _store_both(
            out, transposed, first_row, columns, num_rows, WIDTH, a, b, c, d, scale, ROWS, False
        )
        largest = tl.maximum(largest, magnitudes)
    _record_amax(amax, largest)


@triton.jit
def _gelu_backward(
    gradient, hidden, out, transposed, partial, scale_in, amax, num_rows, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    scale = _load_scale(scale_in)
    sums = tl.zeros([ROWS // 4, COLUMNS], tl.float32)
    largest = tl.zeros([ROWS // 4, COLUMNS], tl.float32)
    first = tl.program_id(1) * (TILES * ROWS)
    end = tl.minimum(first + TILES * ROWS, num_rows)
    next_gradient = _load_four(gradient, first, columns, end, WIDTH, ROWS)
    next_hidden = _load_four(hidden, first, columns, end, WIDTH, ROWS)
    for first_row in range(first, first + TILES * ROWS, ROWS):
        a, b, c, d = next_gradient
        hidden_a, hidden_b, hidden_c, hidden_d = next_hidden
        next_gradient = _load_four(gradient, first_row + ROWS, columns, end, WIDTH, ROWS)
        next_hidden = _load_four(hidden, first_row + ROWS, columns, end, WIDTH, ROWS)
        a = a.to(tl.float32) * _gelu_slope(hidden_a.to(tl.float32))
        b = b.to(tl.float32) * _gelu_slope(hidden_b.to(tl.float32))
        c = c.to(tl.float32) * _gelu_slope(hidden_c.to(tl.float32))
        d = d.to(tl.float32) * _gelu_slope(hidden_d.to(tl.float32))
        sums += (a + b) + (c + d)
        magnitudes = _store_both(
            out, transposed, first_row, columns, num_rows, WIDTH, a, b, c, d, scale, ROWS, True
        )
        largest = tl.maximum(largest, magnitudes)
    tl.store(partial + tl.program_id(1) * WIDTH + columns, tl.sum(sums, 0))
    _record_amax(amax, largest)


@triton.jit
def _cast_transpose(
    x, out, transposed, partial, scale_in, amax, num_rows, WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr,
    OUT_COLUMN: tl.constexpr, SUMS: tl.constexpr, E5: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Write x to the columns of `out`, OUT_WIDTH wide, from OUT_COLUMN on; without `out`, only the sums."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    scale = _load_scale(scale_in)
    sums = tl.zeros([ROWS // 4, COLUMNS], tl.float32)
    largest = tl.zeros([ROWS // 4, COLUMNS], tl.float32)
    for tile in range(TILES):
        first_row = (tl.program_id(1) * TILES + tile) * ROWS
        a, b, c, d = _load_four(x, first_row, columns, num_rows, WIDTH, ROWS)
        a, b, c, d = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)
        if SUMS:
            sums += (a + b) + (c + d)
        if out is not None:
            magnitudes = _store_both(
                out, transposed, first_row, OUT_COLUMN + columns, num_rows, OUT_WIDTH, a, b, c, d, scale,
                ROWS, E5
            )  # fmt: skip
            largest = tl.maximum(largest, magnitudes)
    if SUMS:
        tl.store(partial + tl.program_id(1) * OUT_WIDTH + OUT_COLUMN + columns, tl.sum(sums, 0))
    _record_amax(amax, largest)


@triton.jit
def _sgd_rows(
    weight, gradient, velocity, rows, columns, num_rows, WIDTH: tl.constexpr, lr, momentum, decay,
    HAS_MOMENTUM: tl.constexpr,
):  # fmt: skip
    """Update and store rows of the weight and of its momentum; return the weight's."""
    place = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    inside = (rows < num_rows)[:, None]
    value = _load_rows(weight, rows, columns, num_rows, WIDTH)
    step = _load_rows(gradient, rows, columns, num_rows, WIDTH) + decay * value
    if HAS_MOMENTUM:
        step += momentum * _load_rows(velocity, rows, columns, num_rows, WIDTH)
        tl.store(velocity + place, step, mask=inside)
    value -= lr * step
    tl.store(weight + place, value, mask=inside)
    return value


@triton.jit
def _sgd_cast(
    weight, gradient, velocity, out, transposed, scale_in, amax, lr, momentum, decay, num_rows,
    WIDTH: tl.constexpr, HAS_MOMENTUM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first_row = tl.program_id(1) * ROWS
    rows = first_row + 4 * tl.arange(0, ROWS // 4)
    a = _sgd_rows(
        weight, gradient, velocity, rows, columns, num_rows, WIDTH, lr, momentum, decay, HAS_MOMENTUM
    )
    b = _sgd_rows(
        weight, gradient, velocity, rows + 1, columns, num_rows, WIDTH, lr, momentum, decay, HAS_MOMENTUM
    )
    c = _sgd_rows(
        weight, gradient, velocity, rows + 2, columns, num_rows, WIDTH, lr, momentum, decay, HAS_MOMENTUM
    )
    d = _sgd_rows(
        weight, gradient, velocity, rows + 3, columns, num_rows, WIDTH, lr, momentum, decay, HAS_MOMENTUM
    )
    scale = _load_scale(scale_in)
    largest = _store_both(
        out, transposed, first_row, columns, num_rows, WIDTH, a, b, c, d, scale, ROWS, False
    )
    _record_amax(amax, largest)


@triton.jit
def _sum_rows(partial, out, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, num_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
        sums += tl.load(partial + rows[:, None] * width + columns[None, :], mask=mask, other=0.0)
    tl.store(out + columns, tl.sum(sums, 0), mask=columns < width)


def norm_forward(
    x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor, eps: float,
    scale: torch.Tensor | None, amax: torch.Tensor | None, dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """See `reference.norm_forward`."""
    num_rows, width = x.shape
    rows, columns, warps = _NORM
    total = x if branch is None else torch.empty_like(x)
    out, transposed = _both(x, width, dtype)
    mean, rstd = (torch.empty(num_rows, device=x.device) for _ in range(2))
    _norm_forward[(triton.cdiv(num_rows, rows),)](
        x, x if branch is None else branch, total, weight, bias, out, _words(transposed), mean, rstd, scale,
        amax, num_rows, eps, WIDTH=width, HAS_BRANCH=branch is not None, ROWS=rows, COLUMNS=columns,
        num_warps=warps,
    )  # fmt: skip
    return total, out, transposed, mean, rstd


def norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, skip: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """See `reference.norm_backward`."""
    num_rows, width = x.shape
    left = 1 << (width.bit_length() - 1)
    left = left if left < width else width // 2
    num_programs, warps = _NORM_BACKWARD
    out = torch.empty_like(x)
    partial = torch.empty(num_programs, 2 * width, device=x.device)
    _norm_backward[(num_programs,)](
        gradient, x, skip, weight, mean, rstd, out, partial, num_rows, NUM_PROGRAMS=num_programs, LEFT=left,
        RIGHT=width - left, num_warps=warps,
    )  # fmt: skip
    sums = sum_rows(partial)
    return out, sums[:width], sums[width:]


def gelu_forward(
    hidden: torch.Tensor, scale: torch.Tensor | None, amax: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """See `reference.gelu_forward`."""
    num_rows, width = hidden.shape
    rows, columns, tiles, warps = _GELU
    out, transposed = _both(hidden, width, dtype)
    _gelu_forward[(width // columns, triton.cdiv(num_rows, rows * tiles))](
        hidden, out, _words(transposed), scale, amax, num_rows, WIDTH=width, ROWS=rows, COLUMNS=columns,
        TILES=tiles, num_warps=warps,
    )  # fmt: skip
    return out, transposed


def gelu_backward(
    gradient: torch.Tensor, hidden: torch.Tensor, scale: torch.Tensor | None, amax: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """See `reference.gelu_backward`."""
    num_rows, width = hidden.shape
    rows, columns, tiles, warps = _GELU_BACKWARD
    out, transposed = _both(hidden, width, dtype)
    num_programs = triton.cdiv(num_rows, rows * tiles)
    partial = torch.empty(num_programs, width, device=hidden.device)
    _gelu_backward[(width // columns, num_programs)](
        gradient, hidden, out, _words(transposed), partial, scale, amax, num_rows, WIDTH=width, ROWS=rows,
        COLUMNS=columns, TILES=tiles, num_warps=warps,
    )  # fmt: skip
    return out, transposed, sum_rows(partial)


def cast_transpose(
    parts: tuple[torch.Tensor, ...],
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    sums: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See `reference.cast_transpose`."""
    num_rows, width = parts[0].shape
    out_width = len(parts) * width
    rows, columns, tiles, warps = _CAST
    is_there = len(parts) == 1 and parts[0].dtype == dtype
    out, transposed = (parts[0], parts[0].t()) if is_there else _both(parts[0], out_width, dtype)
    if is_there and not sums:
        return out, transposed, None
    num_programs = triton.cdiv(num_rows, rows * tiles)
    partial = torch.empty(num_programs, out_width, device=out.device) if sums else None
    for index, part in enumerate(parts):
        _cast_transpose[(width // columns, num_programs)](
            part, None if is_there else out, _words(transposed), partial, scale, amax, num_rows,
            WIDTH=width, OUT_WIDTH=out_width, OUT_COLUMN=index * width, SUMS=sums, E5=dtype == E5M2,
            ROWS=rows, COLUMNS=columns, TILES=tiles, num_warps=warps,
        )  # fmt: skip
    return out, transposed, None if partial is None else sum_rows(partial)


def sgd_cast(
    weight: torch.Tensor, gradient: torch.Tensor, velocity: torch.Tensor | None, out: torch.Tensor,
    transposed: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, *, lr: float, momentum: float,
    decay: float,
) -> None:  # fmt: skip
    """See `reference.sgd_cast`."""
    num_rows, width = weight.shape
    rows, columns, warps = _SGD
    _sgd_cast[(width // columns, triton.cdiv(num_rows, rows))](
        weight, gradient, weight if velocity is None else velocity, out, _words(transposed), scale, amax, lr,
        momentum, decay, num_rows, WIDTH=width, HAS_MOMENTUM=velocity is not None, ROWS=rows, COLUMNS=columns,
        num_warps=warps,
    )  # fmt: skip


def attention_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `reference.attention_forward` with cuDNN."""
    # The arguments: no bias, logarithms, no dropout, no causal mask, no debug mask.
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, False)
    return out, lse


def attention_backward(
    qkv: torch.Tensor, out: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor, num_heads: int
) -> torch.Tensor:
    """Compute `reference.attention_backward` for what `attention.has_own_backward` accepts."""
    # Imported here, since not every Triton has Gluon.
    from fastlaunch_train.models.fp8_fused import attention_backward as gluon

    return gluon.attention_backward(qkv, out, dout, lse, num_heads)


def sum_rows(partial: torch.Tensor) -> torch.Tensor:
    """Return the sums over the rows of `partial`, (rows, width) in fp32."""
    num_rows, width = partial.shape
    out = torch.empty(width, device=partial.device)
    _sum_rows[(triton.cdiv(width, 32),)](partial, out, num_rows, width, ROWS=64, COLUMNS=32, num_warps=4)
    return out


def _both(like: torch.Tensor, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows = like.shape[0]
    out = torch.empty(num_rows, width, device=like.device, dtype=dtype)
    is_fp8 = dtype.itemsize == 1
    return out, torch.empty(width, num_rows, device=like.device, dtype=dtype) if is_fp8 else out.t()


def _words(transposed: torch.Tensor) -> Any:
    """Return the transpose in words of four FP8 values; None where it is a view, which nothing writes."""
    return transposed.view(torch.int32) if transposed.dtype.itemsize == 1 else None

"""The backward pass of attention over few tokens, in Gluon for Hopper: a whole head in shared memory.

A program holds the queries, keys, values and the gradient of a head, so that scores and their gradients are
computed once, no partial sum leaves the chip, and the rows' sums of output times gradient need no separate
pass. cuDNN 9.19 has such a pass, and another that converts the queries' gradients from fp32; in all it takes
twice as long for 197 tokens of 80 (docs/results/fp8-fused.md).

Each of n programs does every n-th head. With several ranks, each program takes the next free head instead:
NCCL keeps multiprocessors busy, and programs that wait for one would do their share after all others have
ended. Without NCCL this is 4% slower (one H100, 26 Nov 2026).

Four warp groups have 64 keys each. Queries come in chunks of 64, 64, 64 and 16. P and its gradient are held
transposed, (keys, queries), in registers, for the products of the keys' and values' gradients; for those of
the queries' gradients, the gradient of P goes through shared memory. 80 columns are 64 and 16, since Gluon's
sizes are powers of 2. The copy engine fills rows past the last token with zeros, which add 0 and are
not stored.

As in FlashAttention (Dao, arXiv:2307.08691), products take P and its gradient in bf16 and sum in fp32. The
gradient of scores is computed from P in bf16, too: for random inputs, the gradients of queries and keys are
0.29% off the exact ones, and cuDNN's are 0.24% off (one H200, 25 Nov 2026).
"""

import torch
import torch.distributed as dist
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

NUM_WARPS = 16
_LOG2_E = 1.4426950408889634
_MINUS_LOG2_E = gl.constexpr(-_LOG2_E)
_ROWS, _LEFT = gl.constexpr(256), gl.constexpr(64)
_CHUNK, _LAST_CHUNK = gl.constexpr(64), gl.constexpr(16)
#: See `_chunks`.
_ALWAYS = 1000
#: exp2(scale * score - lse) of two neighbours, in bf16. It is at most 1: padded keys have scores of 0, and
#: if all others are far below, theirs would be infinite, and NaN after the product with the padding's zeros.
_PROBABILITY = gl.constexpr(
    "{.reg .f32 a, b; fma.rn.f32 a, $1, $3, $5; fma.rn.f32 b, $2, $4, $6;"
    " min.NaN.f32 a, a, 0f00000000; min.NaN.f32 b, b, 0f00000000;"
    " ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b; cvt.rn.bf16x2.f32 $0, b, a;}"
)
_OF_PROBABILITY = gl.constexpr("=r,f,f,f,f,f,f")
#: p * (dp - delta) of two neighbours, in bf16.
_SCORE_GRADIENT = gl.constexpr(
    "{.reg .f32 a, b, p, q; .reg .b32 l, h; shl.b32 l, $1, 16; and.b32 h, $1, 0xffff0000;"
    " mov.b32 p, l; mov.b32 q, h; sub.f32 a, $2, $4; sub.f32 b, $3, $5;"
    " mul.f32 a, a, p; mul.f32 b, b, q; cvt.rn.bf16x2.f32 $0, b, a;}"
)
_OF_SCORE_GRADIENT = gl.constexpr("=r,r,f,f,f,f")
# Triton knows it by this name since 3.7.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.constexpr_function
def _sums_of(columns):
    """Return the layout of (256, columns) sums, 64 rows to a warp group."""
    return gl.NVMMADistributedLayout([3, 0], [16, 1], [16, columns, 16])


@gluon.jit
def _products(a, b, FIRST: gl.constexpr, NUMBER: gl.constexpr, RIGHT: gl.constexpr):
    """Return the rows of a, (256, head_dim), times NUMBER rows of b from FIRST on: (256, NUMBER)."""
    sums = gl.zeros([_ROWS, NUMBER], gl.float32, _sums_of(NUMBER))
    rows = b[0].slice(FIRST, NUMBER).permute((1, 0))
    sums = warpgroup_mma(a[0], rows, sums, use_acc=False, is_async=True)
    if RIGHT:
        sums = warpgroup_mma(a[1], b[1].slice(FIRST, NUMBER).permute((1, 0)), sums, is_async=True)
    return warpgroup_mma_wait(0, [sums])


@gluon.jit
def _chunk(
    factor, a, b, of_query, FIRST: gl.constexpr, NUMBER: gl.constexpr, RIGHT: gl.constexpr,
    ASSEMBLY: gl.constexpr, OPERANDS: gl.constexpr,
):  # fmt: skip
    """Return the result of ASSEMBLY on a factor, `_products` and a value of each query, in bf16."""
    products = _products(a, b, FIRST, NUMBER, RIGHT)
    values = of_query.slice(FIRST, NUMBER).load(gl.SliceLayout(0, _sums_of(NUMBER)))
    return gl.inline_asm_elementwise(
        ASSEMBLY, OPERANDS, [factor, products, values[None, :]], dtype=gl.bfloat16, is_pure=False, pack=2
    )


@gluon.jit
def _chunks(
    otherwise, factors, a, b, of_query, always, LESS: gl.constexpr, RIGHT: gl.constexpr,
    ASSEMBLY: gl.constexpr, OPERANDS: gl.constexpr,
):  # fmt: skip
    """Return the four chunks, (256, 208) in all. always: a number larger than LESS + 3.

    Without branches that the compiler cannot predict, it begins the products of all chunks before it uses
    those of the first, and spills them.
    """
    w, x, y, z = otherwise
    if always > LESS:
        w = _chunk(factors[0], a, b, of_query, 0, _CHUNK, RIGHT, ASSEMBLY, OPERANDS)
    if always > LESS + 1:
        x = _chunk(factors[1], a, b, of_query, _CHUNK, _CHUNK, RIGHT, ASSEMBLY, OPERANDS)
    if always > LESS + 2:
        y = _chunk(factors[2], a, b, of_query, 2 * _CHUNK, _CHUNK, RIGHT, ASSEMBLY, OPERANDS)
    if always > LESS + 3:
        z = _chunk(factors[3], a, b, of_query, 3 * _CHUNK, _LAST_CHUNK, RIGHT, ASSEMBLY, OPERANDS)
    return w, x, y, z


@gluon.jit
def _start_weighting(weights, rows, COLUMNS: gl.constexpr):
    layout: gl.constexpr = gl.DotOperandLayout(0, _sums_of(COLUMNS), 2)
    a, b, c, d = weights
    sums = gl.zeros([_ROWS, COLUMNS], gl.float32, _sums_of(COLUMNS))
    first = rows.slice(0, _CHUNK)
    sums = warpgroup_mma(gl.convert_layout(a, layout), first, sums, use_acc=False, is_async=True)
    sums = warpgroup_mma(gl.convert_layout(b, layout), rows.slice(_CHUNK, _CHUNK), sums, is_async=True)
    sums = warpgroup_mma(gl.convert_layout(c, layout), rows.slice(2 * _CHUNK, _CHUNK), sums, is_async=True)
    last = rows.slice(3 * _CHUNK, _LAST_CHUNK)
    return warpgroup_mma(gl.convert_layout(d, layout), last, sums, is_async=True)


@gluon.jit
def _weighted(weights, rows, RIGHT: gl.constexpr):
    """Return weights, four chunks (256, 208) in registers, times rows: (256, 64) and (256, RIGHT)."""
    left = _start_weighting(weights, rows[0], _LEFT)
    right = _start_weighting(weights, rows[1], RIGHT) if RIGHT else left
    return _finished(left, right, RIGHT)


@gluon.jit
def _start_times(a, rows, COLUMNS: gl.constexpr):
    sums = gl.zeros([_ROWS, COLUMNS], gl.float32, _sums_of(COLUMNS))
    return warpgroup_mma(a, rows, sums, use_acc=False, is_async=True)


@gluon.jit
def _times(a, rows, RIGHT: gl.constexpr):
    """Return a, (256, 256) in shared memory, times rows: (256, 64) and (256, RIGHT)."""
    left = _start_times(a, rows[0], _LEFT)
    right = _start_times(a, rows[1], RIGHT) if RIGHT else left
    return _finished(left, right, RIGHT)


@gluon.jit
def _finished(left, right, RIGHT: gl.constexpr):
    if RIGHT:
        left, right = warpgroup_mma_wait(0, [left, right])
    else:
        left = warpgroup_mma_wait(0, [left])
        right = left
    return left, right


@gluon.jit
def _store(sums, factor, buffers, out, sample, column, RIGHT: gl.constexpr):
    """Begin to store sums * factor by way of `buffers`."""
    buffers[0].reshape([_ROWS, _LEFT]).store((sums[0] * factor).to(gl.bfloat16))
    if RIGHT:
        buffers[1].reshape([_ROWS, RIGHT]).store((sums[1] * factor).to(gl.bfloat16))
    fence_async_shared()
    _barrier()
    tma.async_copy_shared_to_global(out[0], [sample, 0, column], buffers[0])
    if RIGHT:
        tma.async_copy_shared_to_global(out[1], [sample, 0, column + _LEFT], buffers[1])


@gluon.jit
def _wait_for_stores():
    tma.store_wait(0)
    _barrier()


@gluon.jit
def _place(head, HEADS: gl.constexpr, RIGHT: gl.constexpr):
    """Return a head's sample, and its first column."""
    return head // HEADS, head % HEADS * (_LEFT + RIGHT)


@gluon.jit
def _load(source, sample, column, arrived, buffers, is_there, RIGHT: gl.constexpr):
    """Begin to load a head's columns, from `column` on, of all tokens of `sample`."""
    tma.async_copy_global_to_shared(source[0], [sample, 0, column], arrived, buffers[0], pred=is_there)
    if RIGHT:
        tma.async_copy_global_to_shared(
            source[1], [sample, 0, column + _LEFT], arrived, buffers[1], pred=is_there
        )


@gluon.jit
def _load_qk(qkv, head, arrived, q, k, is_there, HEADS: gl.constexpr, RIGHT: gl.constexpr):
    sample, column = _place(head, HEADS, RIGHT)
    mbarrier.expect(arrived, 2 * 2 * _ROWS * (_LEFT + RIGHT), pred=is_there)
    _load(qkv, sample, column, arrived, q, is_there, RIGHT)
    _load(qkv, sample, column + HEADS * (_LEFT + RIGHT), arrived, k, is_there, RIGHT)


@gluon.jit
def _load_rest(
    qkv, dout, out, head, arrived, v_in, dout_in, out_in, is_there, HEADS: gl.constexpr, RIGHT: gl.constexpr
):  # fmt: skip
    sample, column = _place(head, HEADS, RIGHT)
    mbarrier.expect(arrived, 3 * 2 * _ROWS * (_LEFT + RIGHT), pred=is_there)
    _load(dout, sample, column, arrived, dout_in, is_there, RIGHT)
    _load(out, sample, column, arrived, out_in, is_there, RIGHT)
    _load(qkv, sample, column + 2 * HEADS * (_LEFT + RIGHT), arrived, v_in, is_there, RIGHT)


@gluon.jit
def _row_sums(a, b, COLUMNS: gl.constexpr):
    """Return the sums over the columns of a * b."""
    across: gl.constexpr = COLUMNS // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [16, 1], [1, 0])
    product = a.reshape([_ROWS, COLUMNS]).load(layout).to(gl.float32)
    product *= b.reshape([_ROWS, COLUMNS]).load(layout).to(gl.float32)
    return gl.convert_layout(gl.sum(product, 1), gl.BlockedLayout([1], [32], [16], [0]))


@gluon.jit
def _flat(buffers, RIGHT: gl.constexpr):
    """Return the buffers of one head as matrices."""
    right = buffers[1].reshape([_ROWS, RIGHT]) if RIGHT else buffers[1]
    return buffers[0].reshape([_ROWS, _LEFT]), right


@gluon.jit
def _attention_backward(
    qkv_left, qkv_right, dout_left, dout_right, out_left, out_right, dqkv_left, dqkv_right, lse_in, scale,
    scale_log2, always, num_taken, num_heads_in_all, HEADS: gl.constexpr, TOKENS: gl.constexpr,
    RIGHT: gl.constexpr,
):  # fmt: skip
    """Compute dqkv from qkv, out, its gradient dout, and lse, (samples, heads, tokens), of each query.

    All by descriptors of (samples, tokens, columns), with boxes of 64 columns and of RIGHT. always: larger
    than 8; see `_chunks`. num_taken: a counter of heads, at first 0; without it, each program has its share.
    """
    WIDTH: gl.constexpr = HEADS * (_LEFT + RIGHT)
    NARROW: gl.constexpr = RIGHT if RIGHT else 16
    left: gl.constexpr = qkv_left.layout
    right: gl.constexpr = qkv_right.layout if RIGHT else gl.NVMMASharedLayout(32, 16, 3)
    qkv, dout, out, dqkv = (
        (qkv_left, qkv_right), (dout_left, dout_right), (out_left, out_right), (dqkv_left, dqkv_right)
    )  # fmt: skip
    # 208 KiB: the gradients of scores take the place of v, dout and out, once nothing reads these any more.
    qk_l = gl.allocate_shared_memory(gl.bfloat16, [2, 1, _ROWS, _LEFT], left)
    qk_r = gl.allocate_shared_memory(gl.bfloat16, [2, 1, _ROWS, NARROW], right)
    rest_l = gl.allocate_shared_memory(gl.bfloat16, [4, 1, _ROWS, _LEFT], left)
    rest_r = rest_l.index(3)._reinterpret(gl.bfloat16, [_LEFT // NARROW, 1, _ROWS, NARROW], right)
    dscores = rest_l._reinterpret(gl.bfloat16, [_ROWS, _ROWS], gl.NVMMASharedLayout(128, 16, 2))
    q_in, k_in = (qk_l.index(0), qk_r.index(0)), (qk_l.index(1), qk_r.index(1))
    v_in, dout_in = (rest_l.index(0), rest_r.index(0)), (rest_l.index(1), rest_r.index(1))
    out_in = (rest_l.index(2), rest_r.index(2))
    q, k, v, g = _flat(q_in, RIGHT), _flat(k_in, RIGHT), _flat(v_in, RIGHT), _flat(dout_in, RIGHT)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse = gl.allocate_shared_memory(gl.float32, [_ROWS], vector)
    delta = gl.allocate_shared_memory(gl.float32, [_ROWS], vector)
    arrivals = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    qk_arrived, rest_arrived = arrivals.index(0), arrivals.index(1)
    mbarrier.init(qk_arrived, count=1)
    mbarrier.init(rest_arrived, count=1)
    fence_async_shared()
    rows = gl.arange(0, _ROWS, gl.BlockedLayout([1], [32], [16], [0]))

    head = gl.program_id(0) if num_taken is None else gl.atomic_add(num_taken, 1, sem="relaxed")
    there = head < num_heads_in_all
    _load_rest(qkv, dout, out, head, rest_arrived, v_in, dout_in, out_in, there, HEADS, RIGHT)
    _load_qk(qkv, head, qk_arrived, q_in, k_in, there, HEADS, RIGHT)
    phase = 0
    # Hoisted out of the loop, the descriptors of shared memory would fill the registers.
    while tl.condition(head < num_heads_in_all, disable_licm=True):
        if num_taken is None:
            following = head + gl.num_programs(0)
        else:
            following = gl.atomic_add(num_taken, 1, sem="relaxed")
        sample, column = _place(head, HEADS, RIGHT)
        row_lse = gl.load(lse_in + head * TOKENS + rows, mask=rows < TOKENS, other=0.0)
        mbarrier.wait(rest_arrived, phase)
        sums = _row_sums(out_in[0], dout_in[0], _LEFT)
        if RIGHT:
            sums += _row_sums(out_in[1], dout_in[1], RIGHT)
        delta.store(sums)
        lse.store(row_lse * _MINUS_LOG2_E)
        _barrier()
        mbarrier.wait(qk_arrived, phase)

        wide = gl.full([_ROWS, _CHUNK], 0.0, gl.bfloat16, _sums_of(_CHUNK))
        last = gl.full([_ROWS, _LAST_CHUNK], 0.0, gl.bfloat16, _sums_of(_LAST_CHUNK))
        scales = (scale_log2, scale_log2, scale_log2, scale_log2)
        p = _chunks(
            (wide, wide, wide, last), scales, k, q, lse, always, 1, RIGHT, _PROBABILITY, _OF_PROBABILITY
        )
        dv = _weighted(p, g, RIGHT)
        _store(dv, 1.0, out_in, dqkv, sample, column + 2 * WIDTH, RIGHT)
        ds = _chunks(p, p, v, g, delta, always, 5, RIGHT, _SCORE_GRADIENT, _OF_SCORE_GRADIENT)
        _wait_for_stores()
        dscores.slice(0, _CHUNK, 1).store(ds[0])
        dscores.slice(_CHUNK, _CHUNK, 1).store(ds[1])
        dscores.slice(2 * _CHUNK, _CHUNK, 1).store(ds[2])
        dscores.slice(3 * _CHUNK, _LAST_CHUNK, 1).store(ds[3])
        fence_async_shared()
        _barrier()
        # Columns past the last chunk hold whatever was there; they are rows of dq that are not stored.
        dq = _times(dscores.permute((1, 0)), k, RIGHT)
        _barrier()

        more = following < num_heads_in_all
        _load_rest(qkv, dout, out, following, rest_arrived, v_in, dout_in, out_in, more, HEADS, RIGHT)
        _store(dq, scale, k_in, dqkv, sample, column, RIGHT)
        dk = _weighted(ds, q, RIGHT)
        _barrier()
        _store(dk, scale, q_in, dqkv, sample, column + WIDTH, RIGHT)
        _wait_for_stores()
        _load_qk(qkv, following, qk_arrived, q_in, k_in, more, HEADS, RIGHT)
        phase ^= 1
        head = following


def attention_backward(
    qkv: torch.Tensor, out: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor, num_heads: int, *,
    among_ranks: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute `reference.attention_backward` for what `attention.has_own_backward` accepts, in bf16.

    among_ranks: whether each program takes the next free head; None if it should depend on other ranks.
    """
    samples, tokens, width = out.shape
    head_dim = width // num_heads
    right = head_dim - _LEFT.value
    dqkv = torch.empty_like(qkv)
    descriptors = [
        _descriptor(tensor, columns) for tensor in (qkv, dout, out, dqkv) for columns in (_LEFT.value, right)
    ]
    scale = head_dim**-0.5
    heads = samples * num_heads
    programs = min(heads, torch.cuda.get_device_properties(qkv.device).multi_processor_count)
    if among_ranks is None:
        among_ranks = dist.is_initialized() and dist.get_world_size() > 1
    num_taken = torch.zeros(1, dtype=torch.int32, device=qkv.device) if among_ranks else None
    _attention_backward[(programs,)](
        *descriptors, lse, scale, scale * _LOG2_E, _ALWAYS, num_taken, heads, HEADS=num_heads, TOKENS=tokens,
        RIGHT=right, num_warps=NUM_WARPS,
    )  # fmt: skip
    return dqkv


def _descriptor(tensor: torch.Tensor, columns: int) -> TensorDescriptor:
    columns = columns or _LEFT.value
    layout = gl.NVMMASharedLayout(2 * columns, 16, 3)
    box = [1, _ROWS.value, columns]
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box, layout)

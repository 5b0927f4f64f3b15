"""The backward pass of attention over few tokens, in Gluon for Hopper: a whole head in shared memory.

A program takes one head after the other. Of each it holds queries, keys, values and the gradient, so that
scores and their gradients are computed once, no partial sum leaves the chip, and rows' sums of output times
gradient need no pass of their own. cuDNN 9.19 has such a pass, and another that converts the gradients of
queries from fp32; all in all it takes twice as long for 197 tokens of 80 (train/measurements/fp8-fused.md).

Four warp groups have 64 keys each. Queries come in chunks of 64, 64, 64 and 16. P and its gradient are held
transposed, (keys, queries), in registers, for the products of the keys' and values' gradients; for the
queries' the gradient goes through shared memory. 80 columns are 64 and 16, since Gluon's sizes are powers
of 2. Rows past the last token are zeros, as the copy engine fills them in, and are not stored; what they add
is 0.

As in FlashAttention (Dao, arXiv:2307.08691) products take P and its gradient in bf16 and sum in fp32. The
gradient of scores is computed from P in bf16, too, where cuDNN's is from fp32: gradients of queries and keys
are 0.29% off exact ones, and cuDNN's 0.24%.
"""

import torch
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
#: Any number larger than 8: see `_attention_backward`.
_ALWAYS = 1000
#: exp2(score * scale - lse) of two neighbours, in bf16.
_PROBABILITY = gl.constexpr(
    "{.reg .f32 a, b; fma.rn.f32 a, $1, $3, $5; fma.rn.f32 b, $2, $4, $6;"
    " ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b; cvt.rn.bf16x2.f32 $0, b, a;}"
)
#: p * (dp - delta) of two neighbours, in bf16.
_SCORE_GRADIENT = gl.constexpr(
    "{.reg .f32 a, b, p, q; .reg .b32 l, h; shl.b32 l, $1, 16; and.b32 h, $1, 0xffff0000;"
    " mov.b32 p, l; mov.b32 q, h; sub.f32 a, $2, $4; sub.f32 b, $3, $5;"
    " mul.f32 a, a, p; mul.f32 b, b, q; cvt.rn.bf16x2.f32 $0, b, a;}"
)
# By its name since Triton 3.7.
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
def _probabilities(
    k, q, lse, scale, FIRST: gl.constexpr, NUMBER: gl.constexpr, RIGHT: gl.constexpr
):  # fmt: skip
    scores = _products(k, q, FIRST, NUMBER, RIGHT)
    of_query = lse.slice(FIRST, NUMBER).load(gl.SliceLayout(0, _sums_of(NUMBER)))
    return gl.inline_asm_elementwise(
        _PROBABILITY, "=r,f,f,f,f,f,f", [scores, scale, of_query[None, :]], dtype=gl.bfloat16, is_pure=False,
        pack=2,
    )  # fmt: skip


@gluon.jit
def _score_gradients(
    p, v, dout, delta, FIRST: gl.constexpr, NUMBER: gl.constexpr, RIGHT: gl.constexpr
):  # fmt: skip
    products = _products(v, dout, FIRST, NUMBER, RIGHT)
    of_query = delta.slice(FIRST, NUMBER).load(gl.SliceLayout(0, _sums_of(NUMBER)))
    return gl.inline_asm_elementwise(
        _SCORE_GRADIENT, "=r,r,f,f,f,f", [p, products, of_query[None, :]], dtype=gl.bfloat16, is_pure=False,
        pack=2,
    )  # fmt: skip


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
    if RIGHT:
        right = _start_weighting(weights, rows[1], RIGHT)
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
def _load(source, sample, column, arrived, buffers, is_there, RIGHT: gl.constexpr):
    """Begin to load a head's columns, from `column` on, of all tokens of `sample`."""
    tma.async_copy_global_to_shared(source[0], [sample, 0, column], arrived, buffers[0], pred=is_there)
    if RIGHT:
        tma.async_copy_global_to_shared(
            source[1], [sample, 0, column + _LEFT], arrived, buffers[1], pred=is_there
        )


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
    scale_log2, always, num_heads_in_all, HEADS: gl.constexpr, TOKENS: gl.constexpr, RIGHT: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Compute dqkv from qkv, out, its gradient dout, and lse, (samples, heads, tokens), of each query.

    All by descriptors of (samples, tokens, columns), with boxes of 64 columns and of RIGHT. always: larger
    than 8. Without branches that the compiler cannot foresee it begins the products of all chunks before it
    uses those of the first, and spills them.
    """
    HEAD_DIM: gl.constexpr = _LEFT + RIGHT
    WIDTH: gl.constexpr = HEADS * HEAD_DIM
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

    first = gl.program_id(0)
    sample, column = first // HEADS, first % HEADS * HEAD_DIM
    mbarrier.expect(rest_arrived, 3 * 2 * _ROWS * HEAD_DIM)
    _load(dout, sample, column, rest_arrived, dout_in, True, RIGHT)
    _load(out, sample, column, rest_arrived, out_in, True, RIGHT)
    _load(qkv, sample, column + 2 * WIDTH, rest_arrived, v_in, True, RIGHT)
    mbarrier.expect(qk_arrived, 2 * 2 * _ROWS * HEAD_DIM)
    _load(qkv, sample, column, qk_arrived, q_in, True, RIGHT)
    _load(qkv, sample, column + WIDTH, qk_arrived, k_in, True, RIGHT)
    phase = 0
    # Hoisted out of the loop, the descriptors of shared memory would fill the registers.
    for head in tl.range(first, num_heads_in_all, NUM_PROGRAMS, disable_licm=True):
        sample, column = head // HEADS, head % HEADS * HEAD_DIM
        found = gl.load(lse_in + head * TOKENS + rows, mask=rows < TOKENS, other=0.0)
        mbarrier.wait(rest_arrived, phase)
        sums = _row_sums(out_in[0], dout_in[0], _LEFT)
        if RIGHT:
            sums += _row_sums(out_in[1], dout_in[1], RIGHT)
        delta.store(sums)
        lse.store(found * _MINUS_LOG2_E)
        _barrier()
        mbarrier.wait(qk_arrived, phase)

        a = gl.full([_ROWS, _CHUNK], 0.0, gl.bfloat16, _sums_of(_CHUNK))
        b, c = a, a
        d = gl.full([_ROWS, _LAST_CHUNK], 0.0, gl.bfloat16, _sums_of(_LAST_CHUNK))
        if always > 1:
            a = _probabilities(k, q, lse, scale_log2, 0, _CHUNK, RIGHT)
        if always > 2:
            b = _probabilities(k, q, lse, scale_log2, _CHUNK, _CHUNK, RIGHT)
        if always > 3:
            c = _probabilities(k, q, lse, scale_log2, 2 * _CHUNK, _CHUNK, RIGHT)
        if always > 4:
            d = _probabilities(k, q, lse, scale_log2, 3 * _CHUNK, _LAST_CHUNK, RIGHT)
        dv = _weighted((a, b, c, d), g, RIGHT)
        _store(dv, 1.0, out_in, dqkv, sample, column + 2 * WIDTH, RIGHT)

        if always > 5:
            a = _score_gradients(a, v, g, delta, 0, _CHUNK, RIGHT)
        if always > 6:
            b = _score_gradients(b, v, g, delta, _CHUNK, _CHUNK, RIGHT)
        if always > 7:
            c = _score_gradients(c, v, g, delta, 2 * _CHUNK, _CHUNK, RIGHT)
        if always > 8:
            d = _score_gradients(d, v, g, delta, 3 * _CHUNK, _LAST_CHUNK, RIGHT)
        _wait_for_stores()
        dscores.slice(0, _CHUNK, 1).store(a)
        dscores.slice(_CHUNK, _CHUNK, 1).store(b)
        dscores.slice(2 * _CHUNK, _CHUNK, 1).store(c)
        dscores.slice(3 * _CHUNK, _LAST_CHUNK, 1).store(d)
        fence_async_shared()
        _barrier()
        # Columns past the last chunk hold whatever was there; they are rows of dq that are not stored.
        by_query = dscores.permute((1, 0))
        dq_l = gl.zeros([_ROWS, _LEFT], gl.float32, _sums_of(_LEFT))
        dq_l = warpgroup_mma(by_query, k[0], dq_l, use_acc=False, is_async=True)
        if RIGHT:
            dq_r = gl.zeros([_ROWS, RIGHT], gl.float32, _sums_of(RIGHT))
            dq_r = warpgroup_mma(by_query, k[1], dq_r, use_acc=False, is_async=True)
            dq_l, dq_r = warpgroup_mma_wait(0, [dq_l, dq_r])
        else:
            dq_l = warpgroup_mma_wait(0, [dq_l])
            dq_r = dq_l
        _barrier()

        following = head + NUM_PROGRAMS
        more = following < num_heads_in_all
        next_sample, next_column = following // HEADS, following % HEADS * HEAD_DIM
        mbarrier.expect(rest_arrived, 3 * 2 * _ROWS * HEAD_DIM, pred=more)
        _load(dout, next_sample, next_column, rest_arrived, dout_in, more, RIGHT)
        _load(out, next_sample, next_column, rest_arrived, out_in, more, RIGHT)
        _load(qkv, next_sample, next_column + 2 * WIDTH, rest_arrived, v_in, more, RIGHT)
        _store((dq_l, dq_r), scale, k_in, dqkv, sample, column, RIGHT)
        dk = _weighted((a, b, c, d), q, RIGHT)
        _barrier()
        _store(dk, scale, q_in, dqkv, sample, column + WIDTH, RIGHT)
        _wait_for_stores()
        mbarrier.expect(qk_arrived, 2 * 2 * _ROWS * HEAD_DIM, pred=more)
        _load(qkv, next_sample, next_column, qk_arrived, q_in, more, RIGHT)
        _load(qkv, next_sample, next_column + WIDTH, qk_arrived, k_in, more, RIGHT)
        phase ^= 1


def attention_backward(
    qkv: torch.Tensor, out: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor, num_heads: int
) -> torch.Tensor:
    """Return the gradient of qkv, of its shape.

    qkv: (samples, tokens, 3 * width), queries, keys and values side by side. out, dout: (samples, tokens,
    width). All in bf16 and contiguous. lse: (samples, num_heads, tokens) in fp32, the logarithm of each
    query's sum of exponentials, of scores scaled by head_dim ** -0.5. Sizes as `attention.is_supported` says.
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
    _attention_backward[(programs,)](
        *descriptors, lse, scale, scale * _LOG2_E, _ALWAYS, heads, HEADS=num_heads, TOKENS=tokens,
        RIGHT=right, NUM_PROGRAMS=programs, num_warps=NUM_WARPS,
    )  # fmt: skip
    return dqkv


def _descriptor(tensor: torch.Tensor, columns: int) -> TensorDescriptor:
    columns = columns or _LEFT.value
    layout = gl.NVMMASharedLayout(2 * columns, 16, 3)
    box = [1, _ROWS.value, columns]
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box, layout)

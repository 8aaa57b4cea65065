"""Dense causal attention with LSE for Hopper (sm_90a), in Gluon.

One program serves one query head and 64 * GROUPS query rows: GROUPS consumer warpgroups of 64 rows each and a
one-warp TMA producer, K/V tiles of BN keys in STAGES buffers. The diagonal tiles come first and are the only
masked ones; then the score product of tile i runs beside the value product of tile i - 1. Softmax is in base 2
with the scale folded in. Algorithm: Dao 2023 (FlashAttention-2), Shah et al. 2024 (FlashAttention-3).

Shapes: q, o [B*Hq, S, D]; k, v [B*Hkv, T, D]; lse fp32 [B*Hq, S], natural log. Own positions as in
`layout.py`: key j of sequence b lies at row starts[b] + j, query row s at own position T - S - starts[b] + s.
"""

# mypy: ignore-errors
# Gluon kernels are compiled by Triton: their annotations are compile-time markers, not Python types.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headscope.kernels.gluon_compat import barrier, tma_load, tma_store, tma_store_wait

# fmt: off
# Kernels take dozens of arguments: one a line would hide the few lines that compute.

LN2 = gl.constexpr(0.6931471805599453)
FLOOR = gl.constexpr(-1.0e30)
"""Running maximum of a row that has seen no cell: finite, so that no difference of infinities arises."""


@gluon.jit
def place(pid, heads, group, row_blocks, by_kv):
    """(head, rank) of a program; rank 0 is the last row block, which has the most work and so goes first.

    With `by_kv` one KV head's query heads run together, for reuse in L2; otherwise all heads of a row block do.
    """
    span = gl.where(by_kv != 0, group * row_blocks, heads * row_blocks)
    width = gl.where(by_kv != 0, group, heads)
    inner = pid % span
    return pid // span * width + inner % width, inner // width


@gluon.jit
def store_rows(values, tile, o_d, o_ptr, head, row, length, D: gl.constexpr, OL: gl.constexpr):
    """Writes 64 output rows from local row `row` on, through shared memory and the copy engine.

    Rows at and beyond `length` are clipped. A store box must not start before row 0 (it is an illegal instruction,
    unlike a load), so a block that does is written row by row.
    """
    if row >= 0:
        tile.reshape([64, D]).store(values)
        fence_async_shared()
        barrier()
        tma_store(o_d, [head, row, 0], tile)
        tma_store_wait(0)
    else:
        store_each(values, o_ptr, head, row, length, D, OL)


@gluon.jit
def store_each(values, o_ptr, head, row, length, D: gl.constexpr, OL: gl.constexpr):
    """Writes those of 64 output rows from local row `row` on that exist, one by one."""
    own = row + gl.arange(0, 64, gl.SliceLayout(1, OL))
    dims = gl.arange(0, D, gl.SliceLayout(0, OL))
    at = (head.to(gl.int64) * length + own) * D
    inside = (own >= 0) & (own < length)
    gl.store(o_ptr + at[:, None] + dims[None, :], values, mask=inside[:, None])


@gluon.jit
def _producer(q_d, k_d, v_d, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, head, kv_head, p0, first, start,
              tiles, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    BM: gl.constexpr = 64 * GROUPS
    DIAGONAL: gl.constexpr = BM // BN
    mbarrier.expect(q_full, BM * D * 2)
    for g in gl.static_range(GROUPS):
        tma_load(q_d, [head, p0 - first + g * 64, 0], q_full, q_s.index(g))
    st = 0
    ph = 1
    for i in range(tiles):
        c = start + p0 - (i - DIAGONAL + 1) * BN
        if i < DIAGONAL:
            c = start + p0 + i * BN
        mbarrier.wait(k_empty.index(st), ph)
        mbarrier.expect(k_full.index(st), BN * D * 2)
        tma_load(k_d, [kv_head, c, 0], k_full.index(st), k_s.index(st))
        mbarrier.wait(v_empty.index(st), ph)
        mbarrier.expect(v_full.index(st), BN * D * 2)
        tma_load(v_d, [kv_head, c, 0], v_full.index(st), v_s.index(st))
        st += 1
        if st == STAGES:
            st = 0
            ph = ph ^ 1


@gluon.jit
def _step(q, k_s, v_s, k_full, k_empty, v_full, v_empty, st, ph, pst, pph, acc, m, total, p, rows, columns, scale,
          BN: gl.constexpr, D: gl.constexpr, MASK: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr,
          PL: gl.constexpr):
    """Scores of this tile [64, BN] beside the value product of the tile before."""
    zero = gl.zeros([64, BN], gl.float32, SL)
    mbarrier.wait(k_full.index(st), ph)
    s_t = warpgroup_mma(q, k_s.index(st).reshape([BN, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(pst), pph)
    o_t = warpgroup_mma(p, v_s.index(pst).reshape([BN, D]), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s_t])
    mbarrier.arrive(k_empty.index(st))
    if MASK:
        s = gl.where(rows[:, None] >= columns[None, :], s, float("-inf"))
    top = gl.maximum(m, gl.max(s, 1) * scale)
    shrink = gl.exp2(m - top)
    weights = gl.exp2(s * scale - top[:, None])
    total = total * shrink + gl.sum(weights, 1)
    p = gl.convert_layout(weights.to(k_s.dtype), PL)
    acc = warpgroup_mma_wait(0, deps=[o_t])
    mbarrier.arrive(v_empty.index(pst))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OL))[:, None]
    return acc, top, total, p


@gluon.jit
def _consumer(q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, o_d, o_ptr, lse_ptr, head, p0, first, q_len,
              tiles, scale, G: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
              GROUPS: gl.constexpr):
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    DIAGONAL: gl.constexpr = 64 * GROUPS // BN
    rows = p0 + G * 64 + gl.arange(0, 64, gl.SliceLayout(1, SL))
    columns = p0 + gl.arange(0, BN, gl.SliceLayout(0, SL))
    mbarrier.wait(q_full, 0)
    q_tile = q_s.index(G)
    q = q_tile.reshape([64, D])
    # The first diagonal tile has no value product before it. Every row has its column p0 or an earlier one.
    mbarrier.wait(k_full.index(0), 0)
    zero = gl.zeros([64, BN], gl.float32, SL)
    s_t = warpgroup_mma(q, k_s.index(0).reshape([BN, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s_t])
    mbarrier.arrive(k_empty.index(0))
    s = gl.where(rows[:, None] >= columns[None, :], s, float("-inf"))
    m = gl.maximum(gl.max(s, 1) * scale, FLOOR)
    weights = gl.exp2(s * scale - m[:, None])
    total = gl.sum(weights, 1)
    p = gl.convert_layout(weights.to(k_s.dtype), PL)
    acc = gl.zeros([64, D], gl.float32, OL)
    st = 1
    ph = 0
    pst = 0
    pph = 0
    for i in gl.static_range(1, DIAGONAL):
        acc, m, total, p = _step(q, k_s, v_s, k_full, k_empty, v_full, v_empty, st, ph, pst, pph, acc, m, total, p,
                                 rows, columns + i * BN, scale, BN, D, True, SL, OL, PL)
        pst = st
        pph = ph
        st += 1
        if st == STAGES:
            st = 0
            ph = ph ^ 1
    for _ in range(DIAGONAL, tiles):
        acc, m, total, p = _step(q, k_s, v_s, k_full, k_empty, v_full, v_empty, st, ph, pst, pph, acc, m, total, p,
                                 rows, columns, scale, BN, D, False, SL, OL, PL)
        pst = st
        pph = ph
        st += 1
        if st == STAGES:
            st = 0
            ph = ph ^ 1
    mbarrier.wait(v_full.index(pst), pph)
    o_t = warpgroup_mma(p, v_s.index(pst).reshape([BN, D]), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[o_t])
    own = rows - first
    gl.store(lse_ptr + head.to(gl.int64) * q_len + own, (m + gl.log2(total)) * LN2, mask=(own >= 0) & (own < q_len))
    share = gl.convert_layout(1.0 / total, gl.SliceLayout(1, OL))
    store_rows((acc * share[:, None]).to(k_s.dtype), q_tile, o_d, o_ptr, head, p0 - first + G * 64, q_len, D, OL)


@gluon.jit(do_not_specialize=["q_len", "kv_len", "heads", "heads_per_sequence", "group", "row_blocks", "by_kv"])
def dense_kernel(q_d, k_d, v_d, o_d, o_ptr, lse_ptr, starts_ptr, scale, q_len, kv_len, heads, heads_per_sequence, group,
                 row_blocks, by_kv, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
                 CONSUMER_REGISTERS: gl.constexpr):
    """Grid (heads * row_blocks,). `scale` is the softmax scale times log2(e); heads = B * Hq."""
    BM: gl.constexpr = 64 * GROUPS
    head, rank = place(gl.program_id(0), heads, group, row_blocks, by_kv)
    kv_head = head // group
    start = gl.load(starts_ptr + head // heads_per_sequence)
    first = kv_len - q_len - start
    block = gl.cdiv(kv_len - start, BM) - 1 - rank
    # Sequences of one batch have different numbers of row blocks: a program beyond its sequence's first row does
    # the tiles of one block and stores nothing, because all its rows lie before local row 0.
    p0 = gl.where(block < 0, first - BM, block * BM)
    tiles = gl.maximum(block + 1, 1) * (BM // BN)
    q_s = gl.allocate_shared_memory(q_d.dtype, [GROUPS, 1, 64, D], q_d.layout)
    k_s = gl.allocate_shared_memory(k_d.dtype, [STAGES, 1, BN, D], k_d.layout)
    v_s = gl.allocate_shared_memory(v_d.dtype, [STAGES, 1, BN, D], v_d.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    fence_async_shared()  # the copy engine must see the barriers before the first load names one
    if GROUPS == 2:
        gl.warp_specialize([
            (_consumer, (q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, o_d, o_ptr, lse_ptr, head, p0,
                         first, q_len, tiles, scale, 0, BN, D, STAGES, GROUPS)),
            (_consumer, (q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, o_d, o_ptr, lse_ptr, head, p0,
                         first, q_len, tiles, scale, 1, BN, D, STAGES, GROUPS)),
            (_producer, (q_d, k_d, v_d, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, head, kv_head, p0,
                         first, start, tiles, BN, D, STAGES, GROUPS)),
        ], [4, 1], [CONSUMER_REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_consumer, (q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, o_d, o_ptr, lse_ptr, head, p0,
                         first, q_len, tiles, scale, 0, BN, D, STAGES, GROUPS)),
            (_consumer, (q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, o_d, o_ptr, lse_ptr, head, p0,
                         first, q_len, tiles, scale, 1, BN, D, STAGES, GROUPS)),
            (_consumer, (q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, o_d, o_ptr, lse_ptr, head, p0,
                         first, q_len, tiles, scale, 2, BN, D, STAGES, GROUPS)),
            (_producer, (q_d, k_d, v_d, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, head, kv_head, p0,
                         first, start, tiles, BN, D, STAGES, GROUPS)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, 24])

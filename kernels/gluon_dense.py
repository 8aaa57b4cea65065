"""Dense causal attention with LSE for Hopper (sm_90a), in Gluon.

An item is one query head and 64 * GROUPS query rows, and a program takes one item after another (`gluon_queue.py`):
GROUPS consumer warpgroups of 64 rows each and a one-warp TMA producer, K/V tiles of BN keys in STAGES buffers. The
diagonal tiles come first and are the only masked ones; then the score product of tile i runs beside the value product
of tile i - 1. Softmax is in base 2 with the scale folded in. Algorithm: Dao 2023 (FlashAttention-2), Shah et al. 2024
(FlashAttention-3).

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

from headscope.kernels.gluon_compat import tma_load
from headscope.kernels.gluon_queue import announce, fact, next_stage, take, wait_for

# fmt: off
# Kernels take dozens of arguments: one a line would hide the few lines that compute.

LN2 = gl.constexpr(0.6931471805599453)
FLOOR = gl.constexpr(-1.0e30)
"""Running maximum of a row that has seen no cell: finite, so that no difference of infinities arises."""
FACTS = gl.constexpr(4)
"""What consumers are told of an item: head, own position of the first row, that of local row 0, row blocks read."""


@gluon.jit
def place(item, heads, group, row_blocks, by_kv):
    """(head, rank) of an item; rank 0 is the last row block, which has the most work and so goes first.

    With `by_kv` one KV head's query heads run together, for reuse in L2; otherwise all heads of a row block do.
    """
    span = gl.where(by_kv != 0, group * row_blocks, heads * row_blocks)
    width = gl.where(by_kv != 0, group, heads)
    inner = item % span
    return item // span * width + inner % width, inner // width


@gluon.jit
def store_rows(values, o_ptr, head, row, length, D: gl.constexpr, OL: gl.constexpr):
    """Writes those of 64 output rows from local row `row` on that exist."""
    own = row + gl.arange(0, 64, gl.SliceLayout(1, OL))
    dims = gl.arange(0, D, gl.SliceLayout(0, OL))
    at = (head.to(gl.int64) * length + own) * D
    inside = (own >= 0) & (own < length)
    gl.store(o_ptr + at[:, None] + dims[None, :], values, mask=inside[:, None])


@gluon.jit
def row_block(item, starts_ptr, only_start, q_len, kv_len, heads, heads_per_sequence, group, row_blocks, by_kv,
              BM: gl.constexpr):
    """The head of an item, its sequence's start, the own position of local row 0, and which block of BM rows it is.

    Sequences of one batch have different numbers of row blocks: an item may lie beyond its sequence's first query row.
    It stores nothing, because all its rows lie before local row 0.
    """
    head, rank = place(item, heads, group, row_blocks, by_kv)
    start = only_start
    if only_start < 0:
        start = gl.load(starts_ptr + head // heads_per_sequence)
    return head, start, kv_len - q_len - start, gl.cdiv(kv_len - start, BM) - 1 - rank


@gluon.jit
def _producer(q_d, k_d, v_d, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, queue, heard, told,
              counter_ptr, starts_ptr, only_start, q_len, kv_len, heads, heads_per_sequence, group, row_blocks, by_kv,
              BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    BM: gl.constexpr = 64 * GROUPS
    DIAGONAL: gl.constexpr = BM // BN
    st = 0
    ph = 1
    turn = 0
    item = gl.program_id(0)
    while item < heads * row_blocks:
        head, start, first, block = row_block(item, starts_ptr, only_start, q_len, kv_len, heads, heads_per_sequence,
                                              group, row_blocks, by_kv, BM)
        p0 = gl.where(block < 0, first - BM, block * BM)
        blocks = gl.maximum(block, 0) + 1
        announce((head, p0, first, blocks), turn, queue, told, heard, FACTS)
        mbarrier.wait(q_empty, (turn & 1) ^ 1)
        mbarrier.expect(q_full, BM * D * 2)
        for g in gl.static_range(GROUPS):
            tma_load(q_d, [head, p0 - first + g * 64, 0], q_full, q_s.index(g))
        for i in range(blocks * DIAGONAL):
            c = start + p0 - (i - DIAGONAL + 1) * BN
            if i < DIAGONAL:
                c = start + p0 + i * BN
            mbarrier.wait(k_empty.index(st), ph)
            mbarrier.expect(k_full.index(st), BN * D * 2)
            tma_load(k_d, [head // group, c, 0], k_full.index(st), k_s.index(st))
            mbarrier.wait(v_empty.index(st), ph)
            mbarrier.expect(v_full.index(st), BN * D * 2)
            tma_load(v_d, [head // group, c, 0], v_full.index(st), v_s.index(st))
            st, ph = next_stage(st, ph, STAGES)
        turn += 1
        item = take(counter_ptr)
    announce((-1, 0, 0, 0), turn, queue, told, heard, FACTS)


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
def _consumer(q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, queue, heard, told, o_ptr, lse_ptr,
              q_len, scale, G: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
              GROUPS: gl.constexpr):
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    DIAGONAL: gl.constexpr = 64 * GROUPS // BN
    q = q_s.index(G).reshape([64, D])
    st = 0
    ph = 0
    turn = 0
    wait_for(turn, told)
    head = fact(0, turn, queue, FACTS)
    while head >= 0:
        p0 = fact(1, turn, queue, FACTS)
        first = fact(2, turn, queue, FACTS)
        blocks = fact(3, turn, queue, FACTS)
        mbarrier.arrive(heard.index(turn & 1))
        rows = p0 + G * 64 + gl.arange(0, 64, gl.SliceLayout(1, SL))
        columns = p0 + gl.arange(0, BN, gl.SliceLayout(0, SL))
        mbarrier.wait(q_full, turn & 1)
        # The first diagonal tile has no value product before it. Every row has its column p0 or an earlier one.
        mbarrier.wait(k_full.index(st), ph)
        zero = gl.zeros([64, BN], gl.float32, SL)
        s_t = warpgroup_mma(q, k_s.index(st).reshape([BN, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s_t])
        mbarrier.arrive(k_empty.index(st))
        s = gl.where(rows[:, None] >= columns[None, :], s, float("-inf"))
        m = gl.maximum(gl.max(s, 1) * scale, FLOOR)
        weights = gl.exp2(s * scale - m[:, None])
        total = gl.sum(weights, 1)
        p = gl.convert_layout(weights.to(k_s.dtype), PL)
        acc = gl.zeros([64, D], gl.float32, OL)
        # Sums, not names for the same values: Triton does not carry a name through a loop that way.
        pst = st + 0
        pph = ph + 0
        st, ph = next_stage(st, ph, STAGES)
        for i in gl.static_range(1, DIAGONAL):
            acc, m, total, p = _step(q, k_s, v_s, k_full, k_empty, v_full, v_empty, st, ph, pst, pph, acc, m, total, p,
                                     rows, columns + i * BN, scale, BN, D, True, SL, OL, PL)
            pst = st + 0
            pph = ph + 0
            st, ph = next_stage(st, ph, STAGES)
        for _ in range(DIAGONAL, blocks * DIAGONAL):
            acc, m, total, p = _step(q, k_s, v_s, k_full, k_empty, v_full, v_empty, st, ph, pst, pph, acc, m, total, p,
                                     rows, columns, scale, BN, D, False, SL, OL, PL)
            pst = st
            pph = ph
            st, ph = next_stage(st, ph, STAGES)
        mbarrier.arrive(q_empty)
        mbarrier.wait(v_full.index(pst), pph)
        o_t = warpgroup_mma(p, v_s.index(pst).reshape([BN, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[o_t])
        mbarrier.arrive(v_empty.index(pst))
        own = rows - first
        gl.store(lse_ptr + head.to(gl.int64) * q_len + own, (m + gl.log2(total)) * LN2, mask=(own >= 0) & (own < q_len))
        share = gl.convert_layout(1.0 / total, gl.SliceLayout(1, OL))
        store_rows((acc * share[:, None]).to(k_s.dtype), o_ptr, head, p0 - first + G * 64, q_len, D, OL)
        turn += 1
        wait_for(turn, told)
        head = fact(0, turn, queue, FACTS)


@gluon.jit(do_not_specialize=[
    "q_len", "kv_len", "heads", "heads_per_sequence", "group", "row_blocks", "by_kv", "only_start",
])
def dense_kernel(q_d, k_d, v_d, o_ptr, lse_ptr, starts_ptr, counter_ptr, scale, q_len, kv_len, heads,
                 heads_per_sequence, group, row_blocks, by_kv, only_start, BN: gl.constexpr, D: gl.constexpr,
                 STAGES: gl.constexpr, GROUPS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr):
    """Grid: as many programs as multiprocessors, at most heads * row_blocks; counter_ptr holds a 0.

    `scale` is the softmax scale times log2(e); heads = B * Hq; `only_start` is every sequence's start, or -1 where they
    differ.
    """
    q_s = gl.allocate_shared_memory(q_d.dtype, [GROUPS, 1, 64, D], q_d.layout)
    k_s = gl.allocate_shared_memory(k_d.dtype, [STAGES, 1, BN, D], k_d.layout)
    v_s = gl.allocate_shared_memory(v_d.dtype, [STAGES, 1, BN, D], v_d.layout)
    queue = gl.allocate_shared_memory(gl.int32, [2 * FACTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    heard = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=GROUPS)
    for i in gl.static_range(2):
        mbarrier.init(told.index(i), count=1)
        mbarrier.init(heard.index(i), count=GROUPS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    fence_async_shared()  # the copy engine must see the barriers before the first load names one
    if GROUPS == 2:
        gl.warp_specialize([
            (_consumer, (q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, queue, heard, told, o_ptr,
                         lse_ptr, q_len, scale, 0, BN, D, STAGES, GROUPS)),
            (_consumer, (q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, queue, heard, told, o_ptr,
                         lse_ptr, q_len, scale, 1, BN, D, STAGES, GROUPS)),
            (_producer, (q_d, k_d, v_d, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, queue, heard,
                         told, counter_ptr, starts_ptr, only_start, q_len, kv_len, heads, heads_per_sequence, group,
                         row_blocks, by_kv, BN, D, STAGES, GROUPS)),
        ], [4, 1], [CONSUMER_REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_consumer, (q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, queue, heard, told, o_ptr,
                         lse_ptr, q_len, scale, 0, BN, D, STAGES, GROUPS)),
            (_consumer, (q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, queue, heard, told, o_ptr,
                         lse_ptr, q_len, scale, 1, BN, D, STAGES, GROUPS)),
            (_consumer, (q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, queue, heard, told, o_ptr,
                         lse_ptr, q_len, scale, 2, BN, D, STAGES, GROUPS)),
            (_producer, (q_d, k_d, v_d, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, queue, heard,
                         told, counter_ptr, starts_ptr, only_start, q_len, kv_len, heads, heads_per_sequence, group,
                         row_blocks, by_kv, BN, D, STAGES, GROUPS)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, 24])

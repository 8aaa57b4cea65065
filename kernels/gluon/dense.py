"""Dense causal attention with LSE for Hopper (sm_90a), in Gluon.

An item is one query head and 64 * GROUPS query rows, and a program takes one item after another (`gluon_queue.py`):
GROUPS consumer warpgroups of 64 rows each and a one-warp TMA producer. The diagonal tiles of BN keys come first and are
the only masked ones; then the score product of tile i runs beside the value product of tile i - 1. One of STAGES stages
holds what a step reads, the keys of tile i and the values of tile i - 1: one barrier says that they are there, one that
they have been read. An item's first stage has no values, its last no keys. Softmax is in base 2 with the scale folded
in. Algorithm: Dao 2023 (FlashAttention-2), Shah et al. 2024 (FlashAttention-3).

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

from headscope.kernels.gluon.compat import tma_load
from headscope.kernels.gluon.queue import announce, fact, next_head, next_stage, take

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
def row_block(item, items, BM: gl.constexpr):
    """The head of an item, its sequence's start, the own position of local row 0, which block of BM rows it is, whether
    it has rows to compute, and the own position of its first row. `items` is a kernel's tuple of that name.

    Sequences of one batch have different numbers of row blocks: an item may lie beyond its sequence's first query row.
    It stores nothing, because all its rows lie before local row 0.
    """
    _counter_ptr, starts_ptr, only_start, q_len, kv_len, heads, heads_per_sequence, group, row_blocks, by_kv = items
    head, rank = place(item, heads, group, row_blocks, by_kv)
    start = only_start
    if only_start < 0:
        start = gl.load(starts_ptr + head // heads_per_sequence)
    first = kv_len - q_len - start
    block = gl.cdiv(kv_len - start, BM) - 1 - rank
    real = (block >= 0) & (block * BM + BM > first)
    return head, start, first, block, real, gl.where(real, block * BM, first - BM)


@gluon.jit
def _tile(i, p0, DIAGONAL: gl.constexpr, BN: gl.constexpr):
    """First key of an item's i-th tile: the DIAGONAL tiles upwards, then those before the rows downwards."""
    return gl.where(i < DIAGONAL, p0 + i * BN, p0 - (i - DIAGONAL + 1) * BN)


@gluon.jit
def _producer(q_d, k_d, v_d, shared, items, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
              GROUPS: gl.constexpr):
    q_s, k_s, v_s, q_full, q_empty, full, empty, queue, heard, told = shared
    counter_ptr, _starts_ptr, _only_start, _q_len, _kv_len, heads, _per_sequence, group, row_blocks, _by_kv = items
    BM: gl.constexpr = 64 * GROUPS
    DIAGONAL: gl.constexpr = BM // BN
    TILE_BYTES: gl.constexpr = BN * D * 2
    st = 0
    ph = 1
    turn = 0
    item = gl.program_id(0)
    while item < heads * row_blocks:
        head, start, first, block, real, p0 = row_block(item, items, BM)
        blocks = gl.where(real, block, 0) + 1
        announce((head, p0, first, blocks), turn, queue, told, heard, FACTS)
        mbarrier.wait(q_empty, (turn & 1) ^ 1)
        mbarrier.expect(q_full, BM * D * 2)
        for g in gl.static_range(GROUPS):
            tma_load(q_d, [head, p0 - first + g * 64, 0], q_full, q_s.index(g))
        tiles = blocks * DIAGONAL
        for i in range(tiles + 1):
            mbarrier.wait(empty.index(st), ph)
            if (i == 0) | (i == tiles):
                mbarrier.expect(full.index(st), TILE_BYTES)
            else:
                mbarrier.expect(full.index(st), 2 * TILE_BYTES)
            if i < tiles:
                key = start + _tile(i, p0, DIAGONAL, BN)
                tma_load(k_d, [head // group, key, 0], full.index(st), k_s.index(st))
            if i > 0:
                key = start + _tile(i - 1, p0, DIAGONAL, BN)
                tma_load(v_d, [head // group, key, 0], full.index(st), v_s.index(st))
            st, ph = next_stage(st, ph, STAGES)
        turn += 1
        item = take(counter_ptr)
    announce((-1, 0, 0, 0), turn, queue, told, heard, FACTS)


@gluon.jit
def _row_max(s, BN: gl.constexpr, EXP_BOUND: gl.constexpr):
    """[64]. Where products bound a step and not exponentials, in eight short chains in place of one long one."""
    if EXP_BOUND:
        return gl.max(s, 1)
    else:
        # A thread holds keys 8 b + 2 c + d of its row for one c: first over some of its b, last over the threads.
        return gl.max(gl.max(gl.max(gl.max(s.reshape([64, 4, BN // 32, 4, 2]), 2), 3), 1), 1)


@gluon.jit
def _row_sum(weights, BN: gl.constexpr, EXP_BOUND: gl.constexpr):
    """[64]. Where exponentials bound a step [64, 4], what each of a row's four threads holds: added up at the end."""
    if EXP_BOUND:
        return gl.sum(gl.sum(weights.reshape([64, BN // 8, 4, 2]), 3), 1)
    else:
        return gl.sum(weights, 1)


@gluon.jit
def _like_sum(x, total, EXP_BOUND: gl.constexpr):
    """Values [64] of the rows, to be multiplied with a `_row_sum`."""
    if EXP_BOUND:
        return gl.convert_layout(x, gl.SliceLayout(1, total.type.layout))[:, None]
    else:
        return x


@gluon.jit
def _step(q, k_s, v_s, full, empty, st, ph, acc, m, total, p, rows, columns, scale, BN: gl.constexpr, D: gl.constexpr,
          EXP_BOUND: gl.constexpr, MASK: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr, PL: gl.constexpr):
    """Scores of this tile [64, BN] beside the value product of the tile before, whose values lie in the same stage."""
    zero = gl.zeros([64, BN], gl.float32, SL)
    mbarrier.wait(full.index(st), ph)
    s_t = warpgroup_mma(q, k_s.index(st).reshape([BN, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
    o_t = warpgroup_mma(p, v_s.index(st).reshape([BN, D]), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s_t])
    if MASK:
        s = gl.where(rows[:, None] >= columns[None, :], s, float("-inf"))
    top = gl.maximum(m, gl.convert_layout(_row_max(s, BN, EXP_BOUND), gl.SliceLayout(1, SL)) * scale)
    shrink = gl.exp2(m - top)
    weights = gl.exp2(s * scale - top[:, None])
    total = total * _like_sum(shrink, total, EXP_BOUND) + _row_sum(weights, BN, EXP_BOUND)
    p = gl.convert_layout(weights.to(k_s.dtype), PL)
    acc = warpgroup_mma_wait(0, deps=[o_t])
    mbarrier.arrive(empty.index(st))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OL))[:, None]
    return acc, top, total, p


@gluon.jit
def _consumer(shared, output, G: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
              GROUPS: gl.constexpr, EXP_BOUND: gl.constexpr):
    q_s, k_s, v_s, q_full, q_empty, full, empty, queue, heard, told = shared
    o_ptr, lse_ptr, q_len, scale = output
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    DIAGONAL: gl.constexpr = 64 * GROUPS // BN
    q = q_s.index(G).reshape([64, D])
    st = 0
    ph = 0
    turn = 0
    head = next_head(turn, queue, told, FACTS)
    while head >= 0:
        p0 = fact(1, turn, queue, FACTS)
        first = fact(2, turn, queue, FACTS)
        blocks = fact(3, turn, queue, FACTS)
        mbarrier.arrive(heard.index(turn & 1))
        rows = p0 + G * 64 + gl.arange(0, 64, gl.SliceLayout(1, SL))
        columns = p0 + gl.arange(0, BN, gl.SliceLayout(0, SL))
        mbarrier.wait(q_full, turn & 1)
        # The first diagonal tile has no value product before it. Every row has its column p0 or an earlier one.
        mbarrier.wait(full.index(st), ph)
        zero = gl.zeros([64, BN], gl.float32, SL)
        s_t = warpgroup_mma(q, k_s.index(st).reshape([BN, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s_t])
        mbarrier.arrive(empty.index(st))
        st, ph = next_stage(st, ph, STAGES)
        s = gl.where(rows[:, None] >= columns[None, :], s, float("-inf"))
        m = gl.maximum(gl.max(s, 1) * scale, FLOOR)
        weights = gl.exp2(s * scale - m[:, None])
        total = _row_sum(weights, BN, EXP_BOUND)
        p = gl.convert_layout(weights.to(k_s.dtype), PL)
        acc = gl.zeros([64, D], gl.float32, OL)
        for i in gl.static_range(1, DIAGONAL):
            acc, m, total, p = _step(q, k_s, v_s, full, empty, st, ph, acc, m, total, p, rows, columns + i * BN, scale,
                                     BN, D, EXP_BOUND, True, SL, OL, PL)
            st, ph = next_stage(st, ph, STAGES)
        for _ in range(DIAGONAL, blocks * DIAGONAL):
            acc, m, total, p = _step(q, k_s, v_s, full, empty, st, ph, acc, m, total, p, rows, columns, scale, BN, D,
                                     EXP_BOUND, False, SL, OL, PL)
            st, ph = next_stage(st, ph, STAGES)
        mbarrier.arrive(q_empty)
        mbarrier.wait(full.index(st), ph)
        o_t = warpgroup_mma(p, v_s.index(st).reshape([BN, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[o_t])
        mbarrier.arrive(empty.index(st))
        st, ph = next_stage(st, ph, STAGES)
        if EXP_BOUND:
            total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, SL))
        own = rows - first
        gl.store(lse_ptr + head.to(gl.int64) * q_len + own, (m + gl.log2(total)) * LN2, mask=(own >= 0) & (own < q_len))
        share = gl.convert_layout(1.0 / total, gl.SliceLayout(1, OL))
        store_rows((acc * share[:, None]).to(k_s.dtype), o_ptr, head, p0 - first + G * 64, q_len, D, OL)
        turn += 1
        head = next_head(turn, queue, told, FACTS)


@gluon.jit(do_not_specialize=[
    "q_len", "kv_len", "heads", "heads_per_sequence", "group", "row_blocks", "by_kv", "only_start",
])
def dense_kernel(q_d, k_d, v_d, o_ptr, lse_ptr, starts_ptr, counter_ptr, scale, q_len, kv_len, heads,
                 heads_per_sequence, group, row_blocks, by_kv, only_start, BN: gl.constexpr, D: gl.constexpr,
                 STAGES: gl.constexpr, GROUPS: gl.constexpr, EXP_BOUND: gl.constexpr,
                 CONSUMER_REGISTERS: gl.constexpr):
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
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=GROUPS)
    for i in gl.static_range(2):
        mbarrier.init(told.index(i), count=1)
        mbarrier.init(heard.index(i), count=GROUPS)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()  # the copy engine must see the barriers before the first load names one
    # What all warpgroups see, what consumers write, and what says which items there are.
    shared = (q_s, k_s, v_s, q_full, q_empty, full, empty, queue, heard, told)
    output = (o_ptr, lse_ptr, q_len, scale)
    items = (counter_ptr, starts_ptr, only_start, q_len, kv_len, heads, heads_per_sequence, group, row_blocks, by_kv)
    if GROUPS == 2:
        gl.warp_specialize([
            (_consumer, (shared, output, 0, BN, D, STAGES, GROUPS, EXP_BOUND)),
            (_consumer, (shared, output, 1, BN, D, STAGES, GROUPS, EXP_BOUND)),
            (_producer, (q_d, k_d, v_d, shared, items, BN, D, STAGES, GROUPS)),
        ], [4, 1], [CONSUMER_REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_consumer, (shared, output, 0, BN, D, STAGES, GROUPS, EXP_BOUND)),
            (_consumer, (shared, output, 1, BN, D, STAGES, GROUPS, EXP_BOUND)),
            (_consumer, (shared, output, 2, BN, D, STAGES, GROUPS, EXP_BOUND)),
            (_producer, (q_d, k_d, v_d, shared, items, BN, D, STAGES, GROUPS)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, 24])

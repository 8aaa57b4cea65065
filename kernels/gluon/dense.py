"""Dense causal attention with LSE for Hopper (sm_90a), in Gluon.

An item is one query head and 64 * GROUPS query rows, and a program takes one item after another (`queue.py`):
GROUPS consumer warpgroups of 64 rows each and a one-warp TMA producer. The diagonal tiles of BN keys come first and are
the only masked ones; then the score MMA of tile i runs beside the value MMA of tile i - 1. One of STAGES stages
holds what a step reads, the keys of tile i and the values of tile i - 1: one barrier says that they are there, one that
they have been read. An item's first stage has no values, its last no keys. Softmax is in base 2 with the scale folded
in. Algorithm: Dao 2023 (FlashAttention-2), Shah et al. 2024 (FlashAttention-3).

Shapes: q, o [B*Hq, S, D]; k, v [B*Hkv, T, D]; lse fp32 [B*Hq, S], natural log. Own positions as in
`layout.py`: key j of sequence b lies at row starts[b] + j, query row s at own position T - S - starts[b] + s.
"""

# mypy: ignore-errors
# Gluon kernels are compiled by Triton: their annotations are compile-time markers, not Python types.

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headscope.kernels.gluon.compat import tma_load
from headscope.kernels.gluon.queue import Items, Queue, announce, fact, next_head, next_stage, take
from headscope.kernels.triton.common import LN2, SOFTMAX_FLOOR

# fmt: off
# Kernels take dozens of arguments: one a line would hide the few lines that compute.

FACTS = gl.constexpr(4)
"""What consumers are told of an item, in this order: its head, the own position of its first row, that of local row 0,
and how many row blocks of keys it reads."""
HEAD, ITEM_ROW, FIRST_ROW, BLOCKS = (gl.constexpr(place) for place in range(FACTS.value))


class Shared(NamedTuple):
    """What all warpgroups see: tiles of Q, K and V, their barriers, and the queue. A stage holds the keys of a tile and
    the values of the tile before."""

    q: Any
    k: Any
    v: Any
    q_full: Any
    q_empty: Any
    full: Any
    empty: Any
    queue: Any


class Output(NamedTuple):
    """What consumers write, and what with."""

    o_ptr: Any
    lse_ptr: Any
    q_len: Any
    scale: Any


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
def store_rows(values, o_ptr, head, row, length, D: gl.constexpr, OUT: gl.constexpr):
    """Writes those of 64 output rows from local row `row` on that exist."""
    own = row + gl.arange(0, 64, gl.SliceLayout(1, OUT))
    dims = gl.arange(0, D, gl.SliceLayout(0, OUT))
    at = (head.to(gl.int64) * length + own) * D
    inside = (own >= 0) & (own < length)
    gl.store(o_ptr + at[:, None] + dims[None, :], values, mask=inside[:, None])


@gluon.jit
def row_block(item, items, BM: gl.constexpr):
    """The head of an item, its sequence's start, the own position of local row 0, which block of BM rows it is, whether
    it has rows to compute, and the own position of its first row.

    Sequences of one batch have different numbers of row blocks: an item may lie beyond its sequence's first query row.
    It stores nothing, because all its rows lie before local row 0.
    """
    head, rank = place(item, items.heads, items.group, items.row_blocks, items.by_kv)
    start = items.only_start
    if items.only_start < 0:
        start = gl.load(items.starts_ptr + head // items.heads_per_sequence)
    first_row = items.kv_len - items.q_len - start
    block = gl.cdiv(items.kv_len - start, BM) - 1 - rank
    real = (block >= 0) & (block * BM + BM > first_row)
    return head, start, first_row, block, real, gl.where(real, block * BM, first_row - BM)


@gluon.jit
def _tile(i, item_row, DIAGONAL: gl.constexpr, BN: gl.constexpr):
    """First key of an item's i-th tile: the DIAGONAL tiles upwards, then those before the rows downwards."""
    return gl.where(i < DIAGONAL, item_row + i * BN, item_row - (i - DIAGONAL + 1) * BN)


@gluon.jit
def _producer(q_d, k_d, v_d, shared, items, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
              GROUPS: gl.constexpr):
    BM: gl.constexpr = 64 * GROUPS
    DIAGONAL: gl.constexpr = BM // BN
    TILE_BYTES: gl.constexpr = BN * D * 2
    stage = 0
    phase = 1
    nth = 0
    item = gl.program_id(0)
    while item < items.heads * items.row_blocks:
        head, start, first_row, block, real, item_row = row_block(item, items, BM)
        blocks = gl.where(real, block, 0) + 1
        announce((head, item_row, first_row, blocks), nth, shared.queue, FACTS)
        mbarrier.wait(shared.q_empty, (nth & 1) ^ 1)
        mbarrier.expect(shared.q_full, BM * D * 2)
        for g in gl.static_range(GROUPS):
            tma_load(q_d, [head, item_row - first_row + g * 64, 0], shared.q_full, shared.q.index(g))
        tiles = blocks * DIAGONAL
        for i in range(tiles + 1):
            mbarrier.wait(shared.empty.index(stage), phase)
            if (i == 0) | (i == tiles):
                mbarrier.expect(shared.full.index(stage), TILE_BYTES)
            else:
                mbarrier.expect(shared.full.index(stage), 2 * TILE_BYTES)
            if i < tiles:
                key = start + _tile(i, item_row, DIAGONAL, BN)
                tma_load(k_d, [head // items.group, key, 0], shared.full.index(stage), shared.k.index(stage))
            if i > 0:
                key = start + _tile(i - 1, item_row, DIAGONAL, BN)
                tma_load(v_d, [head // items.group, key, 0], shared.full.index(stage), shared.v.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)
        nth += 1
        item = take(items.counter_ptr)
    announce((-1, 0, 0, 0), nth, shared.queue, FACTS)


@gluon.jit
def _row_max(scores, BN: gl.constexpr, EXP_BOUND: gl.constexpr):
    """[64]. Where the MMA bounds a step and not exponentials, in eight short chains in place of one long one.

    The accumulator of a row lies with four threads, c = 0 .. 3, each of which holds two neighbouring keys of every 8:

        key     0  1 | 2  3 | 4  5 | 6  7 | 8  9 | 10 11 | ...      key = 8 b + 2 c + d
        thread   0   |  1   |  2   |  3   |  0   |   1   | ...

    so reshape([64, BN / 8, 4, 2]) names the row, b, c and d.
    """
    if EXP_BOUND:
        return gl.max(scores, 1)
    else:
        # b is cut in four chains and d makes two of each: first within a chain, last over the threads.
        return gl.max(gl.max(gl.max(gl.max(scores.reshape([64, 4, BN // 32, 4, 2]), 2), 3), 1), 1)


@gluon.jit
def _row_sum(weights, BN: gl.constexpr, EXP_BOUND: gl.constexpr):
    """[64]. Where exponentials bound a step [64, 4], what each of a row's four threads holds (see `_row_max`): added up
    at the end."""
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
def _step(q, shared, stage, phase, acc, top, total, operand, rows, columns, scale, BN: gl.constexpr, D: gl.constexpr,
          EXP_BOUND: gl.constexpr, MASK: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr, OPERAND: gl.constexpr):
    """Scores of this tile [64, BN] beside the value MMA of the tile before, whose values lie in the same stage."""
    zero = gl.zeros([64, BN], gl.float32, SCORES)
    mbarrier.wait(shared.full.index(stage), phase)
    keys = shared.k.index(stage).reshape([BN, D])
    scores_t = warpgroup_mma(q, keys.permute((1, 0)), zero, use_acc=False, is_async=True)
    o_t = warpgroup_mma(operand, shared.v.index(stage).reshape([BN, D]), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores_t])
    if MASK:
        scores = gl.where(rows[:, None] >= columns[None, :], scores, float("-inf"))
    new_top = gl.maximum(top, gl.convert_layout(_row_max(scores, BN, EXP_BOUND), gl.SliceLayout(1, SCORES)) * scale)
    shrink = gl.exp2(top - new_top)
    weights = gl.exp2(scores * scale - new_top[:, None])
    total = total * _like_sum(shrink, total, EXP_BOUND) + _row_sum(weights, BN, EXP_BOUND)
    operand = gl.convert_layout(weights.to(shared.k.dtype), OPERAND)
    acc = warpgroup_mma_wait(0, deps=[o_t])
    mbarrier.arrive(shared.empty.index(stage))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
    return acc, new_top, total, operand


@gluon.jit
def _consumer(shared, output, G: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
              GROUPS: gl.constexpr, EXP_BOUND: gl.constexpr):
    o_ptr, lse_ptr, q_len, scale = output
    queue = shared.queue
    # Layouts, each by what lies in it: scores, output, and softmax weights as an operand in registers.
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    DIAGONAL: gl.constexpr = 64 * GROUPS // BN
    q = shared.q.index(G).reshape([64, D])
    stage = 0
    phase = 0
    nth = 0
    head = next_head(nth, queue, FACTS)
    while head >= 0:
        item_row = fact(ITEM_ROW, nth, queue, FACTS)
        first_row = fact(FIRST_ROW, nth, queue, FACTS)
        blocks = fact(BLOCKS, nth, queue, FACTS)
        mbarrier.arrive(queue.heard.index(nth & 1))
        rows = item_row + G * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
        columns = item_row + gl.arange(0, BN, gl.SliceLayout(0, SCORES))
        mbarrier.wait(shared.q_full, nth & 1)
        # The first diagonal tile has no value MMA before it. Every row has its first column or an
        # earlier one.
        mbarrier.wait(shared.full.index(stage), phase)
        zero = gl.zeros([64, BN], gl.float32, SCORES)
        keys = shared.k.index(stage).reshape([BN, D])
        scores_t = warpgroup_mma(q, keys.permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores_t])
        mbarrier.arrive(shared.empty.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)
        scores = gl.where(rows[:, None] >= columns[None, :], scores, float("-inf"))
        top = gl.maximum(gl.max(scores, 1) * scale, SOFTMAX_FLOOR)
        weights = gl.exp2(scores * scale - top[:, None])
        total = _row_sum(weights, BN, EXP_BOUND)
        operand = gl.convert_layout(weights.to(shared.k.dtype), OPERAND)
        acc = gl.zeros([64, D], gl.float32, OUT)
        for i in gl.static_range(1, DIAGONAL):
            acc, top, total, operand = _step(q, shared, stage, phase, acc, top, total, operand, rows, columns + i * BN,
                                             scale, BN, D, EXP_BOUND, True, SCORES, OUT, OPERAND)
            stage, phase = next_stage(stage, phase, STAGES)
        for _ in range(DIAGONAL, blocks * DIAGONAL):
            acc, top, total, operand = _step(q, shared, stage, phase, acc, top, total, operand, rows, columns, scale,
                                             BN, D, EXP_BOUND, False, SCORES, OUT, OPERAND)
            stage, phase = next_stage(stage, phase, STAGES)
        mbarrier.arrive(shared.q_empty)
        mbarrier.wait(shared.full.index(stage), phase)
        o_t = warpgroup_mma(operand, shared.v.index(stage).reshape([BN, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[o_t])
        mbarrier.arrive(shared.empty.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)
        if EXP_BOUND:
            total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, SCORES))
        own = rows - first_row
        gl.store(lse_ptr + head.to(gl.int64) * q_len + own, (top + gl.log2(total)) * LN2,
                 mask=(own >= 0) & (own < q_len))
        share = gl.convert_layout(1.0 / total, gl.SliceLayout(1, OUT))
        values = (acc * share[:, None]).to(shared.k.dtype)
        store_rows(values, o_ptr, head, item_row - first_row + G * 64, q_len, D, OUT)
        nth += 1
        head = next_head(nth, queue, FACTS)


@gluon.jit(do_not_specialize=[
    "q_len", "kv_len", "heads", "heads_per_sequence", "group", "row_blocks", "by_kv", "only_start",
])
def dense_kernel(q_d, k_d, v_d, o_ptr, lse_ptr, starts_ptr, counter_ptr, scale, q_len, kv_len, heads,
                 heads_per_sequence, group, row_blocks, by_kv, only_start, BN: gl.constexpr, D: gl.constexpr,
                 STAGES: gl.constexpr, GROUPS: gl.constexpr, EXP_BOUND: gl.constexpr,
                 CONSUMER_REGISTERS: gl.constexpr):
    """Grid: as many programs as SMs, at most heads * row_blocks; counter_ptr holds a 0.

    `scale` is the softmax scale times log2(e); heads = B * Hq; `only_start` is every sequence's start, or -1 where they
    differ.
    """
    q_s = gl.allocate_shared_memory(q_d.dtype, [GROUPS, 1, 64, D], q_d.layout)
    k_s = gl.allocate_shared_memory(k_d.dtype, [STAGES, 1, BN, D], k_d.layout)
    v_s = gl.allocate_shared_memory(v_d.dtype, [STAGES, 1, BN, D], v_d.layout)
    facts = gl.allocate_shared_memory(gl.int32, [2 * FACTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
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
    shared = Shared(q_s, k_s, v_s, q_full, q_empty, full, empty, Queue(facts, told, heard))
    output = Output(o_ptr, lse_ptr, q_len, scale)
    items = Items(counter_ptr, starts_ptr, only_start, q_len, kv_len, heads, heads_per_sequence, group, row_blocks,
                  by_kv)
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

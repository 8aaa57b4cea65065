"""Sparse causal attention with LSE for Hopper (sm_90a), in Gluon: every kind of list in one launch.

An item is one query head and 128 own rows, and a program takes one item after another (`queue.py`): two consumer
warpgroups of 64 rows, which are the row blocks of `cells/layout.py`, and a one-warp TMA producer. K and V come in slots
of 64 keys, SLOTS of them to a stage:

- bands: tiles of 128 keys shared by both row blocks, walked down from the nearest; masked only at their ends;
- windows: each row block at r0 reads keys r0 - delta .. r0 - delta + 127, so one step loads 192 keys and row
  block g uses slots g and g + 1 (two steps of 64 keys each where only one slot a row block fits, D = 256);
- columns: the head's chosen K/V rows, compacted beforehand, minus what bands and windows hold already;
- blocks: listed tiles; block sizes that are no multiple of 128 keep one list per 64 rows and a ring of their own.

A cell counts once: blocks go before bands, bands before windows, windows before columns. Each step computes its
scores beside the value MMA of the step before; the first step's value MMA has weights 0. Outputs leave through
a stage that the producer hands over without keys.

K is stored in pieces of 64 keys by 64 dimensions, consecutive slots side by side, so that two slots form one
128-key operand wherever they start; V is stored in slots of 64 keys by D.

Shapes: q, o [B*Hq, S, D]; k, v [B*Hkv, T, D]; kc, vc [B*Hq, C, D]; lse fp32 [B*Hq, S], natural log.
"""

# mypy: ignore-errors
# Gluon kernels are compiled by Triton: their annotations are compile-time markers, not Python types.

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from headscope.kernels.gluon.compat import barrier, tma_store, tma_store_wait
from headscope.kernels.gluon.dense import store_rows
from headscope.kernels.gluon.feed import (
    BANDS,
    BLOCKED,
    COLUMNS,
    FACTS,
    FIRST_ROW,
    HALVES_OF,
    ITEM_ROW,
    K_EMPTY,
    K_FULL,
    LIST_OF,
    LISTED_OF,
    SINK,
    SIZE,
    TILE_BLOCKS,
    UNEVEN,
    V_EMPTY,
    V_FULL,
    WINDOWS,
    Fed,
    Shared,
    Source,
    produce,
)
from headscope.kernels.gluon.lists import (
    COLUMN_RUN,
    WINDOW_RUN,
    Columns,
    Lists,
    first_key,
    keep_columns,
    keep_distances,
    keep_mask,
    keep_words,
    list_run,
    needs_care,
    next_piece,
    without_bands,
    without_blocks,
)
from headscope.kernels.gluon.queue import Items, Queue, fact, next_head, next_stage
from headscope.kernels.gluon.steps import finish_scores, issue, last_values, lone_scores, operands, weigh
from headscope.kernels.triton.common import LN2, SOFTMAX_FLOOR

# fmt: off
# Kernels take dozens of arguments: one a line would hide the few lines that compute.


class Output(NamedTuple):
    """What consumers write: rows by a TMA descriptor, or by pointer where a row block starts before local row 0."""

    o_d: Any
    o_ptr: Any
    lse_ptr: Any
    scale: Any
    q_len: Any


class Read(NamedTuple):
    """The tables that consumers read, and their sizes; see `sparse_kernel`."""

    windows_ptr: Any
    bands_ptr: Any
    columns_ptr: Any
    some_ptr: Any
    whole_ptr: Any
    blocks_ptr: Any
    table_blocks: Any
    window_cap: Any
    band_cap: Any
    column_cap: Any
    words: Any
    block_cap: Any


@gluon.jit
def _half_blocks(shared, blocks_ptr, halves, size, rows, r0, acc, top, total, operand0, scale,
                 G: gl.constexpr, D: gl.constexpr, RING: gl.constexpr, OUT: gl.constexpr, OPERAND: gl.constexpr):
    """The row block's own block list, 64 keys a step, from the ring; all value MMAs finished at the end."""
    HALVES: gl.constexpr = D // 64
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    cols = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    rows = gl.convert_layout(rows, gl.SliceLayout(1, SCORES))
    top = gl.convert_layout(top, gl.SliceLayout(1, SCORES))
    total = gl.convert_layout(total, gl.SliceLayout(1, SCORES))
    pieces = size // 64
    stage = 0
    phase = 0
    v_slot = G
    to_free = RING * 2
    v_phase = 0
    entry = 0
    piece = 0
    for _ in range(halves):
        slot = stage * 2 + G
        scores0, scores1, out_t = issue(shared, shared.ring.index(slot * 4 + K_FULL), phase,
                                        shared.ring.index(v_slot * 4 + V_FULL), v_phase, slot * HALVES, v_slot, acc,
                                        operand0, operand0, G, D, 1, 1, SCORES)
        key = gl.load(blocks_ptr + entry) * size + piece * 64
        entry, piece = next_piece(entry, piece, pieces)
        scores = finish_scores(scores0, scores1, 1, 1, SCORES)
        mbarrier.arrive(shared.ring.index(slot * 4 + K_EMPTY))
        if key + 63 > r0:
            scores = gl.where(rows[:, None] >= (key + cols)[None, :], scores, float("-inf"))
        shrink, top, total, operand0, _ = weigh(scores, top, total, scale, shared.k.dtype, 1, OPERAND)
        acc = warpgroup_mma_wait(0, deps=[out_t])
        mbarrier.arrive(shared.ring.index(gl.minimum(to_free, RING * 2 - 1) * 4 + V_EMPTY), pred=to_free < RING * 2)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
        v_slot = slot
        to_free = slot
        v_phase = phase
        stage, phase = next_stage(stage, phase, RING)
    if halves > 0:
        acc = last_values(shared, shared.ring.index(v_slot * 4 + V_FULL), v_phase, v_slot, acc, operand0, operand0, D,
                          1)
    return acc, top, total


@gluon.jit
def _store_pieces(values, tiles, at, o_d, head, row, D: gl.constexpr):
    """Starts writing 64 output rows from local row `row` on in pieces of 64 dimensions, by way of tiles `at` ..

    A split takes apart neighbours, so a row of D dimensions is first dealt out by its pieces (here for D = 256):

        piece 0 | 1 | 2 | 3     reshape([64, 2, 2, 64]), pieces as (high, low), low last and split
        even:   0 | 2           high last and split       v0, v2
        odd:    1 | 3                                     v1, v3

    """
    HALVES: gl.constexpr = D // 64
    if HALVES == 1:
        tiles.index(at).reshape([64, 64]).store(values)
    elif HALVES == 2:
        v0, v1 = values.reshape([64, 2, 64]).permute((0, 2, 1)).split()
        tiles.index(at).reshape([64, 64]).store(v0)
        tiles.index(at + 1).reshape([64, 64]).store(v1)
    else:
        even, odd = values.reshape([64, 2, 2, 64]).permute((0, 1, 3, 2)).split()
        v0, v2 = even.permute((0, 2, 1)).split()
        v1, v3 = odd.permute((0, 2, 1)).split()
        tiles.index(at).reshape([64, 64]).store(v0)
        tiles.index(at + 1).reshape([64, 64]).store(v1)
        tiles.index(at + 2).reshape([64, 64]).store(v2)
        tiles.index(at + 3).reshape([64, 64]).store(v3)
    fence_async_shared()
    barrier()
    for half in gl.static_range(HALVES):
        tma_store(o_d, [head, row, 64 * half], tiles.index(at + half))


@gluon.jit
def _hear(nth, queue, blocks_ptr, block_cap, G: gl.constexpr):
    """What row block G needs of the facts on this item but the head, in their order; the place is given back."""
    r0 = fact(ITEM_ROW, nth, queue, FACTS) + G * 64
    first_row = fact(FIRST_ROW, nth, queue, FACTS)
    windows = fact(WINDOWS, nth, queue, FACTS)
    bands = fact(BANDS, nth, queue, FACTS)
    columns = fact(COLUMNS, nth, queue, FACTS)
    sink = fact(SINK, nth, queue, FACTS)
    tile_blocks = fact(TILE_BLOCKS, nth, queue, FACTS)
    halves = fact(HALVES_OF + G, nth, queue, FACTS)
    listed = fact(LISTED_OF + G, nth, queue, FACTS)
    blocked = fact(BLOCKED, nth, queue, FACTS) != 0
    uneven = fact(UNEVEN, nth, queue, FACTS) != 0
    size = fact(SIZE, nth, queue, FACTS)
    mine_ptr = blocks_ptr + fact(LIST_OF + G, nth, queue, FACTS).to(gl.int64) * block_cap
    mbarrier.arrive(queue.heard.index(nth & 1))
    return r0, first_row, windows, bands, columns, sink, tile_blocks, halves, listed, blocked, uneven, size, mine_ptr


@gluon.jit
def _careful_lists(shared, lists, kept, listed, rows, cols, r0, acc, top, total, operand0, operand1, stage, phase,
                   v_stage, v_phase, v_slot, to_free, scale, G: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
                   SLOTS: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr, OPERAND: gl.constexpr):
    """Lists whose cells may belong to another list too: one MMA at a time, every cell decided exactly."""
    HALVES: gl.constexpr = D // 64
    PAIR: gl.constexpr = SLOTS - 1
    WIDTH: gl.constexpr = 64 * PAIR
    for number in range(gl.where(needs_care(lists), lists.bands + 3, 0)):
        run = list_run(number, True, r0, lists, WIDTH, True)
        shift = gl.where(run.kind == WINDOW_RUN, G, 0)
        entry = 0
        piece = 0
        for i in range(run.steps):
            key = first_key(run, entry, piece)
            entry, piece = next_piece(entry, piece, run.pieces)
            acc = last_values(shared, shared.v_full.index(v_stage), v_phase, v_slot, acc, operand0, operand1, D, PAIR)
            mbarrier.arrive(shared.v_empty.index(gl.minimum(to_free, STAGES - 1)), pred=to_free < STAGES)
            scores = lone_scores(shared, shared.k_full.index(stage), phase, shared.k_empty.index(stage),
                                 stage * HALVES * SLOTS + shift, G, D, PAIR, SLOTS, SCORES)
            if run.kind == COLUMN_RUN:
                scores = keep_columns(scores, rows, cols, kept, i, lists, listed, PAIR)
            else:
                scores = keep_distances(scores, rows, key, cols, run)
                if run.kind == WINDOW_RUN:
                    scores = without_bands(scores, rows, key + cols, lists)
                scores = without_blocks(scores, key + cols, lists, listed)
            shrink, top, total, operand0, operand1 = weigh(scores, top, total, scale, shared.k.dtype, PAIR, OPERAND)
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
            v_stage = stage
            to_free = stage
            v_phase = phase
            v_slot = stage * SLOTS + shift
            stage, phase = next_stage(stage, phase, STAGES)
    return acc, top, total, operand0, operand1, stage, phase, v_stage, v_phase, v_slot, to_free


@gluon.jit
def _shares(acc, top, total, own, lse_ptr, head, q_len, DTYPE: gl.constexpr, OUT: gl.constexpr):
    """The output rows, once the LSEs of the local rows `own` that exist are written; rows with no cell give 0, -inf."""
    some = total > 0
    lse = gl.where(some, (top + gl.log2(gl.where(some, total, 1.0))) * LN2, float("-inf"))
    gl.store(lse_ptr + head.to(gl.int64) * q_len + own, lse, mask=(own >= 0) & (own < q_len))
    share = gl.convert_layout(gl.where(some, 1.0 / gl.where(some, total, 1.0), 0.0), gl.SliceLayout(1, OUT))
    return (acc * share[:, None]).to(DTYPE)


@gluon.jit
def _consumer(shared, output, read, G: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
              SLOTS: gl.constexpr, RING: gl.constexpr, HALF_BLOCKS: gl.constexpr, OVERLAPS: gl.constexpr):
    o_d, o_ptr, lse_ptr, scale, q_len = output
    queue, words = shared.queue, read.words
    HALVES: gl.constexpr = D // 64
    PAIR: gl.constexpr = SLOTS - 1
    WIDTH: gl.constexpr = 64 * PAIR
    DTYPE: gl.constexpr = shared.k.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    cols = gl.arange(0, WIDTH, gl.SliceLayout(0, SCORES))
    stage = 0
    phase = 0
    nth = 0
    head = next_head(nth, queue, FACTS)
    while head >= 0:
        (r0, first_row, windows, bands, columns, sink, tile_blocks, halves, listed, blocked, uneven, size,
         mine_ptr) = _hear(nth, queue, read.blocks_ptr, read.block_cap, G)
        rows = r0 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
        acc = gl.zeros([64, D], gl.float32, OUT)
        top = gl.full([64], SOFTMAX_FLOOR, gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
        operand0, operand1 = operands(gl.zeros([64, WIDTH], gl.float32, SCORES) + scale * 0.0, DTYPE, OPERAND, PAIR)
        mbarrier.wait(shared.q_full, nth & 1)
        if HALF_BLOCKS:
            acc, top, total = _half_blocks(shared, mine_ptr, halves, size, rows, r0, acc, top, total, operand0, scale,
                                           G, D, RING, OUT, OPERAND)
            top = gl.convert_layout(top, gl.SliceLayout(1, SCORES))
            total = gl.convert_layout(total, gl.SliceLayout(1, SCORES))
            mbarrier.arrive(shared.handover)
        # The first step's value MMA, of weights 0, reads its own V and has none to give back. Sums, not names for
        # the same values: Triton does not carry a name through a loop that way.
        v_stage = stage + 0
        v_phase = phase + 0
        v_slot = stage * SLOTS
        to_free = STAGES
        table_row = gl.minimum(r0 // 64, read.table_blocks - 1)
        wide = head.to(gl.int64)
        lists = Lists(read.bands_ptr + wide * read.band_cap * 2, bands, read.windows_ptr + wide * read.window_cap,
                      windows, columns, sink, uneven, mine_ptr, tile_blocks, blocked, size)
        columns_ptr = read.columns_ptr + wide * read.column_cap
        some_ptr = read.some_ptr + (wide * read.table_blocks + table_row) * words
        whole_ptr = read.whole_ptr + (wide * read.table_blocks + table_row) * words
        for number in range(bands + 3):
            run = list_run(number, False, r0, lists, WIDTH, OVERLAPS)
            shift = gl.where(run.kind == WINDOW_RUN, G, 0)
            entry = 0
            piece = 0
            for i in range(run.steps):
                scores0, scores1, out_t = issue(shared, shared.k_full.index(stage), phase,
                                                shared.v_full.index(v_stage), v_phase,
                                                stage * HALVES * SLOTS + shift, v_slot, acc, operand0, operand1, G, D,
                                                PAIR, SLOTS, SCORES)
                # Everything that a step must look up is looked up while the MMAs run.
                key = first_key(run, entry, piece)
                entry, piece = next_piece(entry, piece, run.pieces)
                w0, w1, w2, w3 = keep_words(some_ptr, i * (WIDTH // 32), words, run.kind == COLUMN_RUN, PAIR)
                scores = finish_scores(scores0, scores1, PAIR, PAIR, SCORES)
                mbarrier.arrive(shared.k_empty.index(stage))
                if run.kind == COLUMN_RUN:
                    if (w0 & w1 & w2 & w3) != -1:
                        scores = gl.where(keep_mask(w0, w1, w2, w3, cols, PAIR)[None, :], scores, float("-inf"))
                elif ((key < 0) | (r0 - key - (WIDTH - 1) < run.lo) | (r0 + 63 - key > run.hi)
                      | (key + WIDTH > run.stop)):
                    scores = keep_distances(scores, rows, key, cols, run)
                shrink, top, total, operand0, operand1 = weigh(scores, top, total, scale, DTYPE, PAIR, OPERAND)
                acc = warpgroup_mma_wait(0, deps=[out_t])
                mbarrier.arrive(shared.v_empty.index(gl.minimum(to_free, STAGES - 1)), pred=to_free < STAGES)
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
                v_stage = stage
                to_free = stage
                v_phase = phase
                v_slot = stage * SLOTS + shift
                stage, phase = next_stage(stage, phase, STAGES)
        if OVERLAPS:
            kept = Columns(columns_ptr, read.column_cap, some_ptr, whole_ptr, words)
            acc, top, total, operand0, operand1, stage, phase, v_stage, v_phase, v_slot, to_free = _careful_lists(
                shared, lists, kept, listed, rows, cols, r0, acc, top, total, operand0, operand1, stage, phase, v_stage,
                v_phase, v_slot, to_free, scale, G, D, STAGES, SLOTS, SCORES, OUT, OPERAND)
        mbarrier.arrive(shared.q_empty)
        if to_free < STAGES:
            acc = last_values(shared, shared.v_full.index(v_stage), v_phase, v_slot, acc, operand0, operand1, D, PAIR)
            mbarrier.arrive(shared.v_empty.index(to_free))
        values = _shares(acc, top, total, rows - first_row, lse_ptr, head, q_len, DTYPE, OUT)
        mbarrier.wait(shared.k_full.index(stage), phase)
        if r0 - first_row >= 0:
            _store_pieces(values, shared.k, stage * HALVES * SLOTS + G * HALVES, o_d, head, r0 - first_row, D)
        else:
            store_rows(values, o_ptr, head, r0 - first_row, q_len, D, OUT)
        nth += 1
        head = next_head(nth, queue, FACTS)
        tma_store_wait(0)
        barrier()
        mbarrier.arrive(shared.k_empty.index(stage))
        mbarrier.arrive(shared.v_empty.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit(do_not_specialize=[
    "q_len", "kv_len", "heads", "heads_per_sequence", "group", "row_blocks", "table_blocks", "window_cap", "band_cap",
    "column_cap", "words", "block_rows", "block_cap", "by_kv", "only_start",
])
def sparse_kernel(q_d, k_d, v_d, o_d, kc_d, vc_d, o_ptr, lse_ptr, starts_ptr, counter_ptr, windows_ptr, bands_ptr,
                  band_count_ptr, columns_ptr, counts_ptr, sinks_ptr, uneven_ptr, some_ptr, whole_ptr, blocks_ptr,
                  block_count_ptr, block_head_ptr, scale, q_len, kv_len, heads, heads_per_sequence, group, row_blocks,
                  table_blocks, window_cap, band_cap, column_cap, words, block_rows, block_cap, by_kv, only_start,
                  D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, RING: gl.constexpr,
                  HALF_BLOCKS: gl.constexpr, OVERLAPS: gl.constexpr):
    """Grid: as many programs as SMs, at most heads * row_blocks; with HALF_BLOCKS one an item.

    counter_ptr holds a 0. `scale` is the softmax scale times log2(e); heads = B * Hq; `only_start` is every sequence's
    start, or -1 where they differ.

    Per 64 own rows: counts [heads, table_blocks, 2] is (windows that reach a key, columns not beyond the rows);
    some/whole [heads, table_blocks, words] are `cover.keep_bits`, and uneven [heads, ceil(table_blocks / 2)]
    says where they differ within 128 own rows. block_head [heads, 2] is (slot or -1, block size).
    Without OVERLAPS no two lists of a head share a cell and every column may be read by all rows of a
    block or by none, but for heads whose columns are the first sinks [heads] keys: see `list_run`.
    """
    HALVES: gl.constexpr = D // 64
    q_s = gl.allocate_shared_memory(q_d.dtype, [2 * HALVES, 1, 64, 64], q_d.layout)
    k_s = gl.allocate_shared_memory(k_d.dtype, [STAGES * HALVES * SLOTS, 1, 64, 64], k_d.layout)
    v_s = gl.allocate_shared_memory(v_d.dtype, [STAGES * SLOTS, 1, 64, D], v_d.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    handover = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    facts = gl.allocate_shared_memory(gl.int32, [2 * FACTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    heard = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # The ring of 64-key pieces: for each stage and row block K full, K empty, V full, V empty.
    RINGS: gl.constexpr = RING * 8 if HALF_BLOCKS else 1
    ring = gl.allocate_shared_memory(gl.int64, [RINGS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    mbarrier.init(handover, count=2)
    for i in gl.static_range(2):
        mbarrier.init(told.index(i), count=1)
        mbarrier.init(heard.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(RINGS):
        mbarrier.init(ring.index(i), count=1)
    fence_async_shared()  # the copy engine must see the barriers before the first load names one
    shared = Shared(q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, ring, handover,
                    Queue(facts, told, heard))
    output = Output(o_d, o_ptr, lse_ptr, scale, q_len)
    read = Read(windows_ptr, bands_ptr, columns_ptr, some_ptr, whole_ptr, blocks_ptr, table_blocks, window_cap,
                band_cap, column_cap, words, block_cap)
    source = Source(q_d, k_d, v_d, kc_d, vc_d)
    items = Items(counter_ptr, starts_ptr, only_start, q_len, kv_len, heads, heads_per_sequence, group, row_blocks,
                  by_kv)
    fed = Fed(windows_ptr, bands_ptr, band_count_ptr, counts_ptr, sinks_ptr, uneven_ptr, blocks_ptr, block_count_ptr,
              block_head_ptr, table_blocks, window_cap, band_cap, block_rows, block_cap)
    gl.warp_specialize([
        (_consumer, (shared, output, read, 0, D, STAGES, SLOTS, RING, HALF_BLOCKS, OVERLAPS)),
        (_consumer, (shared, output, read, 1, D, STAGES, SLOTS, RING, HALF_BLOCKS, OVERLAPS)),
        (produce, (source, shared, items, fed, D, STAGES, SLOTS, RING, HALF_BLOCKS, OVERLAPS)),
    ], [4, 1], [240, 24])

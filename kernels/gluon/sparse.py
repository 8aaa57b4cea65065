"""Sparse causal attention with LSE for Hopper (sm_90a), in Gluon: every kind of list in one launch.

An item is one query head and 128 own rows, and a program takes one item after another (`gluon_queue.py`): two consumer
warpgroups of 64 rows, which are the row blocks of `layout.py`, and a one-warp TMA producer. K and V come in slots of
64 keys, SLOTS of them to a stage:

- bands: tiles of 128 keys shared by both row blocks, walked down from the nearest; masked only at their ends;
- windows: each row block at r0 reads keys r0 - delta .. r0 - delta + 127, so one step loads 192 keys and row
  block g uses slots g and g + 1 (two steps of 64 keys each where only one slot a row block fits, D = 256);
- columns: the head's chosen K/V rows, compacted beforehand, minus what bands and windows hold already;
- blocks: listed tiles; block sizes that are no multiple of 128 keep one list per 64 rows and a ring of their own.

A cell counts once: blocks go before bands, bands before windows, windows before columns. Each step computes its
scores beside the value product of the step before; the first step's value product has weights 0. Outputs leave through
a stage that the producer hands over without keys.

K is stored in pieces of 64 keys by 64 dimensions, consecutive slots side by side, so that two slots form one
128-key operand wherever they start; V is stored in slots of 64 keys by D.

Shapes: q, o [B*Hq, S, D]; k, v [B*Hkv, T, D]; kc, vc [B*Hq, C, D]; lse fp32 [B*Hq, S], natural log.
"""

# mypy: ignore-errors
# Gluon kernels are compiled by Triton: their annotations are compile-time markers, not Python types.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from headscope.kernels.gluon.compat import barrier, tma_store, tma_store_wait
from headscope.kernels.gluon.dense import FLOOR, LN2, store_rows
from headscope.kernels.gluon.feed import FACTS, produce
from headscope.kernels.gluon.lists import (
    COLUMN_RUN,
    WINDOW_RUN,
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
from headscope.kernels.gluon.queue import fact, next_head, next_stage
from headscope.kernels.gluon.steps import finish_scores, issue, last_values, lone_scores, operands, weigh

# fmt: off
# Kernels take dozens of arguments: one a line would hide the few lines that compute.


@gluon.jit
def _half_blocks(q_s, k_s, v_s, ring, blocks_ptr, halves, size, rows, r0, acc, m, total, p0, scale, G: gl.constexpr,
                 D: gl.constexpr, RING: gl.constexpr, OL: gl.constexpr, PL: gl.constexpr):
    """The row block's own block list, 64 keys a step, from the ring; all value products finished at the end."""
    HALVES: gl.constexpr = D // 64
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    cols = gl.arange(0, 64, gl.SliceLayout(0, SL))
    rows = gl.convert_layout(rows, gl.SliceLayout(1, SL))
    m = gl.convert_layout(m, gl.SliceLayout(1, SL))
    total = gl.convert_layout(total, gl.SliceLayout(1, SL))
    pieces = size // 64
    st = 0
    ph = 0
    before = G
    freed = RING * 2
    pph = 0
    entry = 0
    piece = 0
    for _ in range(halves):
        slot = st * 2 + G
        s0, s1, o_t = issue(q_s, k_s, v_s, ring.index(slot * 4), ph, ring.index(before * 4 + 2), pph, slot * HALVES,
                            before, acc, p0, p0, G, D, 1, 1, SL)
        key = gl.load(blocks_ptr + entry) * size + piece * 64
        entry, piece = next_piece(entry, piece, pieces)
        s = finish_scores(s0, s1, 1, 1, SL)
        mbarrier.arrive(ring.index(slot * 4 + 1))
        if key + 63 > r0:
            s = gl.where(rows[:, None] >= (key + cols)[None, :], s, float("-inf"))
        shrink, m, total, p0, _ = weigh(s, m, total, scale, k_s.dtype, 1, PL)
        acc = warpgroup_mma_wait(0, deps=[o_t])
        mbarrier.arrive(ring.index(gl.minimum(freed, RING * 2 - 1) * 4 + 3), pred=freed < RING * 2)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OL))[:, None]
        before = slot
        freed = slot
        pph = ph
        st, ph = next_stage(st, ph, RING)
    if halves > 0:
        acc = last_values(v_s, ring.index(before * 4 + 2), pph, before, acc, p0, p0, D, 1)
    return acc, m, total


@gluon.jit
def _store_pieces(values, tiles, at, o_d, head, row, D: gl.constexpr):
    """Starts writing 64 output rows from local row `row` on in pieces of 64 dimensions, by way of tiles `at` .."""
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
def _hear(turn, queue, heard, blocks_ptr, block_cap, G: gl.constexpr):
    """What row block G needs of the `FACTS` on this item but the head, in their order; the place is given back."""
    r0 = fact(1, turn, queue, FACTS) + G * 64
    first = fact(2, turn, queue, FACTS)
    windows = fact(3, turn, queue, FACTS)
    bands = fact(4, turn, queue, FACTS)
    columns = fact(5, turn, queue, FACTS)
    sink = fact(6, turn, queue, FACTS)
    tile_blocks = fact(7, turn, queue, FACTS)
    halves = fact(8 + G, turn, queue, FACTS)
    listed = fact(10 + G, turn, queue, FACTS)
    blocked = fact(12, turn, queue, FACTS) != 0
    uneven = fact(13, turn, queue, FACTS) != 0
    size = fact(14, turn, queue, FACTS)
    mine_ptr = blocks_ptr + fact(15 + G, turn, queue, FACTS).to(gl.int64) * block_cap
    mbarrier.arrive(heard.index(turn & 1))
    return r0, first, windows, bands, columns, sink, tile_blocks, halves, listed, blocked, uneven, size, mine_ptr


@gluon.jit
def _careful_lists(shared, lists, kept, listed, rows, cols, r0, acc, m, total, p0, p1, st, ph, pst, pph, slot, freed,
                   scale, G: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
                   SL: gl.constexpr, OL: gl.constexpr, PL: gl.constexpr):
    """Lists whose cells may belong to another list too: one product at a time, every cell decided exactly."""
    q_s, k_s, v_s, _q_full, _q_empty, k_full, k_empty, v_full, v_empty, _ring, _handover, _queue, _heard, _told = shared
    bands_ptr, bands, _windows_ptr, windows, _columns, _sink, uneven, blocks_ptr, _tile_blocks, blocked, size = lists
    columns_ptr, column_cap, some_ptr, whole_ptr, words = kept
    HALVES: gl.constexpr = D // 64
    PAIR: gl.constexpr = SLOTS - 1
    WIDTH: gl.constexpr = 64 * PAIR
    for run in range(gl.where(needs_care(bands, windows, uneven, blocked), bands + 3, 0)):
        kind, steps, origin, lo, hi, stop, list_ptr, factor, pieces, pitch = list_run(run, True, r0, lists, WIDTH, True)
        shift = gl.where(kind == WINDOW_RUN, G, 0)
        entry = 0
        piece = 0
        for i in range(steps):
            key = first_key(kind, origin, list_ptr, factor, entry, piece, pitch)
            entry, piece = next_piece(entry, piece, pieces)
            acc = last_values(v_s, v_full.index(pst), pph, slot, acc, p0, p1, D, PAIR)
            mbarrier.arrive(v_empty.index(gl.minimum(freed, STAGES - 1)), pred=freed < STAGES)
            s = lone_scores(q_s, k_s, k_full.index(st), ph, k_empty.index(st), st * HALVES * SLOTS + shift, G, D, PAIR,
                            SLOTS, SL)
            if kind == COLUMN_RUN:
                s = keep_columns(s, rows, cols, some_ptr, whole_ptr, words, columns_ptr, column_cap, i, bands_ptr,
                                 bands, blocks_ptr, listed, size, PAIR)
            else:
                s = keep_distances(s, rows, key, cols, lo, hi, stop)
                if kind == WINDOW_RUN:
                    s = without_bands(s, rows, key + cols, bands_ptr, bands)
                s = without_blocks(s, key + cols, blocks_ptr, listed, size)
            shrink, m, total, p0, p1 = weigh(s, m, total, scale, k_s.dtype, PAIR, PL)
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OL))[:, None]
            pst = st
            freed = st
            pph = ph
            slot = st * SLOTS + shift
            st, ph = next_stage(st, ph, STAGES)
    return acc, m, total, p0, p1, st, ph, pst, pph, slot, freed


@gluon.jit
def _shares(acc, m, total, own, lse_ptr, head, q_len, DTYPE: gl.constexpr, OL: gl.constexpr):
    """The output rows, once the LSEs of the local rows `own` that exist are written; rows with no cell give 0, -inf."""
    some = total > 0
    lse = gl.where(some, (m + gl.log2(gl.where(some, total, 1.0))) * LN2, float("-inf"))
    gl.store(lse_ptr + head.to(gl.int64) * q_len + own, lse, mask=(own >= 0) & (own < q_len))
    share = gl.convert_layout(gl.where(some, 1.0 / gl.where(some, total, 1.0), 0.0), gl.SliceLayout(1, OL))
    return (acc * share[:, None]).to(DTYPE)


@gluon.jit
def _consumer(shared, output, read, read_caps, G: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
              SLOTS: gl.constexpr, RING: gl.constexpr, HALF_BLOCKS: gl.constexpr, OVERLAPS: gl.constexpr):
    q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, ring, handover, queue, heard, told = shared
    o_d, o_ptr, lse_ptr, scale, q_len = output
    windows_ptr, bands_ptr, columns_ptr, some_ptr, whole_ptr, blocks_ptr = read
    table_blocks, window_cap, band_cap, column_cap, words, block_cap = read_caps
    HALVES: gl.constexpr = D // 64
    PAIR: gl.constexpr = SLOTS - 1
    WIDTH: gl.constexpr = 64 * PAIR
    DTYPE: gl.constexpr = k_s.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    cols = gl.arange(0, WIDTH, gl.SliceLayout(0, SL))
    st = 0
    ph = 0
    turn = 0
    head = next_head(turn, queue, told, FACTS)
    while head >= 0:
        (r0, first, windows, bands, columns, sink, tile_blocks, halves, listed, blocked, uneven, size,
         mine_ptr) = _hear(turn, queue, heard, blocks_ptr, block_cap, G)
        rows = r0 + gl.arange(0, 64, gl.SliceLayout(1, SL))
        acc = gl.zeros([64, D], gl.float32, OL)
        m = gl.full([64], FLOOR, gl.float32, gl.SliceLayout(1, SL))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SL))
        p0_, p1_ = operands(gl.zeros([64, WIDTH], gl.float32, SL) + scale * 0.0, DTYPE, PL, PAIR)
        mbarrier.wait(q_full, turn & 1)
        if HALF_BLOCKS:
            acc, m, total = _half_blocks(q_s, k_s, v_s, ring, mine_ptr, halves, size, rows, r0, acc, m, total, p0_,
                                         scale, G, D, RING, OL, PL)
            m = gl.convert_layout(m, gl.SliceLayout(1, SL))
            total = gl.convert_layout(total, gl.SliceLayout(1, SL))
            mbarrier.arrive(handover)
        # The first step's value product, of weights 0, reads its own V and has none to give back. Sums, not names for
        # the same values: Triton does not carry a name through a loop that way.
        pst = st + 0
        pph = ph + 0
        slot = st * SLOTS
        freed = STAGES
        table_row = gl.minimum(r0 // 64, table_blocks - 1)
        wide = head.to(gl.int64)
        lists = (bands_ptr + wide * band_cap * 2, bands, windows_ptr + wide * window_cap, windows, columns, sink,
                 uneven, mine_ptr, tile_blocks, blocked, size)
        my_columns_ptr = columns_ptr + wide * column_cap
        my_some_ptr = some_ptr + (wide * table_blocks + table_row) * words
        my_whole_ptr = whole_ptr + (wide * table_blocks + table_row) * words
        for run in range(bands + 3):
            kind, steps, origin, lo, hi, stop, list_ptr, factor, pieces, pitch = list_run(
                run, False, r0, lists, WIDTH, OVERLAPS)
            shift = gl.where(kind == WINDOW_RUN, G, 0)
            entry = 0
            piece = 0
            for i in range(steps):
                s0, s1, o_t = issue(q_s, k_s, v_s, k_full.index(st), ph, v_full.index(pst), pph,
                                    st * HALVES * SLOTS + shift, slot, acc, p0_, p1_, G, D, PAIR, SLOTS, SL)
                # Everything that a step must look up is looked up while the products run.
                key = first_key(kind, origin, list_ptr, factor, entry, piece, pitch)
                entry, piece = next_piece(entry, piece, pieces)
                w0, w1, w2, w3 = keep_words(my_some_ptr, i * (WIDTH // 32), words, kind == COLUMN_RUN, PAIR)
                s = finish_scores(s0, s1, PAIR, PAIR, SL)
                mbarrier.arrive(k_empty.index(st))
                if kind == COLUMN_RUN:
                    if (w0 & w1 & w2 & w3) != -1:
                        s = gl.where(keep_mask(w0, w1, w2, w3, cols, PAIR)[None, :], s, float("-inf"))
                elif (key < 0) | (r0 - key - (WIDTH - 1) < lo) | (r0 + 63 - key > hi) | (key + WIDTH > stop):
                    s = keep_distances(s, rows, key, cols, lo, hi, stop)
                shrink, m, total, p0_, p1_ = weigh(s, m, total, scale, DTYPE, PAIR, PL)
                acc = warpgroup_mma_wait(0, deps=[o_t])
                mbarrier.arrive(v_empty.index(gl.minimum(freed, STAGES - 1)), pred=freed < STAGES)
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OL))[:, None]
                pst = st
                freed = st
                pph = ph
                slot = st * SLOTS + shift
                st, ph = next_stage(st, ph, STAGES)
        if OVERLAPS:
            kept = (my_columns_ptr, column_cap, my_some_ptr, my_whole_ptr, words)
            acc, m, total, p0_, p1_, st, ph, pst, pph, slot, freed = _careful_lists(
                shared, lists, kept, listed, rows, cols, r0, acc, m, total, p0_, p1_, st, ph, pst, pph, slot, freed,
                scale, G, D, STAGES, SLOTS, SL, OL, PL)
        mbarrier.arrive(q_empty)
        if freed < STAGES:
            acc = last_values(v_s, v_full.index(pst), pph, slot, acc, p0_, p1_, D, PAIR)
            mbarrier.arrive(v_empty.index(freed))
        values = _shares(acc, m, total, rows - first, lse_ptr, head, q_len, DTYPE, OL)
        mbarrier.wait(k_full.index(st), ph)
        if r0 - first >= 0:
            _store_pieces(values, k_s, st * HALVES * SLOTS + G * HALVES, o_d, head, r0 - first, D)
        else:
            store_rows(values, o_ptr, head, r0 - first, q_len, D, OL)
        turn += 1
        head = next_head(turn, queue, told, FACTS)
        tma_store_wait(0)
        barrier()
        mbarrier.arrive(k_empty.index(st))
        mbarrier.arrive(v_empty.index(st))
        st, ph = next_stage(st, ph, STAGES)


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
    """Grid: as many programs as multiprocessors, at most heads * row_blocks; with HALF_BLOCKS one an item.

    counter_ptr holds a 0. `scale` is the softmax scale times log2(e); heads = B * Hq; `only_start` is every sequence's
    start, or -1 where they differ.

    Per 64 own rows: counts [heads, table_blocks, 2] is (windows that reach a key, columns not beyond the rows);
    some/whole [heads, table_blocks, words] are `triton_plan.keep_bits`, and uneven [heads, ceil(table_blocks / 2)]
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
    queue = gl.allocate_shared_memory(gl.int32, [2 * FACTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
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
    # What all warpgroups see; what consumers write, and which tables of what sizes they read; what the producer loads,
    # what says which items there are, and which tables of what sizes it is fed by.
    shared = (q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, ring, handover, queue, heard, told)
    output = (o_d, o_ptr, lse_ptr, scale, q_len)
    read = (windows_ptr, bands_ptr, columns_ptr, some_ptr, whole_ptr, blocks_ptr)
    read_caps = (table_blocks, window_cap, band_cap, column_cap, words, block_cap)
    source = (q_d, k_d, v_d, kc_d, vc_d)
    items = (counter_ptr, starts_ptr, only_start, q_len, kv_len, heads, heads_per_sequence, group, row_blocks, by_kv)
    fed = (windows_ptr, bands_ptr, band_count_ptr, counts_ptr, sinks_ptr, uneven_ptr, blocks_ptr, block_count_ptr,
           block_head_ptr)
    fed_caps = (table_blocks, window_cap, band_cap, block_rows, block_cap)
    gl.warp_specialize([
        (_consumer, (shared, output, read, read_caps, 0, D, STAGES, SLOTS, RING, HALF_BLOCKS, OVERLAPS)),
        (_consumer, (shared, output, read, read_caps, 1, D, STAGES, SLOTS, RING, HALF_BLOCKS, OVERLAPS)),
        (produce, (source, shared, items, fed, fed_caps, D, STAGES, SLOTS, RING, HALF_BLOCKS, OVERLAPS)),
    ], [4, 1], [240, 24])

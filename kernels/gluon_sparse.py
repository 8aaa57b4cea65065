"""Sparse causal attention with LSE for Hopper (sm_90a), in Gluon: every kind of list in one launch.

One program serves one query head and 128 own rows: two consumer warpgroups of 64 rows, which are the row blocks
of `layout.py`, and a one-warp TMA producer. K and V come in slots of 64 keys, SLOTS of them to a stage:

- bands: tiles of 128 keys shared by both row blocks, walked down from the nearest; masked only at their ends;
- windows: each row block at r0 reads keys r0 - delta .. r0 - delta + 127, so one step loads 192 keys and row
  block g uses slots g and g + 1 (two steps of 64 keys each where only one slot a row block fits, D = 256);
- columns: the head's chosen K/V rows, compacted beforehand, minus what bands and windows hold already;
- blocks: listed tiles; block sizes that are no multiple of 128 keep one list per 64 rows and a ring of their own.

A cell counts once: blocks go before bands, bands before windows, windows before columns. Each step computes its
scores beside the value product of the step before; the first step's value product has weights 0. The row blocks take
turns at starting products, so that the softmax of one runs beside the products of the other.

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

from headscope.kernels.gluon_compat import barrier, tma_load, tma_store, tma_store_wait
from headscope.kernels.gluon_dense import FLOOR, LN2, place, store_each
from headscope.kernels.gluon_lists import (
    COLUMN_RUN,
    ROWS,
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
from headscope.kernels.gluon_steps import (
    finish_scores,
    issue,
    last_values,
    lone_scores,
    operands,
    weigh,
)

# fmt: off
# Kernels take dozens of arguments: one a line would hide the few lines that compute.


@gluon.jit
def _next(st, ph, STAGES: gl.constexpr):
    st += 1
    if st == STAGES:
        st = 0
        ph = ph ^ 1
    return st, ph


@gluon.jit
def _fill(k_d, v_d, k_s, v_s, k_full, k_empty, v_full, v_empty, st, ph, head, row, COUNT: gl.constexpr,
          D: gl.constexpr, SLOTS: gl.constexpr):
    """Loads COUNT slots of K and V from `row` on into stage `st`, once both row blocks have left it."""
    HALVES: gl.constexpr = D // 64
    mbarrier.wait(k_empty.index(st), ph)
    mbarrier.expect(k_full.index(st), COUNT * 64 * D * 2)
    for half in gl.static_range(HALVES):
        for s in gl.static_range(COUNT):
            tma_load(k_d, [head, row + 64 * s, 64 * half], k_full.index(st),
                     k_s.index((st * HALVES + half) * SLOTS + s))
    mbarrier.wait(v_empty.index(st), ph)
    mbarrier.expect(v_full.index(st), COUNT * 64 * D * 2)
    for s in gl.static_range(COUNT):
        tma_load(v_d, [head, row + 64 * s, 0], v_full.index(st), v_s.index(st * SLOTS + s))


@gluon.jit
def _fill_half_blocks(k_d, v_d, k_s, v_s, ring, blocks_ptr, halves, size, st, ph, step, head, start,
                      G: gl.constexpr, D: gl.constexpr):
    """Loads one 64-key piece of row block G's own block list, if it has a `step`-th one."""
    HALVES: gl.constexpr = D // 64
    if step < halves:
        pieces = size // 64
        row = start + gl.load(blocks_ptr + step // pieces) * size + step % pieces * 64
        slot = st * 2 + G
        mbarrier.wait(ring.index(slot * 4 + 1), ph)
        mbarrier.expect(ring.index(slot * 4), 64 * D * 2)
        for half in gl.static_range(HALVES):
            tma_load(k_d, [head, row, 64 * half], ring.index(slot * 4), k_s.index(slot * HALVES + half))
        mbarrier.wait(ring.index(slot * 4 + 3), ph)
        mbarrier.expect(ring.index(slot * 4 + 2), 64 * D * 2)
        tma_load(v_d, [head, row, 0], ring.index(slot * 4 + 2), v_s.index(slot))


@gluon.jit
def _producer(q_d, k_d, v_d, kc_d, vc_d, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, ring, handover,
              windows_ptr, bands_ptr, blocks0_ptr, blocks1_ptr, head, kv_head, p0, first, start, windows, bands,
              columns, sink, tile_blocks, halves0, halves1, blocked, uneven, size,
              D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, RING: gl.constexpr,
              HALF_BLOCKS: gl.constexpr, OVERLAPS: gl.constexpr):
    HALVES: gl.constexpr = D // 64
    PAIR: gl.constexpr = SLOTS - 1
    WIDTH: gl.constexpr = 64 * PAIR
    mbarrier.expect(q_full, ROWS * D * 2)
    for g in gl.static_range(2):
        for half in gl.static_range(HALVES):
            tma_load(q_d, [head, p0 - first + g * 64, half * 64], q_full, q_s.index(g * HALVES + half))
    if HALF_BLOCKS:
        st = 0
        ph = 1
        for i in range(gl.maximum(halves0, halves1)):
            _fill_half_blocks(k_d, v_d, k_s, v_s, ring, blocks0_ptr, halves0, size, st, ph, i, kv_head, start, 0, D)
            _fill_half_blocks(k_d, v_d, k_s, v_s, ring, blocks1_ptr, halves1, size, st, ph, i, kv_head, start, 1, D)
            st, ph = _next(st, ph, RING)
        mbarrier.wait(handover, 0)
    st = 0
    ph = 1
    turns = bands + 3
    if OVERLAPS:
        turns = gl.where(needs_care(bands, windows, uneven, blocked), 2 * turns, turns)
    for turn in range(turns):
        later = turn >= bands + 3
        run = gl.where(later, turn - bands - 3, turn)
        kind, steps, origin, _lo, _hi, _stop, list_ptr, factor, pieces, pitch = list_run(
            run, later, p0, bands_ptr, bands, windows_ptr, windows, columns, sink, uneven, blocks0_ptr, tile_blocks,
            blocked, size, WIDTH, OVERLAPS)
        entry = 0
        piece = 0
        for _ in range(steps):
            key = first_key(kind, origin, list_ptr, factor, entry, piece, pitch)
            entry, piece = next_piece(entry, piece, pieces)
            if kind == COLUMN_RUN:
                _fill(kc_d, vc_d, k_s, v_s, k_full, k_empty, v_full, v_empty, st, ph, head, key, PAIR, D, SLOTS)
            elif kind == WINDOW_RUN:
                _fill(k_d, v_d, k_s, v_s, k_full, k_empty, v_full, v_empty, st, ph, kv_head, start + key, SLOTS, D,
                      SLOTS)
            else:
                _fill(k_d, v_d, k_s, v_s, k_full, k_empty, v_full, v_empty, st, ph, kv_head, start + key, PAIR, D,
                      SLOTS)
            st, ph = _next(st, ph, STAGES)


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
        mbarrier.arrive(ring.index(freed * 4 + 3))
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OL))[:, None]
        before = slot
        freed = slot
        pph = ph
        st, ph = _next(st, ph, RING)
    if halves > 0:
        acc = last_values(v_s, ring.index(before * 4 + 2), pph, before, acc, p0, p0, D, 1)
    return acc, m, total


@gluon.jit
def _store_pieces(values, q_s, o_d, head, row, G: gl.constexpr, D: gl.constexpr):
    """Writes 64 output rows from local row `row` on in pieces of 64 dimensions, by way of the queries' own place."""
    HALVES: gl.constexpr = D // 64
    if HALVES == 1:
        q_s.index(G).reshape([64, 64]).store(values)
    elif HALVES == 2:
        v0, v1 = values.reshape([64, 2, 64]).permute((0, 2, 1)).split()
        q_s.index(2 * G).reshape([64, 64]).store(v0)
        q_s.index(2 * G + 1).reshape([64, 64]).store(v1)
    else:
        even, odd = values.reshape([64, 2, 2, 64]).permute((0, 1, 3, 2)).split()
        v0, v2 = even.permute((0, 2, 1)).split()
        v1, v3 = odd.permute((0, 2, 1)).split()
        q_s.index(4 * G).reshape([64, 64]).store(v0)
        q_s.index(4 * G + 1).reshape([64, 64]).store(v1)
        q_s.index(4 * G + 2).reshape([64, 64]).store(v2)
        q_s.index(4 * G + 3).reshape([64, 64]).store(v3)
    fence_async_shared()
    barrier()
    for half in gl.static_range(HALVES):
        tma_store(o_d, [head, row, 64 * half], q_s.index(G * HALVES + half))
    tma_store_wait(0)


@gluon.jit
def _consumer(q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, ring, handover, o_d, o_ptr, lse_ptr, windows_ptr,
              bands_ptr, columns_ptr, some_ptr, whole_ptr, blocks0_ptr, blocks1_ptr, head, p0, first, q_len, windows,
              bands, columns, sink, column_cap, words, table_blocks, tile_blocks, halves0, halves1, listed0, listed1,
              blocked, uneven, size, scale, turn, G: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
              SLOTS: gl.constexpr, RING: gl.constexpr, HALF_BLOCKS: gl.constexpr, OVERLAPS: gl.constexpr):
    HALVES: gl.constexpr = D // 64
    PAIR: gl.constexpr = SLOTS - 1
    WIDTH: gl.constexpr = 64 * PAIR
    DTYPE: gl.constexpr = k_s.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    r0 = p0 + G * 64
    if G == 0:
        blocks_ptr = blocks0_ptr
        listed = listed0
        halves = halves0
    else:
        blocks_ptr = blocks1_ptr
        listed = listed1
        halves = halves1
    rows = r0 + gl.arange(0, 64, gl.SliceLayout(1, SL))
    cols = gl.arange(0, WIDTH, gl.SliceLayout(0, SL))
    acc = gl.zeros([64, D], gl.float32, OL)
    m = gl.full([64], FLOOR, gl.float32, gl.SliceLayout(1, SL))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SL))
    p0_, p1_ = operands(gl.zeros([64, WIDTH], gl.float32, SL) + scale * 0.0, DTYPE, PL, PAIR)
    mbarrier.wait(q_full, 0)
    if HALF_BLOCKS:
        acc, m, total = _half_blocks(q_s, k_s, v_s, ring, blocks_ptr, halves, size, rows, r0, acc, m, total, p0_,
                                     scale, G, D, RING, OL, PL)
        m = gl.convert_layout(m, gl.SliceLayout(1, SL))
        total = gl.convert_layout(total, gl.SliceLayout(1, SL))
        mbarrier.arrive(handover)
    st = 0
    ph = 0
    pst = 0
    pph = 0
    slot = 0
    turn_ph = 1 - G
    freed = STAGES  # a spare barrier: the first step has no V to give back
    table_row = gl.minimum(r0 // 64, table_blocks - 1)
    some_ptr += table_row * words
    whole_ptr += table_row * words
    for run in range(bands + 3):
        kind, steps, origin, lo, hi, stop, list_ptr, factor, pieces, pitch = list_run(
            run, False, r0, bands_ptr, bands, windows_ptr, windows, columns, sink, uneven, blocks_ptr, tile_blocks,
            blocked, size, WIDTH, OVERLAPS)
        shift = gl.where(kind == WINDOW_RUN, G, 0)
        entry = 0
        piece = 0
        for i in range(steps):
            mbarrier.wait(turn.index(G), turn_ph)
            s0, s1, o_t = issue(q_s, k_s, v_s, k_full.index(st), ph, v_full.index(pst), pph,
                              st * HALVES * SLOTS + shift, slot, acc, p0_, p1_, G, D, PAIR, SLOTS, SL)
            mbarrier.arrive(turn.index(1 - G))
            turn_ph = turn_ph ^ 1
            # Everything that a step must look up is looked up while the products run.
            key = first_key(kind, origin, list_ptr, factor, entry, piece, pitch)
            entry, piece = next_piece(entry, piece, pieces)
            w0, w1, w2, w3 = keep_words(some_ptr, i * (WIDTH // 32), words, kind == COLUMN_RUN, PAIR)
            s = finish_scores(s0, s1, PAIR, PAIR, SL)
            mbarrier.arrive(k_empty.index(st))
            if kind == COLUMN_RUN:
                if (w0 & w1 & w2 & w3) != -1:
                    s = gl.where(keep_mask(w0, w1, w2, w3, cols, PAIR)[None, :], s, float("-inf"))
            elif (key < 0) | (r0 - key - (WIDTH - 1) < lo) | (r0 + 63 - key > hi) | (key + WIDTH > stop):
                s = keep_distances(s, rows, key, cols, lo, hi, stop)
            shrink, m, total, p0_, p1_ = weigh(s, m, total, scale, DTYPE, PAIR, PL)
            acc = warpgroup_mma_wait(0, deps=[o_t])
            mbarrier.arrive(v_empty.index(freed))
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OL))[:, None]
            pst = st
            freed = st
            pph = ph
            slot = st * SLOTS + shift
            st, ph = _next(st, ph, STAGES)
    if OVERLAPS:
        # Lists whose cells may belong to another list too: one product at a time, every cell decided exactly.
        for run in range(gl.where(needs_care(bands, windows, uneven, blocked), bands + 3, 0)):
            kind, steps, origin, lo, hi, stop, list_ptr, factor, pieces, pitch = list_run(
                run, True, r0, bands_ptr, bands, windows_ptr, windows, columns, sink, uneven, blocks_ptr, tile_blocks,
                blocked, size, WIDTH, OVERLAPS)
            shift = gl.where(kind == WINDOW_RUN, G, 0)
            entry = 0
            piece = 0
            for i in range(steps):
                key = first_key(kind, origin, list_ptr, factor, entry, piece, pitch)
                entry, piece = next_piece(entry, piece, pieces)
                acc = last_values(v_s, v_full.index(pst), pph, slot, acc, p0_, p1_, D, PAIR)
                mbarrier.arrive(v_empty.index(freed))
                s = lone_scores(q_s, k_s, k_full.index(st), ph, k_empty.index(st), st * HALVES * SLOTS + shift, G, D,
                                 PAIR, SLOTS, SL)
                if kind == COLUMN_RUN:
                    s = keep_columns(s, rows, cols, some_ptr, whole_ptr, words, columns_ptr, column_cap, i,
                                       bands_ptr, bands, blocks_ptr, listed, size, PAIR)
                else:
                    s = keep_distances(s, rows, key, cols, lo, hi, stop)
                    if kind == WINDOW_RUN:
                        s = without_bands(s, rows, key + cols, bands_ptr, bands)
                    s = without_blocks(s, key + cols, blocks_ptr, listed, size)
                shrink, m, total, p0_, p1_ = weigh(s, m, total, scale, DTYPE, PAIR, PL)
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OL))[:, None]
                pst = st
                freed = st
                pph = ph
                slot = st * SLOTS + shift
                st, ph = _next(st, ph, STAGES)
    if freed < STAGES:
        acc = last_values(v_s, v_full.index(pst), pph, slot, acc, p0_, p1_, D, PAIR)
    own = rows - first
    some = total > 0
    lse = gl.where(some, (m + gl.log2(gl.where(some, total, 1.0))) * LN2, float("-inf"))
    gl.store(lse_ptr + head.to(gl.int64) * q_len + own, lse, mask=(own >= 0) & (own < q_len))
    share = gl.convert_layout(gl.where(some, 1.0 / gl.where(some, total, 1.0), 0.0), gl.SliceLayout(1, OL))
    values = (acc * share[:, None]).to(DTYPE)
    if r0 - first >= 0:
        _store_pieces(values, q_s, o_d, head, r0 - first, G, D)
    else:
        store_each(values, o_ptr, head, r0 - first, q_len, D, OL)


@gluon.jit(do_not_specialize=[
    "q_len", "kv_len", "heads", "heads_per_sequence", "group", "row_blocks", "table_blocks", "window_cap", "band_cap",
    "column_cap", "words", "block_rows", "block_cap", "by_kv", "only_start",
])
def sparse_kernel(q_d, k_d, v_d, o_d, kc_d, vc_d, o_ptr, lse_ptr, starts_ptr, windows_ptr, bands_ptr, band_count_ptr,
                  columns_ptr, counts_ptr, sinks_ptr, uneven_ptr, some_ptr, whole_ptr, blocks_ptr, block_count_ptr,
                  block_head_ptr, scale, q_len, kv_len, heads, heads_per_sequence, group, row_blocks, table_blocks,
                  window_cap, band_cap, column_cap, words, block_rows, block_cap, by_kv, only_start,
                  D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, RING: gl.constexpr,
                  HALF_BLOCKS: gl.constexpr, OVERLAPS: gl.constexpr):
    """Grid (heads * row_blocks,). `scale` is the softmax scale times log2(e); heads = B * Hq.

    Per 64 own rows: counts [heads, table_blocks, 2] is (windows that reach a key, columns not beyond the rows);
    some/whole [heads, table_blocks, words] are `triton_plan.keep_bits`, and uneven [heads, ceil(table_blocks / 2)]
    says where they differ within 128 own rows. block_head [heads, 2] is (slot or -1,
    block size). Without OVERLAPS no two lists of a head share a cell and every column may be read by all rows of a
    block or by none, but for heads whose columns are the first sinks [heads] keys: see `list_run`.
    """
    HALVES: gl.constexpr = D // 64
    PAIR: gl.constexpr = SLOTS - 1
    WIDTH: gl.constexpr = 64 * PAIR
    head, rank = place(gl.program_id(0), heads, group, row_blocks, by_kv)
    kv_head = head // group
    start = only_start
    if only_start < 0:
        start = gl.load(starts_ptr + head // heads_per_sequence)
    first = kv_len - q_len - start
    block = gl.cdiv(kv_len - start, ROWS) - 1 - rank
    p0 = block * ROWS
    # Sequences of one batch have different numbers of row blocks: a program beyond its sequence's first query
    # row has nothing to read, and stores nothing, because all its rows lie before local row 0.
    real = (block >= 0) & (p0 + ROWS > first)
    p0 = gl.where(real, p0, first - ROWS)
    wide = head.to(gl.int64)
    windows = 0
    bands = 0
    columns = 0
    sink = 0
    tile_blocks = 0
    halves0 = 0
    halves1 = 0
    listed0 = 0
    listed1 = 0
    blocked = False
    uneven = False
    size = 64
    blocks0_ptr = blocks_ptr
    blocks1_ptr = blocks_ptr
    if real:
        last = gl.minimum(2 * block + 1, table_blocks - 1)
        windows = gl.load(counts_ptr + (wide * table_blocks + last) * 2)
        columns = gl.cdiv(gl.load(counts_ptr + (wide * table_blocks + last) * 2 + 1), WIDTH)
        bands = gl.load(band_count_ptr + head)
        if OVERLAPS == 0:
            sink = gl.load(sinks_ptr + head)
        if OVERLAPS:
            uneven = gl.load(uneven_ptr + wide * gl.cdiv(table_blocks, 2) + block) != 0
        if block_cap > 0:
            entry = gl.load(block_head_ptr + 2 * head)
            if entry >= 0:
                blocked = True
                size = gl.load(block_head_ptr + 2 * head + 1)
                u0 = p0 // size
                u1 = (p0 + 64) // size
                blocks0_ptr += (entry.to(gl.int64) * block_rows + u0) * block_cap
                blocks1_ptr += (entry.to(gl.int64) * block_rows + u1) * block_cap
                listed0 = gl.load(block_count_ptr + entry * block_rows + u0)
                listed1 = gl.load(block_count_ptr + entry * block_rows + u1, mask=u1 < block_rows, other=0)
                if size % 128 == 0:
                    tile_blocks = listed0 * (size // WIDTH)
                else:
                    halves0 = listed0 * (size // 64)
                    halves1 = listed1 * (size // 64)
    windows_ptr += wide * window_cap
    bands_ptr += wide * band_cap * 2
    columns_ptr += wide * column_cap
    some_ptr += wide * table_blocks * words
    whole_ptr += wide * table_blocks * words
    q_s = gl.allocate_shared_memory(q_d.dtype, [2 * HALVES, 1, 64, 64], q_d.layout)
    k_s = gl.allocate_shared_memory(k_d.dtype, [STAGES * HALVES * SLOTS, 1, 64, 64], k_d.layout)
    v_s = gl.allocate_shared_memory(v_d.dtype, [STAGES * SLOTS, 1, 64, D], v_d.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    handover = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    # The ring of 64-key pieces: for each stage and row block K full, K empty, V full, V empty.
    RINGS: gl.constexpr = RING * 8 + 4 if HALF_BLOCKS else 1
    ring = gl.allocate_shared_memory(gl.int64, [RINGS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(handover, count=2)
    mbarrier.init(turn.index(0), count=1)
    mbarrier.init(turn.index(1), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    mbarrier.init(v_empty.index(STAGES), count=2)
    for i in gl.static_range(RINGS):
        mbarrier.init(ring.index(i), count=1 + i // (RING * 8))  # both row blocks use the spare barrier at the end
    fence_async_shared()  # the copy engine must see the barriers before the first load names one
    gl.warp_specialize([
        (_consumer, (q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, ring, handover, o_d, o_ptr, lse_ptr,
                     windows_ptr, bands_ptr, columns_ptr, some_ptr, whole_ptr, blocks0_ptr, blocks1_ptr, head, p0,
                     first, q_len, windows, bands, columns, sink, column_cap, words, table_blocks, tile_blocks,
                     halves0, halves1, listed0, listed1, blocked, uneven, size, scale, turn, 0, D, STAGES, SLOTS, RING,
                     HALF_BLOCKS, OVERLAPS)),
        (_consumer, (q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, ring, handover, o_d, o_ptr, lse_ptr,
                     windows_ptr, bands_ptr, columns_ptr, some_ptr, whole_ptr, blocks0_ptr, blocks1_ptr, head, p0,
                     first, q_len, windows, bands, columns, sink, column_cap, words, table_blocks, tile_blocks,
                     halves0, halves1, listed0, listed1, blocked, uneven, size, scale, turn, 1, D, STAGES, SLOTS, RING,
                     HALF_BLOCKS, OVERLAPS)),
        (_producer, (q_d, k_d, v_d, kc_d, vc_d, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, ring,
                     handover, windows_ptr, bands_ptr, blocks0_ptr, blocks1_ptr, head, kv_head, p0, first, start,
                     windows, bands, columns, sink, tile_blocks, halves0, halves1, blocked, uneven, size, D, STAGES,
                     SLOTS, RING, HALF_BLOCKS, OVERLAPS)),
    ], [4, 1], [240, 24])

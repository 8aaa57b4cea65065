"""The loading side of `gluon_sparse`: a producer warp that looks up one item after another and loads its lists."""

# mypy: ignore-errors
# Gluon kernels are compiled by Triton: their annotations are compile-time markers, not Python types.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from headscope.kernels.gluon.compat import tma_load
from headscope.kernels.gluon.dense import row_block
from headscope.kernels.gluon.lists import COLUMN_RUN, ROWS, WINDOW_RUN, first_key, list_run, needs_care, next_piece
from headscope.kernels.gluon.queue import announce, next_stage, take

# fmt: off
# Kernels take dozens of arguments: one a line would hide the few lines that compute.

FACTS = gl.constexpr(17)
"""What consumers are told of an item, in this order: head, own position of the first row and that of local row 0; how
many windows, bands, steps of columns, first keys and steps of blocks; per row block half blocks, and listed blocks;
whether there are blocks, and uneven columns; the block size; per row block which list of blocks is its own."""


@gluon.jit
def _look_up(item, items, fed, fed_caps, WIDTH: gl.constexpr, OVERLAPS: gl.constexpr):
    """The head and 128 rows of an item, how long each of its lists is, and which its block lists are."""
    (_windows_ptr, _bands_ptr, band_count_ptr, counts_ptr, sinks_ptr, uneven_ptr, _blocks_ptr, block_count_ptr,
     block_head_ptr) = fed
    table_blocks, _window_cap, _band_cap, block_rows, block_cap = fed_caps
    head, start, first, block, real, p0 = row_block(item, items, ROWS)
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
    list0 = 0
    list1 = 0
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
                list0 = entry * block_rows + u0
                list1 = entry * block_rows + u1
                listed0 = gl.load(block_count_ptr + list0)
                listed1 = gl.load(block_count_ptr + list1, mask=u1 < block_rows, other=0)
                if size % 128 == 0:
                    tile_blocks = listed0 * (size // WIDTH)
                else:
                    halves0 = listed0 * (size // 64)
                    halves1 = listed1 * (size // 64)
    return (head, p0, first, start, windows, bands, columns, sink, tile_blocks, halves0, halves1, listed0, listed1,
            blocked, uneven, size, list0, list1)


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
def produce(source, shared, items, fed, fed_caps, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
            RING: gl.constexpr, HALF_BLOCKS: gl.constexpr, OVERLAPS: gl.constexpr):
    q_d, k_d, v_d, kc_d, vc_d = source
    q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, ring, handover, queue, heard, told = shared
    counter_ptr, _starts_ptr, _only_start, _q_len, _kv_len, heads, _per_sequence, group, row_blocks, _by_kv = items
    windows_ptr, bands_ptr, _band_count, _counts, _sinks, _uneven, blocks_ptr, _block_count, _block_head = fed
    _table_blocks, window_cap, band_cap, _block_rows, block_cap = fed_caps
    HALVES: gl.constexpr = D // 64
    PAIR: gl.constexpr = SLOTS - 1
    WIDTH: gl.constexpr = 64 * PAIR
    st = 0
    ph = 1
    turn = 0
    item = gl.program_id(0)
    while item < heads * row_blocks:
        (head, p0, first, start, windows, bands, columns, sink, tile_blocks, halves0, halves1, listed0, listed1,
         blocked, uneven, size, list0, list1) = _look_up(item, items, fed, fed_caps, WIDTH, OVERLAPS)
        announce((head, p0, first, windows, bands, columns, sink, tile_blocks, halves0, halves1, listed0, listed1,
                  gl.where(blocked, 1, 0), gl.where(uneven, 1, 0), size, list0, list1), turn, queue, told, heard, FACTS)
        kv_head = head // group
        blocks0_ptr = blocks_ptr + list0.to(gl.int64) * block_cap
        blocks1_ptr = blocks_ptr + list1.to(gl.int64) * block_cap
        my_bands_ptr = bands_ptr + head.to(gl.int64) * band_cap * 2
        my_windows_ptr = windows_ptr + head.to(gl.int64) * window_cap
        lists = (my_bands_ptr, bands, my_windows_ptr, windows, columns, sink, uneven, blocks0_ptr, tile_blocks, blocked,
                 size)
        mbarrier.wait(q_empty, (turn & 1) ^ 1)
        mbarrier.expect(q_full, ROWS * D * 2)
        for g in gl.static_range(2):
            for half in gl.static_range(HALVES):
                tma_load(q_d, [head, p0 - first + g * 64, half * 64], q_full, q_s.index(g * HALVES + half))
        if HALF_BLOCKS:
            ring_st = 0
            ring_ph = 1
            for i in range(gl.maximum(halves0, halves1)):
                _fill_half_blocks(k_d, v_d, k_s, v_s, ring, blocks0_ptr, halves0, size, ring_st, ring_ph, i, kv_head,
                                  start, 0, D)
                _fill_half_blocks(k_d, v_d, k_s, v_s, ring, blocks1_ptr, halves1, size, ring_st, ring_ph, i, kv_head,
                                  start, 1, D)
                ring_st, ring_ph = next_stage(ring_st, ring_ph, RING)
            mbarrier.wait(handover, 0)
        passes = bands + 3
        if OVERLAPS:
            passes = gl.where(needs_care(bands, windows, uneven, blocked), 2 * passes, passes)
        for number in range(passes):
            later = number >= bands + 3
            run = gl.where(later, number - bands - 3, number)
            kind, steps, origin, _lo, _hi, _stop, list_ptr, factor, pieces, pitch = list_run(
                run, later, p0, lists, WIDTH, OVERLAPS)
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
                st, ph = next_stage(st, ph, STAGES)
        # One more stage, without keys: the output leaves through it.
        mbarrier.wait(k_empty.index(st), ph)
        mbarrier.arrive(k_full.index(st))
        mbarrier.wait(v_empty.index(st), ph)
        mbarrier.arrive(v_full.index(st))
        st, ph = next_stage(st, ph, STAGES)
        turn += 1
        if HALF_BLOCKS:
            item = heads * row_blocks
        else:
            item = take(counter_ptr)
    announce((-1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), turn, queue, told, heard, FACTS)

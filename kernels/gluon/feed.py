"""The loading side of `sparse.py`: a producer warp that looks up one item after another and loads its lists."""

# mypy: ignore-errors
# Gluon kernels are compiled by Triton: their annotations are compile-time markers, not Python types.

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from headscope.kernels.gluon.compat import tma_load
from headscope.kernels.gluon.dense import row_block
from headscope.kernels.gluon.lists import (
    COLUMN_RUN,
    ROWS,
    WINDOW_RUN,
    Lists,
    first_key,
    list_run,
    needs_care,
    next_piece,
)
from headscope.kernels.gluon.queue import announce, next_stage, take

# fmt: off
# Kernels take dozens of arguments: one a line would hide the few lines that compute.

class Facts(NamedTuple):
    """What consumers are told of an item, integers in this order.

    Own positions of its first row and of local row 0; how many windows, bands and steps of columns; how many first keys
    stand for the columns (see `list_run`); steps of blocks that both row blocks share; of each row block's own list of
    blocks the pieces of 64 keys, and how many blocks it lists; whether there are blocks, whether some rows may read a
    column that others may not; the block size; which list of blocks is each row block's own.
    """

    head: Any
    item_row: Any
    first_row: Any
    windows: Any
    bands: Any
    columns: Any
    sink: Any
    tile_blocks: Any
    halves0: Any
    halves1: Any
    listed0: Any
    listed1: Any
    blocked: Any
    uneven: Any
    size: Any
    list0: Any
    list1: Any


FACTS = gl.constexpr(len(Facts._fields))
(HEAD, ITEM_ROW, FIRST_ROW, WINDOWS, BANDS, COLUMNS, SINK, TILE_BLOCKS, HALVES_OF, _, LISTED_OF, _, BLOCKED, UNEVEN,
 SIZE, LIST_OF, _) = (gl.constexpr(place) for place in range(FACTS.value))
"""The place of each fact, of the first row block's where there are two: row block G's is G further on."""

K_FULL, K_EMPTY, V_FULL, V_EMPTY = (gl.constexpr(place) for place in range(4))
"""The barriers of a slot of the ring of half blocks: `ring[4 * slot + K_FULL]` and so on."""


class Source(NamedTuple):
    """TMA descriptors of what a producer loads: queries, keys, values, and each head's chosen keys and values."""

    q_d: Any
    k_d: Any
    v_d: Any
    kc_d: Any
    vc_d: Any


class Shared(NamedTuple):
    """What all warpgroups see: tiles of Q, K and V, their barriers, the ring of half blocks, and the queue."""

    q: Any
    k: Any
    v: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    ring: Any
    handover: Any
    queue: Any


class Fed(NamedTuple):
    """The tables that a producer reads, and their sizes; see `sparse_kernel`."""

    windows_ptr: Any
    bands_ptr: Any
    band_count_ptr: Any
    counts_ptr: Any
    sinks_ptr: Any
    uneven_ptr: Any
    blocks_ptr: Any
    block_count_ptr: Any
    block_head_ptr: Any
    table_blocks: Any
    window_cap: Any
    band_cap: Any
    block_rows: Any
    block_cap: Any


@gluon.jit
def _look_up(item, items, fed, WIDTH: gl.constexpr, OVERLAPS: gl.constexpr):
    """The start of an item's sequence, whether there are blocks, whether columns are uneven, and its `Facts`."""
    head, start, first_row, block, real, item_row = row_block(item, items, ROWS)
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
        last = gl.minimum(2 * block + 1, fed.table_blocks - 1)
        windows = gl.load(fed.counts_ptr + (wide * fed.table_blocks + last) * 2)
        columns = gl.cdiv(gl.load(fed.counts_ptr + (wide * fed.table_blocks + last) * 2 + 1), WIDTH)
        bands = gl.load(fed.band_count_ptr + head)
        if OVERLAPS == 0:
            sink = gl.load(fed.sinks_ptr + head)
        if OVERLAPS:
            uneven = gl.load(fed.uneven_ptr + wide * gl.cdiv(fed.table_blocks, 2) + block) != 0
        if fed.block_cap > 0:
            entry = gl.load(fed.block_head_ptr + 2 * head)
            if entry >= 0:
                blocked = True
                size = gl.load(fed.block_head_ptr + 2 * head + 1)
                u0 = item_row // size
                u1 = (item_row + 64) // size
                list0 = entry * fed.block_rows + u0
                list1 = entry * fed.block_rows + u1
                listed0 = gl.load(fed.block_count_ptr + list0)
                listed1 = gl.load(fed.block_count_ptr + list1, mask=u1 < fed.block_rows, other=0)
                if size % 128 == 0:
                    tile_blocks = listed0 * (size // WIDTH)
                else:
                    halves0 = listed0 * (size // 64)
                    halves1 = listed1 * (size // 64)
    facts = Facts(head, item_row, first_row, windows, bands, columns, sink, tile_blocks, halves0, halves1, listed0,
                  listed1, gl.where(blocked, 1, 0), gl.where(uneven, 1, 0), size, list0, list1)
    return start, blocked, uneven, facts


@gluon.jit
def _fill(k_d, v_d, shared, stage, phase, head, row, COUNT: gl.constexpr,
          D: gl.constexpr, SLOTS: gl.constexpr):
    """Loads COUNT slots of K and V from `row` on into stage `st`, once both row blocks have left it."""
    HALVES: gl.constexpr = D // 64
    mbarrier.wait(shared.k_empty.index(stage), phase)
    mbarrier.expect(shared.k_full.index(stage), COUNT * 64 * D * 2)
    for half in gl.static_range(HALVES):
        for s in gl.static_range(COUNT):
            tma_load(k_d, [head, row + 64 * s, 64 * half], shared.k_full.index(stage),
                     shared.k.index((stage * HALVES + half) * SLOTS + s))
    mbarrier.wait(shared.v_empty.index(stage), phase)
    mbarrier.expect(shared.v_full.index(stage), COUNT * 64 * D * 2)
    for s in gl.static_range(COUNT):
        tma_load(v_d, [head, row + 64 * s, 0], shared.v_full.index(stage), shared.v.index(stage * SLOTS + s))


@gluon.jit
def _fill_half_blocks(k_d, v_d, shared, blocks_ptr, halves, size, stage, phase, step, head, start,
                      G: gl.constexpr, D: gl.constexpr):
    """Loads one 64-key piece of row block G's own block list, if it has a `step`-th one."""
    HALVES: gl.constexpr = D // 64
    if step < halves:
        pieces = size // 64
        row = start + gl.load(blocks_ptr + step // pieces) * size + step % pieces * 64
        slot = stage * 2 + G
        mbarrier.wait(shared.ring.index(slot * 4 + K_EMPTY), phase)
        mbarrier.expect(shared.ring.index(slot * 4 + K_FULL), 64 * D * 2)
        for half in gl.static_range(HALVES):
            tma_load(k_d, [head, row, 64 * half], shared.ring.index(slot * 4 + K_FULL),
                     shared.k.index(slot * HALVES + half))
        mbarrier.wait(shared.ring.index(slot * 4 + V_EMPTY), phase)
        mbarrier.expect(shared.ring.index(slot * 4 + V_FULL), 64 * D * 2)
        tma_load(v_d, [head, row, 0], shared.ring.index(slot * 4 + V_FULL), shared.v.index(slot))


@gluon.jit
def produce(source, shared, items, fed, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
            RING: gl.constexpr, HALF_BLOCKS: gl.constexpr, OVERLAPS: gl.constexpr):
    q_d, k_d, v_d, kc_d, vc_d = source
    HALVES: gl.constexpr = D // 64
    PAIR: gl.constexpr = SLOTS - 1
    WIDTH: gl.constexpr = 64 * PAIR
    stage = 0
    phase = 1
    nth = 0
    item = gl.program_id(0)
    while item < items.heads * items.row_blocks:
        start, blocked, uneven, facts = _look_up(item, items, fed, WIDTH, OVERLAPS)
        announce(facts, nth, shared.queue, FACTS)
        head, size = facts.head, facts.size
        kv_head = head // items.group
        blocks0_ptr = fed.blocks_ptr + facts.list0.to(gl.int64) * fed.block_cap
        blocks1_ptr = fed.blocks_ptr + facts.list1.to(gl.int64) * fed.block_cap
        bands_ptr = fed.bands_ptr + head.to(gl.int64) * fed.band_cap * 2
        windows_ptr = fed.windows_ptr + head.to(gl.int64) * fed.window_cap
        lists = Lists(bands_ptr, facts.bands, windows_ptr, facts.windows, facts.columns, facts.sink, uneven,
                      blocks0_ptr, facts.tile_blocks, blocked, size)
        mbarrier.wait(shared.q_empty, (nth & 1) ^ 1)
        mbarrier.expect(shared.q_full, ROWS * D * 2)
        for g in gl.static_range(2):
            for half in gl.static_range(HALVES):
                row = facts.item_row - facts.first_row + g * 64
                tma_load(q_d, [head, row, half * 64], shared.q_full, shared.q.index(g * HALVES + half))
        if HALF_BLOCKS:
            ring_stage = 0
            ring_phase = 1
            for i in range(gl.maximum(facts.halves0, facts.halves1)):
                _fill_half_blocks(k_d, v_d, shared, blocks0_ptr, facts.halves0, size, ring_stage, ring_phase, i,
                                  kv_head, start, 0, D)
                _fill_half_blocks(k_d, v_d, shared, blocks1_ptr, facts.halves1, size, ring_stage, ring_phase, i,
                                  kv_head, start, 1, D)
                ring_stage, ring_phase = next_stage(ring_stage, ring_phase, RING)
            mbarrier.wait(shared.handover, 0)
        passes = facts.bands + 3
        if OVERLAPS:
            passes = gl.where(needs_care(lists), 2 * passes, passes)
        for at in range(passes):
            later = at >= facts.bands + 3
            number = gl.where(later, at - facts.bands - 3, at)
            run = list_run(number, later, facts.item_row, lists, WIDTH, OVERLAPS)
            entry = 0
            piece = 0
            for _ in range(run.steps):
                key = first_key(run, entry, piece)
                entry, piece = next_piece(entry, piece, run.pieces)
                if run.kind == COLUMN_RUN:
                    _fill(kc_d, vc_d, shared, stage, phase, head, key, PAIR, D, SLOTS)
                elif run.kind == WINDOW_RUN:
                    _fill(k_d, v_d, shared, stage, phase, kv_head, start + key, SLOTS, D, SLOTS)
                else:
                    _fill(k_d, v_d, shared, stage, phase, kv_head, start + key, PAIR, D, SLOTS)
                stage, phase = next_stage(stage, phase, STAGES)
        # One more stage, without keys: the output leaves through it.
        mbarrier.wait(shared.k_empty.index(stage), phase)
        mbarrier.arrive(shared.k_full.index(stage))
        mbarrier.wait(shared.v_empty.index(stage), phase)
        mbarrier.arrive(shared.v_full.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)
        nth += 1
        if HALF_BLOCKS:
            item = items.heads * items.row_blocks
        else:
            item = take(items.counter_ptr)
    announce((-1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), nth, shared.queue, FACTS)

"""The layout kernel of the portable path in Triton: causal attention with LSE over the cells of a layout.

One program takes 64 rows of one query head through full boxes, masked boxes, gathered columns and key blocks, in this
order (`plan`); see `attention` for shapes and meaning.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headscope.kernels.triton.common import PADDING, SOFTMAX_FLOOR, close_softmax, softmax_step
from headscope.kernels.triton.cover import BAND, BAND_ALL, BAND_ANY, COLUMN, COVER_SHIFT, WINDOW
from headscope.kernels.triton.dense import place, store_rows
from headscope.kernels.triton.plan import AFTER_BANDS, AFTER_COLUMNS, AFTER_NOTHING, AFTER_WINDOWS


@triton.jit
def _taken(cover_ptr, rows, columns, newest, after, TILE: tl.constexpr):
    """Cells [R, C] (0, else taken) that the lists before this one hold already, as far as `after` says.

    Columns beyond `newest`, the block's last row, are not looked up.
    """
    distance = rows[:, None] - columns[None, :]
    if TILE == 128:
        offset = (rows // 64 * 64)[:, None] - columns[None, :]
    else:
        offset = distance
    inside = (distance >= 0) & (columns >= 0)[None, :]
    taken = tl.load(cover_ptr + COVER_SHIFT + offset, mask=inside & (after > AFTER_NOTHING), other=0)
    taken = taken.to(tl.int32) & WINDOW
    if after > AFTER_WINDOWS:
        taken |= tl.load(cover_ptr + COVER_SHIFT + distance, mask=inside, other=0).to(tl.int32) & BAND
    if after > AFTER_BANDS:
        reached = (columns >= 0) & (columns <= newest)
        chosen = tl.load(cover_ptr + COVER_SHIFT + columns, mask=reached, other=0).to(tl.int32) & COLUMN
        taken |= chosen[None, :]
    return taken


@triton.jit
def _column_flags(columns_ptr, cover_ptr, at, count, r0, COLUMNS: tl.constexpr):
    """Positions and cover bytes of a tile of gathered columns; PADDING and BAND_ALL (taken) beyond the last."""
    place = at + tl.arange(0, COLUMNS)
    column = tl.load(columns_ptr + place, mask=place < count, other=PADDING)
    flags = tl.load(cover_ptr + COVER_SHIFT + r0 - column, mask=column <= r0 + 63, other=BAND_ALL).to(tl.int32)
    return column, flags


@triton.jit(
    do_not_specialize=(
        "q_len",
        "kv_len",
        "kv_heads",
        "blocks",
        "row_blocks",
        "full_cap",
        "edge_cap",
        "cover_cap",
        "words",
        "columns_cap",
        "block_rows",
        "block_cap",
    )
)
def attend_kernel(
    q_d,
    k_d,
    v_d,
    kc_d,
    vc_d,
    o_ptr,
    lse_ptr,
    k_ptr,
    v_ptr,
    starts_ptr,
    full_ptr,
    edge_ptr,
    counts_ptr,
    cover_ptr,
    bits_ptr,
    columns_ptr,
    blocks_ptr,
    block_count_ptr,
    slot_ptr,
    size_ptr,
    window_count_ptr,
    band_count_ptr,
    column_count_ptr,
    q_len,
    kv_len,
    kv_heads,
    blocks,
    row_blocks,
    scale,
    full_cap,
    edge_cap,
    cover_cap,
    words,
    columns_cap,
    block_rows,
    block_cap,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BOXES: tl.constexpr,
    LINES: tl.constexpr,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ODD_BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence, kv_local, member, back = place(blocks, kv_heads, GROUP, BY_BLOCK)
    start = tl.load(starts_ptr + sequence)
    first_row = kv_len - q_len - start
    block = (kv_len - start + 63) // 64 - 1 - back
    r0 = block * 64
    if (block >= 0) & (r0 + 64 > first_row):
        kv_head = sequence * kv_heads + kv_local
        head = kv_head * GROUP + member
        wide = head.to(tl.int64)
        rows = r0 + tl.arange(0, 64)
        lane = tl.arange(0, 64)
        # q [64, WIDTH]
        q = q_d.load([head, r0 - first_row, 0]).reshape([64, WIDTH])
        top = tl.full([64], SOFTMAX_FLOOR, tl.float32)
        total = tl.zeros([64], tl.float32)
        acc = tl.zeros([64, WIDTH], tl.float32)
        counts_ptr += (wide * row_blocks + block) * 4
        cover_ptr += wide * cover_cap
        n_inner = 0
        n_cut = 0
        n_edge = 0
        b_entries = 0
        b_inner = 0
        b_units = 1
        b_size = 1
        if BOXES:
            PER: tl.constexpr = 128 // COLUMNS
            n_inner = tl.load(counts_ptr)
            n_cut = tl.load(counts_ptr + 1) - n_inner
            n_edge = tl.load(counts_ptr + 2)
            full_ptr += wide * full_cap
            edge_ptr += wide * edge_cap * 4
            base = start + r0
            # The next tile's place is read one step ahead: its latency would otherwise delay the loads of K and V.
            following = base - tl.load(full_ptr, mask=n_inner > 0, other=0)
            for unit in tl.range(0, n_inner * PER, num_stages=STAGES):
                at = following
                ahead = tl.minimum(unit + 1, n_inner * PER - 1)
                following = base - tl.load(full_ptr + ahead // PER) + (ahead % PER) * COLUMNS
                k = k_d.load([kv_head, at, 0]).reshape([COLUMNS, WIDTH])
                v = v_d.load([kv_head, at, 0]).reshape([COLUMNS, WIDTH])
                scores = tl.dot(q, k.T, input_precision=PRECISION)
                acc, top, total = softmax_step(scores, v, acc, top, total, scale, PRECISION)
        if BLOCKS:
            slot = tl.load(slot_ptr + head)
            b_size = tl.maximum(tl.load(size_ptr + head), 1)
            if (slot >= 0) & (b_size % 64 == 0):
                row = r0 // b_size
                line = slot.to(tl.int64) * block_rows + row
                blocks_ptr += line * block_cap
                b_entries = tl.load(block_count_ptr + line)
                b_units = b_size // 64
                diagonal = tl.load(blocks_ptr + b_entries - 1, mask=b_entries > 0, other=-1) == row
                alone = True
                if OVERLAPS:
                    others = tl.load(window_count_ptr + head) + tl.load(band_count_ptr + head)
                    alone = others + tl.load(column_count_ptr + head) == 0
                b_inner = tl.where(alone, b_entries - diagonal.to(tl.int32), 0)
                following = start + tl.load(blocks_ptr, mask=b_inner > 0, other=0) * b_size
                for unit in tl.range(0, b_inner * b_units, num_stages=STAGES):
                    at = following
                    ahead = tl.minimum(unit + 1, b_inner * b_units - 1)
                    following = start + tl.load(blocks_ptr + ahead // b_units) * b_size + (ahead % b_units) * 64
                    k = k_d.load([kv_head, at, 0]).reshape([COLUMNS, WIDTH])
                    v = v_d.load([kv_head, at, 0]).reshape([COLUMNS, WIDTH])
                    scores = tl.dot(q, k.T, input_precision=PRECISION)
                    acc, top, total = softmax_step(scores, v, acc, top, total, scale, PRECISION)
        # Tiles that need a mask per cell: boxes cut by the first key, masked boxes, cut key blocks.
        cut_units = n_cut * 2
        box_units = cut_units + n_edge * 2
        for unit in tl.range(0, box_units + (b_entries - b_inner) * b_units, num_stages=1):
            at = r0
            lo = 0
            hi = PADDING
            after = AFTER_NOTHING
            if BOXES:
                if unit < cut_units:
                    at = r0 - tl.load(full_ptr + n_inner + unit // 2) + (unit % 2) * 64
                elif unit < box_units:
                    entry = edge_ptr + ((unit - cut_units) // 2) * 4
                    at = r0 - tl.load(entry) + (unit % 2) * 64
                    lo = tl.load(entry + 1)
                    hi = tl.load(entry + 2)
                    after = tl.load(entry + 3)
            if BLOCKS:  # noqa: SIM102
                if unit >= box_units:
                    key = b_inner * b_units + unit - box_units
                    at = tl.load(blocks_ptr + key // b_units) * b_size + (key % b_units) * 64
                    after = AFTER_COLUMNS
            # Skip half boxes without a cell: columns above every row's reach, or before the first key.
            if (r0 + 63 - at >= lo) & (r0 - at - 63 <= hi) & (at + 63 >= 0):
                columns = at + lane
                distance = rows[:, None] - columns[None, :]
                keep = (distance >= lo) & (distance <= hi) & (columns >= 0)[None, :]
                if OVERLAPS:  # noqa: SIM102
                    if after > AFTER_NOTHING:
                        keep = keep & (_taken(cover_ptr, rows, columns, r0 + 63, after, TILE) == 0)
                k = k_d.load([kv_head, start + at, 0]).reshape([64, WIDTH])
                v = v_d.load([kv_head, start + at, 0]).reshape([64, WIDTH])
                # Rows before the first key are padding and may hold anything.
                v = tl.where((columns >= 0)[:, None], v, 0.0).to(q.dtype)
                scores = tl.dot(q, k.T, input_precision=PRECISION)
                scores = tl.where(keep, scores, float("-inf"))
                acc, top, total = softmax_step(scores, v, acc, top, total, scale, PRECISION)
        if LINES:
            # Gathered columns, minus those that a box already covers.
            n_columns = tl.load(counts_ptr + 3)
            columns_ptr += wide * columns_cap
            # Behind a diagonal window and without bands, a column is read by all rows of a block or by none.
            fast = False
            if BITS:
                nearest = tl.load(edge_ptr, mask=tl.load(counts_ptr + 2) > 0, other=0)
                behind = (tl.load(window_count_ptr + head) > 0) & (nearest == 64)
                fast = behind & (tl.load(band_count_ptr + head) == 0)
                bits_ptr += (wide * row_blocks + block) * words
                if fast:
                    low = tl.load(bits_ptr)
                    high = tl.load(bits_ptr + 1)
                    for at in tl.range(0, n_columns, COLUMNS, num_stages=STAGES):
                        word = tl.where(lane < 32, low, high)
                        ahead = tl.minimum(at // 32 + 2, words - 2)
                        low = tl.load(bits_ptr + ahead)
                        high = tl.load(bits_ptr + ahead + 1)
                        k = kc_d.load([head, at, 0]).reshape([COLUMNS, WIDTH])
                        v = vc_d.load([head, at, 0]).reshape([COLUMNS, WIDTH])
                        scores = tl.dot(q, k.T, input_precision=PRECISION)
                        scores = tl.where((((word >> (lane & 31)) & 1) > 0)[None, :], scores, float("-inf"))
                        acc, top, total = softmax_step(scores, v, acc, top, total, scale, PRECISION)
            if fast == 0:
                for at in tl.range(0, n_columns, COLUMNS, num_stages=1):
                    column, flags = _column_flags(columns_ptr, cover_ptr, at, n_columns, r0, COLUMNS)
                    taken = (flags & BAND_ALL) | (0 if TILE == 1 else flags & WINDOW)
                    k = kc_d.load([head, at, 0]).reshape([COLUMNS, WIDTH])
                    v = vc_d.load([head, at, 0]).reshape([COLUMNS, WIDTH])
                    scores = tl.dot(q, k.T, input_precision=PRECISION)
                    scores = tl.where((taken == 0)[None, :], scores, float("-inf"))
                    partly = (taken == 0) & (((flags & BAND_ANY) > 0) | (r0 < column))
                    if tl.max(partly.to(tl.int32), 0) > 0:
                        distance = rows[:, None] - column[None, :]
                        seen = partly[None, :] & (distance >= 0)
                        band = tl.load(cover_ptr + COVER_SHIFT + distance, mask=seen, other=0).to(tl.int32) & BAND
                        gone = partly[None, :] & ((distance < 0) | (band > 0))
                        scores = tl.where(gone, float("-inf"), scores)
                    acc, top, total = softmax_step(scores, v, acc, top, total, scale, PRECISION)
        if ODD_BLOCKS:
            # Block sizes that 64 does not divide into: each block row in reach, its columns by pointer.
            odd_slot = tl.load(slot_ptr + head)
            odd_size = tl.maximum(tl.load(size_ptr + head), 1)
            if (odd_slot >= 0) & (odd_size % 64 != 0):
                last = tl.minimum((r0 + 63) // odd_size, block_rows - 1)
                dim = tl.arange(0, WIDTH)
                for row in range(r0 // odd_size, last + 1):
                    line = odd_slot.to(tl.int64) * block_rows + row
                    entries = tl.load(block_count_ptr + line)
                    mine = rows // odd_size == row
                    for at in tl.range(0, entries * odd_size, 64, num_stages=1):
                        key = at + lane
                        real = key < entries * odd_size
                        listed = tl.load(blocks_ptr + line * block_cap + key // odd_size, mask=real, other=0)
                        columns = tl.where(real, listed * odd_size + key % odd_size, PADDING)
                        keep = mine[:, None] & (rows[:, None] >= columns[None, :])
                        real = columns <= r0 + 63
                        if OVERLAPS:
                            keep = keep & (_taken(cover_ptr, rows, columns, r0 + 63, AFTER_COLUMNS, TILE) == 0)
                        source = (kv_head.to(tl.int64) * kv_len + start + columns)[:, None] * D + dim[None, :]
                        inside = real[:, None] & (dim < D)[None, :] & (start + columns < kv_len)[:, None]
                        k = tl.load(k_ptr + source, mask=inside, other=0.0)
                        v = tl.load(v_ptr + source, mask=inside, other=0.0)
                        scores = tl.dot(q, k.T, input_precision=PRECISION)
                        scores = tl.where(keep, scores, float("-inf"))
                        acc, top, total = softmax_step(scores, v, acc, top, total, scale, PRECISION)
        acc, lse = close_softmax(acc, top, total)
        store_rows(o_ptr, lse_ptr, acc.to(q.dtype), lse, wide * q_len, rows - first_row, q_len, D)

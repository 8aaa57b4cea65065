"""Causal attention with LSE in plain Triton (sm_80 and newer): over every cell, or over a layout.

q `[B, Hq, S, D]`, k and v `[B, Hkv, T, D]`; out as q, lse float32 `[B, Hq, S]` (natural log). Rows are cut into
blocks aligned to a sequence's own position 0. One program takes one block of one query head and runs the online
softmax of FlashAttention-2 (arXiv 2307.08691) over its tiles; the query heads of a GQA group run side by side
on the same K and V, which are never repeated. All heads of a layer, whatever their patterns, go in one launch:
full boxes, masked boxes, gathered columns, key blocks, in this order (`triton_plan`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headscope.kernels import triton_plan
from headscope.kernels.layout import Layout
from headscope.kernels.triton_common import (
    FLOOR,
    LOG2E,
    PADDING,
    check_inputs,
    close_softmax,
    descriptor,
    device_ints,
    packed,
    pad_dim,
    precision,
    softmax_step,
)

_MOST_WORDS = 2**27
"""Keep words of one launch: 512 MiB."""


@dataclass(frozen=True)
class Settings:
    """Tile shape and resources of one kernel: rows and columns of a tile, warps, pipeline stages."""

    rows: int
    columns: int
    warps: int
    stages: int


def dense_settings(width: int, element_size: int, capability: int) -> Settings:
    """Measured on an H200 for sm_90. Before it tensor maps become pointers: eight warps spill less."""
    if element_size == 4:
        return Settings(64, 32, 4, 1)
    if capability >= 90:
        return {256: Settings(128, 64, 8, 2), 128: Settings(128, 64, 8, 3)}.get(width, Settings(128, 64, 8, 3))
    if width == 256:
        return Settings(64, 32, 8, 1)
    return Settings(64, 64, 8, 2)


def sparse_settings(width: int, element_size: int, capability: int) -> Settings:
    """As `dense_settings`, for layouts: a row block is 64 rows."""
    if element_size == 4:
        return Settings(64, 64, 4, 1)
    if capability >= 90:
        return Settings(64, 64, 4, 2)
    if width == 256:
        return Settings(64, 64, 8, 1)
    return Settings(64, 64, 8, 2)


@triton.jit
def _place(blocks, kv_heads, GROUP: tl.constexpr, BY_BLOCK: tl.constexpr):
    """(sequence, KV head in the sequence, query head in the group, block from the end) of this program."""
    pid = tl.program_id(0)
    if BY_BLOCK:
        # Longest blocks of all heads first: balanced where there are few blocks.
        lanes = tl.num_programs(0) // blocks
        back = pid // lanes
        rest = pid % lanes
        flat = rest // GROUP
        member = rest % GROUP
    else:
        # One KV head after another: its keys stay in L2 over the whole sweep.
        flat = pid // (GROUP * blocks)
        rest = pid % (GROUP * blocks)
        back = rest // GROUP
        member = rest % GROUP
    return flat // kv_heads, flat % kv_heads, member, back


@triton.jit
def _store_rows(o_ptr, lse_ptr, out, lse, first, local, q_len, D: tl.constexpr):
    """Finished rows `local` of one head whose row 0 is row `first` of the output. Pointers, since a tensor-map store
    at a negative row is an illegal instruction on sm_90, unlike a load."""
    dim = tl.arange(0, out.shape[1])
    real = (local >= 0) & (local < q_len)
    tl.store(lse_ptr + first + local, lse, mask=real)
    place = (first + local)[:, None] * D + dim[None, :]
    tl.store(o_ptr + place, out, mask=real[:, None] & (dim < D)[None, :])


@triton.jit(do_not_specialize=("q_len", "kv_len", "kv_heads", "blocks"))
def _dense_kernel(
    q_d, k_d, v_d, o_ptr, lse_ptr, starts_ptr, q_len, kv_len, kv_heads, blocks, scale,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    BY_BLOCK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    sequence, kv_local, member, back = _place(blocks, kv_heads, GROUP, BY_BLOCK)
    start = tl.load(starts_ptr + sequence)
    first_row = kv_len - q_len - start
    block = (kv_len - start + ROWS - 1) // ROWS - 1 - back
    top_row = block * ROWS
    if (block >= 0) & (top_row + ROWS > first_row):
        kv_head = sequence * kv_heads + kv_local
        head = kv_head * GROUP + member
        rows = top_row + tl.arange(0, ROWS)
        # q [ROWS, WIDTH]
        q = q_d.load([head, top_row - first_row, 0]).reshape([ROWS, WIDTH])
        top = tl.full([ROWS], FLOOR, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        for at in tl.range(0, top_row, COLUMNS, num_stages=STAGES):
            k = k_d.load([kv_head, start + at, 0]).reshape([COLUMNS, WIDTH])
            v = v_d.load([kv_head, start + at, 0]).reshape([COLUMNS, WIDTH])
            scores = tl.dot(q, k.T, input_precision=PRECISION)
            acc, top, total = softmax_step(scores, v, acc, top, total, scale, PRECISION)
        for at in tl.range(top_row, top_row + ROWS, COLUMNS, num_stages=1):
            columns = at + tl.arange(0, COLUMNS)
            k = k_d.load([kv_head, start + at, 0]).reshape([COLUMNS, WIDTH])
            v = v_d.load([kv_head, start + at, 0]).reshape([COLUMNS, WIDTH])
            scores = tl.dot(q, k.T, input_precision=PRECISION)
            scores = tl.where(rows[:, None] >= columns[None, :], scores, float("-inf"))
            acc, top, total = softmax_step(scores, v, acc, top, total, scale, PRECISION)
        acc, lse = close_softmax(acc, top, total)
        _store_rows(o_ptr, lse_ptr, acc.to(q.dtype), lse, head.to(tl.int64) * q_len, rows - first_row, q_len, D)


@triton.jit
def _taken(cover_ptr, rows, columns, newest, flags, TILE: tl.constexpr):
    """Cells [R, C] (0 or 1) that windows (flags 1), windows and bands (2), or those and columns (3) hold already.

    Columns beyond `newest`, the block's last row, are not looked up.
    """
    distance = rows[:, None] - columns[None, :]
    if TILE == 128:
        offset = (rows // 64 * 64)[:, None] - columns[None, :]
    else:
        offset = distance
    inside = (distance >= 0) & (columns >= 0)[None, :]
    taken = tl.load(cover_ptr + 64 + offset, mask=inside & (flags > 0), other=0).to(tl.int32) & 1
    if flags > 1:
        taken |= tl.load(cover_ptr + 64 + distance, mask=inside, other=0).to(tl.int32) & 2
    if flags > 2:
        chosen = tl.load(cover_ptr + 64 + columns, mask=(columns >= 0) & (columns <= newest), other=0).to(tl.int32) & 4
        taken |= chosen[None, :]
    return taken


@triton.jit
def _column_flags(columns_ptr, cover_ptr, at, count, r0, COLUMNS: tl.constexpr):
    """Positions and cover bytes of a tile of gathered columns; PADDING and 8 (taken) beyond the last."""
    place = at + tl.arange(0, COLUMNS)
    column = tl.load(columns_ptr + place, mask=place < count, other=PADDING)
    flags = tl.load(cover_ptr + 64 + r0 - column, mask=column <= r0 + 63, other=8).to(tl.int32)
    return column, flags


@triton.jit(
    do_not_specialize=(
        "q_len", "kv_len", "kv_heads", "blocks", "row_blocks", "full_cap", "edge_cap", "cover_cap", "words",
        "columns_cap", "block_rows", "block_cap",
    )
)  # fmt: skip
def _attend_kernel(
    q_d, k_d, v_d, kc_d, vc_d, o_ptr, lse_ptr, k_ptr, v_ptr, starts_ptr,
    full_ptr, edge_ptr, counts_ptr, cover_ptr, bits_ptr, columns_ptr, blocks_ptr, block_count_ptr, slot_ptr, size_ptr,
    window_count_ptr, band_count_ptr, column_count_ptr,
    q_len, kv_len, kv_heads, blocks, row_blocks, scale,
    full_cap, edge_cap, cover_cap, words, columns_cap, block_rows, block_cap,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    BOXES: tl.constexpr, LINES: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr, ODD_BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr, BY_BLOCK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    sequence, kv_local, member, back = _place(blocks, kv_heads, GROUP, BY_BLOCK)
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
        top = tl.full([64], FLOOR, tl.float32)
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
            check = 0
            if BOXES:
                if unit < cut_units:
                    at = r0 - tl.load(full_ptr + n_inner + unit // 2) + (unit % 2) * 64
                elif unit < box_units:
                    entry = edge_ptr + ((unit - cut_units) // 2) * 4
                    at = r0 - tl.load(entry) + (unit % 2) * 64
                    lo = tl.load(entry + 1)
                    hi = tl.load(entry + 2)
                    check = tl.load(entry + 3)
            if BLOCKS:  # noqa: SIM102
                if unit >= box_units:
                    key = b_inner * b_units + unit - box_units
                    at = tl.load(blocks_ptr + key // b_units) * b_size + (key % b_units) * 64
                    check = 3
            # Skip half boxes without a cell: columns above every row's reach, or before the first key.
            if (r0 + 63 - at >= lo) & (r0 - at - 63 <= hi) & (at + 63 >= 0):
                columns = at + lane
                distance = rows[:, None] - columns[None, :]
                keep = (distance >= lo) & (distance <= hi) & (columns >= 0)[None, :]
                if OVERLAPS:  # noqa: SIM102
                    if check > 0:
                        keep = keep & (_taken(cover_ptr, rows, columns, r0 + 63, check, TILE) == 0)
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
                    taken = (flags & 8) | (0 if TILE == 1 else flags & 1)
                    k = kc_d.load([head, at, 0]).reshape([COLUMNS, WIDTH])
                    v = vc_d.load([head, at, 0]).reshape([COLUMNS, WIDTH])
                    scores = tl.dot(q, k.T, input_precision=PRECISION)
                    scores = tl.where((taken == 0)[None, :], scores, float("-inf"))
                    partly = (taken == 0) & (((flags & 16) > 0) | (r0 < column))
                    if tl.max(partly.to(tl.int32), 0) > 0:
                        distance = rows[:, None] - column[None, :]
                        seen = partly[None, :] & (distance >= 0)
                        band = tl.load(cover_ptr + 64 + distance, mask=seen, other=0).to(tl.int32) & 2
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
                            keep = keep & (_taken(cover_ptr, rows, columns, r0 + 63, 3, TILE) == 0)
                        source = (kv_head.to(tl.int64) * kv_len + start + columns)[:, None] * D + dim[None, :]
                        inside = real[:, None] & (dim < D)[None, :] & (start + columns < kv_len)[:, None]
                        k = tl.load(k_ptr + source, mask=inside, other=0.0)
                        v = tl.load(v_ptr + source, mask=inside, other=0.0)
                        scores = tl.dot(q, k.T, input_precision=PRECISION)
                        scores = tl.where(keep, scores, float("-inf"))
                        acc, top, total = softmax_step(scores, v, acc, top, total, scale, PRECISION)
        acc, lse = close_softmax(acc, top, total)
        _store_rows(o_ptr, lse_ptr, acc.to(q.dtype), lse, wide * q_len, rows - first_row, q_len, D)


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, starts: tuple[int, ...],
    settings: Settings | None = None, by_block: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Every causal cell. q [B, Hq, S, D], k/v [B, Hkv, T, D] -> out as q, lse float32 [B, Hq, S].

    Raises `ValueError` for a dtype, head size or scale that this path does not serve.
    """
    check_inputs(q, k, v, scale)
    q, k, v = packed(q), packed(k), packed(v)
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, width = k.shape[1], k.shape[2], pad_dim(head_dim)
    use = settings or dense_settings(width, q.element_size(), _capability(q.device))
    out, lse = _outputs(q, starts, kv_len)
    blocks = _block_span(q_len, kv_len, use.rows)
    _dense_kernel[(batch * heads * blocks,)](
        descriptor(q, use.rows, width), descriptor(k, use.columns, width), descriptor(v, use.columns, width),
        out, lse, device_ints(starts, q.device), q_len, kv_len, kv_heads, blocks,
        scale * LOG2E, GROUP=heads // kv_heads, D=head_dim, ROWS=use.rows, COLUMNS=use.columns, WIDTH=width,
        BY_BLOCK=kv_len <= 16384 if by_block is None else by_block, STAGES=use.stages,
        PRECISION=precision(q.dtype), num_warps=use.warps, num_stages=use.stages,
    )  # fmt: skip
    return out, lse


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float,
    settings: Settings | None = None, by_block: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The cells of `layout`, all heads in one launch. Rows without a cell give output 0 and LSE -inf.

    Raises `ValueError` for a tile other than 128 or 1, and as `dense`.
    """
    check_inputs(q, k, v, scale)
    q, k, v = packed(q), packed(k), packed(v)
    plan = triton_plan.make_plan(layout)
    keys, values = triton_plan.compact(k, v, layout)
    bits = _column_bits(layout, plan)
    heads, q_len, head_dim = q.shape[1], q.shape[2], q.shape[3]
    kv_heads, kv_len, width = k.shape[1], k.shape[2], pad_dim(head_dim)
    use = settings or sparse_settings(width, q.element_size(), _capability(q.device))
    out, lse = _outputs(q, layout.starts, kv_len)
    blocks = _block_span(q_len, kv_len, 64)
    lines = layout.columns.shape[1] > 0
    sizes = {size for slot, size in zip(layout.block_slot, layout.block_size, strict=True) if slot >= 0}
    listed = layout.blocks.numel() > 0
    _attend_kernel[(q.shape[0] * heads * blocks,)](
        descriptor(q, 64, width), descriptor(k, 64, width), descriptor(v, 64, width),
        descriptor(keys if lines else k, 64, width), descriptor(values if lines else v, 64, width),
        out, lse, k, v, device_ints(layout.starts, q.device),
        plan.full, plan.edge, plan.counts, plan.cover, bits, layout.columns, layout.blocks, layout.block_count,
        device_ints(layout.block_slot, q.device), device_ints(layout.block_size, q.device),
        layout.window_count, layout.band_count, layout.column_count,
        q_len, kv_len, kv_heads, blocks, plan.counts.shape[1], scale * LOG2E, plan.full.shape[1], plan.edge.shape[1],
        plan.cover.shape[1], bits.shape[2], layout.columns.shape[1], layout.blocks.shape[1], layout.blocks.shape[2],
        GROUP=heads // kv_heads, D=head_dim, WIDTH=width, TILE=layout.tile, COLUMNS=use.columns,
        BOXES=layout.windows.shape[1] + layout.bands.shape[1] > 0, LINES=lines,
        BITS=bits.shape[2] > 0, BLOCKS=listed and any(size % 64 == 0 for size in sizes),
        ODD_BLOCKS=listed and any(size % 64 != 0 for size in sizes),
        OVERLAPS=plan.cover.shape[1] > 0, BY_BLOCK=kv_len <= 16384 if by_block is None else by_block,
        STAGES=use.stages, PRECISION=precision(q.dtype), num_warps=use.warps,
        num_stages=use.stages,
    )  # fmt: skip
    return out, lse


def _column_bits(layout: Layout, plan: triton_plan.Plan) -> torch.Tensor:
    """Keep bits [N, G, words] where they help and stay small beside K and V, else [N, G, 0]: looked up cell by cell."""
    count, blocks = plan.counts.shape[:2]
    words = -(-layout.columns.shape[1] // 64) * 2
    if layout.tile == 1 or not layout.windows.shape[1] or count * blocks * words > _MOST_WORDS:
        words = 0
    if not words:
        return torch.empty(count, blocks, 0, dtype=torch.int32, device=layout.device)
    return triton_plan.column_bits(layout, plan)


def _outputs(q: torch.Tensor, starts: tuple[int, ...], kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty outputs; cleared only where padding rows exist, which no program visits."""
    padded = any(kv_len - q.shape[2] - start < 0 for start in starts)
    shape = q.shape[:3]
    if padded:
        return torch.zeros_like(q), torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device)
    return torch.empty_like(q), torch.empty(shape, dtype=torch.float32, device=q.device)


def _block_span(q_len: int, kv_len: int, rows: int) -> int:
    """Row blocks that can hold a query row: those of the last `q_len` positions, whatever the start."""
    return min(-(-kv_len // rows), -(-q_len // rows) + 1)


def _capability(device: torch.device) -> int:
    """Compute capability as one number (90 for sm_90); the newest where the interpreter runs on a CPU."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor

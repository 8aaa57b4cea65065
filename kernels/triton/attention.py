"""Causal attention with LSE in plain Triton (sm_80 and newer): over every cell, or over a layout.

q `[B, Hq, S, D]`, k and v `[B, Hkv, T, D]`; out as q, lse float32 `[B, Hq, S]` (natural log). Rows are cut into
blocks aligned to a sequence's own position 0. One program takes one block of one query head and runs the online
softmax of FlashAttention-2 (arXiv 2307.08691) over its tiles; the query heads of a GQA group run side by side
on the same K and V, which are never repeated. All heads of a layer, whatever their patterns, go in one launch:
full boxes, masked boxes, gathered columns, key blocks, in this order (`plan`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headscope.kernels.cells.inputs import check_layout, packed
from headscope.kernels.cells.layout import Layout
from headscope.kernels.triton.common import (
    base2,
    capability,
    check_inputs,
    descriptor,
    device_ints,
    pad_dim,
    precision,
)
from headscope.kernels.triton.cover import column_bits
from headscope.kernels.triton.dense import dense_kernel
from headscope.kernels.triton.plan import LaunchTables, compact, make_tables
from headscope.kernels.triton.sparse import attend_kernel

_MOST_WORDS = 2**27
"""Keep words of one launch: 512 MiB."""


@dataclass(frozen=True)
class Settings:
    """Tile shape and resources of one kernel: rows and columns of a tile, warps, pipeline stages."""

    rows: int
    columns: int
    warps: int
    stages: int


def dense_settings(width: int, element_size: int, generation: int) -> Settings:
    """Measured on an H200 for sm_90. Before it tensor maps become pointers: eight warps spill less."""
    if element_size == 4:
        return Settings(64, 32, 4, 1)
    if generation >= 90:
        return {256: Settings(128, 64, 8, 2), 128: Settings(128, 64, 8, 3)}.get(width, Settings(128, 64, 8, 3))
    if width == 256:
        return Settings(64, 32, 8, 1)
    return Settings(64, 64, 8, 2)


def sparse_settings(width: int, element_size: int, generation: int) -> Settings:
    """As `dense_settings`, for layouts: a row block is 64 rows."""
    if element_size == 4:
        return Settings(64, 64, 4, 1)
    if generation >= 90:
        return Settings(64, 64, 4, 2)
    if width == 256:
        return Settings(64, 64, 8, 1)
    return Settings(64, 64, 8, 2)


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    starts: tuple[int, ...],
    settings: Settings | None = None,
    by_block: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every causal cell. q [B, Hq, S, D], k/v [B, Hkv, T, D] -> out as q, lse float32 [B, Hq, S].

    Inputs are copied where they do not lie in one piece. `ValueError` for inputs that do not fit each other, and for a
    dtype or head size that this path does not serve.
    """
    check_inputs(q, k, v, scale, starts)
    q, k, v = packed(q), packed(k), packed(v)
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, width = k.shape[1], k.shape[2], pad_dim(head_dim)
    use = settings or dense_settings(width, q.element_size(), capability(q.device))
    out, lse = _outputs(q, starts, kv_len)
    blocks = _block_span(q_len, kv_len, use.rows)
    dense_kernel[(batch * heads * blocks,)](
        descriptor(q, use.rows, width),
        descriptor(k, use.columns, width),
        descriptor(v, use.columns, width),
        out,
        lse,
        device_ints(starts, q.device),
        q_len,
        kv_len,
        kv_heads,
        blocks,
        base2(scale),
        GROUP=heads // kv_heads,
        D=head_dim,
        ROWS=use.rows,
        COLUMNS=use.columns,
        WIDTH=width,
        BY_BLOCK=kv_len <= 16384 if by_block is None else by_block,
        STAGES=use.stages,
        PRECISION=precision(q.dtype),
        num_warps=use.warps,
        num_stages=use.stages,
    )
    return out, lse


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    scale: float,
    settings: Settings | None = None,
    by_block: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cells of `layout`, all heads in one launch. Rows without a cell give output 0 and LSE -inf.

    `ValueError` for a tile other than 128 or 1, for a layout of other inputs, and as `dense`.
    """
    check_inputs(q, k, v, scale, layout.starts)
    check_layout(layout, q, k)
    q, k, v = packed(q), packed(k), packed(v)
    tables = make_tables(layout)
    keys, values = compact(k, v, layout)
    bits = _column_bits(layout, tables)
    heads, q_len, head_dim = q.shape[1], q.shape[2], q.shape[3]
    kv_heads, kv_len, width = k.shape[1], k.shape[2], pad_dim(head_dim)
    use = settings or sparse_settings(width, q.element_size(), capability(q.device))
    out, lse = _outputs(q, layout.starts, kv_len)
    blocks = _block_span(q_len, kv_len, 64)
    lines = layout.columns.shape[1] > 0
    sizes = {size for slot, size in zip(layout.block_slot, layout.block_size, strict=True) if slot >= 0}
    listed = layout.blocks.numel() > 0
    attend_kernel[(q.shape[0] * heads * blocks,)](
        descriptor(q, 64, width),
        descriptor(k, 64, width),
        descriptor(v, 64, width),
        descriptor(keys if lines else k, 64, width),
        descriptor(values if lines else v, 64, width),
        out,
        lse,
        k,
        v,
        device_ints(layout.starts, q.device),
        tables.full,
        tables.edge,
        tables.counts,
        tables.cover,
        bits,
        layout.columns,
        layout.blocks,
        layout.block_count,
        device_ints(layout.block_slot, q.device),
        device_ints(layout.block_size, q.device),
        layout.window_count,
        layout.band_count,
        layout.column_count,
        q_len,
        kv_len,
        kv_heads,
        blocks,
        tables.counts.shape[1],
        base2(scale),
        tables.full.shape[1],
        tables.edge.shape[1],
        tables.cover.shape[1],
        bits.shape[2],
        layout.columns.shape[1],
        layout.blocks.shape[1],
        layout.blocks.shape[2],
        GROUP=heads // kv_heads,
        D=head_dim,
        WIDTH=width,
        TILE=layout.tile,
        COLUMNS=use.columns,
        BOXES=layout.windows.shape[1] + layout.bands.shape[1] > 0,
        LINES=lines,
        BITS=bits.shape[2] > 0,
        BLOCKS=listed and any(size % 64 == 0 for size in sizes),
        ODD_BLOCKS=listed and any(size % 64 != 0 for size in sizes),
        OVERLAPS=tables.cover.shape[1] > 0,
        BY_BLOCK=kv_len <= 16384 if by_block is None else by_block,
        STAGES=use.stages,
        PRECISION=precision(q.dtype),
        num_warps=use.warps,
        num_stages=use.stages,
    )
    return out, lse


def _column_bits(layout: Layout, tables: LaunchTables) -> torch.Tensor:
    """Keep bits [N, G, words] where they help and stay small beside K and V, else [N, G, 0]: looked up cell by cell."""
    count, blocks = tables.counts.shape[:2]
    words = -(-layout.columns.shape[1] // 64) * 2
    if layout.tile == 1 or not layout.windows.shape[1] or count * blocks * words > _MOST_WORDS:
        words = 0
    if not words:
        return torch.empty(count, blocks, 0, dtype=torch.int32, device=layout.device)
    return column_bits(layout, tables.cover)


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

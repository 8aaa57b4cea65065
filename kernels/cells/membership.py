"""Which cells a layout holds, as look-up tables of linear size; and, for small inputs, as a boolean mask.

The tables of one head: `window[x]` over `x = r0 - j`, `band[d]` over distances and `column[j]` over positions.
Block lists are unpacked a few block rows at a time, so nothing here grows with the square of the length but
`mask`, which is for small inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headscope.kernels.cells.layout import PAD, Layout


@dataclass(frozen=True)
class Tables:
    """Membership of `N` heads. window [N, R - 1 + T] is shifted by `R - 1`; band and column are [N, T]. All bool."""

    layout: Layout
    window: torch.Tensor
    band: torch.Tensor
    column: torch.Tensor

    def windows_at(self, offset: torch.Tensor, heads: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """`offset` = r0 - j in `-(R-1) .. T-1`, of shape [...]; returns [heads, ...]."""
        return self.window[heads][:, (offset + self.layout.rows - 1).clamp_(0, self.window.shape[1] - 1)]


def tables(layout: Layout) -> Tables:
    """The look-up tables of every head of a layout."""
    count, length, rows, width = layout.windows.shape[0], layout.kv_len, layout.rows, layout.tile
    device = layout.device
    window = _covered(layout.windows - (width - 1), layout.windows, -(rows - 1), length - 1)
    if layout.bands.shape[1]:
        band = _covered(layout.bands[..., 0], layout.bands[..., 1], 0, length - 1)
    else:
        band = torch.zeros(count, length, dtype=torch.bool, device=device)
    column = torch.zeros(count, length + 1, dtype=torch.bool, device=device)
    column.scatter_(1, layout.columns.long().clamp(max=length), True)
    return Tables(layout, window, band, column[:, :length])


def _covered(low: torch.Tensor, high: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """[N, last - first + 1] bool: positions inside any of the inclusive ranges [low, high]; PAD entries are empty."""
    size = last - first + 1
    edges = torch.zeros(low.shape[0], size + 1, dtype=torch.int32, device=low.device)
    real = (high < PAD).to(torch.int32)
    edges.scatter_add_(1, (low.long() - first).clamp(0, size), real)
    edges.scatter_add_(1, (high.long() - first + 1).clamp(0, size), -real)
    return edges[:, :size].cumsum(1) > 0


def block_rows(layout: Layout, head: int, first: int, stop: int) -> torch.Tensor:
    """bool [stop - first, key blocks]: the listed blocks of block rows `first .. stop - 1` of one head."""
    slot, size = layout.block_slot[head], layout.block_size[head]
    key_blocks = -(-layout.kv_len // size)
    listed = torch.zeros(stop - first, key_blocks + 1, dtype=torch.bool, device=layout.device)
    listed.scatter_(1, layout.blocks[slot, first:stop].long().clamp(max=key_blocks), True)
    return listed[:, :key_blocks]


def own_rows(layout: Layout, sequence: int) -> torch.Tensor:
    """int64 [S]: own positions of the query rows; negative where the row is padding."""
    return torch.arange(layout.q_len, device=layout.device) + layout.first_row[sequence]


def mask(layout: Layout) -> torch.Tensor:
    """bool [B, H, S, T]: the cells of a layout, in physical key positions. For small inputs: n x n cells."""
    table = tables(layout)
    parts = []
    for sequence in range(layout.batch):
        rows = own_rows(layout, sequence)
        cols = torch.arange(layout.kv_len, device=layout.device) - layout.starts[sequence]
        heads = slice(sequence * layout.heads, (sequence + 1) * layout.heads)
        parts.append(cells(layout, table, heads, rows, cols))
    return torch.stack(parts)


def cells(layout: Layout, table: Tables, heads: slice, rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
    """bool [heads, rows, cols]: the cells at these own rows and own key positions, for heads of one sequence."""
    distance = rows[:, None] - cols[None, :]
    causal = (distance >= 0) & (cols >= 0)[None, :] & (rows >= 0)[:, None]
    top = rows.div(layout.rows, rounding_mode="floor") * layout.rows
    last = layout.kv_len - 1
    inside = table.column[heads][:, cols.clamp(0, last)][:, None, :]
    if layout.windows.shape[1]:
        inside = inside | table.windows_at(top[:, None] - cols[None, :], heads)
    if layout.bands.shape[1]:
        inside = inside | table.band[heads][:, distance.clamp(0, last)]
    if any(layout.block_slot[head] >= 0 for head in range(heads.start, heads.stop)):
        inside = inside.expand(-1, len(rows), -1).clone()
    for local, head in enumerate(range(heads.start, heads.stop)):
        if layout.block_slot[head] >= 0:
            size = layout.block_size[head]
            listed = block_rows(layout, head, 0, layout.blocks.shape[1])
            inside[local] |= listed[rows.clamp(0, last)[:, None] // size, cols.clamp(0, last)[None, :] // size]
    return inside & causal

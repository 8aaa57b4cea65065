"""Exact numbers of cells, for any length: closed forms over tables of linear size, no cell is enumerated.

The four areas of an index: cells kept inside tiles, cells of columns outside them, cells that tiles load and
mask away, and cells that tiles load beyond the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headscope.kernels.cells import membership
from headscope.kernels.cells.layout import PAD, Layout

_CELLS = 2**22
"""Rows of listed blocks that are counted at a time."""


@dataclass(frozen=True)
class Areas:
    """int64 [B, H] each. `block` and `column` add up to the computed pairs.

    block: cells kept inside tiles (windows, bands, blocks). column: cells of columns outside them.
    causal_waste: cells of those tiles that are masked away: above the diagonal, before the first token,
    beyond a band's edge. padding: cells of those tiles beyond the sequence's rows and keys.
    """

    block: torch.Tensor
    column: torch.Tensor
    causal_waste: torch.Tensor
    padding: torch.Tensor


def pairs(layout: Layout) -> torch.Tensor:
    """int64 [B, H]: cells of the layout among the query rows."""
    table = membership.tables(layout)
    spans = _spans(layout)
    return torch.stack([torch.stack(_kept(layout, table, span)).sum(0) if span else _none(layout) for span in spans])


def causal_pairs(layout: Layout) -> torch.Tensor:
    """int64 [B]: every cell that the query rows may read."""
    counts = []
    for sequence, first in enumerate(layout.first_row):
        length, first = max(0, layout.length(sequence)), max(0, first)
        counts.append(length * (length + 1) // 2 - first * (first + 1) // 2)
    return torch.tensor(counts, dtype=torch.int64, device=layout.device)


def areas(layout: Layout) -> Areas:
    """The four areas of every head."""
    table = membership.tables(layout)
    per_sequence = []
    for span in _spans(layout):
        if span is None:
            per_sequence.append((_none(layout),) * 4)
            continue
        block, column = _kept(layout, table, span)
        tiles = (_tiles(layout, span, layout.windows[span.heads].long()), _bands(layout, span), _blocks(layout, span))
        area, padding = (torch.stack(part).sum(0) for part in zip(*tiles, strict=True))
        per_sequence.append((block, column, area - block - padding, padding))
    return Areas(*(torch.stack(part) for part in zip(*per_sequence, strict=True)))


@dataclass(frozen=True)
class _Span:
    """The query rows `first .. length - 1` of one sequence, and the heads that belong to it."""

    heads: slice
    first: int
    length: int


def _spans(layout: Layout) -> list[_Span | None]:
    """One per sequence; None where no query row is real."""
    spans: list[_Span | None] = []
    for sequence in range(layout.batch):
        heads = slice(sequence * layout.heads, (sequence + 1) * layout.heads)
        span = _Span(heads, max(0, layout.first_row[sequence]), layout.length(sequence))
        spans.append(span if span.first < span.length else None)
    return spans


def _none(layout: Layout) -> torch.Tensor:
    return torch.zeros(layout.heads, dtype=torch.int64, device=layout.device)


def _kept(layout: Layout, table: membership.Tables, span: _Span) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [H] each: cells in windows, bands and blocks, and cells of columns outside them."""
    rows, top = _rows(layout, span)
    block = _none(layout)
    if layout.windows.shape[1]:
        before = torch.nn.functional.pad(table.window[span.heads].long().cumsum(1), (1, 0))
        shift = layout.rows - 1
        # Row i reads x = r0 - j from r0 - i (the diagonal) to r0 (key 0).
        block = block + (before[:, top + shift + 1] - before[:, top - rows + shift]).sum(1)
    if layout.bands.shape[1]:
        block = block + table.band[span.heads].long().cumsum(1)[:, rows].sum(1)
    block = block + _block_cells(layout, table, span)
    return block, _columns(layout, table, span)


def _rows(layout: Layout, span: _Span) -> tuple[torch.Tensor, torch.Tensor]:
    """Query rows and the first row of the group of `R` that each belongs to."""
    rows = torch.arange(span.first, span.length, device=layout.device)
    return rows, rows // layout.rows * layout.rows


def _tiles(layout: Layout, span: _Span, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Area of the R x W tiles at these offsets [h, m] (PAD: none), and its part beyond the sequence."""
    rows, width = layout.rows, layout.tile
    tops = torch.arange(span.first // rows, -(-span.length // rows), device=layout.device) * rows
    area = torch.zeros(offsets.shape[0], dtype=torch.int64, device=layout.device)
    padding = torch.zeros_like(area)
    if not offsets.shape[1]:
        return area, padding
    # A tile is loaded where its newest key exists: r0 - delta + W - 1 >= 0.
    ordered = offsets.sort(1).values.contiguous()
    newest = (tops + width - 1).expand(offsets.shape[0], -1).contiguous()
    loaded = torch.searchsorted(ordered, newest, right=True)
    real_rows = (tops + rows).clamp(max=span.length) - tops.clamp(min=span.first)
    area = (loaded * (rows * width)).sum(1)
    padding = (loaded * ((rows - real_rows) * width)).sum(1)
    # Keys at or past the end: only tiles whose newest key lies right of row r0 can hold any.
    for place in range(min(offsets.shape[1], 2 + rows)):
        near = ordered[:, place : place + 1]
        if not bool((near < width).any()):
            break
        beyond = (tops - near + width - span.length).clamp(0, width)
        padding += torch.where((near <= newest) & (near < width), beyond * real_rows, 0).sum(1)
    return area, padding


def _bands(layout: Layout, span: _Span) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for bands; their tiles start at the band's near edge."""
    area, padding = _none(layout), _none(layout)
    for place in range(layout.bands.shape[1]):
        low, high = layout.bands[span.heads, place].long().unbind(-1)
        high = torch.minimum(high, torch.full_like(high, span.length - 1))
        tiles = torch.where(low < span.length, -((low - high - layout.rows) // layout.tile), 0)
        step = torch.arange(max(1, int(tiles.max())), device=layout.device)
        offsets = low[:, None] + layout.tile - layout.rows + layout.tile * step
        offsets = torch.where(step < tiles[:, None], offsets, PAD)
        more_area, more_padding = _tiles(layout, span, offsets)
        area, padding = area + more_area, padding + more_padding
    return area, padding


def _columns(layout: Layout, table: membership.Tables, span: _Span) -> torch.Tensor:
    """Cells of columns that no window, band or listed block covers, per head."""
    return _column_cells(layout, table, span).sum(1) - _columns_in_blocks(layout, table, span)


def _column_cells(layout: Layout, table: membership.Tables, span: _Span) -> torch.Tensor:
    """[h, C]: of the span's rows, those that read each column through no window or band."""
    columns = layout.columns[span.heads].long()
    real = columns < span.length
    at = columns.clamp(max=span.length - 1)
    first = at.clamp(min=span.first)
    cells = torch.where(real, span.length - first, 0)
    band = torch.nn.functional.pad(table.band[span.heads].long().cumsum(1), (1, 0))
    covered = band.gather(1, span.length - at) - band.gather(1, first - at)
    covered += _window_cover(layout, table, span, at, first)
    return torch.where(real, cells - covered, 0)


def _window_cover(
    layout: Layout, table: membership.Tables, span: _Span, at: torch.Tensor, first: torch.Tensor
) -> torch.Tensor:
    """[h, C]: of the rows `first .. length - 1` of column `at`, those that read it through a window."""
    size = layout.rows
    window = table.window[span.heads].long()
    if not layout.windows.shape[1]:
        return torch.zeros_like(at)
    # Column c meets x = r0 - c at steps of R, so sums run along one residue of x; the prefix is of stride R.
    steps = -(-window.shape[1] // size)
    padded = torch.nn.functional.pad(window, (0, steps * size - window.shape[1]))
    prefix = torch.nn.functional.pad(padded.view(-1, steps, size).cumsum(1), (0, 0, 1, 0)).flatten(1)

    def upto(row: torch.Tensor) -> torch.Tensor:
        """Covered rows before `row`, counted from the group that holds the column itself."""
        place = row // size * size - at + size - 1
        whole = prefix.gather(1, place.clamp(min=0)) * size
        partial = window.gather(1, place.clamp(0, window.shape[1] - 1)) * (row % size)
        return whole + partial

    end = torch.full_like(at, span.length)
    return upto(end) - upto(first)


def _blocks(layout: Layout, span: _Span) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for listed blocks."""
    area, padding = _none(layout), _none(layout)
    for local, head in enumerate(range(span.heads.start, span.heads.stop)):
        if layout.block_slot[head] >= 0:
            _, _, rows, columns, real = _listed(layout, head, span)
            square = layout.block_size[head] ** 2
            area[local] = real.sum() * square
            padding[local] = torch.where(real, square - rows * columns, 0).sum()
    return area, padding


def _listed(layout: Layout, head: int, span: _Span) -> tuple[torch.Tensor, ...]:
    """First row, last row + 1, rows, columns and whether there are any, of every listed block of a head."""
    size, slot = layout.block_size[head], layout.block_slot[head]
    tops = torch.arange(layout.blocks.shape[1], device=layout.device)[:, None] * size
    keys = layout.blocks[slot].long() * size
    low, high = tops.clamp(min=span.first), (tops + size).clamp(max=span.length)
    real = (keys < span.length) & (low < high)
    return low, high, torch.where(real, high - low, 0), (keys + size).clamp(max=span.length) - keys, real


def _block_cells(layout: Layout, table: membership.Tables, span: _Span) -> torch.Tensor:
    """Cells of listed blocks that no band or window holds already, per head."""
    kept = _none(layout)
    for local, head in enumerate(range(span.heads.start, span.heads.stop)):
        if layout.block_slot[head] < 0:
            continue
        low, high, rows, columns, real = _listed(layout, head, span)
        size = layout.block_size[head]
        tops = torch.arange(layout.blocks.shape[1], device=layout.device)[:, None] * size
        diagonal = layout.blocks[layout.block_slot[head]].long() * size == tops
        # Row i of a diagonal block keeps i - top + 1 keys.
        triangle = (low - tops + 1 + high - tops) * rows // 2
        kept[local] = torch.where(real, torch.where(diagonal, triangle, rows * columns), 0).sum()
        kept[local] -= _lines_in_blocks(layout, table, head, span)
    return kept


def _columns_in_blocks(layout: Layout, table: membership.Tables, span: _Span) -> torch.Tensor:
    """Cells of columns in listed blocks that no window or band holds, per head; a block row at a time."""
    cells = _none(layout)
    for local, head in enumerate(range(span.heads.start, span.heads.stop)):
        slot, size = layout.block_slot[head], layout.block_size[head]
        if slot < 0 or not int(layout.column_count[head]):
            continue
        for row in layout.block_count[slot].nonzero()[:, 0].tolist():
            part = _Span(slice(head, head + 1), max(span.first, row * size), min(span.length, (row + 1) * size))
            if part.first < part.length:
                listed = membership.block_rows(layout, head, row, row + 1)[0]
                block = (layout.columns[head].long() // size).clamp(max=len(listed) - 1)
                cells[local] += (_column_cells(layout, table, part)[0] * listed[block]).sum()
    return cells


def _lines_in_blocks(layout: Layout, table: membership.Tables, head: int, span: _Span) -> int:
    """Cells of listed blocks that bands or windows of the head hold too: per row, a difference of prefix sums."""
    if not int(layout.band_count[head] + layout.window_count[head]):
        return 0
    size, slot = layout.block_size[head], layout.block_slot[head]
    band = torch.nn.functional.pad(table.band[head].long().cumsum(0), (1, 0))
    window = torch.nn.functional.pad(table.window[head].long().cumsum(0), (1, 0))
    step, total = torch.arange(size, device=layout.device), 0
    entries = (layout.blocks[slot] < PAD).nonzero()
    for part in entries.split(max(1, _CELLS // size)):
        rows = part[:, :1] * size + step
        begin = (layout.blocks[slot][tuple(part.T)].long() * size)[:, None].expand_as(rows)
        some = (rows >= span.first) & (rows < span.length) & (begin <= rows)
        rows, begin = rows[some], begin[some]
        end = torch.minimum(begin + size, rows + 1)
        total += int((band[rows - begin + 1] - band[rows - end + 1]).sum())
        top = rows // layout.rows * layout.rows + layout.rows
        total += int((window[top - begin] - window[top - end]).sum())
    return total

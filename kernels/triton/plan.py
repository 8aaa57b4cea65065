"""What a kernel launch needs beyond a `Layout`, derived on the device without a host sync.

Windows and bands become **boxes** of 64 rows by 128 columns. A box with offset `delta` covers, for the row
block at own position `r0` (a multiple of 64), the columns `r0 - delta .. r0 - delta + 127`; the offsets are
the same for every row block, since distances are. Two lists per head:

- `full`: offsets of boxes whose cells all belong to the head, ascending. A kernel masks only columns `< 0`.
- `edge`: `(delta, lo, hi, after)`. The cell `(i, j)` of the box belongs when `lo <= i - j <= hi`, and, where
  `after` is AFTER_WINDOWS, when no window (no distance, for `tile` 1) already covers it.

Boxes of one head share no cell that belongs to both. `counts` says, per row block, how many entries matter.
Columns and blocks come after the boxes and count no cell twice: see `cover`.

Every list has the capacity that shapes known on the host bound; nothing is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headscope.kernels.cells.layout import Layout
from headscope.kernels.triton.common import (
    BOX_COLUMNS,
    PADDING,
    TILES,
    check_contiguous,
    count_below,
    device_ints,
    pad_dim,
    row_blocks,
    steps_for,
)
from headscope.kernels.triton.cover import make_cover

# How many of the lists before a list, in their order, may hold its cells already. Compile-time constants of kernels.
AFTER_NOTHING, AFTER_WINDOWS, AFTER_BANDS, AFTER_COLUMNS = (tl.constexpr(lists) for lists in range(4))


@dataclass(frozen=True)
class LaunchTables:
    """Device-side lists of `N` heads and `G` row blocks of 64 rows. All int32 but `cover` (uint8).

    full [N, F], edge [N, E, 4] (delta, lo, hi, after),
    counts [N, G, 4]: entries of `full` with every column >= 0; entries of `full` with any column >= 0; entries of
    `edge` to visit; entries of `columns` below the block's last row, for the row block at own position 64 g,
    cover [N, 64 + T + 128] (see `cover.py`), or [N, 0] where nothing can overlap.
    """

    full: torch.Tensor
    edge: torch.Tensor
    counts: torch.Tensor
    cover: torch.Tensor


@triton.jit(do_not_specialize=("windows_cap", "bands_cap", "full_cap", "edge_cap"))
def _boxes_kernel(
    windows_ptr,
    window_count_ptr,
    bands_ptr,
    band_count_ptr,
    lengths_ptr,
    full_ptr,
    edge_ptr,
    sizes_ptr,
    windows_cap,
    bands_cap,
    full_cap,
    edge_cap,
    TILE: tl.constexpr,
):
    """One program a head: windows and bands to the lists `full` and `edge`."""
    head = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + head)
    windows = tl.load(window_count_ptr + head)
    bands = tl.load(band_count_ptr + head)
    windows_ptr += head * windows_cap
    bands_ptr += head * bands_cap * 2
    full_ptr += head * full_cap
    edge_ptr += head * edge_cap * 4
    n_full = 0
    n_edge = 0
    big = PADDING
    if TILE == 128:
        # The diagonal window needs the causal mask; every other window is a full box.
        for at in range(0, windows, 256):
            place = at + tl.arange(0, 256)
            delta = tl.load(windows_ptr + place, mask=place < windows, other=big)
            near = delta < 127
            n_near = tl.sum((near & (place < windows)).to(tl.int32), 0)
            _store_edge(edge_ptr, n_edge + tl.arange(0, 256), delta, delta * 0, delta * 0 + big, AFTER_NOTHING, near)
            tl.store(full_ptr + n_full + tl.arange(0, 256) - n_near, delta, mask=(place < windows) & (near == 0))
            n_edge += n_near
            n_full += tl.minimum(windows - at, 256) - n_near
    after = (windows > 0).to(tl.int32) * AFTER_WINDOWS
    lane = tl.arange(0, 64)
    step = tl.arange(0, 16)
    for at in range(0, bands, 64):
        place = at + lane
        lo = tl.load(bands_ptr + place * 2, mask=place < bands, other=big)
        hi = tl.load(bands_ptr + place * 2 + 1, mask=place < bands, other=-1)
        real = lo < length
        # A band that reaches the first key needs no far mask: columns below 0 end it.
        hi = tl.where(real & (hi >= length - 1), big, hi)
        last = tl.minimum(hi, length - 1)
        boxes = tl.where(real, 1 + tl.maximum(last - lo - 64 + 127, 0) // 128, 0)
        # Box number b has offset lo + 64 + 128 b: the first is cut by lo; those beyond hi - 63 are cut by hi.
        inner = tl.minimum(tl.maximum(tl.where(hi - 127 >= lo, (hi - 127 - lo) // 128 + 1, 0), 1), boxes) - 1
        inner = tl.where(real & (after == AFTER_NOTHING), inner, 0)
        outer = boxes - inner
        f_at = n_full + tl.cumsum(inner, 0) - inner
        e_at = n_edge + tl.cumsum(outer, 0) - outer
        most_inner = tl.max(inner, 0)
        for b in range(0, most_inner, 16):
            number = b + step
            delta = lo[:, None] + 192 + 128 * number[None, :]
            tl.store(full_ptr + f_at[:, None] + number[None, :], delta, mask=number[None, :] < inner[:, None])
        most_outer = tl.max(outer, 0)
        for b in range(0, most_outer):
            number = tl.where(b == 0, 0, inner + b)
            _store_edge(edge_ptr, e_at + b, lo + 64 + 128 * number, lo, hi, after, b < outer)
        n_full += tl.sum(inner, 0)
        n_edge += tl.sum(outer, 0)
    if TILE == 1:
        for at in range(0, windows, 256):
            place = at + tl.arange(0, 256)
            delta = tl.load(windows_ptr + place, mask=place < windows, other=big)
            _store_edge(edge_ptr, n_edge + tl.arange(0, 256), delta + 64, delta, delta, AFTER_NOTHING, place < windows)
            n_edge += tl.minimum(windows - at, 256)
    tl.store(sizes_ptr + head * 2, n_full)
    tl.store(sizes_ptr + head * 2 + 1, n_edge)


@triton.jit
def _store_edge(edge_ptr, place, delta, lo, hi, after, mask):
    tl.store(edge_ptr + place * 4, delta, mask=mask)
    tl.store(edge_ptr + place * 4 + 1, lo, mask=mask)
    tl.store(edge_ptr + place * 4 + 2, hi, mask=mask)
    tl.store(edge_ptr + place * 4 + 3, lo * 0 + after, mask=mask)


@triton.jit(
    do_not_specialize=("full_cap", "edge_cap", "columns_cap", "row_blocks", "full_steps", "edge_steps", "column_steps")
)
def _counts_kernel(
    full_ptr,
    edge_ptr,
    sizes_ptr,
    columns_ptr,
    column_count_ptr,
    band_count_ptr,
    window_count_ptr,
    counts_ptr,
    full_cap,
    edge_cap,
    columns_cap,
    row_blocks,
    full_steps,
    edge_steps,
    column_steps,
    TILE: tl.constexpr,
):
    """Per row block, how many entries of each list can hold a cell. 64 row blocks a program."""
    head = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * 64 + tl.arange(0, 64)
    top = block * 64
    n_full = tl.load(sizes_ptr + head * 2)
    n_edge = tl.load(sizes_ptr + head * 2 + 1)
    full_ptr += head * full_cap
    inner = count_below(full_ptr, n_full, top + 1, full_steps, 1)
    some = count_below(full_ptr, n_full, top + 128, full_steps, 1)
    # Sorted by `lo` unless a head has both windows and bands: then all of its edges are visited.
    edges = count_below(edge_ptr + head * edge_cap * 4 + 1, n_edge, top + 64, edge_steps, 4)
    both = (tl.load(band_count_ptr + head) > 0) & (tl.load(window_count_ptr + head) > 0)
    edges = tl.where(both, n_edge, edges)
    columns = count_below(columns_ptr + head * columns_cap, tl.load(column_count_ptr + head), top + 64, column_steps, 1)
    out = counts_ptr + (head * row_blocks + block) * 4
    real = block < row_blocks
    tl.store(out, inner, mask=real)
    tl.store(out + 1, some, mask=real)
    tl.store(out + 2, edges, mask=real)
    tl.store(out + 3, columns, mask=real)


@triton.jit(do_not_specialize=("kv_len", "columns_cap", "heads", "group"))
def _compact_kernel(
    k_ptr,
    v_ptr,
    columns_ptr,
    column_count_ptr,
    starts_ptr,
    kc_ptr,
    vc_ptr,
    kv_len,
    columns_cap,
    heads,
    group,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The chosen K and V rows of each head, side by side; zeros beyond the head's count."""
    head = tl.program_id(1)
    sequence = head // heads
    kv_head = sequence * (heads // group) + head % heads // group
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    out = head.to(tl.int64) * columns_cap + place
    column = tl.load(columns_ptr + out, mask=place < columns_cap, other=0)
    some = (place < tl.load(column_count_ptr + head))[:, None] & (dim < D)[None, :]
    row = kv_head.to(tl.int64) * kv_len + tl.load(starts_ptr + sequence) + column
    source = row[:, None] * D + dim[None, :]
    target = out[:, None] * D + dim[None, :]
    inside = (place < columns_cap)[:, None] & (dim < D)[None, :]
    tl.store(kc_ptr + target, tl.load(k_ptr + source, mask=some, other=0.0), mask=inside)
    tl.store(vc_ptr + target, tl.load(v_ptr + source, mask=some, other=0.0), mask=inside)


def lengths(layout: Layout) -> torch.Tensor:
    """int32 [N]: real keys of each head's sequence."""
    per_head = tuple(layout.length(sequence) for sequence in range(layout.batch) for _ in range(layout.heads))
    return device_ints(per_head, layout.device)


def overlaps(layout: Layout) -> bool:
    """Whether two kinds of lists can share a cell, as far as the shapes tell."""
    kinds = (layout.windows.shape[1] > 0, layout.bands.shape[1] > 0, layout.columns.shape[1] > 0)
    return layout.columns.shape[1] > 0 or sum((*kinds, layout.blocks.numel() > 0)) > 1


def make_tables(layout: Layout) -> LaunchTables:
    """The lists of a layout (tile 128 or 1). Device work only: five launches at most, no sync.

    Raises `ValueError` for another tile.
    """
    if layout.tile not in TILES:
        raise ValueError(f"the Triton and Gluon kernels serve tile 128 or 1, got tile = {layout.tile}")
    device, count = layout.device, layout.windows.shape[0]
    blocks = row_blocks(layout)
    windows_cap, bands_cap, columns_cap = layout.windows.shape[1], layout.bands.shape[1], layout.columns.shape[1]
    in_band = -(-layout.kv_len // BOX_COLUMNS) + 1
    full_cap = max(1, (windows_cap if layout.tile > 1 else 0) + (in_band if bands_cap else 0))
    edge_cap = max(1, min(windows_cap, 2) if layout.tile > 1 else windows_cap)
    edge_cap += 3 * bands_cap + (in_band if bands_cap and windows_cap else 0)
    full = torch.empty(count, full_cap, dtype=torch.int32, device=device)
    edge = torch.empty(count, edge_cap, 4, dtype=torch.int32, device=device)
    sizes = torch.empty(count, 2, dtype=torch.int32, device=device)
    counts = torch.empty(count, blocks, 4, dtype=torch.int32, device=device)
    cover = make_cover(layout) if overlaps(layout) else torch.empty(count, 0, dtype=torch.uint8, device=device)
    _boxes_kernel[(count,)](
        layout.windows,
        layout.window_count,
        layout.bands,
        layout.band_count,
        lengths(layout),
        full,
        edge,
        sizes,
        windows_cap,
        bands_cap,
        full_cap,
        edge_cap,
        TILE=layout.tile,
        num_warps=4,
    )
    _counts_kernel[(-(-blocks // 64), count)](
        full,
        edge,
        sizes,
        layout.columns,
        layout.column_count,
        layout.band_count,
        layout.window_count,
        counts,
        full_cap,
        edge_cap,
        columns_cap,
        blocks,
        steps_for(full_cap),
        steps_for(edge_cap),
        steps_for(columns_cap),
        TILE=layout.tile,
        num_warps=2,
    )
    return LaunchTables(full=full, edge=edge, counts=counts, cover=cover)


def compact(k: torch.Tensor, v: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """K' and V' [N, C, D]: each head's chosen columns side by side, zeros after the last.

    `ValueError` where k or v is not contiguous.
    """
    check_contiguous(k=k, v=v)
    head_dim, columns_cap = k.shape[-1], layout.columns.shape[1]
    shape = (layout.columns.shape[0], columns_cap, head_dim)
    keys, values = k.new_empty(shape), v.new_empty(shape)
    if columns_cap:
        _compact_kernel[(-(-columns_cap // 32), shape[0])](
            k,
            v,
            layout.columns,
            layout.column_count,
            device_ints(layout.starts, k.device),
            keys,
            values,
            k.shape[2],
            columns_cap,
            layout.heads,
            layout.heads // k.shape[1],
            D=head_dim,
            WIDTH=pad_dim(head_dim),
            ROWS=32,
            num_warps=4,
        )
    return keys, values

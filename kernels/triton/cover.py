"""The byte table `cover`: which cells of a head a list that comes later must not count again; and keep bits from it.

Lists are visited in a fixed order, boxes (windows and bands) before columns and blocks, and a cell counts once.
`cover[n, COVER_SHIFT + x]` speaks of offset `x` of head `n`, from `-64` on:

    WINDOW    a window covers r0 - j = x
    BAND      a band covers the distance i - j = x
    COLUMN    position x is a chosen column
    BAND_ALL  a band covers all of the distances x .. x + 63, those of a column in the 64 rows of a block
    BAND_ANY  a band covers any of them

With tile 1 windows are single distances and count as bands too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headscope.kernels.cells.layout import Layout
from headscope.kernels.triton.common import BOX_COLUMNS, PADDING, count_below, row_blocks, steps_for

# Kernels read these as compile-time constants.
COVER_SHIFT = tl.constexpr(64)
WINDOW, BAND, COLUMN, BAND_ALL, BAND_ANY = (tl.constexpr(1 << bit) for bit in range(5))


@triton.jit(
    do_not_specialize=("windows_cap", "bands_cap", "columns_cap", "size", "window_steps", "band_steps", "column_steps")
)
def _cover_kernel(
    windows_ptr,
    window_count_ptr,
    bands_ptr,
    band_count_ptr,
    columns_ptr,
    column_count_ptr,
    cover_ptr,
    windows_cap,
    bands_cap,
    columns_cap,
    size,
    window_steps,
    band_steps,
    column_steps,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The byte table `cover`, 1,024 offsets a program."""
    head = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = place - COVER_SHIFT
    flags = x * 0
    windows = tl.load(window_count_ptr + head)
    if windows > 0:
        base = windows_ptr + head * windows_cap
        at = count_below(base, windows, x, window_steps, 1)
        delta = tl.load(base + at, mask=at < windows, other=PADDING)
        covered = delta - (TILE - 1) <= x
        flags |= covered.to(tl.int32) * (WINDOW | BAND if TILE == 1 else WINDOW)
        if TILE == 1:
            flags |= (delta <= x + 63).to(tl.int32) * BAND_ANY
    bands = tl.load(band_count_ptr + head)
    if bands > 0:
        base = bands_ptr + head * bands_cap * 2
        after = count_below(base, bands, x + 1, band_steps, 2) - 1
        hi = tl.load(base + after * 2 + 1, mask=after >= 0, other=-1)
        flags |= (hi >= x).to(tl.int32) * BAND * (after >= 0).to(tl.int32)
        flags |= (hi >= x + 63).to(tl.int32) * BAND_ALL * (after >= 0).to(tl.int32)
        late = count_below(base, bands, x + 64, band_steps, 2) - 1
        hi = tl.load(base + late * 2 + 1, mask=late >= 0, other=-1)
        flags |= (hi >= x).to(tl.int32) * BAND_ANY * (late >= 0).to(tl.int32)
    columns = tl.load(column_count_ptr + head)
    if columns > 0:
        base = columns_ptr + head * columns_cap
        at = count_below(base, columns, x, column_steps, 1)
        flags |= (tl.load(base + at, mask=at < columns, other=-1) == x).to(tl.int32) * COLUMN
    tl.store(cover_ptr + head * size + place, flags.to(tl.uint8), mask=place < size)


@triton.jit(do_not_specialize=("size", "columns_cap", "words", "row_blocks"))
def _keep_kernel(
    cover_ptr,
    columns_ptr,
    column_count_ptr,
    some_ptr,
    whole_ptr,
    size,
    columns_cap,
    words,
    row_blocks,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Keep bits of `WORDS` words of one head for 8 row blocks."""
    head = tl.program_id(1).to(tl.int64)
    place = tl.program_id(2) * WORDS * 32 + tl.arange(0, WORDS * 32)
    column = tl.load(columns_ptr + head * columns_cap + place, mask=place < columns_cap, other=PADDING)
    column = tl.where(place < tl.load(column_count_ptr + head), column, PADDING)
    word = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    bit = 1 << (place & 31)
    for step in range(8):
        block = tl.program_id(0) * 8 + step
        if block < row_blocks:
            x = block * 64 - column
            flags = tl.load(cover_ptr + head * size + COVER_SHIFT + x, mask=x >= -63, other=BAND_ALL).to(tl.int32)
            taken = (flags & BAND_ALL) > 0
            if TILE == 128:
                taken = taken | ((flags & WINDOW) > 0)
            some = (taken == 0) & (x >= -63)
            out = (head * row_blocks + block) * words + word
            tl.store(some_ptr + out, tl.sum(tl.reshape(tl.where(some, bit, 0), [WORDS, 32]), 1), mask=word < words)
            if WHOLE:
                whole = some & ((flags & BAND_ANY) == 0) & (x >= 0)
                tl.store(
                    whole_ptr + out, tl.sum(tl.reshape(tl.where(whole, bit, 0), [WORDS, 32]), 1), mask=word < words
                )


def make_cover(layout: Layout) -> torch.Tensor:
    """uint8 [N, 64 + T + 128]: the table `cover`, also where nothing overlaps."""
    count, size = layout.windows.shape[0], COVER_SHIFT.value + layout.kv_len + BOX_COLUMNS
    windows_cap, bands_cap, columns_cap = layout.windows.shape[1], layout.bands.shape[1], layout.columns.shape[1]
    cover = torch.empty(count, size, dtype=torch.uint8, device=layout.device)
    _cover_kernel[(-(-size // 1024), count)](
        layout.windows,
        layout.window_count,
        layout.bands,
        layout.band_count,
        layout.columns,
        layout.column_count,
        cover,
        windows_cap,
        bands_cap,
        columns_cap,
        size,
        steps_for(windows_cap),
        steps_for(bands_cap),
        steps_for(columns_cap),
        TILE=layout.tile,
        BLOCK=1024,
        num_warps=4,
    )
    return cover


def keep_bits(layout: Layout, cover: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which columns the boxes leave to each row block, as bits: int32 words [N, G, ceil(C / 32)], twice. `cover` as
    from `make_cover`.

    Bit `c % 32` of word `c // 32`: in the first, some row of the block may read column `c` and the boxes do not
    cover it for all of them; in the second, every row may and no box covers any of it. Where they differ, a kernel
    decides cell by cell: with `x = i - j`, the cell stays if `x >= 0` and neither `cover[r0 - j] & WINDOW`
    (tile 128) nor `cover[x] & BAND`.
    """
    words = -(-layout.columns.shape[1] // 32)
    some, whole = _words(layout, words), _words(layout, words)
    _keep(layout, cover, some, whole)
    return some, whole


def column_bits(layout: Layout, cover: torch.Tensor) -> torch.Tensor:
    """The first words of `keep_bits` alone, an even number per row block, 0 beyond a head's columns.

    In a head with a diagonal window and without bands (`edge[n, 0, 0] == 64`) they are exact for every row.
    """
    some = _words(layout, -(-layout.columns.shape[1] // 64) * 2)
    _keep(layout, cover, some, None)
    return some


def _words(layout: Layout, words: int) -> torch.Tensor:
    return torch.empty(layout.windows.shape[0], row_blocks(layout), words, dtype=torch.int32, device=layout.device)


def _keep(layout: Layout, cover: torch.Tensor, some: torch.Tensor, whole: torch.Tensor | None) -> None:
    count, blocks, words = some.shape
    if words:
        _keep_kernel[(-(-blocks // 8), count, -(-words // 32))](
            cover,
            layout.columns,
            layout.column_count,
            some,
            some if whole is None else whole,
            cover.shape[1],
            layout.columns.shape[1],
            words,
            blocks,
            TILE=layout.tile,
            WORDS=32,
            WHOLE=whole is not None,
            num_warps=4,
        )

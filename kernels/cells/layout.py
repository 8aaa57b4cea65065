"""What a sparse index is, as tables that every kernel reads.

A `HeadPlan` is what one head's pattern asks for, in integers, on the host. A `Layout` is what was chosen for
one input: windows, bands, columns and blocks per head, on the device of the queries. Positions are a
sequence's own (0 is its first real token): own key `j` lies at physical row `start + j`, local query row `s`
has own position `T - S + s - start`, and rows with a negative position are padding.

A cell `(i, j)`, `0 <= j <= i`, belongs to a layout when any of these holds; it counts once:

- window: some offset `delta` has `delta - W + 1 <= r0 - j <= delta`, with `r0 = i // R * R`;
- band: some `[lo, hi]` holds the distance `i - j`;
- column: `j` is listed;
- block: `j // bs` is listed for the block row `i // bs`.

`W` is the tile and `R = max(1, W // 2)` the rows that share a window, aligned to own position 0. Windows of
one head never overlap each other, and bands of one head are disjoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headscope.kernels.cells.plan import HeadPlan, tile_rows

PAD = 2**30
"""Fills the unused end of a list; larger than any position."""


@dataclass(frozen=True)
class Layout:
    """The chosen cells of `N = batch * heads` heads, row-major (batch, head). Tensors are int32.

    windows [N, Wn], bands [N, Bn, 2] and columns [N, C] are ascending and end in PAD; the counts [N] say how
    many entries are real. blocks [NB, nbq, K] holds the heads that have blocks, found through `block_slot`
    (-1 for the others), with the head's own `block_size`.
    """

    tile: int
    batch: int
    heads: int
    q_len: int
    kv_len: int
    starts: tuple[int, ...]
    windows: torch.Tensor
    window_count: torch.Tensor
    bands: torch.Tensor
    band_count: torch.Tensor
    columns: torch.Tensor
    column_count: torch.Tensor
    blocks: torch.Tensor
    block_count: torch.Tensor
    block_slot: tuple[int, ...]
    block_size: tuple[int, ...]
    plans: tuple[HeadPlan, ...] = ()
    """What the heads asked for, where known and expanded by `tiles/1`: kernels take from it what the device would have
    to be asked for. A requested layout has none, since its columns and distances share cells."""

    @property
    def rows(self) -> int:
        """Rows that share a window."""
        return tile_rows(self.tile)

    @property
    def device(self) -> torch.device:
        return self.windows.device

    @property
    def first_row(self) -> tuple[int, ...]:
        """Own position of local query row 0, per sequence; negative where the row is padding."""
        return tuple(self.kv_len - self.q_len - start for start in self.starts)

    def length(self, sequence: int) -> int:
        """Real keys of one sequence."""
        return self.kv_len - self.starts[sequence]

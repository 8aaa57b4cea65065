"""What one head's pattern asks for, in integers, and the rule that widens it to tiles. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

TILE = 128
"""Window width of the expansion rule `tiles/1`."""

TILES_VERSION = "tiles/1"


@dataclass(frozen=True)
class HeadPlan:
    """One head of one sequence: the cells fixed by position, and the budgets of what is chosen online.

    `bands` are inclusive distance ranges and `blocks` are `(block row, key block)` pairs. `vertical` and
    `slash` (or `windows`, which replaces it) make an online vertical-slash head, `top_blocks` an online
    block-sparse head. Zero budgets mean that the head is not of that kind.
    """

    bands: tuple[tuple[int, int], ...] = ()
    columns: tuple[int, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    vertical: int = 0
    sink: int = 0
    slash: int = 0
    local: int = 0
    windows: int = 0
    top_blocks: int = 0
    block_size: int = 0

    @property
    def online_slash(self) -> bool:
        return self.slash > 0 or self.windows > 0


@lru_cache(maxsize=64)
def fixed_lists(blocks: tuple[tuple[int, int], ...], rows: int) -> tuple[tuple[int, int, int], ...]:
    """Fixed blocks of the first `rows` block rows as (block row, place in that row's ascending list, key block)."""
    placed: list[tuple[int, int, int]] = []
    for row, key in sorted({pair for pair in blocks if pair[0] < rows}):
        place = placed[-1][1] + 1 if placed and placed[-1][0] == row else 0
        placed.append((row, place, key))
    return tuple(placed)


def tile_rows(tile: int) -> int:
    """Rows that share a window of `tile` columns: half its width, so a lone distance costs at most two."""
    return max(1, tile // 2)


def nearest_window(tile: int) -> int:
    """Offset of the window that holds the diagonal; whole windows lie at multiples of `tile` beyond it."""
    return tile - tile_rows(tile)


def max_windows(length: int, tile: int) -> int:
    """The most windows a head can have: they do not overlap and every one holds a causal cell."""
    return -(-(length + tile_rows(tile)) // tile) + 1

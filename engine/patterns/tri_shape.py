"""Tri-shape: an A-shape whose last rows are dense (Tri-shape of SCBench, arXiv 2412.10319)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from headscope.engine.patterns import foreign
from headscope.engine.patterns.a_shape import AShape
from headscope.engine.patterns.base import Field, Look, Pattern
from headscope.engine.patterns.budgets import Budget, resolve, times
from headscope.engine.patterns.registry import register
from headscope.kernels.cells.plan import HeadPlan

LEAST_BLOCK = 64
MOST_BLOCK_ROWS = 256
"""Bounds the list of key blocks of the last rows: `MOST_BLOCK_ROWS` entries a block row."""


@register
@dataclass(frozen=True)
class TriShape(Pattern):
    """The first `sink` tokens and the `window` most recent ones for every row, and every key for the last rows. Exact.

    The last rows are those of the blocks that hold the last `last` positions, so `last` rounded up to whole blocks:
    a block has 64 positions up to 16,384 tokens, and twice as many each time the length doubles beyond. Blocks are
    aligned to the sequence's own position 0. Last means last of the keys so far: in a chunked prefill or a second
    turn every call has its own last rows.
    """

    sink: Budget
    window: Budget
    last: Budget

    kind = "tri-shape"
    rank = 15
    look = Look("▼", "triangle-down", "rose")
    fields = (
        Field("sink", "Sink (first tokens)", "Tokens at the start that every row may read", 0, grows=False, step=1),
        Field("window", "Window (recent tokens)", "Most recent tokens, the row's own included", 1),
        Field("last", "Last rows (dense)", "Rows at the end that read every key, in whole blocks", 1, grows=False),
    )
    oracle = "a-shape"
    cost_as = AShape.kind

    def plan(self, length: int) -> HeadPlan:
        size = block_size(length)
        first = (length - min(resolve(self.last, length), length)) // size
        sink = min(resolve(self.sink, length), length)
        window = max(1, min(resolve(self.window, length), length))
        if sink + window >= first * size:
            return HeadPlan(bands=((0, max(0, length - 1)),))
        return HeadPlan(
            bands=((0, window - 1),),
            columns=tuple(range(sink)),
            blocks=tuple((row, key) for row in range(first, -(-length // size)) for key in range(row + 1)),
            block_size=size,
        )

    @classmethod
    def default(cls, length: int) -> Self:
        return cls(4, max(1, min(256, length // 4)), 64)

    def scaled(self, factor: float, length: int) -> Self:
        return type(self)(self.sink, times(self.window, factor, length), self.last)

    def amounts(self) -> tuple[tuple[Budget, str], ...]:
        return (self.sink, ""), (self.window, ""), (self.last, "last")

    def exported(self, tool: str) -> foreign.ForeignHead:
        nearest = AShape(self.sink, self.window).exported(tool)
        return foreign.ForeignHead(nearest.name, nearest.first, nearest.second, "tri-shape, whose last rows are dense")


def block_size(length: int) -> int:
    """The smallest power of two, at least 64, that cuts `length` positions into at most `MOST_BLOCK_ROWS` blocks."""
    size = LEAST_BLOCK
    while length > size * MOST_BLOCK_ROWS:
        size *= 2
    return size

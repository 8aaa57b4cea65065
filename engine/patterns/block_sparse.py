"""Block-sparse: the key blocks with the best mean-pooled scores (eq. 6 of the MInference article)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from headscope.engine.patterns import foreign
from headscope.engine.patterns.base import Field, Look, Pattern
from headscope.engine.patterns.budgets import LARGEST_BLOCK, LARGEST_BUDGET, Budget, resolve, times
from headscope.engine.patterns.registry import register
from headscope.kernels.cells.plan import HeadPlan

FOREIGN_BLOCKS, FOREIGN_SIZE = 100, 64
"""What MInference takes, whatever its file says."""


@register
@dataclass(frozen=True)
class BlockSparse(Pattern):
    """Per query block the `blocks` key blocks with the best mean-pooled score (eq. 6); the diagonal is always in."""

    blocks: Budget
    block_size: int = 64

    kind = "block-sparse"
    rank = 30
    look = Look("■", "square", "orange")
    fields = (
        Field(
            "blocks",
            "Blocks a row of blocks",
            "Key blocks kept for each block of queries, own one included",
            1,
            step=1,
        ),
        Field(
            "block_size",
            "Block size (tokens)",
            "Tokens a side",
            1,
            most=LARGEST_BLOCK,
            share=False,
            offered=16,
            step=16,
        ),
    )
    joint = "x"
    oracle = "blocks"
    cost_as = kind
    foreign_name = foreign.BLOCKS
    online = True

    def plan(self, length: int) -> HeadPlan:
        blocks = max(1, resolve(self.blocks, -(-length // self.block_size)))
        return HeadPlan(top_blocks=min(blocks, max(1, -(-length // self.block_size))), block_size=self.block_size)

    @classmethod
    def default(cls, length: int) -> Self:
        return cls(max(1, min(8, length // 256)))

    def scaled(self, factor: float, length: int) -> Self:
        return type(self)(times(self.blocks, factor, length), self.block_size)

    def amounts(self) -> tuple[tuple[Budget, str], ...]:
        return (self.blocks, ""), (self.block_size, "")

    def exported(self, tool: str) -> foreign.ForeignHead:
        if tool == "sglang":
            columns = foreign.whole(self.blocks) * self.block_size
            return foreign.lines(max(1000, min(columns, LARGEST_BUDGET)), 6096, self.kind)
        exact = (self.blocks, self.block_size) == (FOREIGN_BLOCKS, FOREIGN_SIZE)
        loss = None if exact else f"block-sparse other than {FOREIGN_BLOCKS} blocks of {FOREIGN_SIZE}"
        return foreign.ForeignHead(foreign.BLOCKS, FOREIGN_BLOCKS, 1, loss)

    @classmethod
    def imported(cls, tool: str, first: int, second: int) -> Self:
        return cls(FOREIGN_BLOCKS, FOREIGN_SIZE)

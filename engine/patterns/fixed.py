"""Positions written by hand: for teaching, tests and oracles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headscope.engine.patterns import foreign
from headscope.engine.patterns.a_shape import AShape
from headscope.engine.patterns.base import Look, Pattern
from headscope.engine.patterns.budgets import LARGEST_BLOCK, Budget, check_count, check_most
from headscope.engine.patterns.registry import register
from headscope.kernels.cells.plan import HeadPlan


@register
@dataclass(frozen=True)
class Fixed(Pattern):
    """Exactly these columns, distances and `(block row, key block)` pairs; nothing is added.

    For teaching, tests and oracles. A row with no cell gives output 0 and LSE -inf.
    """

    columns: tuple[int, ...] = ()
    distances: tuple[int, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    block_size: int = 64

    kind = "fixed"
    rank = 40
    look = Look("◇", "diamond-open", "green")
    joint = ", "
    oracle = "own"
    cost_as = AShape.kind
    one_prompt = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", _positions("Fixed.columns", self.columns))
        object.__setattr__(self, "distances", _positions("Fixed.distances", self.distances))
        pairs = tuple(sorted({_pair(pair) for pair in self.blocks}))
        object.__setattr__(self, "blocks", pairs)
        check_count("Fixed.block_size", self.block_size, 1)
        check_most("Fixed.block_size", self.block_size, LARGEST_BLOCK)

    def plan(self, length: int) -> HeadPlan:
        return HeadPlan(
            bands=merge_ranges(tuple(d for d in self.distances if d < length)),
            columns=tuple(c for c in self.columns if c < length),
            blocks=self.blocks,
            block_size=self.block_size if self.blocks else 0,
        )

    def amounts(self) -> tuple[tuple[Budget, str], ...]:
        return (len(self.columns), "columns"), (len(self.distances), "distances"), (len(self.blocks), "blocks")

    def exported(self, tool: str) -> foreign.ForeignHead:
        return foreign.lines(len(self.columns), len(self.distances), "fixed positions")


def merge_ranges(positions: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Ascending positions as inclusive ranges of neighbours: (0, 1, 2, 7) gives ((0, 2), (7, 7))."""
    ranges: list[tuple[int, int]] = []
    for position in positions:
        if ranges and position == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], position)
        else:
            ranges.append((position, position))
    return tuple(ranges)


def _positions(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list):
        raise ValueError(f"{name} must be a list of positions, got {type(values).__name__}")
    for value in values:
        check_count(name, value, 0)
    return tuple(sorted(set(values)))


def _pair(pair: Any) -> tuple[int, int]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(f"Fixed.blocks must hold (block row, key block) pairs, got {str(pair)[:40]}")
    for value in pair:
        check_count("Fixed.blocks", value, 0)
    if pair[1] > pair[0]:
        raise ValueError(f"Fixed.blocks must not lie above the diagonal, got {tuple(pair)}")
    return pair[0], pair[1]

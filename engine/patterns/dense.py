"""Every causal cell: what the sparse families are measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from headscope.engine.patterns import foreign
from headscope.engine.patterns.base import Look, Pattern
from headscope.engine.patterns.budgets import LARGEST_BUDGET
from headscope.engine.patterns.registry import register
from headscope.kernels.cells.plan import HeadPlan


@register
@dataclass(frozen=True)
class Dense(Pattern):
    """Every causal cell."""

    kind = "dense"
    rank = 0
    look = Look("□", "square-open", "grey")
    oracle = "own"
    cost_as = kind
    is_dense = True

    def plan(self, length: int) -> HeadPlan:
        return HeadPlan(bands=((0, max(0, length - 1)),))

    @classmethod
    def default(cls, length: int) -> Self:
        return cls()

    def exported(self, tool: str) -> foreign.ForeignHead:
        return foreign.lines(LARGEST_BUDGET, foreign.FORCED_DISTANCES, "dense heads")

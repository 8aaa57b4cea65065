"""A-shape: first tokens and a window (eq. 3 of the MInference article)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from headscope.engine.patterns import foreign
from headscope.engine.patterns.base import Field, Look, Pattern
from headscope.engine.patterns.budgets import Budget, has_share, resolve, times
from headscope.engine.patterns.registry import register
from headscope.kernels.cells.plan import HeadPlan


@register
@dataclass(frozen=True)
class AShape(Pattern):
    """The first `sink` tokens and the `window` most recent ones, the row's own included (eq. 3). Exact."""

    sink: Budget
    window: Budget

    kind = "a-shape"
    rank = 10
    look = Look("▲", "triangle-up", "violet")
    fields = (
        Field("sink", "Sink (first tokens)", "Tokens at the start that every row may read", 0, grows=False, step=1),
        Field("window", "Window (recent tokens)", "Most recent tokens, the row's own included", 1),
    )
    oracle = "a-shape"
    cost_as = kind
    foreign_name = foreign.SINK

    def plan(self, length: int) -> HeadPlan:
        window = max(1, min(resolve(self.window, length), length))
        sink = min(resolve(self.sink, length), length)
        return HeadPlan(bands=((0, window - 1),), columns=tuple(range(sink)))

    @classmethod
    def default(cls, length: int) -> Self:
        return cls(4, max(1, min(256, length // 4)))

    def scaled(self, factor: float, length: int) -> Self:
        return type(self)(self.sink, times(self.window, factor, length))

    def amounts(self) -> tuple[tuple[Budget, str], ...]:
        return (self.sink, ""), (self.window, "")

    def exported(self, tool: str) -> foreign.ForeignHead:
        sink, window = foreign.whole(self.sink), foreign.whole(self.window)
        if tool == "sglang":
            return foreign.lines(sink, window, self.kind)
        return foreign.ForeignHead(
            foreign.SINK, sink, window, foreign.SHARES if has_share(self.sink, self.window) else None
        )

    @classmethod
    def imported(cls, tool: str, first: int, second: int) -> Self:
        return cls(sink=first, window=second)

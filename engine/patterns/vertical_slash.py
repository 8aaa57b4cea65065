"""Vertical-slash: columns and distances chosen online (eq. 5 of the MInference article)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from headscope.engine.patterns import foreign
from headscope.engine.patterns.base import Field, Look, Pattern, Variant
from headscope.engine.patterns.budgets import LARGEST_BUDGET, Budget, has_share, resolve, times
from headscope.engine.patterns.registry import register
from headscope.kernels.cells.plan import TILE, HeadPlan


@register
@dataclass(frozen=True)
class VerticalSlash(Pattern):
    """Columns and distances chosen online for the input at hand (eq. 5).

    `vertical` columns, the first `sink` of them forced; `slash` distances `i - j`, `0 .. local - 1` forced.
    Forced ones are charged to the budgets. `windows` in place of `slash` buys whole windows of the tile rule
    by their summed mass, which bounds the computed cells; a budget of distances does not.
    """

    vertical: Budget
    slash: Budget | None = None
    sink: int = 0
    local: int = 1
    windows: Budget | None = None

    kind = "vertical-slash"
    rank = 20
    look = Look("✛", "cross-thin-open", "blue")
    fields = (
        Field("vertical", "Verticals (columns)", "Columns kept for all rows, chosen for this prompt", 0),
        Field("slash", "Slashes (distances)", "Distances back kept for all rows, chosen for this prompt", 1),
        Field(
            "windows", "Windows (of 128)", "Whole windows of the tile rule, which bound the computed cells", 1, step=1
        ),
        Field(
            "sink", "Sink (first tokens)", "First columns, always in, charged to the verticals", 0, share=False, step=1
        ),
        Field(
            "local",
            "Local (nearest distances)",
            "Nearest distances, always in, charged to the slashes",
            1,
            share=False,
            step=1,
        ),
    )
    oracle = "lines"
    cost_as = kind
    foreign_name = foreign.LINES
    online = True
    sampled = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.slash is None) == (self.windows is None):
            raise ValueError("VerticalSlash takes either slash (distances) or windows, and exactly one of them")
        if self.slash is not None:
            _check_forced("slash", self.slash, "local", self.local)
        elif self.local != 1:
            raise ValueError("VerticalSlash.local goes with slash; with windows the nearest window is always in")
        _check_forced("vertical", self.vertical, "sink", self.sink)

    def plan(self, length: int) -> HeadPlan:
        vertical = max(resolve(self.vertical, length), self.sink)
        sink = min(self.sink, length)
        if self.windows is not None:
            return HeadPlan(vertical=min(vertical, length), sink=sink, windows=max(1, resolve(self.windows, length)))
        assert self.slash is not None
        slash = max(resolve(self.slash, length), self.local)
        return HeadPlan(
            vertical=min(vertical, length), sink=sink, slash=max(1, min(slash, length)), local=min(self.local, length)
        )

    @classmethod
    def default(cls, length: int) -> Self:
        return cls(vertical=64, slash=256, sink=4, local=16)

    def scaled(self, factor: float, length: int) -> Self:
        vertical = max(self.sink, times(self.vertical, factor, length))
        if self.windows is not None:
            return type(self)(vertical, sink=self.sink, windows=times(self.windows, factor, length))
        assert self.slash is not None
        slash = max(self.local, times(self.slash, factor, length))
        return type(self)(vertical, slash, self.sink, self.local)

    @property
    def active_fields(self) -> tuple[Field, ...]:
        left_out = ("windows",) if self.windows is None else ("slash", "local")
        return tuple(field for field in self.fields if field.name not in left_out)

    @property
    def variant(self) -> Variant:
        text = "Buys windows of 128 distances by their mass, in place of single distances"
        return Variant("Whole windows", text, self.windows is not None)

    def switched(self, on: bool) -> Self:
        if on:
            return type(self)(self.vertical, sink=self.sink, windows=4)
        return type(self)(self.vertical, 256, self.sink, local=16)

    def amounts(self) -> tuple[tuple[Budget, str], ...]:
        if self.windows is not None:
            return (self.vertical, ""), (self.windows, "windows")
        assert self.slash is not None
        return (self.vertical, ""), (self.slash, "")

    def exported(self, tool: str) -> foreign.ForeignHead:
        columns = foreign.whole(self.vertical)
        if self.windows is not None:
            distances = min(foreign.whole(self.windows) * TILE, LARGEST_BUDGET)
            return foreign.lines(columns, distances, "a budget of windows instead of distances")
        assert self.slash is not None
        distances = foreign.whole(self.slash)
        loss = None
        if has_share(self.vertical, self.slash):
            loss = foreign.SHARES
        elif columns < foreign.FORCED_COLUMNS or distances < foreign.LEAST_DISTANCES:
            loss = f"fewer than {foreign.FORCED_COLUMNS} columns or {foreign.LEAST_DISTANCES} distances"
        elif self.sink != foreign.FORCED_COLUMNS or self.local != min(foreign.FORCED_DISTANCES, distances):
            loss = (
                f"other forced cells than the first {foreign.FORCED_COLUMNS} columns and "
                f"{foreign.FORCED_DISTANCES} distances"
            )
        return foreign.lines(columns, distances, loss)

    @classmethod
    def imported(cls, tool: str, first: int, second: int) -> Self:
        if tool == "sglang" and first == foreign.FORCED_COLUMNS:
            first = foreign.SGLANG_THIRTY
        slash = max(second, foreign.LEAST_DISTANCES)
        return cls(
            vertical=max(first, foreign.FORCED_COLUMNS),
            slash=slash,
            sink=foreign.FORCED_COLUMNS,
            local=min(foreign.FORCED_DISTANCES, slash),
        )


def _check_forced(name: str, budget: Budget, forced_name: str, forced: int) -> None:
    if isinstance(budget, int) and budget < forced:
        raise ValueError(
            f"VerticalSlash.{name} must be at least {forced_name} = {forced}, since forced cells are charged to it, "
            f"got {budget}"
        )

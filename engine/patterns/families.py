"""The pattern families of a head, and their budgets.

Each class is frozen and checks itself. Equation numbers are those of the MInference article that the project
follows: A-shape is eq. 3, Vertical-Slash eq. 5, Block-Sparse eq. 6. Budgets are counts of tokens, distances,
windows or blocks; any of them may be a `Fraction` of the row's length, resolved when the index is built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from headscope.kernels.cells.plan import HeadPlan

LARGEST_BUDGET = 2**30 - 1
"""Budgets above the longest position that an index can hold are refused, not wrapped."""


@dataclass(frozen=True)
class Fraction:
    """A budget as a share of the sequence's length: `round(of * length)`, at least `least`, at most `most`."""

    of: float
    least: int = 1
    most: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.of, bool) or not isinstance(self.of, int | float) or not math.isfinite(self.of):
            raise ValueError(f"Fraction.of must be a number in (0, 1], got {self.of!r}")
        if not 0 < self.of <= 1:
            raise ValueError(f"Fraction.of must be in (0, 1], got {self.of!r}")
        _check_count("Fraction.least", self.least, 0)
        if self.most is not None:
            _check_count("Fraction.most", self.most, 0)
            if self.most < self.least:
                raise ValueError(f"Fraction.most must be at least Fraction.least = {self.least}, got {self.most}")

    def resolve(self, length: int) -> int:
        """The budget for a sequence of `length` tokens."""
        wanted = max(self.least, round(self.of * length))
        return wanted if self.most is None else min(wanted, self.most)

    def __str__(self) -> str:
        return f"{self.of:.3g}n"


Budget = int | Fraction


class Pattern:
    """Base of the pattern families; use one of the subclasses."""

    kind: ClassVar[str]

    def plan(self, length: int) -> HeadPlan:
        """The cells and online budgets of this pattern for a sequence of `length` tokens."""
        raise TypeError(f"{type(self).__name__} has no plan")

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form that `from_dict` turns back into an equal pattern."""
        entries = {field.name: _budget_to_json(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]
        return {"pattern": self.kind} | {name: value for name, value in entries.items() if value is not None}

    @property
    def label(self) -> str:
        """A short text such as `vertical-slash 64/256`."""
        return self.kind


@dataclass(frozen=True)
class Dense(Pattern):
    """Every causal cell."""

    kind = "dense"

    def plan(self, length: int) -> HeadPlan:
        return HeadPlan(bands=((0, max(0, length - 1)),))


@dataclass(frozen=True)
class AShape(Pattern):
    """The first `sink` tokens and the `window` most recent ones, the row's own included (eq. 3). Exact."""

    sink: Budget
    window: Budget
    kind = "a-shape"

    def __post_init__(self) -> None:
        _check_budget("AShape.sink", self.sink, 0)
        _check_budget("AShape.window", self.window, 1)

    def plan(self, length: int) -> HeadPlan:
        window = max(1, min(_resolve(self.window, length), length))
        sink = min(_resolve(self.sink, length), length)
        return HeadPlan(bands=((0, window - 1),), columns=tuple(range(sink)))

    @property
    def label(self) -> str:
        return f"a-shape {self.sink}/{self.window}"


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

    def __post_init__(self) -> None:
        _check_budget("VerticalSlash.vertical", self.vertical, 0)
        _check_count("VerticalSlash.sink", self.sink, 0)
        _check_count("VerticalSlash.local", self.local, 1)
        if (self.slash is None) == (self.windows is None):
            raise ValueError("VerticalSlash takes either slash (distances) or windows, and exactly one of them")
        if self.slash is not None:
            _check_budget("VerticalSlash.slash", self.slash, 1)
            _check_forced("slash", self.slash, "local", self.local)
        if self.windows is not None:
            _check_budget("VerticalSlash.windows", self.windows, 1)
            if self.local != 1:
                raise ValueError("VerticalSlash.local goes with slash; with windows the nearest window is always in")
        _check_forced("vertical", self.vertical, "sink", self.sink)

    def plan(self, length: int) -> HeadPlan:
        vertical = max(_resolve(self.vertical, length), self.sink)
        sink = min(self.sink, length)
        if self.windows is not None:
            return HeadPlan(vertical=min(vertical, length), sink=sink, windows=max(1, _resolve(self.windows, length)))
        assert self.slash is not None
        slash = max(_resolve(self.slash, length), self.local)
        return HeadPlan(
            vertical=min(vertical, length), sink=sink, slash=max(1, min(slash, length)), local=min(self.local, length)
        )

    @property
    def label(self) -> str:
        if self.windows is not None:
            return f"vertical-slash {self.vertical}/{self.windows} windows"
        return f"vertical-slash {self.vertical}/{self.slash}"


@dataclass(frozen=True)
class BlockSparse(Pattern):
    """Per query block the `blocks` key blocks with the best mean-pooled score (eq. 6); the diagonal is always in."""

    blocks: Budget
    block_size: int = 64
    kind = "block-sparse"

    def __post_init__(self) -> None:
        _check_budget("BlockSparse.blocks", self.blocks, 1)
        _check_block_size("BlockSparse.block_size", self.block_size)

    def plan(self, length: int) -> HeadPlan:
        blocks = max(1, _resolve(self.blocks, -(-length // self.block_size)))
        return HeadPlan(top_blocks=min(blocks, max(1, -(-length // self.block_size))), block_size=self.block_size)

    @property
    def label(self) -> str:
        return f"block-sparse {self.blocks}x{self.block_size}"


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", _positions("Fixed.columns", self.columns))
        object.__setattr__(self, "distances", _positions("Fixed.distances", self.distances))
        pairs = tuple(sorted({_pair(pair) for pair in self.blocks}))
        object.__setattr__(self, "blocks", pairs)
        _check_block_size("Fixed.block_size", self.block_size)

    def plan(self, length: int) -> HeadPlan:
        return HeadPlan(
            bands=merge_ranges(tuple(d for d in self.distances if d < length)),
            columns=tuple(c for c in self.columns if c < length),
            blocks=self.blocks,
            block_size=self.block_size if self.blocks else 0,
        )

    @property
    def label(self) -> str:
        return f"fixed {len(self.columns)} columns, {len(self.distances)} distances, {len(self.blocks)} blocks"


FAMILIES: dict[str, type[Pattern]] = {
    family.kind: family for family in (Dense, AShape, VerticalSlash, BlockSparse, Fixed)
}


def from_dict(entry: Any) -> Pattern:
    """The pattern that `to_dict` wrote. `ValueError` names the field that does not fit."""
    if not isinstance(entry, dict):
        raise ValueError(f"a pattern must be an object, got {type(entry).__name__}")
    kind = entry.get("pattern")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"pattern must be one of {', '.join(FAMILIES)}, got {str(kind)[:40]!r}")
    family = FAMILIES[kind]
    allowed = {field.name for field in fields(family)}  # type: ignore[arg-type]
    unknown = sorted(set(entry) - allowed - {"pattern"})
    if unknown:
        raise ValueError(f"{kind} has no field {unknown[0][:40]!r}; it has {', '.join(sorted(allowed)) or 'none'}")
    values = {name: _budget_from_json(f"{kind}.{name}", value) for name, value in entry.items() if name != "pattern"}
    try:
        return family(**values)
    except TypeError:
        required = [field.name for field in fields(family)]  # type: ignore[arg-type]
        raise ValueError(f"{kind} needs the fields {', '.join(required)}") from None


def merge_ranges(positions: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Ascending positions as inclusive ranges of neighbours: (0, 1, 2, 7) gives ((0, 2), (7, 7))."""
    ranges: list[tuple[int, int]] = []
    for position in positions:
        if ranges and position == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], position)
        else:
            ranges.append((position, position))
    return tuple(ranges)


def _resolve(budget: Budget, length: int) -> int:
    return budget.resolve(length) if isinstance(budget, Fraction) else budget


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number of at least {least}, got {str(value)[:40]!r}")
    if not least <= value <= LARGEST_BUDGET:
        raise ValueError(f"{name} must be between {least} and {LARGEST_BUDGET}, got {str(value)[:40]}")


def _check_budget(name: str, value: Any, least: int) -> None:
    if not isinstance(value, Fraction):
        _check_count(name, value, least)


def _check_forced(name: str, budget: Budget, forced_name: str, forced: int) -> None:
    if isinstance(budget, int) and budget < forced:
        raise ValueError(
            f"VerticalSlash.{name} must be at least {forced_name} = {forced}, since forced cells are charged to it, "
            f"got {budget}"
        )


def _check_block_size(name: str, value: Any) -> None:
    _check_count(name, value, 1)
    if value > 4096:
        raise ValueError(f"{name} must be at most 4096, got {value}")


def _positions(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list):
        raise ValueError(f"{name} must be a list of positions, got {type(values).__name__}")
    for value in values:
        _check_count(name, value, 0)
    return tuple(sorted(set(values)))


def _pair(pair: Any) -> tuple[int, int]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(f"Fixed.blocks must hold (block row, key block) pairs, got {str(pair)[:40]}")
    for value in pair:
        _check_count("Fixed.blocks", value, 0)
    if pair[1] > pair[0]:
        raise ValueError(f"Fixed.blocks must not lie above the diagonal, got {tuple(pair)}")
    return pair[0], pair[1]


def _budget_to_json(value: Any) -> Any:
    if isinstance(value, Fraction):
        return {"of": value.of, "least": value.least} | ({} if value.most is None else {"most": value.most})
    if isinstance(value, tuple):
        return [list(item) if isinstance(item, tuple) else item for item in value]
    return value


def _budget_from_json(name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    unknown = sorted(set(value) - {"of", "least", "most"})
    if unknown or "of" not in value:
        raise ValueError(f"{name} as a fraction needs 'of', and may have 'least' and 'most'")
    return Fraction(**value)

"""Editing one head's pattern: what the widgets show, and the pattern that they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headscope.engine.patterns.families import AShape, BlockSparse, Budget, Dense, Fraction, Pattern, VerticalSlash

KINDS = ("dense", "a-shape", "vertical-slash", "block-sparse")


@dataclass(frozen=True)
class Field:
    """One number of a pattern: its name in the class, its label with unit, what it means, and its least value."""

    name: str
    label: str
    help: str
    least: int
    share: bool = True


FIELDS: dict[str, tuple[Field, ...]] = {
    "dense": (),
    "a-shape": (
        Field("sink", "Sink (first tokens)", "Tokens at the start that every row may read", 0),
        Field("window", "Window (recent tokens)", "Most recent tokens, the row's own included", 1),
    ),
    "vertical-slash": (
        Field("vertical", "Verticals (columns)", "Columns kept for all rows, chosen for this prompt", 0),
        Field("slash", "Slashes (distances)", "Distances back kept for all rows, chosen for this prompt", 1),
        Field("windows", "Windows (of 128)", "Whole windows of the tile rule, which bound the computed cells", 1),
        Field("sink", "Sink (first tokens)", "First columns, always in, charged to the verticals", 0, False),
        Field("local", "Local (nearest distances)", "Nearest distances, always in, charged to the slashes", 1, False),
    ),
    "block-sparse": (
        Field("blocks", "Blocks a row of blocks", "Key blocks kept for each block of queries, own one included", 1),
        Field("block_size", "Block size (tokens)", "Tokens a side", 16, False),
    ),
}


def default(kind: str, length: int) -> Pattern:
    """A fair start for a family at a prompt length."""
    if kind == "a-shape":
        return AShape(4, max(1, min(256, length // 4)))
    if kind == "vertical-slash":
        return VerticalSlash(vertical=64, slash=256, sink=4, local=16)
    if kind == "block-sparse":
        return BlockSparse(max(1, min(8, length // 256)))
    return Dense()


def fields_of(pattern: Pattern) -> tuple[Field, ...]:
    """The numbers that a pattern has now: slash or windows, whichever it uses."""
    found = FIELDS.get(pattern.kind, ())
    if not isinstance(pattern, VerticalSlash):
        return found
    left_out = ("windows",) if pattern.windows is None else ("slash", "local")
    return tuple(field for field in found if field.name not in left_out)


def values_of(pattern: Pattern) -> dict[str, Any]:
    """The pattern's numbers by field."""
    return {field.name: getattr(pattern, field.name) for field in fields_of(pattern)}


def build(kind: str, values: Mapping[str, Any]) -> Pattern:
    """The pattern that these numbers mean. ValueError names the field that does not fit."""
    makers: dict[str, Callable[..., Pattern]] = {
        "dense": Dense,
        "a-shape": AShape,
        "vertical-slash": VerticalSlash,
        "block-sparse": BlockSparse,
    }
    return makers[kind](**values)


def entered(shown: Budget, number: float) -> Budget:
    """The budget that a number in a field means: a percentage where the field shows one, whose floor and cap stay."""
    return replace(shown, of=number / 100) if isinstance(shown, Fraction) else int(number)


def as_share(budget: Budget, length: int, on: bool) -> Budget:
    """A budget as a share of the prompt's length, or as a plain count at this length."""
    if on and isinstance(budget, int):
        return Fraction(of=min(1.0, max(1e-4, budget / length)), least=min(1, budget))
    if not on and isinstance(budget, Fraction):
        return budget.resolve(length)
    return budget


def scaled(pattern: Pattern, factor: float, length: int) -> Pattern | None:
    """The same family with its main budgets times `factor`; None where that changes nothing."""
    if isinstance(pattern, AShape):
        return AShape(pattern.sink, _times(pattern.window, factor, length))
    if isinstance(pattern, VerticalSlash):
        most = {"vertical": max(pattern.sink, _times(pattern.vertical, factor, length)), "sink": pattern.sink}
        if pattern.windows is not None:
            return VerticalSlash(windows=_times(pattern.windows, factor, length), **most)
        assert pattern.slash is not None
        slash = max(pattern.local, _times(pattern.slash, factor, length))
        return VerticalSlash(slash=slash, local=pattern.local, **most)
    if isinstance(pattern, BlockSparse):
        return BlockSparse(_times(pattern.blocks, factor, length), pattern.block_size)
    return None


def sweep(pattern: Pattern, length: int) -> list[Pattern]:
    """Patterns for the curve of loss against cost: each family at several budgets, today's own among them."""
    found: list[Pattern] = [pattern]
    for kind in KINDS[1:]:
        centre = pattern if pattern.kind == kind else default(kind, length)
        found += [one for one in (scaled(centre, factor, length) for factor in (0.25, 0.5, 1, 2, 4)) if one is not None]
    return list(dict.fromkeys(found))


def _times(budget: Budget, factor: float, length: int) -> int:
    count = budget.resolve(length) if isinstance(budget, Fraction) else budget
    return max(1, min(length, round(count * factor)))

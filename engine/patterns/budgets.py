"""Budgets: a count of tokens, distances, windows or blocks, or a share of the sequence's length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

LARGEST_BUDGET = 2**30 - 1
"""Budgets above the longest position that an index can hold are refused, not wrapped."""

LARGEST_BLOCK = 4096
"""Tokens a side of the largest block that a person may ask for."""


@dataclass(frozen=True)
class Fraction:
    """A budget as a share of the sequence's length: `round(of * length)`, at least `least`, at most `most`.

    The length is that of the keys so far: in a prefill in chunks the first chunks keep fewer cells a row than one pass
    over the whole prompt, and the last chunk as many. `least` bounds the loss; a count is the same in every chunk.
    """

    of: float
    least: int = 1
    most: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.of, bool) or not isinstance(self.of, int | float) or not math.isfinite(self.of):
            raise ValueError(f"Fraction.of must be a number in (0, 1], got {self.of!r}")
        if not 0 < self.of <= 1:
            raise ValueError(f"Fraction.of must be in (0, 1], got {self.of!r}")
        check_count("Fraction.least", self.least, 0)
        if self.most is not None:
            check_count("Fraction.most", self.most, 0)
            if self.most < self.least:
                raise ValueError(f"Fraction.most must be at least Fraction.least = {self.least}, got {self.most}")

    def resolve(self, length: int) -> int:
        """The budget for a sequence of `length` tokens."""
        wanted = max(self.least, round(self.of * length))
        return wanted if self.most is None else min(wanted, self.most)

    def __str__(self) -> str:
        return f"{self.of:.3g}n"


Budget = int | Fraction


def resolve(budget: Budget, length: int) -> int:
    """A budget as a count for a sequence of `length` tokens."""
    return budget.resolve(length) if isinstance(budget, Fraction) else budget


def times(budget: Budget, factor: float, length: int) -> int:
    """A budget times `factor` as a count, at least 1 and at most `length`."""
    return max(1, min(length, round(resolve(budget, length) * factor)))


def has_share(*budgets: Budget) -> bool:
    """Whether any of the budgets is a share of the length."""
    return any(isinstance(budget, Fraction) for budget in budgets)


def check_count(name: str, value: Any, least: int) -> None:
    """`ValueError` naming the field unless `value` is a whole number from `least` to the largest budget."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number of at least {least}, got {str(value)[:40]!r}")
    if not least <= value <= LARGEST_BUDGET:
        raise ValueError(f"{name} must be between {least} and {LARGEST_BUDGET}, got {str(value)[:40]}")


def check_most(name: str, value: int, most: int) -> None:
    """`ValueError` naming the field where `value` is above `most`."""
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")


def to_json(value: Any) -> Any:
    """A field of a pattern as JSON holds it."""
    if isinstance(value, Fraction):
        return {"of": value.of, "least": value.least} | ({} if value.most is None else {"most": value.most})
    if isinstance(value, tuple):
        return [list(item) if isinstance(item, tuple) else item for item in value]
    return value


def from_json(name: str, value: Any) -> Any:
    """The field that `to_json` wrote; `ValueError` if an object is not a fraction."""
    if not isinstance(value, dict):
        return value
    unknown = sorted(set(value) - {"of", "least", "most"})
    if unknown or "of" not in value:
        raise ValueError(f"{name} as a fraction needs 'of', and may have 'least' and 'most'")
    return Fraction(**value)

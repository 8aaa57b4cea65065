"""Editing one head's pattern: what the widgets show, and the pattern that they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headscope.engine.patterns.families import FAMILIES, Budget, Field, Fraction, Pattern

KINDS = tuple(kind for kind, family in FAMILIES.items() if not family.one_prompt)
"""The families that a person may choose, dense first."""


FACTORS = (0.25, 0.5, 1, 2, 4)
"""What the budgets of a curve's patterns are multiplied by."""


def default(kind: str, length: int) -> Pattern:
    """A fair start for a family at a prompt length."""
    return FAMILIES[kind].default(length)


def fields_of(pattern: Pattern) -> tuple[Field, ...]:
    """The numbers that a pattern has now: slash or windows, whichever it uses."""
    return pattern.active_fields


def values_of(pattern: Pattern) -> dict[str, Any]:
    """The pattern's numbers by field."""
    return {field.name: getattr(pattern, field.name) for field in pattern.active_fields}


def build(kind: str, values: Mapping[str, Any]) -> Pattern:
    """The pattern that these numbers mean. ValueError names the field that does not fit."""
    return FAMILIES[kind](**values)


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


def sweep(pattern: Pattern, length: int) -> list[Pattern]:
    """Patterns for the curve of loss against cost: each family at several budgets, today's own among them."""
    patterns: list[Pattern] = [pattern]
    for kind in KINDS[1:]:
        centre = pattern if pattern.kind == kind else default(kind, length)
        patterns += [one for one in (centre.scaled(factor, length) for factor in FACTORS) if one is not None]
    return list(dict.fromkeys(patterns))

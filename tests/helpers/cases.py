"""Random attention inputs and patterns, and slow references written straight from the definitions."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from headscope.engine.attend.estimator import Estimator
from headscope.engine.patterns.families import AShape, BlockSparse, Dense, Fixed, Fraction, Pattern, VerticalSlash

LENGTHS = (1, 2, 63, 64, 65, 111, 127, 200, 333)
GROUPS = (1, 3, 4, 7)


@dataclass(frozen=True)
class Case:
    """One random input: q [B, Hq, S, D], k/v [B, Hkv, T, D], a pattern per head, starts and tile."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    patterns: tuple[Pattern, ...]
    starts: tuple[int, ...] | None
    tile: int | None
    estimator: Estimator


def random_pattern(rng: random.Random, length: int) -> Pattern:
    """Any family, with budgets from the smallest to far beyond the length."""
    size = rng.choice((1, 7, 16, 32, 64, 128))
    side = max(1, length // size)
    kind = rng.randrange(6)
    if kind == 0:
        return Dense()
    if kind == 1:
        return AShape(rng.choice((0, 1, 5, length)), rng.choice((1, 2, 70, 4 * length)))
    if kind == 2:
        sink, local = rng.choice((0, 3)), rng.choice((1, 4))
        vertical, slash = sink + rng.choice((0, 5, length)), local + rng.choice((0, 3, 40, length))
        return VerticalSlash(vertical, slash, sink, local)
    if kind == 3:
        return VerticalSlash(Fraction(0.2, least=2), windows=rng.choice((1, 2, 5)), sink=2)
    if kind == 4:
        return BlockSparse(rng.choice((1, 2, 3, Fraction(0.5))), size)
    blocks = tuple((u, rng.randrange(u + 1)) for u in rng.sample(range(side), min(side, 3)))
    pick = range(length)
    few = min(length, 3)
    return Fixed(tuple(rng.sample(pick, few)), tuple(rng.sample(pick, few)), blocks, size)


def random_case(seed: int, dim: int = 16, length: int | None = None) -> Case:
    """The case of a seed: lengths, GQA groups, chunks, left padding, tiles and estimators all vary."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    n = length if length is not None else rng.choice(LENGTHS)
    rows = rng.choice((n, n, 1, max(1, n // 2), max(1, n - 64)))
    batch, group, kv_heads = rng.choice((1, 2)), rng.choice(GROUPS), rng.choice((1, 2))
    heads = group * kv_heads
    starts = tuple(rng.choice((0, rng.randrange(n))) for _ in range(batch)) if rng.random() < 0.5 else None
    loud = 30.0 if rng.random() < 0.2 else 1.0
    return Case(
        q=torch.randn(batch, heads, rows, dim) * loud,
        k=torch.randn(batch, kv_heads, n, dim),
        v=torch.randn(batch, kv_heads, n, dim),
        patterns=tuple(random_pattern(rng, n) for _ in range(heads)),
        starts=starts,
        tile=rng.choice((None, None, 1, 2, 16, 256)),
        estimator=Estimator(
            rows=rng.choice((1, 2, 64)),
            where=rng.choice(("tail", "spread", "half")),
            statistic=rng.choice(("probability", "logit")),
            columns=rng.choice(("sum", "max")),
            slashes=rng.choice(("sum", "mean", "shrunk")),
            overlap=rng.choice(("keep", "removed")),
        ),
    )


def expand_by_definition(distances: set[int], length: int, row: int, tile: int = 128) -> set[int]:
    """Keys that rule `tiles/1` gives to one row, one distance at a time."""
    rows = tile // 2
    top = row // rows * rows
    keys: set[int] = set()
    previous = start = None
    for distance in sorted(distances):
        if previous is None or distance - previous >= 3 * rows:
            start = distance
        previous = distance
        assert start is not None
        along = distance - start
        for step in (along // tile, (along + rows - 1) // tile):
            offset = start + rows + tile * step
            keys |= {top - offset + u for u in range(tile)}
    return {key for key in keys if 0 <= key <= row and key < length}

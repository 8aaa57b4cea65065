"""Chapter 9: where the time of a layer goes, eq. 13, and the ceiling of any speed-up of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headscope.engine import VerticalSlash, measure_heads
from headscope.studio.lab.jobs import Context

HEADS, HEAD_DIM = 3, 64
LENGTHS = (512, 1024, 2048)


@dataclass(frozen=True)
class TimeSplit:
    """Times of one layer in ms: projections, dense attention, what replaces it (index and sparse attention), other."""

    projections_ms: float
    attention_ms: float
    index_ms: float
    sparse_ms: float
    other_ms: float

    @property
    def dense_ms(self) -> float:
        """The layer with dense attention."""
        return self.projections_ms + self.attention_ms + self.other_ms

    @property
    def layer_ms(self) -> float:
        """The layer with sparse attention (eq. 13)."""
        return self.projections_ms + self.index_ms + self.sparse_ms + self.other_ms

    @property
    def speedup(self) -> float:
        """Of the whole layer, index time in."""
        return self.dense_ms / self.layer_ms

    @property
    def kernel_speedup(self) -> float:
        """Of attention alone, index time left out: the number that should not be quoted."""
        return self.attention_ms / self.sparse_ms

    @property
    def share(self) -> float:
        """f: attention's share of the dense layer."""
        return self.attention_ms / self.dense_ms

    @property
    def ceiling(self) -> float:
        """1 / (1 - f): the speed-up if attention and index took no time at all."""
        return self.dense_ms / (self.dense_ms - self.attention_ms)


EXAMPLE = TimeSplit(projections_ms=1.0, attention_ms=8.0, index_ms=0.5, sparse_ms=1.0, other_ms=1.0)
"""The article's layer: 10 ms of which 8 ms are attention."""


@dataclass(frozen=True)
class Measured:
    """Attention of one layer, measured here: dense, index and sparse kernel in ms, and what was missed."""

    tokens: int
    dense_ms: float
    index_ms: float
    kernel_ms: float
    density: float
    missed: float
    impl: str

    @property
    def speedup(self) -> float:
        """Dense over index plus kernel."""
        return self.dense_ms / (self.index_ms + self.kernel_ms)


def measure(context: Context) -> list[Measured]:
    """One layer of random q, k, v at each of `LENGTHS`. On the worker's thread."""
    measured = []
    for step, tokens in enumerate(LENGTHS):
        context.step(step, len(LENGTHS), f"Timing {tokens:,} tokens")
        measured.append(_measured_at(tokens))
    return measured


def _measured_at(tokens: int) -> Measured:
    """Once to warm up and once measured."""
    chance = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, HEAD_DIM, generator=chance) for heads in (HEADS, 1, 1))
    patterns = [VerticalSlash(vertical=32, windows=1)] * HEADS
    measure_heads(q, k, v, patterns)
    one = measure_heads(q, k, v, patterns)
    return Measured(
        tokens,
        one.dense_ms,
        one.index_ms,
        one.kernel_ms,
        one.heads[0].computed_density,
        sum(head.missed_mass_mean for head in one.heads) / HEADS,
        one.impl,
    )

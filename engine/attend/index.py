"""From patterns to an index: what they become for one input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from headscope.engine.attend.estimator import Estimator
from headscope.engine.attend.inputs import ScoreInputs, Starts, check_tile
from headscope.engine.patterns.families import Pattern
from headscope.kernels import backends
from headscope.kernels.cells import counts, membership
from headscope.kernels.cells.counts import Areas
from headscope.kernels.cells.layout import Layout
from headscope.kernels.cells.plan import TILE, HeadPlan

LARGEST_MASK = 8192
"""Longest sequence for which an index may be written out as a boolean mask."""


@dataclass(frozen=True)
class Index:
    """The cells that each head of a layer computes for one input.

    `requested` holds the patterns' own cells, `computed` those plus the expansion to tiles; kernels run
    `computed`. `impl` names what built it.
    """

    requested: Layout
    computed: Layout
    patterns: tuple[Pattern, ...]
    scale: float
    starts: tuple[int, ...]
    estimator: Estimator
    impl: str = field(compare=False, default="torch")

    def requested_mask(self) -> torch.Tensor:
        """bool [B, Hq, S, T] in physical positions. `ValueError` above 8192 tokens."""
        return _mask(self.requested)

    def computed_mask(self) -> torch.Tensor:
        """bool [B, Hq, S, T] in physical positions. `ValueError` above 8192 tokens."""
        return _mask(self.computed)

    def requested_pairs(self) -> torch.Tensor:
        """int64 [B, Hq]."""
        return counts.pairs(self.requested)

    def computed_pairs(self) -> torch.Tensor:
        """int64 [B, Hq]."""
        return counts.pairs(self.computed)

    def causal_pairs(self) -> torch.Tensor:
        """int64 [B]: the cells that dense attention computes."""
        return counts.causal_pairs(self.computed)

    def areas(self) -> Areas:
        """The four areas of the computed cells, int64 [B, Hq] each."""
        return counts.areas(self.computed)


def build_index(
    q: torch.Tensor,
    k: torch.Tensor,
    patterns: Sequence[Pattern],
    scale: float | None = None,
    starts: Starts = None,
    tile: int | None = None,
    estimator: Estimator | None = None,
    impl: str = "auto",
) -> Index:
    """Resolve budgets and choose cells for every head of a layer, all heads in one batched call.

    q [B, Hq, S, D] and k [B, Hkv, T, D] after RoPE; `patterns` one per query head. With S < T the rows are the
    last S positions, and what is sampled is sampled among them. `starts` [B] is each sequence's first real
    position (left padding). `tile` None is the rule `tiles/1`, 1 means no expansion, and other even widths are
    for teaching. `ValueError` names the argument that does not fit.

    Values are not read for NaN and infinities, which would cost a pass over q and k in every layer of a prefill: what
    scores a NaN ranks last, so cells are chosen without it. `measure_heads` refuses such q and k, and a model's answer
    ends at logits that are not finite.
    """
    return index_layer(ScoreInputs(q, k, scale, starts), patterns, tile, estimator, impl)


def index_layer(
    inputs: ScoreInputs,
    patterns: Sequence[Pattern],
    tile: int | None = None,
    estimator: Estimator | None = None,
    impl: str = "auto",
) -> Index:
    """`build_index` over checked inputs."""
    if len(patterns) != inputs.query_heads:
        raise ValueError(f"patterns must hold one pattern per query head: {inputs.query_heads}, got {len(patterns)}")
    wrong = next((pattern for pattern in patterns if not isinstance(pattern, Pattern)), None)
    if wrong is not None:
        raise ValueError(f"patterns must hold Pattern objects, got {type(wrong).__name__}")
    width = TILE if tile is None else check_tile(tile)
    sampling = estimator if estimator is not None else Estimator()
    backend = backends.choose(impl, inputs.q)
    plans = _plans(patterns, inputs.length, inputs.starts)
    requested, computed = backend.build(inputs.q, inputs.k, plans, inputs.starts, inputs.scale, sampling, width)
    return Index(requested, computed, tuple(patterns), inputs.scale, inputs.starts, sampling, backend.name)


def _plans(patterns: Sequence[Pattern], kv_len: int, starts: tuple[int, ...]) -> list[HeadPlan]:
    resolved: dict[tuple[Pattern, int], HeadPlan] = {}
    plans = []
    for start in starts:
        for pattern in patterns:
            key = (pattern, kv_len - start)
            if key not in resolved:
                resolved[key] = pattern.plan(kv_len - start)
            plans.append(resolved[key])
    return plans


def _mask(layout: Layout) -> torch.Tensor:
    if layout.kv_len > LARGEST_MASK:
        raise ValueError(
            f"a mask is for small inputs: at most {LARGEST_MASK} tokens, got {layout.kv_len}; use the pair counts"
        )
    return membership.mask(layout)

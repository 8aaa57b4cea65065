"""Index and maps of the reference backend: the torch path in float64 from the inputs on, results included.

Attention of the same backend forms every cell (`cells.reference`); what is chosen and summed up here forms a few rows
at a time and needs no other algorithm, only more bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headscope.kernels.cells.layout import Layout
from headscope.kernels.cells.plan import HeadPlan
from headscope.kernels.torch import index, mass


def build(
    q: torch.Tensor,
    k: torch.Tensor,
    plans: Sequence[HeadPlan],
    starts: tuple[int, ...],
    scale: float,
    estimator: index.Sampling,
    tile: int,
) -> tuple[Layout, Layout]:
    """As `index.build`, from scores in float64."""
    return index.build(q.double(), k.double(), plans, starts, scale, estimator, tile)


def pooled(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    starts: tuple[int, ...],
    rows: tuple[int, int],
    cols: tuple[int, int],
    shape: tuple[int, int],
    layout: Layout | None = None,
) -> torch.Tensor:
    """As `mass.pooled`, in float64."""
    return mass.pooled(q.double(), k.double(), lse.double(), scale, starts, rows, cols, shape, layout)


def coverage(layout: Layout, rows: tuple[int, int], cols: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    """As `mass.coverage`, in float64."""
    return mass.coverage(layout, rows, cols, shape, torch.float64)


def sums(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, scale: float, starts: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `mass.sums`, in float64."""
    return mass.sums(q.double(), k.double(), lse.double(), scale, starts)

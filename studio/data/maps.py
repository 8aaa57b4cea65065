"""The three pictures of a head: where its attention goes, what a layout computes of it, and what is missed.

The grids come from the engine's exact pooled sums; memory is linear in the length. The largest missed cells and
the distances of what is missed come from a few whole rows, which are exact for those rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from headscope.engine.attend.index import Index
from headscope.engine.attend.inputs import ScoreInputs
from headscope.engine.loss import mass
from headscope.kernels.cells import membership
from headscope.kernels.cells.layout import Layout
from headscope.kernels.torch.probabilities import at_least_float32, probabilities

WORST_ROWS = 192
"""Rows, those that miss most, that are searched for the largest missed cells."""

SPREAD_ROWS = 128
"""Evenly spread rows from which the distances of what is missed are taken."""

NEAR, FAR = 64, 256
"""Tokens back: nearer than NEAR is near, FAR or more is far."""


@dataclass(frozen=True)
class Place:
    """One cell that was not computed: query and key positions, and the probability lost there."""

    query: int
    key: int
    probability: float


@dataclass(frozen=True)
class HeadMaps:
    """Pooled maps of one head over own rows and columns; grids are float32 [rows, columns], NaN where not causal.

    `dense` and `missed` hold the share of a row's probability that falls in the cell, averaged over the cell's
    rows. `computed` is the share of the cell's causal pairs that the layout computes. `near` and `far` are
    shares of the missed mass less than 64 and at least 256 tokens back, from evenly spread rows.
    """

    row_edges: tuple[int, ...]
    column_edges: tuple[int, ...]
    dense: np.ndarray
    computed: np.ndarray
    missed: np.ndarray
    places: tuple[Place, ...]
    near: float
    far: float


def edges(first: int, stop: int, cells: int) -> tuple[int, ...]:
    """At most `cells` nearly equal spans over [first, stop), as their limits."""
    cells = max(1, min(cells, stop - first))
    return tuple(first + (stop - first) * index // cells for index in range(cells + 1))


def head_maps(
    inputs: ScoreInputs,
    lse: torch.Tensor,
    index: Index,
    missed: torch.Tensor,
    *,
    rows: tuple[int, int] | None = None,
    columns: tuple[int, int] | None = None,
    cells: int = 128,
    places: int = 12,
    dense: np.ndarray | None = None,
) -> HeadMaps:
    """Maps of one head of one unpadded sequence. `dense` is `dense_sums` of the same crop, if it is known already.

    Dense lse [1, 1, S], the index of that head alone, missed [S] per row.
    `rows` and `columns` are half-open ranges of own positions, clipped to what exists; ValueError if none does.
    """
    first = inputs.length - inputs.rows
    row_edges, column_edges = grid_edges(inputs, rows, columns, cells)
    if dense is None:
        dense = dense_sums(inputs, lse, row_edges, column_edges)
    span = {"rows": (row_edges[0], row_edges[-1]), "cols": (column_edges[0], column_edges[-1])}
    shape = dense.shape
    pooled = mass.pooled_map(inputs, lse, shape=shape, index=index, rows=span["rows"], cols=span["cols"])
    kept = pooled[0, 0].cpu().numpy()
    covered = mass.coverage_map(index, shape=shape, rows=span["rows"], cols=span["cols"])[0, 0].cpu().numpy()
    causal = causal_pairs(row_edges, column_edges)
    void = causal == 0
    share = np.divide(covered, causal, out=np.zeros(shape), where=~void)
    spans = np.diff(np.asarray(row_edges))[:, None]
    probe = _rows_of(inputs, lse, index.computed)
    near, far = _distances(probe, first, inputs.length)
    return HeadMaps(
        row_edges,
        column_edges,
        _blank(dense / spans, void),
        _blank(share, void),
        _blank(np.maximum(dense - kept, 0.0) / spans, void),
        _places(probe, missed, first, places),
        near,
        far,
    )


def grid_edges(
    inputs: ScoreInputs, rows: tuple[int, int] | None, columns: tuple[int, int] | None, cells: int = 128
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Row and column limits of a head's maps; the spans are clipped to what exists."""
    length = inputs.length
    return edges(*_clip(rows, length - inputs.rows, length), cells), edges(*_clip(columns, 0, length), cells)


def dense_sums(
    inputs: ScoreInputs,
    lse: torch.Tensor,
    row_edges: tuple[int, ...],
    column_edges: tuple[int, ...],
) -> np.ndarray:
    """Exact sums of dense probability per cell, float32 [rows, columns]: the same whatever the pattern."""
    shape = (len(row_edges) - 1, len(column_edges) - 1)
    spans = {"rows": (row_edges[0], row_edges[-1]), "cols": (column_edges[0], column_edges[-1])}
    pooled = mass.pooled_map(inputs, lse, shape=shape, rows=spans["rows"], cols=spans["cols"])
    sums: np.ndarray = pooled[0, 0].cpu().numpy()
    return sums


def causal_pairs(row_edges: tuple[int, ...], column_edges: tuple[int, ...]) -> np.ndarray:
    """float64 [rows, columns]: causal pairs in each cell of a grid."""
    rows = np.arange(row_edges[0], row_edges[-1])
    limits = np.asarray(column_edges)
    upto = np.clip(rows[:, None] + 1 - limits[None, :], 0, None)  # keys of a row at or after each limit
    per_row = upto[:, :-1] - upto[:, 1:]
    return np.add.reduceat(per_row, np.asarray(row_edges[:-1]) - row_edges[0], axis=0).astype(np.float64)


def _clip(span: tuple[int, int] | None, least: int, most: int) -> tuple[int, int]:
    low, high = (least, most) if span is None else (max(least, span[0]), min(most, span[1]))
    if low >= high:
        raise ValueError(f"the crop {span} holds no position between {least} and {most}")
    return low, high


def _rows_of(inputs: ScoreInputs, lse: torch.Tensor, layout: Layout) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from own positions [r] to their missed probabilities float32 [r, T]."""
    table = membership.tables(layout)
    length, first = inputs.length, inputs.length - inputs.rows
    keys, columns = at_least_float32(inputs.k[0, :1]), torch.arange(length, device=inputs.device)

    def missed(own: torch.Tensor) -> torch.Tensor:
        own = own.to(inputs.device)
        local = own - first
        weight = probabilities(inputs.q[0, :1, local], keys, lse[0, :1, local], own, inputs.scale)[0]
        return weight.masked_fill_(membership.cells(layout, table, slice(0, 1), own, columns)[0], 0.0)

    return missed


def _distances(probe: Callable[[torch.Tensor], torch.Tensor], first: int, length: int) -> tuple[float, float]:
    """Shares of the missed mass that are near and far, over evenly spread rows; 0 and 0 if nothing is missed."""
    total = near = far = 0.0
    own = torch.linspace(first, length - 1, min(SPREAD_ROWS, length - first)).long().unique()
    for part in own.split(32):
        lost = probe(part).cpu()
        distance = part[:, None] - torch.arange(lost.shape[1])[None, :]
        total += float(lost.sum())
        near += float(lost[distance < NEAR].sum())
        far += float(lost[distance >= FAR].sum())
    return (near / total, far / total) if total > 1e-6 else (0.0, 0.0)


def _places(
    probe: Callable[[torch.Tensor], torch.Tensor], missed: torch.Tensor, first: int, count: int
) -> tuple[Place, ...]:
    """The largest missed cells, at most one a row, among the rows that miss most."""
    worst = missed.cpu().topk(min(WORST_ROWS, missed.shape[0])).indices + first
    largest: list[Place] = []
    for part in worst.split(32):
        lost = probe(part)
        value, key = lost.max(dim=1)
        largest += [Place(*cell) for cell in zip(part.tolist(), key.tolist(), value.tolist(), strict=True)]
    largest.sort(key=lambda place: (-place.probability, place.query))
    return tuple(place for place in largest[:count] if place.probability > 1e-5)


def _blank(values: np.ndarray, void: np.ndarray) -> np.ndarray:
    return np.where(void, np.nan, values).astype(np.float32)

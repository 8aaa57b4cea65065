"""The three pictures of a head: where its attention goes, what a layout computes of it, and what is missed.

Exact sums over every cell of a crop, pooled to a small grid, a few rows at a time: memory is linear in the
length. The rows' own missed mass and the largest missed cells come from the same pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headscope.kernels import membership
from headscope.kernels.layout import Layout

CHUNK_CELLS = 2**22
"""Cells of one head held at a time (16 MiB in float32)."""


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
    rows. `computed` is the share of the cell's causal pairs that the layout computes. `row_missed` [rows of the
    crop] is each row's missed mass over all its keys. `by_distance` holds (upper distance, missed share) bins.
    """

    row_edges: tuple[int, ...]
    column_edges: tuple[int, ...]
    dense: np.ndarray
    computed: np.ndarray
    missed: np.ndarray
    row_missed: np.ndarray
    places: tuple[Place, ...]
    by_distance: tuple[tuple[int, float], ...]


DISTANCE_BINS = (16, 64, 256, 1024, 4096, 16384, 2**30)


def edges(first: int, stop: int, cells: int) -> tuple[int, ...]:
    """At most `cells` nearly equal spans over [first, stop), as their limits."""
    cells = max(1, min(cells, stop - first))
    return tuple(first + (stop - first) * index // cells for index in range(cells + 1))


def head_maps(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    layout: Layout,
    scale: float,
    *,
    rows: tuple[int, int] | None = None,
    columns: tuple[int, int] | None = None,
    cells: int = 128,
    places: int = 12,
) -> HeadMaps:
    """Maps of one head of one unpadded sequence: q [S, D], k [T, D], dense lse [S], layout of that head alone.

    `rows` and `columns` are half-open ranges of own positions, clipped to what exists.
    """
    length, query_rows = k.shape[0], q.shape[0]
    first = length - query_rows
    r0, r1 = _clip(rows, first, length)
    c0, c1 = _clip(columns, 0, length)
    row_edges, column_edges = edges(r0, r1, cells), edges(c0, c1, cells)
    grids = torch.zeros(4, len(row_edges) - 1, c1 - c0, dtype=torch.float32)
    row_missed = torch.zeros(r1 - r0)
    table = membership.tables(layout)
    row_bins = np.searchsorted(np.asarray(row_edges[1:]), np.arange(r0, r1), side="right")
    keys, found = k.float(), [torch.empty(3, 0)]
    bins = torch.zeros(len(DISTANCE_BINS), dtype=torch.float64)
    bounds = torch.tensor(DISTANCE_BINS, device=k.device)
    step = max(1, CHUNK_CELLS // length)
    for start in range(r0, r1, step):
        own = torch.arange(start, min(start + step, r1), device=q.device)
        probabilities, inside, distance = _chunk(q, keys, lse, layout, table, scale, own, first)
        missed = probabilities.masked_fill(inside, 0.0)
        row_missed[start - r0 : start - r0 + len(own)] = missed.sum(1).cpu()
        bins += _by_distance(missed, distance, bounds)
        found.append(_largest(missed, own, places))
        causal = distance[:, c0:c1] >= 0
        layers = (probabilities[:, c0:c1], missed[:, c0:c1], inside[:, c0:c1].float(), causal.float())
        target = torch.from_numpy(row_bins[start - r0 : start - r0 + len(own)])
        for index, layer in enumerate(layers):
            grids[index].index_add_(0, target, layer.cpu())
    dense, lost, computed, causal_pairs = (_pool_columns(grid, column_edges) for grid in grids.numpy())
    spans = np.diff(np.asarray(row_edges)).astype(np.float32)[:, None]
    void = causal_pairs == 0
    share = np.divide(computed, causal_pairs, out=np.zeros_like(computed), where=~void)
    best = torch.cat(found, dim=1)
    order = best[2].argsort(descending=True)[:places].tolist()
    return HeadMaps(
        row_edges,
        column_edges,
        _blank(dense / spans, void),
        _blank(share, void),
        _blank(lost / spans, void),
        row_missed.clamp_(0.0, 1.0).numpy(),
        tuple(Place(int(best[0, i]), int(best[1, i]), float(best[2, i])) for i in order if best[2, i] > 0),
        tuple((bound, float(value) / max(1, r1 - r0)) for bound, value in zip(DISTANCE_BINS, bins, strict=True)),
    )


def _clip(span: tuple[int, int] | None, least: int, most: int) -> tuple[int, int]:
    low, high = (least, most) if span is None else (max(least, span[0]), min(most, span[1]))
    if low >= high:
        raise ValueError(f"the crop {span} holds no position between {least} and {most}")
    return low, high


def _chunk(
    q: torch.Tensor,
    keys: torch.Tensor,
    lse: torch.Tensor,
    layout: Layout,
    table: membership.Tables,
    scale: float,
    own: torch.Tensor,
    first: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probabilities, membership and distances of some rows against all keys, each [rows, T]."""
    length = keys.shape[0]
    cols = torch.arange(length, device=keys.device)
    distance = own[:, None] - cols[None, :]
    scores = (q[own - first].float() @ keys.T) * scale - lse[own - first, None].float()
    probabilities = scores.exp_().masked_fill_(distance < 0, 0.0)
    top = own.div(layout.rows, rounding_mode="floor") * layout.rows
    inside = table.windows_at(top[:, None] - cols[None, :])[0]
    inside |= table.band[0][distance.clamp(min=0)]
    inside |= table.column[0][None, :]
    if layout.block_slot[0] >= 0:
        size = layout.block_size[0]
        low, high = int(own[0]) // size, int(own[-1]) // size + 1
        listed = membership.block_rows(layout, 0, low, high)
        inside |= listed[own // size - low][:, cols // size]
    return probabilities, inside & (distance >= 0), distance


def _by_distance(missed: torch.Tensor, distance: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Missed mass summed into `DISTANCE_BINS`; a distance belongs to the first bin whose bound exceeds it."""
    upto = torch.stack([missed.masked_fill(distance >= bound, 0.0).sum(dtype=torch.float64) for bound in bounds])
    return torch.diff(upto, prepend=upto.new_zeros(1)).cpu()


def _largest(missed: torch.Tensor, own: torch.Tensor, count: int) -> torch.Tensor:
    """[3, count]: query, key and probability of the largest missed cells, at most one a row."""
    value, key = missed.max(dim=1)
    top = value.topk(min(count, len(value)))
    return torch.stack([own[top.indices].float(), key[top.indices].float(), top.values]).cpu()


def _pool_columns(grid: np.ndarray, column_edges: tuple[int, ...]) -> np.ndarray:
    starts = np.asarray(column_edges[:-1]) - column_edges[0]
    return np.add.reduceat(grid, starts, axis=1)


def _blank(values: np.ndarray, void: np.ndarray) -> np.ndarray:
    return np.where(void, np.nan, values).astype(np.float32)

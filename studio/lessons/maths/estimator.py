"""Chapter 6: the estimator behind vertical-slash, eq. 12, and what it misses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from headscope.engine import Dense, Estimator, VerticalSlash, build_index, dense_attention, sparse_attention
from headscope.engine.attend.index import Index
from headscope.engine.loss import mass
from headscope.kernels.cells import reference
from headscope.kernels.torch import index as torch_index
from headscope.studio.lessons.maths import dense, toy

PROXY = ((2.0, 0.5, 0.2, 0.1), (1.8, 0.4, 0.3, 0.2))
"""Eq. 12: scores of the last two rows at four keys."""

EARLY_SCORE = 4.0
"""What an earlier row has at the fourth key."""

N, EARLY_ROW, EARLY_KEY = 8, 5, 3
LONG = 48
STRONG = 0.35
"""A cell that holds at least this share of its row is one that should not be lost."""


@dataclass(frozen=True)
class EstimatorLesson:
    """What an estimator chose for one head, and what that captures.

    `classes` [n, n]: 0 future, 1 not read, 2 read, 3 read and strong, 4 strong and lost. `column_scores` and
    `distance_scores` [n] are what the index ranked, from the `sampled` rows.
    """

    n: int
    sampled: tuple[int, ...]
    columns: tuple[int, ...]
    distances: tuple[int, ...]
    column_scores: np.ndarray
    distance_scores: np.ndarray
    captured: np.ndarray
    weights: np.ndarray
    classes: np.ndarray
    cells: int
    cost: int
    thirds: tuple[float, float, float]

    @property
    def mean(self) -> float:
        """Captured mass over all rows."""
        return float(self.captured.mean())

    @property
    def lost(self) -> int:
        """Strong cells that are not read."""
        return int((self.classes == 4).sum())


def article_head() -> toy.Head:
    """Eq. 12 as a head: rows 6 and 7 have the given scores at keys 0 to 3, row 5 scores 4.0 at key 3; all else is 0.

    The early row stands at 5, two after its key, so that no kept distance covers the cell by chance.
    """
    q = [[0.0] * 3 for _ in range(N)]
    q[6][0] = q[7][1] = q[EARLY_ROW][2] = 1.0
    k = [[0.0] * 3 for _ in range(N)]
    for key in range(4):
        k[key][:2] = [PROXY[0][key], PROXY[1][key]]
    k[EARLY_KEY][2] = EARLY_SCORE
    v = [[float(j == c) for c in range(3)] for j in range(N)]
    return toy.by_hand(q, k, v)


def long_head() -> toy.Head:
    """A prompt of two chapters: the first half reads key 6, the second key 27; everybody reads the first token."""
    spots = [
        (range(LONG), [0], 2.8),
        (range(8, 26), [6], 4.2),
        (range(29, LONG), [27], 4.2),
    ]
    return toy.make(LONG, distances={0: 2.6, 1: 1.8, 12: 2.6}, spots=spots, noise=0.5, seed=5)


def lesson(one: toy.Head, vertical: int, slash: int, estimator: Estimator) -> EstimatorLesson:
    """Builds the online index with `estimator` and measures it against dense attention."""
    pattern = VerticalSlash(vertical, slash)
    index = build_index(one.q, one.k, [pattern], one.scale, tile=1, estimator=estimator)
    everything = build_index(one.q, one.k, [Dense()], one.scale, tile=1).requested_mask()
    _, sparse = sparse_attention(one.q, one.k, one.v, index)
    _, full = dense_attention(one.q, one.k, one.v, one.scale)
    weights = reference.probabilities(one.q, one.k, everything, one.scale)[0, 0].numpy()
    captured = mass.captured_mass(sparse, full)
    loss = mass.losses(1 - captured, index.computed.first_row)[0]
    mask = index.requested_mask()[0, 0].numpy()
    strong = (weights >= STRONG) & everything[0, 0].numpy()
    classes = np.where(everything[0, 0].numpy(), 1, 0)
    classes[mask] = 2
    classes[mask & strong] = 3
    classes[~mask & strong] = 4
    rows = torch_index.sampled_rows(0, one.length, estimator)
    column_scores, distance_scores, columns = _statistics(one, rows, index, estimator)
    return EstimatorLesson(
        n=one.length,
        sampled=tuple(rows),
        columns=columns,
        distances=_distances(index),
        column_scores=column_scores,
        distance_scores=distance_scores,
        captured=captured[0, 0].numpy(),
        weights=weights,
        classes=classes,
        cells=int(index.requested_pairs()),
        cost=sum(row + 1 for row in rows),
        thirds=(1 - loss.thirds[0], 1 - loss.thirds[1], 1 - loss.thirds[2]),
    )


def variants(one: toy.Head, vertical: int, slash: int, base: Estimator) -> list[tuple[str, EstimatorLesson]]:
    """The same budget under each place to sample from and each way to add up columns."""
    return [
        (f"{where}, {columns}", lesson(one, vertical, slash, replace(base, where=where, columns=columns)))
        for where in ("tail", "spread", "half")
        for columns in ("sum", "max")
    ]


def distance_variants(one: toy.Head, vertical: int, slash: int, base: Estimator) -> list[tuple[str, EstimatorLesson]]:
    """The same budget under each way to add up distances, with and without the columns already kept."""
    return [
        (f"{slashes}, {overlap}", lesson(one, vertical, slash, replace(base, slashes=slashes, overlap=overlap)))
        for slashes in ("sum", "mean", "shrunk")
        for overlap in ("keep", "removed")
    ]


def by_rows(one: toy.Head, vertical: int, slash: int, base: Estimator, counts: Sequence[int]) -> list[EstimatorLesson]:
    """The same estimator with more and more sampled rows."""
    return [lesson(one, vertical, slash, replace(base, rows=count)) for count in counts]


def proxy_scores(one: toy.Head, rows: Sequence[int], keys: int) -> np.ndarray:
    """float [rows, keys]: scores of rows at the first keys, as the engine computes them."""
    return np.array([dense.scores_of(one, row)[:keys].tolist() for row in rows])


def _statistics(
    one: toy.Head, rows: list[int], index: Index, estimator: Estimator
) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    at = torch.tensor(rows)
    weight = torch_index.row_statistic(one.q[0][:, at], one.k[0], at, one.scale, estimator.statistic)
    column_scores = weight.sum(1) if estimator.columns == "sum" else weight.amax(1)
    columns = tuple(index.requested.columns[0, : int(index.requested.column_count[0])].tolist())
    if estimator.overlap == "removed":
        weight = weight.index_fill(2, torch.tensor(columns, dtype=torch.long), 0.0)
    distance_scores = torch_index.distance_sums(weight, at, estimator.slashes)
    return column_scores[0].numpy(), distance_scores[0].numpy(), columns


def _distances(index: Index) -> tuple[int, ...]:
    bands = index.requested.bands[0, : int(index.requested.band_count[0])].tolist()
    return tuple(distance for low, high in bands for distance in range(low, high + 1))

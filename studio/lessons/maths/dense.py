"""Chapter 1: dense causal attention, eq. 1 and 2."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headscope.engine import Dense, build_index, dense_attention
from headscope.kernels.cells import reference
from headscope.studio.lessons.maths import toy

LONG = 131_072


@dataclass(frozen=True)
class DenseLesson:
    """Attention of one small head: every weight, and one row in detail."""

    n: int
    row: int
    cells: int
    weights: np.ndarray
    scores: np.ndarray
    lse: float

    @property
    def formula_cells(self) -> int:
        """What n (n + 1) / 2 says, to hold against the count."""
        return self.n * (self.n + 1) // 2


def head(n: int, sharpness: float = 1.0) -> toy.Head:
    """A head that likes the first token, the last one read, and a word in the middle."""
    spots = [(range(n), [0], 1.6), (range(n), [n // 3], 1.1)]
    return toy.make(n, distances={0: 1.4, 1: 0.9}, spots=spots, noise=0.7, sharpness=sharpness, seed=7)


def lesson(n: int, row: int, sharpness: float = 1.0) -> DenseLesson:
    """The head of `n` positions, looked at from query `row`."""
    one = head(n, sharpness)
    row = min(row, n - 1)
    index = build_index(one.q, one.k, [Dense()], one.scale, tile=1)
    _, lse = dense_attention(one.q, one.k, one.v, one.scale)
    weights = reference.probabilities(one.q, one.k, index.requested_mask(), one.scale)[0, 0]
    return DenseLesson(
        n, row, int(index.requested_pairs()), weights.numpy(), scores_of(one, row).numpy(), float(lse[0, 0, row])
    )


def scores_of(one: toy.Head, row: int) -> torch.Tensor:
    """Scores of a row's causal keys (eq. 1): the LSE of attention that may read one key alone is that key's score."""
    keys = row + 1
    alone = torch.eye(keys, one.length, dtype=torch.bool)[None, :, None, :]
    q = one.q[:, :, row : row + 1].expand(1, keys, 1, -1)
    return reference.masked(q, one.k, one.v, alone, one.scale)[1][0, :, 0]


def cells_at(n: int) -> int:
    """How many cells dense causal attention has at any length."""
    x = torch.zeros(1, 1, n, 1)
    return int(build_index(x, x, [Dense()], tile=1).requested_pairs())

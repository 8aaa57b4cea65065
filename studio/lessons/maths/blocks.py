"""Chapter 4: block-sparse, eq. 6, and why pooling before the softmax is not pooling after it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headscope.engine import BlockSparse, Dense, Fixed, build_index, dense_attention, sparse_attention
from headscope.engine.attend.inputs import ScoreInputs
from headscope.engine.loss import mass
from headscope.kernels.cells import reference
from headscope.studio.lessons.maths import toy

DRAWING = ((0, 0), (1, 1), (2, 0), (2, 2), (3, 1), (3, 3))
"""Six 2 x 2 blocks of eight positions: four on the diagonal and two below it, as many cells as the article draws."""


N = 48


NEEDLE = 5
"""A lone key that the last rows need, among keys that they dislike."""


@dataclass(frozen=True)
class Drawing:
    """Eight positions in blocks. `classes`: 0 future, 1 not read, 2 whole block, 3 diagonal block, 4 masked in it."""

    cells: int
    causal: int
    masked: int
    classes: np.ndarray


@dataclass(frozen=True)
class BlockLesson:
    """Blocks of one head, query block u x key block v.

    `before` is the softmax of mean-pooled scores, `after` the exact attention mass (mean over the block's rows), both
    float [side, side]. `chosen` is what the online index took, `best` the same number of the heaviest blocks.
    """

    block: int
    k: int
    before: np.ndarray
    after: np.ndarray
    chosen: np.ndarray
    best: np.ndarray
    captured: np.ndarray
    captured_best: np.ndarray
    cells: int
    causal: int

    @property
    def side(self) -> int:
        """Blocks along an edge."""
        return len(self.before)

    @property
    def overlooked(self) -> int:
        """Blocks of `best` that the index did not take."""
        return int((self.best & ~self.chosen).sum())


def drawing(blocks: tuple[tuple[int, int], ...] = DRAWING, size: int = 2) -> Drawing:
    """The cells of whole blocks among eight positions."""
    patterns = [Fixed(blocks=blocks, block_size=size), Dense()]
    q = torch.zeros(1, 2, 8, 1)
    index = build_index(q, q[:, :1], patterns, tile=1)
    kept, causal = index.requested_mask()[0].numpy()
    square = np.zeros((8 // size, 8 // size), dtype=bool)
    square[tuple(np.array(blocks).T)] = True
    inside = square.repeat(size, 0).repeat(size, 1)
    diagonal = np.eye(8 // size, dtype=bool).repeat(size, 0).repeat(size, 1)
    classes = np.where(causal, 1, 0)
    classes[kept] = 2
    classes[kept & diagonal] = 3
    classes[inside & ~causal] = 4
    pairs = index.requested_pairs()[0].tolist()
    return Drawing(pairs[0], pairs[1], int((inside & ~causal).sum()), classes)


def head(needle: float) -> toy.Head:
    """Topics that come back in blocks, and one key of the first topic that the end of the prompt needs."""
    topics = [(range(16, 32), range(16), 1.2), (range(32, N), range(16, 24), 1.6), (range(24, 40), range(8, 12), 1.0)]
    lone = [(range(40, N), [NEEDLE], needle), (range(40, N), [j for j in range(16) if j != NEEDLE], -1.5)]
    return toy.make(N, distances={0: 2.0, 1: 1.2}, spots=[*topics, *lone], noise=0.4, seed=3)


def lesson(block: int, k: int, needle: float) -> BlockLesson:
    """The head in blocks of `block`, of which every query block keeps `k`."""
    one = head(needle)
    side = N // block
    index = build_index(one.q, one.k, [BlockSparse(k, block)], one.scale, tile=1)
    _, dense = dense_attention(one.q, one.k, one.v, one.scale)
    exact = mass.pooled_map(ScoreInputs(one.q, one.k, one.scale), dense, shape=(side, side))[0, 0].numpy() / block
    kept = mass.coverage_map(index, shape=(side, side))[0, 0].numpy() > 0
    best = _heaviest(exact, kept)
    heaviest = Fixed(blocks=tuple((int(u), int(v)) for u, v in np.argwhere(best)), block_size=block)
    return BlockLesson(
        block,
        k,
        pooled_softmax(one, block),
        exact,
        kept,
        best,
        captured=_captured(one, BlockSparse(k, block)),
        captured_best=_captured(one, heaviest),
        cells=int(index.requested_pairs()),
        causal=int(index.causal_pairs()),
    )


def pooled_softmax(one: toy.Head, block: int) -> np.ndarray:
    """float64 [side, side]: attention between block means, which is what the index ranks blocks by (eq. 6)."""
    q, k = (x.unflatten(2, (-1, block)).mean(3) for x in (one.q, one.k))
    side = q.shape[2]
    return reference.probabilities(q, k, reference.causal(side, side, (0,), q.device), one.scale)[0, 0].numpy()


def _heaviest(exact: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """As many blocks a row as `kept` has, by true mass; the diagonal block is always one of them."""
    best = np.zeros_like(kept)
    for u, row in enumerate(exact):
        order = sorted(range(u + 1), key=lambda v: (v != u, -row[v]))
        best[u, order[: int(kept[u].sum())]] = True
    return best


def _captured(one: toy.Head, pattern: BlockSparse | Fixed) -> np.ndarray:
    """float [n]: captured mass of every row."""
    index = build_index(one.q, one.k, [pattern], one.scale, tile=1)
    _, sparse = sparse_attention(one.q, one.k, one.v, index)
    _, dense = dense_attention(one.q, one.k, one.v, one.scale)
    return mass.captured_mass(sparse, dense)[0, 0].numpy()

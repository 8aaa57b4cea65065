"""Chapter 3: Vertical-Slash by hand, eq. 5 and 9 to 11."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headscope.engine import AShape, Fixed, build_index, masked_attention
from headscope.engine.patterns.families import Pattern
from headscope.kernels.cells import reference
from headscope.studio.lessons.maths import toy

N = 8
ROW = 6
COLUMNS = (1,)
DISTANCES = (0, 2)
GIVEN = (1, 4, 6)
"""The positions whose keys and values the article writes out; the others are ours."""

KEYS = [[1, 0], [2, 0], [0, 2], [1, 2], [0, 1], [2, 1], [1, 1], [0, 0]]
VALUES = [[0, 1], [1, 0], [1, 1], [2, 0], [0, 2], [1, 2], [2, 1], [2, 2]]


@dataclass(frozen=True)
class Reading:
    """What one row reads: key positions (repeats possible), their scores and weights, and the output."""

    keys: tuple[int, ...]
    scores: tuple[float, ...]
    weights: tuple[float, ...]
    denominator: float
    output: tuple[float, float]

    @property
    def rounded_output(self) -> tuple[float, float]:
        """The output from weights rounded to three digits, as one would by hand."""
        pairs = [(round(w, 3), VALUES[j]) for w, j in zip(self.weights, self.keys, strict=True)]
        return sum(w * v[0] for w, v in pairs), sum(w * v[1] for w, v in pairs)


@dataclass(frozen=True)
class VerticalSlashLesson:
    """Chosen columns and distances over the eight positions.

    `classes` [8, 8]: 0 future, 1 not read, 2 column, 3 distance, 4 both. `right` reads every key once; `doubled` reads
    the keys of both lists, repeats and all. `cut` are the distances that would reach below position 0.
    """

    columns: tuple[int, ...]
    distances: tuple[int, ...]
    row: int
    cells: int
    classes: np.ndarray
    right: Reading
    doubled: Reading
    repeated: tuple[int, ...]
    cut: tuple[int, ...]
    per_row: tuple[int, ...]


@dataclass(frozen=True)
class Cover:
    """A pattern wide enough to hold given cells: `extra` of its cells were not asked for."""

    name: str
    needs: str
    cells: int
    extra: int
    mask: np.ndarray


def head() -> toy.Head:
    """Eight positions, two channels, no scaling: every query is (1, 1) as q6 is in the article."""
    floats = [[[float(x) for x in row] for row in rows] for rows in ([[1, 1]] * N, KEYS, VALUES)]
    return toy.by_hand(*floats)


def lesson(columns: Sequence[int], distances: Sequence[int], row: int) -> VerticalSlashLesson:
    """The pattern over the eight positions, and what `row` reads."""
    one = head()
    cells = [
        Fixed(columns=tuple(columns), distances=tuple(distances)),
        Fixed(columns=tuple(columns)),
        Fixed(distances=tuple(distances)),
        AShape(0, N),
    ]
    q, k, _ = one.copies(len(cells))
    index = build_index(q, k, cells, one.scale, tile=1)
    mask, vertical, slash, causal = index.requested_mask()[0].numpy()
    classes = np.where(causal, 1, 0) + vertical * 1 + slash * 2
    once = tuple(np.flatnonzero(mask[row]).tolist())
    down, along = np.flatnonzero(vertical[row]).tolist(), np.flatnonzero(slash[row]).tolist()
    return VerticalSlashLesson(
        columns=tuple(sorted(columns)),
        distances=tuple(sorted(distances)),
        row=row,
        cells=int(index.requested_pairs()[0, 0]),
        classes=classes,
        right=reading(one, row, once),
        doubled=reading(one, row, (*down, *along)),
        repeated=tuple(sorted(set(down) & set(along))),
        cut=tuple(distance for distance in sorted(distances) if distance > row),
        per_row=tuple(mask.sum(1).tolist()),
    )


def reading(one: toy.Head, row: int, keys: Sequence[int]) -> Reading:
    """Attention of a row over a list of keys, each as often as the list names it.

    The list is laid out as a sequence of its own and read in full, so a repeated key really is read twice.
    """
    if not keys:
        return Reading((), (), (), 0.0, (0.0, 0.0))
    listed = torch.tensor(list(keys))
    q, k, v = one.q[:, :, row : row + 1], one.k[:, :, listed], one.v[:, :, listed]
    everything = torch.ones(1, 1, 1, len(keys), dtype=torch.bool)
    out, lse = masked_attention(q, k, v, everything, one.scale)
    weights = reference.probabilities(q, k, everything, one.scale)[0, 0, 0]
    each = torch.eye(len(keys), dtype=torch.bool)[None, :, None, :]
    scores = reference.masked(q.expand(1, len(keys), 1, -1), k, v, each, one.scale)[1][0, :, 0]
    x, y = out[0, 0, 0].tolist()
    return Reading(tuple(keys), tuple(scores.tolist()), tuple(weights.tolist()), float(lse.exp()), (x, y))


def covers(columns: Sequence[int], distances: Sequence[int]) -> list[Cover]:
    """The least that each pattern needs to hold the chosen cells."""
    target_pattern = Fixed(columns=tuple(columns), distances=tuple(distances))
    target = _masks([target_pattern])[0]
    wanted = int(target.sum())
    if not wanted:
        return []
    shapes = [AShape(sink, window) for sink in range(N + 1) for window in range(1, N + 1)]
    a_shape, mask = _least(shapes, target)
    covering = [
        Cover(
            "a-shape",
            f"sink {a_shape.sink}, window {a_shape.window}",
            int(mask.sum()),
            int((mask & ~target).sum()),
            mask,
        ),
        Cover("vertical-slash", f"columns {_set(columns)}, distances {_set(distances)}", wanted, 0, target),
    ]
    touched = {(int(i) // 2, int(j) // 2) for i, j in np.argwhere(target)}
    mask = _masks([Fixed(blocks=tuple(touched), block_size=2)])[0]
    covering.append(
        Cover("block-sparse", f"{len(touched)} blocks of 2 × 2", int(mask.sum()), int((mask & ~target).sum()), mask)
    )
    return covering


def column_cells(n: int, columns: tuple[int, ...]) -> int:
    """Causal cells of whole columns among `n` positions."""
    x = torch.zeros(1, 1, n, 1)
    return int(build_index(x, x, [Fixed(columns=columns)], tile=1).requested_pairs())


def _masks(patterns: Sequence[Pattern]) -> np.ndarray:
    q = torch.zeros(1, len(patterns), N, 1)
    return build_index(q, q[:, :1], patterns, tile=1).requested_mask()[0].numpy()


def _least(patterns: Sequence[AShape], target: np.ndarray) -> tuple[AShape, np.ndarray]:
    masks = _masks(patterns)
    holds = (masks | ~target).all((1, 2))
    best = min((at for at in range(len(patterns)) if holds[at]), key=lambda at: masks[at].sum())
    return patterns[best], masks[best]


def _set(values: Sequence[int]) -> str:
    return "{" + ", ".join(map(str, sorted(values))) + "}"

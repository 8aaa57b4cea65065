"""Chapter 2: the A-shape, eq. 3 and 4."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headscope.engine import AShape, Dense, Fixed, build_index

DRAWING = (8, 1, 2)
"""The article's drawing: positions, sink, window."""


LENGTHS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class AShapeLesson:
    """Cells of one A-shape. `classes` [n, n]: 0 future, 1 not read, 2 sink, 3 window, 4 in both."""

    n: int
    sink: int
    window: int
    cells: int
    sink_cells: int
    window_cells: int
    both: int
    dense_cells: int
    classes: np.ndarray


def lesson(n: int, sink: int, window: int) -> AShapeLesson:
    """Counts and cells of `AShape(sink, window)`, and of its two parts each alone."""
    parts_of = [
        AShape(sink, window),
        Fixed(columns=tuple(range(sink))),
        Fixed(distances=tuple(range(window))),
        Dense(),
    ]
    q = torch.zeros(1, len(parts_of), n, 1)
    index = build_index(q, q[:, :1], parts_of, tile=1)
    whole, left, near, causal = index.requested_mask()[0].numpy()
    counts = index.requested_pairs()[0].tolist()
    classes = np.where(causal, 1, 0) + (whole & left) * 1 + (whole & near) * 2
    classes = np.where(left & near, 4, classes)
    return AShapeLesson(
        n,
        sink,
        window,
        cells=counts[0],
        sink_cells=counts[1],
        window_cells=counts[2],
        both=int((left & near).sum()),
        dense_cells=counts[3],
        classes=classes,
    )


def growth(sink: int, window: int) -> tuple[list[int], list[int]]:
    """Cells of the A-shape and of dense attention at `LENGTHS`."""
    sparse, dense = [], []
    for n in LENGTHS:
        x = torch.zeros(1, 2, n, 1)
        pairs = build_index(x, x[:, :1], [AShape(sink, window), Dense()], tile=1).requested_pairs()[0].tolist()
        sparse.append(pairs[0])
        dense.append(pairs[1])
    return sparse, dense

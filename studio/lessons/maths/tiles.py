"""Chapter 7: requested and computed cells, and why more cells can be faster."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from headscope.engine import VerticalSlash, build_index, dense_attention, sparse_attention
from headscope.engine.loss import mass
from headscope.engine.loss.measure import timed
from headscope.studio.lab.jobs import Context
from headscope.studio.lessons.maths import toy

N = 58


WIDTHS = (1, 2, 4, 8, 16)


TIMED_N, TIMED_WIDTHS = 512, (2, 8, 32, 128)


SPREADS = {"side by side": (0, 1, 2, 24, 25, 26), "far apart": (0, 9, 18, 27, 36, 45)}


COLUMNS = (0, 13)


@dataclass(frozen=True)
class TileLesson:
    """One head under one tile width. `classes`: 0 future, 1 not read, 2 distance, 3 column, 4 computed beyond that.

    `windows` is how many windows each block of rows loads; `areas` are block, column, causal waste and padding cells.
    """

    width: int
    requested: int
    computed: int
    windows: int
    areas: tuple[int, int, int, int]
    captured: float
    classes: np.ndarray
    causal: int


@dataclass(frozen=True)
class TimedWidth:
    """One width, measured: the sparse attention alone, median of three."""

    width: int
    requested: int
    computed: int
    windows: int
    ms: float


def head(spread: str) -> toy.Head:
    """A head that keeps two columns and six distances, near each other or far apart."""
    distances = {d: 3.0 - 0.05 * at for at, d in enumerate(SPREADS[spread])}
    return toy.make(N, distances=distances, spots=[(range(N), [c], 2.4) for c in COLUMNS], noise=0.5, seed=11)


def lesson(spread: str, width: int) -> TileLesson:
    """The online index of that head, expanded to windows of `width` keys by width / 2 rows."""
    one = head(spread)
    pattern = VerticalSlash(len(COLUMNS), len(SPREADS[spread]))
    index = build_index(one.q, one.k, [pattern], one.scale, tile=width)
    requested, computed = (x[0, 0].numpy() for x in (index.requested_mask(), index.computed_mask()))
    columns = index.computed.columns[0, : int(index.computed.column_count[0])].tolist()
    causal = np.tri(N, dtype=bool)
    classes = np.where(causal, 1, 0)
    classes[computed] = 4
    classes[requested] = 2
    vertical = np.zeros_like(causal)
    vertical[:, columns] = True
    classes[requested & vertical] = 3
    areas = index.areas()
    _, sparse = sparse_attention(one.q, one.k, one.v, index)
    _, dense = dense_attention(one.q, one.k, one.v, one.scale)
    return TileLesson(
        width,
        int(index.requested_pairs()),
        int(index.computed_pairs()),
        int(index.computed.window_count[0]),
        tuple(int(x) for x in (areas.block, areas.column, areas.causal_waste, areas.padding)),  # type: ignore[arg-type]
        float(mass.captured_mass(sparse, dense).mean()),
        classes,
        int(index.causal_pairs()),
    )


def measure(context: Context) -> list[TimedWidth]:
    """Times the sparse attention of one longer head at each of `TIMED_WIDTHS`. On the worker's thread."""
    chance = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 1, TIMED_N, 64, generator=chance) for _ in range(3))
    rows = []
    for step, width in enumerate(TIMED_WIDTHS):
        context.step(step, len(TIMED_WIDTHS), f"Timing tiles {width} wide")
        index = build_index(q, k, [VerticalSlash(16, 64, local=48)], tile=width)
        sparse_attention(q, k, v, index)
        times = [timed(partial(sparse_attention, q, k, v, index), q.device)[1] for _ in range(3)]
        rows.append(
            TimedWidth(
                width,
                int(index.requested_pairs()),
                int(index.computed_pairs()),
                int(index.computed.window_count[0]),
                statistics.median(times),
            )
        )
    return rows

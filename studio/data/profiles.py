"""Where a head's probability lies: by column (key position) and by distance back, pooled exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headscope.engine.attend.index import Index
from headscope.engine.attend.inputs import ScoreInputs
from headscope.engine.loss import mass
from headscope.kernels.cells import membership
from headscope.kernels.cells.layout import Layout

MOST_SPANS = 1024
"""A figure has no more points than this at any length."""


@dataclass(frozen=True)
class Profile:
    """Probability over positions (columns, or distances), summed over spans; arrays are float64 [spans].

    `edges` are the limits of the spans. `share` is each span's part of all probability of the head and adds up to 1.
    `kept` is the part of a span's positions that the pattern asks for, `kept_share` the probability in those.
    """

    edges: tuple[int, ...]
    share: np.ndarray
    kept: np.ndarray
    kept_share: np.ndarray


@dataclass(frozen=True)
class Profiles:
    """A head's probability by key position and by distance back in tokens."""

    columns: Profile
    distances: Profile


def head_profiles(inputs: ScoreInputs, lse: torch.Tensor, index: Index, spans: int = MOST_SPANS) -> Profiles:
    """The profiles of one head of one unpadded sequence. Dense lse [1, 1, S].

    `index` is that head's alone; what it keeps comes from its requested layout, before the expansion to tiles.
    """
    columns, distances = mass.profiles(inputs, lse)
    kept_columns, kept_distances = kept_lines(index.requested)
    rows = inputs.rows
    return Profiles(
        _pooled(columns[0, 0].double().cpu().numpy() / rows, kept_columns, spans),
        _pooled(distances[0, 0].double().cpu().numpy() / rows, kept_distances, spans),
    )


def kept_lines(layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Which columns and which distances the first head of a layout keeps, float64 [T] each, 0 to 1.

    A window is fixed for the rows that share it, so the distances at its borders are kept for some rows only: the
    value is their share. Blocks are neither columns nor distances.
    """
    table = membership.tables(layout)
    length, rows = layout.kv_len, layout.rows
    window = table.window[0].double().cpu().numpy()  # over r0 - j, from -(rows - 1)
    sums = np.concatenate([[0.0], np.cumsum(window)])
    by_window = (sums[rows : rows + length] - sums[:length]) / rows  # distance d: r0 - j from d - rows + 1 to d
    band = table.band[0].double().cpu().numpy()
    return table.column[0].double().cpu().numpy(), np.maximum(band, by_window)


def _pooled(share: np.ndarray, kept: np.ndarray, spans: int) -> Profile:
    width = -(-len(share) // spans)  # all spans alike but the last: a span of two tokens holds more than one of one
    limits = (*range(0, len(share), width), len(share))
    starts = np.asarray(limits[:-1])
    return Profile(
        limits,
        np.add.reduceat(share, starts),
        np.add.reduceat(kept, starts) / np.diff(np.asarray(limits)),
        np.add.reduceat(share * kept, starts),
    )

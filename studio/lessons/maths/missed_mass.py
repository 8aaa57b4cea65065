"""Chapter 8: missed mass from two LSEs, and how it becomes an error of the output."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from headscope.engine import AShape, Dense, build_index, dense_attention, sparse_attention
from headscope.engine.loss import mass
from headscope.engine.loss import measure as measuring
from headscope.kernels.cells import reference
from headscope.studio.lessons.maths import toy

N, SINK = 32, 1


SHARPNESS = tuple(step / 4 for step in range(21))


PLACES = {"the first token": 0, "key 12": 12}


@dataclass(frozen=True)
class MissedLesson:
    """One head under an A-shape, its last row in detail.

    `captured` is exp(lse_sparse - lse_dense) of the last row; `summed` the dense probabilities on its kept cells, added
    up. `error` is the relative L2 error of the row's output.
    """

    weights: np.ndarray
    kept: np.ndarray
    lse_sparse: float
    lse_dense: float
    captured: float
    summed: float
    error: float
    captured_rows: np.ndarray


def head(sharpness: float, peak: int) -> toy.Head:
    """Random scores, the recent keys and the key `peak` liked more than the others; `sharpness` multiplies them all."""
    one = toy.make(
        N, distances={0: 1.0, 1: 0.7}, spots=[(range(N), [peak], 2.6)], noise=0.6, sharpness=sharpness, seed=2
    )
    # Values with a common part, as real ones have; without it a flat row's output is nearly 0 and any error huge.
    return replace(one, v=one.v + 1.0)


def lesson(sharpness: float, peak: int, window: int) -> MissedLesson:
    """Dense and sparse attention of that head, compared."""
    one = head(sharpness, peak)
    index = build_index(one.q, one.k, [AShape(SINK, window)], one.scale, tile=1)
    out, sparse = sparse_attention(one.q, one.k, one.v, index)
    full, dense = dense_attention(one.q, one.k, one.v, one.scale)
    everything = build_index(one.q, one.k, [Dense()], one.scale, tile=1).requested_mask()
    weights = reference.probabilities(one.q, one.k, everything, one.scale)[0, 0, -1].numpy()
    kept = index.requested_mask()[0, 0, -1].numpy()
    error, _ = measuring.output_errors(out[:, :, -1:], full[:, :, -1:])
    captured = mass.captured_mass(sparse, dense)[0, 0].numpy()
    return MissedLesson(
        weights,
        kept,
        float(sparse[0, 0, -1]),
        float(dense[0, 0, -1]),
        float(captured[-1]),
        float(weights[kept].sum()),
        float(error[0]),
        captured,
    )

"""Missed mass: how much softmax probability a sparse row leaves out, from two LSEs, and how it is summed up."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headscope.engine.attend.finite import check_values
from headscope.engine.attend.index import Index
from headscope.engine.attend.inputs import ScoreInputs
from headscope.kernels import backends

MISSED_MASS_FLOOR = 1e-5
"""Missed mass below this is rounding of float32 LSEs, not a measurement: each carries about 1e-6, and more where
logits are large. It is reported as measured, not as zero; the studio and `headscope inspect --help` say so."""


@dataclass(frozen=True)
class Loss:
    """What one head misses over the rows of a prompt; shares of probability in 0..1.

    `worst_row` is the row's own position. `thirds` are the means over the start, middle and end of the rows.
    """

    mean: float
    worst: float
    worst_row: int
    p99: float
    thirds: tuple[float, float, float]


def missed_mass(lse_sparse: torch.Tensor, lse_dense: torch.Tensor) -> torch.Tensor:
    """`1 - exp(lse_sparse - lse_dense)` in [0, 1], of any shape. Rows with nothing to read (padding) miss 0.

    Exact for every row at any length: the sparse sum of exponentials over the dense one is the captured mass.
    ModelError for a NaN or +inf in either LSE: what is missed there is not known, and the bounds would say 0 or 1.
    """
    check_values("lse_sparse", lse_sparse, empty=True)
    check_values("lse_dense", lse_dense, empty=True)
    missed = -torch.expm1(lse_sparse - lse_dense)
    return torch.where(torch.isneginf(lse_dense), 0.0, missed).clamp(0.0, 1.0) + 0.0  # never -0


def captured_mass(lse_sparse: torch.Tensor, lse_dense: torch.Tensor) -> torch.Tensor:
    """The complement of `missed_mass`."""
    return 1.0 - missed_mass(lse_sparse, lse_dense)


def losses(missed: torch.Tensor, first_row: tuple[int, ...]) -> list[Loss]:
    """One `Loss` per head over all real rows of a batch. missed [B, Hq, S]; `first_row` [B] as in a layout.

    Rows of negative position are padding and left out. The thirds are taken per sequence. ModelError where a row of
    `missed` is not finite.
    """
    parts = [missed[b, :, max(0, -first) :] for b, first in enumerate(first_row)]
    rows = torch.cat(parts, 1).float()
    if not rows.shape[1]:
        raise ValueError("missed must hold at least one real row")
    check_values("missed", rows)
    position = torch.cat(
        [torch.arange(max(0, first), max(0, first) + p.shape[1]) for p, first in zip(parts, first_row, strict=True)]
    )
    worst, at = rows.max(1)
    # Third t of a sequence with r rows: rows t r // 3 up to (t + 1) r // 3, or the nearest row if that is none.
    thirds = []
    for third in range(3):
        spans = [(p.shape[1] * third // 3, p.shape[1] * (third + 1) // 3, p.shape[1]) for p in parts]
        cut = [p[:, min(a, r - 1) : max(b, min(a, r - 1) + 1)] for p, (a, b, r) in zip(parts, spans, strict=True) if r]
        thirds.append(torch.cat(cut, 1).double().mean(1))
    table = torch.stack([rows.double().mean(1), worst.double(), _percentile(rows, 0.99).double(), *thirds], 1).tolist()
    return [
        Loss(mean, high, int(position[row]), p99, (start, middle, end))
        for (mean, high, p99, start, middle, end), row in zip(table, at.tolist(), strict=True)
    ]


def _percentile(rows: torch.Tensor, share: float) -> torch.Tensor:
    """[H]: the smallest value that at least `share` of the rows do not exceed. Works at any length."""
    rank = max(1, -(-round(rows.shape[1] * share * 1000) // 1000))
    return rows.kthvalue(min(rank, rows.shape[1]), dim=1).values


def pooled_map(
    inputs: ScoreInputs,
    lse_dense: torch.Tensor,
    *,
    rows: tuple[int, int] | None = None,
    cols: tuple[int, int] | None = None,
    shape: tuple[int, int] = (256, 256),
    index: Index | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Exact sum of probability per tile, [B, Hq, rows, cols]; of the computed cells alone with an index.

    float32, from the reference float64.

    `lse_dense` [B, Hq, S]. `rows` and `cols` are half-open spans of own positions (everything by default) cut into
    `shape` tiles; tile `a` of `p` starts at `first + (stop - first) * a // p`. Memory does not grow with the number
    of cells. ModelError where `lse_dense` or a tile is not finite.
    """
    check_values("lse_dense", lse_dense, empty=True)
    rows, cols = _span("rows", rows, inputs.length), _span("cols", cols, inputs.length)
    shape = (min(shape[0], rows[1] - rows[0]), min(shape[1], cols[1] - cols[0]))
    layout = index.computed if index is not None else None
    backend = backends.choose(impl, inputs.q, layout)
    tiles = backend.pooled(inputs.q, inputs.k, lse_dense, inputs.scale, inputs.starts, rows, cols, shape, layout)
    check_values("the map of probability", tiles)
    return tiles


def coverage_map(
    index: Index,
    *,
    rows: tuple[int, int] | None = None,
    cols: tuple[int, int] | None = None,
    shape: tuple[int, int] = (256, 256),
) -> torch.Tensor:
    """Cells of the index per tile, float32 [B, Hq, rows, cols]; tiles as in `pooled_map`."""
    layout = index.computed
    rows = rows if rows is not None else (0, layout.kv_len)
    cols = cols if cols is not None else (0, layout.kv_len)
    shape = (min(shape[0], rows[1] - rows[0]), min(shape[1], cols[1] - cols[0]))
    return backends.for_layout(layout).coverage(layout, rows, cols, shape)


def profiles(inputs: ScoreInputs, lse_dense: torch.Tensor, impl: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
    """Exact probability per column and per distance, over all rows: two [B, Hq, T] in float32, from the reference
    in float64. `lse_dense` [B, Hq, S]. ModelError where it, or a sum, is not finite."""
    check_values("lse_dense", lse_dense, empty=True)
    backend = backends.choose(impl, inputs.q)
    columns, distances = backend.sums(inputs.q, inputs.k, lse_dense, inputs.scale, inputs.starts)
    check_values("the profile of columns", columns)
    check_values("the profile of distances", distances)
    return columns, distances


def _span(name: str, span: tuple[int, int] | None, length: int) -> tuple[int, int]:
    if span is None:
        return 0, length
    if not 0 <= span[0] < span[1] <= length:
        raise ValueError(f"{name} must be a span within 0 and {length}, got {span}")
    return span

"""Exact sums of attention probability in plain torch, in row chunks: maps per tile, columns and distances.

Everything comes from probabilities that are formed a few rows at a time and never kept. Sums are in float32; for
float64 inputs in float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headscope.kernels.cells import membership
from headscope.kernels.cells.diagonals import by_distance
from headscope.kernels.cells.inputs import check_inputs, check_lse, check_pools
from headscope.kernels.cells.layout import Layout
from headscope.kernels.torch.probabilities import at_least_float32, probabilities

_CELLS = 2**22
"""Cells formed at a time: 16 MiB in float32."""


def edges(first: int, stop: int, parts: int) -> list[int]:
    """The `parts + 1` edges that cut `first .. stop` into pools of nearly equal size."""
    return [first + (stop - first) * part // parts for part in range(parts + 1)]


def pooled(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    starts: tuple[int, ...],
    rows: tuple[int, int],
    cols: tuple[int, int],
    shape: tuple[int, int],
    layout: Layout | None = None,
) -> torch.Tensor:
    """[B, Hq, shape]: probability summed per tile over own rows and own keys `rows` x `cols`.

    `lse` [B, Hq, S] is that of the dense pass. With a layout only its cells are summed, so the difference of
    two maps is the missed mass per tile. Rows that are not among the queries add nothing. `ValueError` where an input
    does not fit the others.
    """
    check_inputs(q, k, None, scale, starts)
    check_lse(lse, q)
    check_pools(rows, cols, shape, k.shape[2])
    result = at_least_float32(q.new_zeros(q.shape[0], q.shape[1], *shape))
    of_row = _pool_of(rows, shape[0], q.device)
    table = membership.tables(layout) if layout is not None else None
    for sequence, own, weight in _chunks(q, k, lse, scale, starts, rows, cols):
        if layout is not None and table is not None:
            heads = slice(sequence * layout.heads, (sequence + 1) * layout.heads)
            columns = torch.arange(cols[0], cols[0] + weight.shape[-1], device=q.device)
            weight = weight * membership.cells(layout, table, heads, own, columns)
        by_col = _pool_columns(weight, cols, shape[1])
        result[sequence].index_add_(1, of_row[own - rows[0]], by_col)
    return result


def coverage(
    layout: Layout,
    rows: tuple[int, int],
    cols: tuple[int, int],
    shape: tuple[int, int],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """[B, Hq, shape]: how many cells of each tile the layout holds. `ValueError` for spans that `shape` cannot cut."""
    check_pools(rows, cols, shape, layout.kv_len)
    device = layout.device
    result = torch.zeros(layout.batch, layout.heads, *shape, dtype=dtype, device=device)
    of_row = _pool_of(rows, shape[0], device)
    table = membership.tables(layout)
    columns = torch.arange(*cols, device=device)
    step = max(1, _CELLS // (layout.heads * max(1, len(columns))))
    for sequence in range(layout.batch):
        heads = slice(sequence * layout.heads, (sequence + 1) * layout.heads)
        first, stop = max(rows[0], layout.first_row[sequence], 0), min(rows[1], layout.length(sequence))
        for row in range(first, stop, step):
            own = torch.arange(row, min(row + step, stop), device=device)
            by_col = _pool_columns(membership.cells(layout, table, heads, own, columns).to(dtype), cols, shape[1])
            result[sequence].index_add_(1, of_row[own - rows[0]], by_col)
    return result


def sums(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, scale: float, starts: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probability per own column and per distance over all rows: two [B, Hq, T]."""
    check_inputs(q, k, None, scale, starts)
    check_lse(lse, q)
    kv_len = k.shape[2]
    columns = at_least_float32(q.new_zeros(q.shape[0], q.shape[1], kv_len))
    distances = torch.zeros_like(columns)
    for sequence, own, weight in _chunks(q, k, lse, scale, starts, (0, kv_len), (0, kv_len)):
        length = weight.shape[-1]
        columns[sequence, :, :length] += weight.sum(1)
        distances[sequence, :, :length] += by_distance(weight, own).sum(1)
    return columns, distances


def _pool_columns(cells: torch.Tensor, cols: tuple[int, int], parts: int) -> torch.Tensor:
    """[H, r, c] to [H, r, parts]: sums over the pools of `cols`, of which the cells are the first `c` columns."""
    count = cols[1] - cols[0]
    if cells.shape[-1] < count:
        cells = torch.nn.functional.pad(cells, (0, count - cells.shape[-1]))
    if count % parts == 0:
        return cells.unflatten(-1, (parts, count // parts)).sum(-1)
    bounds = torch.tensor(edges(0, count, parts), device=cells.device)
    most = int((bounds[1:] - bounds[:-1]).max())
    # Pools differ by at most one column; the short ones read the zero that is put behind the cells.
    column = bounds[:-1, None] + torch.arange(most, device=cells.device)
    column = torch.where(column < bounds[1:, None], column, count)
    padded = torch.nn.functional.pad(cells, (0, 1))
    return padded[..., column.flatten()].unflatten(-1, (parts, most)).sum(-1)


def _pool_of(span: tuple[int, int], parts: int, device: torch.device) -> torch.Tensor:
    """int64 [stop - first]: the pool of each position."""
    inner = torch.tensor(edges(span[0], span[1], parts)[1:-1], device=device, dtype=torch.long)
    return torch.searchsorted(inner, torch.arange(*span, device=device), right=True)


def _chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    starts: tuple[int, ...],
    rows: tuple[int, int],
    cols: tuple[int, int],
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(sequence, own rows [r], probabilities [Hq, r, keys]) a few rows at a time; keys end at the last row."""
    heads, q_len, kv_len = q.shape[1], q.shape[2], k.shape[2]
    for sequence, start in enumerate(starts):
        shift = kv_len - q_len - start
        first, last = max(rows[0], shift, 0), min(rows[1], kv_len - start)
        keys = at_least_float32(k[sequence, :, start + cols[0] : start + min(cols[1], kv_len - start)])
        step = max(1, min(512, _CELLS // (heads * max(1, keys.shape[1]))))
        for row in range(max(first, cols[0]), last, step):
            own = torch.arange(row, min(row + step, last), device=q.device)
            near = keys[:, : int(own[-1]) + 1 - cols[0]]
            local = own - shift
            weight = probabilities(q[sequence, :, local], near, lse[sequence, :, local], own, scale, cols[0])
            yield sequence, own, weight

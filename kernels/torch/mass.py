"""Exact sums of attention probability in plain torch, in row chunks: maps per tile, columns and distances.

Everything comes from `exp(score - lse)` of cells that are formed a few rows at a time and never kept.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headscope.kernels.cells import membership
from headscope.kernels.cells.diagonals import by_distance
from headscope.kernels.cells.layout import Layout

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
    """float32 [B, Hq, shape]: probability summed per tile over own rows and own keys `rows` x `cols`.

    `lse` [B, Hq, S] is that of the dense pass. With a layout only its cells are summed, so the difference of
    two maps is the missed mass per tile. Rows that are not among the queries add nothing.
    """
    result = torch.zeros(q.shape[0], q.shape[1], *shape, device=q.device)
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


def coverage(layout: Layout, rows: tuple[int, int], cols: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    """float32 [B, Hq, shape]: how many cells of each tile the layout holds."""
    device = layout.device
    result = torch.zeros(layout.batch, layout.heads, *shape, device=device)
    of_row = _pool_of(rows, shape[0], device)
    table = membership.tables(layout)
    columns = torch.arange(*cols, device=device)
    step = max(1, _CELLS // (layout.heads * max(1, len(columns))))
    for sequence in range(layout.batch):
        heads = slice(sequence * layout.heads, (sequence + 1) * layout.heads)
        first, stop = max(rows[0], layout.first_row[sequence], 0), min(rows[1], layout.length(sequence))
        for row in range(first, stop, step):
            own = torch.arange(row, min(row + step, stop), device=device)
            by_col = _pool_columns(membership.cells(layout, table, heads, own, columns).float(), cols, shape[1])
            result[sequence].index_add_(1, of_row[own - rows[0]], by_col)
    return result


def sums(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, scale: float, starts: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probability per own column and per distance over all rows: two float32 [B, Hq, T]."""
    kv_len = k.shape[2]
    columns = torch.zeros(q.shape[0], q.shape[1], kv_len, device=q.device)
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
    """(sequence, own rows [r], probabilities float32 [Hq, r, keys]) a few rows at a time; keys end at the last row."""
    _, heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    for sequence, start in enumerate(starts):
        shift = kv_len - q_len - start
        first, last = max(rows[0], shift, 0), min(rows[1], kv_len - start)
        keys = k[sequence, :, start + cols[0] : start + min(cols[1], kv_len - start)].float()
        step = max(1, min(512, _CELLS // (heads * max(1, keys.shape[1]))))
        for row in range(max(first, cols[0]), last, step):
            own = torch.arange(row, min(row + step, last), device=q.device)
            near = keys[:, : int(own[-1]) + 1 - cols[0]]
            grouped = q[sequence, :, own - shift].float().reshape(kv_heads, -1, dim)
            scores = ((grouped @ near.transpose(-1, -2)) * scale).view(heads, len(own), near.shape[1])
            weight = scores.sub_(lse[sequence, :, own - shift, None]).exp_()
            future = torch.arange(cols[0], cols[0] + near.shape[1], device=q.device)[None, :] > own[:, None]
            yield sequence, own, weight.masked_fill_(future, 0.0)

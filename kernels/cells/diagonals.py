"""Rows of cells laid out by distance, so that diagonals can be summed like columns."""

from __future__ import annotations

import torch


def by_distance(cells: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[H, r, n] to [H, r, n]: entry (h, a, d) is the cell of row `rows[a]` at distance d, 0 where there is none.

    `rows` [r] are ascending own positions below n, and cells right of the diagonal must be 0. Neighbouring rows
    are skewed by a stride, which reads as fast as the cells themselves; other rows are gathered.
    """
    heads, count, length = cells.shape
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == count:
        # Each row reversed and one zero longer: a stride of `length` then moves one distance per row.
        flat = cells.new_zeros(heads, count * (length + 1) + length)
        skew = flat[:, : count * (length + 1)].view(heads, count, length + 1)
        skew[:, :, :length] = cells.flip(-1)
        return flat.as_strided((heads, count, length), (flat.shape[1], length, 1), length - 1 - first)
    column = rows[:, None] - torch.arange(length, device=cells.device)[None, :]
    return cells.gather(-1, column.clamp(min=0).expand(cells.shape)).masked_fill(column < 0, 0)

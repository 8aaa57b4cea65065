"""Attention in plain torch, dense and over a layout: work and memory follow the computed pairs.

Heads that compute everything run as dense ones. Others run on the CPU as rectangles through torch's flash kernel
(`flash`) where 64 rows read a key together or not at all, bands apart, and through gathered items (`gathered`) where
tiles or blocks are narrower, in float64 and on a GPU.
"""

from __future__ import annotations

import torch

from headscope.kernels.cells import membership
from headscope.kernels.cells.inputs import check_inputs, check_layout, rows_in_one_piece
from headscope.kernels.cells.layout import Layout
from headscope.kernels.torch import flash, gathered


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, starts: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention and its LSE. q [B, Hq, S, D], k/v [B, Hkv, T, D]; LSE float32 [B, Hq, S].

    A whole prompt on the CPU runs in torch's own flash kernel, which returns the LSE too; everything else runs
    in row chunks. `ValueError` where an input does not fit the others.
    """
    check_inputs(q, k, v, scale, starts)
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:3], -torch.inf, device=q.device)
    for sequence, start in enumerate(starts):
        first = max(0, start - (k.shape[2] - q.shape[2]))
        if first < q.shape[2]:
            part = (q[sequence, :, first:], k[sequence, :, start:], v[sequence, :, start:])
            out[sequence, :, first:], lse[sequence, :, first:] = _dense(*part, scale)
    return out, lse


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, rows being its last positions: q [Hq, S, D], k/v [Hkv, n, D]."""
    if q.shape[1] != k.shape[1] or not flash.serves(q, k):
        return _dense_rows(q, k, v, scale)
    if q.dtype == torch.float32:
        return _dense_flash(q, k, v, scale)
    # For half types torch's kernel takes a fast exponential that is 6e-5 off in the LSE, so they run in float32; one
    # KV head after another, since the copies are twice the size of what they copy.
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=q.device)
    group = q.shape[0] // k.shape[0]
    for kv_head in range(k.shape[0]):
        heads, keys = slice(kv_head * group, (kv_head + 1) * group), slice(kv_head, kv_head + 1)
        out[heads], lse[heads] = _dense_flash(q[heads].float(), k[keys].float(), v[keys].float(), scale)
    return out, lse


def _dense_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence whose rows are all its keys, float32: q [Hq, n, D], k/v [Hkv, n, D].

    GQA groups stand where the kernel expects a batch, so that K and V are never repeated.
    """
    group = q.shape[0] // k.shape[0]
    queries = rows_in_one_piece(q).unflatten(0, (k.shape[0], group))
    keys, values = (rows_in_one_piece(x)[:, None].expand(-1, group, -1, -1) for x in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, 0.0, True, scale=scale)
    return out.flatten(0, 1), lse.flatten(0, 1)


def _dense_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, rows being its last positions: q [Hq, S, D], k/v [Hkv, n, D]."""
    heads, q_len, dim = q.shape
    kv_heads, length = k.shape[0], k.shape[1]
    keys, values = k.float(), v.float()
    out = torch.empty_like(q)
    lse = torch.empty(heads, q_len, device=q.device)
    for first in range(0, q_len, 256):
        stop = min(first + 256, q_len)
        end = length - q_len + stop
        grouped = q[:, first:stop].float().reshape(kv_heads, -1, dim)
        scores = ((grouped @ keys[:, :end].transpose(-1, -2)) * scale).view(heads, stop - first, end)
        future = torch.ones(stop - first, stop - first, dtype=torch.bool, device=q.device).triu(1)
        scores[:, :, end - (stop - first) :].masked_fill_(future, -torch.inf)
        lse[:, first:stop] = scores.logsumexp(-1)
        weight = scores.sub_(lse[:, first:stop, None]).exp_().view(kv_heads, -1, end)
        out[:, first:stop] = (weight @ values[:, :end]).view(heads, stop - first, dim).to(q.dtype)
    return out, lse


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the cells of `layout`, and its LSE. A row with no cell gives output 0 and LSE -inf.

    `ValueError` where an input does not fit the others or the layout.
    """
    check_inputs(q, k, v, scale, layout.starts)
    check_layout(layout, q, k)
    table = membership.tables(layout)
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:3], -torch.inf, device=q.device)
    whole = _whole(layout, table)
    _attend_whole(q, k, v, layout, whole, scale, out, lse)
    by_flash = ~whole & flash.whole_rows(layout) if flash.serves(q, k) else torch.zeros_like(whole)
    for path, chosen in ((flash.attend, by_flash), (gathered.attend, ~whole & ~by_flash)):
        heads = chosen.nonzero()[:, 0]
        if len(heads):
            path(q, k, v, layout, table, heads, scale, out, lse)
    return out, lse


def _whole(layout: Layout, table: membership.Tables) -> torch.Tensor:
    """bool [N]: heads of which every causal cell is computed, by a band or by windows that leave nothing out."""
    lengths = torch.tensor(layout.starts, device=layout.device).neg().add(layout.kv_len)
    lengths = lengths.repeat_interleave(layout.heads)
    covered = (table.band.long().cumsum(1), table.window.long().cumsum(1))
    by_band = covered[0].gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0] >= lengths
    reach = lengths + layout.rows - 1
    by_window = covered[1].gather(1, (reach - 1).clamp(min=0)[:, None])[:, 0] >= reach
    return (by_band | by_window) & (lengths > 0)


def _attend_whole(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    whole: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Heads that compute everything run as dense ones, which costs less than gathering everything."""
    group = layout.heads // k.shape[1]
    for sequence, start in enumerate(layout.starts):
        heads = whole[sequence * layout.heads : (sequence + 1) * layout.heads].nonzero()[:, 0]
        first = max(0, -layout.first_row[sequence])
        if len(heads) and first < layout.q_len:
            keys, values = k[sequence, heads // group, start:], v[sequence, heads // group, start:]
            part_out, part_lse = _dense(q[sequence, heads, first:], keys, values, scale)
            out[sequence, heads, first:], lse[sequence, heads, first:] = part_out, part_lse

"""Attention over a layout in plain torch, block-gathered: work and memory follow the computed pairs.

Every 64 query rows of a head form an item. An item's keys are the union of what its rows read; items of all
heads and sequences are sorted by how many keys they have and run in batches of similar size, each one gather
of K and V, one matrix product, one masked softmax, one matrix product. No masked dense product is ever formed, and
scratch memory is bounded, whatever the length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from headscope.kernels.cells import membership
from headscope.kernels.cells.inputs import check_inputs, check_layout, rows_in_one_piece
from headscope.kernels.cells.layout import Layout

ROWS = 64
"""Query rows of one item."""

_SCORES = 2**20
"""Score elements of one batch of items: 4 MiB in float32, small enough to stay near the cores."""

_PADDING = 256
"""Keys that a short item may be padded by to share a batch: a batch of its own costs more."""

_FLAGS = 2**25
"""Key flags of one chunk of row blocks: 32 MiB."""


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
    whole = q.shape[1] == k.shape[1] and q.device.type == "cpu" and q.dtype != torch.float64
    # torch's kernel gives output 0 and LSE 0, finite and wrong, to a row whose every score is -inf or loses a NaN.
    if not whole or not _bounded(q, k):
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


def _bounded(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether no score can be beyond float32; False for NaN and infinities."""
    bounds = [float(bound) for x in (q, k) for bound in torch.aminmax(x)]
    if not all(map(math.isfinite, bounds)):
        return False
    return max(map(abs, bounds[:2])) * max(map(abs, bounds[2:])) * q.shape[-1] < 1e30


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
    heads = (~whole).nonzero()[:, 0]
    if not len(heads):
        return out, lse
    exact, scratch = _needs_mask(layout), _Scratch(q.device)
    q, k, v = q.detach(), k.detach().contiguous(), v.detach().contiguous()
    row_blocks = -(-layout.kv_len // ROWS)
    step = max(1, _FLAGS // (len(heads) * layout.kv_len))
    first = min(max(0, row) for row in layout.first_row) // ROWS
    for block in range(first, row_blocks, step):
        work = _items(layout, table, heads, block, min(block + step, row_blocks))
        for masked in (False, True):
            for items in _batches(work, exact if masked else ~exact):
                _run(q, k, v, layout, table, scale, items, masked, out, lse, scratch)
    return out, lse


class _Scratch:
    """Buffers that the batches of one call share.

    Freed ones would go back to the system after every batch, since glibc trims its heap: 40,000 page faults and a
    fifth of the time in a layer of 9 heads of 2K tokens, by no rule that a cost model could follow.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """float32 of this shape, contents undefined, until the same name is taken again."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, device=self._device)
        return self._buffers[name][:size].view(shape)

    def rows(self, name: str, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        """float32 [*which, D]: rows of x [n, D] by int64 number."""
        if x.dtype != torch.float32:
            return x[which].float()
        buffer = self.take(name, which.numel(), x.shape[1])
        return torch.index_select(x, 0, which.reshape(-1), out=buffer).view(*which.shape, x.shape[1])


@dataclass(frozen=True)
class _Items:
    """Items and their keys: head [m] in 0..N-1, block [m]; need bool [m, T] in own positions; size [m]."""

    head: torch.Tensor
    block: torch.Tensor
    need: torch.Tensor
    size: torch.Tensor


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


def _needs_mask(layout: Layout) -> torch.Tensor:
    """bool [N]: heads whose items hold cells that some of their rows do not read, the future apart."""
    partial = layout.band_count > 0
    if layout.rows % ROWS:
        partial |= layout.window_count > 0
    odd_blocks = torch.tensor([size % ROWS != 0 for size in layout.block_size], device=layout.device)
    return partial | odd_blocks


def _items(layout: Layout, table: membership.Tables, heads: torch.Tensor, first: int, stop: int) -> _Items:
    """The items of row blocks `first .. stop - 1` of `heads` [h]: which keys any of their rows reads."""
    length, device = layout.kv_len, layout.device
    blocks = torch.arange(first, stop, device=device)
    place = torch.arange(length, device=device)
    top = blocks * ROWS
    need = table.column[heads][:, None, :].repeat(1, len(blocks), 1)
    if layout.windows.shape[1]:
        for shift in range(0, ROWS, min(layout.rows, ROWS)):
            aligned = (top + shift) // layout.rows * layout.rows
            need |= table.windows_at(aligned[:, None] - place[None, :], heads)
    if layout.bands.shape[1]:
        before = torch.nn.functional.pad(table.band[heads].int().cumsum(1), (1, 0))
        nearest = (top[:, None] - place[None, :]).clamp(0, length)
        farthest = (top[:, None] + ROWS - place[None, :]).clamp(0, length)
        need |= before[:, farthest] > before[:, nearest]
    for at, head in enumerate(heads.tolist()):
        if layout.block_slot[head] >= 0:
            need[at] |= _block_need(layout, head, first, stop)
    sequence = heads // layout.heads
    last_row = torch.tensor([layout.length(b) for b in range(layout.batch)], device=device) - 1
    last_row = last_row[sequence][:, None]
    newest = torch.minimum(top[None, :] + ROWS - 1, last_row)
    need &= place <= newest[..., None]
    first_row = torch.tensor(layout.first_row, device=device)[sequence][:, None]
    need &= ((top[None, :] + ROWS > first_row) & (top[None, :] <= last_row))[..., None]
    need = need.flatten(0, 1)
    return _Items(
        head=heads.repeat_interleave(len(blocks)),
        block=blocks.repeat(len(heads)),
        need=need,
        size=need.sum(-1),
    )


def _block_need(layout: Layout, head: int, first: int, stop: int) -> torch.Tensor:
    """bool [stop - first, T]: keys in any listed block of the block rows that touch each row block of one head."""
    size = layout.block_size[head]
    need = torch.zeros(stop - first, layout.kv_len, dtype=torch.bool, device=layout.device)
    low, high = first * ROWS // size, min(-(-stop * ROWS // size), layout.blocks.shape[1])
    listed = membership.block_rows(layout, head, low, high)
    keys = torch.arange(layout.kv_len, device=layout.device) // size
    for block in range(first, stop):
        rows = listed[block * ROWS // size - low : -(-(block + 1) * ROWS // size) - low]
        need[block - first] = rows.any(0)[keys]
    return need


def _batches(work: _Items, of_heads: torch.Tensor) -> list[_Items]:
    """Items of the given heads in batches of similar size, largest first, bounded in scratch memory."""
    kept = (of_heads[work.head] & (work.size > 0)).nonzero()[:, 0]
    kept = kept[work.size[kept].argsort(descending=True)]
    sizes = work.size[kept].tolist()
    batches, at = [], 0
    while at < len(sizes):
        most = max(1, _SCORES // (ROWS * sizes[at]))
        stop = at + 1
        least = min(sizes[at] * 3 // 4, sizes[at] - _PADDING)
        while stop < len(sizes) and stop - at < most and sizes[stop] >= least:
            stop += 1
        pick = kept[at:stop]
        batches.append(_Items(work.head[pick], work.block[pick], work.need[pick], work.size[pick]))
        at = stop
    return batches


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    table: membership.Tables,
    scale: float,
    items: _Items,
    masked: bool,
    out: torch.Tensor,
    lse: torch.Tensor,
    scratch: _Scratch,
) -> None:
    """One batch of items: gather, score, mask, softmax, combine, scatter into `out` and `lse`."""
    device = q.device
    group = layout.heads // k.shape[1]
    starts = torch.tensor(layout.starts, device=device)
    sequence, head = items.head // layout.heads, items.head % layout.heads
    keys, real = _key_lists(items)
    own = items.block[:, None] * ROWS + torch.arange(ROWS, device=device)
    local = own - (layout.kv_len - layout.q_len - starts[sequence])[:, None]
    valid = (own < (layout.kv_len - starts[sequence])[:, None]) & (local >= 0)
    rows = local.clamp(0, layout.q_len - 1)
    queries = q[sequence[:, None], head[:, None], rows].float() * scale
    kv_heads, length, dim = k.shape[1:]
    at = keys + (starts[sequence] + (sequence * kv_heads + head // group) * length)[:, None]
    near = scratch.rows("keys", k.reshape(-1, dim), at).transpose(-1, -2)
    scores = torch.bmm(queries, near, out=scratch.take("scores", len(at), ROWS, at.shape[1]))
    allowed = real[:, None, :] & (keys[:, None, :] <= own[..., None])
    if masked:
        allowed &= _cells(layout, table, items, own, keys)
    scores.masked_fill_(allowed.logical_not_(), -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weight = scores.sub_(top.nan_to_num(neginf=0.0)).exp_()
    total = weight.sum(-1, keepdim=True)
    values = scratch.rows("keys", v.reshape(-1, v.shape[-1]), at)
    result = (weight @ values) / total.clamp(min=torch.finfo(torch.float32).tiny)
    where = (sequence[:, None].expand_as(rows)[valid], head[:, None].expand_as(rows)[valid], rows[valid])
    out[where] = result[valid].to(out.dtype)
    lse[where] = (top + total.log())[..., 0][valid]


def _key_lists(items: _Items) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [m, most] ascending own key positions of each item, 0 beyond its size, and which entries are real."""
    most = int(items.size.max())
    which, position = items.need.nonzero(as_tuple=True)
    keys = torch.zeros(len(items.size), most, dtype=torch.long, device=items.need.device)
    offset = items.size.cumsum(0) - items.size
    keys[which, torch.arange(len(which), device=keys.device) - offset[which]] = position
    return keys, torch.arange(most, device=keys.device)[None, :] < items.size[:, None]


def _cells(
    layout: Layout, table: membership.Tables, items: _Items, own: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """bool [m, ROWS, keys]: the cells of the items, by look-up."""
    head = items.head
    inside = table.column[head[:, None], keys][:, None, :].expand(-1, ROWS, -1)
    if layout.bands.shape[1]:
        # One look-up a key brings the flags of all rows, which lie side by side in the table of distances.
        flags = torch.nn.functional.pad(table.band, (ROWS - 1, ROWS)).unfold(1, ROWS, 1)
        inside = inside | flags[head[:, None], own[:, :1] - keys + ROWS - 1].transpose(1, 2)
    if layout.windows.shape[1]:
        # Rows of one item share a tile, unless tiles are narrower than items, as in teaching.
        top = own[:, :1] if layout.rows % ROWS == 0 else own
        offset = top[..., None] // layout.rows * layout.rows - keys[:, None, :] + layout.rows - 1
        inside = inside | table.window[head[:, None, None], offset.clamp(0, table.window.shape[1] - 1)]
    numbers = head.tolist()
    if any(layout.block_slot[number] >= 0 for number in numbers):
        inside = inside.clone()
        for item, number in enumerate(numbers):
            if layout.block_slot[number] >= 0:
                size = layout.block_size[number]
                rows = (own[item] // size).clamp(max=layout.blocks.shape[1] - 1)
                listed = membership.block_rows(layout, number, int(rows[0]), int(rows[-1]) + 1)
                inside[item] |= listed[rows - rows[0]][:, keys[item] // size]
    return inside

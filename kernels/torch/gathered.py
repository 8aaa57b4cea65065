"""Items of 64 query rows with gathered keys, in plain torch: any layout, type and device.

An item's keys are the union of what its rows read. Items of all heads and sequences are sorted by how many keys they
have and run in batches of similar size, each one gather of K and V, one matrix product, one masked softmax, one matrix
product. No masked dense product is ever formed, and scratch memory is bounded, whatever the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from headscope.kernels.cells import membership
from headscope.kernels.cells.layout import Layout

ROWS = 64
"""Query rows of one item."""

FLAGS = 2**23
"""Key flags of one chunk of row blocks: 8 MiB, and their lists at most 16 times as much."""

_SCORES = 2**20
"""Score elements of one batch of items: 4 MiB in float32, small enough to stay near the cores."""

_PADDING = 256
"""Keys that a short item may be padded by to share a batch: a batch of its own costs more."""


class Scratch:
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


class KeyLists:
    """The set places of many rows of flags [m, n], as lists: `size` int64 [m] says how many each row has."""

    def __init__(self, flags: torch.Tensor) -> None:
        which, self._places = flags.nonzero().unbind(1)
        self.size = torch.bincount(which, minlength=len(flags))
        self._offset = self.size.cumsum(0) - self.size

    def take(self, which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [m, most] ascending places of the rows `which` [m], 0 beyond a row's own, and which entries are real.

        The first of `which` must have no fewer places than the others.
        """
        size = self.size[which]
        along = torch.arange(int(size[0]), device=size.device)
        real = along < size[:, None]
        at = torch.where(real, self._offset[which][:, None] + along, 0)
        places = self._places.index_select(0, at.view(-1)).view(at.shape)
        return places.mul_(real), real


@dataclass(frozen=True)
class Items:
    """Items and their keys: head [m] in 0..N-1, block [m], and the row [m] of each in `lists`, in own positions."""

    head: torch.Tensor
    block: torch.Tensor
    which: torch.Tensor
    lists: KeyLists


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    table: membership.Tables,
    heads: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Attention of `heads` [h] of the N = B * H of a layout, written into `out` [B, H, S, D] and `lse` [B, H, S]."""
    exact, scratch = _needs_mask(layout), Scratch(q.device)
    q, k, v = q.detach(), k.detach().contiguous(), v.detach().contiguous()
    row_blocks = -(-layout.kv_len // ROWS)
    step = max(1, FLAGS // (len(heads) * layout.kv_len))
    first = min(max(0, row) for row in layout.first_row) // ROWS
    for block in range(first, row_blocks, step):
        work = _items(layout, table, heads, block, min(block + step, row_blocks))
        for masked in (False, True):
            for items in batches(work, exact if masked else ~exact):
                _run(q, k, v, layout, table, scale, items, masked, out, lse, scratch)


def _needs_mask(layout: Layout) -> torch.Tensor:
    """bool [N]: heads whose items hold cells that some of their rows do not read, the future apart."""
    partial = layout.band_count > 0
    if layout.rows % ROWS:
        partial |= layout.window_count > 0
    odd_blocks = torch.tensor([size % ROWS != 0 for size in layout.block_size], device=layout.device)
    return partial | odd_blocks


def _items(layout: Layout, table: membership.Tables, heads: torch.Tensor, first: int, stop: int) -> Items:
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
            need[at] |= block_need(layout, head, first, stop)
    sequence = heads // layout.heads
    last_row = torch.tensor([layout.length(b) for b in range(layout.batch)], device=device) - 1
    last_row = last_row[sequence][:, None]
    newest = torch.minimum(top[None, :] + ROWS - 1, last_row)
    need &= place <= newest[..., None]
    first_row = torch.tensor(layout.first_row, device=device)[sequence][:, None]
    need &= ((top[None, :] + ROWS > first_row) & (top[None, :] <= last_row))[..., None]
    return Items(
        head=heads.repeat_interleave(len(blocks)),
        block=blocks.repeat(len(heads)),
        which=torch.arange(len(heads) * len(blocks), device=device),
        lists=KeyLists(need.flatten(0, 1)),
    )


def block_need(layout: Layout, head: int, first: int, stop: int) -> torch.Tensor:
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


def batches(work: Items, of_heads: torch.Tensor) -> list[Items]:
    """Items of the given heads in batches of similar size, largest first, bounded in scratch memory."""
    size = work.lists.size[work.which]
    kept = (of_heads[work.head] & (size > 0)).nonzero()[:, 0]
    kept = kept[size[kept].argsort(descending=True)]
    spans = alike(size[kept].tolist(), _SCORES // ROWS, lambda largest: min(largest * 3 // 4, largest - _PADDING))
    picks = [kept[start:stop] for start, stop in spans]
    return [Items(work.head[pick], work.block[pick], work.which[pick], work.lists) for pick in picks]


def alike(sizes: list[int], keys: int, least: Callable[[int], int]) -> Iterator[tuple[int, int]]:
    """Spans of `sizes`, which descend, that share a batch: of `least(largest)` or more, about `keys` together."""
    start = 0
    while start < len(sizes):
        smallest, most = least(sizes[start]), max(1, keys // sizes[start])
        stop = start + 1
        while stop < len(sizes) and stop - start < most and sizes[stop] >= smallest:
            stop += 1
        yield start, stop
        start = stop


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    table: membership.Tables,
    scale: float,
    items: Items,
    masked: bool,
    out: torch.Tensor,
    lse: torch.Tensor,
    scratch: Scratch,
) -> None:
    """One batch of items, scattered into `out` and `lse`."""
    device = q.device
    starts = torch.tensor(layout.starts, device=device)
    sequence, head = items.head // layout.heads, items.head % layout.heads
    own = items.block[:, None] * ROWS + torch.arange(ROWS, device=device)
    local = own - (layout.kv_len - layout.q_len - starts[sequence])[:, None]
    valid = (own < (layout.kv_len - starts[sequence])[:, None]) & (local >= 0)
    rows = local.clamp(0, layout.q_len - 1)
    queries = q[sequence[:, None], head[:, None], rows].float() * scale
    keys, cells = allowed(layout, table, items, own, masked)
    kv_heads, length, dim = k.shape[1:]
    at = keys + (starts[sequence] + (sequence * kv_heads + head * kv_heads // layout.heads) * length)[:, None]
    result, result_lse = softmax(queries, k.reshape(-1, dim), v.reshape(-1, dim), at, cells, scratch)
    where = (sequence[:, None].expand_as(rows)[valid], head[:, None].expand_as(rows)[valid], rows[valid])
    out[where] = result[valid].to(out.dtype)
    lse[where] = result_lse[valid]


def softmax(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    at: torch.Tensor,
    cells: torch.Tensor,
    scratch: Scratch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 result [m, ROWS, D] and LSE [m, ROWS] of one batch: gather, score, mask, softmax, combine.

    queries float32 [m, ROWS, D], scaled; at [m, K] rows of keys and values [n, D]; cells bool [m, ROWS, K], which is
    overwritten. A row without cells gives 0 and -inf.
    """
    near = scratch.rows("keys", keys, at).transpose(-1, -2)
    scores = torch.bmm(queries, near, out=scratch.take("scores", len(at), ROWS, at.shape[1]))
    scores.masked_fill_(cells.logical_not_(), -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weight = scores.sub_(top.nan_to_num(neginf=0.0)).exp_()
    total = weight.sum(-1, keepdim=True)
    result = (weight @ scratch.rows("keys", values, at)) / total.clamp(min=torch.finfo(torch.float32).tiny)
    return result, (top + total.log())[..., 0]


def allowed(
    layout: Layout, table: membership.Tables, items: Items, own: torch.Tensor, masked: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [m, K] own keys of each item and bool [m, ROWS, K] which rows, at own positions `own` [m, ROWS], read them.

    Only `masked` items look their cells up; in the others every row reads every key before it.
    """
    keys, real = items.lists.take(items.which)
    cells = real[:, None, :] & (keys[:, None, :] <= own[..., None])
    if masked:
        cells &= _cells(layout, table, items, own, keys)
    return keys, cells


def _cells(
    layout: Layout, table: membership.Tables, items: Items, own: torch.Tensor, keys: torch.Tensor
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

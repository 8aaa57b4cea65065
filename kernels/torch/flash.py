"""Attention of float32 heads on the CPU as few large rectangles, each through torch's own flash kernel.

The cells of a head fall into three kinds, by 64 query rows: a diagonal square, keys before it that all 64 rows read,
and keys that only some of them read. A kernel call costs less per cell the more rows share its keys, so from the
largest height of `HEIGHTS` down, a block of that many rows takes the keys that all its rows read (gathered once, no
mask but for the end of the list) and its whole causal square where all of it is read; what is left goes to the next
height. Every cell is taken once, because what is taken is struck from the flags of what is left. Keys that only some
rows of 64 read (the far edges of bands) run as `gathered` items with exact masks. The parts are merged by their LSE.
"""

from __future__ import annotations

import math

import torch

from headscope.kernels.cells import membership
from headscope.kernels.cells.layout import Layout
from headscope.kernels.torch import gathered
from headscope.kernels.torch.gathered import ROWS, KeyLists, Scratch

HEIGHTS = (256, 64)
"""Rows of an item, from the top; each divides the one before, and 64 ends them. Torch's kernel works on 64 query rows
at a time from 192 rows on, on 32 below, and is then 1.3 to 1.8 times as dear per cell."""

_KEYS = 2**14
"""Gathered keys of one batch of items: 4 MiB of keys and as much of values at 64 dimensions."""

_FEW_KEYS = 64
"""Keys that a short item may be padded by to share a batch, and an eighth of the longest one's."""


def serves(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether torch's CPU kernel is right for these inputs; half types are widened first, float64 keeps its own path.

    It gives output 0 and LSE 0, finite and wrong, to a row whose every score is -inf or loses a NaN, so scores must be
    bounded: no infinity, no NaN, no product beyond float32.
    """
    if q.device.type != "cpu" or q.dtype == torch.float64:
        return False
    bounds = [float(bound) for x in (q, k) for bound in torch.aminmax(x)]
    if not all(map(math.isfinite, bounds)):
        return False
    return max(map(abs, bounds[:2])) * max(map(abs, bounds[2:])) * q.shape[-1] < 1e30


def whole_rows(layout: Layout) -> torch.Tensor:
    """bool [N]: heads whose windows and blocks hold all cells of 64 rows and a key, or none; bands may cut them."""
    odd_windows = (layout.window_count > 0) & (layout.rows % ROWS != 0)
    return ~odd_windows & torch.tensor([size % ROWS == 0 for size in layout.block_size])


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
    scratch = Scratch(q.device)
    for sequence, start in enumerate(layout.starts):
        own = heads[heads // layout.heads == sequence]
        first = max(0, layout.first_row[sequence])
        if len(own) and first < layout.length(sequence):
            local = own - sequence * layout.heads if len(own) < layout.heads else slice(None)
            padding = max(0, -layout.first_row[sequence])
            rows = q[sequence, local, padding:].detach().float()
            keys, values = (x[sequence, :, start:].detach().float() for x in (k, v))
            part = _Sequence(rows, keys, values, layout, table, own, first, scale, scratch)
            part.run()
            out[sequence, local, padding:] = part.out.to(out.dtype)
            lse[sequence, local, padding:] = part.lse


class _Sequence:
    """The real rows and keys of one sequence, float32, in blocks of the largest height that fits.

    q [h, S, D] of the heads `heads` [h] (numbers in 0 .. N-1), whose row 0 has own position `first`; k, v [Hkv, n, D].
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: Layout,
        table: membership.Tables,
        heads: torch.Tensor,
        first: int,
        scale: float,
        scratch: Scratch,
    ) -> None:
        self._layout, self._table, self._heads, self._scale, self._scratch = layout, table, heads, scale, scratch
        self._length, self._first, self._rows = k.shape[1], first, q.shape[1]
        self._heights = tuple(height for height in HEIGHTS if height == ROWS or height <= q.shape[1])
        tallest = self._heights[0]
        self._top = first // tallest * tallest
        end = -(-self._length // tallest) * tallest
        self._kv_head = (heads % layout.heads) // (layout.heads // k.shape[0])
        self._keys, self._values = _padded(k, 0, end), _padded(v, 0, end)
        self._queries = _padded(q, first - self._top, end - self._top)
        self._acc = torch.zeros_like(self._queries)
        self._acc_lse = torch.full(self._queries.shape[:2], -torch.inf)

    @property
    def out(self) -> torch.Tensor:
        """float32 [h, S, D]."""
        return self._acc[:, self._first - self._top :][:, : self._rows]

    @property
    def lse(self) -> torch.Tensor:
        """float32 [h, S]."""
        return self._acc_lse[:, self._first - self._top :][:, : self._rows]

    def run(self) -> None:
        """Fills `out` and `lse`, some row blocks of all heads at a time, so that flags stay bounded."""
        tallest, end = self._heights[0], self._keys.shape[1]
        step = max(1, gathered.FLAGS // (len(self._heads) * end * tallest // ROWS)) * tallest
        flags = _Flags(self._layout, self._table, self._heads, self._first, self._length, end)
        for top in range(self._top, end, step):
            blocks = range(top // ROWS, min(top + step, end) // ROWS)
            whole, diagonal = flags.whole(blocks)
            partial = flags.partial(blocks, whole, diagonal)
            for height in self._heights:
                self._take(height, top, whole, diagonal)
            if partial is not None:
                self._partial(blocks, partial)

    def _take(self, height: int, top: int, whole: torch.Tensor, diagonal: torch.Tensor) -> None:
        """Runs what blocks of `height` rows from own position `top` share, and strikes it from the flags.

        whole bool [h, 64-row blocks, keys], diagonal bool [h, 64-row blocks]: what no taller block took.
        """
        count = height // ROWS
        by_block = whole.unflatten(1, (-1, count))
        shared = by_block[:, :, 0].clone() if count > 1 else whole
        for row in range(1, count):
            shared &= by_block[:, :, row]
        tops = top + torch.arange(shared.shape[1]) * height
        if count > 1:
            shared &= torch.arange(shared.shape[2]) < tops[:, None]
            by_block &= ~shared[:, :, None]
        squares = diagonal.unflatten(1, (-1, count)).all(2)
        if count > 1:
            squares &= self._square(by_block, top, height)
            inside = by_block.unflatten(3, (-1, height))[:, :, :, top // height :].diagonal(dim1=1, dim2=3)
            inside &= ~squares[:, None, None]
            diagonal &= ~squares.repeat_interleave(count, 1)
        self._squares(height, top, squares)
        self._gathered(height, top, shared)

    def _square(self, by_block: torch.Tensor, top: int, height: int) -> torch.Tensor:
        """bool [h, blocks]: every 64 rows of the block read all keys between its top and their own diagonal."""
        inside = by_block.unflatten(3, (-1, height))[:, :, :, top // height :].diagonal(dim1=1, dim2=3)
        before = torch.arange(height) < torch.arange(0, height, ROWS)[:, None]
        return (inside | ~before[:, :, None]).flatten(1, 2).all(1)

    def _squares(self, height: int, top: int, squares: torch.Tensor) -> None:
        """Causal squares [h, blocks] of `height` rows, `top` being the first block's own position."""
        head, block = squares.nonzero(as_tuple=True)
        if not len(head):
            return
        at = block + (top - self._top) // height
        kv_head, key = self._kv_head[head], block + top // height
        for part in torch.arange(len(head)).split(max(1, _KEYS // height)):
            queries = self._take_blocks("queries", self._queries, height, head[part], at[part])
            keys = self._take_blocks("keys", self._keys, height, kv_head[part], key[part])
            values = self._take_blocks("values", self._values, height, kv_head[part], key[part])
            result, lse = _flash(queries, keys, values, self._scale, True, None)
            if height == self._heights[0]:
                # The first cells of these rows: nothing to merge with.
                where = head[part] * (self._acc.shape[1] // height) + at[part]
                self._acc.view(-1, height * self._acc.shape[2]).index_copy_(0, where, result.flatten(1))
                self._acc_lse.view(-1, height).index_copy_(0, where, lse)
            else:
                self._merge(height, head[part], at[part], result, lse)

    def _gathered(self, height: int, top: int, shared: torch.Tensor) -> None:
        """Blocks of `height` rows with the keys that they share: bool [h, blocks, keys]."""
        lists = KeyLists(shared.flatten(0, 1))
        order = lists.size.argsort(descending=True)
        sizes = lists.size[order].tolist()
        sizes = sizes[: sizes.index(0)] if sizes and sizes[-1] == 0 else sizes
        count, length, dim = shared.shape[1], *self._keys.shape[1:]
        keys, values = self._keys.view(-1, dim), self._values.view(-1, dim)
        for start, stop in gathered.alike(sizes, _KEYS, lambda most: most - max(_FEW_KEYS, most // 8)):
            which = order[start:stop]
            head, at = which // count, which % count + (top - self._top) // height
            listed, real = lists.take(which)
            listed += self._kv_head[head, None] * length
            near, far = (self._scratch.rows(name, x, listed) for name, x in (("keys", keys), ("values", values)))
            padded = sizes[stop - 1] < sizes[start]
            mask = torch.zeros(real.shape).masked_fill_(~real, -torch.inf) if padded else None
            queries = self._take_blocks("queries", self._queries, height, head, at)
            self._merge(height, head, at, *_flash(queries, near, far, self._scale, False, mask))

    def _partial(self, blocks: range, partial: torch.Tensor) -> None:
        """Keys that only some of 64 rows read, with exact masks: bool [h, 64-row blocks, keys]."""
        flags = partial[:, :, : self._length].flatten(0, 1)
        local = torch.arange(len(self._heads)).repeat_interleave(len(blocks))
        which = torch.arange(len(flags))
        work = gathered.Items(self._heads[local], torch.tensor(blocks).repeat(len(self._heads)), which, KeyLists(flags))
        place = torch.zeros(self._layout.batch * self._layout.heads, dtype=torch.long)
        place[self._heads] = torch.arange(len(self._heads))
        length, dim = self._keys.shape[1:]
        keys, values = self._keys.view(-1, dim), self._values.view(-1, dim)
        for items in gathered.batches(work, torch.ones(len(place), dtype=torch.bool)):
            head, block = place[items.head], items.block - self._top // ROWS
            own = items.block[:, None] * ROWS + torch.arange(ROWS)
            listed, allowed = gathered.allowed(self._layout, self._table, items, own, True)
            listed += self._kv_head[head, None] * length
            queries = self._take_blocks("queries", self._queries, ROWS, head, block).mul_(self._scale)
            self._merge(ROWS, head, block, *gathered.softmax(queries, keys, values, listed, allowed, self._scratch))

    def _merge(
        self, height: int, head: torch.Tensor, block: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Adds the softmax of more cells, out [m, height, D] and lse [m, height], to that of blocks of rows."""
        at = head * (self._acc.shape[1] // height) + block
        total, total_lse = self._acc.view(-1, height * self._acc.shape[2]), self._acc_lse.view(-1, height)
        before = total_lse.index_select(0, at)
        both = torch.logaddexp(before, lse)
        finite = both.clamp(min=torch.finfo(torch.float32).min)
        merged = self._take_blocks("merged", self._acc, height, head, block).mul_((before - finite).exp_()[..., None])
        merged.addcmul_(out, (lse - finite).exp_()[..., None])
        total.index_copy_(0, at, merged.flatten(1))
        total_lse.index_copy_(0, at, both)

    def _take_blocks(
        self, name: str, x: torch.Tensor, height: int, head: torch.Tensor, block: torch.Tensor
    ) -> torch.Tensor:
        """[m, height, D] blocks of rows of x [h, n, D], in the scratch buffer `name`."""
        blocks = x.view(-1, height * x.shape[2])
        at = head * (x.shape[1] // height) + block
        return self._scratch.rows(name, blocks, at).unflatten(1, (height, -1))


class _Flags:
    """Which keys 64 rows read, all or some of them, for the rows from `first` on of one sequence of `length` keys;
    keys are padded to `end`.

    What windows and bands hold depends on the distance x from a block's top to a key alone, so it is kept as lines
    [h, end + 1] over x, backward, as keys run; x = 0 stands for the block's diagonal square. Where more than 64
    rows share a window, each place of a block among those rows has a line.
    """

    def __init__(
        self, layout: Layout, table: membership.Tables, heads: torch.Tensor, first: int, length: int, end: int
    ) -> None:
        self._layout, self._heads, self._end = layout, heads, end
        self.real = range(first // ROWS, -(-length // ROWS))
        self._column = torch.nn.functional.pad(table.column[heads, :length], (0, end - length))
        self._with_blocks = [at for at, head in enumerate(heads.tolist()) if layout.block_slot[head] >= 0]
        # The rows at distance x of a block's top read the key at distances x to x + 63; beyond n there are no cells.
        band = table.band[heads, :length]
        some, every = (
            torch.nn.functional.pad(band, (0, end + ROWS - length), value=beyond).cumsum(1, dtype=torch.int32)
            for beyond in (False, True)
        )
        some, every = (torch.nn.functional.pad(count, (1, 0)) for count in (some, every))
        self._band_some = (some[:, ROWS:] > some[:, :-ROWS]).flip(1) if bool(band.any()) else None
        band_whole = every[:, ROWS:] - every[:, :-ROWS] == ROWS
        lines = [band_whole]
        if layout.rows % ROWS == 0 and layout.windows.shape[1]:
            window = torch.nn.functional.pad(table.window[heads], (0, end - length + 1))
            lines = []
            for zero in range(layout.rows - 1, 0, -ROWS):
                line = window[:, zero : zero + end + 1] | band_whole
                line[:, 0] = window[:, zero - ROWS + 1 : zero + 1].all(1) | band_whole[:, 0]
                lines.append(line)
        self._lines = [line.flip(1) for line in lines]

    def whole(self, blocks: range) -> tuple[torch.Tensor, torch.Tensor]:
        """bool [h, r, end] and [h, r] of 64-row blocks [r]: keys before a block that all its rows read, and whether its
        diagonal square is read whole. Blocks outside `real` have none."""
        keys = torch.zeros(len(self._heads), len(blocks), self._end, dtype=torch.bool)
        diagonal = torch.zeros(keys.shape[:2], dtype=torch.bool)
        for at, block in enumerate(blocks):
            if block in self.real:
                line = self._lines[block % len(self._lines)]
                torch.logical_or(
                    self._column[:, : block * ROWS], self._before(line, block), out=keys[:, at, : block * ROWS]
                )
                diagonal[:, at] = line[:, -1]
        for head in self._with_blocks:
            low, high = max(blocks.start, self.real.start), min(blocks.stop, self.real.stop)
            need = gathered.block_need(self._layout, int(self._heads[head]), low, high)
            for block in range(low, high):
                keys[head, block - blocks.start, : block * ROWS] |= need[block - low, : block * ROWS]
                diagonal[head, block - blocks.start] |= need[block - low, block * ROWS]
        return keys, diagonal

    def partial(self, blocks: range, whole: torch.Tensor, diagonal: torch.Tensor) -> torch.Tensor | None:
        """bool [h, r, end]: keys that some rows of a block read but not in `whole` or a whole `diagonal`; None without
        any. May hold keys that no row reads."""
        real = [at for at, block in enumerate(blocks) if block in self.real]
        if self._band_some is None and bool(diagonal[:, real].all()):
            return None
        keys = torch.zeros_like(whole)
        for at in real:
            top = blocks[at] * ROWS
            if self._band_some is not None:
                torch.gt(self._before(self._band_some, blocks[at]), whole[:, at, :top], out=keys[:, at, :top])
            keys[:, at, top : top + ROWS] = ~diagonal[:, at, None]
        return keys

    def _before(self, line: torch.Tensor, block: int) -> torch.Tensor:
        """bool [h, keys before the block]: a backward line's flags at distances top .. 1 of its top."""
        return line[:, self._end - block * ROWS : self._end]


def _padded(x: torch.Tensor, before: int, end: int) -> torch.Tensor:
    """x [h, n, D] from place `before` of zeros [h, end, D]; itself where it fills them and lies in one piece."""
    if before == 0 and x.shape[1] == end:
        return x.contiguous()
    return torch.nn.functional.pad(x, (0, 0, before, end - before - x.shape[1]))


def _flash(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    causal: bool,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the keys and its LSE of items [m, rows, D] and keys [m, n, D]; `mask` float32 [m, n] is added to
    all rows.

    A mask that all rows share costs next to nothing; one entry of each list at least must be finite.
    """
    every_row = None if mask is None else mask[:, None, None].expand(-1, 1, queries.shape[1], -1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries[:, None], keys[:, None], values[:, None], 0.0, causal, attn_mask=every_row, scale=scale
    )
    return out[:, 0], lse[:, 0]

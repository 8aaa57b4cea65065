"""Online index in plain torch, for all heads of a layer at once: the meaning of every other index builder.

Vertical-slash heads: probabilities of a few sampled rows, added up per column and per distance (the long
article, section 6.2). Block-sparse heads: scores of mean-pooled Q and K (eq. 6). Distances become windows by
the rule `tiles/1`. Ties go to the smaller position, and forced cells are set apart rather than scored. Scores are
float32; for float64 inputs float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from headscope.kernels.cells.diagonals import by_distance
from headscope.kernels.cells.inputs import check_inputs
from headscope.kernels.cells.layout import PAD, Layout
from headscope.kernels.cells.plan import HeadPlan, fixed_lists, nearest_window, tile_rows
from headscope.kernels.torch.probabilities import at_least_float32


class Sampling(Protocol):
    """What an estimator says; see `headscope.engine.Estimator`."""

    @property
    def rows(self) -> int: ...
    @property
    def where(self) -> str: ...
    @property
    def statistic(self) -> str: ...
    @property
    def columns(self) -> str: ...
    @property
    def slashes(self) -> str: ...
    @property
    def overlap(self) -> str: ...


def build(
    q: torch.Tensor,
    k: torch.Tensor,
    plans: Sequence[HeadPlan],
    starts: tuple[int, ...],
    scale: float,
    estimator: Sampling,
    tile: int,
) -> tuple[Layout, Layout]:
    """The requested and the computed layout of `len(plans)` = B * Hq heads. q [B, Hq, S, D], k [B, Hkv, T, D].

    `ValueError` where an input does not fit the others.
    """
    check_inputs(q, k, None, scale, starts)
    batch, heads, q_len, _ = q.shape
    kv_len = k.shape[2]
    columns = torch.zeros(len(plans), kv_len, dtype=torch.bool, device=q.device)
    distances = torch.zeros_like(columns)
    grid = torch.zeros(len(plans), -(-(kv_len + tile_rows(tile)) // tile) + 1, dtype=torch.bool, device=q.device)
    for sequence in range(batch):
        _choose_lines(q, k, plans, sequence, starts[sequence], scale, estimator, tile, (columns, distances, grid))
    for head, plan in enumerate(plans):
        if plan.columns:
            columns[head, torch.tensor(plan.columns, device=q.device)] = True
    columns_list, column_count = positions(columns)
    bands, band_count = _bands(plans, distances)
    grid_windows, grid_count = positions(grid)
    grid_windows = torch.where(grid_windows < PAD, grid_windows * tile + nearest_window(tile), PAD).to(torch.int32)
    blocks, block_count, slots = _choose_blocks(q, k, plans, starts, scale)
    requested = Layout(
        tile=tile,
        batch=batch,
        heads=heads,
        q_len=q_len,
        kv_len=kv_len,
        starts=starts,
        windows=grid_windows,
        window_count=grid_count,
        bands=bands,
        band_count=band_count,
        columns=columns_list,
        column_count=column_count,
        blocks=blocks,
        block_count=block_count,
        block_slot=slots,
        block_size=tuple(plan.block_size for plan in plans),
    )
    if tile == 1:
        return requested, requested
    lengths = torch.tensor([kv_len - starts[n // heads] for n in range(len(plans))], device=q.device)
    online = torch.tensor([plan.slash > 0 for plan in plans], device=q.device)
    windows, window_count = positions(_grid_or_runs(grid, distances, lengths, tile))
    exact, exact_count = _bands(plans, distances & ~online[:, None])
    return requested, replace(
        requested, windows=windows, window_count=window_count, bands=exact, band_count=exact_count, plans=tuple(plans)
    )


def positions(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [..., n] to ascending positions int32 [..., most chosen], ended by PAD, and their counts int32 [...]."""
    count = chosen.sum(-1, dtype=torch.int32)
    most = int(count.max()) if count.numel() else 0
    place = torch.arange(chosen.shape[-1], device=chosen.device, dtype=torch.int32).expand(chosen.shape)
    listed = torch.where(chosen, place, PAD).sort(-1).values[..., :most]
    return listed.contiguous().to(torch.int32), count


def best(score: torch.Tensor, forced: torch.Tensor, budget: torch.Tensor, length: int) -> torch.Tensor:
    """bool [h, n]: the first `forced` [h] positions and the best of the others, `budget` [h] in all, below `length`.

    Equal scores are taken in order of position. Positions from `length` on are never chosen.
    """
    place = torch.arange(score.shape[-1], device=score.device)
    first = place[None, :] < forced[:, None]
    open_ = ~first & (place < length)[None, :]
    keys = torch.where(open_, score.nan_to_num(nan=-torch.inf), -torch.inf)
    order = keys.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(1, order, place.expand_as(order))
    # Closed positions sort behind open ones only by value, so an open score of -inf may rank after them.
    rank_among_open = rank if bool(torch.isfinite(keys[open_]).all()) else _rank_open(order, open_)
    return first | (open_ & (rank_among_open < (budget - forced)[:, None]))


def _rank_open(order: torch.Tensor, open_: torch.Tensor) -> torch.Tensor:
    """Rank of each open position among the open ones, in the given order."""
    in_order = open_.gather(1, order)
    return torch.empty_like(order).scatter_(1, order, in_order.cumsum(1) - in_order.long())


def sampled_rows(first: int, stop: int, estimator: Sampling) -> list[int]:
    """Own positions of the sampled rows among the real rows `first .. stop - 1`, ascending, without repeats."""
    rows = stop - first
    count = min(estimator.rows, rows)
    tail = {"tail": count, "spread": 0, "half": count - count // 2}[estimator.where]
    spread = count - tail
    rest = rows - tail
    picked = [first + ((2 * step + 1) * rest) // (2 * spread) for step in range(spread)]
    return picked + list(range(stop - tail, stop))


def row_statistic(q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, scale: float, statistic: str) -> torch.Tensor:
    """[H, r, n] of sampled rows: causal softmax, or logits above the row's mean. q [H, r, D], k [Hkv, n, D]."""
    kv_heads, length, dim = k.shape
    grouped = at_least_float32(q).reshape(kv_heads, -1, dim)
    scores = (grouped @ at_least_float32(k).transpose(-1, -2)).mul_(scale).view(q.shape[0], q.shape[1], length)
    future = torch.arange(length, device=q.device)[None, :] > rows[:, None]
    if statistic == "probability":
        return scores.masked_fill_(future, -torch.inf).softmax(-1)
    scores = scores.masked_fill_(future, 0.0)
    return (scores - scores.sum(-1, keepdim=True) / (rows + 1)[:, None]).masked_fill(future, 0.0)


def distance_sums(weight: torch.Tensor, rows: torch.Tensor, how: str) -> torch.Tensor:
    """[H, n]: `weight` [H, r, n] of sampled rows added up per distance `row - column`."""
    length = weight.shape[-1]
    along = by_distance(weight, rows)
    total = along.sum(1)
    if how == "sum":
        return total
    pairs = (rows[:, None] >= torch.arange(length, device=weight.device)[None, :]).sum(0)
    # A quarter of the sampled rows as prior weight: a distance seen in few pairs needs a stronger mean to be chosen.
    return total / (pairs.clamp(min=1) if how == "mean" else pairs + len(rows) / 4)


def window_mass(score: torch.Tensor, tile: int, count: int) -> torch.Tensor:
    """[H, count]: mass of grid window `m`: the score of each distance times the share of rows that see it there."""
    rows = tile_rows(tile)
    distance = torch.arange(score.shape[-1], device=score.device)
    # Rows t = 0 .. R-1 see distance d in the window number floor((d - t + R - 1) / W).
    far = (distance + rows - 1) // tile
    near = distance // tile
    share = (distance + rows - far * tile).clamp(max=rows).to(score.dtype) / rows
    share = torch.where(far == near, torch.ones_like(share), share)
    mass = score.new_zeros(score.shape[0], max(count, int(far[-1]) + 1))
    mass.index_add_(1, far, score * share)
    mass.index_add_(1, near, score * (1 - share))
    return mass[:, :count]


def run_windows(distances: torch.Tensor, lengths: torch.Tensor, tile: int) -> torch.Tensor:
    """Rule `tiles/1`. bool [N, T] distances to bool [N, T + 3 W] window offsets.

    A run starts at a distance 3 R or more beyond the one before it. Distance `s + t` of the run that starts at
    `s` is seen by rows in the windows `s + R + W (t // W)` and `s + R + W ((t + R - 1) // W)`. Windows whose
    box holds no cell of a sequence of `lengths` [N] are left out.
    """
    rows = tile_rows(tile)
    place = torch.arange(distances.shape[1], device=distances.device)
    latest = torch.where(distances, place, -PAD).cummax(1).values
    before = torch.cat([torch.full_like(latest[:, :1], -PAD), latest[:, :-1]], 1)
    start = torch.where(distances & (place - before >= 3 * rows), place, -1).cummax(1).values
    along = place - start
    offsets = torch.zeros(distances.shape[0], distances.shape[1] + 3 * tile, dtype=torch.bool, device=distances.device)
    for step in (along // tile, (along + rows - 1) // tile):
        offset = start + rows + tile * step
        offset = torch.where(distances & (offset - tile + 1 < lengths[:, None]), offset, 0)
        offsets.scatter_(1, offset, True)
    offsets[:, 0] = False
    return offsets


def _grid_or_runs(grid: torch.Tensor, distances: torch.Tensor, lengths: torch.Tensor, tile: int) -> torch.Tensor:
    """Window offsets of every head: those bought whole, and those that distances expand to."""
    offsets = run_windows(distances, lengths, tile)
    at = torch.arange(grid.shape[1], device=grid.device) * tile + nearest_window(tile)
    fits = at < offsets.shape[1]
    offsets[:, at[fits]] |= grid[:, fits]
    return offsets


def _choose_lines(
    q: torch.Tensor,
    k: torch.Tensor,
    plans: Sequence[HeadPlan],
    sequence: int,
    start: int,
    scale: float,
    estimator: Sampling,
    tile: int,
    marks: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Columns, distances and grid windows of the vertical-slash heads of one sequence, set in `marks`."""
    heads, q_len, kv_len = q.shape[1], q.shape[2], k.shape[2]
    group = heads // k.shape[1]
    length = kv_len - start
    online = [h for h in range(heads) if plans[sequence * heads + h].online_slash]
    if not online or length <= 0:
        return
    # Whole GQA groups, so that K is read once and never repeated.
    kv = sorted({head // group for head in online})
    rows = torch.tensor(sampled_rows(max(0, length - q_len), length, estimator), device=q.device)
    every_kv = len(kv) == k.shape[1]
    sampled = (
        q[sequence][:, rows + q_len - length].unflatten(0, (-1, group))[slice(None) if every_kv else kv].flatten(0, 1)
    )
    keys = k[sequence, slice(None) if every_kv else kv, start:]
    weight = row_statistic(sampled, keys, rows, scale, estimator.statistic)
    if len(online) < len(weight):
        weight = weight[[kv.index(head // group) * group + head % group for head in online]]
    online_plans = [plans[sequence * heads + head] for head in online]
    at = torch.tensor([sequence * heads + head for head in online], device=q.device)

    def budget(name: str) -> torch.Tensor:
        return torch.tensor([getattr(plan, name) for plan in online_plans], device=q.device)

    column_score = weight.sum(1) if estimator.columns == "sum" else weight.amax(1)
    columns = best(column_score, budget("sink"), budget("vertical"), length)
    if estimator.overlap == "removed":
        weight = weight.masked_fill(columns[:, None, :], 0.0)
    score = distance_sums(weight, rows, estimator.slashes)
    by_windows = budget("windows") > 0
    distances = best(score, budget("local"), budget("slash"), length) & ~by_windows[:, None]
    marks[0][at, :length] = columns
    marks[1][at, :length] = distances
    if bool(by_windows.any()):
        real = -(-(length + tile_rows(tile) - 1) // tile)
        mass = window_mass(score, tile, real)
        bought = best(mass, torch.ones_like(by_windows, dtype=torch.long), budget("windows").clamp(min=1), real)
        marks[2][at, :real] = bought & by_windows[:, None]


def _bands(plans: Sequence[HeadPlan], distances: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bands fixed by position, joined with runs of chosen distances, as int32 [N, Bn, 2] and counts [N]."""
    marked = torch.nn.functional.pad(distances, (1, 1))
    low, count = positions(marked[:, 1:-1] & ~marked[:, :-2])
    high, _ = positions(marked[:, 1:-1] & ~marked[:, 2:])
    most = max([low.shape[1], *(len(plan.bands) for plan in plans)], default=0)
    bands = torch.full((len(plans), most, 2), PAD, dtype=torch.int32, device=distances.device)
    bands[:, : low.shape[1], 0] = low
    bands[:, : low.shape[1], 1] = high
    for head, plan in enumerate(plans):
        if plan.bands:
            bands[head, : len(plan.bands)] = torch.tensor(plan.bands, dtype=torch.int32, device=distances.device)
    fixed = torch.tensor([len(plan.bands) for plan in plans], dtype=torch.int32, device=distances.device)
    return bands, count + fixed


def _choose_blocks(
    q: torch.Tensor, k: torch.Tensor, plans: Sequence[HeadPlan], starts: tuple[int, ...], scale: float
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Block lists [NB, nbq, K], counts and slots: chosen online, or fixed by position."""
    heads, kv_len = q.shape[1], k.shape[2]
    with_blocks = [head for head, plan in enumerate(plans) if plan.block_size]
    slots = [-1] * len(plans)
    for slot, head in enumerate(with_blocks):
        slots[head] = slot
    block_rows = max((-(-kv_len // plans[head].block_size) for head in with_blocks), default=0)
    lists_of: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for head in with_blocks:
        if plans[head].blocks:
            lists_of[head] = [_fixed_blocks(plans[head], kv_len - starts[head // heads], q.device)]
    for size in sorted({plans[head].block_size for head in with_blocks}):
        for sequence, start in enumerate(starts):
            lists_of |= _top_blocks(q, k, plans, sequence, start, scale, size)
    per_head = [lists_of.get(head, []) for head in with_blocks]
    most = max((part.shape[-1] for lists in per_head for part, _ in lists), default=0)
    blocks = torch.full((len(with_blocks), block_rows, most), PAD, dtype=torch.int32, device=q.device)
    count = torch.zeros(len(with_blocks), block_rows, dtype=torch.int32, device=q.device)
    for slot, lists in enumerate(per_head):
        row = 0
        for part, part_count in lists:
            blocks[slot, row : row + len(part), : part.shape[-1]] = part
            count[slot, row : row + len(part)] = part_count
            row += len(part)
    return blocks, count, tuple(slots)


def _fixed_blocks(plan: HeadPlan, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists int32 [block rows, most], ended by PAD, and counts of the blocks that a plan fixes."""
    side = max(1, -(-length // plan.block_size))
    lists = fixed_lists(plan.blocks, side)
    row, place, key = torch.tensor(lists, dtype=torch.long, device=device).view(-1, 3).T
    most = max((place for _, place, _ in lists), default=-1) + 1
    blocks = torch.full((side, most), PAD, dtype=torch.int32, device=device)
    blocks[row, place] = key.int()
    return blocks, torch.bincount(row, minlength=side).int()


def _top_blocks(
    q: torch.Tensor, k: torch.Tensor, plans: Sequence[HeadPlan], sequence: int, start: int, scale: float, size: int
) -> dict[int, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Per online block-sparse head of one sequence and block size: its lists, in chunks of block rows."""
    heads, q_len, kv_len = q.shape[1], q.shape[2], k.shape[2]
    length = kv_len - start
    local = [
        h
        for h in range(heads)
        if plans[sequence * heads + h].top_blocks and plans[sequence * heads + h].block_size == size
    ]
    if not local or length <= 0:
        return {}
    group = heads // k.shape[1]
    first = max(0, length - q_len)
    pooled_q = _block_means(q[sequence, local, q_len - (length - first) :], first, length, size)
    pooled_k = _block_means(k[sequence, :, start:], 0, length, size)[[h // group for h in local]]
    budget = torch.tensor([plans[sequence * heads + h].top_blocks for h in local], device=q.device)
    side = -(-length // size)
    place = torch.arange(side, device=q.device)
    result: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {sequence * heads + h: [] for h in local}
    for row in range(0, side, 512):
        rows = place[row : row + 512]
        scores = (pooled_q[:, row : row + 512] @ pooled_k.transpose(-1, -2)) * scale
        chosen = _best_before(scores, rows, budget)
        chosen &= (rows >= first // size)[:, None]
        for index, head in enumerate(result):
            result[head].append(positions(chosen[index]))
    return result


def _best_before(scores: torch.Tensor, rows: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    """bool [h, rows, blocks]: the diagonal block and the best of those before it, `budget` [h] in all."""
    place = torch.arange(scores.shape[-1], device=scores.device)
    before = place[None, :] < rows[:, None]
    scores = scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    order = scores.masked_fill(~before, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(-1, order, place.expand_as(order))
    return (before & (rank < (budget - 1)[:, None, None])) | (place[None, :] == rows[:, None])


def _block_means(x: torch.Tensor, first: int, length: int, size: int) -> torch.Tensor:
    """[H, blocks, D]: means over the real rows `first .. length - 1` of each block; 0 where there are none."""
    side = -(-length // size)
    at = torch.arange(first, length, device=x.device) // size
    values = at_least_float32(x)
    total = values.new_zeros(x.shape[0], side, x.shape[-1]).index_add_(1, at, values)
    count = values.new_zeros(side).index_add_(0, at, values.new_ones(len(at)))
    return total / count.clamp(min=1)[:, None]

"""The online index in Triton, for all heads of a layer at once, without a host sync: the meaning is `torch.index`'s.

Every list has a capacity that budgets and lengths, known on the host, bound; counts that depend on the data stay on
the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headscope.kernels.cells.inputs import packed
from headscope.kernels.cells.layout import PAD, Layout
from headscope.kernels.cells.plan import HeadPlan, fixed_lists, max_windows, nearest_window
from headscope.kernels.torch.index import Sampling, sampled_rows
from headscope.kernels.triton import cut as triton_cut
from headscope.kernels.triton import pools as triton_pools
from headscope.kernels.triton import rows as triton_rows
from headscope.kernels.triton import runs as triton_runs
from headscope.kernels.triton import scores as triton_scores
from headscope.kernels.triton import select as triton_select
from headscope.kernels.triton.common import TILES, check_inputs, device_ints

_SCORES = 2**28
"""Floats of scores, and of sampled statistics where those are kept, at a time: 1 GiB."""

_BLOCK_SCORES = 2**26
"""Block scores formed at a time: 256 MiB."""


@dataclass(frozen=True)
class _Tables:
    """What is filled in: columns [N, C], requested bands [N, Bn, 2] and counts, windows of both layouts."""

    columns: torch.Tensor
    bands: torch.Tensor
    band_count: torch.Tensor
    grid: torch.Tensor
    grid_count: torch.Tensor
    windows: torch.Tensor
    window_count: torch.Tensor


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

    Inputs are copied where they do not lie in one piece. `ValueError` for inputs that do not fit each other or that
    this path does not serve, for a tile other than 128 or 1, and for a head that is both fixed and chosen online.
    """
    if tile not in TILES:
        raise ValueError(f"impl='triton' builds indexes of tile 128 or 1, got tile = {tile}")
    if any((plan.columns or plan.bands) and plan.online_slash for plan in plans):
        raise ValueError("a head is either fixed by position or chosen online, not both")
    check_inputs(q, k, None, scale, starts)
    q, k = packed(q), packed(k)
    batch, heads, q_len = q.shape[:3]
    kv_len = k.shape[2]
    lengths = tuple(kv_len - starts[n // heads] for n in range(len(plans)))
    table = _empty_tables(plans, kv_len, tile, q.device)
    online = [n for n, plan in enumerate(plans) if plan.online_slash and lengths[n] > 0]
    if online:
        rows = _sampled_rows(starts, q_len, kv_len, estimator, q.device)
        # A score per column and one per distance, or the statistic of every sampled row.
        kept = 2 if _at_once(rows, estimator) else -(-rows.shape[1] // 64) * 64
        chunk = max(1, _SCORES // (kept * -(-kv_len // 128) * 128))
        for at in range(0, len(online), chunk):
            _choose_lines(q, k, plans, online[at : at + chunk], lengths, starts, scale, rows, estimator, tile, table)
    blocks, block_count, slots = _choose_blocks(q, k, plans, lengths, starts, scale)
    columns = tuple(
        min(max(plan.vertical, plan.sink), length) if plan.online_slash else len(plan.columns)
        for plan, length in zip(plans, lengths, strict=True)
    )
    shared: dict[str, Any] = {
        "tile": tile,
        "batch": batch,
        "heads": heads,
        "q_len": q_len,
        "kv_len": kv_len,
        "starts": starts,
        "columns": table.columns,
        "column_count": device_ints(columns, q.device),
        "blocks": blocks,
        "block_count": block_count,
        "block_slot": slots,
        "block_size": tuple(plan.block_size for plan in plans),
    }
    requested = Layout(
        windows=table.grid, window_count=table.grid_count, bands=table.bands, band_count=table.band_count, **shared
    )
    if tile == 1:
        return requested, requested
    exact, exact_count = _fixed_bands(plans, max((len(plan.bands) for plan in plans), default=0), q.device)
    return requested, Layout(
        windows=table.windows,
        window_count=table.window_count,
        bands=exact,
        band_count=exact_count,
        plans=tuple(plans),
        **shared,
    )


def _empty_tables(plans: Sequence[HeadPlan], kv_len: int, tile: int, device: torch.device) -> _Tables:
    """Tables of sufficient capacity, with what is fixed by position filled in."""
    count = len(plans)
    most = max((min(max(p.vertical, p.sink, len(p.columns)), kv_len) for p in plans), default=0)
    columns = _fixed_rows([plan.columns for plan in plans], most, device)
    slash = max((min(max(p.slash, p.local), (kv_len + 1) // 2) for p in plans if p.slash), default=0)
    bands, band_count = _fixed_bands(plans, max([slash, *(len(p.bands) for p in plans)]), device)
    most_grid = max((min(max(p.windows, 1), max_windows(kv_len, tile)) for p in plans if p.windows), default=0)
    grid = torch.full((count, most_grid), PAD, dtype=torch.int32, device=device)
    grid_count = torch.zeros(count, dtype=torch.int32, device=device)
    windows, window_count = grid, grid_count
    if slash and tile > 1:
        windows = torch.full((count, max_windows(kv_len, tile)), PAD, dtype=torch.int32, device=device)
        window_count = torch.zeros_like(grid_count)
    return _Tables(columns, bands, band_count, grid, grid_count, windows, window_count)


def _fixed_rows(rows: Sequence[Sequence[int]], size: int, device: torch.device) -> torch.Tensor:
    """int32 [len(rows), size] with the given beginnings, PAD beyond them; rows of one length are copied at once."""
    table = torch.full((len(rows), size), PAD, dtype=torch.int32, device=device)
    for length in sorted({len(row) for row in rows} - {0}):
        some = [number for number, row in enumerate(rows) if len(row) == length]
        flat = device_ints(tuple(value for number in some for value in rows[number]), device).view(-1, length)
        if len(some) == len(rows):
            table[:, :length] = flat
        else:
            table[device_ints(tuple(some), device).long(), :length] = flat
    return table


def _fixed_bands(plans: Sequence[HeadPlan], most: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    edges = [tuple(edge for band in plan.bands for edge in band) for plan in plans]
    bands = _fixed_rows(edges, 2 * most, device).view(len(plans), most, 2)
    # A copy: counts of heads chosen online are written into it.
    return bands, device_ints(tuple(len(plan.bands) for plan in plans), device).clone()


def _at_once(rows: torch.Tensor, estimator: Sampling) -> bool:
    """Whether distances are added up without statistics being kept: up to 64 rows in the tail, where one follows
    another, and no wait for the chosen columns."""
    tail = estimator.where == "tail" and rows.shape[1] <= 64
    return tail and estimator.slashes == "sum" and estimator.overlap != "removed"


def _choose_lines(
    q: torch.Tensor,
    k: torch.Tensor,
    plans: Sequence[HeadPlan],
    online: list[int],
    lengths: tuple[int, ...],
    starts: tuple[int, ...],
    scale: float,
    rows: torch.Tensor,
    estimator: Sampling,
    tile: int,
    table: _Tables,
) -> None:
    """Columns, distances and windows of the vertical-slash heads `online`, written into `table`."""
    device, kv_len = q.device, k.shape[2]
    heads = device_ints(tuple(online), device)
    own = tuple(lengths[n] for n in online)
    sampled = triton_scores.norms(q, k, heads, rows, device_ints(starts, device), scale, estimator.statistic == "logit")
    by_max, removed = estimator.columns == "max", estimator.overlap == "removed"
    flags = torch.empty(len(online), kv_len, dtype=torch.uint8, device=device) if removed else None
    sink, vertical = [plans[n].sink for n in online], [plans[n].vertical for n in online]
    at_once = _at_once(rows, estimator)
    if at_once:
        column_score, score = triton_scores.tail(sampled, by_max)
    else:
        weight, column_score = triton_scores.weights(sampled, by_max)
    _choose(column_score, sink, vertical, own, heads, out=table.columns, flags=flags)
    if not at_once:
        score = triton_scores.distances(sampled, weight, estimator.slashes, flags)
    by_windows = [line for line, n in enumerate(online) if plans[n].windows]
    by_distance = [line for line, n in enumerate(online) if not plans[n].windows]
    if by_windows:
        _choose_windows(score, plans, online, by_windows, own, tile, table)
    if by_distance:
        pick = score if len(by_distance) == len(online) else score[device_ints(tuple(by_distance), device).long()]
        slashes = [plans[online[line]] for line in by_distance]
        own_here = tuple(own[line] for line in by_distance)
        rows_here = device_ints(tuple(online[line] for line in by_distance), device)
        chosen = torch.empty(len(by_distance), kv_len, dtype=torch.uint8, device=device)
        local, slash = [plan.local for plan in slashes], [plan.slash for plan in slashes]
        _choose(pick, local, slash, own_here, rows_here, flags=chosen)
        length_here = device_ints(own_here, device)
        windows = table.windows if tile > 1 else None
        triton_runs.write(chosen, length_here, rows_here, table.bands, table.band_count, windows, table.window_count)
    if by_windows and table.windows is not table.grid:
        at = device_ints(tuple(online[line] for line in by_windows), device).long()
        table.windows[at, : table.grid.shape[1]] = table.grid[at]
        table.window_count[at] = table.grid_count[at]


def _choose(
    score: torch.Tensor,
    forced: list[int],
    budget: list[int],
    lengths: tuple[int, ...],
    rows: torch.Tensor,
    out: torch.Tensor | None = None,
    flags: torch.Tensor | None = None,
) -> None:
    """The forced first positions and the best of the others, as lists in `out[rows]` or as bytes in `flags`."""
    first = tuple(min(f, n) for f, n in zip(forced, lengths, strict=True))
    total = tuple(min(max(b, f), n) for b, f, n in zip(budget, forced, lengths, strict=True))
    cut = triton_cut.cut_values(score, first, total, lengths)
    device = score.device
    triton_select.write(
        score,
        triton_select.SCORES,
        device_ints(lengths, device),
        rows,
        cut=cut,
        forced=device_ints(first, device),
        budget=device_ints(total, device),
        out=out,
        flags=flags,
    )


def _choose_windows(
    score: torch.Tensor,
    plans: Sequence[HeadPlan],
    online: list[int],
    lines: list[int],
    lengths: tuple[int, ...],
    tile: int,
    table: _Tables,
) -> None:
    """Whole windows of the grid by their mass; the nearest is always in and charged."""
    device = score.device
    own = tuple(lengths[line] for line in lines)
    at = device_ints(tuple(lines), device)
    # Windows that can hold a causal cell: offset - W + 1 <= length - 1.
    real = tuple(-(-(n + tile // 2 - 1) // tile) if tile > 1 else n for n in own)
    count = max(real)
    if tile > 1:
        mass = triton_pools.window_mass(score, at, device_ints(own, device), count)
    else:
        mass = score[at.long(), :count].contiguous()
    chosen = torch.zeros(len(lines), count, dtype=torch.uint8, device=device)
    _choose(mass, [1] * len(lines), [plans[online[line]].windows for line in lines], real, at, flags=chosen)
    first = nearest_window(tile)
    spread = torch.zeros(len(lines), first + tile * count, dtype=torch.uint8, device=device)
    spread[:, first::tile] = chosen
    rows = device_ints(tuple(online[line] for line in lines), device)
    span = device_ints((spread.shape[1],) * len(lines), device)
    triton_select.write(spread, triton_select.MARKS, span, rows, out=table.grid, count=table.grid_count)


def _sampled_rows(
    starts: tuple[int, ...], q_len: int, kv_len: int, estimator: Sampling, device: torch.device
) -> torch.Tensor:
    """int32 [B, r]: own positions of the sampled rows of each sequence, -1 where it has fewer."""
    picked = [
        sampled_rows(max(0, kv_len - start - q_len), kv_len - start, estimator) if kv_len > start else []
        for start in starts
    ]
    most = max(1, *(len(rows) for rows in picked))
    flat = tuple(row for rows in picked for row in [*rows, *[-1] * (most - len(rows))])
    return device_ints(flat, device).view(len(starts), most)


def _choose_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    plans: Sequence[HeadPlan],
    lengths: tuple[int, ...],
    starts: tuple[int, ...],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Block lists [NB, nbq, K], counts and slots: chosen online by mean-pooled scores (eq. 6), or fixed."""
    heads, kv_len, device = q.shape[1], k.shape[2], q.device
    listed = [n for n, plan in enumerate(plans) if plan.block_size]
    slots = [-1] * len(plans)
    for slot, n in enumerate(listed):
        slots[n] = slot
    rows = max((-(-kv_len // plans[n].block_size) for n in listed), default=0)
    fixed: dict[tuple[tuple[int, int, int], ...], list[int]] = {}
    for n in listed:
        if plans[n].blocks:
            lists = fixed_lists(plans[n].blocks, max(1, -(-lengths[n] // plans[n].block_size)))
            fixed.setdefault(lists, []).append(slots[n])
    online = [n for n in listed if not plans[n].blocks and plans[n].top_blocks and lengths[n] > 0]
    most = max((min(plans[n].top_blocks, -(-lengths[n] // plans[n].block_size)) for n in online), default=0)
    most = max([most, *(place + 1 for lists in fixed for _, place, _ in lists)])
    blocks = torch.full((len(listed), rows, most), PAD, dtype=torch.int32, device=device)
    count = torch.zeros(len(listed), rows, dtype=torch.int32, device=device)
    for lists, members in fixed.items():
        row, place, key = device_ints(tuple(v for entry in lists for v in entry), device).view(-1, 3).long().T
        lines = device_ints(tuple(members), device).long()
        blocks[lines[:, None], row, place] = key.int()
        count[lines] = (blocks[lines] < PAD).sum(-1, dtype=torch.int32)
    groups = sorted({(n // heads, plans[n].block_size, plans[n].top_blocks) for n in online})
    for sequence, size, budget in groups:
        members = [
            n for n in online if (n // heads, plans[n].block_size, plans[n].top_blocks) == (sequence, size, budget)
        ]
        _top_blocks(q, k, members, slots, starts, sequence, size, budget, scale, blocks, count)
    return blocks, count, tuple(slots)


def _top_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    members: list[int],
    slots: list[int],
    starts: tuple[int, ...],
    sequence: int,
    size: int,
    budget: int,
    scale: float,
    blocks: torch.Tensor,
    count: torch.Tensor,
) -> None:
    """The diagonal block and the best before it, `budget` in all, for heads of one sequence, size and budget."""
    device, heads, q_len, kv_len = q.device, q.shape[1], q.shape[2], k.shape[2]
    kv_heads = k.shape[1]
    length = kv_len - starts[sequence]
    side = -(-length // size)
    begin = device_ints(starts, device)
    of_query = device_ints(tuple(x for n in members for x in (n, sequence)), device).view(-1, 2)
    kv = tuple(sequence * kv_heads + n % heads // (heads // kv_heads) for n in members)
    kv_real = sorted(set(kv))
    of_key = device_ints(tuple(x for n in kv_real for x in (n, sequence)), device).view(-1, 2)
    width = -(-side // 16) * 16
    means_q = triton_pools.block_means(q, of_query, begin, kv_len, side, size)
    means_k = triton_pools.block_means(k, of_key, begin, kv_len, width, size)
    means_k = means_k[device_ints(tuple(kv_real.index(n) for n in kv), device).long()].transpose(-1, -2)
    lines = device_ints(tuple(slots[n] for n in members), device)
    # A few steps at least, since the scores of a step end at its last row.
    step = max(1, min(side, max(512, side // 8), _BLOCK_SCORES // (len(members) * width)))
    room = torch.empty(len(members) * step * width, device=device)
    for row in range(max(0, length - q_len) // size, side, step):
        stop = min(side, row + step)
        shape = (len(members), stop - row, -(-stop // 16) * 16)
        scores = room[: math.prod(shape)].view(shape)
        torch.bmm(means_q[:, row:stop], means_k[..., : shape[2]], out=scores)
        triton_rows.choose(scores, row, budget, scale, lines, blocks, count)

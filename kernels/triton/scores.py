"""Scores of the online index in Triton: sampled-row statistics per column and distance.

Sums run in float32 in a fixed order. Two passes over K: the sampled rows' log-sum-exp (or mean logit), then the
statistic itself, added up per column at once. Where the sampled rows follow one another, its tiles are added up along
their diagonals on the spot; else it is kept for the sampled rows (`[heads, rows, n]`, linear in the length) and a
third kernel adds it up. See `torch.index` for the meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from headscope.kernels.triton.common import (
    BARRIERS,
    SOFTMAX_FLOOR,
    base2,
    capability,
    check_contiguous,
    descriptor,
    pad_dim,
    precision,
    shared_room,
    stages_within,
)

SPLITS = 32

PROGRAMS = 1024
"""Programs that a pass over the keys of all heads is split into, as far as 16 tiles a program go."""

_TILE_BYTES = 64 * 128 * 4
"""Of a tile of statistics, float32."""


@triton.jit
def _sampled(q_ptr, rows_ptr, sequence, head, shift, at, rows_cap, q_len, D: tl.constexpr, WIDTH: tl.constexpr):
    """(own positions [64], q [64, WIDTH]) of sampled rows `at ..`; positions -1 where there are none."""
    place = at + tl.arange(0, 64)
    row = tl.load(rows_ptr + sequence * rows_cap + place, mask=place < rows_cap, other=-1)
    dim = tl.arange(0, WIDTH)
    source = (head.to(tl.int64) * q_len + tl.maximum(row - shift, 0))[:, None] * D + dim[None, :]
    return row, tl.load(q_ptr + source, mask=(row >= 0)[:, None] & (dim < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=("q_len", "kv_len", "heads", "group", "rows_cap", "tiles", "per_split", "row_chunks"))
def _norm_kernel(
    q_ptr,
    k_d,
    rows_ptr,
    heads_ptr,
    starts_ptr,
    top_ptr,
    total_ptr,
    q_len,
    kv_len,
    heads,
    group,
    rows_cap,
    tiles,
    per_split,
    row_chunks,
    scale,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    LOGIT: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One split of the keys: running maximum and sum of exponentials (base 2), or the sum of logits."""
    split, slot, chunk = tl.program_id(1), tl.program_id(0), tl.program_id(2)
    head = tl.load(heads_ptr + slot)
    sequence = head // heads
    start = tl.load(starts_ptr + sequence)
    row, q = _sampled(q_ptr, rows_ptr, sequence, head, kv_len - q_len - start, chunk * 64, rows_cap, q_len, D, WIDTH)
    kv_head = sequence * (heads // group) + head % heads // group
    top = tl.full([64], SOFTMAX_FLOOR, tl.float32)
    total = tl.zeros([64], tl.float32)
    last = tl.minimum((split + 1) * per_split, tl.max(row, 0) // 128 + 1)
    oldest = tl.min(row, 0)
    for tile in tl.range(split * per_split, last, num_stages=STAGES):
        k = k_d.load([kv_head, start + tile * 128, 0]).reshape([128, WIDTH])
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if oldest < tile * 128 + 127:
            hidden = 0.0 if LOGIT else float("-inf")
            scores = tl.where(row[:, None] >= (tile * 128 + tl.arange(0, 128))[None, :], scores, hidden)
        if LOGIT:
            total += tl.sum(scores * scale, 1)
        else:
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            total = total * tl.math.exp2(top - new_top) + tl.sum(tl.math.exp2(scores * scale - new_top[:, None]), 1)
            top = new_top
    out = ((slot * row_chunks + chunk) * tl.num_programs(1) + split) * 64 + tl.arange(0, 64)
    tl.store(top_ptr + out, top)
    tl.store(total_ptr + out, total)


@triton.jit
def _join(top_ptr, total_ptr, line, row, LOGIT: tl.constexpr, SPLITS: tl.constexpr):
    """Splits joined: log-sum-exp in base 2, or the mean logit, of 64 sampled rows."""
    place = line * SPLITS * 64 + tl.arange(0, SPLITS)[:, None] * 64 + tl.arange(0, 64)[None, :]
    total = tl.load(total_ptr + place)
    if LOGIT:
        return tl.sum(total, 0) / (tl.maximum(row, 0) + 1)
    else:
        top = tl.load(top_ptr + place)
        most = tl.max(top, 0)
        return most + tl.math.log2(tl.sum(total * tl.math.exp2(top - most[None, :]), 0))


@triton.jit(do_not_specialize=("q_len", "kv_len", "heads", "group", "rows_cap", "row_chunks", "tiles", "per_program"))
def _weights_kernel(
    q_ptr,
    k_d,
    rows_ptr,
    heads_ptr,
    starts_ptr,
    top_ptr,
    total_ptr,
    weight_ptr,
    column_ptr,
    q_len,
    kv_len,
    heads,
    group,
    rows_cap,
    row_chunks,
    span,
    tiles,
    per_program,
    scale,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    LOGIT: tl.constexpr,
    BY_MAX: tl.constexpr,
    SINGLE: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Tiles of columns of one head: the statistic of every sampled row, and its sum or maximum per column."""
    slot = tl.program_id(0)
    head = tl.load(heads_ptr + slot)
    sequence = head // heads
    start = tl.load(starts_ptr + sequence)
    kv_head = sequence * (heads // group) + head % heads // group
    shift = kv_len - q_len - start
    row, q = _sampled(q_ptr, rows_ptr, sequence, head, shift, 0, rows_cap, q_len, D, WIDTH)
    norm = _join(top_ptr, total_ptr, slot * row_chunks, row, LOGIT, SPLITS)
    first = tl.program_id(1) * per_program
    for tile in tl.range(first, tl.minimum(first + per_program, tiles), num_stages=STAGES):
        columns = tile * 128 + tl.arange(0, 128)
        k = k_d.load([kv_head, start + tile * 128, 0]).reshape([128, WIDTH])
        if SINGLE:
            weight = _statistic(row, q, k, norm, tile * 128, scale, LOGIT, PRECISION)
            _store_tile(weight_ptr, weight, slot.to(tl.int64) * tiles + tile, row_chunks, 0)
            best = _per_column(row, weight, BY_MAX)
        else:
            best = tl.full([128], float("-inf") if BY_MAX else 0.0, tl.float32)
            for chunk in tl.range(0, row_chunks, num_stages=STAGES):
                row, q = _sampled(q_ptr, rows_ptr, sequence, head, shift, chunk * 64, rows_cap, q_len, D, WIDTH)
                norm = _join(top_ptr, total_ptr, slot * row_chunks + chunk, row, LOGIT, SPLITS)
                weight = _statistic(row, q, k, norm, tile * 128, scale, LOGIT, PRECISION)
                _store_tile(weight_ptr, weight, slot.to(tl.int64) * tiles + tile, row_chunks, chunk)
                here = _per_column(row, weight, BY_MAX)
                best = tl.maximum(best, here) if BY_MAX else best + here
        tl.store(column_ptr + slot.to(tl.int64) * span + columns, best)


@triton.jit(do_not_specialize=("q_len", "kv_len", "heads", "group", "rows_cap", "span", "tiles", "per_program"))
def _tail_kernel(
    q_ptr,
    k_d,
    rows_ptr,
    heads_ptr,
    starts_ptr,
    top_ptr,
    total_ptr,
    column_ptr,
    distance_ptr,
    q_len,
    kv_len,
    heads,
    group,
    rows_cap,
    span,
    tiles,
    per_program,
    scale,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    LOGIT: tl.constexpr,
    BY_MAX: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores per column and per distance of up to 64 sampled rows that follow one another.

    Row i of a tile is reversed and turned by i, so that cells of one distance stand in one place u. Which column is
    read, for 4 columns instead of 128 (c is the tile's first column, R the first row):

        place u     0    1    2    3
        row 0       3    2    1    0         right of the bar (i <= u): distance R - c - 3 + u
        row 1       0 |  3    2    1         left of it       (i > u):  distance R - c + 1 + u
        row 2       1    0 |  3    2
        row 3       2    1    0 |  3

    Those left of the bar share their distances with those right of the bar in the tile before, so a program looks at
    one tile more than its own.
    """
    slot = tl.program_id(0)
    head = tl.load(heads_ptr + slot)
    sequence = head // heads
    start = tl.load(starts_ptr + sequence)
    kv_head = sequence * (heads // group) + head % heads // group
    row, q = _sampled(q_ptr, rows_ptr, sequence, head, kv_len - q_len - start, 0, rows_cap, q_len, D, WIDTH)
    norm = _join(top_ptr, total_ptr, slot, row, LOGIT, SPLITS)
    oldest = tl.load(rows_ptr + sequence * rows_cap)
    first = tl.program_id(1) * per_program
    last = tl.minimum(first + per_program, tiles)
    place = tl.arange(0, 128)
    # The turn is a gather through shared memory. Lanes and registers hold 8 places of 4 rows each, so that no two lanes
    # meet in a memory bank. What the bits of `entry` say of the row i and the place u that it reads for:
    #
    #     bit   12 | 11 10 9 8 | 7 6 5  |  4 3  | 2 1 0
    #     of    u6 |  i5 .. i2 | u5..u3 | i1 i0 | u2..u0
    entry = tl.arange(0, 8192)
    step = (entry >> 8 & 15) * 4 + (entry >> 3 & 3)
    spot = (entry >> 12) * 64 + (entry >> 5 & 7) * 8 + (entry & 7)
    column_of = step + 127 - spot & 127
    # The tile lies in pieces of 8 columns, each with all rows.
    source = (column_of >> 3) * 512 + step * 8 + (column_of & 7)
    line = slot.to(tl.int64) * span
    before = tl.zeros([128], tl.float32)
    for tile in tl.range(first, last + 1, num_stages=STAGES):
        columns = tile * 128 + place
        k = k_d.load([kv_head, start + tile * 128, 0]).reshape([128, WIDTH])
        weight = _statistic(row, q, k, norm, tile * 128, scale, LOGIT, PRECISION)
        tl.store(column_ptr + line + columns, _per_column(row, weight, BY_MAX), mask=columns < last * 128)
        turned = tl.gather(weight.reshape(64, 16, 8).permute(1, 0, 2).reshape(8192), source, 0)
        beyond = _over_rows(tl.where(step > spot, turned, 0.0).reshape(2, 16, 8, 4, 8), False)
        distance = oldest - tile * 128 + 1 + place
        own = (distance >= 0) & (distance < span) & ((tile > first) | (first == 0))
        tl.store(distance_ptr + line + distance, before + beyond, mask=own)
        before = _over_rows(tl.where(step <= spot, turned, 0.0).reshape(2, 16, 8, 4, 8), False)


@triton.jit
def _store_tile(weight_ptr, weight, tile, row_chunks, chunk):
    """A tile [64, 128] in one piece: rows of a whole line apart would all fall on the same memory channels."""
    place = tl.arange(0, 64)[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(weight_ptr + (tile * row_chunks + chunk) * 8192 + place, weight)


@triton.jit
def _statistic(row, q, k, norm, column, scale, LOGIT: tl.constexpr, PRECISION: tl.constexpr):
    """The statistic [64, 128] of the rows at columns `column ..`; 0 beyond the diagonal and in rows that are none."""
    weight = tl.dot(q, k.T, input_precision=PRECISION) * scale - norm[:, None]
    if LOGIT == 0:
        weight = tl.math.exp2(weight)
    if tl.min(row, 0) < column + 127:
        weight = tl.where(row[:, None] >= (column + tl.arange(0, 128))[None, :], weight, 0.0)
    return weight


@triton.jit
def _over_rows(spread, BY_MAX: tl.constexpr):
    """Sum or maximum [128] over the rows of an array in the order of the gathers here: [2, rows / 4, 8, 4, 8].

    place   u6          u5 u4 u3         u2 u1 u0
    row         i5..i2            i1 i0
                ^ within a thread  ^ over lanes
    """
    if BY_MAX:
        return tl.max(tl.max(spread, 1), 2).reshape(128)
    else:
        return tl.sum(tl.sum(spread, 1), 2).reshape(128)


@triton.jit
def _per_column(row, weight, BY_MAX: tl.constexpr):
    """Sum or maximum [128] over the rows. Rows 8 apart lie in one thread of the MMA's result:

        reshape(4, 2, 8, 128)     i5 i4 | i3 | i2 i1 i0 | column      over i3, within a thread

    The rest passes through shared memory, without two lanes in one bank, since a reduction over lanes would take
    several times the instructions. What the bits of `entry` say of the row i and the column c that it reads:

        bit   11 | 10 9  |  8 | 7 6 5  |  4 3  | 2 1 0
        of    c6 | i5 i4 | i2 | c5..c3 | i1 i0 | c2..c0
    """
    if BY_MAX:
        weight = tl.where((row >= 0)[:, None], weight, float("-inf"))
        part = tl.max(weight.reshape(4, 2, 8, 128), 1)
    else:
        part = tl.sum(weight.reshape(4, 2, 8, 128), 1)
    entry = tl.arange(0, 4096)
    row_of = (entry >> 9 & 3) * 1024 + ((entry >> 8 & 1) * 4 + (entry >> 3 & 3)) * 8
    column_of = ((entry >> 11) * 8 + (entry >> 5 & 7)) * 64 + (entry & 7)
    part = part.reshape(4, 8, 16, 8).permute(0, 2, 1, 3).reshape(4096)
    return _over_rows(tl.gather(part, row_of + column_of, 0).reshape(2, 8, 8, 4, 8), BY_MAX)


@triton.jit(do_not_specialize=("heads", "rows_cap", "row_chunks", "span", "flag_size"))
def _distances_kernel(
    weight_ptr,
    rows_ptr,
    heads_ptr,
    flag_ptr,
    out_ptr,
    heads,
    rows_cap,
    row_chunks,
    span,
    flag_size,
    MEAN: tl.constexpr,
    SHRUNK: tl.constexpr,
    REMOVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of the statistic per distance `row - column`, optionally without chosen columns, optionally per pair."""
    slot = tl.program_id(1)
    sequence = tl.load(heads_ptr + slot) // heads
    distance = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    step = tl.arange(0, 8)
    acc = tl.zeros([8, BLOCK], tl.float32)
    pairs = tl.zeros([8, BLOCK], tl.float32)
    sampled = 0.0
    base = slot.to(tl.int64) * (span // 128)
    for at in range(0, rows_cap, 8):
        number = at + step
        row = tl.load(rows_ptr + sequence * rows_cap + number, mask=number < rows_cap, other=-1)
        column = row[:, None] - distance[None, :]
        real = column >= 0
        place = (base + column // 128) * (row_chunks * 8192) + number[:, None] * 128 + column % 128
        weight = tl.load(weight_ptr + place, mask=real, other=0.0)
        if REMOVED:
            gone = tl.load(flag_ptr + slot.to(tl.int64) * flag_size + column, mask=real, other=1)
            weight = tl.where(gone > 0, 0.0, weight)
        acc += weight
        if MEAN:
            pairs += real.to(tl.float32)
            sampled += tl.sum((row >= 0).to(tl.float32), 0)
    total = tl.sum(acc, 0)
    if MEAN:
        count = tl.sum(pairs, 0)
        total = total / (count + sampled / 4 if SHRUNK else tl.maximum(count, 1.0))
    tl.store(out_ptr + slot.to(tl.int64) * span + distance, total, mask=distance < span)


def warps_for(generation: int) -> int:
    """Warps of the passes over K: where an MMA does not take its operands from shared memory, as it does from Hopper
    on, eight have too few registers each."""
    return 8 if generation >= 90 else 4


@dataclass(frozen=True)
class Stages:
    """Tiles of keys in flight: in the first pass over K, and in the second."""

    norms: int
    scores: int


def stages_for(width: int, element_size: int, room: int) -> Stages:
    """As many as fit `room` bytes of shared memory. Both passes keep the queries, the second also passes a tile of
    float32 statistics from thread to thread."""
    queries, keys = 64 * width * element_size, 128 * width * element_size
    return Stages(stages_within(room, 3, keys, queries), stages_within(room, 2, keys, queries + _TILE_BYTES))


def room_for_float32(width: int) -> int:
    """Bytes of shared memory that the MMAs of float32 heads up to 128 take at most, with one stage: those of the second
    pass over K in pieces of 64 rows, which hold two tiles of queries."""
    return 4 * width * (64 + 64 + 128) + _TILE_BYTES + BARRIERS


@dataclass(frozen=True)
class Sampled:
    """The rows of each head that are looked at, and how: the arguments that every kernel of the estimate shares.

    `heads` int32 [lines] says which head (of B * Hq) a line is, `rows` int32 [B, r] the own positions sampled (-1
    where a sequence has fewer). `top` and `total` [lines, chunks, splits, 64] are their norms, from `norms`.
    """

    q: torch.Tensor
    keys: TensorDescriptor
    rows: torch.Tensor
    heads: torch.Tensor
    starts: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor
    kv_len: int
    group: int
    unit: float
    logit: bool

    @property
    def tiles(self) -> int:
        return -(-self.kv_len // 128)

    @property
    def chunks(self) -> int:
        return -(-self.rows.shape[1] // 64)

    def _pointers(self) -> tuple[Any, ...]:
        return self.q, self.keys, self.rows, self.heads, self.starts, self.top, self.total

    def _sizes(self) -> tuple[int, ...]:
        return self.q.shape[2], self.kv_len, self.q.shape[1], self.group, self.rows.shape[1]

    def _constants(self) -> dict[str, Any]:
        dim = self.q.shape[-1]
        return {"D": dim, "WIDTH": pad_dim(dim), "LOGIT": self.logit, "PRECISION": precision(self.q.dtype)}

    @property
    def stages(self) -> Stages:
        return stages_for(pad_dim(self.q.shape[-1]), self.q.element_size(), shared_room(self.q.device))

    def _per_program(self) -> int:
        return max(1, min(16, self.tiles * self.heads.shape[0] // PROGRAMS))

    def _lines(self, *size: int) -> torch.Tensor:
        return torch.empty(self.heads.shape[0], *size, dtype=torch.float32, device=self.q.device)


def norms(
    q: torch.Tensor,
    k: torch.Tensor,
    heads: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    scale: float,
    logit: bool,
) -> Sampled:
    """The sampled rows with their log-sum-exps (or sums of logits), from a first pass over K.

    q [B, Hq, S, D], k [B, Hkv, T, D]. `ValueError` for a tensor that does not lie in one piece.
    """
    check_contiguous(q=q, k=k, heads=heads, rows=rows, starts=starts)
    lines, kv_len = heads.shape[0], k.shape[2]
    tiles, chunks = -(-kv_len // 128), -(-rows.shape[1] // 64)
    splits = min(SPLITS, triton.next_power_of_2(tiles))
    top = torch.empty(lines, chunks, splits, 64, dtype=torch.float32, device=q.device)
    sampled = Sampled(
        q,
        descriptor(k, 128, pad_dim(q.shape[-1])),
        rows,
        heads,
        starts,
        top,
        torch.empty_like(top),
        kv_len,
        q.shape[1] // k.shape[1],
        scale if logit else base2(scale),
        logit,
    )
    _norm_kernel[(lines, splits, chunks)](
        *sampled._pointers(),
        *sampled._sizes(),
        tiles,
        -(-tiles // splits),
        chunks,
        sampled.unit,
        **sampled._constants(),
        STAGES=sampled.stages.norms,
        num_warps=warps_for(capability(sampled.q.device)),
    )
    return sampled


def tail(sampled: Sampled, by_max: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores per column and sums per distance, float32 [lines, span], of up to 64 rows that follow one another;
    `span` is the keys rounded up to tiles of 128."""
    span = sampled.tiles * 128
    column, distance = sampled._lines(span), sampled._lines(span).zero_()
    per_program = sampled._per_program()
    _tail_kernel[(column.shape[0], -(-sampled.tiles // per_program))](
        *sampled._pointers(),
        column,
        distance,
        *sampled._sizes(),
        span,
        sampled.tiles,
        per_program,
        sampled.unit,
        **sampled._constants(),
        BY_MAX=by_max,
        SPLITS=sampled.top.shape[2],
        STAGES=sampled.stages.scores,
        num_warps=warps_for(capability(sampled.q.device)),
    )
    return column, distance


def weights(sampled: Sampled, by_max: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The statistic of the sampled rows, float32 [lines, tiles, rows, 128], and its score per column [lines, span]."""
    tiles, chunks = sampled.tiles, sampled.chunks
    weight, column = sampled._lines(tiles, chunks * 64, 128), sampled._lines(tiles * 128)
    per_program = sampled._per_program()
    _weights_kernel[(column.shape[0], -(-tiles // per_program))](
        *sampled._pointers(),
        weight,
        column,
        *sampled._sizes(),
        chunks,
        tiles * 128,
        tiles,
        per_program,
        sampled.unit,
        **sampled._constants(),
        BY_MAX=by_max,
        SINGLE=chunks == 1,
        SPLITS=sampled.top.shape[2],
        STAGES=sampled.stages.scores,
        num_warps=4,
    )
    return weight, column


def distances(sampled: Sampled, weight: torch.Tensor, how: str, chosen: torch.Tensor | None) -> torch.Tensor:
    """float32 [lines, span]: the statistic per distance; `chosen` uint8 [lines, T] columns are left out."""
    rows, span = sampled.rows, sampled.tiles * 128
    out = sampled._lines(span)
    _distances_kernel[(-(-span // 256), out.shape[0])](
        weight,
        rows,
        sampled.heads,
        rows if chosen is None else chosen,
        out,
        sampled.q.shape[1],
        rows.shape[1],
        sampled.chunks,
        span,
        0 if chosen is None else chosen.shape[1],
        MEAN=how != "sum",
        SHRUNK=how == "shrunk",
        REMOVED=chosen is not None,
        BLOCK=256,
        num_warps=4,
    )
    return out

"""Pooled maps of attention probability for Hopper (sm_90a), in Gluon: exact sums over a grid, in a fixed order.

`exp(score - lse)` needs one MMA per tile and no second pass. A program holds 64 * GROUPS query rows and walks
over the keys, so that each row block meets the pools of keys one after another: the sum of a pool is complete when
its last key has passed. A pool of rows is made of several row blocks. A row block that lies in two such pools writes
two partial sums per warp, any other one; `_reduce_kernel` adds them in order of rows. No atomics: the same bits every
time.

Pools must be at least as large as a tile (64 rows by 128 keys); smaller ones are Triton's, see `pooled_refusal`.
"""

# mypy: ignore-errors
# Gluon kernels are compiled by Triton: their annotations are compile-time markers, not Python types.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headscope.kernels.cells.inputs import check_pools
from headscope.kernels.gluon.attention import check_inputs, descriptor, rows3d
from headscope.kernels.gluon.compat import tma_load
from headscope.kernels.gluon.queue import next_stage
from headscope.kernels.triton.common import LOG2E, base2, check_lse, device_ints

# fmt: off
# Kernels take dozens of arguments: one a line would hide the few lines that compute.

KEYS = 128
_KEYS = gl.constexpr(KEYS)

GROUPS = {64: 4, 128: 4, 256: 2}
STAGES = {64: 4, 128: 3, 256: 2}
REGISTERS = {2: 200, 4: 112}

_SCRATCH = 2**26
"""Partial sums held at a time: 256 MiB."""


class Shared(NamedTuple):
    """What all warpgroups see: tiles of Q and K, and their barriers."""

    q: Any
    k: Any
    q_full: Any
    full: Any
    empty: Any


class Spans(NamedTuple):
    """Own rows `row0 .. row1 - 1` in `row_pools` pools by own keys `key0 .. key1 - 1` in `key_pools` pools."""

    row0: Any
    row1: Any
    row_pools: Any
    key0: Any
    key1: Any
    key_pools: Any


@gluon.jit
def _load(q_d, k_d, shared, head, kv_head, row, key, tiles, D: gl.constexpr, STAGES: gl.constexpr,
          GROUPS: gl.constexpr):
    mbarrier.expect(shared.q_full, GROUPS * 64 * D * 2)
    for g in gl.static_range(GROUPS):
        tma_load(q_d, [head, row + g * 64, 0], shared.q_full, shared.q.index(g))
    stage = 0
    phase = 1
    for i in range(tiles):
        mbarrier.wait(shared.empty.index(stage), phase)
        mbarrier.expect(shared.full.index(stage), _KEYS * D * 2)
        tma_load(k_d, [kv_head, key + i * _KEYS, 0], shared.full.index(stage), shared.k.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _edge(first_row, span, pools, pool):
    """First row of a pool of rows."""
    return first_row + (span.to(gl.int64) * pool // pools).to(gl.int32)


@gluon.jit
def _thread_sums(weights):
    """[64, KEYS] to [64, 4]: what each of a row's four threads holds, added up in two chains.

        key     0  1 | 2  3 | 4  5 | 6  7 | 8  9 | 10 11 | ...      key = 8 b + 2 c + d
        thread   0   |  1   |  2   |  3   |  0   |   1   | ...      sums over b and d stay with thread c

    """
    return gl.sum(gl.sum(weights.reshape([64, _KEYS // 8, 4, 2]), 1), 2)


@gluon.jit
def _add(sums, scores, key, key_edge, key1, r0, rows, cols, lse, scale):
    """The sums [64, 4] with those of a tile's cells before `key_edge` added, and the sums of its cells from there on.

    Exponentials bound this kernel: the usual tile has a block without a branch, in which the compiler puts additions
    between them.
    """
    late = gl.zeros_like(sums)
    masked = (key + _KEYS - 1 > r0) | (key + _KEYS > key1)
    if masked | (key_edge < key + _KEYS):
        keys = key + cols
        if masked:
            scores = gl.where((rows[:, None] >= keys[None, :]) & (keys < key1)[None, :], scores, float("-inf"))
        weights = gl.exp2(scores * scale - lse[:, None])
        early = gl.where(keys < key_edge, 1.0, 0.0)[None, :]
        sums += _thread_sums(weights * early)
        late += _thread_sums(weights * (1.0 - early))
    else:
        sums += _thread_sums(gl.exp2(scores * scale - lse[:, None]))
    return sums, late


@gluon.jit
def _store(at, sums):
    """Writes the sum over each warp's 16 rows, of which a thread holds two, 8 apart: row 16 w + 8 h + r of thread c.

        reshape([4, 2, 8, 4])   w h r c      sum over h, within a thread
        reshape([4, 32])        w (r c)      sum over the warp's 32 lanes

    """
    warps = gl.sum(gl.sum(sums.reshape([4, 2, 8, 4]), 1).reshape([4, 32]), 1)
    gl.store(at + gl.arange(0, 4, warps.type.layout), warps)


@gluon.jit
def _flush(at, sums, upper, split):
    """Writes the sums of a pool of keys; where the rows lie in two pools, `split`, those of the `upper` rows apart."""
    if split:
        _store(at, gl.where(upper, sums, 0.0))
        _store(at + 4, gl.where(upper, 0.0, sums))
    else:
        _store(at, sums)


@gluon.jit
def _sum(shared, lse_ptr, part_ptr, spans, item_row, first_row, q_len, tiles, scale, G: gl.constexpr, D: gl.constexpr,
         STAGES: gl.constexpr):
    row0, row1, row_pools, key0, key1, key_pools = spans
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _KEYS, 16])
    r0 = item_row + G * 64
    rows = r0 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    cols = gl.arange(0, _KEYS, gl.SliceLayout(0, SCORES))
    real = (rows >= row0) & (rows < row1) & (rows >= first_row) & (rows < first_row + q_len)
    lse = gl.load(lse_ptr + (rows - first_row), mask=real, other=float("inf")) * LOG2E
    lse = gl.where(lse > float("-inf"), lse, float("inf"))
    # Where the pool of the first row that counts ends.
    at = gl.maximum(r0, row0) - row0
    row_pool = (at.to(gl.int64) * row_pools // (row1 - row0)).to(gl.int32)
    row_edge = _edge(row0, row1 - row0, row_pools, row_pool + 1)
    if row_edge <= row0 + at:
        row_edge = _edge(row0, row1 - row0, row_pools, row_pool + 2)
    zero = gl.zeros([64, _KEYS], gl.float32, SCORES)
    sums = _thread_sums(zero)
    upper = (gl.convert_layout(rows, gl.SliceLayout(1, sums.type.layout)) < row_edge)[:, None]
    split = row_edge < r0 + 64
    # Where the pool of keys ends that is being summed: pools are `width` keys or, each time `rest` is full, one more.
    width = (key1 - key0) // key_pools
    over = (key1 - key0) % key_pools
    key_edge = key0 + width
    rest = over
    part_ptr += G * key_pools * 8
    mbarrier.wait(shared.q_full, 0)
    q = shared.q.index(G).reshape([64, D])
    stage = 0
    phase = 0
    for i in range(tiles):
        key = key0 + i * _KEYS
        mbarrier.wait(shared.full.index(stage), phase)
        keys = shared.k.index(stage).reshape([_KEYS, D])
        scores_t = warpgroup_mma(q, keys.permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores_t])
        mbarrier.arrive(shared.empty.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)
        sums, late = _add(sums, scores, key, key_edge, key1, r0, rows, cols, lse, scale)
        if key_edge <= key + _KEYS:
            _flush(part_ptr, sums, upper, split)
            part_ptr += 8
            sums = late
            rest += over
            longer = (rest >= key_pools).to(gl.int32)
            rest -= longer * key_pools
            key_edge += width + longer
    # The last pool may go on beyond the tiles. It began `width` keys before its end, or one more if `rest` has wrapped.
    if key_edge - width - (rest < over).to(gl.int32) < gl.minimum(key0 + tiles * _KEYS, key1):
        _flush(part_ptr, sums, upper, split)


@gluon.jit(do_not_specialize=[
    "q_len", "kv_len", "heads_per_sequence", "group", "first_head", "row_blocks", "row0", "row1", "row_pools",
    "key0", "key1", "key_pools",
])
def mass_kernel(q_d, k_d, lse_ptr, starts_ptr, part_ptr, scale, q_len, kv_len, heads_per_sequence, group, first_head,
                row_blocks, row0, row1, row_pools, key0, key1, key_pools, D: gl.constexpr,
                STAGES: gl.constexpr, GROUPS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr):
    """Grid (heads * row_blocks,) over `heads` heads from first_head on, longest row blocks first.

    `part` [heads, row_blocks * GROUPS, key_pools, 2, 4]: partial sums of each 64 rows, one a warp. Written are pools of
    keys that begin before the end of the program's tiles, and the second of the two sums where a pool of rows begins
    inside the 64. `scale` times log2(e).
    """
    BM: gl.constexpr = 64 * GROUPS
    pid = gl.program_id(0)
    block = row_blocks - 1 - pid % row_blocks
    at_head = pid // row_blocks
    head = first_head + at_head
    start = gl.load(starts_ptr + head // heads_per_sequence)
    first_row = kv_len - q_len - start
    item_row = (row0 // BM + block) * BM
    tiles = gl.maximum(gl.cdiv(gl.minimum(key1, item_row + BM) - key0, _KEYS), 1)
    lse_ptr += head.to(gl.int64) * q_len
    part_ptr += (at_head.to(gl.int64) * row_blocks + block) * GROUPS * key_pools * 8
    q_s = gl.allocate_shared_memory(q_d.dtype, [GROUPS, 1, 64, D], q_d.layout)
    k_s = gl.allocate_shared_memory(k_d.dtype, [STAGES, 1, _KEYS, D], k_d.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()  # the copy engine must see the barriers before the first load names one
    shared = Shared(q_s, k_s, q_full, full, empty)
    spans = Spans(row0, row1, row_pools, key0, key1, key_pools)
    if GROUPS == 4:
        gl.warp_specialize([
            (_sum, (shared, lse_ptr, part_ptr, spans, item_row, first_row, q_len, tiles, scale, 0, D, STAGES)),
            (_sum, (shared, lse_ptr, part_ptr, spans, item_row, first_row, q_len, tiles, scale, 1, D, STAGES)),
            (_sum, (shared, lse_ptr, part_ptr, spans, item_row, first_row, q_len, tiles, scale, 2, D, STAGES)),
            (_sum, (shared, lse_ptr, part_ptr, spans, item_row, first_row, q_len, tiles, scale, 3, D, STAGES)),
            (_load, (q_d, k_d, shared, head, head // group, item_row - first_row, start + key0, tiles, D, STAGES,
                     GROUPS)),
        ], [4, 4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, CONSUMER_REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_sum, (shared, lse_ptr, part_ptr, spans, item_row, first_row, q_len, tiles, scale, 0, D, STAGES)),
            (_sum, (shared, lse_ptr, part_ptr, spans, item_row, first_row, q_len, tiles, scale, 1, D, STAGES)),
            (_load, (q_d, k_d, shared, head, head // group, item_row - first_row, start + key0, tiles, D, STAGES,
                     GROUPS)),
        ], [4, 1], [CONSUMER_REGISTERS, 24])


@triton.jit(do_not_specialize=["row0", "row1", "row_pools", "key0", "key1", "key_pools", "row_blocks"])
def _reduce_kernel(part_ptr, out_ptr, row0, row1, row_pools, key0, key1, key_pools, row_blocks,
                   GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """One pool of rows and WIDTH pools of keys of one head: adds the row blocks' partial sums from the first on."""
    pool = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    keys = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    span = (row1 - row0).to(tl.int64)
    begin = row0 + (span * pool // row_pools).to(tl.int32)
    end = row0 + (span * (pool + 1) // row_pools).to(tl.int32)
    origin = row0 // (64 * GROUPS) * GROUPS
    key_edge = key0 + ((key1 - key0).to(tl.int64) * keys // key_pools).to(tl.int32)
    lane = tl.arange(0, 4)
    total = tl.zeros([WIDTH], tl.float32)
    for block in range(begin // 64, (end + 63) // 64):
        # The row block's first partial sum belongs to the pool of its first row that counts.
        late = (tl.maximum(block * 64, row0) < begin).to(tl.int32)
        reach = tl.minimum(key1, (block // GROUPS + 1) * GROUPS * 64)
        reach = tl.minimum(key0 + tl.maximum(tl.cdiv(reach - key0, 128), 1) * 128, key1)
        at = ((head * row_blocks * GROUPS + block - origin) * key_pools + keys) * 8 + late * 4
        met = (keys < key_pools) & (key_edge < reach)
        total += tl.sum(tl.load(part_ptr + at[:, None] + lane[None, :], mask=met[:, None], other=0.0), 1)
    out = (head * row_pools + pool) * key_pools + keys
    tl.store(out_ptr + out, total, mask=keys < key_pools)


def pooled_refusal(rows: tuple[int, int], cols: tuple[int, int], shape: tuple[int, int]) -> str | None:
    """Why this grid cannot be served, or None: pools must be no smaller than a tile."""
    if rows[1] - rows[0] < 64 * shape[0] or cols[1] - cols[0] < KEYS * shape[1]:
        return f"the Gluon map needs pools of 64 rows by {KEYS} keys or more, got {shape} pools of {rows} x {cols}"
    return None


def pooled(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    starts: tuple[int, ...],
    rows: tuple[int, int],
    cols: tuple[int, int],
    shape: tuple[int, int],
) -> torch.Tensor:
    """float32 [B, Hq, shape]: dense probability summed per pool of own rows x own keys; see `torch.mass.pooled`.

    `lse` [B, Hq, S] is the dense pass's. q and k are copied where they do not lie in one piece. `ValueError` for inputs
    that do not fit each other, and where `pooled_refusal` gives a reason.
    """
    check_inputs(q, k, None, scale, starts)
    check_pools(rows, cols, shape, k.shape[2])
    if reason := pooled_refusal(rows, cols, shape):
        raise ValueError(reason)
    batch, heads, q_len, dim = q.shape
    groups, kv_len = GROUPS[dim], k.shape[2]
    q_d, k_d = descriptor(rows3d(q), 64, dim), descriptor(rows3d(k), KEYS, dim)
    lse, out = check_lse(lse, q), torch.empty(batch * heads, *shape, dtype=torch.float32, device=q.device)
    row_blocks = -(-rows[1] // (64 * groups)) - rows[0] // (64 * groups)
    per_head = row_blocks * groups * shape[1] * 8
    chunk = max(1, min(batch * heads, _SCRATCH // per_head))
    part = torch.empty(chunk * per_head, dtype=torch.float32, device=q.device)
    for head in range(0, batch * heads, chunk):
        count = min(chunk, batch * heads - head)
        mass_kernel[(count * row_blocks,)](
            q_d, k_d, lse, device_ints(starts, q.device), part, base2(scale), q_len, kv_len, heads,
            heads // k.shape[1], head, row_blocks, *rows, shape[0], *cols, shape[1],
            D=dim, STAGES=STAGES[dim], GROUPS=groups, CONSUMER_REGISTERS=REGISTERS[groups],
            num_warps=4, enable_fp_fusion=True,
        )
        _reduce_kernel[(-(-shape[1] // 64), shape[0], count)](
            part, out[head:], *rows, shape[0], *cols, shape[1], row_blocks, GROUPS=groups, WIDTH=64, num_warps=4
        )
    return out.view(batch, heads, *shape)

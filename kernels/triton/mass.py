"""Exact sums of attention probability in Triton: maps per tile; and cell counts per tile.

Two steps, both in a fixed order of additions, so results repeat bit for bit. First one program per (head, pooled
row, 128 columns) walks the rows of its pooled row and keeps a tile of sums in registers; then the columns of each
pool are added up. Scratch is linear in the length and bounded; heads and pooled rows go in chunks that fit it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headscope.kernels.cells.inputs import check_layout, check_pools, packed
from headscope.kernels.cells.layout import Layout
from headscope.kernels.triton.common import (
    LOG2E,
    TILES,
    base2,
    check_inputs,
    check_lse,
    descriptor,
    device_ints,
    pad_dim,
    precision,
    shared_room,
    stages_within,
    steps_for,
)
from headscope.kernels.triton.cover import BAND, COLUMN, COVER_SHIFT, WINDOW, make_cover

SCRATCH = 2**26
"""Floats of scratch: 256 MiB."""

_MOST_PROGRAMS = 65_535
"""Most programs along the second and third axis of a CUDA grid."""


@triton.jit
def probability(q_d, k, lse_ptr, head, rows, local, q_len, scale, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """exp(score - lse) of 64 rows from local row `local` on; rows outside or without a key give 0."""
    q = q_d.load([head, local, 0]).reshape([64, WIDTH])
    place = local + tl.arange(0, 64)
    real = (place >= 0) & (place < q_len)
    lse = tl.load(lse_ptr + head.to(tl.int64) * q_len + place, mask=real, other=float("inf"))
    lse = tl.where(lse > float("-inf"), lse, float("inf"))
    return tl.math.exp2(tl.dot(q, k.T, input_precision=PRECISION) * scale - lse[:, None] * LOG2E)


@triton.jit
def _inside(
    rows,
    columns,
    cover_ptr,
    blocks_ptr,
    block_count_ptr,
    slot,
    size,
    block_rows,
    block_cap,
    block_steps,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Cells [64, C] of a layout among causal ones, as bool; see `cover.py` for `cover`."""
    distance = rows[:, None] - columns[None, :]
    causal = (distance >= 0) & (columns >= 0)[None, :]
    kept = tl.load(cover_ptr + COVER_SHIFT + distance, mask=causal, other=0).to(tl.int32) & BAND
    if TILE == 128:
        offset = (rows // 64 * 64)[:, None] - columns[None, :]
        kept |= tl.load(cover_ptr + COVER_SHIFT + offset, mask=causal, other=0).to(tl.int32) & WINDOW
    newest = tl.max(rows, 0)
    inside = (columns >= 0) & (columns <= newest)
    chosen = tl.load(cover_ptr + COVER_SHIFT + columns, mask=inside, other=0).to(tl.int32) & COLUMN
    kept |= chosen[None, :]
    if BLOCKS:  # noqa: SIM102
        if slot >= 0:
            line = slot.to(tl.int64) * block_rows + tl.minimum(rows // size, block_rows - 1)
            count = tl.load(block_count_ptr + line)
            key = (columns // size)[None, :]
            low = tl.zeros_like(distance)
            high = low + count[:, None]
            for _step in range(block_steps):
                middle = (low + high) // 2
                open_ = (low < high) & causal
                listed = tl.load(blocks_ptr + line[:, None] * block_cap + middle, mask=open_, other=0)
                low = tl.where(open_ & (listed < key), middle + 1, low)
                high = tl.where(open_ & (listed >= key), middle, high)
            at = tl.load(blocks_ptr + line[:, None] * block_cap + low, mask=causal & (low < count[:, None]), other=-1)
            kept |= (at == key).to(tl.int32)
    return (kept > 0) & causal


@triton.jit(
    do_not_specialize=(
        "q_len",
        "kv_len",
        "heads",
        "group",
        "first_head",
        "first_pool",
        "row0",
        "row1",
        "pools",
        "col0",
        "col1",
        "pool_rows",
        "span",
        "cover_cap",
        "block_rows",
        "block_cap",
        "block_steps",
    )
)
def _rows_kernel(
    q_d,
    k_d,
    lse_ptr,
    out_ptr,
    starts_ptr,
    cover_ptr,
    blocks_ptr,
    block_count_ptr,
    slot_ptr,
    size_ptr,
    q_len,
    kv_len,
    heads,
    group,
    scale,
    first_head,
    first_pool,
    row0,
    row1,
    pools,
    col0,
    col1,
    pool_rows,
    span,
    cover_cap,
    block_rows,
    block_cap,
    block_steps,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCKS: tl.constexpr,
    COUNT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sums over the rows of one pooled row, per column: out [heads of this chunk, pooled rows of this chunk, span]."""
    tile = tl.program_id(0)
    pool = first_pool + tl.program_id(1)
    head = first_head + tl.program_id(2)
    sequence = head // heads
    start = tl.load(starts_ptr + sequence)
    first_row = kv_len - q_len - start
    length = kv_len - start
    wide = (row1 - row0).to(tl.int64)
    low = row0 + (wide * pool // pools).to(tl.int32)
    high = tl.minimum(row0 + (wide * (pool + 1) // pools).to(tl.int32), length)
    column0 = col0 + tile * 128
    low = tl.maximum(tl.maximum(low, first_row), tl.maximum(column0, 0))
    lane = tl.arange(0, 64)
    columns = column0 + tl.arange(0, 128)
    acc = tl.zeros([64, 128], tl.float32)
    slot = tl.load(slot_ptr + head)
    size = tl.maximum(tl.load(size_ptr + head), 1)
    cover_ptr += head.to(tl.int64) * cover_cap
    kv_head = sequence * (heads // group) + head % heads // group
    if COUNT == 0:
        k = k_d.load([kv_head, start + column0, 0]).reshape([128, WIDTH])
    for row in range(low, high, 64):
        rows = row + lane
        keep = (rows[:, None] >= columns[None, :]) & ((rows < high)[:, None] & (columns < col1)[None, :])
        if LAYOUT:
            keep = keep & _inside(
                rows,
                columns,
                cover_ptr,
                blocks_ptr,
                block_count_ptr,
                slot,
                size,
                block_rows,
                block_cap,
                block_steps,
                TILE,
                BLOCKS,
            )
        if COUNT:
            acc += keep.to(tl.float32)
        else:
            weight = probability(q_d, k, lse_ptr, head, rows, row - first_row, q_len, scale, WIDTH, PRECISION)
            acc += tl.where(keep, weight, 0.0)
    line = (tl.program_id(2).to(tl.int64) * pool_rows + tl.program_id(1)) * span
    place = tile * 128 + tl.arange(0, 128)
    tl.store(out_ptr + line + place, tl.sum(acc, 0), mask=place < span)


@triton.jit(do_not_specialize=("span", "width", "pools", "pool_rows", "first_pool", "all_rows", "most"))
def _columns_kernel(in_ptr, out_ptr, span, width, pools, pool_rows, first_pool, all_rows, most):
    """Adds up the columns of each pool: out [heads of this chunk, all pooled rows, pools], 64 pools a program."""
    pool = tl.program_id(0) * 64 + tl.arange(0, 64)
    row, head = tl.program_id(1), tl.program_id(2)
    low = (pool.to(tl.int64) * width // pools).to(tl.int32)
    high = ((pool.to(tl.int64) + 1) * width // pools).to(tl.int32)
    step = tl.arange(0, 16)
    line = (head.to(tl.int64) * pool_rows + row) * span
    acc = tl.zeros([64, 16], tl.float32)
    for at in range(0, most, 16):
        place = low[:, None] + at + step[None, :]
        acc += tl.load(in_ptr + line + place, mask=(place < high[:, None]) & (pool < pools)[:, None], other=0.0)
    out = (head.to(tl.int64) * all_rows + first_pool + row) * pools + pool
    tl.store(out_ptr + out, tl.sum(acc, 1), mask=pool < pools)


@dataclass(frozen=True)
class Launch:
    """Warps, and tiles in flight: of queries in the rows kernel, of queries and keys in the diagonals kernel."""

    warps: int
    rows: int
    diagonals: int


def launch_for(width: int, element_size: int, room: int) -> Launch:
    """With stages that fit `room` bytes of shared memory. The rows kernel keeps its keys and, in float32, one tile of
    queries more."""
    queries, keys = 64 * width * element_size, 128 * width * element_size
    warps, kept = (8, keys + queries) if element_size == 4 else (4, keys)
    return Launch(warps, stages_within(room, 3, queries, kept), stages_within(room, 3, queries + keys))


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
    """float32 [B, Hq, shape]: probability per tile of own rows x columns, cut into `shape` pools; see `torch.mass`.

    q and k are copied where they do not lie in one piece. `ValueError` for inputs that do not fit each other or that
    this path does not serve, and for a layout of a tile other than 128 or 1.
    """
    check_inputs(q, k, None, scale, starts)
    if layout is not None:
        check_layout(layout, q, k)
    return _pool(packed(q), packed(k), check_lse(lse, q), scale, starts, rows, cols, shape, layout)


def coverage(layout: Layout, rows: tuple[int, int], cols: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    """float32 [B, Hq, shape]: how many cells of each tile the layout holds. `ValueError` for spans that `shape` cannot
    cut."""
    device = layout.device
    q = torch.empty(layout.batch, layout.heads, layout.q_len, 16, dtype=torch.float16, device=device)
    k = torch.empty(layout.batch, 1, layout.kv_len, 16, dtype=torch.float16, device=device)
    lse = torch.empty(0, dtype=torch.float32, device=device)
    return _pool(q, k, lse, 1.0, layout.starts, rows, cols, shape, layout, count=True)


def _pool(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    starts: tuple[int, ...],
    rows: tuple[int, int],
    cols: tuple[int, int],
    shape: tuple[int, int],
    layout: Layout | None,
    count: bool = False,
) -> torch.Tensor:
    check_pools(rows, cols, shape, k.shape[2])
    if layout is not None and layout.tile not in TILES:
        raise ValueError(f"impl='triton' serves tile 128 or 1, got tile = {layout.tile}")
    batch, heads, q_len, head_dim = q.shape
    kv_len, width = k.shape[2], pad_dim(head_dim)
    out = torch.empty(batch, heads, *shape, dtype=torch.float32, device=q.device)
    tiles = -(-(cols[1] - cols[0]) // 128)
    span = tiles * 128
    pool_chunk = max(1, min(shape[0], SCRATCH // span, _MOST_PROGRAMS))
    head_chunk = max(1, min(batch * heads, SCRATCH // (span * pool_chunk), _MOST_PROGRAMS))
    scratch = torch.empty(head_chunk, pool_chunk, span, dtype=torch.float32, device=q.device)
    most = max(1, -(-(cols[1] - cols[0]) // shape[1]) + 1)
    cells = CellTables(layout, batch * heads, q.device)
    q_d, k_d = descriptor(q, 64, width), descriptor(k, 128, width)
    use = launch_for(width, q.element_size(), shared_room(q.device))
    for head in range(0, batch * heads, head_chunk):
        for pool in range(0, shape[0], pool_chunk):
            n_heads, n_pools = min(head_chunk, batch * heads - head), min(pool_chunk, shape[0] - pool)
            _rows_kernel[(tiles, n_pools, n_heads)](
                q_d,
                k_d,
                lse,
                scratch,
                device_ints(starts, q.device),
                *cells.pointers,
                q_len,
                kv_len,
                heads,
                heads // k.shape[1],
                base2(scale),
                head,
                pool,
                rows[0],
                rows[1],
                shape[0],
                cols[0],
                cols[1],
                pool_chunk,
                span,
                *cells.sizes,
                WIDTH=width,
                TILE=layout.tile if layout else 128,
                LAYOUT=layout is not None,
                BLOCKS=cells.blocks,
                COUNT=count,
                PRECISION=precision(q.dtype),
                num_warps=use.warps,
                num_stages=use.rows,
            )
            _columns_kernel[(-(-shape[1] // 64), n_pools, n_heads)](
                scratch,
                out.view(-1, *shape)[head:],
                span,
                cols[1] - cols[0],
                shape[1],
                pool_chunk,
                pool,
                shape[0],
                most,
                num_warps=4,
            )
    return out


class CellTables:
    """Kernel arguments that say which cells a layout holds; empty tables without one."""

    def __init__(self, layout: Layout | None, count: int, device: torch.device) -> None:
        none = torch.empty(0, dtype=torch.int32, device=device)
        slots, sizes = (-1,) * count, (0,) * count
        if layout is None:
            self.pointers = (none, none, none, device_ints(slots, device), device_ints(sizes, device))
            self.sizes, self.blocks = (0, 0, 0, 0), False
            return
        cover = make_cover(layout)
        self.blocks = layout.blocks.numel() > 0
        self.pointers = (
            cover,
            layout.blocks,
            layout.block_count,
            device_ints(layout.block_slot, device),
            device_ints(layout.block_size, device),
        )
        self.sizes = (cover.shape[1], layout.blocks.shape[1], layout.blocks.shape[2], steps_for(layout.blocks.shape[2]))


def column_sums(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, scale: float, starts: tuple[int, ...]
) -> torch.Tensor:
    """float32 [B, Hq, T]: the first step of `pooled` with one pooled row that holds every row."""
    batch, heads, q_len, head_dim = q.shape
    kv_len, width = k.shape[2], pad_dim(head_dim)
    out = torch.empty(batch, heads, kv_len, dtype=torch.float32, device=q.device)
    cells, use = CellTables(None, batch * heads, q.device), launch_for(width, q.element_size(), shared_room(q.device))
    _rows_kernel[(-(-kv_len // 128), 1, batch * heads)](
        descriptor(q, 64, width),
        descriptor(k, 128, width),
        lse,
        out,
        device_ints(starts, q.device),
        *cells.pointers,
        q_len,
        kv_len,
        heads,
        heads // k.shape[1],
        base2(scale),
        0,
        0,
        0,
        kv_len,
        1,
        0,
        kv_len,
        1,
        kv_len,
        *cells.sizes,
        WIDTH=width,
        TILE=128,
        LAYOUT=False,
        BLOCKS=False,
        COUNT=False,
        PRECISION=precision(q.dtype),
        num_warps=use.warps,
        num_stages=use.rows,
    )
    return out
